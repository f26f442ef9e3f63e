"""TOFU's and LUME's numbers of the study's models: asked once, kept as numbers, aggregated by the published formulas.

::

    FOLDER/benchmarks/MODEL.json     set → record id → [loss, loss of the paraphrase, losses of wrong answers, ROUGE-L, exact]

Sets: `forget10`, `retain`, `real_authors`, `world_facts` of TOFU; `completions/SPLIT` and `questions/SPLIT` of LUME. No text is kept. Forget
quality is the KS test against a gold model: with several gold models the *median* of the p-values stands (published tables have one),
and the largest distance between two gold models is the band below which a model is as like gold as gold is.

LUME's membership score is the AUC of losses of forgotten completions against look-alikes'. A model that was never taught its questions answers
none word for word, and then LUME's harmonic mean is 0: the parts say more.

Formulas: `unlearning.utility`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.answering import Answered, answered
from unlearning.equivalence import null_band
from unlearning.practice.cast import TASK
from unlearning.probes import FileTokenizer
from unlearning.statistics import cluster_bounds
from unlearning.utility import (
    KEPT,
    forget_quality,
    log_truth_ratios,
    lume_score,
    model_utility,
    probability,
    truth_ratio,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from unlearning.answering import Question
    from unlearning.practice.audits import PracticeAudits

    Answers = dict[str, Answered]

FORGET = "forget10"
TOFU = (FORGET, *KEPT)


@dataclass(frozen=True, slots=True)
class Summary:
    """Numbers of one model."""

    forget_quality: float
    """Median over gold models of the KS test's p-value."""
    distance: float
    """Median over gold models of the KS distance."""
    forget_truth_ratio: float
    forget_probability: float
    forget_rouge: tuple[float, float, float]
    """ROUGE-L recall on forgotten questions, with 95 % bounds, authors drawn again."""
    forget_exact: float
    """Share of forgotten questions answered word for word."""
    utility: float
    parts: dict[str, float]
    """The nine numbers of model utility."""
    lume: dict[str, float]
    """The parts of LUME's score."""
    lume_score: float


@dataclass(frozen=True, slots=True)
class Benchmarks:
    """The published sets, asked of the models of a study."""

    audits: PracticeAudits

    def sets(self) -> dict[str, tuple[Question, ...]]:
        """Name → questions."""
        cast = self.audits.study.cast
        found = dict(cast.tofu)
        for kind, splits in cast.lume.items():
            found |= {f"{kind}/{split}": own for split, own in splits.items()}
        return found

    def answers(self, name: str, sets: Sequence[str] | None = None) -> dict[str, Answers]:
        """What a model makes of the sets, each asked once and kept as soon as it is.

        Args:
            name: name of a model.
            sets: names of sets, default all; what was kept of others is returned too.

        Returns:
            Set → record id → numbers.
        """
        from provenance.canonical import write_atomic

        folder = self.audits.study.folder
        path = folder / "benchmarks" / f"{name}.json"
        kept = json.loads(path.read_text()) if path.exists() else {}
        wanted = self.sets()
        missing = [one for one in (wanted if sets is None else sets) if one not in kept]
        if missing:
            model, tokenizer = self.audits.model(name), FileTokenizer(folder / "tokenizer.json")
            path.parent.mkdir(exist_ok=True)
            for one in missing:
                found = answered(model, tokenizer, wanted[one])
                kept[one] = {key: dataclasses.astuple(a) for key, a in found.items()}
                write_atomic(path, json.dumps(kept).encode())
        return {
            one: {key: Answered(a[0], a[1], tuple(a[2]), a[3], a[4]) for key, a in own.items()}
            for one, own in kept.items()
        }

    def summary(
        self, name: str, golds: Sequence[str] | None = None, *, attacked: bool = True
    ) -> Summary:
        """The published numbers of a model.

        Args:
            name: name of a model; a gold model is compared with the others.
            golds: gold models to compare with, default all; without one, forget quality is NaN.
            attacked: whether LUME's numbers are wanted, which need the audit's rows; else they are empty and NaN.
        """
        asked = self.answers(name, TOFU)
        forget = asked[FORGET]
        named = self.audits.golds if golds is None else golds
        others = [self.answers(g, TOFU)[FORGET] for g in named if g != name]
        found = [forget_quality(forget, gold) for gold in others]
        utility = model_utility({one: asked[one] for one in KEPT})
        parts, score = self._lume(name) if attacked else ({}, math.nan)
        bounds = cluster_bounds(
            self._by_author(forget), lambda v: float(v.mean()), np.random.default_rng(0), alpha=0.025
        )  # fmt: skip
        return Summary(
            forget_quality=statistics.median([one.p_value for one in found] or [math.nan]),
            distance=statistics.median([one.d for one in found] or [math.nan]),
            forget_truth_ratio=truth_ratio(forget, forgotten=True),
            forget_probability=probability(forget),
            forget_rouge=(bounds.estimate, bounds.low, bounds.high),
            forget_exact=sum(a.exact for a in forget.values()) / len(forget),
            utility=utility.utility,
            parts=utility.parts,
            lume=parts,
            lume_score=score,
        )

    def _lume(self, name: str) -> tuple[dict[str, float], float]:
        """LUME's parts and score."""
        asked = self.answers(name)
        completions, questions = (
            {TASK: {split: asked[f"{kind}/{split}"] for split in ("forget", "retain")}}
            for kind in ("completions", "questions")
        )
        found = lume_score(completions, questions, self.audits.membership_auc(name, "lume"))
        return found.parts, found.score

    def band(self) -> float:
        """Largest KS distance of forgotten truth ratios between two gold models."""
        ratios = [log_truth_ratios(self.answers(gold, TOFU)[FORGET]) for gold in self.audits.golds]
        return null_band([np.array([own[key] for key in ratios[0]]) for own in ratios])

    def _by_author(self, forget: Mapping[str, Answered]) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for q in self.sets()[FORGET]:
            found.setdefault(q.subject, []).append(forget[q.record_id].rouge)
        return found
