"""SatImp: ascent weighted by saturation p^β1 and importance (1-p)^β2.

    f = mean_t p_t^β1 · (1 - p_t)^β2 · log p_t,      p_t detached in the weight

Source: Yang et al. 2025, arXiv 2505.11953; β1 = 5, β2 = 1, w_f = 0.1 (the yaml of the published code; its class swaps w_f and w_r).
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
        settings: `beta`, `beta2`

    Returns:
        loss_N, one value per record.
    """
    chance_S = view.logprob_S.detach().exp()
    weight_S = chance_S**settings.beta * (1 - chance_S).clamp(min=0) ** settings.beta2
    return view.mean(weight_S * view.logprob_S)
