"""Ulysses: a row is divided along its positions; only attention needs all of them, and exchanges positions for heads.

    q, k, v  [B, H, T/s, E]  --all-to-all-->  [B, H/s, T, E]  --attention-->  --all-to-all-->  [B, H, T/s, E]

Everything else in the model works position by position and notices nothing, if three things are done first, on the
whole row, before it is cut (each has been a bug elsewhere):

    labels      are the next tokens already (`trainer.data`): shifting them after the cut would lose one per part
    positions   are explicit, so that rotary angles are those of the whole row
    documents   are gathered for the mask of packed rows, since attention sees all positions

A row whose length s * tp doesn't divide is filled up with padding that has no label, sees nothing and isn't seen. The
loss is a sum over global counts, so parts with more labels weigh more, and no gradient is scaled by s.

With fewer key heads than s divides, each key head is copied until it does (lcm); the backward pass adds the copies up.

Bytes per layer and process, forward: 2 (s-1)/s * (2 H + 2 K') E B T/s elements, K' the key heads after copying.

Legend: B rows, T positions, H query heads, K key heads, E head width, s = sp.

Source: arXiv 2309.14509 section 3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional

from trainer.data import IGNORE, PADDING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

    from trainer.mesh import Mesh
    from trainer.model import Transformer

Rows = tuple[Tensor, Tensor, Tensor, Tensor]
"""tokens, labels, positions, documents, each [B, T]."""
_HEADS, _POSITIONS = 1, 2  # axes of [B, H, T, E]


def cut_positions(rows: Rows, mesh: Mesh) -> Rows:
    """This process's part of rows, padded so that the parts are equal.

    Args:
        rows: whole rows.
        mesh: the processes.

    Returns:
        Positions k*T'/sp .. (k+1)*T'/sp - 1, where T' is T rounded up to a multiple of sp * tp.
    """
    sp, tp = mesh.layout.sp, mesh.layout.tp
    missing = -rows[0].shape[1] % (sp * tp)
    fills = (0, IGNORE, 0, PADDING)
    padded = (
        functional.pad(row, (0, missing), value=fill) for row, fill in zip(rows, fills, strict=True)
    )
    place = mesh.coordinate("sp")
    tokens, labels, positions, documents = (row.chunk(sp, 1)[place] for row in padded)
    return tokens, labels, positions, documents


def apply_ulysses(model: Transformer, group: ProcessGroup) -> None:
    """Let the attention of a model or of a pipeline stage see all positions of rows that are cut, in place.

    Args:
        model: its heads already cut by tensor parallelism, if they are.
        group: the processes of the axis sp.
    """
    for block in model.blocks.values():
        attention = cast("Any", block).attention
        attention.attend = Ulysses(attention.attend, group)
    mask_of = model.mask_of

    def mask_of_all(documents_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
        parts = [torch.empty_like(documents_BT) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, documents_BT.contiguous(), group=group)
        return mask_of(torch.cat(parts, 1), dtype)

    model.mask_of = mask_of_all


class Ulysses:
    """Attention over all positions by processes that hold some of them."""

    def __init__(self, attend: Callable[..., Tensor], group: ProcessGroup) -> None:
        """Exchange around `attend`, an attention over whole rows, in a group of processes."""
        self.attend, self.group = attend, group

    def __call__(self, q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, *more: Any) -> Tensor:
        """As `trainer.model.attend`, of T/s positions; the mask is that of all positions."""
        sp, num_kv_heads = dist.get_world_size(self.group), k_BKTE.shape[_HEADS]
        copies = sp // math.gcd(num_kv_heads, sp)
        if copies > 1:
            k_BKTE, v_BKTE = (t.repeat_interleave(copies, _HEADS) for t in (k_BKTE, v_BKTE))
        q, k, v = (exchange(t, self.group, _HEADS, _POSITIONS) for t in (q_BHTE, k_BKTE, v_BKTE))
        return exchange(self.attend(q, k, v, *more), self.group, _POSITIONS, _HEADS)


def exchange(x: Tensor, group: ProcessGroup, cut: int, join: int) -> Tensor:
    """Cut a tensor along one axis, send part j to process j, and join what arrives along another axis.

    Args:
        x: any tensor whose axis `cut` is a multiple of the group's size.
        group: the processes.
        cut: axis that becomes s times shorter.
        join: axis that becomes s times longer.

    Returns:
        The tensor; its backward pass is the exchange with `cut` and `join` swapped.
    """
    return cast("Tensor", _Exchange.apply(x, group, cut, join))


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, cut: int, join: int) -> Tensor:
        ctx.given = group, cut, join
        parts = torch.stack(x.chunk(dist.get_world_size(group), cut))
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return torch.cat(found.unbind(0), join)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        group, cut, join = ctx.given
        return exchange(grads[0], group, join, cut), None, None, None
