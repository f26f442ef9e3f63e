"""The next batch, made by a thread while the current step computes.

A batch is a pure function of its step, so making it early changes nothing: the thread is never more than one step
ahead, and a step that wasn't foreseen is made on the spot. numpy and torch let go of the interpreter lock in their
kernels, so the Python of the one runs while the other computes.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainer.data import Batch


class Plan(Protocol):
    """Whatever gives batches by step, such as `trainer.data.BatchPlan`."""

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""


class Prefetcher:
    """Gives the batches of a plan, each made one step ahead."""

    def __init__(self, plan: Plan, steps: int | None = None) -> None:
        """No thread runs before the first batch is asked for.

        Args:
            plan: gives a batch by its step; must not mind being asked by another thread.
            steps: length of the run; no batch from this step on is made in advance.
        """
        self._plan, self._steps = plan, steps
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
        self._next: tuple[int, Future[Batch]] | None = None

    def batch(self, step: int) -> Batch:
        """The global batch of a step; the next one is begun.

        Raises:
            DataError: from the plan, at the step that it belongs to.
        """
        foreseen = self._next
        batch = (
            foreseen[1].result()
            if foreseen is not None and foreseen[0] == step
            else self._plan.batch(step)
        )
        if self._steps is None or step + 1 < self._steps:
            self._next = step + 1, self._executor.submit(self._plan.batch, step + 1)
        return batch

    def close(self) -> None:
        """End the thread; `batch` can't be asked any more."""
        self._executor.shutdown(wait=True, cancel_futures=True)
