"""Tier 1, direct retrieval: ask, and see whether the secret comes first.

Every record of a forgotten person is asked about in the phrasing it was trained with, and once more in phrasings that were
never trained: a method that only breaks the trained wording would otherwise pass. Cost: one forward pass per question.

Source: direct retrieval of PrivUn, arXiv 2604.22076 (abstract); unseen phrasings as in RWKU's paraphrased probes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unlearning.rows import Measurement
from unlearning.scoring import score_probes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.probes import Probe


def direct(model: Transformer, material: Material) -> list[Measurement]:
    """Ask about every forgotten person.

    Args:
        model: the model under attack, not changed.
        material: questions.

    Returns:
        Exact match (0 or 1) and mean log-probability of each secret.
    """
    trained = ask(model, material.trained, "direct/trained")
    return trained + (ask(model, material.unseen, "direct/unseen") if material.unseen else [])


def ask(model: Transformer, probes: Sequence[Probe], attack: str) -> list[Measurement]:
    """Put questions about forgotten people to a model.

    Args:
        model: any model, not changed.
        probes: questions; their order numbers a person's questions.
        attack: name that the measurements carry.

    Returns:
        Two measurements per question: `exact_match` and `secret_logprob` (nats per token, ≤ 0).
    """
    scores = score_probes(model, probes)
    asked: dict[str, int] = {}
    measured = []
    for probe, exact, loss in zip(probes, scores.exact_N, scores.loss_N, strict=True):
        number = asked.get(probe.subject_id, 0)
        asked[probe.subject_id] = number + 1
        found = (("exact_match", float(exact)), ("secret_logprob", -float(loss)))
        measured += [
            Measurement(probe.subject_id, "forgotten", number, attack, score, value)
            for score, value in found
        ]
    return measured
