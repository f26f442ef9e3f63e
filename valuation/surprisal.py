"""The surprisal of every token on disk: float16, memory-mapped, aligned with the token ids.

    bits_t = -log2 p(w_t | w_{t-1}),       cross-fitted: counts of the other folds only (`valuation.entropy`)

Entry t of the array belongs to token t of the corpus; the value of a record is the float64 sum of its entries, which is exact,
because a float16 is a multiple of 2^-24 and a record is far below 2^29 bits. A strip of these numbers shows *where* a text surprises.

Made for corpora larger than memory: tokens may be a memory map, and two passes go over it in chunks. The first counts pairs, in a
table with a slot for every pair of tokens when (V + 1) V is at most 2^27, so for vocabularies up to 11,584; above, pairs share
slots by a hash, counts can only come out too high and surprisals too low. The second looks up and writes; chunks may be done by several
threads, and the bytes are the same for any number of them. Memory: 4 bytes per slot and fold, and about 60 bytes per token of a chunk.

Cost: see README, *Measured*. What it does not show: noise has the highest surprisal of all,
so this is where to look, never what to pay.

Shapes: N records, T tokens, F folds, V vocabulary, M slots.
"""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from provenance.canonical import jcs, parse_json, write_atomic
from valuation.entropy import CONTEXT_STRENGTH, UNIFORM_COUNT
from valuation.errors import TokensError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Integers = NDArray[np.integer]
    Floats = NDArray[np.float64]

MAX_SLOTS = 1 << 27
CHUNK_TOKENS = 1 << 21
BITS_FILE, HEAD_FILE = "surprisal.f16", "surprisal.json"
# Fibonacci hashing: the top bits of a product with 2^64 / golden ratio.
_GOLDEN = np.uint64(11400714819323198485)
_BLOCKS = " ▁▂▃▄▅▆▇█"


def write_surprisal(
    folder: Path,
    tokens_T: Integers,
    offsets_N1: Integers,
    fold_N: Integers,
    vocab_size: int,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    threads: int = 1,
) -> NDArray[np.float16]:
    """Measure every token and keep the array.

    Args:
        folder: where `surprisal.f16` and `surprisal.json` are written, atomically.
        tokens_T: token ids of all records, in memory or memory-mapped, each in 0 .. vocab_size - 1.
        offsets_N1: N + 1 record borders.
        fold_N: fold of each record, 0 or more; members of a cluster share one (see `valuation.entropy.folds`).
        vocab_size: V.
        chunk_tokens: tokens in memory at a time and per thread, at least 1.
        threads: chunks that are looked up at the same time.

    Returns:
        The array [T], memory-mapped, read-only.

    Raises:
        TokensError: arrays that don't fit each other, or ids outside of the vocabulary.
    """
    offsets: NDArray[np.int64] = np.asarray(offsets_N1, dtype=np.int64)
    folds_N: NDArray[np.int64] = np.asarray(fold_N, dtype=np.int64)
    if (
        len(offsets) < 1
        or offsets[0] != 0
        or offsets[-1] != len(tokens_T)
        or (offsets[1:] < offsets[:-1]).any()
    ):
        raise TokensError(
            f"offsets_N1: expected to rise from 0 to {len(tokens_T)}, the number of tokens"
        )
    if (
        len(fold_N) != len(offsets) - 1
        or int(fold_N.min(initial=0)) < 0
        or chunk_tokens < 1
        or threads < 1
    ):
        raise TokensError(
            f"expected {len(offsets) - 1} folds of at least 0, chunk_tokens and threads >= 1"
        )
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{BITS_FILE}.part"
    spans = [
        (at, min(at + chunk_tokens, len(tokens_T))) for at in range(0, len(tokens_T), chunk_tokens)
    ]
    if not spans:
        part.write_bytes(b"")
    else:
        counts = _Counts(tokens_T, offsets, folds_N, vocab_size, spans)
        out_T = np.memmap(part, dtype="<f2", mode="w+", shape=(len(tokens_T),))

        def fill(span: tuple[int, int]) -> None:
            out_T[slice(*span)] = counts.surprisal(span)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, spans))
        out_T.flush()
        del out_T
    with part.open("rb+") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    part.replace(folder / BITS_FILE)
    head = {"format": 1, "tokens": len(tokens_T), "records": len(folds_N), "sha256": digest}
    write_atomic(folder / HEAD_FILE, jcs(head))
    return open_surprisal(folder, len(tokens_T))


