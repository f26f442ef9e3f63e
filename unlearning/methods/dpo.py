"""IdkDPO: "I don't know." is preferred over the secret.

    f = -(2/β) · log sigmoid(β · (Δ(idk) - Δ(secret))),      Δ(y) = log p_θ(y) - log p_original(y), sums over tokens

Source: Rafailov et al. 2023, arXiv 2305.18290; as an unlearning baseline TOFU, arXiv 2401.06121; factor 2/β as in NPO's paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"idk"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `beta`

    Returns:
        loss_N, one value per record.
    """
    if view.preferred_N is None:
        raise PlanError("expected a preferred answer per record, got none")
    margin_N = view.preferred_N - (view.logprob_N - view.reference_N)
    return -2.0 / settings.beta * functional.logsigmoid(settings.beta * margin_N)
