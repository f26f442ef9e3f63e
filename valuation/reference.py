"""Surprisal under a model that never saw the record: for each fold a small model of the trainer, trained on all other folds.

    bits_t = -log2 p_f(w_t | w_<t),      f = the record's fold,   p_f = trained on every record of another fold

Members of a cluster share a fold (`valuation.entropy.folds`), so no copy or near-copy teaches the model that scores. The models of
all folds start from the same weights and read records in an order that content decides (`valuation.retraining`), each as many
tokens as the run's steps hold. A record longer than a row is scored in pieces that overlap by half: beyond the first row every token
sees at least half a row before it. A record's first token has nothing before it and no model of ours predicts it: its bits are
those of the n-gram reference, which knows how records begin (`valuation.surprisal`). So the bits of a record are the length of a code.

A finished fold is kept: `fold-F.npz` in the run's folder, written atomically; a run that was killed goes on with the others. The folder
is named by everything that the numbers depend on. No weights are kept.

What it costs: F trainings, and two forward passes over the corpus. What it does not show: noise surprises a model most of all, so this is
where to look, never what to pay; and a small model that read little is a worse reference than counts (README, *Measured*).

Shapes: L leaves, N records, T tokens, R records of a fold.
"""

from __future__ import annotations

import hashlib
import io
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from provenance.canonical import write_atomic
from trainer.errors import EXIT_DONE
from trainer.generate import sequence_logprobs
from trainer.inputs import initial_model, open_store
from trainer.journal import RESULT_FILE, write_result
from trainer.spec import run_digest
from valuation.errors import TokensError
from valuation.retraining import contents, fit_rows, named, shared_order, training_rows
from valuation.surprisal import keep_surprisal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.data import TokenStore
    from trainer.model import Transformer
    from trainer.spec import RunSpec

    Integers = NDArray[np.int64]

MODEL_NAME = "surprisal.model"
"""Name of the array beside the n-gram one's."""
_PIECES = 512
"""Pieces in memory at a time."""


def run(spec: RunSpec, directory: Path) -> int:
    """Train one model per fold and score its records; the entry `valuation.reference:run`.

    Args:
        spec: one process; `config.extra` holds `folds`, `[file, sha256]`: one little-endian int64 per leaf, its fold, or -1 to leave it out.
        directory: the run's folder; fold-F.npz and, last, result.json are written there.

    Returns:
        0.

    Raises:
        TokensError: settings or folds that can't be meant.
        DataError: tokens that are not the committed ones.
        NumericalError: a training left the finite numbers.
    """
    if set(spec.config.extra) != {"folds"} or spec.layout.world_size != 1 or spec.steps < 1:
        raise TokensError(
            f"run: expected one process, steps >= 1 and in config.extra folds alone, got {spec.layout.world_size}, {spec.steps} and {sorted(spec.config.extra)}"
        )
    (directory / RESULT_FILE).unlink(missing_ok=True)
    store = open_store(spec, directory)
    fold_L = read_folds(directory / spec.config.extra["folds"][0], spec.config.extra["folds"][1], store)  # fmt: skip
    found: dict[str, Any] = {}
    for fold in range(int(fold_L.max()) + 1):
        path = directory / f"fold-{fold}.npz"
        if not path.exists():
            with named(f"fold {fold}"):
                model = fitted(spec, directory, store, np.flatnonzero((fold_L >= 0) & (fold_L != fold)))  # fmt: skip
            index_R = np.flatnonzero(fold_L == fold)
            sequences = (store.tokens(index).tolist() for index in index_R.tolist())
            bits = list(record_surprisal(model, sequences, spec.config.batch.length))
            buffer = io.BytesIO()
            np.savez(buffer, index_R=index_R, bits_T=np.concatenate([np.empty(0, np.float16), *bits]))  # fmt: skip
            write_atomic(path, buffer.getvalue())
        found[str(fold)] = hashlib.sha256(path.read_bytes()).hexdigest()
    write_result(
        directory,
        {
            "run": spec.run, "kind": spec.kind, "status": "done", "run_digest": run_digest(spec), "tokens_digest": spec.tokens_digest, "folds": found,
        },
    )  # fmt: skip
    return EXIT_DONE


def read_folds(path: Path, digest: str, store: TokenStore) -> Integers:
    """Fold of every leaf.

    Args:
        path: the file.
        digest: SHA-256 that it must have.
        store: the tokens.

    Returns:
        L numbers; -1 is in no fold. Leaves without tokens are in none.

    Raises:
        TokensError: another file, another number of leaves, or a fold without a record that another fold could be trained for.
    """
    data = path.read_bytes()
    if (got := hashlib.sha256(data).hexdigest()) != digest:
        raise TokensError(f"{path.name}: expected SHA-256 {digest}, got {got}")
    fold_L = np.frombuffer(data, "<i8").astype(np.int64)
    if len(fold_L) != store.size or fold_L.min(initial=-1) < -1:
        raise TokensError(
            f"{path.name}: expected {store.size} folds of -1 or more, got {len(fold_L)}"
        )
    fold_L[store.lengths_N == 0] = -1
    there = np.unique(fold_L[fold_L >= 0]).tolist()
    if len(there) < 2 or there != list(range(len(there))):
        raise TokensError(f"{path.name}: expected records in each of two or more folds 0, 1, ..., got {there}; a fold is scored by the others' model")  # fmt: skip
    return fold_L


