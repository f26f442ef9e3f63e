"""Fine-tuning on what remains: nothing is pushed, and forgetting is left to drift. A baseline that must fail.

    L = NLL_retain

Source: Golatkar et al. 2020, arXiv 1911.04933 (the fine-tuning baseline).
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
        settings: none

    Returns:
        loss_N, one value per record.
    """
    del settings
    return 0.0 * view.logprob_N
