"""Token entropy: how many bits a record or an owner brings, before any model is trained.

Three questions, three numbers, all in bits:

*Empirical entropy* asks how spread the tokens of one subject are. With counts c_w of n tokens,

    H = log2 n - (1/n) Σ_w c_w log2 c_w              (plug-in, biased low for short texts)
    H_MM = H + (m - 1) / (2 n ln 2)                  (Miller-Madow, m = distinct tokens seen)

A uniform distribution over V tokens has H = log2 V. The correction is the first term of the bias
only; for n < m it can overshoot log2 V, so both numbers are reported.

*Surprisal* asks how unexpected the record is to somebody who has read the others. A bigram model
with Dirichlet back-off to the unigram and then to the uniform distribution,

    p(w) = (c_w + b/V) / (n + b)          p(w | u) = (c_uw + a p(w)) / (c_u· + a),

is *cross-fitted*: records stand in folds, and a record is scored only with counts of the other
folds. No record is ever scored by a model that saw it. Copies of a record in another fold would
undo that, so `folds` keeps the members of a cluster together.

*Compressibility* asks what zstd makes of the bytes: compressed over raw size.

Cost: a counter per record and token of the vocabulary where that is at most 32 per token, else one sort of the T tokens; two sorts
for the surprisal of `bigram_surprisal`, memory about 60 bytes per token. What it does not show: noise has the highest entropy of
all, so entropy is evidence, never a price.

Shapes: N records, T tokens, G subjects (owners). Record i is
``tokens_T[offsets_N1[i] : offsets_N1[i + 1]]`` (CSR), so ``offsets_N1`` has N + 1 entries.

Source: Miller, "Note on the bias of information estimates", 1955; MacKay and Peto, "A hierarchical
Dirichlet language model", 1995.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import TokensError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Integers = NDArray[np.integer]
    Floats = NDArray[np.float64]

# Strengths of the two priors in tokens: b = V/10 spreads one tenth of a count on every token;
# a = 50 trusts a context's own counts once it was seen about fifty times.
UNIFORM_COUNT = 0.1
CONTEXT_STRENGTH = 50.0
DENSE_COUNTERS = 32
"""Counters per token up to which counting beats sorting."""


@dataclass(frozen=True, slots=True)
class EmpiricalEntropy:
    """Entropy of the tokens of each subject; all arrays have one entry per subject."""

    bits_N: Floats
    """Plug-in entropy in bits per token; 0 where there are no tokens."""
    corrected_bits_N: Floats
    """Plug-in plus Miller-Madow correction, bits per token."""
    distinct_N: NDArray[np.int64]
    """Number of distinct tokens."""
    tokens_N: NDArray[np.int64]
    """Number of tokens; 0 says that the entropies are empty, not measured."""


def folds(
    record_ids: Sequence[bytes], *, cluster_N: Integers | None = None, num_folds: int = 2
) -> NDArray[np.int64]:
    """Assign records to folds by digest: stable when records are added, and unpredictable.

    Args:
        record_ids: N keyed digests (at least 8 bytes each).
        cluster_N: optional cluster of each record, as index of its first member. All members of a
            cluster then share the fold of that member, so that a copy never teaches the model that
            scores the original.
        num_folds: number of folds, at least 2.

    Returns:
        N fold numbers in 0 .. num_folds - 1.

    Raises:
        TokensError: for short ids, fewer than two folds, or clusters of another length.
    """
    if num_folds < 2:
        raise TokensError(f"num_folds: expected at least 2 for cross-fitting, got {num_folds}")
    if any(len(record_id) < 8 for record_id in record_ids):
        raise TokensError("record_ids: expected digests of at least 8 bytes")
    heads = [int.from_bytes(record_id[:8], "big") % num_folds for record_id in record_ids]
    fold_N = np.array(heads, dtype=np.int64)
    if cluster_N is None:
        return fold_N
    if len(cluster_N) != len(fold_N):
        raise TokensError(f"cluster_N: expected {len(fold_N)} entries, got {len(cluster_N)}")
    return fold_N[cluster_N]


def empirical_entropy(
    tokens_T: Integers,
    offsets_N1: Integers,
    vocab_size: int,
    *,
    subject_N: Integers | None = None,
    num_subjects: int | None = None,
) -> EmpiricalEntropy:
    """Entropy of the token distribution of each record, or of each owner's pooled records.

    Args:
        tokens_T: token ids of all records, each in 0 .. vocab_size - 1.
        offsets_N1: N + 1 record borders.
        vocab_size: V.
        subject_N: optional subject code of each record; None means every record for itself.
        num_subjects: number of subjects G; required with `subject_N`.

    Returns:
        Plug-in and corrected entropies in bits per token, per subject.

    Raises:
        TokensError: if the arrays don't describe records over this vocabulary.
    """
    ids_T, lengths_N = checked_tokens(tokens_T, offsets_N1, vocab_size)
    if subject_N is None:
        return record_entropy(ids_T, lengths_N, vocab_size)
    code_N, num_subjects = checked_subjects(subject_N, num_subjects, len(lengths_N))
    n_G = np.bincount(code_N, weights=lengths_N, minlength=num_subjects).astype(np.float64)
    return entropy_of_counts(*token_counts(ids_T, lengths_N, code_N, vocab_size), n_G, vocab_size)


def record_entropy(
    ids_T: Integers, lengths_N: NDArray[np.int64], vocab_size: int
) -> EmpiricalEntropy:
    """`empirical_entropy` of every record for itself, of arrays that were checked.

    Args:
        ids_T: token ids.
        lengths_N: tokens of each record.
        vocab_size: V.

    Returns:
        Entropies, the same bits whether tokens are counted or sorted.
    """
    num, n_N = len(lengths_N), lengths_N.astype(np.float64)
    if num * vocab_size > DENSE_COUNTERS * len(ids_T):
        return entropy_of_counts(
            *token_counts(ids_T, lengths_N, np.arange(num), vocab_size), n_N, vocab_size
        )
    count_NV = np.zeros(
        (num, vocab_size), np.uint16 if int(lengths_N.max(initial=0)) < 1 << 16 else np.uint32
    )
    count_K = count_NV.reshape(-1)
    key_T = np.repeat(np.arange(num) * vocab_size, lengths_N)
    key_T += ids_T
    np.add.at(count_K, key_T, count_K.dtype.type(1))
    distinct_N = np.add.reduce((count_NV > 0).view(np.uint8), axis=1, dtype=np.uint32).astype(
        np.int64
    )
    # What stands once adds nothing to the sum: log2 1 = 0.
    key_U = _above_one(count_K)
    return _entropies(key_U // vocab_size, count_K[key_U].astype(np.int64), distinct_N, n_N)


def _above_one(count_K: NDArray[np.unsignedinteger]) -> NDArray[np.int64]:
    """Where few of many counts are above one: by blocks of eight, most of which hold none."""
    found_K = np.zeros(-(-len(count_K) // 8) * 8, np.bool_)
    np.greater(count_K, 1, out=found_K[: len(count_K)])
    block_B = found_K.view(np.uint64)
    at_B = np.flatnonzero(block_B != 0)
    inside_U = np.flatnonzero(block_B[at_B].view(np.bool_))
    return 8 * at_B[inside_U >> 3] + (inside_U & 7)


def token_counts(
    ids_T: Integers,
    lengths_N: NDArray[np.int64],
    code_N: NDArray[np.int64],
    vocab_size: int,
) -> tuple[Integers, NDArray[np.int64]]:
    """How often each subject has each token.

    Args:
        ids_T: token ids, checked.
        lengths_N: tokens of each record.
        code_N: subject of each record.
        vocab_size: V.

    Returns:
        Keys subject · V + token, rising, and their counts; only those that occur.
    """
    top = (int(code_N.max(initial=0)) + 1) * vocab_size
    key_T = np.repeat(
        (code_N * vocab_size).astype(np.uint32 if top <= 1 << 32 else np.int64), lengths_N
    )
    key_T += ids_T.astype(key_T.dtype)
    key_T.sort()
    first_T = np.empty(len(key_T), np.bool_)
    first_T[:1] = True
    np.not_equal(key_T[1:], key_T[:-1], out=first_T[1:])
    at_U = np.flatnonzero(first_T)
    return key_T[at_U], np.diff(at_U, append=len(key_T))


def merged_counts(
    parts: Sequence[tuple[Integers, NDArray[np.int64]]],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Counts of several chunks as one.

    Args:
        parts: at least one pair of keys, in any order, and counts.

    Returns:
        Each key once, rising, and the sum of its counts.
    """
    keys, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
    key_U, at = np.unique(keys, return_inverse=True)
    return key_U, np.bincount(at, weights=counts, minlength=len(key_U)).astype(np.int64)


