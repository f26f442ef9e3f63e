"""Who is there, who agrees: how the processes of a run notice that one of them is lost, or holds other numbers.

*Lost.* A process that dies closes its connections, one that hangs lets the others' collectives run into their
timeout; gloo says neither who nor why ("Connection closed by peer", "Timed out waiting 5000ms for recv operation").
So a process whose collective fails answers a roll call in the store that the processes joined by, and whoever has not
answered after GRACE_S is named. A process that ends by an error of its own leaves it there as its last words. (gloo's
`monitored_barrier` names a process that hangs, but not one that died, and costs a millisecond a step.)

*Desynchronised.* Replicas compute the same update from the same gradients, so they must hold the same bits; a flipped
bit, a missed collective or a wrong partition breaks that silently. Two processes that hold the same slice of the same
tensor are replicas, whatever the layout: each digests its slices, and digests of the same slice are compared. The
majority is believed; between two, the lower rank.

*Agreed.* What only one process sees, such as a bad file on its disk, is raised by all of them.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import distributed as dist

from trainer.errors import DesyncError, LostProcessError, TrainerError
from trainer.partition import local

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from trainer.mesh import Mesh

T = TypeVar("T")

GRACE_S = 5.0
"""How long a roll call waits for an answer, at most the timeout of a collective."""
_LOST = (
    "Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "timed out",
    "monitoredBarrier", "NCCL", "Connection refused", "failed to connect", "Socket",
)  # fmt: skip


def agreed(mesh: Mesh, action: Callable[[], T]) -> T:
    """Do something on every process; if it is refused on one, it is refused on all with the same words.

    Args:
        mesh: the processes; each must call this.
        action: without collectives of its own.

    Returns:
        This process's result.

    Raises:
        TrainerError: of the lowest rank that has one; an OSError likewise.
    """
    result, error = None, None
    try:
        result = action()
    except (TrainerError, OSError) as refused:
        error = refused
    for rank, other in enumerate(mesh.gather(error)):
        if other is not None:
            raise error if rank == mesh.rank else other  # type: ignore[misc]  # its own is `error`
    return result  # type: ignore[return-value]  # an action without error has returned


class Watch:
    """Guards the collectives of a run; a context manager around all of them, free until something fails."""

    def __init__(self, mesh: Mesh, timeout_s: int) -> None:
        """Every process makes one, at the same time.

        Args:
            mesh: the processes.
            timeout_s: longest wait in a collective, seconds.
        """
        self.mesh, self.timeout_s = mesh, timeout_s
        self._group: Any = None  # not `mesh.side`, which a save in the background may be using
        self._store: Any = None
        self._meets = False
        if mesh.world_size > 1:
            whole = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - there is no public name for it
            # Runs that follow each other in one process group do not read each other's answers.
            number = (whole.add("watch", 1) - 1) // mesh.world_size
            self._store = dist.PrefixStore(f"watch{number}", whole)
            # nccl raises nothing in Python when a collective hangs: there the processes meet before each step.
            self._meets = mesh.device != "cpu"
            if self._meets:
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def __enter__(self) -> Self:
        """The watch itself."""
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Turn a failed collective into the name of the process that is missing.

        Raises:
            LostProcessError: instead of the error of a collective.
        """
        if self._store is None or error is None:
            return
        if _contact_lost(error):
            raise self._roll_call(error) from error
        self._leave_words(error)

    def meet(self) -> None:
        """Before a step: see that all processes came to it, where the step itself would not say."""
        if self._meets:
            dist.monitored_barrier(self._group, timedelta(seconds=self.timeout_s))

    def _leave_words(self, error: BaseException) -> None:
        """Say why this process ends. The store may be rank 0's own: it stays until the others have read it."""
        with suppress(RuntimeError):
            self._store.set(f"words{self.mesh.rank}", f"{type(error).__name__}: {error}"[:500])
            if self.mesh.rank == 0:
                dist.destroy_process_group()  # wakes those that wait for this process
                self._answers()

    def _roll_call(self, error: BaseException) -> LostProcessError:
        """Answer, wait for the others' answers, and say who has not answered."""
        words: dict[int, str] = {}
        try:
            words = self._words()
            with suppress(RuntimeError):
                dist.destroy_process_group()
            self._store.set(f"here{self.mesh.rank}", "")
            silent = [] if words else self._answers()
            words = words or self._words()
        except RuntimeError:  # the store was rank 0's and went with it
            silent = [0]
        return _lost(self.mesh, silent, words, self.timeout_s, error)

    def _answers(self) -> list[int]:
        """Wait for the others to answer or to have said their last words; returns those that did neither."""
        until = time.monotonic() + min(GRACE_S, self.timeout_s)
        silent = [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]
        while silent and time.monotonic() < until:
            silent = [r for r in silent if not self._has(f"here{r}") and not self._has(f"words{r}")]
            time.sleep(0.02)
        return silent

    def _words(self) -> dict[int, str]:
        """Rank -> last words of the others."""
        others = [rank for rank in range(self.mesh.world_size) if rank != self.mesh.rank]
        return {r: self._said(f"words{r}") for r in others if self._has(f"words{r}")}

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _said(self, key: str) -> str:
        return bytes(self._store.get(key)).decode(errors="replace")


