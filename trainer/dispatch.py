"""Expert parallelism: the experts are divided among processes, and tokens travel to theirs and back.

    rows sorted by expert --all-to-all--> sorted by source --sort--> by expert --experts--> --unsort--> --all-to-all--> back

Each process sends as many rows to each other one as its tokens chose experts there: the splits are uneven, and may be
zero. A process whose experts nobody chose takes part in every exchange with zero rows, forward and backward, so nothing
hangs and its gradients are zero. No row is dropped: memory follows the load, which the router's balance keeps even.

The processes are those of dp_shard * sp, regrouped: ep neighbours share one set of experts, and the dp_shard * sp / ep
sets are slices of each other (`efsdp`: FSDP along the inner width). tp copies the experts: each process sends the
tokens of its own positions.

Bytes per layer and process: 4 exchanges (two forward, two backward) of K rows of D per token, the share (ep-1)/ep of
which leaves the process.

Legend: R rows, D width, E experts, P = ep processes, e = E/P experts of one process.

Source: arXiv 2006.16668 section 3; dropless as in MegaBlocks arXiv 2211.15841.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from trainer.tensor import sliced

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.model import Transformer


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Keep a slice of the experts of a model or of a pipeline stage, in place.

    Args:
        model: with whole experts, the same on every process.
        mesh: the axis ep.
    """
    for block in model.blocks.values():
        mixture = cast("Any", block).ffn
        for name, weight in list(mixture.experts.named_parameters()):
            setattr(mixture.experts, name, sliced(weight, mesh, 0))
        mixture.dispatch = Dispatch(mesh.get_group())


class Dispatch:
    """Sends rows to the processes of their experts and the results back."""

    def __init__(self, group: ProcessGroup) -> None:
        """Exchange among a group, whose k-th process has the k-th part of the experts."""
        self.group = group

    def __call__(
        self, rows_RD: Tensor, load_E: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Results of rows.

        Args:
            rows_RD: this process's rows, sorted by expert.
            load_E: int64 number of them for each expert of all processes.
            experts: those of this process: (rows sorted by expert, number of rows of each) -> results.

        Returns:
            Results [R, D], in the order of the rows.
        """
        processes = dist.get_world_size(self.group)
        arrived_E = torch.empty_like(load_E)
        dist.all_to_all_single(arrived_E, load_E, group=self.group)
        arrived_Pe = arrived_E.view(processes, -1)
        sent = load_E.view(processes, -1).sum(1).tolist()
        arrived = arrived_Pe.sum(1).tolist()
        mine = send(rows_RD, sent, arrived, self.group)
        # What arrives is sorted by source, then by expert.
        of_R = torch.arange(arrived_Pe.shape[1], device=rows_RD.device)
        of_R = of_R.repeat(processes).repeat_interleave(arrived_E)
        order_R = of_R.argsort(stable=True)
        results = experts(mine.index_select(0, order_R), arrived_Pe.sum(0))
        back_R = torch.empty_like(order_R)
        back_R[order_R] = torch.arange(len(order_R), device=order_R.device)
        return send(results.index_select(0, back_R), arrived, sent, self.group)


def send(rows_RD: Tensor, sent: list[int], arrived: list[int], group: ProcessGroup) -> Tensor:
    """Exchange rows.

    Args:
        rows_RD: sorted by destination.
        sent: number of rows for each process of the group.
        arrived: number of rows from each of them.
        group: the processes.

    Returns:
        The rows that arrive, sorted by source; the backward pass sends their gradients back.
    """
    return cast("Tensor", _Send.apply(rows_RD, sent, arrived, group))


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_RD: Tensor, sent: list[int], arrived: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.given = sent, arrived, group
        found = rows_RD.new_empty((sum(arrived), *rows_RD.shape[1:]))
        dist.all_to_all_single(found, rows_RD.contiguous(), arrived, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sent, arrived, group = ctx.given
        return send(grads[0], arrived, sent, group), None, None, None


def expert_modules(model: Transformer) -> list[nn.Module]:
    """The stacks of experts in a model or stage, which live on the sparse mesh."""
    return [cast("Any", block).ffn.experts for block in model.blocks.values()]
