"""Ascent on the secret, held to the original's distribution on what remains.

    L = w_f · mean_t log p(y_t)  +  w_r · KL(p_original ‖ p_θ) on retained labels

The KL runs over labelled positions only (published code adds prompt and padding). The original's distribution there is its head's product
with last states that were computed once (`reference`): D numbers per token in place of V, and no second model.

Source: Maini et al., TOFU, arXiv 2401.06121, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset({"retain_kl"})


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: none; weights are applied by the objective

    Returns:
        loss_N, one value per record.
    """
    del settings
    return view.logprob_N / view.num_tokens_N
