"""Certified removal for convex heads: a Newton step, hidden by noise that was added before training.

    L(w) = Σ_i l(w; z_i) + (λn/2)·‖w‖² + bᵀw,    b ~ N(0, s²I)          l(w; x, y) = log(1 + exp(-y·wᵀx)),   y = ±1
    w⁻   = w + H⁻¹ Δ,      Δ = λw + Σ_{z removed} (∇l(z; w) [+ λw each]),    H = ∇²L on the rest

What the step misses of retraining is bounded by the gradient that is left, data-dependently g·‖X‖₂·‖H⁻¹Δ‖₂·‖XH⁻¹Δ‖₂ with g = 1/4 for the
logistic loss. While the sum of these bounds over all removals stays below the budget sε/c with δ = 1.5·exp(-c²/2), removal is (ε, δ)-certified;
beyond it the head is retrained.

Source: Guo, Goldstein, Hannun, van der Maaten, ICML 2020, arXiv 1911.03030, algorithms 1 and 2, corollary 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from unlearning.errors import PlanError

GAMMA = 0.25
"""Lipschitz constant of the logistic loss's second derivative, as the published code bounds it."""


@dataclass(frozen=True, slots=True)
class Removal:
    """A head after a removal."""

    w_D: Tensor
    residual: float
    """Bound on the gradient that the step left."""


def gradient(w_D: Tensor, x_ND: Tensor, y_N: Tensor, lam: float, b_D: Tensor) -> Tensor:
    """Gradient of L: zero at the trained head.

    Args:
        w_D: head.
        x_ND: features.
        y_N: labels ±1.
        lam: λ > 0, per record.
        b_D: the noise.
    """
    chance_N = torch.sigmoid(-y_N * (x_ND @ w_D))
    return -(x_ND * (y_N * chance_N)[:, None]).sum(0) + lam * len(y_N) * w_D + b_D


def hessian(w_D: Tensor, x_ND: Tensor, lam: float) -> Tensor:
    """Hessian of L, [D, D].

    Args:
        w_D: head.
        x_ND: features.
        lam: λ > 0, per record.
    """
    chance_N = torch.sigmoid(x_ND @ w_D)
    weighted_ND = x_ND * (chance_N * (1 - chance_N))[:, None]
    return weighted_ND.T @ x_ND + lam * len(x_ND) * torch.eye(len(w_D), dtype=w_D.dtype)


def train(x_ND: Tensor, y_N: Tensor, lam: float, b_D: Tensor, steps: int = 50) -> Tensor:
    """The exact minimiser, by Newton's method.

    Args:
        x_ND: features.
        y_N: labels ±1.
        lam: λ > 0.
        b_D: the noise; zeros for none.
        steps: most iterations.

    Raises:
        PlanError: if λ is not positive, or no record is left.
    """
    if lam <= 0 or not len(y_N):
        raise PlanError(f"expected lam > 0 and at least one record, got {lam} and {len(y_N)}")
    w_D = torch.zeros_like(b_D)
    for _ in range(steps):
        g_D = gradient(w_D, x_ND, y_N, lam, b_D)
        if float(g_D.norm()) < 1e-12:
            break
        w_D = w_D - torch.linalg.solve(hessian(w_D, x_ND, lam), g_D)
    return w_D


def remove(
    w_D: Tensor, x_ND: Tensor, y_N: Tensor, gone: Tensor, lam: float, b_D: Tensor
) -> Removal:
    """Remove records from a trained head.

    Args:
        w_D: head trained on all.
        x_ND: features of all.
        y_N: labels ±1.
        gone: bool [N], which records go.
        lam: λ.
        b_D: the noise of training.

    Returns:
        The head, and a bound on what is left of the removed.

    Raises:
        PlanError: if no record would be left.
    """
    if bool(gone.all()):
        raise PlanError("no record would be left: a head needs at least one")
    x_RD, y_R = x_ND[~gone], y_N[~gone]
    # -Δ is the gradient of the remaining loss at w, since that of the whole loss is zero there.
    delta_D = -gradient(w_D, x_RD, y_R, lam, b_D)
    step_D = torch.linalg.solve(hessian(w_D, x_RD, lam), delta_D)
    spread = float(torch.linalg.matrix_norm(x_RD, 2))
    residual = GAMMA * spread * float(step_D.norm()) * float((x_RD @ step_D).norm())
    return Removal(w_D + step_D, residual)


def budget(sigma: float, epsilon: float, delta: float) -> float:
    """Largest sum of residuals that keeps removals (ε, δ)-certified.

    Args:
        sigma: standard deviation of b, > 0.
        epsilon: ε > 0.
        delta: δ in (0, 1.5).

    Returns:
        sε/c with c = sqrt(2 ln(1.5/δ)).
    """
    return sigma * epsilon / math.sqrt(2 * math.log(1.5 / delta))
