"""Four scores that need no gradient, and stand in every table: what gradients can't beat isn't worth their cost.

    bm25(q, n)       = sum over distinct terms t of q:  tf_q(t) idf(t) tf_n(t) (k+1) / (tf_n(t) + k (1 - b + b |n| / mean |n|))
                       idf(t) = ln(1 + (N - df(t) + 1/2) / (df(t) + 1/2))
    embedding(q, n)  = cosine of mean last hidden states of the model, less their mean over records
    entropy(q, n)    = bits per token of n under bigrams of the *other* records; the same for every query
    random(q, n)     = a standard normal draw

BM25 on a leaderboard of language-model attribution stands above gradient cosine and an ensemble of eight
TRAK models (bergson 2.5.1), which nobody who shows gradient methods alone would learn.

A term is a token, or a run of tokens (`ngrams`), or what stands between separators (`words`): of a
vocabulary of single characters, tokens say nothing and words do.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework", 2009, with the idf of Lucene.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from valuation.errors import GradientError
from valuation.influence.scores import Scores, bind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Sequence

    from numpy.typing import NDArray

    from trainer.model import Transformer
    from valuation.influence.scores import TokenSet


def ngrams(size: int) -> Callable[[Sequence[int]], Sequence[Hashable]]:
    """Terms that are runs of tokens.

    Args:
        size: tokens in a run, >= 1.

    Returns:
        From tokens to terms.

    Raises:
        GradientError: size < 1.
    """
    if size < 1:
        raise GradientError(f"ngrams: expected runs of at least 1 token, got {size}")

    def terms(tokens: Sequence[int]) -> Sequence[Hashable]:
        return list(zip(*(tokens[start:] for start in range(size)), strict=False))

    return terms


def words(separators: Collection[int]) -> Callable[[Sequence[int]], Sequence[Hashable]]:
    """Terms that stand between separators, such as the ids of space and punctuation.

    Args:
        separators: token ids that belong to no word.

    Returns:
        From tokens to terms.
    """
    apart = frozenset(separators)

    def terms(tokens: Sequence[int]) -> Sequence[Hashable]:
        found: list[tuple[int, ...]] = []
        word: list[int] = []
        for token in [*tokens, *list(apart)[:1]]:
            if token not in apart:
                word.append(token)
            elif word:
                found.append(tuple(word))
                word = []
        return found + ([tuple(word)] if word else [])

    return terms


def bm25(
    train: TokenSet,
    queries: TokenSet,
    *,
    terms: Callable[[Sequence[int]], Sequence[Hashable]] | None = None,
    saturation: float = 1.2,
    length_weight: float = 0.75,
) -> Scores:
    """Word overlap, weighted by rarity.

    Args:
        train: records.
        queries: queries; a term that stands in a query twice counts twice.
        terms: from tokens to terms; None = every token is one.
        saturation: k >= 0; 0 = only whether a term is there.
        length_weight: b in 0..1; 1 = counts per length of the record.

    Returns:
        Scores >= 0.
    """
    split = terms or ngrams(1)
    counts_N = [Counter(split([int(t) for t in tokens])) for *_, tokens in train.records]
    size_N = np.array([sum(counts.values()) for counts in counts_N], dtype=np.float64)
    mean = size_N.mean() if size_N.sum() else 1.0
    discount_N = saturation * (1 - length_weight + length_weight * size_N / mean)
    postings: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
    for n, counts in enumerate(counts_N):
        for term, count in counts.items():
            postings[term].append((n, count))
    scores_QN = np.zeros((len(queries.records), len(counts_N)))
    for q, (*_, tokens) in enumerate(queries.records):
        for term, wanted in Counter(split([int(t) for t in tokens])).items():
            if term not in postings:
                continue
            at_P, count_P = np.array(postings[term]).T
            rarity = np.log1p((len(counts_N) - len(at_P) + 0.5) / (len(at_P) + 0.5))
            gain_P = count_P * (saturation + 1) / (count_P + discount_N[at_P])
            scores_QN[q, at_P] += wanted * rarity * gain_P
    return _scores(scores_QN, f"bm25(k={saturation},b={length_weight})", train, queries)


def embedding(
    model: Transformer, train: TokenSet, queries: TokenSet, *, rows: int = 16, centre: bool = True
) -> Scores:
    """Likeness of mean hidden states.

    Args:
        model: the proxy; its normalised last hidden state is averaged over a record's tokens.
        train: records.
        queries: queries.
        rows: rows of a batch.
        centre: take off the mean over training records; without it all texts look alike.

    Returns:
        Cosines in -1..1.
    """
    train_ND, query_QD = (mean_hidden(model, tokens, rows) for tokens in (train, queries))
    if centre:
        middle_D = train_ND.mean(0)
        train_ND, query_QD = train_ND - middle_D, query_QD - middle_D
    unit_ND, unit_QD = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
        for x in (train_ND, query_QD)
    )
    return _scores(unit_QD @ unit_ND.T, f"embedding(centre={centre})", train, queries, model)


def mean_hidden(model: Transformer, tokens: TokenSet, rows: int = 16) -> NDArray[np.float64]:
    """Mean of the normalised last hidden state over each record's tokens.

    Args:
        model: the model.
        tokens: records, each of at least one token.
        rows: rows of a batch.

    Returns:
        hidden_ND in the order of the records.

    Raises:
        GradientError: a record without tokens.
    """
    import torch

    from valuation.gradients import Segments

    place = {index: i for i, (index, *_) in enumerate(tokens.records)}
    sums_ND = np.zeros((len(place), model.spec.dim))
    count_N = np.zeros(len(place))
    device = str(next(model.parameters()).device)
    with torch.no_grad():
        for batch in tokens.batches(rows):
            ids_BT, _, positions_BT, documents_BT = batch.tensors(device)
            hidden_BTD = model.trunk(ids_BT, positions_BT, documents_BT)[0].double().cpu().numpy()
            segments = Segments.of(batch)
            flat_PD = hidden_BTD.reshape(-1, model.spec.dim)[segments.position_P]
            at_P = np.array([place[int(i)] for i in segments.index_S])[segments.segment_P]
            np.add.at(sums_ND, at_P, flat_PD)
            count_N += np.bincount(at_P, minlength=len(place))
    if not count_N.all():
        raise GradientError(
            "embedding: expected at least one token in every record, got none in some; leave them out"
        )
    return sums_ND / count_N[:, None]


def entropy(train: TokenSet, queries: TokenSet, vocab_size: int) -> Scores:
    """Bits per token of each record, blind to the query: what a price per bit would pay.

    Args:
        train: records.
        queries: queries; they only give the number of rows.
        vocab_size: number of token ids.

    Returns:
        The same scores in every row.
    """
    from valuation.entropy import bigram_surprisal, folds

    length_N = np.array([len(tokens) for *_, tokens in train.records], dtype=np.int64)
    flat_T = np.concatenate([np.empty(0, np.int64), *(t for *_, t in train.records)])
    offsets_N1 = np.concatenate([[0], np.cumsum(length_N)])
    bits_T = bigram_surprisal(flat_T.astype(np.int64), offsets_N1, folds(train.ids), vocab_size)
    record_T = np.repeat(np.arange(len(length_N)), length_N)
    bits_N = np.bincount(record_T, bits_T, minlength=len(length_N)) / np.maximum(length_N, 1)
    return _scores(np.tile(bits_N, (len(queries.records), 1)), "entropy(bigram)", train, queries)


def random(train: TokenSet, queries: TokenSet, generator: np.random.Generator) -> Scores:
    """Scores that know nothing: the control that every table needs."""
    shape = len(queries.records), len(train.records)
    return _scores(generator.normal(size=shape), "random", train, queries)


def _scores(
    scores_QN: NDArray[np.float64],
    method: str,
    train: TokenSet,
    queries: TokenSet,
    model: Any = None,
) -> Scores:
    binding = bind([] if model is None else model, train, queries)
    if model is None:
        binding = replace(binding, checkpoint_root="none")
    return Scores(
        np.ascontiguousarray(scores_QN, dtype=np.float64), queries.index_N, train.index_N, queries.ids, train.ids,
        method, binding,
    )  # fmt: skip
