"""Weighted gradient ascent: tokens that the model is sure of are pushed hardest, and none when it has forgotten.

    f = mean_t p_t^β · log p_t,      p_t detached in the weight

Source: Wang et al. 2025, arXiv 2502.19301; β = 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset()


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `beta`

    Returns:
        loss_N, one value per record.
    """
    weight_S = (settings.beta * view.logprob_S.detach()).exp()
    return view.mean(weight_S * view.logprob_S)
