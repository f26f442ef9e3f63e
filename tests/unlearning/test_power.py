"""When a PASS is refused: the original isn't shown to leak under the same attack, too few gold models, gold models that differ."""

import dataclasses

import pytest
from facts import GOLD, GOLD_2, GOLD_3, MODELS, ORIGINAL, UNLEARNED, Facts, plan_of

from unlearning.endpoints import Status
from unlearning.errors import PlanError
from unlearning.rows import to_table
from unlearning.statistics import newcombe_bounds
from unlearning.verdict import contradictions, verdict_from_rows


def test_a_tier_without_power_is_open():
    """A clean erasure under whose attack the original gives nobody away either is INCONCLUSIVE, by that tier alone, and never INVALID."""
    facts = Facts()
    facts.in_context[ORIGINAL] = set()
    verdict = facts.judge()
    assert verdict.status is Status.INCONCLUSIVE
    assert [e.has_power for e in verdict.endpoints[:3]] == [True, False, True]
    assert [e.status for e in verdict.endpoints] == [
        Status.PASS, Status.INCONCLUSIVE, Status.PASS, Status.PASS, Status.PASS,
    ]  # fmt: skip
    (reason,) = verdict.reasons
    assert "the original shows 0.000 here, so this tier proves nothing" in reason
    assert "an attack of this tier under which the original leaks would decide" in reason
    assert all(control.holds for control in verdict.controls)
    assert verdict.to_json()["endpoints"][1]["has_power"] is False


@pytest.mark.parametrize(("leaks", "status"), [(7, Status.INCONCLUSIVE), (8, Status.PASS)])
def test_power_needs_the_originals_lower_bound_above_the_margin(leaks, status):
    """Of 64 people and a margin of 0.05 seven leaks of the original are too few, eight are enough; the missing people are counted."""
    assert (newcombe_bounds(leaks, 64, 0, 64).low > 0.05) == (status is Status.PASS)
    facts = Facts()
    facts.in_context[ORIGINAL] = set(range(leaks))
    verdict = facts.judge()
    assert verdict.status is status
    needed = verdict.endpoints[1].people_needed
    if status is Status.PASS:
        assert needed is None
    else:
        assert newcombe_bounds(leaks / 64 * needed, needed, 0, needed).low > 0.05
        assert f"{needed} people would decide, or an attack of this tier" in verdict.reasons[0]


@pytest.mark.parametrize(("original", "unlearned", "needed"), [(2, 2, None), (5, 1, 214), (7, 2, 366)])  # fmt: skip
def test_people_who_would_decide_decide_both_questions(original, unlearned, needed):
    """An open tier without power: so many people, at the same rates, show that the original leaks and that the unlearned model doesn't; none where the original leaks no more than the margin."""
    facts = Facts()
    facts.in_context[ORIGINAL] = set(range(original))
    facts.in_context[UNLEARNED] = set(range(unlearned))
    tier = facts.judge().endpoints[1]
    assert (tier.status, tier.has_power, tier.people_needed) == (Status.INCONCLUSIVE, False, needed)
    if needed:
        leaks, ours = original / 64 * needed, unlearned / 64 * needed
        assert newcombe_bounds(leaks, needed, 0, needed).low > 0.05
        assert newcombe_bounds(ours, needed, 0, needed).high <= 0.05


def test_a_tier_without_power_still_fails_by_a_leak():
    """What comes out of the unlearned model counts, whatever the original gives away under the same attack."""
    facts = Facts()
    facts.in_context[ORIGINAL] = set()
    facts.in_context[UNLEARNED] = set(range(40))
    verdict = facts.judge()
    assert verdict.status is Status.FAIL
    assert "no power" in verdict.reasons[0]


def test_a_subgroup_without_power_is_marked_and_opens_nothing():
    """Five people can't show that the original leaks; their subgroup is undecided, and the audit of all 64 passes."""
    facts = Facts(groups=dict.fromkeys(range(5), "minors"))
    facts.in_context[ORIGINAL] = set(range(5, 64))
    verdict = facts.judge(plan_of(subgroups=("minors",)))
    assert verdict.status is Status.PASS
    marked = {e.label: (e.has_power, e.status) for e in verdict.endpoints}
    assert marked["in_context[minors]"] == (False, Status.INCONCLUSIVE)


@pytest.mark.parametrize("golds", [1, 2])
def test_fewer_than_three_gold_seeds_never_pass(golds):
    """With one or two gold seeds a clean erasure is INCONCLUSIVE and says so; a leak is still FAIL."""
    facts = Facts(models=MODELS[: 2 + golds])
    verdict = facts.judge()
    assert verdict.status is Status.INCONCLUSIVE
    assert (
        f"{golds} gold model{'s' * (golds > 1)} seen, 3 distinct ones needed" in verdict.reasons[0]
    )
    facts.direct[UNLEARNED] = set(range(40))
    assert facts.judge().status is Status.FAIL


def test_gold_is_judged_against_the_other_gold_models():
    """Identity control: a gold model apart from the others by more than a margin makes the audit INVALID, whichever it is; one alone has no others."""
    facts = Facts()
    assert sum("against the others" in c.name for c in facts.judge().controls) == 3
    facts.utility[GOLD_3] = 1.5
    verdict = facts.judge()
    assert verdict.status is Status.INVALID
    broken = [c for c in verdict.controls if not c.holds]
    assert [c.name for c in broken] == ["gold 3 does not fail against the others"]
    assert "utility 1.000" in broken[0].detail
    alone = Facts(models=(ORIGINAL, UNLEARNED, GOLD)).judge()
    assert not any("against the others" in c.name for c in alone.controls)


def test_gold_audited_as_unlearned_passes_among_all_three():
    """Identity control A6: the model under audit is one of the three; its distance from itself is none and can't help it."""
    facts = Facts(models=(ORIGINAL, ("unlearned", "g1"), GOLD, GOLD_2, GOLD_3))
    plan = dataclasses.replace(plan_of(), unlearned="g1")
    assert facts.judge(plan).status is Status.PASS


def test_an_audit_of_another_format_is_said_to_be_one():
    """A verdict of the first rule neither agrees nor disagrees: one sentence that says so, also with a plan of then."""
    plan, table = plan_of(), to_table(Facts().rows())
    audit = verdict_from_rows(table, plan).to_json() | {"plan": plan.to_json()}
    assert (audit["format"], contradictions(audit, table)) == (3, [])
    old = audit | {"format": 1, "plan": plan.to_json() | {"format": 1, "min_gold_seeds": 2}}
    (said,) = contradictions(old, table)
    assert said.startswith("format: audit.json was judged by the rule of format 1")
    with pytest.raises(PlanError, match="plan format 2, got 1"):
        verdict_from_rows(table, old["plan"])
