"""Divergence from the original's distribution in one pass forward and none back, whole or cut by token id.

    KL(p || q) = Σ_v p_v (log p_v - log q_v)          p, q = softmax of the original's and of our logits
    ∂KL / ∂x_v = q_v - p_v

Written as torch operations it keeps six tensors of the size of the logits, by far the largest of a small model, and costs as much
as the original's forward pass that it needs. Here both distributions are made a few rows at a time, and what is kept is the
gradient. With tp every process has V/t of the logits: largest logit, sum and the divergence's own sum are exchanged.

Legend: P positions, V vocabulary, v the part of it that is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist

if TYPE_CHECKING:
    from torch import Tensor

_CHUNK = 2**18
"""Numbers that are worked on at a time: they stay in the second cache."""


def divergence_sum(
    ours_Pv: Tensor, theirs_Pv: Tensor, counted_P: Tensor, group: dist.ProcessGroup | None
) -> Tensor:
    """Sum over counted positions of KL(theirs || ours).

    Args:
        ours_Pv: our logits, with gradient; this process's part of the vocabulary.
        theirs_Pv: the original's, likewise.
        counted_P: which positions count.
        group: the processes that share the vocabulary; None = it is whole here.

    Returns:
        The sum in nats, the same on every process of the group; it has one derivative, no second.
    """
    return cast("Tensor", _Divergence.apply(ours_Pv, theirs_Pv, counted_P, group))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ours_Pv: Tensor,
        theirs_Pv: Tensor,
        counted_P: Tensor,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        step = max(1, _CHUNK // ours_Pv.shape[-1])
        gradient_Pv = torch.empty_like(ours_Pv)
        sums = []
        for start in range(0, len(ours_Pv), step):
            rows = slice(start, start + step)
            q_Rv, p_Rv = (_log_softmax(x[rows], group) for x in (ours_Pv, theirs_Pv))
            difference_Rv = p_Rv - q_Rv
            p_Rv.exp_()
            inside_R = torch.linalg.vecdot(p_Rv, difference_Rv)
            sums.append(torch.where(counted_P[rows], inside_R, 0.0).sum())
            gradient_Pv[rows] = q_Rv.exp_().sub_(p_Rv).mul_(counted_P[rows, None])
        ctx.save_for_backward(gradient_Pv)
        total = torch.stack(sums).sum() if sums else ours_Pv.new_zeros(())
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_Pv,) = ctx.saved_tensors
        return gradient_Pv * grads[0].to(gradient_Pv.dtype), None, None, None


def _log_softmax(x_Rv: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Log-probabilities over the whole vocabulary, of the part that is here, at least in float32."""
    x_Rv = x_Rv.float() if x_Rv.dtype in (torch.bfloat16, torch.float16) else x_Rv
    if group is None:
        return x_Rv.log_softmax(-1)
    here_R1 = x_Rv.logsumexp(-1, keepdim=True)
    top_R1 = here_R1.clone()
    dist.all_reduce(top_R1, dist.ReduceOp.MAX, group=group)
    total_R1 = (here_R1 - top_R1).exp()
    dist.all_reduce(total_R1, group=group)
    return x_Rv - (total_R1.log() + top_R1)
