"""The surprisal of every token on disk: float16, memory-mapped, aligned with the token ids.

    bits_t = -log2 p(w_t | w_{t-1}),       cross-fitted: counts of the other folds only (`valuation.entropy`)

Entry t of the array belongs to token t of the corpus; the value of a record is the float64 sum of its entries, which is exact,
because a float16 is a multiple of 2^-24 and a record is far below 2^29 bits. A strip of these numbers shows *where* a text surprises.

Made for corpora larger than memory: tokens may be a memory map, and two passes go over it in chunks. The first counts pairs, in a
table with a slot for every pair of tokens when (V + 1) V is at most 2^27, so for vocabularies up to 11,584; above, pairs share
slots by a hash, counts can only come out too high and surprisals too low. The second looks up and writes; in both, several threads may
take chunks, and the bytes are the same for any number of them. Memory: 4 bytes per slot and fold, about 60 bytes per token of a chunk,
and what of the tokens' map the system keeps; the array is written, not mapped.

Cost: see README, *Measured*. What it does not show: noise has the highest surprisal of all,
so this is where to look, never what to pay.

Shapes: N records, T tokens, F folds, V vocabulary, M slots.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from provenance.canonical import jcs, parse_json, write_atomic
from valuation.entropy import CONTEXT_STRENGTH, UNIFORM_COUNT
from valuation.errors import TokensError
from valuation.pieces import in_order

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Integers = NDArray[np.integer]
    Floats = NDArray[np.float64]

MAX_SLOTS = 1 << 27
CHUNK_TOKENS = 1 << 17
NAME = "surprisal"
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
        threads: chunks that are worked on at the same time.

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
    if len(fold_N) != len(offsets) - 1 or int(fold_N.min(initial=0)) < 0 or chunk_tokens < 1:
        raise TokensError(
            f"expected {len(offsets) - 1} folds of at least 0 and chunk_tokens of at least 1"
        )
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{NAME}.part"
    spans = [
        (at, min(at + chunk_tokens, len(tokens_T))) for at in range(0, len(tokens_T), chunk_tokens)
    ]
    with part.open("wb+") as file:
        if spans:
            counts = _Counts(tokens_T, offsets, folds_N, vocab_size)
            deque(in_order(counts.add, spans, threads), maxlen=0)
            counts.finish()
            # Written and not mapped: mapped pages would count as this process's memory until they are closed.
            for bits_C in in_order(counts.surprisal, spans, threads):
                file.write(bits_C.astype("<f2", copy=False).data)
    return keep_surprisal(part, folder, NAME, len(tokens_T), len(folds_N))


def keep_surprisal(
    part: Path, folder: Path, name: str, num_tokens: int, num_records: int
) -> NDArray[np.float16]:
    """Give a written array its name, with what it belongs to beside it.

    Args:
        part: the file, little-endian float16.
        folder: where it stays.
        name: what it is called there: `name.f16` and `name.json`.
        num_tokens: T.
        num_records: N.

    Returns:
        The array [T], memory-mapped, read-only.
    """
    with part.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        os.fsync(file.fileno())
    part.replace(folder / f"{name}.f16")
    head = {"format": 1, "tokens": num_tokens, "records": num_records, "sha256": digest}
    write_atomic(folder / f"{name}.json", jcs(head))
    return open_surprisal(folder, num_tokens, name)


def open_surprisal(folder: Path, num_tokens: int, name: str = NAME) -> NDArray[np.float16]:
    """The array of a corpus, memory-mapped.

    Args:
        folder: where it was written.
        num_tokens: T of the corpus it must belong to.
        name: which one: the n-gram's, or `valuation.reference.MODEL_NAME`.

    Returns:
        Bits per token, [T].

    Raises:
        TokensError: no array, one of another corpus, or one that is cut short.
    """
    try:
        head = parse_json((folder / f"{name}.json").read_bytes())
        size = (folder / f"{name}.f16").stat().st_size
    except (OSError, ValueError) as error:
        raise TokensError(
            f"{name}.json: expected a surprisal array, got {error!r}; write it again"
        ) from error
    if head.get("format") != 1 or head["tokens"] != num_tokens or size != 2 * num_tokens:
        raise TokensError(
            f"{name}.f16: expected {num_tokens} tokens, got {head.get('tokens')} and {size} bytes; write it again"
        )
    if not num_tokens:
        return np.empty(0, np.float16)
    return np.memmap(folder / f"{name}.f16", dtype="<f2", mode="r", shape=(num_tokens,))


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
    """Counts of the other folds: add every span, finish, look up.

    A row of V + 1 per fold: tokens, and V for the start of a record, which is a context and never a token.
    """

    def __init__(
        self, tokens_T: Integers, offsets: NDArray[np.int64], fold_N: NDArray[np.int64], vocab_size: int
    ) -> None:  # fmt: skip
        self.tokens_T, self.offsets, self.vocab, self.lock = tokens_T, offsets, vocab_size, Lock()
        self.slots = min((vocab_size + 1) * vocab_size, MAX_SLOTS)
        self.hashed = (vocab_size + 1) * vocab_size > MAX_SLOTS
        self.folds = int(fold_N.max(initial=0)) + 1
        self.row_N = fold_N * (vocab_size + 1)
        self.pair = np.zeros(self.folds * self.slots, np.uint32)
        self.context, self.word = np.zeros((2, self.folds * (vocab_size + 1)), np.int64)

    def add(self, span: tuple[int, int]) -> None:
        """Count the tokens of a span."""
        row_T, context_T, word_T = self._read(span)
        one, size = np.uint32(1), len(self.word)
        word_F, context_F = (
            np.bincount(at_T, minlength=size) for at_T in (row_T + word_T, context_T)
        )
        key_T = self._key(row_T, context_T, word_T)
        with self.lock:
            # Not a bincount: that makes an array as long as the table, for every chunk.
            np.add.at(self.pair, key_T, one)
            self.word += word_F
            self.context += context_F

    def finish(self) -> None:
        """From each fold's own counts to those of all others, and to what the formula needs of single tokens."""
        pair_FM = self.pair.reshape(self.folds, self.slots)
        context_FV, word_FV = (
            x.reshape(self.folds, self.vocab + 1) for x in (self.context, self.word)
        )
        # In place and in pieces: what the others have is what all have without one's own.
        for table in (pair_FM, context_FV, word_FV):
            for at in range(0, table.shape[1], 1 << 16):
                piece = table[:, at : at + (1 << 16)]
                if len(piece) == 2:
                    piece[:] = piece[::-1].copy()
                else:
                    np.subtract(piece.sum(axis=0, dtype=table.dtype), piece, out=piece)
        others_F1 = word_FV.sum(axis=1, keepdims=True)
        share_FV = (word_FV + UNIFORM_COUNT) / (others_F1 + UNIFORM_COUNT * self.vocab)
        self.prior = (CONTEXT_STRENGTH * share_FV).astype(np.float32).reshape(-1)
        self.log_context = np.log2(context_FV + CONTEXT_STRENGTH).astype(np.float32).reshape(-1)

    def surprisal(self, span: tuple[int, int]) -> NDArray[np.float16]:
        """Bits of the tokens of a span."""
        row_T, context_T, word_T = self._read(span)
        mass_T = self.pair[self._key(row_T, context_T, word_T)].astype(np.float32)
        row_T += word_T
        mass_T += self.prior[row_T]
        np.log2(mass_T, out=mass_T)
        np.subtract(self.log_context[context_T], mass_T, out=mass_T)
        return mass_T.astype(np.float16)

    def _read(
        self, span: tuple[int, int]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """For each token of a span: fold · (V + 1), the same plus the token before it (V at the start of a record), and the token."""
        start, stop = span
        given_T = np.asarray(self.tokens_T[start:stop])
        low, high = int(given_T.min()), int(given_T.max())
        if low < 0 or high >= self.vocab:
            raise TokensError(
                f"tokens_T: expected ids in 0 .. {self.vocab - 1}, got {low} .. {high}"
            )
        word_T = given_T.astype(np.int64)
        first, size_R = _records(self.offsets, span)
        row_T = np.repeat(self.row_N[first : first + len(size_R)], size_R)
        context_T = np.empty_like(row_T)
        np.add(row_T[1:], word_T[:-1], out=context_T[1:])
        context_T[0] = row_T[0] + (int(self.tokens_T[start - 1]) if start else self.vocab)
        heads = self.offsets[slice(*np.searchsorted(self.offsets, span))] - start
        context_T[heads] = row_T[heads] + self.vocab  # empty records share the head of the next one
        return row_T, context_T, word_T

    def _key(
        self, row_T: NDArray[np.int64], context_T: NDArray[np.int64], word_T: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Slots of pairs; without a hash, fold f's begin at f · (V + 1) · V, which is V times its row."""
        if not self.hashed:
            key_T = context_T * self.vocab
            key_T += word_T
            return key_T
        shift = np.uint64(64 - (MAX_SLOTS.bit_length() - 1))
        pair_T = ((context_T - row_T) * self.vocab + word_T).astype(np.uint64)
        slot_T = ((pair_T * _GOLDEN) >> shift).astype(np.int64)
        return slot_T + row_T // (self.vocab + 1) * self.slots


def _records(offsets: NDArray[np.int64], span: tuple[int, int]) -> tuple[int, NDArray[np.int64]]:
    """The first record with tokens in a span, and how many tokens each record from there on has in it."""
    start, stop = span
    first = int(np.searchsorted(offsets, start, side="right")) - 1
    last = int(np.searchsorted(offsets, stop, side="left"))
    borders = np.clip(offsets[first : last + 1], start, stop)
    return first, borders[1:] - borders[:-1]