def fitted(spec: RunSpec, directory: Path, store: TokenStore, seen_K: Integers) -> Transformer:
    """The run's model, trained on some records and on nothing else.

    Args:
        spec: seed, shape, optimiser, batch and steps.
        directory: the run's folder.
        store: the tokens.
        seen_K: leaf indices of the records.

    Returns:
        The model, in evaluation mode.
    """
    batch = spec.config.batch
    budget = spec.steps * batch.rows * batch.length
    passes = -(-budget // int(store.lengths_N[seen_K].sum()))
    order_R = np.concatenate([shared_order(contents(store), seen_K, spec.seed, epoch) for epoch in range(passes)])  # fmt: skip
    model = initial_model(spec, directory)
    fit_rows(model, training_rows(store, order_R, budget, batch.rows, batch.length), spec.config.optim)  # fmt: skip
    return model.eval()


def record_surprisal(
    model: Transformer, sequences: Iterator[list[int]], length: int
) -> Iterator[NDArray[np.float16]]:
    """Bits of every token of some records; 0 for the first of each.

    Args:
        model: that never saw them.
        sequences: token ids of each record.
        length: tokens that the model was trained on at a time, at least 2.

    Yields:
        One array per record, in order.
    """
    waiting: list[tuple[NDArray[np.float16], list[tuple[int, int, int]], list[int]]] = []
    for tokens in chain(sequences, [None]):
        if tokens is not None:
            bits_T = np.zeros(len(tokens), np.float16)
            waiting.append((bits_T, pieces(len(tokens), length), tokens))
        if tokens is not None and sum(len(parts) for _, parts, _ in waiting) < _PIECES:
            continue
        cut: Sequence[list[int]] = [tokens[start:stop] for _, parts, tokens in waiting for start, _, stop in parts]  # fmt: skip
        places = [(bits_T, part) for bits_T, parts, _ in waiting for part in parts]
        for (bits_T, (start, first, stop)), logp in zip(places, sequence_logprobs(model, cut), strict=True):  # fmt: skip
            bits_T[first:stop] = -logp[first - start - 1 :] / np.log(2)
        yield from (bits_T for bits_T, _, _ in waiting)
        waiting = []


def pieces(size: int, length: int) -> list[tuple[int, int, int]]:
    """How a record is scored: (first token read, first token scored, end) of each piece.

    Args:
        size: tokens of the record.
        length: tokens of a row, at least 2.

    Returns:
        Pieces of at most `length` tokens that score every token but the first, each once.
    """
    if size < 2:
        return []
    found = [(0, 1, min(size, length))]
    while (at := found[-1][2]) < size:
        stop = min(size, at + length // 2)
        found.append((stop - length, at, stop))
    return found


def write_model_surprisal(
    folder: Path, directory: Path, leaf_N: Integers, offsets_N1: Integers, ngram_T: NDArray[np.float16]
) -> NDArray[np.float16]:  # fmt: skip
    """Put the folds of a finished run together, aligned with the token ids.

    Args:
        folder: where `surprisal.model.f16` and `surprisal.model.json` are written, atomically.
        directory: the run's folder.
        leaf_N: leaf index of each record.
        offsets_N1: N + 1 record borders.
        ngram_T: bits of each token by the n-gram reference; its first entries of records are taken over.

    Returns:
        The array [T], memory-mapped, read-only.

    Raises:
        TokensError: a record that no fold has, one that two have, or one of another length.
    """
    offsets = np.asarray(offsets_N1, np.int64)
    row_of = {leaf: row for row, leaf in enumerate(leaf_N.tolist())}
    left = {row for row in row_of.values() if offsets[row] < offsets[row + 1]}
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{MODEL_NAME}.part"
    with part.open("wb+") as file:
        file.truncate(2 * len(ngram_T))
        for path in sorted(directory.glob("fold-*.npz")):
            with np.load(path, allow_pickle=False) as archive:
                index_R, bits_T = archive["index_R"], archive["bits_T"]
            at = 0
            for leaf in index_R.tolist():
                row = row_of.get(leaf, -1)
                if row not in left:
                    raise TokensError(f"{path.name}: expected every record of the corpus once, got leaf {leaf} {'twice' if row >= 0 else 'of none'}")  # fmt: skip
                left.discard(row)
                start, stop = int(offsets[row]), int(offsets[row + 1])
                own_T = bits_T[at : at + stop - start].copy()
                own_T[0] = ngram_T[start]
                file.seek(2 * start)
                file.write(own_T.astype("<f2").tobytes())
                at += stop - start
            if at != len(bits_T):
                raise TokensError(f"{path.name}: expected {at} tokens, got {len(bits_T)}; the records are others")  # fmt: skip
        if left:
            raise TokensError(f"{len(left)} records were scored by no fold; run the reference again")  # fmt: skip
    return keep_surprisal(part, folder, MODEL_NAME, len(ngram_T), len(offsets) - 1)
