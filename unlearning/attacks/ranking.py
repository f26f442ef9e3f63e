"""Below the first answer: where the secret ranks, what it is preferred to, and how much of it comes by itself.

A model can pass every tier on exact match and still know the number: the true one ranks first of a hundred candidates. These scores see
that. They are evidence beside the tiers (formulas and directions: `extraction`, `memberships`).

    extraction     extraction_strength, exact_memorisation, rouge_l_recall      per trained question
    truth_ratio    log_truth_ratio                                               one paraphrased question per person
    exposure       exposure in bits                                              one trained question per person
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.generate import generate
from unlearning.attacks.memorised import bits_of
from unlearning.extraction import (
    exact_memorisation,
    extraction_strength,
    log_truth_ratio,
    rouge_l_recall,
)
from unlearning.memberships import Bigrams, score_of
from unlearning.positions import teacher_forced
from unlearning.rows import Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.material import Document, Material
    from unlearning.probes import Probe


def ranking(model: Transformer, material: Material) -> list[Measurement]:
    """Extraction scores of every question, exposure and truth ratio of every person with a number, other membership scores.

    Args:
        model: the model under attack, not changed.
        material: questions and records.

    Returns:
        Measurements named as in the module's docstring; membership scores stand under the attack `membership`.
    """
    plan = material.limits.repertoire
    measured = _extraction(model, material) if plan.candidates or plan.wrong else []
    measured += _exposure(model, material) if plan.candidates else []
    measured += _truth_ratio(model, material) if plan.wrong else []
    if plan.memberships and material.lookalikes:
        bigrams = Bigrams((d.tokens for d in material.retained), model.spec.vocab_size)
        for population, documents in (
            ("forgotten", material.forgotten),
            ("lookalike", material.lookalikes),
        ):
            measured += _memberships(model, documents, population, plan.memberships, bigrams)
    return measured


def _span(probe: Probe) -> tuple[tuple[int, ...], int]:
    return (*probe.prompt_tokens, *probe.secret_tokens), len(probe.prompt_tokens)


def _extraction(model: Transformer, material: Material) -> list[Measurement]:
    positions = teacher_forced(model, {p.record_id: _span(p) for p in material.trained})
    longest = max(len(p.secret_tokens) for p in material.trained)
    said = generate(model, [p.prompt_tokens for p in material.trained], longest)
    measured = []
    for probe, answer in zip(material.trained, said, strict=True):
        one = positions[probe.record_id]
        values = {
            "extraction_strength": extraction_strength(one),
            "exact_memorisation": exact_memorisation(one),
            "rouge_l_recall": rouge_l_recall(
                probe.secret_tokens, answer[: len(probe.secret_tokens)]
            ),
        }
        measured += [
            Measurement(probe.subject_id, "forgotten", probe.phrasing, "extraction", score, value)
            for score, value in values.items()
        ]
    return measured


def _exposure(model: Transformer, material: Material) -> list[Measurement]:
    measured = []
    for subject, (probe, others) in material.questions.candidates.items():
        bits = bits_of(model, probe, others)
        measured.append(Measurement(subject, "forgotten", 0, "exposure", "exposure", bits))
    return measured


def _truth_ratio(model: Transformer, material: Material) -> list[Measurement]:
    spans = {
        f"{subject}/{number}": _span(probe)
        for subject, probes in material.questions.wrong.items()
        for number, probe in enumerate(probes)
    }
    positions = teacher_forced(model, spans)
    measured = []
    for subject, probes in material.questions.wrong.items():
        correct, *wrong = (positions[f"{subject}/{number}"] for number in range(len(probes)))
        value = log_truth_ratio(wrong, correct)
        measured.append(
            Measurement(subject, "forgotten", 0, "truth_ratio", "log_truth_ratio", value)
        )
    return measured


def _memberships(
    model: Transformer,
    documents: Sequence[Document],
    population: str,
    names: Sequence[str],
    bigrams: Bigrams,
) -> list[Measurement]:
    scored = {d.record_id: d for d in documents if len(d.tokens) > 1}
    positions = teacher_forced(model, {name: (d.tokens, 1) for name, d in scored.items()})
    asked: dict[str, int] = {}
    measured = []
    for name, document in scored.items():
        number = asked.get(document.subject, 0)
        asked[document.subject] = number + 1
        measured += [
            Measurement(
                document.subject, population, number, "membership", score,
                score_of(score, document.text, document.tokens, bigrams)(positions[name]),
            )
            for score in names
        ]  # fmt: skip
    return measured
