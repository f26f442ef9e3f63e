"""Tensor parallelism: each matrix is divided among neighbouring processes, and so are norms and residual stream.

    columns   y_t = x W_t^T            W cut by rows of its [out, in] matrix: process t has some of the outputs
    rows      y   = sum_t x_t W_t^T    W cut by columns: each process has a part of every sum
    vocabulary: embedding and head are cut by token id; the loss never needs all logits in one place

Between the matrices the residual stream is cut along positions ("sequence parallelism"), so norms cost 1/tp each:

    x[T/tp] --gather--> x[T] --columns--> ... --rows, add up and scatter--> y[T/tp]

gather is an all-gather whose backward pass is a reduce-scatter; scatter is the reverse. Two of each per block, the same
traffic as the two all-reduces of the older scheme.

What isn't cut sees, on each process, a part of the positions or heads; so *every parameter that tp doesn't cut has a
gradient that is one summand of t*, and `trainer.partition.reduce_gradients` adds these up: norms, routers, experts, and
wk, wv where there are fewer key heads than processes (each then uses the head of its queries).

Loss over a cut vocabulary, per position, with m the largest logit and z_y that of the label, both over all processes:
nll = m + log sum_t sum_v exp(z_tv - m) - z_y; its gradient, softmax minus one-hot, needs no traffic.

Legend: B rows, T positions, D width, H query heads, K key heads, E head width, V vocabulary, t = tp.

Source: arXiv 1909.08053 section 3; sequence parallelism arXiv 2205.05198 section 4.2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from trainer.model import Transformer

_POSITIONS = 1  # axis of [B, T, D]
# torch 2.13 renamed both.
_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def apply_tensor_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Cut the matrices of a model or of a pipeline stage, in place.

    Args:
        model: with whole weights, the same on every process.
        mesh: the axis tp.
    """
    group = mesh.get_group()
    tied = (
        model.head is not None
        and model.embed is not None
        and model.head.weight is model.embed.weight
    )
    if model.embed is not None:
        model.embed = cast("nn.Embedding", _VocabularyEmbedding(model.embed, mesh))
    if model.head is not None:
        model.head = cast("nn.Linear", _VocabularyHead(model.head, mesh))
        if tied and model.embed is not None:
            model.head.weight = model.embed.weight
    for block in model.blocks.values():
        attention, ffn = cast("Any", block.attention), cast("Any", block.ffn)
        _gather_input(attention, group)
        names = ("wq", "wk", "wv") if model.spec.num_kv_heads % mesh.size() == 0 else ("wq",)
        for name in names:
            setattr(attention, name, _Columns(getattr(attention, name), mesh))
        attention.wo = _Rows(attention.wo, mesh)
        if len(names) == 1:
            attention.wk, attention.wv = (
                _OneHead(w, model.spec.num_kv_heads, mesh) for w in (attention.wk, attention.wv)
            )
        if hasattr(ffn, "experts"):
            # A token's experts don't depend on other tokens: each process computes those of its own positions.
            ffn.register_forward_pre_hook(_own_positions(group))
            continue
        _gather_input(ffn, group)
        ffn.w1, ffn.w3 = _Columns(ffn.w1, mesh), _Columns(ffn.w3, mesh)
        ffn.w2 = _Rows(ffn.w2, mesh)


def sliced(parameter: Tensor, mesh: DeviceMesh, axis: int) -> nn.Parameter:
    """This process's slice of a whole parameter, as a distributed one; nothing is sent.

    Args:
        parameter: whole, the same on every process.
        mesh: one axis.
        axis: of the tensor, along which it is cut; a multiple of the mesh's size.

    Returns:
        A parameter of the same logical shape.
    """
    part = parameter.detach().chunk(mesh.size(), axis)[mesh.get_local_rank()].clone()
    whole = DTensor.from_local(part, mesh, (Shard(axis),), run_check=False)
    return nn.Parameter(whole, requires_grad=parameter.requires_grad)


