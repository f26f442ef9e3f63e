"""Aggregates of published benchmarks, from one row per record: TOFU's forget quality and model utility, LUME's scores.

With l the mean loss of an answer, l' that of its paraphrase, l_k those of K wrong answers, all per record::

    probability          P  = mean exp(-l)
    option probability   P° = mean exp(-l) / (exp(-l) + sum_k exp(-l_k))                real authors, world facts
    truth ratio          TR = exp(l' - mean_k l_k)                                       geometric, as in the code
                         TR = mean_k exp(-l_k) / exp(-l')                                arithmetic, as in the paper's eq. 1
       on kept sets      T  = mean max(0, 1 - TR)           ideal 1
       on forgotten ones T  = mean min(TR, 1/TR)            ideal: gold's
    forget quality       p-value of the two-sample KS test of {TR_i(unlearned)} and {TR_i(gold)}
    model utility        harmonic mean of 9: {P or P°, ROUGE-L recall, T} x {retain, real authors, world facts}

    LUME, per task       regurgitation = mean ROUGE-L of completions, knowledge = share of exact answers; of forgotten sets 1 minus that
    membership           1 - 2 |AUC - 0.5|               1 = members are not told from others
    LUME's score         harmonic mean of all of these, and of MMLU where a model can be asked that

Paper and code differ in the truth ratio's mean over wrong answers; the code's is the default, since published tables come from it. A
zero among the numbers makes a harmonic mean zero: a model that says nothing right about one set is of no use, however good the rest.
Records are matched by id. That a KS test does not reject proves no likeness (`equivalence` says why, and adds effect size and a band).

The first organisers' text aggregates everything by a harmonic mean; how it turns an AUC into a score it doesn't say: the form here is ours.

Sources: arXiv 2401.06121, section 2.2; locuslab/tofu `aggregate_eval_stat.py`; llmunlearningsemeval2025.github.io, "Challenge
Evaluation"; LUME, arXiv 2502.15097.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from unlearning.equivalence import Distance, distance
from unlearning.errors import RowsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from unlearning.answering import Answered

    Mean = Literal["geometric", "arithmetic"]
    Answers = Mapping[str, Answered]

KEPT = ("retain", "real_authors", "world_facts")


@dataclass(frozen=True, slots=True)
class Utility:
    """TOFU's model utility with what it is made of."""

    parts: dict[str, float]
    """`SET/probability`, `SET/rouge`, `SET/truth_ratio` → value in [0, 1], nine of them."""
    utility: float
    """Their harmonic mean."""


@dataclass(frozen=True, slots=True)
class LumeScore:
    """LUME's score with what it is made of; higher is better everywhere."""

    parts: dict[str, float]
    """`TASK/SPLIT/regurgitation`, `TASK/SPLIT/knowledge` (forgotten sets: 1 minus), `membership`, perhaps `mmlu`."""
    score: float
    """Their harmonic mean."""


def probability(answers: Answers) -> float:
    """Mean probability per token of the right answer.

    Args:
        answers: record id → what the model makes of it, at least one.

    Returns:
        Value in [0, 1].

    Raises:
        RowsError: without a record.
    """
    return _mean([math.exp(-a.loss) for a in answers.values()])


def option_probability(answers: Answers) -> float:
    """Mean share of the right answer among the options.

    Args:
        answers: record id → what the model makes of it; each with wrong answers.

    Returns:
        Value in [0, 1].

    Raises:
        RowsError: without a record, or for one without wrong answers.
    """
    shares = []
    for name, a in answers.items():
        # Relative to the likeliest option, so that none underflows.
        best = min(a.loss, *_wrong(name, a))
        right = math.exp(best - a.loss)
        shares.append(right / (right + sum(math.exp(best - w) for w in a.wrong_losses)))
    return _mean(shares)


def log_truth_ratios(answers: Answers, mean: Mean = "geometric") -> dict[str, float]:
    """Logarithm of each record's truth ratio; below 0 = the model prefers the truth.

    Args:
        answers: record id → what the model makes of it; each with wrong answers.
        mean: of the wrong answers' probabilities: "geometric" (code) or "arithmetic" (paper).

    Returns:
        record id → nats.

    Raises:
        RowsError: for a record without wrong answers, or another mean.
    """
    if mean not in ("geometric", "arithmetic"):
        raise RowsError(f"expected the mean 'geometric' or 'arithmetic', got {mean!r}")
    found = {}
    for name, a in answers.items():
        wrong_K = -np.array(_wrong(name, a))
        top = wrong_K.max()
        joined = (
            wrong_K.mean() if mean == "geometric" else top + np.log(np.exp(wrong_K - top).mean())
        )
        found[name] = float(joined + a.paraphrase_loss)
    return found


