"""Phase 2, local: forward and backward over this process's rows, in as many pieces as fit into memory.

    loss = sum over micro-batches j of  objective.loss(batch_j) = sum_k w_k S_k(j) / n_k      n_k over the global batch

Because every piece is divided by the *global* counts, gradients of pieces simply add up: k micro-batches give the
gradient of one, to the rounding of a sum. Process r of w in k pieces takes the parts r*k .. r*k + k-1 of w*k: any
objective that can share its batch among processes can share it among micro-batches. With fsdp every piece gathers the
weights and scatters its gradients anew: k times the traffic is the price of the memory.

bfloat16 is a policy of this phase alone: matrix products inside the forward pass, and so their gradients, are rounded
to bfloat16; weights, gradients, moments, norms, softmax of the loss and all sums stay float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainer.choices import Precision
    from trainer.objective import Objective


class MicroBatches(tuple):  # noqa: SLOT001 - a tuple of batches, under a name that no batch has
    """A process's batch of one step in several pieces."""


def take_batch(
    objective: Objective, step: int, rank: int, world: int, accumulation: int
) -> tuple[Any, Tensor]:
    """This process's batch and its counts.

    Args:
        objective: what is minimised.
        step: counted from 0.
        rank: this process, 0 <= rank < world.
        world: number of processes that share the batch.
        accumulation: pieces, >= 1.

    Returns:
        The batch, MicroBatches if there is more than one piece, and float64 local counts [K].
    """
    if accumulation == 1:
        batch = objective.batch(step, rank, world)
        return batch, objective.counts(batch)
    parts = MicroBatches(
        objective.batch(step, rank * accumulation + piece, world * accumulation)
        for piece in range(accumulation)
    )
    return parts, torch.stack([objective.counts(part) for part in parts]).sum(0)


def forward_backward(
    model: nn.Module,
    objective: Objective,
    batch: Any,
    totals_K: Tensor,
    precision: Precision = "float32",
) -> Tensor:
    """Add the gradients of this process's share of the loss to the parameters.

    Args:
        model: the model; for float64 it has float64 weights.
        objective: the loss.
        batch: from `take_batch` or `objective.batch`.
        totals_K: counts over all processes, none of them 0.
        precision: of the run.

    Returns:
        This process's share of the loss, without gradient.
    """
    shares, pipelined = [], getattr(model, "forward_backward", None)
    for part in batch if isinstance(batch, MicroBatches) else (batch,):
        with torch.autocast(
            totals_K.device.type, dtype=torch.bfloat16, enabled=precision == "bfloat16"
        ):
            if pipelined is not None:  # its schedule runs the backward passes too
                shares.append(pipelined(objective, part, totals_K))
                continue
            share = objective.loss(model, part, totals_K)
        torch.autograd.backward(share)
        shares.append(share.detach())
    return shares[0] if len(shares) == 1 else torch.stack(shares).sum(0)
