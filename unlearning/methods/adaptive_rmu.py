"""Adaptive RMU: the steering length follows the original's own hidden norm, so that deep layers converge too.

    f = mean ||h_l(x_f) - s·||h_original,l(x_f)||·u||²      per token

Source: Dang et al. 2024, arXiv 2408.06223, eq. 8; s = 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unlearning.errors import PlanError
from unlearning.methods.rmu import direction

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"hidden", "reference_hidden", "retain_hidden"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `scale`

    Returns:
        loss_N, one value per record.
    """
    if view.hidden_LSD is None or view.reference_LSD is None:
        raise PlanError("expected hidden states of the model and of the original, got none")
    norms_LS1 = view.reference_LSD.to(view.hidden_LSD).norm(dim=-1, keepdim=True)
    target_LSD = (
        settings.scale * norms_LS1 * direction(view.hidden_LSD.shape[-1]).to(view.hidden_LSD)
    )
    distance_LS = (view.hidden_LSD - target_LSD).square().mean(-1)
    return view.mean(distance_LS.sum(0) / view.num_layers)
