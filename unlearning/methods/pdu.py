"""PDU: flat logits on the secret, subject to a bound on the loss of what remains.

    min  mean_t (max_v z_v - mean_v z_v)²    s.t.  NLL_retain <= ε;      λ <- max(0, λ + η · (NLL_retain - ε))

λ multiplies NLL_retain; the objective moves it once per step, on any layout, and it is part of every checkpoint.

Source: primal-dual unlearning, arXiv 2506.05314; logit-margin term and dual step as in open-unlearning's trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"dual"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: none; `bound` and `dual_rate` belong to the dual step

    Returns:
        loss_N, one value per record.
    """
    del settings
    margin_S = view.logits_SV.max(-1).values - view.logits_SV.mean(-1)
    return view.mean(margin_S.square())
