"""Influence step: one Newton step that takes the forgotten records' gradients back out.

    θ_unlearned = θ_original + (H + λI)⁻¹ · Σ_{z forgotten} ∇l(z; θ_original)          H = Σ over what remains of ∇²l

For a quadratic loss with the Hessian of what *remains* this is retraining itself. For networks H is a damped curvature; the
inverse comes in as a function, so that any of `valuation`'s curvatures fits.

Source: Koh, Liang, ICML 2017, arXiv 1703.04730; Guo et al., ICML 2020, arXiv 1911.03030, eq. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


def newton_step(
    theta_P: Tensor, forget_gradient_P: Tensor, inverse: Callable[[Tensor], Tensor]
) -> Tensor:
    """The weights after the step.

    Args:
        theta_P: flat weights of the original.
        forget_gradient_P: *sum* of the forgotten records' loss gradients there.
        inverse: v_P → (H + λI)⁻¹ v_P, H summed over what remains.

    Returns:
        θ_unlearned, [P].

    Raises:
        PlanError: if the step is not finite: more damping is needed.
    """
    step_P = inverse(forget_gradient_P)
    if not bool(torch.isfinite(step_P).all()):
        raise PlanError("the influence step is not finite: raise the damping")
    return theta_P + step_P


def diagonal_inverse(fisher_P: Tensor, damping: float) -> Callable[[Tensor], Tensor]:
    """Inverse of a damped diagonal curvature.

    Args:
        fisher_P: diagonal of H, ≥ 0.
        damping: λ > 0.

    Returns:
        v_P → v_P / (fisher + λ).

    Raises:
        PlanError: for a damping that is not positive.
    """
    if damping <= 0:
        raise PlanError(f"expected damping > 0, got {damping}")
    return lambda v_P: v_P / (fisher_P + damping)
