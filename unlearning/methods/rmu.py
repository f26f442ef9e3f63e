"""RMU: hidden states of the secret are steered to one fixed random direction, those of what remains stay.

    f = mean over tokens and width of ||h_l(x_f) - c·u||²,      u ~ U[0,1)^D, normalised, the same for every step

Source: Li et al., WMDP, arXiv 2403.03218, section 4; c = 2, one layer. All parameters are trained (the published code's yaml);
the paper trains three down-projections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"hidden", "retain_hidden"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `scale`

    Returns:
        loss_N, one value per record.
    """
    if view.hidden_LSD is None:
        raise PlanError("expected hidden states, got none")
    target_D = settings.scale * direction(view.hidden_LSD.shape[-1]).to(view.hidden_LSD)
    distance_LS = (view.hidden_LSD - target_D).square().mean(-1)
    return view.mean(distance_LS.sum(0) / view.num_layers)


def direction(width: int) -> Tensor:
    """The unit vector u that all steps and processes share.

    Args:
        width: D.

    Returns:
        float64 [D] of length 1.
    """
    generator = torch.Generator().manual_seed(0)
    u_D = torch.rand(width, generator=generator, dtype=torch.float64)
    return u_D / u_D.norm()
