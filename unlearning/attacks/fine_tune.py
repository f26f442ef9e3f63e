"""Tier 3, fine-tuning restoration: train the model further on harmless records, then ask again.

Approximate methods often bend the last layers only; a few steps on *other* people's records of the same kind straighten
them again and the forgotten numbers come back, although the attacker never had them. In our pilot, methods with 0 % in
tiers 1 and 2 gave back 34 to 81 %; the gold model, under the same attack, 0 %.

The attack is a plain AdamW loop with a *small* step size on the retained people's records, questions at a few steps; the
best step counts. If it is too hot it wipes every model and finds nothing anywhere: the original model is the control (it
must keep its own leaks), and a verdict without that control is INVALID. The model that is given stays as it is: a copy is
trained. All models see the same records in the same order.

Source: fine-tuning restoration of PrivUn, arXiv 2604.22076; relearning, Hu et al., ICLR 2025, arXiv 2406.13356.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn import functional

from unlearning.attacks.direct import ask
from unlearning.scoring import padded, span_logits, span_mask

if TYPE_CHECKING:
    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.rows import Measurement

_STREAM = 3


def fine_tune(model: Transformer, material: Material) -> list[Measurement]:
    """Fine-tune a copy on retained records and ask at the planned steps.

    Args:
        model: the model under attack, not changed.
        material: questions, retained records, budget.

    Returns:
        Exact match and mean log-probability of each secret, for each planned step.
    """
    attacked = copy.deepcopy(model).requires_grad_(requires_grad=True)
    limits = material.limits
    # No weight decay: the attacker wants the old knowledge back, not a smaller model.
    optimizer = torch.optim.AdamW(
        attacked.parameters(), lr=float(limits.fine_tune_lr), weight_decay=0.0
    )
    batches, device = drawn_batches(material), next(attacked.parameters()).device
    measured = []
    for step in range(1, limits.fine_tune_steps[-1] + 1):
        sequences = [material.retained[i].tokens for i in batches[step - 1]]
        tokens_BT = padded(sequences).to(device)
        mask_BT = span_mask(sequences, [1] * len(sequences)).to(device)
        logits_SV = span_logits(attacked, tokens_BT, mask_BT)
        optimizer.zero_grad(set_to_none=True)
        functional.cross_entropy(logits_SV, tokens_BT[:, 1:][mask_BT]).backward()
        optimizer.step()
        if step in limits.fine_tune_steps:
            asked = (*material.trained, *material.unseen)
            measured += ask(attacked, asked, f"fine_tune/step-{step}")
    return measured


def drawn_batches(material: Material) -> list[list[int]]:
    """Which retained records each step of the attack sees: epochs of fresh permutations, cut into batches.

    Args:
        material: retained records, budget, seed.

    Returns:
        For each step up to the last planned one, indices into `material.retained`.
    """
    generator = np.random.default_rng([material.seed, _STREAM])
    usable = [i for i, document in enumerate(material.retained) if len(document.tokens) > 1]
    rows, steps = material.limits.fine_tune_rows, material.limits.fine_tune_steps[-1]
    order: list[int] = []
    while len(order) < rows * steps:
        order += [usable[i] for i in generator.permutation(len(usable))]
    return [order[i * rows : (i + 1) * rows] for i in range(steps)]