def open_surprisal(folder: Path, num_tokens: int) -> NDArray[np.float16]:
    """The array of a corpus, memory-mapped.

    Args:
        folder: where it was written.
        num_tokens: T of the corpus it must belong to.

    Returns:
        Bits per token, [T].

    Raises:
        TokensError: no array, one of another corpus, or one that is cut short.
    """
    try:
        head = parse_json((folder / HEAD_FILE).read_bytes())
        size = (folder / BITS_FILE).stat().st_size
    except (OSError, ValueError) as error:
        raise TokensError(
            f"{HEAD_FILE}: expected a surprisal array, got {error!r}; write it again"
        ) from error
    if head.get("format") != 1 or head["tokens"] != num_tokens or size != 2 * num_tokens:
        raise TokensError(
            f"{BITS_FILE}: expected {num_tokens} tokens, got {head.get('tokens')} and {size} bytes; write it again"
        )
    if not num_tokens:
        return np.empty(0, np.float16)
    return np.memmap(folder / BITS_FILE, dtype="<f2", mode="r", shape=(num_tokens,))


def record_bits(
    bits_T: NDArray[np.float16], offsets_N1: Integers, *, chunk_tokens: int = CHUNK_TOKENS
) -> Floats:
    """Bits of each record: the exact sum of its entries.

    Args:
        bits_T: the array.
        offsets_N1: N + 1 record borders.
        chunk_tokens: tokens in memory at a time.

    Returns:
        N sums.
    """
    offsets: NDArray[np.int64] = np.asarray(offsets_N1, dtype=np.int64)
    total_N = np.zeros(len(offsets) - 1)
    for at in range(0, len(bits_T), chunk_tokens):
        span = (at, min(at + chunk_tokens, len(bits_T)))
        first, size_R = _records(offsets, span)
        local_T = np.repeat(np.arange(len(size_R)), size_R)
        sums_R = np.bincount(
            local_T, weights=bits_T[slice(*span)].astype(np.float64), minlength=len(size_R)
        )
        total_N[first : first + len(size_R)] += sums_R
    return total_N


def heat_strip(bits_T: NDArray[np.floating], *, width: int = 60, full_bits: float = 16.0) -> str:
    """A text's surprisal as one line of blocks, from its beginning to its end.

    Args:
        bits_T: bits of each token of one record.
        width: most characters; each stands for the mean of as many tokens as needed.
        full_bits: what a full block means, in bits per token.

    Returns:
        A string that says nothing of the words themselves; empty for no tokens.
    """
    if not len(bits_T):
        return ""
    parts = np.array_split(np.asarray(bits_T, np.float64), min(width, len(bits_T)))
    levels = [min(8, max(1, round(8 * float(part.mean()) / full_bits))) for part in parts]
    return "".join(_BLOCKS[level] for level in levels)


