"""Next-token cross entropy in one pass forward and one pass back, whole or cut by token id.

    nll   = sum over positions with a label of  (z - x[label])        z = log sum_v exp(x[v]) over the vocabulary
    dnll / dx[v] = exp(x[v] - z) - [v = label]

`torch.nn.functional.cross_entropy` writes three more tensors of the size of the logits, which are by far the largest
of a small model: log softmax, its gradient before the softmax, and a float32 copy where they are bfloat16. Here z is
kept, one number per position, and the gradient is made from it a few rows at a time, in float32 whatever the type of
the logits. With tp every process has [B, T, V/t]: largest logit, sum and the label's logit are exchanged.

Legend: B rows, T positions, P = B*T, V vocabulary, v the part of it that is here (v = V without tp).

Source: the sharded form is Megatron-LM's, arXiv 1909.08053 section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.data import IGNORE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

# Numbers that are worked on at a time: on the CPU they stay in the second cache, a GPU wants few large kernels.
_CHUNK = {"cpu": 2**18}
_CHUNK_ELSEWHERE = 2**27


def cross_entropy_sum(
    logits_BTv: Tensor, labels_BT: Tensor, group: ProcessGroup | None = None
) -> Tensor:
    """Sum over positions with a label of -log softmax(logits)[label].

    Args:
        logits_BTv: any floating type; with a group, this process's part of the vocabulary, parts equal and in order.
        labels_BT: token ids of the whole vocabulary, or IGNORE.
        group: the processes of the axis tp; None = the logits are whole.

    Returns:
        The sum in nats, the same on every process of the group: in float32, or float64 for float64 logits. Second
        derivatives exist without a group, at the usual cost in memory.

    Raises:
        RuntimeError: a second derivative with a group.
    """
    return cast(
        "Tensor",
        _CrossEntropy.apply(logits_BTv.flatten(0, -2), labels_BT.flatten(), group),
    )


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_Pv: Tensor, labels_P: Tensor, group: ProcessGroup | None
    ) -> Tensor:
        first = 0 if group is None else dist.get_rank(group) * logits_Pv.shape[-1]
        own_P = labels_P - first
        elsewhere_P = (own_P < 0) | (own_P >= logits_Pv.shape[-1])
        own_P = own_P.masked_fill(elsewhere_P, 0)
        # log softmax is one fused kernel, logsumexp is five.
        nll_P = -torch.cat(
            [
                torch.log_softmax(_wide(logits_Pv[rows]), -1).gather(-1, own_P[rows, None])[:, 0]
                for rows in _parts(logits_Pv)
            ]
        )
        share_P = torch.ones_like(nll_P)
        if group is not None:
            label_P = _wide(logits_Pv.gather(-1, own_P[:, None])[:, 0])
            here_P = label_P + nll_P  # z of the part of the vocabulary that is here
            top_P = here_P.clone()
            dist.all_reduce(top_P, dist.ReduceOp.MAX, group=group)
            both_2P = torch.stack(((here_P - top_P).exp(), label_P.masked_fill(elsewhere_P, 0)))
            dist.all_reduce(both_2P, group=group)
            z_P = both_2P[0].log() + top_P
            nll_P, share_P = z_P - both_2P[1], (here_P - z_P).exp()
        counted_P = labels_P != IGNORE
        ctx.group = group
        ctx.save_for_backward(logits_Pv, share_P, own_P, elsewhere_P, counted_P)
        return torch.where(counted_P, nll_P, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits_Pv, share_P, own_P, elsewhere_P, counted_P = ctx.saved_tensors
        scale_P = torch.where(counted_P, grads[0], 0.0)
        minus_P = torch.where(elsewhere_P, 0.0, -scale_P)
        scale_P = scale_P * share_P
        if (
            torch.is_grad_enabled()
        ):  # a second derivative is wanted: nothing in place, nothing across processes
            if ctx.group is not None:
                raise RuntimeError(
                    "cross entropy over a cut vocabulary: expected one derivative, got a second; use a layout with tp = 1"
                )
            grad = torch.softmax(_wide(logits_Pv), -1) * scale_P[:, None]
            grad = grad.scatter_add(-1, own_P[:, None], minus_P[:, None])
            return grad.to(logits_Pv.dtype), None, None
        found_Pv = torch.empty_like(logits_Pv)
        for rows in _parts(logits_Pv):
            grad = torch.softmax(_wide(logits_Pv[rows]), -1).mul_(scale_P[rows, None])
            found_Pv[rows] = grad.scatter_add_(-1, own_P[rows, None], minus_P[rows, None])
        return found_Pv, None, None


def _parts(logits_Pv: Tensor) -> Iterator[slice]:
    """Runs of rows to work on at a time."""
    size = _CHUNK.get(logits_Pv.device.type, _CHUNK_ELSEWHERE)
    step = max(1, size // logits_Pv.shape[-1])
    yield from (slice(start, start + step) for start in range(0, len(logits_Pv), step))


def _wide(x: Tensor) -> Tensor:
    """At least float32: a sum of thousands of terms has no digit left in bfloat16."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
