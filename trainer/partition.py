"""Phase 1, partition, and phase 3, communicate: the same step on one process or many.

    dp_replicate   every process holds the model; gradients are added up in one flat all-reduce
    dp_shard       every process holds a slice of each parameter, its gradient and its moments (FSDP2, ZeRO-3);
                   parameters are gathered block by block, gradients are summed into the slices by reduce-scatter

Gradients are *added*, never averaged: each process's loss is already divided by the global number of tokens
(`trainer.objective`). FSDP2 averages unless told otherwise, and with gloo a divide factor of 1 needs the plain sum to
be forced as well ("Cannot use ReduceOp.PREMUL_SUM with Gloo").

Bytes per step and process, P parameters of 4 bytes, w processes: ddp sends and receives about 2 (w-1)/w * 4P; fsdp
about 3 (w-1)/w * 4P, for 1/w of the memory.

Source: ZeRO arXiv 1910.02054; FSDP2 pytorch/torchtitan docs/fsdp.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from trainer.errors import NumericalError, SpecError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainer.mesh import Mesh
    from trainer.model import Transformer


def apply_layout(model: Transformer, mesh: Mesh) -> Transformer:
    """Spread a model over the processes of a mesh.

    Args:
        model: the whole model with its initial weights, the same on every process.
        mesh: the processes.

    Returns:
        The model to train: the same object, on the mesh's device, its parameters sliced for dp_shard.

    Raises:
        SpecError: sp, tp, pp or ep, which are not there yet.
    """
    model, layout = model.to(mesh.device), mesh.layout
    if layout.sp * layout.tp * layout.pp * layout.ep > 1:
        raise SpecError(
            f"layout: {layout}: sp, tp, pp and ep are not there yet; use dp_replicate and dp_shard"
        )
    if mesh.dense is not None and layout.dp_shard > 1:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        axes = ("dp_replicate", "fsdp") if layout.dp_replicate > 1 else ("fsdp",)
        for block in model.blocks.values():
            fully_shard(block, mesh=mesh.dense[axes])
        fully_shard(model, mesh=mesh.dense[axes])
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(enable=True)
    return model


def reduce_gradients(
    parameters: Iterable[nn.Parameter], loss: Tensor, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """Add gradients and loss up over all processes, and measure the gradient.

    Args:
        parameters: those that are trained; a gradient that is None counts as zero.
        loss: this process's share of the loss.
        mesh: the processes.

    Returns:
        The global loss and the Euclidean norm of the global gradient, float64 scalars. Gradients are replaced by
        their sums; sliced ones (fsdp) were summed in the backward pass already.
    """
    grads = [_gradient(parameter) for parameter in parameters]
    sliced = [local(grad) is not grad for grad in grads]
    total = loss.detach().double().reshape(1)
    if mesh.world_size == 1:
        return total[0], _square_sum(grads).sqrt()
    if any(sliced):
        # Each slice is on dp_replicate processes, so the squares add up; FSDP slices either all parameters or none.
        squares = _square_sum([local(grad) for grad in grads]) / mesh.layout.dp_replicate
        both = torch.stack([total[0], squares])
        mesh.sum(both)
        return both[0], both[1].sqrt()
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    mesh.sum(flat)
    mesh.sum(total)
    for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))
    return total[0], _square_sum(grads).sqrt()


def check_finite(loss: Tensor, norm: Tensor, step: str) -> None:
    """Refuse a step whose loss or gradient is not finite, before it changes a weight.

    Raises:
        NumericalError: NaN or infinite; every process sees the same numbers, so all stop together.
    """
    if not (bool(torch.isfinite(loss)) and bool(torch.isfinite(norm))):
        raise NumericalError(
            f"{step}: loss {loss.item()}, gradient norm {norm.item()}; lower lr or clip_norm"
        )


def local(tensor: Tensor) -> Tensor:
    """This process's slice of a sliced tensor; another tensor as it is."""
    to_local = cast("Callable[[], Tensor] | None", getattr(tensor, "to_local", None))
    return tensor if to_local is None else to_local()


def full(tensor: Tensor) -> Tensor:
    """The whole of a sliced tensor (every process must call this); another tensor as it is."""
    full_tensor = cast("Callable[[], Tensor] | None", getattr(tensor, "full_tensor", None))
    return tensor if full_tensor is None else full_tensor()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _square_sum(tensors: list[Tensor]) -> Tensor:
    """Sum of all squares; per tensor in its own type, between tensors in float64."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()  # noqa: SLF001 - as torch.nn.utils does