def entropy_of_counts(
    key_U: Integers, count_U: NDArray[np.int64], n_G: Floats, vocab_size: int
) -> EmpiricalEntropy:
    """Entropies of subjects from how often each has each token.

    Args:
        key_U: subject · V + token, rising.
        count_U: their counts.
        n_G: tokens of each of the G subjects.
        vocab_size: V.

    Returns:
        Plug-in and corrected entropies in bits per token, per subject.
    """
    subject_U = key_U // vocab_size
    return _entropies(subject_U, count_U, np.bincount(subject_U, minlength=len(n_G)), n_G)


def _entropies(
    subject_U: Integers, count_U: NDArray[np.int64], distinct_G: NDArray[np.int64], n_G: Floats
) -> EmpiricalEntropy:
    """Entropies from counts, in order of subject and token; counts of one may be left out."""
    sum_G = np.bincount(subject_U, weights=count_U * np.log2(count_U), minlength=len(n_G))
    safe_G = np.maximum(n_G, 1)
    # The difference of two equal numbers can come out as -1e-16; an entropy is never negative.
    bits_G = np.maximum(np.log2(safe_G) - sum_G / safe_G, 0.0)
    correction_G = np.maximum(distinct_G - 1, 0) / (2 * safe_G * np.log(2))
    return EmpiricalEntropy(
        bits_N=bits_G,
        corrected_bits_N=bits_G + correction_G,
        distinct_N=distinct_G,
        tokens_N=n_G.astype(np.int64),
    )


