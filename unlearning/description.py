"""Beside the verdict: who is hit hardest, how like gold the scores are, what one run proves. It decides nothing.

::

    leakage        per subgroup: share given away (direct), and how much likelier a person's secret is than under every gold model, nats
                   per token: the worst person and the 95th percentile (a mean hides the one person whose number is out)
    questions      share given away per question (ordinal of the record: which attribute in which phrasing)
    equivalence    per score: distance D from the farthest gold model, its p-value, Cliff's delta, the gold-vs-gold band (three
                   models or more), and TOST with the plan's margin for that score
    forgetting     how far each person is forgotten on gold's scale, and the distribution of that (`recovery`)
    recovery       what each tier and source brings back, from 0 (as gold) to 1 (as the original) (`recovery`)
    epsilon        one-run lower bounds from the losses of forgotten people (in) and look-alikes (out)
    memorisation   what the original knew of whom, by how often it was shown them (`memorisation`)

Everything follows from rows and plan, like the verdict; `verdict.contradictions` repeats it. The epsilons are indicative: the cut into
forgotten people and look-alikes is fixed, and the theorem wants a coin per person.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning.canaries import epsilon_from_scores
from unlearning.endpoints import membership_scores
from unlearning.equivalence import distance, null_band, tost
from unlearning.memorisation import memorisation
from unlearning.recovery import forgetting, recovery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from unlearning.plan import AuditPlan
    from unlearning.rows import Evidence

    Model = tuple[str, str]

# Extraction strength and log-probability first: of the published scores they tell forgetting best and withstand attacks best (notes, 2.5).
SCORES = (
    ("extraction", "extraction_strength"),
    ("direct", "secret_logprob"),
    ("membership", "loss"),
    ("truth_ratio", "log_truth_ratio"),
    ("extraction", "exact_memorisation"),
    ("extraction", "rouge_l_recall"),
)
BUDGETS = (
    16,
    32,
    64,
    128,
    256,
    512,
)  # guesses of the one-run bound; Bonferroni over those that the people allow


def describe(evidence: Evidence, plan: AuditPlan) -> dict[str, Any]:
    """The description of an audit.

    Args:
        evidence: its rows.
        plan: its plan.

    Returns:
        JSON values; real numbers as decimal strings. Without gold, what needs gold is left out.
    """
    gold = [("gold", digest) for digest in plan.gold]
    models = [("original", plan.original), ("unlearned", plan.unlearned), *gold]
    found: dict[str, Any] = {
        "questions": _questions(evidence, models),
        "epsilon": _epsilon(evidence, models) if plan.num_lookalikes else [],
    }
    if (remembered := memorisation(evidence, plan)) is not None:
        found["memorisation"] = remembered.to_json()
    if gold:
        found["leakage"] = _leakage(evidence, models[1], gold)
        found["equivalence"] = [
            _likeness(evidence, plan, models, attack, score)
            for attack, score in SCORES
            if evidence.attacks(attack) and len(_values(evidence, models[0], attack, score)) > 1
        ]
        if (forgotten := forgetting(evidence, plan)) is not None:
            found["forgetting"] = forgotten
        found["recovery"] = recovery(evidence, plan)
    return found


def _values(evidence: Evidence, model: Model, attack: str, score: str) -> NDArray[np.float64]:
    """One value per forgotten person: the best question's, or for losses the mean."""
    if score == "loss":
        return evidence.person_means(model, attack, score, "forgotten")[1]
    return evidence.per_person(model, evidence.attacks(attack), score)[1]


def _leakage(
    evidence: Evidence, unlearned: Model, gold: Sequence[Model]
) -> list[dict[str, str | int]]:
    attacks = evidence.attacks("direct")
    people, leaked = evidence.per_person(unlearned, attacks, "exact_match")
    _, ours = evidence.per_person(unlearned, attacks, "secret_logprob")
    if len(ours) != len(people):
        return []  # rows of before there were likelihoods
    theirs = np.max([evidence.per_person(m, attacks, "secret_logprob")[1] for m in gold], axis=0)
    labels = [evidence.subgroups[person] for person in people]
    rows: list[dict[str, str | int]] = []
    for group in ["", *sorted(frozenset().union(*labels))]:
        inside = np.array([group in {"", *own} for own in labels])
        excess = (ours - theirs)[inside]
        rows.append(
            {
                "subgroup": group, "people": int(inside.sum()), "given_away": _text(leaked[inside].mean()),
                "excess_mean": _text(excess.mean()), "excess_95": _text(np.quantile(excess, 0.95)), "excess_worst": _text(excess.max()),
            }
        )  # fmt: skip
    return rows


def _questions(evidence: Evidence, models: Sequence[Model]) -> list[dict[str, Any]]:
    rows = []
    for attack in evidence.attacks("direct"):
        shares = {m: evidence.by_question(m, attack, "exact_match") for m in models}
        rows += [
            {
                "attack": attack, "question": question, "people": len(values),
                "original": _text(np.mean(values)), "unlearned": _text(np.mean(shares[models[1]][question])),
                "gold": [_text(np.mean(shares[m][question])) for m in models[2:]],
            }
            for question, values in sorted(shares[models[0]].items())
        ]  # fmt: skip
    return rows


def _likeness(
    evidence: Evidence, plan: AuditPlan, models: Sequence[Model], attack: str, score: str
) -> dict[str, Any]:
    _, unlearned, *golds = (_values(evidence, m, attack, score) for m in models)
    farthest = max((distance(unlearned, g) for g in golds), key=lambda one: one.d)
    margin = float(getattr(plan.score_margins, score))
    same = tost(unlearned - np.mean(golds, axis=0), margin, float(plan.alpha))
    return {
        "attack": attack, "score": score, "people": len(unlearned), "d": _text(farthest.d), "p_value": _text(farthest.p_value),
        "cliff": _text(farthest.cliff), "null_band": _text(null_band(golds)) if len(golds) > 2 else "none", "margin": _text(margin),
        "difference": _text(same.estimate), "low": _text(same.low), "high": _text(same.high), "tost_p": _text(same.p_value),
        "equivalent": same.equivalent,
    }  # fmt: skip


def _epsilon(evidence: Evidence, models: Sequence[Model]) -> list[dict[str, str]]:
    rows = []
    for role, digest in models:
        scores = membership_scores(evidence, (role, digest))
        budgets = [r for r in BUDGETS if r <= sum(map(len, scores))] or [2]
        rows.append({"model": role, "epsilon": _text(epsilon_from_scores(*scores, budgets))})
    return rows


def _text(value: float | np.floating) -> str:
    return f"{float(value):.6f}"
