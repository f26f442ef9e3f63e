"""Batches: a pure function of (tokens, seed, step), so that resuming needs no loader state and every step can be audited.

Epoch e is the sequence of documents in the order of a permutation keyed by (seed, e). All epochs laid end to end are
one stream of tokens; with rows of T tokens, step s is the stream from s*B*T to (s+1)*B*T, cut into B rows. Nothing is
dropped and nothing depends on how many processes there are: a process takes its rows of the global batch.

A label is the next token *of the same document*, also where a row ends in its middle; the last token of a document
has none (-100). Positions count from 0 in every segment, and `documents_BT` keeps segments from seeing each other.
So a document that is cut by the end of a row goes on in the next one without its context: the price of rows that are
always full (it concerns at most one document per row).

The permutation sorts raw Philox words, whose stream numpy guarantees, unlike that of `Generator.permutation` (NEP 19).

Legend: B rows, T positions, N records.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.errors import DataError
from trainer.spec import BatchSpec, MixtureSpec
from trainer.tokens import SHARD_LEAVES, Shard, read_manifest, read_shard, write_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from pathlib import Path

    from torch import Tensor

__all__ = ["Batch", "BatchPlan", "Segment", "TokenStore", "pack", "write_tokens"]

IGNORE = -100  # torch's default ignore_index: a position without label
PADDING = -1  # document label of padding; padding sees padding only


class Segment(NamedTuple):
    """A run of tokens of one record inside a row."""

    index: int  # type: ignore[assignment]  # hides tuple.index, which a segment has no use for
    """Position of the record in the corpus."""
    record_id: bytes
    """Identity of the record."""
    first: int
    """Position in the record of the first token."""
    count: int  # type: ignore[assignment]  # hides tuple.count
    """Number of tokens."""
    column: int
    """Column of the first token in the row."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents, as numpy arrays."""

    tokens_BT: np.ndarray
    """int64 token ids."""
    labels_BT: np.ndarray
    """int64 next token of the same document, -100 where there is none."""
    positions_BT: np.ndarray
    """int64, counting from 0 in every segment."""
    documents_BT: np.ndarray
    """int64 label of the segment, -1 for padding."""
    segments: tuple[tuple[Segment, ...], ...]
    """Per row, what stands where."""

    def rows(self, start: int, stop: int) -> Batch:
        """The rows start..stop-1 as a batch of their own."""
        return Batch(
            self.tokens_BT[start:stop],
            self.labels_BT[start:stop],
            self.positions_BT[start:stop],
            self.documents_BT[start:stop],
            self.segments[start:stop],
        )

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, labels, positions, documents as int64 tensors on a device."""
        import torch

        arrays = (self.tokens_BT, self.labels_BT, self.positions_BT, self.documents_BT)
        tokens, labels, positions, documents = (
            torch.from_numpy(array).to(device) for array in arrays
        )
        return tokens, labels, positions, documents

    @property
    def num_labels(self) -> int:
        """Number of positions with a label."""
        return int((self.labels_BT != IGNORE).sum())


class TokenStore:
    """The documents of a token folder, memory-mapped; every digest is checked on opening."""

    def __init__(self, manifest: dict, digest: str, shards: list[Shard]) -> None:
        """Use `TokenStore.open`."""
        self.digest = digest
        self.corpus_version: str = manifest["corpus_version"]
        self.tokenizer_digest: str = manifest["tokenizer_digest"]
        self.vocab_size: int = manifest["vocab_size"]
        self.end_of_text: int = manifest["end_of_text"]
        self.subtree_roots: list[str] = [entry["subtree_root"] for entry in manifest["shards"]]
        self.size: int = manifest["size"]
        self._shards = shards
        self.lengths_N = np.concatenate(
            [np.empty(0, np.int64), *(s.lengths_N for s in shards)]
        ).astype(np.int64)
        self.live_N = np.flatnonzero(self.lengths_N)
        names = sorted({name for s in shards for name in s.owners if name is not None})
        self.owners: tuple[str, ...] = tuple(names)
        code = {name: position for position, name in enumerate(names)} | {None: -1}
        self.owner_codes_N = np.concatenate(
            [
                np.empty(0, np.int32),
                *(np.array([code[o] for o in s.owners])[s.owner_codes_N] for s in shards),
            ],
        ).astype(np.int32)

    @classmethod
    def open(
        cls, folder: Path, expected_digest: str | None = None, *, verify: bool = True
    ) -> TokenStore:
        """Open a token folder.

        Args:
            folder: where tokens.json and the shards stand.
            expected_digest: hex SHA-256 that tokens.json must have, or None to take what is there.
            verify: recompute every shard's digest (about 1 s per GB); False only right after another check.

        Returns:
            The store.

        Raises:
            DataError: a file is missing, altered, or not the expected one.
        """
        manifest, digest = read_manifest(folder)
        if expected_digest is not None and digest != expected_digest:
            raise DataError(f"tokens.json: expected digest {expected_digest}, got {digest}")
        shards = [read_shard(folder, entry, verify=verify) for entry in manifest["shards"]]
        store = cls(manifest, digest, shards)
        if len(store.lengths_N) != store.size or len(store.live_N) != manifest["live"]:
            raise DataError(
                f"tokens.json: expected {store.size} records, {manifest['live']} of them live; "
                f"got {len(store.lengths_N)} and {len(store.live_N)}",
            )
        return store

    def tokens(self, index: int) -> np.ndarray:
        """Tokens of one record as a uint32 view; empty for a tombstone.

        Raises:
            DataError: no such index.
        """
        shard, row = self._locate(index)
        return shard.values_T[shard.offsets_N1[row] : shard.offsets_N1[row + 1]]

    def record_id(self, index: int) -> bytes:
        """The 32-byte id of one record; zero for a tombstone.

        Raises:
            DataError: no such index.
        """
        shard, row = self._locate(index)
        return shard.ids_N32[row].tobytes()

    def owner_of(self, index: int) -> str | None:
        """The owner of one record, or None where a tombstone has none.

        Raises:
            DataError: no such index.
        """
        shard, row = self._locate(index)
        return shard.owners[shard.owner_codes_N[row]]

    def csr(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens flat: int64 offsets_N1 and uint32 tokens; record i is tokens[offsets[i]:offsets[i + 1]]."""
        flat = [s.values_T[s.offsets_N1[0] : s.offsets_N1[-1]] for s in self._shards]
        offsets_N1 = np.concatenate([[0], np.cumsum(self.lengths_N)]).astype(np.int64)
        return offsets_N1, np.concatenate([np.empty(0, np.uint32), *flat])

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < self.size:
            raise DataError(f"index: expected 0..{self.size - 1}, got {index}")
        return self._shards[index // SHARD_LEAVES], index % SHARD_LEAVES


@dataclass(frozen=True, slots=True)
class _Epoch:
    """One pass over the documents: which, and where each starts in the epoch's tokens."""

    order_R: np.ndarray
    starts_R1: np.ndarray


class BatchPlan:
    """Which tokens every step sees: a pure function of the arguments (the only state is a cache of orders)."""

    def __init__(
        self,
        store: TokenStore,
        seed: int,
        batch: BatchSpec | None = None,
        mixture: MixtureSpec | None = None,
        excluded: Collection[bytes] = frozenset(),
    ) -> None:
        """Plan batches over a store.

        Args:
            store: the documents.
            seed: key of the order.
            batch: rows and length of the global batch; None = BatchSpec().
            mixture: repeats per owner and epoch; None = every record once.
            excluded: record ids that never appear; ids that are not in the store have no effect.

        Raises:
            DataError: an owner of the mixture that the tokens don't have, or no record left.
        """
        self.store, self.seed, self.spec = store, seed, batch or BatchSpec()
        self.mixture, self.excluded = mixture or MixtureSpec(), frozenset(excluded)
        unknown = sorted(set(self.mixture.repeats) - set(store.owners))
        if unknown:
            raise DataError(
                f"mixture.repeats: no owner {unknown[0]!r} in the tokens; take the line out"
            )
        live_N = store.live_N
        dropped_N = np.zeros(len(live_N), dtype=bool)
        if self.excluded:
            dropped_N = np.array(
                [store.record_id(int(i)) in self.excluded for i in live_N], dtype=bool
            )
        times_O = np.array([self.mixture.repeats.get(owner, 1) for owner in store.owners] or [1])
        kept_N = live_N[~dropped_N]
        self.num_excluded = int(dropped_N.sum())
        self.documents_R = np.repeat(kept_N, times_O[store.owner_codes_N[kept_N]])
        self.epoch_tokens = int(store.lengths_N[self.documents_R].sum())
        self._epochs: dict[int, _Epoch] = {}
        if not len(self.documents_R):
            raise DataError(
                f"no record is left to train on: {len(live_N)} live, {self.num_excluded} excluded, "
                "the rest repeated 0 times by the mixture",
            )

    @property
    def steps_per_epoch(self) -> float:
        """Steps after which every document has been seen once (times its repeats)."""
        return self.epoch_tokens / (self.spec.rows * self.spec.length)

    def batch(self, step: int) -> Batch:
        """The global batch of one step.

        Args:
            step: counted from 0.

        Returns:
            A batch of `spec.rows` full rows.

        Raises:
            DataError: a negative step.
        """
        if step < 0:
            raise DataError(f"step: expected 0 or more, got {step}")
        B, T = self.spec.rows, self.spec.length
        builder = _Rows(B, T)
        position, stop = step * B * T, (step + 1) * B * T
        while position < stop:
            number, offset = divmod(position, self.epoch_tokens)
            epoch = self._epoch(number)
            place = int(np.searchsorted(epoch.starts_R1, offset, side="right")) - 1
            while position < stop and place < len(epoch.order_R):
                index = int(epoch.order_R[place])
                first = position - number * self.epoch_tokens - int(epoch.starts_R1[place])
                row, column = divmod(position - step * B * T, T)
                tokens = self.store.tokens(index)
                count = min(len(tokens) - first, T - column)
                builder.put(
                    row, Segment(index, self.store.record_id(index), first, count, column), tokens
                )
                position += count
                place += first + count == len(tokens)
        return builder.batch()

    def records(self, step: int) -> list[tuple[int, bytes]]:
        """(index, record_id) of every record that the global batch of a step holds, by index, each once."""
        return distinct_records(self.batch(step))

    def _epoch(self, number: int) -> _Epoch:
        if number not in self._epochs:
            key = hashlib.sha256(f"dataworth-order-1|{self.seed}|{number}".encode()).digest()
            words = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(
                len(self.documents_R)
            )
            order_R = self.documents_R[np.argsort(words, kind="stable")]
            starts_R1 = np.concatenate([[0], np.cumsum(self.store.lengths_N[order_R])])
            # A batch touches at most a few neighbouring epochs; older ones would only fill memory.
            while len(self._epochs) >= 4:
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[number] = _Epoch(order_R, starts_R1)
        return self._epochs[number]


def distinct_records(batch: Batch) -> list[tuple[int, bytes]]:
    """(index, record_id) of every record in a batch, by index, each once."""
    return sorted({(segment.index, segment.record_id) for row in batch.segments for segment in row})


def pack(records: Iterable[tuple[int, bytes, Sequence[int] | np.ndarray]], length: int) -> Batch:
    """Put whole documents into as few rows as best-fit finds, for evaluation.

    Args:
        records: (index, record_id, tokens); longer than `length` is cut into segments of `length` that do not see
            each other, shorter is never cut. Empty records are skipped.
        length: tokens in a row, >= 1.

    Returns:
        A batch with as many rows as needed; free places hold token 0, label -100, document -1.

    Raises:
        DataError: length < 1.
    """
    if length < 1:
        raise DataError(f"length: expected at least 1, got {length}")
    pieces = [
        (index, record_id, first, min(length, len(tokens) - first), np.asarray(tokens))
        for index, record_id, tokens in records
        for first in range(0, len(tokens), length)
    ]
    placed: list[tuple[int, Segment, np.ndarray]] = []
    free: list[tuple[int, int]] = []  # (free columns, row), sorted: best fit is one bisection
    num_rows = 0
    for index, record_id, first, count, tokens in pieces:
        place = bisect_left(free, (count, -1))
        space, row = free.pop(place) if place < len(free) else (length, num_rows)
        num_rows = max(num_rows, row + 1)
        placed.append((row, Segment(index, record_id, first, count, length - space), tokens))
        if space > count:
            insort(free, (space - count, row))
    builder = _Rows(num_rows, length)
    for row, segment, tokens in placed:
        builder.put(row, segment, tokens)
    return builder.batch()


class _Rows:
    """Rows under construction."""

    def __init__(self, num_rows: int, length: int) -> None:
        self.tokens_BT = np.zeros((num_rows, length), dtype=np.int64)
        self.labels_BT = np.full((num_rows, length), IGNORE, dtype=np.int64)
        self.positions_BT = np.zeros((num_rows, length), dtype=np.int64)
        self.documents_BT = np.full((num_rows, length), PADDING, dtype=np.int64)
        self.segments: list[list[Segment]] = [[] for _ in range(num_rows)]
        self.columns_T = np.arange(length)

    def put(self, row: int, segment: Segment, tokens: np.ndarray) -> None:
        """Write `count` tokens of a document, from `first`, at `column`."""
        _, _, first, count, column = segment
        self.tokens_BT[row, column : column + count] = tokens[first : first + count]
        following = tokens[first + 1 : first + 1 + count]
        self.labels_BT[row, column : column + len(following)] = following
        self.positions_BT[row, column : column + count] = self.columns_T[:count]
        self.documents_BT[row, column : column + count] = len(self.segments[row])
        self.segments[row].append(segment)

    def batch(self) -> Batch:
        """The finished rows."""
        return Batch(
            self.tokens_BT, self.labels_BT, self.positions_BT, self.documents_BT,
            tuple(tuple(row) for row in self.segments),
        )  # fmt: skip