class _Counts:
    """Counts of the other folds, ready to be looked up."""

    def __init__(
        self, tokens_T: Integers, offsets: NDArray[np.int64], fold_N: NDArray[np.int64], vocab_size: int,
        spans: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        self.tokens_T, self.offsets, self.fold_N, self.vocab = tokens_T, offsets, fold_N, vocab_size
        self.slots = min((vocab_size + 1) * vocab_size, MAX_SLOTS)
        self.hashed = (vocab_size + 1) * vocab_size > MAX_SLOTS
        num_folds = int(fold_N.max(initial=0)) + 1
        pair_FM = np.zeros((num_folds, self.slots), np.uint32)
        context_FV, word_FV = (
            np.zeros((num_folds, n), np.int64) for n in (vocab_size + 1, vocab_size)
        )
        pair, one = pair_FM.reshape(-1), np.uint32(1)
        for span in spans:
            word_T, context_T, fold_T = self._read(span)
            # Not a bincount: that makes an array as long as the table, for every chunk.
            np.add.at(pair, self._key(context_T, word_T) + fold_T * self.slots, one)
            context_FV += np.bincount(
                fold_T * (vocab_size + 1) + context_T, minlength=context_FV.size
            ).reshape(context_FV.shape)
            word_FV += np.bincount(fold_T * vocab_size + word_T, minlength=word_FV.size).reshape(
                word_FV.shape
            )
        # In place and in pieces: what the others have is what all have without one's own.
        for table in (pair_FM, context_FV, word_FV):
            for at in range(0, table.shape[1], 1 << 22):
                piece = table[:, at : at + (1 << 22)]
                np.subtract(piece.sum(axis=0, dtype=table.dtype), piece, out=piece)
        self.pair = pair_FM.reshape(-1)
        others_F1 = word_FV.sum(axis=1, keepdims=True)
        share_FV = (word_FV + UNIFORM_COUNT) / (others_F1 + UNIFORM_COUNT * vocab_size)
        self.prior = (CONTEXT_STRENGTH * share_FV).astype(np.float32).reshape(-1)
        self.log_context = np.log2(context_FV + CONTEXT_STRENGTH).astype(np.float32).reshape(-1)

    def surprisal(self, span: tuple[int, int]) -> NDArray[np.float16]:
        """Bits of the tokens of a span."""
        word_T, context_T, fold_T = self._read(span)
        key_T = self._key(context_T, word_T)
        key_T += fold_T * self.slots
        mass_T = self.pair[key_T].astype(np.float32)
        mass_T += self.prior[fold_T * self.vocab + word_T]
        np.log2(mass_T, out=mass_T)
        np.subtract(self.log_context[fold_T * (self.vocab + 1) + context_T], mass_T, out=mass_T)
        return mass_T.astype(np.float16)

    def _read(
        self, span: tuple[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of a span, the token before each (V at the start of a record), and their folds."""
        start, stop = span
        word_T = np.asarray(self.tokens_T[start:stop]).astype(np.int64)
        if int(word_T.min()) < 0 or int(word_T.max()) >= self.vocab:
            raise TokensError(
                f"tokens_T: expected ids in 0 .. {self.vocab - 1}, got {word_T.min()} .. {word_T.max()}"
            )
        context_T = np.empty_like(word_T)
        context_T[1:] = word_T[:-1]
        context_T[0] = self.tokens_T[start - 1] if start else self.vocab
        low, high = np.searchsorted(self.offsets, (start, stop))
        heads = self.offsets[low:high]
        context_T[heads - start] = self.vocab  # empty records share the head of the next one
        first, size_R = _records(self.offsets, span)
        return word_T, context_T, np.repeat(self.fold_N[first : first + len(size_R)], size_R)

    def _key(self, context_T: NDArray[np.int64], word_T: NDArray[np.int64]) -> NDArray[np.int64]:
        key_T = context_T * self.vocab
        key_T += word_T
        if not self.hashed:
            return key_T
        shift = np.uint64(64 - (MAX_SLOTS.bit_length() - 1))
        return ((key_T.astype(np.uint64) * _GOLDEN) >> shift).astype(np.int64)


def _records(offsets: NDArray[np.int64], span: tuple[int, int]) -> tuple[int, NDArray[np.int64]]:
    """The first record with tokens in a span, and how many tokens each record from there on has in it."""
    start, stop = span
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    last = int(np.searchsorted(offsets, stop, side="left"))
    borders = np.clip(offsets[first : last + 1], start, stop)
    return first, borders[1:] - borders[:-1]
