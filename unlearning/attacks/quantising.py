"""Rounding the weights: an update smaller than a bucket of the rounding is rounded away, and what it hid is back.

    s = max|w| / (2^(b-1) - 1) per output row,    w' = s * round(w / s)        symmetric, round to nearest

Only matrices of linear layers are rounded (not norms, not the embedding). Expect the effect for methods with small learning
rates; at the rates of our pilot nothing came back, and rounding to 4 bits lowered original and gold as well.

Source: Zhang et al., "Does your LLM truly unlearn?", ICLR 2025, arXiv 2410.16454.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from unlearning.attacks.direct import ask

if TYPE_CHECKING:
    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.rows import Measurement


def quantising(model: Transformer, material: Material) -> list[Measurement]:
    """Ask rounded copies about every forgotten person.

    Args:
        model: the model under attack, not changed.
        material: questions.

    Returns:
        Exact match and mean log-probability of each secret, attack `quantised/int-BITS`.
    """
    asked = (*material.trained, *material.unseen)
    measured = []
    for bits in material.limits.repertoire.bits:
        measured += ask(rounded(model, bits), asked, f"quantised/int-{bits}")
    return measured


def rounded(model: Transformer, bits: int) -> Transformer:
    """A copy with rounded matrices.

    Args:
        model: any model, not changed.
        bits: bits per weight, ≥ 2.

    Returns:
        The copy; the embedding, also where it is the output head, keeps its numbers. Of an ensemble each constituent is rounded by
        itself, as whoever serves it rounds what is stored, and the mean is taken of what the rounded ones say.
    """
    from unlearning.ensemble import members

    copied = copy.deepcopy(model)
    with torch.no_grad():
        for one in members(copied):
            kept = None if one.embed is None else one.embed.weight
            for module in one.modules():
                if isinstance(module, nn.Linear) and module.weight is not kept:
                    module.weight.copy_(nearest(module.weight, bits))
    return copied


def nearest(weight_OI: Tensor, bits: int) -> Tensor:
    """A matrix on 2^bits - 1 levels per row, symmetric around 0.

    Args:
        weight_OI: any matrix.
        bits: bits per weight, ≥ 2.

    Returns:
        Rounded values of the same shape; a row of zeros stays one.
    """
    levels = 2 ** (bits - 1) - 1
    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / levels
    return torch.where(scale_O1 > 0, (weight_OI / scale_O1).round() * scale_O1, weight_OI)
