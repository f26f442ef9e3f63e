"""Phase 1, partition, and phase 3, communicate: the same step on one process or many.

A layout is applied from outside to a model that knows none, in one order, each step cutting what the last one left:

    1. stages      the blocks of other stages are dropped                              trainer.pipeline
    2. tensor      matrices are cut along heads, inner width and vocabulary            trainer.tensor
    3. experts     the stack of experts is cut                                         trainer.dispatch
    4. sequence    attention gets an exchange around it                                trainer.sequence
    5. slices      what is left of each parameter is sliced (FSDP2, ZeRO-3; HSDP when there are copies): gathered
                   block by block, gradients summed into the slices by reduce-scatter
    6. copies      nothing to cut; gradients are added up after the backward pass, in one flat all-reduce

Gradients are *added*, never averaged: each process's loss is already divided by the global number of tokens
(`trainer.objective`). FSDP2 averages unless told otherwise, and with gloo a divide factor of 1 needs the plain sum to
be forced as well ("Cannot use ReduceOp.PREMUL_SUM with Gloo").

Which gradients still have to be added up after the backward pass follows from the parameter itself: those whose mesh
lacks an axis on which processes saw other tokens, positions or heads, that is dp_replicate and tp.

The norm is right on any mix of meshes: a slice that lies on c processes counts 1/c on each of them.

To add a layout: an axis in `trainer.layout`, a module with `apply_X(model, mesh)`, a line in `apply_layout`, and if
gradients are not complete after the backward pass, the axis in `_SUMMED`. `tests/trainer/test_trainer_parity.py` then
says whether it is right.

Source: ZeRO arXiv 1910.02054; FSDP2 pytorch/torchtitan docs/fsdp.md.
"""

from __future__ import annotations

import logging
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist

from trainer.errors import NumericalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from trainer.mesh import Mesh
    from trainer.model import Transformer

# Axes whose processes each have a summand of the gradient of a parameter that isn't cut along them.
_SUMMED = ("dp_replicate", "tp")


def apply_layout(model: Transformer, mesh: Mesh) -> Transformer:
    """Spread a model over the processes of a mesh.

    Args:
        model: the whole model with its initial weights, the same on every process.
        mesh: the processes.

    Returns:
        The model to train, on the mesh's device: the same object, or, in a pipeline, a `trainer.pipeline.Pipeline`,
        whose parameters have the names of the whole model too.
    """
    model, layout = model.to(mesh.device), mesh.layout
    if mesh.dense is None:
        return model
    pieces = [model]
    if layout.pp > 1:
        from trainer.pipeline import Pipeline, cut_stages

        pieces = cut_stages(model, mesh)
    for piece in pieces:
        if layout.tp > 1:
            from trainer.tensor import apply_tensor_parallel

            apply_tensor_parallel(piece, mesh.dense["tp"])
        if mesh.sparse is not None:
            from trainer.dispatch import apply_expert_parallel

            apply_expert_parallel(piece, mesh.sparse["ep"])
        if layout.sp > 1:
            from trainer.sequence import apply_ulysses

            apply_ulysses(piece, mesh.group("sp"))
        if layout.fsdp > 1:
            _slice_parameters(piece, mesh)
    return cast("Transformer", Pipeline(pieces, mesh)) if layout.pp > 1 else model