def check_replicas(tensors: Mapping[str, Tensor], mesh: Mesh, when: str) -> None:
    """Refuse to go on if processes that should hold the same numbers do not.

    Args:
        tensors: logical name -> tensor or slice of this process.
        mesh: the processes; each must call this.
        when: "step 8", for the message.

    Raises:
        DesyncError: names the processes that differ and the first tensor; the same on every process.
    """
    if mesh.world_size == 1:
        return
    held: dict[tuple[str, Any], dict[str, list[int]]] = {}
    for rank, digests in enumerate(mesh.gather(slice_digests(tensors, mesh.world_size))):
        for key, digest in digests.items():
            held.setdefault(key, {}).setdefault(digest, []).append(rank)
    wrong: dict[str, set[int]] = {}
    for (name, _), ranks_of in sorted(held.items()):
        if len(ranks_of) > 1:
            believed = max(ranks_of.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            differing = {r for ranks in ranks_of.values() if ranks is not believed for r in ranks}
            wrong.setdefault(name, set()).update(differing)
    if wrong:
        first, ranks = next(iter(wrong.items()))
        listed = ", ".join(map(str, sorted(ranks)))
        more = f" and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise DesyncError(
            f"{when}: rank {listed} holds other numbers than its replicas in {first}{more}; "
            "start the run again, it goes on from the last good checkpoint"
        )


def slice_digests(tensors: Mapping[str, Tensor], world: int) -> dict[tuple[str, Any], str]:
    """(name, which slice) -> digest of what this process holds, without slices that nobody else can hold.

    Args:
        tensors: logical name -> tensor or slice.
        world: number of processes.

    Returns:
        Hex digests of 16 bytes; a whole tensor has the empty slice.
    """
    found = {}
    for name, tensor in tensors.items():
        where = _slice(tensor)
        if where is None or len(where) < _axes(tensor) or _mesh_size(tensor) < world:
            found[name, where or ()] = _digest(local(tensor))
    return found


def _slice(tensor: Tensor) -> tuple[tuple[int, int], ...] | None:
    """(mesh axis, coordinate) for every axis that a tensor is cut along; None for a plain tensor."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return None
    coordinate = tensor.device_mesh.get_coordinate()  # type: ignore[attr-defined]  # a DTensor has one
    return tuple(
        (axis, coordinate[axis])
        for axis, placement in enumerate(placements)
        if not placement.is_replicate()
    )


def _axes(tensor: Tensor) -> int:
    return len(getattr(tensor, "placements", ()))


def _mesh_size(tensor: Tensor) -> int:
    mesh = getattr(tensor, "device_mesh", None)
    return 0 if mesh is None else mesh.size()


def _digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(data.data).hexdigest()[:32]


def _contact_lost(error: BaseException) -> bool:
    """Whether an error says that a collective failed; DCP wraps those of its own in a mapping of failures."""
    wrapped = [cause for cause, _ in getattr(error, "failures", {}).values()]
    if isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST):
        return True
    cause = error.__cause__
    causes = wrapped if cause is None or cause is error else [*wrapped, cause]
    return any(_contact_lost(cause) for cause in causes)


def _lost(
    mesh: Mesh, silent: list[int], words: dict[int, str], timeout_s: int, error: BaseException
) -> LostProcessError:
    if words:
        rank, said = min(words.items())
        text = f"rank {rank} stopped: {said}"
    elif silent:
        listed = ", ".join(map(str, silent))
        text = f"rank {listed} died, or did not come to a collective within {timeout_s} s"
    else:
        text = f"a collective failed although every process is there: {error}"
    # Who ends by an error of its own reports it; only for those that can't does the first of the others speak.
    present = [rank for rank in range(mesh.world_size) if rank not in silent]
    speaker = -1 if 0 in words else present[0]
    return LostProcessError(
        f"{text}; start the run again, it goes on from its newest checkpoint", speaker=speaker
    )
