"""Task vector: learn the secret on purpose, then walk the other way.

    θ_unlearned = θ_original - a · (θ_reinforced - θ_original)

`θ_reinforced` is the original fine-tuned on the forgotten records. Source: Ilharco et al., ICLR 2023, arXiv 2212.04089; MUSE,
arXiv 2407.06460, sweeps a.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from torch import nn


@torch.no_grad()
def negate(original: nn.Module, reinforced: nn.Module, scale: float) -> None:
    """Move the original away from what it would learn, in place.

    Args:
        original: the original model; changed.
        reinforced: the same, fine-tuned on the forgotten records.
        scale: a, ≥ 0; 0 changes nothing.

    Raises:
        PlanError: for a negative scale or models of different shapes.
    """
    if scale < 0:
        raise PlanError(f"expected scale >= 0, got {scale}")
    theirs = dict(reinforced.named_parameters())
    for name, parameter in original.named_parameters():
        if name not in theirs or theirs[name].shape != parameter.shape:
            raise PlanError(
                f"the reinforced model has no parameter {name} of shape {tuple(parameter.shape)}"
            )
        parameter.sub_(scale * (theirs[name].to(parameter) - parameter))
