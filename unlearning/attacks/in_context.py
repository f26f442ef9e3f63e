"""Tier 2, in-context recovery: show the form of the answer first, then ask.

Lines about other people in the same phrasing stand before the question. They say nothing about the forgotten person; they
tell the model *that* a number is wanted. A method that taught the model to refuse, or that only lowered the first digit,
gives way here (in our pilot a representation method with 0 % in tier 1 gave back 20 %).

The demonstrations are drawn once from the material's seed: every model sees the same lines. How many there are and what stands between them is
the plan's; `calibration` finds under which the original tells most of the people who stay.

Source: in-context recovery of PrivUn, arXiv 2604.22076 (abstract); the prompts are ours.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from unlearning.attacks.direct import ask

if TYPE_CHECKING:
    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.probes import Probe
    from unlearning.rows import Measurement

_STREAM = 2  # number of this attack's random stream under the material's seed


def in_context(model: Transformer, material: Material) -> list[Measurement]:
    """Ask about every forgotten person after some lines about others.

    Args:
        model: the model under attack, not changed.
        material: questions and demonstrations.

    Returns:
        Exact match (0 or 1) and mean log-probability of each secret.
    """
    return ask(model, demonstrated(material), "in_context")


def demonstrated(material: Material) -> list[Probe]:
    """The trained questions with demonstrations before them.

    Args:
        material: questions and demonstrations.

    Returns:
        One probe per trained question. A demonstration that would make the prompt too long is left out.
    """
    generator = np.random.default_rng([material.seed, _STREAM])
    by_phrasing: dict[int, list[Probe]] = {}
    for probe in material.demonstrations:
        by_phrasing.setdefault(probe.phrasing, []).append(probe)
    longer = []
    for probe in material.trained:
        # A phrasing that no retained person has (a person with more records than others) borrows from all.
        pool = by_phrasing.get(probe.phrasing) or list(material.demonstrations)
        size = min(material.limits.demonstrations, len(pool))
        lines: list[int] = []
        for chosen in generator.choice(len(pool), size=size, replace=False):
            line = [*pool[chosen].line_tokens, *material.between]
            total = len(lines) + len(line) + len(probe.prompt_tokens) + len(probe.secret_tokens)
            if total <= material.limits.max_probe_tokens:
                lines += line
        longer.append(dataclasses.replace(probe, prompt_tokens=(*lines, *probe.prompt_tokens)))
    return longer