def bigram_surprisal(
    tokens_T: Integers,
    offsets_N1: Integers,
    fold_N: Integers,
    vocab_size: int,
    *,
    context_strength: float = CONTEXT_STRENGTH,
    uniform_count: float = UNIFORM_COUNT,
) -> Floats:
    """Bits that each token costs under a bigram model fitted on the other folds only.

    The first token of a record has the start of the record as its context. A fold that holds every
    record leaves an empty reference: each of its tokens then costs exactly log2 V bits.

    Args:
        tokens_T: token ids of all records, each in 0 .. vocab_size - 1.
        offsets_N1: N + 1 record borders.
        fold_N: fold of each record, 0 or more (see `folds`).
        vocab_size: V.
        context_strength: a > 0 in tokens, weight of the unigram against a context's counts.
        uniform_count: b/V > 0, pseudo-count of every token in the unigram.

    Returns:
        T surprisals -log2 p(token | token before it), in bits.

    Raises:
        TokensError: if the arrays don't fit each other or a strength is not positive.

    Source: MacKay and Peto 1995, equations 12-13, with fixed strengths.
    """
    given_T, lengths_N = checked_tokens(tokens_T, offsets_N1, vocab_size)
    ids_T: NDArray[np.int64] = given_T.astype(np.int64)
    if len(fold_N) != len(lengths_N) or (len(fold_N) and int(np.min(fold_N)) < 0):
        raise TokensError(
            f"fold_N: expected {len(lengths_N)} folds of at least 0, got {len(fold_N)}"
        )
    if not (context_strength > 0 and uniform_count > 0):
        raise TokensError("context_strength and uniform_count: expected both above 0")
    context_T = np.empty_like(ids_T)
    context_T[1:] = ids_T[:-1]
    starts_N = np.asarray(offsets_N1, dtype=np.int64)[:-1]
    context_T[starts_N[lengths_N > 0]] = vocab_size  # the start of a record is a context of its own
    fold_T = np.repeat(np.asarray(fold_N, dtype=np.int64), lengths_N)

    bigram_T = _others(context_T * vocab_size + ids_T, fold_T)
    context_count_T = _others(context_T, fold_T)
    unigram_T = _others(ids_T, fold_T)
    fold_size_F = np.bincount(fold_T)
    other_size_T = len(ids_T) - fold_size_F[fold_T]

    unigram_p_T = (unigram_T + uniform_count) / (other_size_T + uniform_count * vocab_size)
    p_T = (bigram_T + context_strength * unigram_p_T) / (context_count_T + context_strength)
    return np.asarray(-np.log2(p_T), dtype=np.float64)


def packed_bytes(texts: Iterable[str]) -> NDArray[np.int64]:
    """Size of each text after zstd at level 1, in bytes.

    Args:
        texts: N texts.

    Returns:
        N compressed sizes. The nine bytes of an empty frame are not counted, so short texts are not punished; another
        release of zstd may differ by a few bytes, so the number is shown and never paid by.
    """
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    border_N1 = np.cumsum([0, *map(len, encoded)])
    return packed_sizes(np.frombuffer(b"".join(encoded), np.uint8), border_N1)


