"""Batches of every method: rows of what remains, and under them rows of the records that a step pushes.

One forward pass serves both terms: forgotten records are packed into rows of the same length and put under the retained rows (a
sharded model must be called whole, and only once). Rows are whole here; `spread` says which positions of them a process computes.

A pipeline cuts its rows into microbatches of one shape, and only its last stage has logits. A record, and the answer that
is preferred over it, must lie in one microbatch, because most losses bend the record's sum: so each microbatch is made as
the batch of one more process would be, and filled up with empty rows.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from trainer.data import pack
from trainer.objective import LanguageModelling, label_count
from unlearning.errors import PlanError
from unlearning.methods.spread import ROWS, Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainer.data import BatchPlan
    from trainer.mesh import Mesh
    from unlearning.methods.forget_retain import Forgotten
    from unlearning.methods.reference import Reference


@dataclass(frozen=True, slots=True, repr=False)
class ForgetBatch:
    """One process's part of a step: retained rows, then rows of forgotten records; whole rows, all [B, T]."""

    tokens_BT: Tensor
    """Token ids."""
    labels_BT: Tensor
    """Next token of the same document, -100 where there is none."""
    positions_BT: Tensor
    """Position inside the document."""
    documents_BT: Tensor
    """Label of the document."""
    record_BT: Tensor
    """Ordinal in `chosen` of the record that a position predicts a pushed token of, plus len(chosen) for its preferred answer,
    else -1."""
    place_BT: Tensor
    """Where the original's state at a retained position lies (`reference`), -1 where it isn't asked for."""
    num_retained_rows: int
    """Rows of ordinary language modelling; they come first, in each piece."""
    chosen: tuple[int, ...]
    """Indices into the objective's forgotten records."""
    pieces: int = 1
    """Microbatches of a pipeline that follow each other along the rows."""

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The six columns."""
        columns = self.tokens_BT, self.labels_BT, self.positions_BT, self.documents_BT
        return *columns, self.record_BT, self.place_BT


class ForgetBatches:
    """Which rows a step has, on any number of processes."""

    def __init__(
        self,
        plan: BatchPlan,
        forgotten: Sequence[Forgotten],
        *,
        preferred: Sequence[Forgotten] = (),
        forget_records: int = 32,
    ) -> None:
        """Keep the records.

        Args:
            plan: batches of what remains.
            forgotten: records to push down.
            preferred: no answers, or one per forgotten record.
            forget_records: records per step over all processes.

        Raises:
            PlanError: without any forgotten record.
        """
        if not forgotten:
            raise PlanError(
                "expected at least one forgotten record of two or more tokens, got none"
            )
        self._retained = LanguageModelling(plan)
        self._forgotten, self._base = [*forgotten, *preferred], len(forgotten)
        self._per_step = min(forget_records, len(forgotten))
        self._seed, self._length = plan.seed, plan.spec.length
        self._spread = Spread()
        self._reference: Reference | None = None

    def batch(self, step: int, rank: int, world: int) -> ForgetBatch:
        """This process's retained rows and its share of the step's forgotten records."""
        count = self._spread.pieces
        pieces = [self._piece(step, rank * count + j, world * count) for j in range(count)]
        return pieces[0] if count == 1 else _joined(pieces)

    def _piece(self, step: int, rank: int, world: int) -> ForgetBatch:
        """Retained rows of one of `world` parts, with rows of its records under them."""
        chosen = self.chosen(step)
        mine = tuple(chosen[len(chosen) * rank // world : len(chosen) * (rank + 1) // world])
        retained = self._retained.batch(step, rank, world)
        pushed, record = self._rows_of(mine)
        rows = [torch.cat(pair) for pair in zip(retained, pushed, strict=True)]
        nowhere, place = torch.full_like(retained[0], -1), torch.full_like(pushed[0], -1)
        asked = self._places(step, rank, world) if self._reference else nowhere
        rows += [torch.cat([nowhere, record]), torch.cat([asked, place])]
        whole = [row.to(_device()) for row in self._spread.padded(tuple(rows))]
        return ForgetBatch(**_named(whole), num_retained_rows=len(retained[0]), chosen=mine)

    def _places(self, step: int, rank: int, world: int) -> Tensor:
        """Where the original's states at the retained rows of one of `world` parts lie."""
        assert self._reference is not None
        rows = self._retained.whole(step).segments
        own = rows[len(rows) * rank // world : len(rows) * (rank + 1) // world]
        return self._reference.places(own, self._length)

    def _rows_of(self, mine: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Forgotten records and their preferred answers packed into rows, and which position predicts a pushed token of which."""
        answers = range(self._base, len(self._forgotten))
        texts = [self._forgotten[i] for i in (*mine, *(answers[i] for i in mine if answers))]
        packed = pack(((n, b"", one.tokens) for n, one in enumerate(texts)), self._length)
        record = np.full(packed.tokens_BT.shape, -1, dtype=np.int64)
        for row, segments in enumerate(packed.segments):
            for segment in segments:
                # Position t predicts token t+1: the span begins one position before its first token.
                begin = segment.column + texts[segment.index].first - 1
                record[row, begin : segment.column + segment.count - 1] = segment.index
        return packed.tensors(), torch.from_numpy(record)

    def counts(self, batch: ForgetBatch) -> Tensor:
        """Local numbers of retained labels and of forgotten records, float64 [2]."""
        per_piece = batch.labels_BT.unflatten(0, (batch.pieces, -1))[:, : batch.num_retained_rows]
        labels = label_count(self._spread.own(per_piece.flatten(0, 1)))
        # All processes of a row know its records; the first says so.
        said = len(batch.chosen) * (self._spread.mesh.coordinate("sp") == 0)
        return torch.cat([labels, labels.new_tensor([said])])

    def divide(self, mesh: Mesh) -> None:
        """Learn the processes."""
        self._spread = Spread(mesh)

    def pipelined(self, batch: ForgetBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What stages need: this process's positions, and as target the whole rows of all columns, [B, T, 6]."""
        own = self._spread.own
        tokens, positions, documents = batch.tokens_BT, batch.positions_BT, batch.documents_BT
        return own(tokens), torch.stack(batch.rows, -1), own(positions), own(documents)

    def records(self, step: int) -> list[tuple[int, bytes]]:
        """Retained records of a step; the forgotten ones are sealed and stand in no window."""
        return self._retained.records(step)

    def chosen(self, step: int) -> list[int]:
        """Which forgotten records a step pushes: epochs of permutations keyed by (seed, epoch).

        Args:
            step: counted from 0.

        Returns:
            Indices, a pure function of seed and step.
        """
        found = []
        for position in range(step * self._per_step, (step + 1) * self._per_step):
            epoch, place = divmod(position, self._base)
            found.append(int(self._order(epoch, self._base)[place]))
        return found

    def _order(self, epoch: int, count: int) -> Any:
        key = hashlib.sha256(f"dataworth-forget-1|{self._seed}|{epoch}".encode()).digest()
        return np.random.default_rng(int.from_bytes(key, "big")).permutation(count)


def _joined(pieces: list[ForgetBatch]) -> ForgetBatch:
    """Pieces under each other, each with as many rows as the largest; records counted through."""
    most = max(len(piece.tokens_BT) for piece in pieces)
    chosen = tuple(index for piece in pieces for index in piece.chosen)
    first, columns = 0, []
    for piece in pieces:
        count, record = len(piece.chosen), piece.record_BT
        # Ordinals of answers follow those of all pieces' records.
        shift = torch.where(record < count, first, first + len(chosen) - count)
        first += count
        rows = dataclasses.replace(
            piece, record_BT=torch.where(record < 0, record, record + shift)
        ).rows
        missing = (0, 0, 0, most - len(record))
        columns.append(
            [functional.pad(row, missing, value=fill) for row, fill in zip(rows, ROWS, strict=True)]
        )
    whole = _named([torch.cat(parts) for parts in zip(*columns, strict=True)])
    return dataclasses.replace(pieces[0], **whole, chosen=chosen, pieces=len(pieces))


def _named(columns: list[Tensor]) -> dict[str, Any]:
    """Columns in the order of `ForgetBatch.rows`, by field."""
    names = ("tokens", "labels", "positions", "documents", "record", "place")
    return {f"{name}_BT": column for name, column in zip(names, columns, strict=True)}


def _device() -> str:
    """The GPU that `trainer.mesh` has chosen for this process by the time batches are drawn, else the CPU."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
