"""AltPO: plausible alternates are preferred over the secret.

    f = -(2/β) · log sigmoid(β · (Δ(alternate) - Δ(secret)))

The loss is DPO's; what differs is the winner: an answer of the same form that says something else. Where nobody has written
alternates the method is refused: inventing them here would train on made-up facts about people.

Source: Mekala et al. 2024, arXiv 2409.13474.
"""

from __future__ import annotations

from unlearning.methods.dpo import loss

__all__ = ["NEEDS", "loss"]

NEEDS: frozenset[str] = frozenset({"alternates"})
