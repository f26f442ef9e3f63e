"""The loss-spike guard: one bad batch must not cost a run.

    spike:  loss not finite, or  loss > median + threshold * max(1.4826 * MAD, median / 1000)      over the last W losses

MAD is the median absolute deviation; 1.4826 makes it the standard deviation of normal numbers, and unlike a standard
deviation it isn't moved by the spikes themselves. Only losses of accepted steps enter the window, and the guard
sleeps until W of them are there, so the fall of the first steps is no reference.

A spike's update is left out (skip), or all updates since the newest checkpoint are undone as well (rollback: the
damage often began some steps before it shows). Either way the step counts as done: step s still trains on
`batch(s - 1)`, no batch is seen twice, and the schedule goes on. Before the first checkpoint rollback means skip.

The window is part of the checkpointed state (`guard.*`), so a resumed run decides as an uninterrupted one. Every
process votes and one vote is enough: a last bit that differs between processes can't part them. Each event is one
line of events.jsonl. More events than the limit mean that the training is not stable, and end it.

Source: skipping batches after a restart from before the spike, PaLM arXiv 2204.02311 section 5.1; MAD, Rousseeuw and
Croux (1993), J. Am. Stat. Assoc. 88, 1273.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

import torch

from provenance.canonical import jcs, write_atomic
from trainer.errors import NumericalError
from trainer.metrics import read_lines

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer.choices import GuardSpec
    from trainer.mesh import Mesh

FORMAT = 1
EVENTS_FILE = "events.jsonl"
_NORMAL = 1.4826  # 1 / 0.6745, the upper quartile of the standard normal distribution
_LEAST_SPREAD = 1e-3  # of the median: losses that hardly differ must not make every change a spike


def spike_limit(losses: Sequence[float], threshold: float) -> float:
    """The largest loss that is not a spike.

    Args:
        losses: the window, not empty, finite.
        threshold: in robust standard deviations.

    Returns:
        median + threshold * robust standard deviation.
    """
    middle = statistics.median(losses)
    spread = _NORMAL * statistics.median(abs(loss - middle) for loss in losses)
    return middle + threshold * max(spread, _LEAST_SPREAD * abs(middle))


class SpikeGuard:
    """Decides which steps update the weights; one per process."""

    def __init__(self, spec: GuardSpec, mesh: Mesh) -> None:
        """An empty window.

        Args:
            spec: window, threshold, action, limit.
            mesh: the processes that must agree.
        """
        self.spec, self.mesh = spec, mesh
        self.losses_W = torch.zeros(spec.window, dtype=torch.float64, device=mesh.device)
        self.counts = torch.zeros(2, dtype=torch.int64, device=mesh.device)
        self.limit = math.inf

    @property
    def num_accepted(self) -> int:
        """Steps whose loss entered the window."""
        return int(self.counts[0].item())

    @property
    def num_spikes(self) -> int:
        """Spikes so far, over all starts of the run."""
        return int(self.counts[1].item())

    def state(self) -> dict[str, Tensor]:
        """The window and (accepted steps, spikes) as named tensors, not copies."""
        return {"losses": self.losses_W, "counts": self.counts}

    def accept(self, loss: float, norm: float) -> bool:
        """Whether a step may update the weights; every process must call this and gets the same answer.

        Args:
            loss: global loss, may be NaN or infinite.
            norm: global gradient norm, likewise.

        Returns:
            False for a spike, which is counted; True takes the loss into the window.

        Raises:
            NumericalError: this is one spike more than the limit.
        """
        width, seen = self.spec.window, self.num_accepted
        full = seen >= width
        self.limit = spike_limit(self.losses_W.tolist(), self.spec.threshold) if full else math.inf
        spike = not (math.isfinite(loss) and math.isfinite(norm)) or loss > self.limit
        vote = torch.tensor([float(spike)], dtype=torch.float64, device=self.losses_W.device)
        if self.mesh.sum(vote).item() > 0:
            self.counts[1] += 1
            if self.num_spikes > self.spec.limit:
                raise NumericalError(
                    f"loss {loss}, gradient norm {norm}: spike number {self.num_spikes}, the guard allows "
                    f"{self.spec.limit}; lower lr, or raise guard.threshold if these are no spikes"
                )
            return False
        self.losses_W[seen % width] = loss
        self.counts[0] += 1
        return True

    def forget_undone(self, num_spikes: int) -> None:
        """After the window was loaded from a checkpoint: spikes stay counted, also those that are undone.

        Args:
            num_spikes: spikes so far.
        """
        self.counts[1] = num_spikes

    def event(self, step: int, loss: float, norm: float, restored: str) -> dict[str, Any]:
        """The line of events.jsonl about the spike that `accept` just found.

        Args:
            step: step of the spike, counted from 1.
            loss: its loss.
            norm: its gradient norm.
            restored: name of the checkpoint that was gone back to, or "none".

        Returns:
            Canonical values: integers and decimal strings. The updates of steps first_void..step had no effect.
        """
        first_void = int(restored.removeprefix("step-")) + 1 if restored != "none" else step
        return {
            "format": FORMAT, "kind": "spike", "step": step, "first_void": first_void, "restored": restored,
            "action": self.spec.action, "loss": repr(loss), "grad_norm": repr(norm), "limit": repr(self.limit),
        }  # fmt: skip


def append_event(directory: Path, line: dict[str, Any]) -> None:
    """Add one line to events.jsonl, atomically.

    Args:
        directory: folder of the run.
        line: the event.
    """
    _write(directory / EVENTS_FILE, [*read_lines(directory / EVENTS_FILE), line])


def restore_events(directory: Path, done: int) -> None:
    """Cut events.jsonl back to the steps of the checkpoint that a run goes on from.

    Args:
        directory: folder of the run.
        done: steps of that checkpoint; later ones will be done, and judged, again.
    """
    path = directory / EVENTS_FILE
    if path.exists():
        _write(path, [line for line in read_lines(path) if line["step"] <= done])


def _write(path: Path, lines: list[dict[str, Any]]) -> None:
    write_atomic(path, b"".join(jcs(line) + b"\n" for line in lines))