def truth_ratio(answers: Answers, *, forgotten: bool, mean: Mean = "geometric") -> float:
    """TOFU's number for a set: how much the truth is preferred, or on forgotten sets how little it matters.

    Args:
        answers: record id → what the model makes of it; each with wrong answers.
        forgotten: whether the set is to be forgotten.
        mean: as in `log_truth_ratios`.

    Returns:
        Value in [0, 1]: mean max(0, 1 - TR), or of a forgotten set mean min(TR, 1/TR).

    Raises:
        RowsError: without a record, or for one without wrong answers.
    """
    logs = log_truth_ratios(answers, mean).values()
    if forgotten:
        return _mean([math.exp(-abs(one)) for one in logs])
    return _mean([max(0.0, -math.expm1(min(one, 0.0))) for one in logs])


def forget_quality(unlearned: Answers, gold: Answers, mean: Mean = "geometric") -> Distance:
    """TOFU's forget quality, with the distance whose p-value it is.

    Args:
        unlearned: of the forgotten records, under the unlearned model.
        gold: of the same records, under a model that never saw them.
        mean: as in `log_truth_ratios`.

    Returns:
        Distance of the truth ratios; `p_value` is the forget quality. (The logarithm changes no rank, hence neither.)

    Raises:
        RowsError: if the records are not the same, or there is none.
    """
    if set(unlearned) != set(gold) or not gold:
        raise RowsError(
            f"expected the same records under both models, got {len(unlearned)} and {len(gold)} "
            f"with {len(set(unlearned) & set(gold))} in common"
        )
    ours, theirs = log_truth_ratios(unlearned, mean), log_truth_ratios(gold, mean)
    return distance(np.array(list(ours.values())), np.array([theirs[name] for name in ours]))


def model_utility(sets: Mapping[str, Answers], mean: Mean = "geometric") -> Utility:
    """TOFU's model utility.

    Args:
        sets: `retain`, `real_authors`, `world_facts` → record id → what the model makes of it.
        mean: as in `log_truth_ratios`.

    Returns:
        Nine numbers and their harmonic mean.

    Raises:
        RowsError: for other sets than these, or an empty one.
    """
    if set(sets) != set(KEPT):
        raise RowsError(f"expected the sets {KEPT}, got {sorted(sets)}")
    parts = {}
    for name in KEPT:
        answers = sets[name]
        chance = probability if name == "retain" else option_probability
        parts[f"{name}/probability"] = chance(answers)
        parts[f"{name}/rouge"] = _mean([a.rouge for a in answers.values()])
        parts[f"{name}/truth_ratio"] = truth_ratio(answers, forgotten=False, mean=mean)
    return Utility(parts, harmonic(list(parts.values())))


def lume_score(
    completions: Mapping[str, Mapping[str, Answers]],
    questions: Mapping[str, Mapping[str, Answers]],
    membership_auc: float,
    mmlu: float | None = None,
) -> LumeScore:
    """LUME's score.

    Args:
        completions: task → split (`forget`, `retain`) → completions, of which ROUGE-L counts.
        questions: task → split → questions, of which exact answers count.
        membership_auc: how well losses tell forgotten records from records never trained, in [0, 1].
        mmlu: share of right answers on MMLU, in [0, 1]; None = not asked (a small model is at chance there).

    Returns:
        All parts and their harmonic mean.

    Raises:
        RowsError: for other splits, different tasks, an empty set, or a number outside [0, 1].
    """
    if set(completions) != set(questions) or not completions:
        raise RowsError("expected completions and questions of the same tasks, at least one")
    numbers = [membership_auc] if mmlu is None else [membership_auc, mmlu]
    if not all(0.0 <= one <= 1.0 for one in numbers):
        raise RowsError(f"expected AUC and MMLU in [0, 1], got {numbers}")
    parts = {}
    for task in sorted(completions):
        for name, given in (("regurgitation", completions), ("knowledge", questions)):
            if set(given[task]) != {"forget", "retain"}:
                raise RowsError(f"{task}: expected the splits forget and retain, got {sorted(given[task])}")  # fmt: skip
            for split, answers in sorted(given[task].items()):
                value = _mean(
                    [a.rouge if name == "regurgitation" else a.exact for a in answers.values()]
                )
                parts[f"{task}/{split}/{name}"] = 1.0 - value if split == "forget" else value
    parts["membership"] = 1.0 - 2.0 * abs(membership_auc - 0.5)
    if mmlu is not None:
        parts["mmlu"] = mmlu
    return LumeScore(parts, harmonic(list(parts.values())))


def harmonic(values: list[float]) -> float:
    """Harmonic mean of numbers that are not negative; 0 if one of them is.

    Args:
        values: at least one, each ≥ 0.

    Raises:
        RowsError: for no value or a negative one.
    """
    if not values or min(values) < 0:
        raise RowsError(f"expected numbers of at least 0, got {values}")
    return 0.0 if min(values) == 0.0 else len(values) / sum(1.0 / one for one in values)


def _wrong(name: str, answered: Answered) -> tuple[float, ...]:
    if not answered.wrong_losses:
        raise RowsError(f"record {name}: expected wrong answers, got none")
    return answered.wrong_losses


def _mean(values: list[float]) -> float:
    if not values:
        raise RowsError("expected at least one record, got none")
    return sum(values) / len(values)
