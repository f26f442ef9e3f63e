"""Tier 1 by other means: paraphrased, inverted, one-hop, forced and obliging questions, and many samples.

A greedy answer is one try. An adversary with k samples succeeds with 1 - (1 - p)^k, p the chance of the whole secret at the
sampling's temperature; p is exact from one forward pass (`extraction.leak_at_k`), so that no sample has to be drawn.

Source: UnlearnPII and RWKU (arXiv 2406.10890) for the ways to ask; leak@k as pass@k, Chen et al., arXiv 2107.03374.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unlearning.attacks.direct import ask
from unlearning.extraction import leak_at_k
from unlearning.positions import teacher_forced
from unlearning.rows import Measurement

if TYPE_CHECKING:
    from trainer.model import Transformer
    from unlearning.material import Material


def asking(model: Transformer, material: Material) -> list[Measurement]:
    """Ask about every forgotten person in the planned ways.

    Args:
        model: the model under attack, not changed.
        material: questions.

    Returns:
        Exact match (0 or 1) and mean log-probability of what was asked for, attack `asked/WAY`.
    """
    return [
        measurement
        for way, probes in material.questions.asked.items()
        if probes
        for measurement in ask(model, probes, f"asked/{way}")
    ]


def sampling(model: Transformer, material: Material) -> list[Measurement]:
    """Chance that one of k samples is a secret, for the planned numbers of samples.

    Args:
        model: the model under attack, not changed.
        material: questions.

    Returns:
        `leak_probability` in [0, 1] of each question, attack `sampled/k-K`.
    """
    plan = material.limits.repertoire
    probes = (*material.trained, *material.unseen)
    names = [f"{number:08d}" for number in range(len(probes))]
    spans = {
        name: ((*p.prompt_tokens, *p.secret_tokens), len(p.prompt_tokens))
        for name, p in zip(names, probes, strict=True)
    }
    positions = teacher_forced(model, spans, float(plan.temperature))
    measured = []
    for tries in plan.samples:
        asked: dict[str, int] = {}
        for name, probe in zip(names, probes, strict=True):
            number = asked.get(probe.subject_id, 0)
            asked[probe.subject_id] = number + 1
            chance = leak_at_k(positions[name], tries)
            measured.append(
                Measurement(
                    probe.subject_id, "forgotten", number, f"sampled/k-{tries}", "leak_probability", chance
                )
            )  # fmt: skip
    return measured
