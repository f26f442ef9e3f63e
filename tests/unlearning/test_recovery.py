"""Forgetting score and recovery against numbers made by hand, and what they say where there is nothing to divide by."""

import numpy as np
import pytest
from facts import GOLD, ORIGINAL, UNLEARNED, Facts, plan_of

from unlearning.description import describe
from unlearning.recovery import forgetting, recovery
from unlearning.rows import Evidence, Row, to_table

N = 4
MODELS = (("original", "o"), ("unlearned", "u"), ("gold", "g1"), ("gold", "g2"), ("gold", "g3"))


def likelihood_rows(table):
    """`secret_logprob` rows of the better of two direct questions: model -> one value per person."""
    return [
        Row(f"p{person}", "forgotten", "", probe, *model, "direct/trained", "secret_logprob", float(value - probe))
        for model, values in table.items()
        for person, value in enumerate(values)
        for probe in range(2)
    ]  # fmt: skip


BY_HAND = {
    ("original", "o"): [-0.5, -0.5, -0.1, -3.0],
    ("unlearned", "u"): [-2.5, -0.5, -4.1, -1.0],
    ("gold", "g1"): [-2.0, -2.0, -2.0, -3.0],
    ("gold", "g2"): [-2.5, -2.5, -2.1, -3.1],
    ("gold", "g3"): [-3.0, -3.0, -2.2, -3.2],
}


def test_forgetting_score_by_hand():
    """F = (o - u) / (o - mean gold): 1 down to gold, 0 nothing, 2 over-forgotten; the fourth person's denominator is 0.1 < 0.23 and gives none."""
    plan = plan_of(N, lookalikes=0)
    found = forgetting(Evidence(to_table(likelihood_rows(BY_HAND))), plan)
    assert [one["forgetting"] for one in found["persons"]] == ["1.000000", "0.000000", "2.000000", "none"]  # fmt: skip
    assert (found["people"], found["usable"], found["unusable_share"]) == (4, 3, "0.250000")
    assert float(found["median"]) == 1.0
    assert float(found["low_5"]) == pytest.approx(0.1)  # 0, 1, 2: linear between order statistics
    assert float(found["high_95"]) == pytest.approx(1.9)
    assert found["least_denominator"] == "0.230000"


def test_forgetting_without_likelihoods_or_denominators_is_no_number():
    """Rows of exact matches alone have no score; an original that knows no more than gold gives no number to anybody."""
    assert forgetting(Evidence(to_table(Facts(16).rows())), plan_of(16)) is None
    plan = plan_of(N, lookalikes=0)
    flat = dict.fromkeys(MODELS, [-2.0] * N)
    found = forgetting(Evidence(to_table(likelihood_rows(flat))), plan)
    assert (found["median"], found["unusable_share"]) == ("none", "1.000000")


def recovered(facts, source, score="exact_match"):
    """The recovery row of a source."""
    rows = recovery(Evidence(to_table(facts.rows())), plan_of(facts.n))
    return next(row for row in rows if (row["source"], row["score"]) == (source, score))


def test_recovery_by_hand_takes_each_models_best_step():
    """R = (u - g) / (o - g) with u's best step 32 of 64, o's 60, gold's mean (4 + 0 + 0)/3: (0.5 - 1/48) / (0.9375 - 1/48)."""
    facts = Facts()
    facts.fine_tune[UNLEARNED] = [set(range(32)), set(range(8))]
    facts.fine_tune[ORIGINAL] = [set(range(50)), set(range(60))]
    facts.fine_tune[GOLD] = [set(range(4)), set()]
    row = recovered(facts, "fine_tune")
    gold = 4 / 64 / 3
    assert float(row["recovery"]) == pytest.approx((0.5 - gold) / (60 / 64 - gold), abs=1e-6)
    assert (row["tier"], row["people"], row["unlearned"]) == (3, 64, "0.500000")
    # a share of about one half of 64 people: standard error 0.0625, so 1.645 of them on each side
    assert float(row["low"]) == pytest.approx(0.526 - 1.645 * 0.0625 / 0.917, abs=0.02)
    assert float(row["high"]) == pytest.approx(0.526 + 1.645 * 0.0625 / 0.917, abs=0.02)


def test_recovery_is_zero_for_gold_and_one_for_the_original():
    """A model that gives what gold gives recovers nothing, one that gives what the original gives everything, with certainty."""
    facts = Facts()
    assert [recovered(facts, "direct")[name] for name in ("recovery", "low", "high")] == ["0.000000"] * 3  # fmt: skip
    facts.direct[UNLEARNED] = facts.direct[ORIGINAL]
    assert [recovered(facts, "direct")[name] for name in ("recovery", "low", "high")] == ["1.000000"] * 3  # fmt: skip


def test_recovery_needs_an_original_that_leaks():
    """Where the original's lead over gold is not shown to exceed the margin there is no ratio, whatever the unlearned model gives."""
    facts = Facts()
    facts.in_context[ORIGINAL] = {0, 1, 2}
    facts.in_context[UNLEARNED] = {0, 1, 2}
    row = recovered(facts, "in_context")
    assert (row["recovery"], row["low"], row["high"]) == ("none", "none", "none")
    assert row["unlearned"] == "0.046875"


def test_sources_of_restoration_stand_apart_and_the_description_has_both():
    """Rates and steps of one source are tries of one adversary; sources are rows of their own; `describe` carries scores and recoveries."""
    facts = Facts(16)
    rows = facts.rows()
    for model in facts.models:
        for source, lr, leaks in (
            ("partial", "0.001", 4),
            ("partial", "0.01", 8),
            ("public", "0.01", 2),
        ):
            many = {"original": 16, "unlearned": leaks}.get(model[0], 0)
            rows += [
                Row(f"forgotten-{p:04d}", "forgotten", "", 0, *model, f"restored/{source}/lr-{lr}/step-10", "exact_match", float(p < many))
                for p in range(16)
            ]  # fmt: skip
    found = describe(Evidence(to_table(rows)), plan_of(16))
    shares = {row["source"]: float(row["recovery"]) for row in found["recovery"]}
    assert shares["restored/partial"] == pytest.approx(0.5)
    assert shares["restored/public"] == pytest.approx(0.125)
    assert "forgetting" not in found  # these rows have no likelihoods
    assert np.isfinite(list(shares.values())).all()
