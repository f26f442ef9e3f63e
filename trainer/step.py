"""Phases 2 to 4 of one step: local forward and backward, communicate, update.

The step doesn't know the layout: fsdp communicates inside the backward pass, ddp and the norm afterwards. It is also
the step of every in-process training (proxies, attacks): nothing here touches a file.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer.experts import balance_loads, reset_loads
from trainer.mesh import Mesh
from trainer.microbatch import forward_backward
from trainer.objective import Evolving
from trainer.partition import check_finite, reduce_gradients

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from trainer.choices import Precision
    from trainer.objective import Objective


class Optimizer(Protocol):
    """What a step needs of an optimiser; `trainer.optim.AdamW` and torch's own have it."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def step(self) -> Any:
        """Update the parameters."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did; numbers are global, seconds are this process's."""

    loss: float
    """Loss before the update."""
    grad_norm: float
    """Euclidean norm of the global gradient before clipping."""
    tokens: int
    """Positions of the first loss term over all processes."""
    local_s: float
    """Forward and backward."""
    communicate_s: float
    """Summing gradients and loss; with fsdp only the norm, the rest overlaps with `local_s`."""
    update_s: float
    """Clipping, optimiser, and balancing of experts."""
    updated: bool = True
    """False if `accept` refused the update; weights and moments are then as before."""


def train_step(  # noqa: PLR0913 - each keyword is one choice of a run, with a default
    model: nn.Module,
    optimizer: Optimizer,
    objective: Objective,
    batch: Any,
    totals_K: Tensor,
    *,
    clip_norm: float = 0.0,
    mesh: Mesh | None = None,
    precision: Precision = "float32",
    accept: Callable[[float, float], bool] | None = None,
) -> StepReport:
    """One update of the model.

    Args:
        model: the model, its layout applied; set its learning rate (`optimizer.lr`) before.
        optimizer: the optimiser of its parameters.
        objective: the loss.
        batch: this process's part, from `objective.batch` or in pieces from `trainer.microbatch.take_batch`.
        totals_K: `objective.counts` summed over all processes.
        clip_norm: largest gradient norm; 0 = no clipping.
        mesh: the processes; None = one.
        precision: of the forward pass; float64 needs float64 weights.
        accept: called with global loss and norm, which may not be finite; False leaves the update out, on every
            process alike. None = a number that is not finite is an error.

    Returns:
        Loss, norm, tokens and seconds per phase.

    Raises:
        NumericalError: loss or gradient is not finite; no weight was changed.
    """
    start = perf_counter()
    optimizer.zero_grad()
    reset_loads(model)
    # A term without positions anywhere contributes 0 / 1, not 0 / 0.
    totals_or_one_K = torch.where(totals_K > 0, totals_K, 1.0)
    loss = forward_backward(model, objective, batch, totals_or_one_K, precision)
    computed = perf_counter()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total, norm = reduce_gradients(trained, loss, mesh or Mesh())
    if accept is None:
        check_finite(total, norm, "training step")
    communicated = perf_counter()
    loss_value, norm_value = total.item(), norm.item()
    updated = accept is None or accept(loss_value, norm_value)
    if updated:
        _update(optimizer, trained, norm_value, clip_norm)
        balance_loads(model, (mesh or Mesh()).sum_stage)
        if isinstance(objective, Evolving):
            objective.advance(mesh or Mesh())
    return StepReport(
        loss_value,
        norm_value,
        int(totals_K[0].item()),
        computed - start,
        communicated - computed,
        perf_counter() - communicated,
        updated,
    )


def _update(
    optimizer: Optimizer, trained: list[nn.Parameter], norm_value: float, clip_norm: float
) -> None:
    """Clip, and let the optimiser move the weights."""
    if clip_norm and norm_value > clip_norm:
        factor = clip_norm / (norm_value + 1e-6)
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
    optimizer.step()
