"""Information: what level 1 of the valuation says about each record and each owner.

The measures of `valuation.entropy` side by side, as totals and rates with a standard error. For a
record the sampling unit is the token; for an owner it is the record, because the tokens of one
record are not independent:

    rate = Σ_r bits_r / Σ_r tokens_r,   se² = R/(R-1) Σ_r (bits_r - rate·tokens_r)² / (Σ_r tokens_r)²

over the R records of the owner. Below two items there is nothing to
estimate an error from, and it is NaN.

Shapes: N records, T tokens, G owners; arrays as in `valuation.entropy`.

Source: Cochran, "Sampling Techniques", 1977, equation 6.13 (error of a ratio).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from valuation.entropy import (
    EmpiricalEntropy,
    bigram_surprisal,
    checked_subjects,
    checked_tokens,
    empirical_entropy,
    entropy_of_counts,
    merged_counts,
    token_counts,
)
from valuation.errors import TokensError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.integer]
    Floats = NDArray[np.float64]


CHUNK_TOKENS = 1 << 18
"""Tokens in memory at a time, or those of the longest record; the numbers don't depend on it."""


@dataclass(frozen=True, slots=True)
class Information:
    """What level 1 of the valuation says about records or owners (one entry per subject)."""

    tokens_N: NDArray[np.int64]
    """Tokens of the subject."""
    bytes_N: NDArray[np.int64]
    """UTF-8 bytes of the subject."""
    entropy_bits_per_token_N: Floats
    """Miller-Madow corrected empirical entropy, bits per token."""
    surprisal_bits_per_token_N: Floats
    """Cross-fitted bigram surprisal, bits per token."""
    surprisal_se_N: Floats
    """Its standard error in bits per token; NaN below two tokens (record) or records (owner)."""
    surprisal_bits_per_byte_N: Floats
    """The same total over bytes: comparable between tokenizers."""


def measure_information(
    tokens_T: Integers,
    offsets_N1: Integers,
    *,
    bytes_N: Integers,
    fold_N: Integers,
    owner_N: Integers,
    num_owners: int,
    vocab_size: int,
    bits_T: NDArray[np.floating] | None = None,
) -> tuple[Information, Information]:
    """Everything that level 1 measures on tokens, per record and per owner.

    Args:
        tokens_T: token ids of all records.
        offsets_N1: N + 1 record borders.
        bytes_N: UTF-8 size of each record.
        fold_N: fold of each record (see `valuation.entropy.folds`).
        owner_N: owner code of each record, 0 .. num_owners - 1.
        num_owners: number of owners G.
        vocab_size: V.
        bits_T: surprisal of each token where it is known already (see `valuation.surprisal`), in memory or memory-mapped; None =
            computed here, which needs all tokens in memory.

    Returns:
        Records (N entries) and owners (G entries).

    Raises:
        TokensError: if the arrays don't fit each other.
    """
    if len(bytes_N) != len(offsets_N1) - 1 or (len(bytes_N) and int(np.min(bytes_N)) < 0):
        raise TokensError(
            f"bytes_N: expected {len(offsets_N1) - 1} sizes of at least 0, got {len(bytes_N)}"
        )
    code_N, _ = checked_subjects(owner_N, num_owners, len(offsets_N1) - 1)
    if bits_T is None:
        bits_T = bigram_surprisal(tokens_T, offsets_N1, fold_N, vocab_size)
    elif len(bits_T) != len(tokens_T):
        raise TokensError(f"bits_T: expected {len(tokens_T)} entries, got {len(bits_T)}")
    offsets: NDArray[np.int64] = np.asarray(offsets_N1, dtype=np.int64)
    if (
        len(offsets) < 1
        or offsets[0] != 0
        or offsets[-1] != len(tokens_T)
        or (np.diff(offsets) < 0).any()
    ):
        checked_tokens(tokens_T, offsets, vocab_size)  # raises, and says how
    parts: list[tuple[EmpiricalEntropy, Floats, Floats]] = []
    counts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    for first, last in _record_spans(offsets, CHUNK_TOKENS):
        start, stop = int(offsets[first]), int(offsets[last])
        local_R1 = offsets[first : last + 1] - start
        ids_T, lengths_R = checked_tokens(tokens_T[start:stop], local_R1, vocab_size)
        float_T = np.asarray(bits_T[start:stop], dtype=np.float64)
        record_T = np.repeat(np.arange(last - first), lengths_R)
        parts.append((
            empirical_entropy(ids_T, local_R1, vocab_size),
            _sums(record_T, float_T, last - first),
            _ratio_error(record_T, float_T, np.ones(len(float_T)), last - first),
        ))  # fmt: skip
        counts.append(token_counts(ids_T, lengths_R, code_N[first:last], vocab_size))
        # Merged when more is waiting than stands already: each count is then moved a few times only.
        if sum(len(key_U) for key_U, _ in counts[1:]) > max(len(counts[0][0]), CHUNK_TOKENS):
            counts = [merged_counts(counts)]
    lengths_N, sizes_N = np.diff(offsets), np.asarray(bytes_N, dtype=np.int64)
    entropies = [part[0] for part in parts]
    per_record = EmpiricalEntropy(*(
        np.concatenate([getattr(entropy, field.name) for entropy in entropies]) for field in fields(EmpiricalEntropy)
    ))  # fmt: skip
    bits_N = np.concatenate([part[1] for part in parts])
    records = _information(per_record, sizes_N, bits_N, np.concatenate([part[2] for part in parts]))
    tokens_G = _sums(code_N, lengths_N, num_owners)
    owners = _information(
        entropy_of_counts(*merged_counts(counts), tokens_G, vocab_size),
        _sums(code_N, sizes_N, num_owners).astype(np.int64),
        _sums(code_N, bits_N, num_owners),
        _ratio_error(code_N, bits_N, lengths_N.astype(np.float64), num_owners),
    )
    return records, owners