def packed_sizes(byte_C: NDArray[np.uint8], border_N1: Integers) -> NDArray[np.int64]:
    """`packed_bytes` of texts that stand one after the other.

    Args:
        byte_C: their bytes, in contiguous memory.
        border_N1: where each text begins, and the end.

    Returns:
        N compressed sizes.
    """
    import zstandard

    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False)
    size_N = np.zeros(len(border_N1) - 1, np.int64)
    begin_N1 = np.asarray(border_N1, np.uint64)
    # Pairs of place and length; an empty text is refused there, and is nothing here.
    segment_N2 = np.stack([begin_N1[:-1], begin_N1[1:] - begin_N1[:-1]], axis=1)
    some_N = segment_N2[:, 1] > 0
    if some_N.any():
        # All texts in one call: a call for each lets go of the interpreter's lock, and waits for it, as often as there are texts.
        packed = compressor.multi_compress_to_buffer(
            zstandard.BufferWithSegments(byte_C.data, segment_N2[some_N].tobytes()), threads=1
        )
        lengths = [len(packed[at]) for at in range(len(packed))]
        size_N[some_N] = np.array(lengths) - len(compressor.compress(b""))
    return size_N


def _others(key_T: Integers, fold_T: Integers) -> NDArray[np.int64]:
    """For each token, how often its key stands in the folds other than its own."""
    _, code_T, total_U = np.unique(key_T, return_inverse=True, return_counts=True)
    own_T = np.zeros(len(key_T), dtype=np.int64)
    for fold in range(int(fold_T.max(initial=-1)) + 1):
        inside_T = fold_T == fold
        own_T[inside_T] = np.bincount(code_T[inside_T], minlength=len(total_U))[code_T[inside_T]]
    return total_U[code_T] - own_T


def checked_tokens(
    tokens_T: Integers, offsets_N1: Integers, vocab_size: int
) -> tuple[Integers, NDArray[np.int64]]:
    """Refuse arrays that are not records over this vocabulary.

    Args:
        tokens_T: token ids of all records.
        offsets_N1: N + 1 record borders.
        vocab_size: V.

    Returns:
        Tokens as an array of integers, and the length of each record.

    Raises:
        TokensError: for borders that don't cover the tokens, or ids outside the vocabulary.
    """
    offsets: NDArray[np.int64] = np.asarray(offsets_N1, dtype=np.int64)
    if len(offsets) < 1 or offsets[0] != 0 or offsets[-1] != len(tokens_T):
        raise TokensError(
            f"offsets_N1: expected to run from 0 to {len(tokens_T)} (the number of tokens), got "
            f"{offsets[[0, -1]].tolist() if len(offsets) else 'no entries'}"
        )
    lengths_N: NDArray[np.int64] = offsets[1:] - offsets[:-1]
    if len(lengths_N) and int(lengths_N.min()) < 0:
        raise TokensError("offsets_N1: expected borders that never fall")
    tokens: Integers = np.asarray(tokens_T)
    if not np.issubdtype(tokens.dtype, np.integer):
        tokens = tokens.astype(np.int64)
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size):
        raise TokensError(
            f"tokens_T: expected ids in 0 .. {vocab_size - 1}, got "
            f"{int(tokens.min())} .. {int(tokens.max())}; is this the right tokenizer?"
        )
    return tokens, lengths_N


def checked_subjects(
    subject_N: Integers | None, num_subjects: int | None, num_records: int
) -> tuple[NDArray[np.int64], int]:
    """Refuse subject codes that don't fit; by default every record is its own subject.

    Args:
        subject_N: subject code of each record, or None.
        num_subjects: number of subjects G; required with codes.
        num_records: N.

    Returns:
        Codes as int64, and the number of subjects.

    Raises:
        TokensError: for another number of codes, or codes outside 0 .. G - 1.
    """
    if subject_N is None:
        return np.arange(num_records), num_records
    if num_subjects is None or len(subject_N) != num_records:
        raise TokensError(
            f"subject_N: expected {num_records} codes together with num_subjects, got "
            f"{len(subject_N)} codes and num_subjects={num_subjects}"
        )
    codes: NDArray[np.int64] = np.asarray(subject_N, dtype=np.int64)
    if num_records and not (int(codes.min()) >= 0 and int(codes.max()) < num_subjects):
        raise TokensError(f"subject_N: expected codes in 0 .. {num_subjects - 1}")
    return codes, num_subjects
