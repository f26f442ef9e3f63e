"""Divergence from the original's distribution in one pass forward and none back, whole or cut by token id.

    KL(p || q) = Σ_v p_v (log p_v - log q_v) = Σ_v p_v ((y_v - x_v) - (z_y - z_x))          p, q = softmax of the original's y and of our x
    ∂KL / ∂x_v = q_v - p_v                                                                  z the logarithm of what a softmax divides by

Written as torch operations it keeps six tensors of the size of the logits, by far the largest of a small model. Here all is made a few
rows at a time, the original's logits too (`Distribution`: its last states times its head), with one exponential per number of
each side, and what is kept is the gradient. Normalisers are taken off before the sum, in float64, or its terms would cancel. With tp every
process has V/t of the logits: largest logit, sum and the divergence's own sum are exchanged.

Legend: P positions, V vocabulary, v the part of it that is here, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 2**18
"""Numbers that are worked on at a time: they stay in the second cache."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution over tokens at each position, made when it is needed."""

    states_PD: Tensor
    """Last states, as the head takes them."""
    head_vD: Tensor
    """The head; this process's part of the vocabulary."""

    def logits(self, rows: slice) -> Tensor:
        """Logits [R, v] at some positions."""
        return functional.linear(self.states_PD[rows], self.head_vD)


def divergence_sum(
    ours_Pv: Tensor, theirs: Distribution, counted_P: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Sum over counted positions of KL(theirs || ours).

    Args:
        ours_Pv: our logits, with gradient; this process's part of the vocabulary.
        theirs: the original's, likewise.
        counted_P: which positions count.
        group: the processes that share the vocabulary; None = it is whole here.

    Returns:
        The sum in nats, the same on every process of the group; it has one derivative, no second.
    """
    return cast("Tensor", _Divergence.apply(ours_Pv, theirs, counted_P, group))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ours_Pv: Tensor,
        theirs: Distribution,
        counted_P: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        step = max(1, _CHUNK // ours_Pv.shape[-1])
        gradient_Pv = torch.empty_like(ours_Pv)
        sums = []
        for start in range(0, len(ours_Pv), step):
            rows = slice(start, start + step)
            x_Rv, y_Rv = _wide(ours_Pv[rows]), _wide(theirs.logits(rows))
            (q_Rv, x_R1), (p_Rv, y_R1) = _softmax(x_Rv, group), _softmax(y_Rv, group)
            difference_Rv = y_Rv.sub_(x_Rv).sub_((y_R1 - x_R1).to(y_Rv.dtype))
            inside_R = torch.linalg.vecdot(p_Rv, difference_Rv)
            sums.append(torch.where(counted_P[rows], inside_R, 0.0).sum())
            gradient_Pv[rows] = q_Rv.sub_(p_Rv).mul_(counted_P[rows, None])
        ctx.save_for_backward(gradient_Pv)
        total = torch.stack(sums).sum() if sums else ours_Pv.new_zeros(())
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_Pv,) = ctx.saved_tensors
        # In place: a second tensor of this size would cost as much as a softmax. A second pass back is an error, as it should be.
        return gradient_Pv.mul_(grads[0].to(gradient_Pv.dtype)), None, None, None


def _wide(x: Tensor) -> Tensor:
    """At least float32."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _softmax(x_Rv: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Probabilities of the part of the vocabulary that is here, and the logarithm of the whole vocabulary's normaliser, float64 [R, 1].

    Softmax is one fused kernel, and its largest entry says what it divided by: z = max x - log max p.
    """
    p_Rv = x_Rv.softmax(-1)
    z_R1 = x_Rv.amax(-1, keepdim=True).double() - p_Rv.amax(-1, keepdim=True).double().log()
    if group is None:
        return p_Rv, z_R1
    top_R1 = z_R1.clone()
    dist.all_reduce(top_R1, dist.ReduceOp.MAX, group=group)
    total_R1 = (z_R1 - top_R1).exp()
    dist.all_reduce(total_R1, group=group)
    whole_R1 = total_R1.log() + top_R1
    return p_Rv.mul_((z_R1 - whole_R1).exp().to(p_Rv.dtype)), whole_R1
