"""Who am I among the processes: the only place that reads what a launcher says (RANK, WORLD_SIZE, LOCAL_RANK).

A layout says how many processes a run has; the launcher says how many there are. If the two differ the run is
refused, because a batch cut for two processes and computed by one would silently train on half of it.

gloo joins processes on CPUs, nccl on GPUs. torch.distributed starts only when there is more than one process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from trainer.errors import LostProcessError, SpecError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.spec import Layout

# A rank that died leaves the others in a collective: without a limit they would hold the machine for half an hour.
TIMEOUT_S = 300
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    """This process, 0 <= rank < world_size."""
    world_size: int = 1
    """Number of processes."""
    device: str = "cpu"
    """Device of this process."""
    device_mesh: DeviceMesh | None = None
    """One axis "data" over all processes, or None for one process."""
    owns_group: bool = False
    """Whether `init_mesh` started the process group, so that `close` must end it."""

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over all processes, in place; returns it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, by rank; small things that pickle can carry, from processes of the same run."""
        if self.world_size == 1:
            return [value]
        values = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all processes."""
        if self.world_size > 1:
            dist.barrier()

    def close(self) -> None:
        """End the process group if `init_mesh` started it."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def environment_rank() -> int:
    """The rank that the launcher gave this process, 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def die_with_launcher() -> None:
    """Ask the kernel to end this process when torchrun dies (Linux; elsewhere, or without torchrun, nothing happens).

    torchrun ends its workers when it is stopped, but not when it is killed: without this they would train on, writing
    into a folder that the next start believes to be its own.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)


def launched_world() -> int:
    """How many processes there are, as the launcher or an existing process group says; 1 without either."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_mesh(layout: Layout, timeout_s: int = TIMEOUT_S) -> Mesh:
    """Join the processes of a layout.

    Args:
        layout: strategy and number of processes. A process group that is already there is used as it is.
        timeout_s: longest wait in a collective, seconds.

    Returns:
        The mesh, seen from this process.

    Raises:
        SpecError: there are more or fewer processes than the layout says.
    """
    joined = dist.is_available() and dist.is_initialized()
    world = launched_world()
    if world != layout.world_size:
        raise SpecError(
            f"layout.world_size: the run wants {layout.world_size} process(es), the launcher started {world}; "
            f"start it with torchrun --standalone --nproc-per-node {layout.world_size} -m trainer DIR/run.json",
        )
    device = _device()
    if world == 1:
        return Mesh(device=device)
    if not joined:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        _join(backend, timedelta(seconds=timeout_s))
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device.split(":")[0], (world,), mesh_dim_names=("data",))
    return Mesh(dist.get_rank(), world, device, mesh, owns_group=not joined)


def _join(backend: str, timeout: timedelta) -> None:
    """Start the process group, by the store that the launcher names.

    torchrun --standalone keeps one store over restarts (torch 2.13), with the addresses that dead processes left in
    it: a restarted gloo would connect to those. So every attempt has a part of the store of its own.
    """
    from torch.distributed.rendezvous import rendezvous

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        whole, rank, world = next(rendezvous("env://", timeout=timeout))
        store = dist.PrefixStore(f"attempt{attempt}of{world}", whole)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except RuntimeError as error:  # gloo's own, and torch's DistError
        raise LostProcessError(f"the processes could not join each other: {error}") from error


def _device() -> str:
    """A GPU of this process's own if there is one, else the CPU."""
    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(local)
    return f"cuda:{local}"
