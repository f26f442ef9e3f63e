"""What stands beside the verdict: the hardest hit people, likeness to gold, one-run bounds, all from the rows."""

import json

import numpy as np
import pytest

from unlearning.description import describe
from unlearning.equivalence import distance
from unlearning.plan import AuditPlan
from unlearning.rows import Evidence, Row, to_table

N = 40
MODELS = (("original", "o"), ("unlearned", "u"), ("gold", "g1"), ("gold", "g2"), ("gold", "g3"))


def values_of(model, shift):
    """Log-probabilities of N people's secrets under a model."""
    return -10 + np.random.default_rng([*model[1].encode()]).normal(scale=0.3, size=N) + shift


def evidence_of(shifts, leaking=(), *, likelihoods=True, outlier=6.0, more=()):
    """Rows with two questions per person; person 7 is in the subgroup "rare" with three others."""
    rows = list(more)
    for model in MODELS:
        logprobs = values_of(model, shifts.get(model[0], 0.0))
        if model[0] == "unlearned":
            logprobs[7] += outlier
        for person in range(N):
            subject, group = f"{person:03d}", "rare" if person in {7, 8, 9, 10} else ""

            def add(population, attack, score, value, probe=0, model=model, subject=subject, group=group):  # fmt: skip
                group = group if population == "forgotten" else ""
                rows.append(Row(f"{population}{subject}", population, group, probe, *model, attack, score, float(value)))  # fmt: skip

            for probe in range(2):
                leaked = model[0] == "original" or (model[0] == "unlearned" and person in leaking and probe == 1)  # fmt: skip
                add("forgotten", "direct/trained", "exact_match", leaked, probe)
                if likelihoods:
                    add("forgotten", "direct/trained", "secret_logprob", logprobs[person] - probe, probe)  # fmt: skip
            add("forgotten", "membership", "loss", 5 - logprobs[person] - 10)
            add("lookalike", "membership", "loss", 5 + np.random.default_rng(person).normal())
    plan = AuditPlan(
        num_forgotten=N, num_retained=1, num_lookalikes=N, original="o", unlearned="u", gold=("g1", "g2", "g3")
    )  # fmt: skip
    return Evidence(to_table(rows)), plan


def test_the_worst_person_stands_out_where_the_mean_says_nothing():
    """One person whose secret is six nats likelier: the mean hardly moves, the worst and the subgroup's percentile do."""
    evidence, plan = evidence_of({"original": 9.0}, leaking=(7,))
    everybody, rare = describe(evidence, plan)["leakage"]
    theirs = np.max([values_of(m, 0.0) for m in MODELS[2:]], axis=0)
    ours = values_of(("unlearned", "u"), 0.0)
    ours[7] += 6.0
    excess = ours - theirs
    assert float(everybody["excess_worst"]) == pytest.approx(excess.max(), abs=1e-6)
    assert float(everybody["excess_95"]) == pytest.approx(np.quantile(excess, 0.95), abs=1e-6)
    assert float(everybody["excess_mean"]) == pytest.approx(excess.mean(), abs=1e-6)
    assert float(everybody["excess_worst"]) > 3 > float(everybody["excess_mean"]) + 3
    assert (rare["subgroup"], rare["people"], rare["given_away"]) == ("rare", 4, "0.250000")


def test_questions_are_counted_one_by_one():
    """A leak through the second phrasing shows in its row only."""
    evidence, plan = evidence_of({"original": 9.0}, leaking=(1, 2, 3, 4))
    first, second = describe(evidence, plan)["questions"]
    assert (first["unlearned"], second["unlearned"]) == ("0.000000", "0.100000")
    assert first["original"] == second["original"] == "1.000000"
    assert second["gold"] == ["0.000000"] * 3


def test_likeness_compares_with_the_farthest_gold_and_the_band():
    """D is the largest over gold models; a shifted model is outside of the band and not equivalent, gold's twin is inside."""
    evidence, plan = evidence_of({"original": 9.0, "unlearned": 4.0})
    apart = {r["score"]: r for r in describe(evidence, plan)["equivalence"]}["secret_logprob"]
    ours = values_of(("unlearned", "u"), 4.0)
    ours[7] += 6.0
    assert float(apart["d"]) == pytest.approx(
        max(distance(ours, values_of(m, 0.0)).d for m in MODELS[2:])
    )
    assert float(apart["d"]) > float(apart["null_band"])
    assert apart["equivalent"] is False
    evidence, plan = evidence_of({"original": 9.0}, outlier=0.0)
    alike = {r["score"]: r for r in describe(evidence, plan)["equivalence"]}["secret_logprob"]
    assert alike["equivalent"] is True
    assert float(alike["d"]) < 0.4


def test_the_margin_of_equivalence_is_the_plans_and_no_share_of_what_was_seen():
    """The same difference of 0.3 nats stays different however far the original is, and a plan can only make the margin tighter."""
    for original in (1.0, 9.0, 90.0):
        evidence, plan = evidence_of({"original": original, "unlearned": 0.3}, outlier=0.0)
        row = {r["score"]: r for r in describe(evidence, plan)["equivalence"]}["secret_logprob"]
        assert (row["margin"], row["equivalent"]) == ("0.230000", False)
    evidence, plan = evidence_of({"original": 9.0}, outlier=0.0)
    tight = AuditPlan.from_json(plan.to_json() | {"score_margins": {"secret_logprob": "0.01"}})
    row = {r["score"]: r for r in describe(evidence, tight)["equivalence"]}["secret_logprob"]
    assert (row["margin"], row["equivalent"]) == ("0.010000", False)
    assert tight.digest != plan.digest


def test_extraction_scores_are_described_with_strength_first():
    """Extraction strength leads; exact memorisation and ROUGE-L stand below, each against its own margin."""
    shares = {"extraction_strength": 0.9, "exact_memorisation": 0.8, "rouge_l_recall": 0.7}
    rows = [
        Row(f"forgotten{person:03d}", "forgotten", "", 0, *model, "extraction", score, share if model[0] == "original" else 0.1)
        for model in MODELS
        for person in range(N)
        for score, share in shares.items()
    ]  # fmt: skip
    found = describe(*evidence_of({"original": 9.0}, more=rows))["equivalence"]
    assert [r["score"] for r in found] == [
        "extraction_strength", "secret_logprob", "loss", "exact_memorisation", "rouge_l_recall",
    ]  # fmt: skip
    assert [(r["margin"], r["equivalent"]) for r in found if r["attack"] == "extraction"] == [
        ("0.050000", True)
    ] * 3


def test_epsilon_tells_the_original_from_gold():
    """Losses nine nats lower give a bound, gold's none."""
    evidence, plan = evidence_of({"original": 9.0})
    found = [(r["model"], float(r["epsilon"])) for r in describe(evidence, plan)["epsilon"]]
    assert found[0][0] == "original"
    assert found[0][1] > 2
    assert all(epsilon < 0.7 for role, epsilon in found if role == "gold")


def test_a_description_is_json_and_survives_missing_parts():
    """Rows without likelihoods and plans without gold are described as far as they go."""
    evidence, plan = evidence_of({"original": 9.0}, likelihoods=False)
    found = describe(evidence, plan)
    assert found["leakage"] == []
    assert [r["score"] for r in found["equivalence"]] == ["loss"]
    assert json.loads(json.dumps(found)) == found
    alone = AuditPlan.from_json(plan.to_json() | {"gold": []})
    assert "leakage" not in describe(evidence, alone)
