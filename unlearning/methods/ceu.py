"""CE-U: cross entropy to the model's own distribution with the secret taken out.

    f = mean_t CE(softmax(z_θ with z_{y_t} = -inf), p_θ),      target detached

Source: Yang 2025, arXiv 2503.01224; the first token of an answer is ignored there (`skip` = 1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from unlearning.methods.settings import Settings
    from unlearning.methods.view import View

NEEDS: frozenset[str] = frozenset()


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record.

    Args:
        view: pushed positions of a step.
        settings: `skip`

    Returns:
        loss_N, one value per record.
    """
    detached_SV = view.logits_SV.detach()
    target_SV = detached_SV.scatter(1, view.truth_S[:, None], -torch.inf).softmax(-1)
    logprob_SV = view.logits_SV.log_softmax(-1)
    cross_S = -(target_SV * logprob_SV).sum(-1)
    # Ordinal of a position inside its record: positions of a record are consecutive.
    same_SS = view.record_S[:, None] == view.record_S[None]
    ordinal_S = (same_SS.tril().sum(1) - 1).to(cross_S.device)
    kept_S = (ordinal_S >= settings.skip).to(cross_S)
    counts_N = view.sum(kept_S).clamp(min=1)
    return view.sum(cross_S * kept_S) / counts_N