def here(weight: Tensor) -> Tensor:
    """This process's slice of a distributed weight, with its gradient; another as it is."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


class _Columns(nn.Module):
    """Some of a linear layer's outputs: [B, T, in] -> [B, T, out/t]."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sliced(linear.weight, mesh, 0)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.linear(x_BTD, here(self.weight))


class _OneHead(nn.Module):
    """One of K < t key heads, that of this process's queries: [B, T, in] -> [B, T, E]; the weight stays whole."""

    def __init__(self, linear: nn.Linear, num_kv_heads: int, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = linear.weight
        width, head = len(linear.weight) // num_kv_heads, mesh.get_local_rank() * num_kv_heads
        first = head // mesh.size() * width
        self.rows = slice(first, first + width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return functional.linear(x_BTD, self.weight[self.rows])


class _Rows(nn.Module):
    """A linear layer over some of its inputs, added up: [B, T, in/t] -> [B, T/t, out]."""

    def __init__(self, linear: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sliced(linear.weight, mesh, 1)
        self.group = mesh.get_group()

    def forward(self, x_BTF: Tensor) -> Tensor:
        return scatter(functional.linear(x_BTF, here(self.weight)), self.group)


class _VocabularyEmbedding(nn.Module):
    """Embedding of the tokens whose rows are here, added up: [B, T] -> [B, T/t, D]."""

    def __init__(self, embed: nn.Embedding, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sliced(embed.weight, mesh, 0)
        self.group = mesh.get_group()
        self.first = mesh.get_local_rank() * embed.num_embeddings // mesh.size()

    def forward(self, tokens_BT: Tensor) -> Tensor:
        weight_VD = here(self.weight)
        own_BT = tokens_BT - self.first
        elsewhere_BT = (own_BT < 0) | (own_BT >= len(weight_VD))
        x_BTD = functional.embedding(own_BT.masked_fill(elsewhere_BT, 0), weight_VD)
        return scatter(x_BTD.masked_fill(elsewhere_BT[..., None], 0), self.group)


class _VocabularyHead(nn.Module):
    """Logits of some of the vocabulary: [B, T/t, D] -> [B, T, V], of which [B, T, V/t] is here."""

    def __init__(self, head: nn.Linear, mesh: DeviceMesh) -> None:
        super().__init__()
        self.weight = sliced(head.weight, mesh, 0)
        self.mesh = mesh

    def forward(self, x_BTD: Tensor) -> Tensor:
        whole_BTD = gather(x_BTD, self.mesh.get_group())
        return functional.linear(whole_BTD, here(self.weight))


def gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """The whole of [B, T/t, D] that is cut along positions; backward: add up and cut."""
    return cast("Tensor", _Gather.apply(x, group))


def scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """[B, T, D] added up over the group and cut along positions; backward: gather."""
    return cast("Tensor", _Scatter.apply(x, group))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grads[0], ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grads[0], ctx.group), None


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = dist.get_world_size(group)
    found = x.new_empty((parts * x.shape[0], *x.shape[1:]))
    _GATHER(found, x.contiguous(), group=group)
    return torch.cat(found.chunk(parts), _POSITIONS)


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    parts = torch.cat(x.chunk(dist.get_world_size(group), _POSITIONS))
    found = x.new_empty((x.shape[0], x.shape[1] // dist.get_world_size(group), *x.shape[2:]))
    _SCATTER(found, parts, group=group)
    return found


def _gather_input(module: nn.Module, group: ProcessGroup) -> None:
    def whole(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return gather(given[0], group), *given[1:]

    module.register_forward_pre_hook(whole)


def _own_positions(group: ProcessGroup) -> Callable[..., tuple[Any, ...]]:
    """A hook that cuts the flags `counted_BT` of a mixture of experts as its input is cut."""
    parts, place = dist.get_world_size(group), dist.get_rank(group)

    def cut(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        x_BTD, *more = given
        return x_BTD, *(
            None if flag is None else flag.chunk(parts, _POSITIONS)[place] for flag in more
        )

    return cut
