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

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.entropy import bigram_surprisal, checked_subjects, checked_tokens, empirical_entropy
from valuation.errors import TokensError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from valuation.entropy import EmpiricalEntropy

    Integers = NDArray[np.integer]
    Floats = NDArray[np.float64]


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
        bits_T: surprisal of each token where it is known already (see `valuation.surprisal`); None = computed here.

    Returns:
        Records (N entries) and owners (G entries).

    Raises:
        TokensError: if the arrays don't fit each other.
    """
    if len(bytes_N) != len(offsets_N1) - 1 or (len(bytes_N) and int(np.min(bytes_N)) < 0):
        raise TokensError(
            f"bytes_N: expected {len(offsets_N1) - 1} sizes of at least 0, got {len(bytes_N)}"
        )
    _, lengths_N = checked_tokens(tokens_T, offsets_N1, vocab_size)
    record_N, num_records = checked_subjects(None, None, len(lengths_N))
    code_N, _ = checked_subjects(owner_N, num_owners, len(lengths_N))
    if bits_T is None:
        bits_T = bigram_surprisal(tokens_T, offsets_N1, fold_N, vocab_size)
    elif len(bits_T) != len(tokens_T):
        raise TokensError(f"bits_T: expected {len(tokens_T)} entries, got {len(bits_T)}")
    float_T: Floats = bits_T.astype(np.float64)
    record_T = np.repeat(record_N, lengths_N)
    bits_N = _sums(record_T, float_T, num_records)
    records = _information(
        empirical_entropy(tokens_T, offsets_N1, vocab_size),
        np.asarray(bytes_N, dtype=np.int64),
        bits_N,
        _ratio_error(record_T, float_T, np.ones(len(float_T)), num_records),
    )
    owners = _information(
        empirical_entropy(
            tokens_T, offsets_N1, vocab_size, subject_N=code_N, num_subjects=num_owners
        ),
        _sums(code_N, bytes_N, num_owners).astype(np.int64),
        _sums(code_N, bits_N, num_owners),
        _ratio_error(code_N, bits_N, lengths_N.astype(np.float64), num_owners),
    )
    return records, owners


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
