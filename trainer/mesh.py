"""Who am I among the processes: the only place that reads what a launcher says (RANK, WORLD_SIZE, LOCAL_RANK).

A layout says how many processes a run has; the launcher says how many there are. If the two differ the run is
refused, because a batch cut for two processes and computed by one would silently train on half of it.

The processes form one grid with the axes of `trainer.layout`; experts see the same processes in another grouping.
gloo joins processes on CPUs, nccl on GPUs. torch.distributed starts only when there is more than one process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from trainer.errors import LostProcessError, SpecError
from trainer.layout import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# A rank that died leaves the others in a collective: without a limit they would hold the machine for half an hour.
TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Mesh:
    """The processes of a run, seen from one of them."""

    rank: int = 0
    """This process, 0 <= rank < world_size."""
    world_size: int = 1
    """Number of processes."""
    device: str = "cpu"
    """Device of this process."""
    layout: Layout = field(default_factory=Layout)
    """The degrees."""
    work: DeviceMesh | None = None
    """How work is divided: pp, dp_replicate, dp_shard, sp, tp over all processes; None for one process."""
    dense: DeviceMesh | None = None
    """How weights are: pp, dp_replicate, fsdp = dp_shard x sp, tp; None for one process."""
    sparse: DeviceMesh | None = None
    """How experts are: pp, dp_replicate, efsdp, ep, tp; None without expert parallelism."""
    side: dist.ProcessGroup | None = None
    """gloo over all processes for saves in the background and nothing else; None for one process."""
    owns_group: bool = False
    """Whether `init_mesh` started the process group, so that `close` must end it."""

    def coordinate(self, axis: str) -> int:
        """Place of this process on an axis of `work`, 0 <= place < degree."""
        return 0 if self.work is None else self.work.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The processes that differ from this one on that axis only."""
        assert self.work is not None, "one process has no groups"
        return self.work.get_group(axis)

    @property
    def batch_place(self) -> tuple[int, int]:
        """(k, n): this process works on the k-th of n parts of the rows; so do all others of its sp, tp and pp."""
        place = self.coordinate("dp_replicate") * self.layout.dp_shard + self.coordinate("dp_shard")
        return place, self.layout.batch_degree

    @property
    def counts(self) -> bool:
        """Whether this process counts the positions that it shares with the others of its tp and pp."""
        return self.coordinate("tp") == 0 and self.coordinate("pp") == 0

    def sum(self, values: Tensor) -> Tensor:
        """Add a tensor up over all processes, in place; returns it."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def sum_stage(self, values: Tensor) -> Tensor:
        """Add a tensor up over the processes that hold the same blocks, in place; returns it."""
        if self.layout.pp == 1:
            return self.sum(values)
        for axis in ("dp_replicate", "dp_shard", "sp", "tp"):
            dist.all_reduce(values, group=self.group(axis))
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


def launched_world() -> int:
    """How many processes there are, as the launcher or an existing process group says; 1 without either."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_mesh(layout: Layout, timeout_s: int = TIMEOUT_S) -> Mesh:
    """Join the processes of a layout.

    Args:
        layout: the degrees. A process group that is already there is used as it is.
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
            f"layout: {layout} wants {layout.world_size} process(es), the launcher started {world}; "
            f"start it with torchrun --standalone --nproc-per-node {layout.world_size} -m trainer DIR/run.json",
        )
    device = _device()
    if world == 1:
        return Mesh(device=device, layout=layout)
    if not joined:
        backend = "nccl" if device.startswith("cuda") else "gloo"
        _join(backend, timedelta(seconds=timeout_s))
    meshes = device_meshes(layout, device.split(":", maxsplit=1)[0])
    side = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return Mesh(dist.get_rank(), world, device, layout, *meshes, side, owns_group=not joined)


def device_meshes(layout: Layout, kind: str) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh | None]:
    """The same processes as three grids; every process must call this.

    Args:
        layout: the degrees.
        kind: of device, "cpu" or "cuda".

    Returns:
        `Mesh.work`, `Mesh.dense`, and `Mesh.sparse` or None. Each has its axes in the order of the ranks, so joining
        or splitting neighbours gives the same processes; torch only slices parameters within one grid.
    """
    from torch.distributed.device_mesh import init_device_mesh

    def grid(**axes: int) -> DeviceMesh:
        shape = (layout.pp, layout.dp_replicate, *axes.values(), layout.tp)
        return init_device_mesh(kind, shape, mesh_dim_names=("pp", "dp_replicate", *axes, "tp"))

    work, dense = grid(dp_shard=layout.dp_shard, sp=layout.sp), grid(fsdp=layout.fsdp)
    slices = layout.fsdp // layout.ep
    return work, dense, grid(efsdp=slices, ep=layout.ep) if layout.ep > 1 else None


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
