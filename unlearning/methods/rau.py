"""Multi-layer deep intervention: many layers are moved to where records that were never trained on lie.

    f = Σ_l ||h_l(x_f) - anchor_l||² / ||anchor_l||²        anchor_l = mean hidden state of the original over all the secrets

Retain side: hidden states of the original. Anchors here are the mean over all forgotten records at the original,
which removes what is particular to one person. Our reading of PrivUn's RAU; its exact form was not public when this was written.

Source: PrivUn, arXiv 2604.22076 (abstract).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"hidden", "reference_hidden", "retain_hidden"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: none; `layers` chooses the layers

    Returns:
        loss_N, one value per record.
    """
    del settings
    if view.hidden_LSD is None or view.anchor_LD is None:
        raise PlanError("expected hidden states of the model and of the original, got none")
    anchor_LD = view.anchor_LD.to(view.hidden_LSD)
    distance_LS = (view.hidden_LSD - anchor_LD[:, None]).square().sum(-1)
    scale_L1 = anchor_LD.square().sum(-1).clamp(min=1e-12)[:, None]
    return view.mean((distance_LS / scale_L1).sum(0))
