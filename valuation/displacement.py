"""What one optimiser step moved, and which part of it this step's gradients moved.

    w_t - w_{t+1} = own + momentum + decay        own is linear in this step's (clipped) mean gradient g:  own = A g

A is the map that the optimiser really applied, its preconditioner held fixed at the value it used:

    AdamW    A = lr (1-b1)/(1-b1^t) D^-1                    D = sqrt(v/(1-b2^t)) + eps, after the step
    Muon     A = lr 0.2 sqrt(max(a, b)) (1-mu^2) Phi(U)/|U|      hidden matrices; all others as AdamW

Muon moves by NS(U) = Phi(U) U / |U|, U = (1-mu) g + mu M: five rounds that each multiply by a symmetric polynomial of
X X^T (X^T X for a tall matrix), so Phi is one symmetric matrix on the shorter side, and g's part in U is 1 - mu^2. In
both cases the preconditioner depends on the same gradients; that it is held fixed makes the parts additive, and the
parts still add up to the true movement exactly.

A is symmetric, hence <V, A g> = <A V, g>: a target's gradient goes through A once, and every record's gradient meets
the result. `Displacement.own_map` is that A.

Cost: one copy of the weights and some passes over them per step; for Muon one Newton-Schulz more.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from trainer.muon import NS_COEFFICIENTS, NS_ROUNDS, Muon, update_scale
from trainer.optim import AdamW
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from trainer.optim import Stateful


class Displacement:
    """The movement of one step; made before it, read after it."""

    def __init__(self, optimizer: Stateful) -> None:
        """Remember the weights.

        Args:
            optimizer: `trainer.optim.AdamW` or `trainer.muon.Muon`, about to step.

        Raises:
            GradientError: an optimiser of another kind, whose update has no formula here.
        """
        if not isinstance(optimizer, AdamW | Muon):
            raise GradientError(
                f"optimiser: expected AdamW or Muon, got {type(optimizer).__name__}; "
                "add the map of its own gradient to Displacement.own_map"
            )
        self.optimizer = optimizer
        self._adam = optimizer.rest if isinstance(optimizer, Muon) else optimizer
        self.before = {name: p.detach().clone() for name, p in optimizer.parameters.items()}

    @torch.no_grad()
    def moved(self) -> dict[str, Tensor]:
        """w_t - w_{t+1} by parameter name; call it after the step."""
        after = self.optimizer.parameters
        return {name: old - after[name] for name, old in self.before.items()}

    @torch.no_grad()
    def along(self, *directions: Mapping[str, Tensor]) -> list[tuple[float, float]]:
        """How far the weights moved along directions, and how far of that by weight decay; call it after the step.

        Args:
            directions: each one tensor per parameter.

        Returns:
            Per direction (<V, w_t - w_{t+1}>, lr * decay * <V, w_t> over matrices).
        """
        after, spec = self.optimizer.parameters, self.optimizer.spec
        moved: list[list[Tensor]] = [[] for _ in directions]
        decayed: list[list[Tensor]] = [[] for _ in directions]
        for (
            name,
            old,
        ) in self.before.items():  # parameter by parameter, so that it stays in the cache
            delta, matrix = (old - after[name]).reshape(-1), old.dim() > 1  # as in trainer.optim
            for place, direction in enumerate(directions):
                value = direction[name].reshape(-1)
                moved[place].append(torch.dot(value, delta))
                if matrix:
                    decayed[place].append(torch.dot(value, old.reshape(-1)))
        factor = self.optimizer.lr * spec.weight_decay
        return [
            (_total(one), factor * _total(other)) for one, other in zip(moved, decayed, strict=True)
        ]

    @torch.no_grad()
    def own_map(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A times a direction; call it after the step, while the gradients are still there.

        Args:
            direction: one tensor per parameter, such as a target's gradient.

        Returns:
            A V by parameter name: <A V, g> is the first-order effect of this step's mean clipped gradient g.
        """
        adam, count = self._adam, int(self._adam.count.item())
        beta1, beta2 = adam.spec.betas
        # share / (sqrt(v / c) + eps) = share sqrt(c) / (sqrt(v) + eps sqrt(c)): two passes over memory fewer.
        correction = math.sqrt(1 - beta2**count)
        share = adam.lr * (1 - beta1) / (1 - beta1**count) * correction
        mapped = {}
        for name, value in direction.items():
            if name in adam.second:
                root = adam.second[name].sqrt().add_(adam.spec.eps * correction)
                mapped[name] = torch.div(value, root, out=root).mul_(share)
            else:
                mapped[name] = self._turned(name, value)
        return mapped

    def _turned(self, name: str, value: Tensor) -> Tensor:
        """Muon's A for one hidden matrix: the rounds that turned U, applied to the direction instead."""
        assert isinstance(self.optimizer, Muon)
        parameter, spec = self.optimizer.parameters[name], self.optimizer.spec
        assert parameter.grad is not None
        update = parameter.grad.lerp(self.optimizer.momentum[name], spec.momentum)
        tall = update.shape[-2] > update.shape[-1]
        x, y = (update.mT, value.mT) if tall else (update, value)
        size = x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
        x, y = x / size, y / size
        p, q, r = NS_COEFFICIENTS
        for _ in range(NS_ROUNDS):
            gram = x @ x.mT
            turn = q * gram + r * gram @ gram
            x, y = p * x + turn @ x, p * y + turn @ y
        scale = self.optimizer.lr * update_scale(parameter.shape) * (1 - spec.momentum**2)
        return scale * (y.mT if tall else y)

    @torch.no_grad()
    def gradient(self) -> dict[str, Tensor]:
        """This step's mean gradient g, clipped; zero for a parameter without one."""
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in self.optimizer.parameters.items()
        }


def inner(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """<left, right> over all parameters, the parts added up exactly.

    Args:
        left: one tensor per parameter.
        right: the same names and shapes.
    """
    return _total(
        [torch.dot(value.reshape(-1), right[name].reshape(-1)) for name, value in left.items()]
    )


def _total(parts: list[Tensor]) -> float:
    """The exact sum of scalars."""
    return math.fsum(torch.stack(parts).tolist()) if parts else 0.0
