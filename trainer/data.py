"""Batches: a pure function of (tokens, seed, step), so that resuming needs no loader state and every step can be audited.

Epoch e is the sequence of documents in the order of a permutation keyed by (seed, e). All epochs laid end to end are
one stream of tokens; with rows of T tokens, step s is the stream from s*B*T to (s+1)*B*T, cut into B rows. Nothing is
dropped and nothing depends on how many processes there are: a process takes its rows of the global batch.

A label is the next token *of the same document*, also where a row ends in its middle; the last token of a document
has none (-100). Positions count from 0 in every segment, and `documents_BT` keeps segments from seeing each other.
So a document that is cut by the end of a row goes on in the next one without its context: the price of rows that are
always full (it concerns at most one document per row).

Which documents an epoch holds, how often and in which order: `trainer.order`.

Legend: B rows, T positions, N records.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trainer.errors import DataError
from trainer.order import MAX_MICRO, MICRO, Order
from trainer.selection import RecordWeights, find, sorted_ids
from trainer.spec import BatchSpec, MixtureSpec
from trainer.store import TokenStore
from trainer.tokens import write_tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

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


class BatchPlan:
    """Which tokens every step sees: a pure function of the arguments (a cache of orders is its only state)."""

    def __init__(
        self,
        store: TokenStore,
        seed: int,
        batch: BatchSpec | None = None,
        mixture: MixtureSpec | None = None,
        excluded: Collection[bytes] = frozenset(),
        weights: RecordWeights | None = None,
    ) -> None:
        """Plan batches over a store.

        Args:
            store: the documents.
            seed: key of the order.
            batch: rows and length of the global batch; None = BatchSpec().
            mixture: repeats per owner and epoch; None = every record once.
            excluded: record ids that never appear; ids that are not in the store have no effect.
            weights: how often each record stands in an epoch, times the mixture's repeats; None = once.

        Raises:
            DataError: an owner of the mixture that the tokens don't have, or no record left.
        """
        self.store, self.seed, self.spec = store, seed, batch or BatchSpec()
        self.mixture, self.excluded = mixture or MixtureSpec(), frozenset(excluded)
        dropped_N, micro_N = self._drops(), np.full(store.size, MICRO, dtype=np.int64)
        if weights is not None:
            for first, ids_N32 in store.record_ids():
                micro_N[first : first + len(ids_N32)] = weights.of(ids_N32)
        live_N = store.live_N
        kept_N = live_N[~dropped_N[live_N]]
        times_O = np.array([*store.repeats(self.mixture).values()] or [1])
        micro_N = micro_N[kept_N] * times_O[store.owner_codes_N[kept_N]]
        self.num_excluded = len(live_N) - len(kept_N)
        if not (micro_N > 0).any():
            raise DataError(
                f"no record is left to train on: {len(live_N)} live, {self.num_excluded} excluded, "
                "the rest repeated 0 times by the mixture or of weight 0",
            )
        if (micro_N % MICRO).any() and micro_N.max() > MAX_MICRO:
            raise DataError(
                f"mixture.repeats: expected weight times repeats of at most {MAX_MICRO} millionths, got {micro_N.max()}"
            )
        self.order = Order(kept_N, store.lengths_N[kept_N], micro_N, store.size, seed)

    def _drops(self) -> np.ndarray:
        """Which records of the store are excluded, bool [N]."""
        dropped_N = np.zeros(self.store.size, dtype=bool)
        if self.excluded:
            excluded_M = sorted_ids(self.excluded)
            for first, ids_N32 in self.store.record_ids():
                dropped_N[first : first + len(ids_N32)] = find(excluded_M, ids_N32)[0]
        return dropped_N

    @property
    def steps_per_epoch(self) -> float:
        """Steps after which every document has been seen as often as its weight says, on average."""
        return self.order.mean_tokens / (self.spec.rows * self.spec.length)

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
            epoch = self.order.at(position)
            offset = position - epoch.first
            place = int(np.searchsorted(epoch.starts_R1, offset, side="right")) - 1
            while position < stop and place < len(epoch.order_R):
                index = int(epoch.order_R[place])
                first = position - epoch.first - int(epoch.starts_R1[place])
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
