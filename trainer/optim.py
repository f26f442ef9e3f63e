"""AdamW, and the two schedules.

    m = b1 m + (1-b1) g        v = b2 v + (1-b2) g^2
    w = w (1 - lr * decay) - lr * (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

Decay applies to matrices only: a norm weight that decays fights its purpose. The learning rate grows linearly to its
peak over the warm-up. Then, with r = min_lr_ratio and S steps in all,

    cosine   lr (r + (1-r) (1 + cos(pi x)) / 2)       x from 0 after the warm-up to 1 at the last step
    wsd      lr, then lr (r + (1-r) (1 - sqrt(y)))    y = k / D at the k-th of the last D = round(decay_share * S) steps

so wsd's stable part doesn't depend on S: a run can be made longer without having known it.

AdamW is a small class of our own around torch's fused kernel, and equal to `torch.optim.AdamW` bit for bit (tested),
for two reasons. Its whole state is a flat mapping of named tensors from the start, which is what a checkpoint that
any layout can read needs. And the first optimiser of `torch.optim` in a process imports the compiler, about a second
that thousands of short proxy trainings would pay each.

Source: AdamW arXiv 1711.05101 algorithm 2; cosine arXiv 1608.03983 eq. 5; warm-up, stable, decay arXiv 2404.06395
section 4, with the decay 1 - sqrt of arXiv 2405.18392 section 3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from trainer.partition import local

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainer.choices import OptimSpec, Precision


class Stateful(Protocol):
    """An optimiser of the loop: what a step needs, and a state of named tensors."""

    lr: float
    """Step size, set before every step."""
    parameters: dict[str, nn.Parameter]
    """What it trains, by name."""

    def state(self) -> dict[str, Tensor]:
        """All state as named tensors, not copies."""

    def zero_grad(self) -> None:
        """Forget all gradients."""

    def step(self) -> None:
        """Update every parameter that has a gradient."""


def learning_rate(step: int, spec: OptimSpec, steps: int) -> float:
    """The step size of one step.

    Args:
        step: counted from 0.
        spec: peak, warm-up, schedule and final ratio.
        steps: length of the run.

    Returns:
        lr * (step + 1) / warmup_steps in the warm-up, then the schedule, which ends at lr * min_lr_ratio.
    """
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "wsd":
        decay_steps = round(spec.decay_share * steps)
        done = min(decay_steps, max(0, step + 1 - (steps - decay_steps)))
        factor = 1 - math.sqrt(done / decay_steps) if decay_steps else 1.0
    else:
        x = min(1.0, (step - spec.warmup_steps) / max(1, steps - 1 - spec.warmup_steps))
        factor = 0.5 * (1 + math.cos(math.pi * x))
    return spec.lr * (spec.min_lr_ratio + (1 - spec.min_lr_ratio) * factor)


class AdamW:
    """The optimiser of the loop; `lr` is set before every step."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimSpec) -> None:
        """Moments of zero for every parameter.

        Args:
            parameters: name -> parameter, those that are trained; slices of a layout too.
            spec: betas, eps and decay.
        """
        self.parameters, self.spec, self.lr = dict(parameters), spec, spec.lr
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        device = next((local(p).device for p in self.parameters.values()), torch.device("cpu"))
        self.count = torch.zeros((), dtype=torch.float32, device=device)

    def state(self) -> dict[str, Tensor]:
        """All state as named tensors, not copies: step, and per parameter exp_avg and exp_avg_sq."""
        moments = {f"{name}.exp_avg": m for name, m in self.first.items()}
        moments |= {f"{name}.exp_avg_sq": v for name, v in self.second.items()}
        return {"step": self.count, **moments}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its gradient; one without a gradient is left alone."""
        self.count += 1
        for decay, names in self._groups().items():
            torch._fused_adamw_(  # the kernel behind torch.optim.AdamW(fused=True)
                [local(self.parameters[name]) for name in names],
                [local(_grad(self.parameters[name])) for name in names],
                [local(self.first[name]) for name in names],
                [local(self.second[name]) for name in names],
                [],
                [self.count] * len(names),
                lr=self.lr,
                beta1=self.spec.betas[0],
                beta2=self.spec.betas[1],
                weight_decay=decay,
                eps=self.spec.eps,
                amsgrad=False,
                maximize=False,
            )

    def _groups(self) -> dict[float, list[str]]:
        """Weight decay -> names of the parameters that have a gradient."""
        groups: dict[float, list[str]] = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                groups.setdefault(
                    self.spec.weight_decay if parameter.dim() > 1 else 0.0, []
                ).append(name)
        return groups


def build_optimizer(
    model: nn.Module, spec: OptimSpec, precision: Precision = "float32"
) -> Stateful:
    """The optimiser of a specification over the parameters that require a gradient.

    Args:
        model: after its layout was applied.
        spec: the optimiser.
        precision: of the run; bfloat16 lets Muon orthogonalise in bfloat16.

    Returns:
        The optimiser with moments of zero.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if spec.name == "muon":
        from trainer.muon import Muon

        return Muon(trained, spec, torch.bfloat16 if precision == "bfloat16" else None)
    return AdamW(trained, spec)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
