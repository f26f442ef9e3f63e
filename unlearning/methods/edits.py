"""Methods that change the weights at once, as runs of the trainer: `newton` and `task_vector`, then steps of repair.

    θ  <-  edit(θ_original; forgotten)          once, on the whole model, before it is spread over processes
    θ  <-  the run's steps of language modelling on what remains

An edit moves what the forgotten records share with everybody, too; the steps on what remains heal that and can't bring the secrets
back, since no batch holds them. A resumed run makes the edit again and then takes its checkpoint in its place.

Source: `newton`, `task_vector`; repair by fine-tuning on what remains: Golatkar et al. 2020, arXiv 1911.04933.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from trainer.objective import LanguageModelling
from unlearning.errors import PlanError
from unlearning.methods import EDITS
from unlearning.methods.forget_retain import ForgetConfig, Forgotten, inputs_of
from unlearning.methods.newton import diagonal_inverse, newton_step
from unlearning.methods.settings import Settings, lora_of, settings_of
from unlearning.methods.task_vector import negate

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from trainer.data import BatchPlan
    from trainer.spec import RunSpec

CURVATURE_STEPS = 4
"""Batches of what remains whose rows give the curvature."""


def secret_loss(model: Any, forgotten: Sequence[Forgotten]) -> Tensor:
    """Σ over records of the negative log-likelihood of the pushed tokens, nats; differentiable."""
    from unlearning.scoring import padded, span_logits, span_mask

    sequences = [one.tokens for one in forgotten]
    mask_BT = span_mask(sequences, [one.first for one in forgotten])
    device = next(model.parameters()).device
    tokens_BT, mask_BT = padded(sequences).to(device), mask_BT.to(device)
    logits_SV = span_logits(model, tokens_BT, mask_BT)
    return functional.cross_entropy(logits_SV, tokens_BT[:, 1:][mask_BT], reduction="sum")


def take_newton_step(
    model: Any, forgotten: Sequence[Forgotten], plan: BatchPlan, settings: Settings
) -> None:
    """Newton step with the damped diagonal of the empirical Fisher matrix of what remains, in place.

        H_p = (steps of an epoch / steps sampled) · Σ_rows (∂ NLL_row / ∂θ_p)²          λ = damping · mean_p H_p

    Args:
        model: the original model, whole.
        forgotten: records.
        plan: batches of what remains; one epoch of its rows counts as everything.
        settings: `damping`.

    Raises:
        PlanError: if the step is not finite.
    """
    parameters = [one for one in model.parameters() if one.requires_grad]
    gradient_P = parameters_to_vector(
        torch.autograd.grad(secret_loss(model, forgotten), parameters)
    )
    language, fisher_P = LanguageModelling(plan), torch.zeros_like(gradient_P)
    for step in range(CURVATURE_STEPS):
        batch = language.batch(step, 0, 1)
        for row in range(len(batch[0])):
            part = tuple(column[row : row + 1] for column in batch)
            loss = language.loss(model, part, torch.ones(1))  # type: ignore[arg-type]
            fisher_P += parameters_to_vector(torch.autograd.grad(loss, parameters)).square()
    fisher_P *= max(1.0, plan.steps_per_epoch / CURVATURE_STEPS)
    inverse = diagonal_inverse(fisher_P, settings.damping * fisher_P.mean().item())
    with torch.no_grad():
        vector_to_parameters(
            newton_step(parameters_to_vector(parameters), gradient_P, inverse), parameters
        )


def walk_away(model: Any, forgotten: Sequence[Forgotten], settings: Settings) -> None:
    """Task vector: a copy learns the secrets for some steps, the model goes the other way, in place.

    Args:
        model: the original model, whole.
        forgotten: records.
        settings: `reinforce`, `rate`, `scale`.
    """
    reinforced = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reinforced.parameters(), lr=settings.rate, weight_decay=0.0)
    for _ in range(settings.reinforce):
        optimizer.zero_grad()
        (secret_loss(reinforced, forgotten) / len(forgotten)).backward()
        optimizer.step()
    negate(model, reinforced, settings.scale)


def run(run: RunSpec, directory: Path) -> int:
    """Entry `unlearning.methods.edits:run`; `config.extra` as in `ForgetConfig` with `method` one of `EDITS`.

    Args:
        run: specification; `init` is the original model, its steps are those of the repair.
        directory: the run's folder.

    Returns:
        Exit code of the loop.

    Raises:
        UnlearningError: if settings or sealed records are refused (exit code 3).
    """
    from trainer.loop import fit

    config = ForgetConfig.from_extra(run.config.extra)
    if config.method not in EDITS:
        raise PlanError(f"expected a method of {EDITS}, got {config.method!r}")
    if lora_of(config.lora).rank:
        raise PlanError(
            f"{config.method} changes all weights at once: expected no lora rank, got {config.lora}; take a loss (npo, graddiff, rmu)"
        )
    settings = settings_of(config.method, config.settings)
    plan, forgotten, _ = inputs_of(run, directory, config)

    def edit(model: Any) -> None:
        if config.method == "newton":
            take_newton_step(model, forgotten, plan, settings)
        else:
            walk_away(model, forgotten, settings)

    return fit(run, directory, objective=LanguageModelling(plan), model_hook=edit)
