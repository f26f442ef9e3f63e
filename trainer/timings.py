"""timings.jsonl: how long each process was in each phase of each step, so that a slow one can be named.

    {"step": 7, "input": [us, ...], "local": [...], "communicate": [...], "update": [...], "checkpoint": [...]}

one entry per rank, in microseconds; the lines of one step add up. The times of a step travel with the counts of the
next one, in an all-reduce that is made anyway; before and after a checkpoint they are gathered, in a line each.

A step of synchronised processes lasts as long as its slowest one: the others wait in the collective. So what a process
spends in `communicate` is waiting for the slowest, up to max(input + local) - its own, and moving bytes, the rest.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from provenance.canonical import write_atomic
from trainer.metrics import read_lines

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.mesh import Mesh

TIMINGS_FILE = "timings.jsonl"
COLUMNS = ("input", "local", "communicate", "update", "checkpoint")


@dataclass(frozen=True, slots=True)
class RankTime:
    """Where the time of one process went, in seconds."""

    compute: float
    """Input, forward, backward and update."""
    communicate: float
    """Moving bytes: collectives without the waiting."""
    idle: float
    """Waiting in collectives for the slowest process."""
    checkpoint: float
    """Saving, as far as training stood still for it."""


class Timings:
    """The times of the last step on their way to timings.jsonl; one per process."""

    def __init__(self, directory: Path, mesh: Mesh, done: int) -> None:
        """Cut the file back to the steps that are done.

        Args:
            directory: folder of the run.
            mesh: the processes.
            done: steps of the checkpoint that the run goes on from.
        """
        self._path, self._mesh = directory / TIMINGS_FILE, mesh
        self._step, self._own = 0, dict.fromkeys(COLUMNS, 0.0)
        if mesh.rank == 0:
            kept = [line for line in read_lines(self._path) if line["step"] <= done]
            write_atomic(self._path, b"".join(json.dumps(line).encode() + b"\n" for line in kept))

    def note(self, step: int, **seconds: float) -> None:
        """Keep what this process spent on a step, by column, until it is written."""
        self._step, self._own = step, dict.fromkeys(COLUMNS, 0.0) | seconds

    def outgoing(self) -> list[float]:
        """World x columns numbers, zero except this process's own: summed over the processes they are everyone's."""
        width = len(COLUMNS)
        row = [0.0] * (self._mesh.world_size * width)
        if self._step:
            row[self._mesh.rank * width : (self._mesh.rank + 1) * width] = self._own.values()
        return row

    def incoming(self, sums: list[float]) -> None:
        """Write the line of the last step from the sums of `outgoing`."""
        if self._step:
            width = len(COLUMNS)
            self._write([sums[at : at + width] for at in range(0, len(sums), width)])

    def flush(self) -> None:
        """Gather and write the line of the last step now; every process calls this."""
        if self._step:
            self._write(self._mesh.gather(list(self._own.values())))

    def _write(self, ranks: list[list[float]]) -> None:
        if self._mesh.rank == 0:
            columns = {
                column: [round(rank[at] * 1e6) for rank in ranks]
                for at, column in enumerate(COLUMNS)
            }
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": self._step, **columns}) + "\n")
        self._step = 0


def rank_times(directory: Path) -> list[RankTime]:
    """Seconds of every process over all steps of a run, by rank; empty without timings."""
    totals: list[list[float]] = []
    for line in read_lines(directory / TIMINGS_FILE):
        busy = [i + p for i, p in zip(line["input"], line["local"], strict=True)]
        while len(totals) < len(busy):
            totals.append([0.0] * 4)
        for rank, own in enumerate(busy):
            waited = min(line["communicate"][rank], max(busy) - own)
            spent = (
                own + line["update"][rank],
                line["communicate"][rank] - waited,
                waited,
                line["checkpoint"][rank],
            )
            totals[rank] = [a + b / 1e6 for a, b in zip(totals[rank], spent, strict=True)]
    return [RankTime(*total) for total in totals]
