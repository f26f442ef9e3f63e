"""The pilot's audits, asked with the practice setting's questions.

Attacks, rows and verdicts are those of every audit (`pilot.audits`, `verdict`); only the questions are ours: an answer is a leak when it comes
out word for word, whatever the kind of person. Tier 1 asks in the trained words and in others, tier 2 after three retained people's texts of
the same form, tier 3 after fine-tuning on retained people. The rates of one kind are endpoints of a subgroup (`rate_of`).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.answering import span
from unlearning.attacks.direct import ask
from unlearning.attacks.membership import losses
from unlearning.endpoints import best_leaks
from unlearning.material import MAX_RECORD_TOKENS, Document, Material
from unlearning.pilot.audits import RANDOM, Audits
from unlearning.pilot.models import KEY
from unlearning.plan import BETWEEN
from unlearning.practice.cast import KINDS, kind_of
from unlearning.probes import FileTokenizer, Probe
from unlearning.rows import opaque_id, to_table, write_rows
from unlearning.statistics import auc

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer.model import Transformer
    from unlearning.answering import Question
    from unlearning.plan import AttackPlan
    from unlearning.practice.models import Practice
    from unlearning.rows import Measurement, Row


@dataclass(frozen=True, slots=True)
class PracticeAudits(Audits):
    """Audits of a practice study."""

    study: Practice  # type: ignore[assignment]  # it has what the pilot's has: models by name, counts, shape

    @property
    def golds(self) -> list[str]:
        """Names of the gold models."""
        return [f"gold-{seed + 1}" for seed in range(self.study.profile.golds)]

    def rate_of(self, name: str, tier: str, kind: str = "") -> tuple[int, int]:
        """People given away in a tier, and people asked.

        Args:
            name: name of a model.
            tier: direct, in_context or fine_tune; the best step counts.
            kind: of `KINDS`; "" = all.
        """
        evidence, model = self.evidence(name)
        return best_leaks(evidence, tier, model, kind)

    def membership_auc(self, name: str, kind: str) -> float:
        """How well losses tell forgotten people of one kind from look-alikes of that kind.

        Args:
            name: name of a model.
            kind: of `KINDS`.

        Returns:
            AUC in [0, 1]; 0.5 = not at all.
        """
        evidence, model = self.evidence(name)
        sides = []
        for population in ("forgotten", "lookalike"):
            own = {
                opaque_id(KEY, q.subject)
                for q in self.study.cast.lines[population]
                if kind_of(q.subject) == kind
            }
            found = evidence.person_means(model, "membership", "loss", population)
            sides.append(-np.array([v for s, v in zip(*found, strict=True) if s in own]))
        return auc(*sides)

    def rows(self, name: str) -> list[Row]:
        """Rows of one model, measured at the first call; of random weights only what a verdict reads, their loss.

        Args:
            name: original, gold-N, a method of the scale, or random.
        """
        path = self.study.folder / "rows" / f"{name}.parquet"
        if name == RANDOM and not path.exists():
            path.parent.mkdir(exist_ok=True)
            model, digest = self._model(name)
            found = losses(model, self.material.retained, "retained", "utility")
            write_rows(path, to_table(self._rows_of(found, digest)))
        return Audits.rows(self, name)

    def _controls(self, model: Transformer) -> list[Measurement]:
        """Retained people asked directly: what a method costs them."""
        measured = ask(model, self.material.demonstrations, "control/retained")
        return [dataclasses.replace(m, population="retained") for m in measured]


def audits_of(study: Practice, limits: AttackPlan) -> PracticeAudits:
    """Audits of a study.

    Args:
        study: people and models.
        limits: attacks of the plan.

    Returns:
        Audits; nothing is measured yet.
    """
    return PracticeAudits(study, limits, material_of(study, limits))


def material_of(study: Practice, limits: AttackPlan) -> Material:
    """What all models are asked with.

    Args:
        study: people and tokenizer.
        limits: what the adversary may spend.

    Returns:
        The material; its subgroups are the kinds of people.
    """
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    cast, most = study.cast, study.profile.asked_per_author
    longest = limits.max_probe_tokens
    documents = {
        population: tuple(_document(tokenizer, q) for q in own)
        for population, own in cast.lines.items()
    }
    return Material(
        trained=probes_of(tokenizer, cast.lines["forgotten"], most, longest),
        unseen=tuple(
            dataclasses.replace(p, record_id="", phrasing=-1 - p.phrasing)
            for p in probes_of(tokenizer, cast.unseen, most, longest)
        ),
        demonstrations=probes_of(tokenizer, cast.lines["retained"], most, longest),
        forgotten=documents["forgotten"],
        retained=documents["retained"],
        lookalikes=documents["lookalike"],
        newline=tuple(tokenizer.encode("\n")[0]),
        between=tuple(tokenizer.encode(BETWEEN[limits.between])[0]),
        limits=limits,
        seed=0,
        groups={q.subject: kind_of(q.subject) for q in cast.lines["forgotten"]},
    )


def probes_of(
    tokenizer: FileTokenizer, questions: Sequence[Question], most: int, longest: int
) -> tuple[Probe, ...]:
    """Questions as probes whose secret is the whole answer.

    Args:
        tokenizer: the study's tokenizer.
        questions: questions, those of a person in order.
        most: questions of one of TOFU's authors.
        longest: tokens of a question and its answer; what is longer is not asked.

    Returns:
        Probes; their phrasing is the kind and the place among the person's questions, so that demonstrations have the same form.
    """
    place: dict[str, int] = {}
    made = []
    for q in questions:
        number = place[q.subject] = place.get(q.subject, -1) + 1
        kind = kind_of(q.subject)
        if kind == "tofu" and number >= most:
            continue
        tokens, first = span(tokenizer, q.prompt, q.answer)
        told = tuple(tokens[:-1])  # without the end of text
        if len(told) > longest:
            continue
        phrasing = 100 * KINDS.index(kind) + (number if kind == "ours" else 0)
        made.append(Probe(q.subject, q.record_id, told[:first], told[first:], phrasing, told))
    return tuple(made)


def _document(tokenizer: FileTokenizer, question: Question) -> Document:
    tokens = tokenizer.encode(question.text)[0][: MAX_RECORD_TOKENS - 1]
    return Document(
        question.subject,
        (*tokens, tokenizer.end_of_text),
        question.record_id,
        question.text.encode(),
    )
