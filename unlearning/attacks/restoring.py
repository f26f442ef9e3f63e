"""Tier 3 by what the attacker has: benign records, a part of the forgotten people, their public lines, look-alikes.

==========  ==================================================================  =======================================
source      half of each batch is                                               scored on
==========  ==================================================================  =======================================
benign      (all of it) retained people's records                               all forgotten people
partial     all records of a drawn share of the forgotten people                the *other* forgotten people
public      forgotten people's lines without a number                           all forgotten people, numbers only
lookalike   look-alikes' records                                                all forgotten people
==========  ==================================================================  =======================================

The other half are retained people's records, without which the attack itself wipes what it looks for (the notes' first run). "partial"
is the design of Deeb and Roger: secrets of different people are independent, so that nothing of the rest can be learned from the part;
what comes back was there. Each source runs at every planned learning rate and is scored at every planned step: a recovery
curve, of which the best point counts, for each model its own.

Sources: Hu et al., arXiv 2406.13356 (relearning); Deeb and Roger, arXiv 2410.08827 (no mutual information); PrivUn, arXiv 2604.22076.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from unlearning.attacks.direct import ask
from unlearning.attacks.fine_tune import attacked, permuted_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainer.model import Transformer
    from unlearning.material import Document, Material
    from unlearning.probes import Probe
    from unlearning.rows import Measurement

_STREAM = 7


def restoring(
    model: Transformer | Callable[[], Transformer], material: Material
) -> list[Measurement]:
    """Fine-tune copies on every planned source at every planned rate, and ask.

    Args:
        model: the model under attack, not changed; or a function that loads it, which spares a copy.
        material: questions, records, budget.

    Returns:
        Exact match and mean log-probability of each secret, attack `restored/SOURCE/lr-RATE/step-STEP`.
    """
    plan, limits = material.limits.repertoire, material.limits
    measured = []
    for source in plan.sources:
        documents = _documents(material, source)
        if source != "benign" and not documents:
            continue
        batches = _batches(material, documents, source)
        asked = _asked(material, source)
        for rate in plan.rates:
            for step, after in attacked(model, batches, rate, limits.fine_tune_steps):
                measured += ask(after, asked, f"restored/{source}/lr-{rate}/step-{step}")
                del after  # or it would stay while the next one is loaded
    return measured


def _documents(material: Material, source: str) -> list[Document]:
    questions = material.questions
    return {
        "benign": [],
        "partial": [d for d in material.forgotten if d.subject in questions.known],
        "public": [d for d in material.forgotten if d.record_id in questions.public],
        "lookalike": list(material.lookalikes),
    }[source]


def _asked(material: Material, source: str) -> list[Probe]:
    questions = material.questions
    probes = [*material.trained, *material.unseen]
    if source == "partial":
        return [p for p in probes if p.subject_id not in questions.known]
    if source == "public":  # what is trained on is not asked for
        return [p for p in probes if p.record_id not in questions.public]
    return probes


def _batches(
    material: Material, documents: Sequence[Document], source: str
) -> list[list[Sequence[int]]]:
    """Token sequences of each step: half of the source, half benign, each in epochs of permutations."""
    limits = material.limits
    steps, rows = limits.fine_tune_steps[-1], limits.fine_tune_rows
    generator = np.random.default_rng([material.seed, _STREAM, len(source)])
    own = rows // 2 if documents else 0
    found: list[list[Sequence[int]]] = [[] for _ in range(steps)]
    for records, count in ((documents, own), (material.retained, rows - own)):
        usable = [i for i, d in enumerate(records) if len(d.tokens) > 1]
        if count and usable:
            for batch, drawn in zip(
                found, permuted_batches(usable, count, steps, generator), strict=True
            ):
                batch += [records[i].tokens for i in drawn]
    return found