def _record_spans(offsets: NDArray[np.int64], chunk_tokens: int) -> list[tuple[int, int]]:
    """Runs of whole records of about as many tokens; at least one run, which is empty without records."""
    num = len(offsets) - 1
    marks = np.arange(chunk_tokens, int(offsets[-1]), chunk_tokens)
    cuts = np.unique([0, *np.searchsorted(offsets[1:], marks), num]).tolist()
    return list(pairwise(cuts)) or [(0, 0)]


def _information(
    entropy: EmpiricalEntropy, bytes_N: Integers, bits_N: Floats, se_N: Floats
) -> Information:
    """Put totals and rates together."""
    return Information(
        tokens_N=entropy.tokens_N,
        bytes_N=bytes_N.astype(np.int64),
        entropy_bits_per_token_N=entropy.corrected_bits_N,
        surprisal_bits_per_token_N=bits_N / np.maximum(entropy.tokens_N, 1),
        surprisal_se_N=se_N,
        surprisal_bits_per_byte_N=np.where(bytes_N > 0, bits_N / np.maximum(bytes_N, 1), 0.0),
    )


def _ratio_error(subject_I: Integers, bits_I: Floats, tokens_I: Floats, num: int) -> Floats:
    """Standard error of Σ bits / Σ tokens per subject over its items; NaN below two items."""
    items_G = np.bincount(subject_I[tokens_I > 0], minlength=num)
    tokens_G = np.maximum(_sums(subject_I, tokens_I, num), 1)
    rate_G = _sums(subject_I, bits_I, num) / tokens_G
    spread_G = _sums(subject_I, (bits_I - rate_G[subject_I] * tokens_I) ** 2, num)
    factor_G = np.where(items_G > 1, items_G / np.maximum(items_G - 1, 1), np.nan)
    return np.sqrt(factor_G * spread_G) / tokens_G


def _sums(subject_I: Integers, x_I: Integers | Floats, num: int) -> Floats:
    """Sum of the items of each subject; right for subjects without any, as reduceat is not."""
    return np.bincount(subject_I, weights=x_I, minlength=num).astype(np.float64)
