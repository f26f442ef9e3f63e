"""Information: what level 1 of the valuation says about each record and each owner.

The measures of `valuation.entropy` side by side, as totals and rates with a standard error. For a
record the sampling unit is the token; for an owner it is the record, because the tokens of one
record are not independent:

    rate = Σ_r bits_r / Σ_r tokens_r,   se² = R/(R-1) Σ_r (bits_r - rate·tokens_r)² / (Σ_r tokens_r)²

over the R records of the owner. Below two items there is nothing to
estimate an error from, and it is NaN.

Tokens go through once, in chunks of whole records, several threads at a time. Numbers depend neither on chunks nor on threads:
counts are integers, and the sums of a record run over its own tokens in their order.

Shapes: N records, T tokens, G owners; arrays as in `valuation.entropy`.

Source: Cochran, "Sampling Techniques", 1977, equation 6.13 (error of a ratio).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from valuation.entropy import (
    EmpiricalEntropy,
    bigram_surprisal,
    checked_subjects,
    checked_tokens,
    entropy_of_counts,
    merged_counts,
    record_entropy,
    token_counts,
)
from valuation.errors import TokensError
from valuation.pieces import in_order

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Integers = NDArray[np.integer]
    Floats = NDArray[np.float64]


CHUNK_TOKENS = 1 << 17
"""Tokens in memory at a time and thread, or those of the longest record; the numbers don't depend on it."""
DENSE_COUNTERS = 1 << 24
"""Owners times vocabulary up to which owners have a counter per token; above, pairs that occur are kept in order."""


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


def measure_information(  # noqa: PLR0913 - one array per fact of a record
    tokens_T: Integers,
    offsets_N1: Integers,
    *,
    bytes_N: Integers,
    fold_N: Integers,
    owner_N: Integers,
    num_owners: int,
    vocab_size: int,
    bits_T: NDArray[np.floating] | None = None,
    threads: int = 1,
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
        threads: chunks that are counted at the same time.

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
    owned = _OwnerCounts(num_owners, vocab_size)

    def measured(span: tuple[int, int]) -> tuple[EmpiricalEntropy, Floats, Floats]:
        first, last = span
        start, stop = int(offsets[first]), int(offsets[last])
        ids_T, lengths_R = checked_tokens(
            tokens_T[start:stop], offsets[first : last + 1] - start, vocab_size
        )
        owned.add(ids_T, lengths_R, code_N[first:last])
        return record_entropy(ids_T, lengths_R, vocab_size), *_token_errors(
            bits_T[start:stop], lengths_R
        )

    parts = list(in_order(measured, _record_spans(offsets, CHUNK_TOKENS), threads))
    lengths_N, sizes_N = np.diff(offsets), np.asarray(bytes_N, dtype=np.int64)
    entropies = [part[0] for part in parts]
    per_record = EmpiricalEntropy(*(
        np.concatenate([getattr(entropy, field.name) for entropy in entropies]) for field in fields(EmpiricalEntropy)
    ))  # fmt: skip
    bits_N = np.concatenate([part[1] for part in parts])
    records = _information(per_record, sizes_N, bits_N, np.concatenate([part[2] for part in parts]))
    tokens_G = _sums(code_N, lengths_N, num_owners)
    owners = _information(
        entropy_of_counts(*owned.counts(), tokens_G, vocab_size),
        _sums(code_N, sizes_N, num_owners).astype(np.int64),
        _sums(code_N, bits_N, num_owners),
        _ratio_error(code_N, bits_N, lengths_N.astype(np.float64), num_owners),
    )
    return records, owners


class _OwnerCounts:
    """How often each owner has each token: added up from chunks of any size, in any order, by any thread."""

    def __init__(self, num_owners: int, vocab_size: int) -> None:
        self.vocab = vocab_size
        dense = num_owners * vocab_size <= DENSE_COUNTERS
        self.table = np.zeros(num_owners * vocab_size, np.int64) if dense else None
        self.parts: list[tuple[Integers, NDArray[np.int64]]] = [
            (np.empty(0, np.int64), np.empty(0, np.int64))
        ]
        self.lock = Lock()

    def add(self, ids_T: Integers, lengths_R: NDArray[np.int64], code_R: NDArray[np.int64]) -> None:
        """Count the tokens of records of owners with these codes."""
        if self.table is not None:
            key_T = np.repeat(code_R * self.vocab, lengths_R)
            key_T += ids_T
            # `add.at` keeps the interpreter's lock, `bincount` makes a table of its own.
            small = len(self.table) <= 4 * len(key_T)
            count_K = np.bincount(key_T, minlength=len(self.table)) if small else None
            with self.lock:
                if count_K is None:
                    np.add.at(self.table, key_T, 1)
                else:
                    self.table += count_K
            return
        part = token_counts(ids_T, lengths_R, code_R, self.vocab)
        with self.lock:
            self.parts.append(part)
            # Merged when more is waiting than stands already: each count is then moved a few times only.
            if sum(len(keys) for keys, _ in self.parts[1:]) > max(
                len(self.parts[0][0]), CHUNK_TOKENS
            ):
                self.parts = [merged_counts(self.parts)]

    def counts(self) -> tuple[Integers, NDArray[np.int64]]:
        """Keys, rising, and counts."""
        if self.table is None:
            return merged_counts(self.parts)
        key_U = np.flatnonzero(self.table)
        return key_U, self.table[key_U]


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


def _token_errors(
    bits_T: NDArray[np.floating], lengths_R: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Bits of each record, and the standard error of their mean: `_ratio_error` with items of one token each."""
    num, float_T = len(lengths_R), np.asarray(bits_T, dtype=np.float64)
    record_T = np.repeat(np.arange(num), lengths_R)
    if bits_T.dtype == np.float16:
        # Exact in any order, and this one is the fastest (see `valuation.surprisal`).
        some_R = lengths_R > 0
        sum_R = np.zeros(num)
        if some_R.any():
            sum_R[some_R] = np.add.reduceat(float_T, (np.cumsum(lengths_R) - lengths_R)[some_R])
    else:
        sum_R = _sums(record_T, float_T, num)
    tokens_R = np.maximum(lengths_R, 1).astype(np.float64)
    off_T = np.repeat(sum_R / tokens_R, lengths_R)
    np.subtract(float_T, off_T, out=off_T)
    off_T *= off_T
    spread_R = _sums(record_T, off_T, num)
    factor_R = np.where(lengths_R > 1, lengths_R / np.maximum(lengths_R - 1, 1), np.nan)
    return sum_R, np.sqrt(factor_R * spread_R) / tokens_R


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
