"""Gradient difference: ascend on the secret, descend on what remains.

    L = w_f · mean_t log p(y_t)  +  w_r · NLL_retain

Source: Liu, Liu, Stone, CoLLAs 2022, arXiv 2203.12817; w_f = w_r = 1.
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
        settings: none; weights are applied by the objective

    Returns:
        loss_N, one value per record.
    """
    del settings
    return view.logprob_N / view.num_tokens_N
