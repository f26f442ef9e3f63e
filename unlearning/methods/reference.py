"""What the original makes of the retained tokens that a run will ask about, computed once, so that no step asks the original.

    kl                        last state, before the head  [P, 1, D];  log-probabilities follow by one product with the head  [V, D]
    rmu, adaptive_rmu, rau    states after the chosen layers  [P, L, D]

A batch is a pure function of the step, so all rows of a run are known before its first one. A position's state depends on the tokens
before it in its own document and on nothing else in its row, so it belongs to (record, first token of the segment, place in it):
a record that stands in many rows, as a quoted person's does, is computed once, and states fit rows however they are cut, padded
or divided among processes. Documents are packed for this as for an evaluation, whole, by the whole original, before the
layout is applied; what remains of it in a run is these states and, for kl, its head.

**Why states and not log-probabilities.** They are V / D times smaller (16 at the smallest model here, 60 at a billion parameters), and the
product with the head is what a forward pass does last. So there is one way for all sizes, and its size is known beforehand:
N tokens x L states x D numbers, which are mapped from a file without a name in the run's folder. No name: nothing of it can be left behind,
not even by a kill, and no other run can read it; a run that goes on computes the states of its remaining steps again.

Source: ours; references computed once before training are common in preference optimisation (TRL's `precompute_ref_log_probs`).
"""

from __future__ import annotations

import os
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data import pack
from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from torch import Tensor

    from trainer.data import BatchPlan, Segment

Key = tuple[int, int]
"""Record's index in the store, first token of the segment."""
_ROWS = 16
"""Rows of one forward pass."""
NOWHERE = -1


class Reference:
    """States of the original at retained positions, and where each position's lies."""

    def __init__(
        self, plan: BatchPlan, steps: range, part: tuple[int, int], original: Any, layers: tuple[int, ...] | None, folder: Path | None = None
    ) -> None:  # fmt: skip
        """Compute them.

        Args:
            plan: batches of what remains.
            steps: those that will be asked about.
            part: (k, n): the k-th of n parts of each batch's rows.
            original: the original model, whole, in evaluation mode.
            layers: whose states, 0 = after the embedding; None = the last state as the head takes it.
            folder: where the file without a name lies; None = where the system keeps temporary files.

        Raises:
            PlanError: the folder has no room; says how much is needed.
        """
        self.steps, self.layers = steps, layers
        counts = _segments(plan, steps, part)
        sizes_S = np.fromiter(counts.values(), np.int64, len(counts))
        starts_S = np.cumsum(sizes_S) - sizes_S
        self._starts: dict[Key, int] = dict(zip(counts, starts_S.tolist(), strict=True))
        weight = next(original.parameters())
        self.num_tokens = int(sizes_S.sum())
        shape = max(self.num_tokens, 1), len(layers or (0,)), original.spec.dim
        self._states_PLD = _mapped(shape, weight.dtype, folder)
        for keys in _groups(counts, _ROWS * plan.spec.length):
            self._fill(plan, keys, counts, original)

    def places(self, rows: Iterable[tuple[Segment, ...]], length: int) -> Tensor:
        """Where the states of whole rows lie, int64 [B, T]; -1 at padding.

        Args:
            rows: what stands where, from a batch of one of the steps.
            length: T.

        Raises:
            PlanError: a segment that no step of the run has.
        """
        found = []
        for segments in rows:
            place_T = np.full(length, NOWHERE, dtype=np.int64)
            for index, _, first, count, column in segments:
                start = self._starts.get((index, first))
                if start is None:
                    raise PlanError(
                        f"expected a batch of steps {self.steps.start} to {self.steps.stop - 1}, whose references were computed, got another one's"
                    )
                place_T[column : column + count] = np.arange(start, start + count)
            found.append(place_T)
        return torch.from_numpy(np.stack(found) if found else np.zeros((0, length), np.int64))

    def at(self, places_P: Tensor) -> Tensor:
        """States [P, L, D] at places, on their device; where there is none, another position's."""
        return self._states_PLD[places_P.clamp(min=0).cpu()].to(places_P.device)

    @torch.no_grad()
    def _fill(
        self, plan: BatchPlan, keys: list[Key], counts: dict[Key, int], original: Any
    ) -> None:
        texts = [
            plan.store.tokens(index)[first : first + counts[index, first]] for index, first in keys
        ]
        packed = pack(((n, b"", text) for n, text in enumerate(texts)), plan.spec.length)
        device = next(original.parameters()).device
        tokens_BT, _, positions_BT, documents_BT = (one.to(device) for one in packed.tensors())
        last_BTD, hidden = original.trunk(tokens_BT, positions_BT, documents_BT)
        chosen = [last_BTD] if self.layers is None else [hidden[layer] for layer in self.layers]
        states_BTLD = torch.stack(chosen, 2)
        for row, segments in enumerate(packed.segments):
            for segment in segments:
                start = self._starts[keys[segment.index]]
                columns = slice(segment.column, segment.column + segment.count)
                self._states_PLD[start : start + segment.count] = states_BTLD[row, columns].cpu()


def _segments(plan: BatchPlan, steps: range, part: tuple[int, int]) -> dict[Key, int]:
    """Every segment that a part of the steps' rows has, and the most tokens that a row has of it."""
    place, parts = part
    counts: dict[Key, int] = {}
    for step in steps:
        rows = plan.batch(step).segments
        for segments in rows[len(rows) * place // parts : len(rows) * (place + 1) // parts]:
            for segment in segments:
                key = segment.index, segment.first
                counts[key] = max(counts.get(key, 0), segment.count)
    return counts


def _groups(counts: dict[Key, int], most: int) -> Iterator[list[Key]]:
    """Segments of about so many tokens together."""
    group, size = [], 0
    for key, count in counts.items():
        group.append(key)
        size += count
        if size >= most:
            yield group
            group, size = [], 0
    if group:
        yield group


def _mapped(shape: tuple[int, int, int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Room for states in a file that has no name and goes with the process."""
    size = int(np.prod(shape)) * dtype.itemsize
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            os.posix_fallocate(
                file.fileno(), 0, size
            )  # or a full disk would end the process, not the write
        except OSError as error:
            raise PlanError(
                f"the original's states at {shape[0]} retained tokens need {size} bytes beside the run: {error.strerror}; make room, or take "
                "fewer steps or a method that asks nothing of the original there (npo, graddiff)"
            ) from error
        bytes_N = np.memmap(file, mode="r+", dtype=np.uint8, shape=(size,))
    return torch.from_numpy(bytes_N).view(dtype).view(shape)