def _slice_parameters(model: Transformer, mesh: Mesh) -> None:
    """FSDP2 over dp_shard x sp: sp processes hold the same weights, so they can share them too."""
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor import Shard

    def axes(name: str) -> tuple[str, ...]:
        return ("dp_replicate", name) if mesh.layout.dp_replicate > 1 else (name,)

    assert mesh.dense is not None
    # In a pipeline, weights are gathered once per step, not once per microbatch; and a zero-bubble schedule finds the
    # weights of a delayed backward pass only while they are there.
    once = mesh.layout.pp == 1
    elsewhere: set[nn.Parameter] = set()
    if mesh.sparse is not None:
        from trainer.dispatch import expert_modules

        for experts in expert_modules(model):
            if mesh.layout.fsdp > mesh.layout.ep:
                # Along the inner width: the number of experts of one process may be smaller than that of slices.
                fully_shard(
                    experts,
                    mesh=mesh.sparse[axes("efsdp")],
                    shard_placement_fn=lambda _: Shard(1),
                    reshard_after_forward=once,
                )
            elsewhere |= set(experts.parameters())
    for block in model.blocks.values():
        fully_shard(
            block,
            mesh=mesh.dense[axes("fsdp")],
            reshard_after_forward=once,
            ignored_params=elsewhere,
        )
    fully_shard(
        model, mesh=mesh.dense[axes("fsdp")], reshard_after_forward=once, ignored_params=elsewhere
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[nn.Parameter], loss: Tensor, mesh: Mesh
) -> tuple[Tensor, Tensor]:
    """Add gradients and loss up over all processes, and measure the gradient.

    Args:
        parameters: those that are trained; a gradient that is None counts as zero.
        loss: this process's share of the loss.
        mesh: the processes.

    Returns:
        The global loss and the Euclidean norm of the global gradient, float64 scalars, the same on every process.
        Gradients are replaced by their sums, as far as the backward pass hasn't done that already.
    """
    grads = [_gradient(parameter) for parameter in parameters]
    total = loss.detach().double().reshape(())
    if mesh.world_size == 1:
        return total, _square_sum(grads).sqrt()
    assert mesh.dense is not None, "several processes need a mesh of init_mesh"
    for axis in _SUMMED:
        if mesh.dense[axis].size() > 1:
            _add_up([grad for grad in grads if axis not in _axes(grad)], mesh.group(axis))
    # tp's processes have the same loss, and one of them says it; a process of another stage says 0.
    total = total * (mesh.coordinate("tp") == 0)
    squares = torch.zeros_like(total)
    copies: dict[int, list[Tensor]] = {}
    for grad in grads:
        copies.setdefault(mesh.world_size // mesh.layout.pp // _slices(grad), []).append(
            local(grad)
        )
    for count, same in copies.items():
        squares += _square_sum(same) / count
    both = mesh.sum(torch.stack((total, squares)))
    return both[0], both[1].sqrt()


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
    # A slice of a slice is gathered in two steps, which torch finds slow; it is done for checkpoints only.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return tensor if full_tensor is None else full_tensor()


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _axes(tensor: Tensor) -> tuple[str, ...]:
    """Names of the axes of the mesh of a distributed tensor; none for another."""
    mesh = cast("Any", getattr(tensor, "device_mesh", None))
    return () if mesh is None else mesh.mesh_dim_names


def _slices(tensor: Tensor) -> int:
    """Number of different slices of a tensor."""
    if not _axes(tensor):
        return 1
    mesh, placements = cast("Any", tensor).device_mesh, cast("Any", tensor).placements
    assert not any(placement.is_partial() for placement in placements), placements
    # FSDP calls a slice of a slice by another class; what is neither is a copy.
    return prod(
        size
        for size, placement in zip(mesh.shape, placements, strict=True)
        if not placement.is_replicate()
    )


def _add_up(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """One flat all-reduce, in place."""
    slices = [local(grad) for grad in grads]
    if not slices:
        return
    flat = torch.cat([part.reshape(-1) for part in slices])
    dist.all_reduce(flat, group=group)
    for part, summed in zip(slices, flat.split([part.numel() for part in slices]), strict=True):
        part.copy_(summed.view_as(part))


def _square_sum(tensors: list[Tensor]) -> Tensor:
    """Sum of all squares; per tensor in its own type, between tensors in float64."""
    return torch.stack(torch._foreach_norm(tensors)).double().square().sum()  # noqa: SLF001 - as torch.nn.utils does
