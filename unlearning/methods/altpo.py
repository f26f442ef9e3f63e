"""AltPO: plausible alternates are preferred over the secret.

    f = -(2/β) · log sigmoid(β · (Δ(alternate) - Δ(secret)))

The loss is DPO's; what differs is the winner: an answer of the same form that says something else. Where nobody has written
alternates the method is refused: inventing them here would train on made-up facts about people.

Source: Mekala et al. 2024, arXiv 2409.13474.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"alternates"})


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
