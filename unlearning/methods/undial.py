"""UNDIAL: distil the original's logits with the secret's own logit lowered.

    f = mean_t CE(softmax(z_original - β · onehot(y_t)), p_θ)

Bounded from below by the target's entropy: it cannot collapse. Source: Dong et al. 2024, arXiv 2402.10052; β = 10, w_r = 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"reference_logits"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `beta`

    Returns:
        loss_N, one value per record.
    """
    if view.reference_SV is None:
        raise PlanError("expected the original's logits, got none")
    shift_SV = functional.one_hot(view.truth_S, view.logits_SV.shape[-1]).to(view.logits_SV)
    target_SV = (view.reference_SV.to(view.logits_SV) - settings.beta * shift_SV).softmax(-1)
    return view.mean(-(target_SV * view.logits_SV.log_softmax(-1)).sum(-1))
