"""SimNPO: NPO without a reference, per token.

    f = -(2/β) · log sigmoid(-(β/|y|) · log p(y) - β·δ)

Source: Fan et al. 2024, arXiv 2410.07163, eq. 4; β = 4.5, δ = 0, w_f = 0.125 as in the published code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset()


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `beta`, `delta`

    Returns:
        loss_N, one value per record.
    """
    nll_N = -view.logprob_N / view.num_tokens_N
    return -2.0 / settings.beta * functional.logsigmoid(settings.beta * (nll_N - settings.delta))
