"""Tier 2 by budget: one to thirty-two lines before the question, from look-alikes or from what is related to the target.

Look-alikes' lines say only which form is wanted; the target's own public line and the lines of the most similar people also call
up what the model associates with the target. The lines of n shots begin those of n + 1, so that a prefix is read once and serves
every budget and, with look-alikes, every target (`decoding.Prefix`).

A line that does not fit into the plan's `shot_tokens` is left out, with all after it.

Source: in-context recovery of PrivUn, arXiv 2604.22076 (abstract); budgets and choice of lines are ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlearning.decoding import Prefix
from unlearning.rows import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.probes import Probe

_STREAM = 6


def shots(model: Transformer, material: Material) -> list[Measurement]:
    """Ask about every forgotten person after the planned numbers of lines.

    Args:
        model: the model under attack, not changed.
        material: questions and lines.

    Returns:
        Exact match (0 or 1) and mean log-probability of each secret, attack `shots/SOURCE/n-N`.
    """
    plan = material.limits.repertoire
    by_phrasing: dict[int, list[Probe]] = {}
    by_person: dict[str, list[Probe]] = {}
    for probe in material.trained:
        by_phrasing.setdefault(probe.phrasing, []).append(probe)
        by_person.setdefault(probe.subject_id, []).append(probe)
    measured = []
    if "lookalike" in plan.shot_sources and material.questions.lookalikes:
        for phrasing, probes in by_phrasing.items():
            lines = _drawn(material, phrasing)
            measured += _after(model, material, lines, probes, "shots/lookalike")
    if "related" in plan.shot_sources:
        for subject, probes in by_person.items():
            related = material.questions.related[subject]
            # A line that is shown is not asked for.
            hidden = [p for p in probes if p.record_id not in material.questions.public]
            measured += _after(model, material, related, hidden or probes, "shots/related")
    return measured


def _drawn(material: Material, phrasing: int) -> list[tuple[int, ...]]:
    """Look-alikes' lines in the phrasing that is asked for, in an order drawn from the seed."""
    pool = [p for p in material.questions.lookalikes if p.phrasing == phrasing]
    pool = pool or list(material.questions.lookalikes)
    generator = np.random.default_rng([material.seed, _STREAM, phrasing])
    most = material.limits.repertoire.shots[-1]
    return [pool[i].line_tokens for i in generator.permutation(len(pool))[:most]]


def _after(
    model: Transformer,
    material: Material,
    lines: Sequence[Sequence[int]],
    probes: Sequence[Probe],
    attack: str,
) -> list[Measurement]:
    plan = material.limits.repertoire
    prefix: list[int] = []
    ends = [0]
    for line in lines[: plan.shots[-1]]:
        if len(prefix) + len(line) + len(material.newline) > plan.shot_tokens:
            break
        prefix += [*line, *material.newline]
        ends.append(len(prefix))
    shared = Prefix(model, prefix)
    asked = [((*p.prompt_tokens, *p.secret_tokens), len(p.prompt_tokens)) for p in probes]
    measured = []
    for budget in plan.shots:
        scores = shared.scores(asked, ends[min(budget, len(ends) - 1)])
        for probe, exact, loss in zip(probes, scores.exact_N, scores.loss_N, strict=True):
            found = (("exact_match", float(exact)), ("secret_logprob", -float(loss)))
            measured += [
                Measurement(
                    probe.subject_id, "forgotten", probe.phrasing, f"{attack}/n-{budget}", score, value
                )
                for score, value in found
            ]  # fmt: skip
    return measured
