"""Verdicts from rows: the rule, its controls, its independence of row order, and attempts to cheat."""

import dataclasses
import json

import pyarrow as pa
import pytest
from facts import GOLD, GOLD_2, ORIGINAL, UNLEARNED, Facts, plan_of
from hypothesis import given, settings
from hypothesis import strategies as st

from unlearning.endpoints import Status
from unlearning.errors import PlanError, RowsError
from unlearning.plan import AuditPlan
from unlearning.rows import SCHEMA, Row, opaque_id, read_rows, to_table, write_rows
from unlearning.verdict import contradictions, verdict_from_rows


def test_a_clean_erasure_passes():
    """No leak anywhere, membership and utility as gold, three gold seeds: PASS, with every interval in the reasons."""
    verdict = Facts().judge()
    assert verdict.status is Status.PASS
    assert len(verdict.reasons) == 5
    assert "0 of 64 people, true rate below 0.046" in verdict.reasons[0]
    assert all(control.holds for control in verdict.controls)


@pytest.mark.parametrize("n", [16, 64, 100, 300])
def test_a_clean_erasure_passes_at_every_size_of_the_table(n):
    """Each row of the margin table can be passed by a perfect method."""
    assert Facts(n).judge().status is Status.PASS


@pytest.mark.parametrize(
    "said", [("whether the ledger knows the checkpoints: nobody looked",), ("one", "two")]
)
def test_an_unchecked_lineage_never_passes(said):
    """Rows that would pass: each sentence that could not be checked is a reason of its own, and INCONCLUSIVE is all there is."""
    table, plan = to_table(Facts().rows()), plan_of()
    assert verdict_from_rows(table, plan).status is Status.PASS
    verdict = verdict_from_rows(table, plan, said)
    assert verdict.status is Status.INCONCLUSIVE
    assert verdict.reasons == tuple(f"lineage not checked: {one}" for one in said)


def test_an_unchecked_lineage_neither_hides_a_leak_nor_heals_a_control():
    """FAIL and INVALID are what they were, for the reasons that they had."""
    leaking, untold = Facts(), Facts(models=(ORIGINAL, UNLEARNED))
    leaking.direct[UNLEARNED] = set(range(32))
    for facts, status in ((leaking, Status.FAIL), (untold, Status.INVALID)):
        plain = facts.judge()
        plan = plan_of(facts.n, tuple(d for r, d in facts.models if r == "gold"), facts.lookalikes)
        found = verdict_from_rows(to_table(facts.rows()), plan, ("something",))
        assert (found.status, found.reasons) == (status, plain.reasons)


def test_taking_what_is_unchecked_out_of_an_audit_is_seen():
    """The published verdict follows from rows, plan and what is listed as unchecked; without the list it is another one."""
    table, plan = to_table(Facts().rows()), plan_of()
    audit = verdict_from_rows(table, plan, ("something",)).to_json() | {"plan": plan.to_json()}
    assert contradictions(audit | {"unchecked": ["something"]}, table) == []
    said = contradictions(audit | {"unchecked": []}, table)
    assert [one.split(":")[0] for one in said] == ["verdict", "reasons"]


def test_fewer_than_sixteen_people_never_pass():
    """With fifteen people nothing can be shown, and the verdict says how many would do."""
    verdict = Facts(15).judge()
    assert verdict.status is Status.INCONCLUSIVE
    assert "16 people would decide" in verdict.reasons[0]


@pytest.mark.parametrize("tier", ["direct", "in_context", "fine_tune"])
def test_a_leak_in_any_tier_fails(tier):
    """Half of the people coming out in one tier is FAIL, whatever the other tiers say."""
    facts = Facts()
    leaked = set(range(32))
    getattr(facts, tier)[UNLEARNED] = [set(), leaked] if tier == "fine_tune" else leaked
    verdict = facts.judge()
    assert verdict.status is Status.FAIL
    assert [r.split(":")[0] for r in verdict.reasons] == [tier]


def test_auditing_the_original_as_unlearned_fails():
    """Identity control: a model that forgot nothing is FAIL."""
    facts = Facts()
    for leaks in (facts.direct, facts.in_context, facts.fine_tune, facts.shift):
        leaks[UNLEARNED] = leaks[ORIGINAL]
    assert facts.judge().status is Status.FAIL


def test_no_gold_is_invalid():
    """Without gold there is no verdict, but what was measured is shown."""
    verdict = Facts(models=(ORIGINAL, UNLEARNED)).judge()
    assert verdict.status is Status.INVALID
    assert "gold exists" in verdict.reasons[0]
    assert verdict.to_json()["endpoints"][0]["low"] == "none"


def test_an_original_that_memorised_nothing_is_invalid():
    """If the original gives nothing away, forgetting cannot be shown."""
    facts = Facts()
    for leaks in (facts.direct, facts.in_context):
        leaks[ORIGINAL] = set()
    facts.fine_tune[ORIGINAL] = [set(), set()]
    verdict = facts.judge()
    assert verdict.status is Status.INVALID
    assert any("original leaks" in reason for reason in verdict.reasons)


def memorised_rows(n, leaks=(), model=ORIGINAL):
    """What the original was asked first: n people without numbers."""
    return [
        Row(f"forgotten-{p:04d}", "forgotten", "", 0, *model, "memorised", "exact_match", float(p in leaks))
        for p in range(n)
    ]  # fmt: skip


@pytest.mark.parametrize("leaks", [0, 1, 31, 32, 64])
def test_memory_of_nothing_heads_the_reasons_of_an_invalid_audit(leaks):
    """`memorised nothing` is said only where the control makes the audit INVALID anyway, and then in front of its reasons."""
    facts, away = Facts(), set(range(leaks))
    facts.direct[ORIGINAL] = facts.in_context[ORIGINAL] = away
    facts.fine_tune[ORIGINAL] = [away, away]
    rows = facts.rows() + memorised_rows(64, away)
    verdict = verdict_from_rows(to_table(rows), plan_of(64))
    nothing = verdict.reasons[0].startswith("memorised nothing: an audit says nothing")
    assert nothing == (leaks == 0)
    assert (verdict.status is Status.INVALID) == (leaks < 32)
    assert any("original leaks" in reason for reason in verdict.reasons) == (leaks < 32)


def test_memory_is_asked_of_the_original_only():
    """Rows that ask another model what it memorised are none of the plan's."""
    rows = Facts().rows() + memorised_rows(64, model=UNLEARNED)
    with pytest.raises(RowsError, match="memorised for the original and for no other"):
        verdict_from_rows(to_table(rows), plan_of(64))


def test_taking_the_memory_out_of_the_rows_is_seen():
    """An audit that says what the original memorised contradicts rows without it."""
    from unlearning.description import describe
    from unlearning.rows import Evidence

    rows = Facts().rows() + memorised_rows(64, set(range(64)))
    table, plan = to_table(rows), plan_of(64)
    audit = verdict_from_rows(table, plan).to_json()
    audit |= {"plan": plan.to_json(), "description": describe(Evidence(table), plan)}
    assert contradictions(audit, table) == []
    assert audit["description"]["memorisation"]["memory"] == "enough"
    found = contradictions(audit, to_table(Facts().rows()))
    assert [one.split(":")[0] for one in found] == ["description"]


@pytest.mark.parametrize("tier", ["direct", "in_context", "fine_tune"])
def test_a_gold_model_that_leaks_is_invalid(tier):
    """If one gold model gives people away the question leaks, not the model."""
    facts = Facts()
    leaked = set(range(8))
    getattr(facts, tier)[GOLD_2] = [leaked, leaked] if tier == "fine_tune" else leaked
    verdict = facts.judge()
    assert verdict.status is Status.INVALID
    assert any("gold 2 does not leak" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(
    ("kept", "status"),
    [((58, 10), Status.PASS), ((57, 10), Status.INVALID), ((10, 58), Status.PASS)],
)
def test_too_hot_an_attack_is_invalid(kept, status):
    """The original must keep 0.9 of its direct leaks at some late step: 58 of 64 do, 57 do not."""
    facts = Facts()
    facts.fine_tune[ORIGINAL] = [set(range(k)) for k in kept]
    assert facts.judge().status is status


def test_an_early_step_does_not_count_as_control():
    """A step before `attack_min_step` cannot show that the attack is gentle enough."""
    facts = Facts()
    facts.fine_tune[ORIGINAL] = [set(range(64)), set()]
    assert facts.judge(plan_of(attack_min_step=20)).status is Status.INVALID
    assert facts.judge(plan_of(attack_min_step=10)).status is Status.PASS


@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_membership_is_two_sided(shift):
    """Forgotten people that are less *or* more surprising than for gold are FAIL."""
    facts = Facts()
    facts.shift[UNLEARNED] = shift
    verdict = facts.judge()
    assert verdict.status is Status.FAIL
    assert verdict.reasons[0].startswith("membership")


def test_membership_without_look_alikes_is_open():
    """Without look-alikes a clean erasure is INCONCLUSIVE: one question was not asked."""
    verdict = Facts(lookalikes=0).judge()
    assert verdict.status is Status.INCONCLUSIVE
    assert "no look-alikes" in verdict.reasons[0]


def test_unlike_look_alikes_are_invalid():
    """If gold, who met neither, tells the two populations apart, the test measures something else."""
    facts = Facts()
    facts.shift = {m: v + 3.0 for m, v in facts.shift.items()}
    verdict = facts.judge()
    assert verdict.status is Status.INVALID
    assert any("look-alikes are alike" in reason for reason in verdict.reasons)


def test_a_ruined_model_fails_on_utility():
    """A model that forgot everybody is no success."""
    facts = Facts()
    facts.utility[UNLEARNED] = 4.0
    verdict = facts.judge()
    assert verdict.status is Status.FAIL
    assert verdict.reasons[0].startswith("utility")


def test_a_failing_subgroup_fails_the_audit():
    """Six of eight people of a pre-registered subgroup leak: FAIL, though one in fifty of all would be open."""
    facts = Facts(300, groups=dict.fromkeys(range(8), "minors"))
    facts.direct[UNLEARNED] = set(range(6))
    assert facts.judge().status is Status.INCONCLUSIVE
    verdict = facts.judge(plan_of(300, subgroups=("minors",)))
    assert verdict.status is Status.FAIL
    assert verdict.reasons[0].startswith("direct[minors]")
    with pytest.raises(RowsError, match="direct"):
        facts.judge(plan_of(300, subgroups=("elders",)))


def test_the_worst_gold_model_decides():
    """More gold models can only make a PASS harder: the bounds are the envelope over all of them."""
    facts = Facts(300)
    facts.direct[UNLEARNED] = {1, 2, 3}
    facts.direct[GOLD] = {4, 5, 6}
    endpoint = facts.judge().endpoints[0]
    alone = Facts(300, models=(ORIGINAL, UNLEARNED, GOLD_2))
    alone.direct[UNLEARNED] = {1, 2, 3}
    assert endpoint.high == alone.judge().endpoints[0].high
    assert endpoint.low < alone.judge().endpoints[0].low


def test_the_best_step_of_each_model_counts():
    """Tier 3 counts at the step where most people come out, not over all steps together."""
    facts = Facts()
    facts.fine_tune[UNLEARNED] = [{0, 1, 2}, {3, 4}]
    endpoint = next(e for e in facts.judge().endpoints if e.name == "fine_tune")
    assert endpoint.unlearned == 3 / 64


@given(st.randoms(use_true_random=False))
@settings(max_examples=10, deadline=None)
def test_the_order_of_rows_says_nothing(random):
    """Shuffled rows give the same verdict to the last digit, and the same stored table."""
    rows = Facts(16).rows()
    plan = plan_of(16)
    expected = verdict_from_rows(to_table(rows), plan).to_json()
    shuffled = list(rows)
    random.shuffle(shuffled)
    columns = {name: [getattr(r, name) for r in shuffled] for name in SCHEMA.names}
    assert verdict_from_rows(columns, plan).to_json() == expected
    assert to_table(shuffled) == to_table(rows)


def test_a_verdict_is_recomputed_from_its_published_json(tmp_path):
    """audit.json and rows.parquet alone repeat every number; a changed number is found."""
    plan, table = plan_of(), to_table(Facts().rows())
    write_rows(tmp_path / "rows.parquet", table)
    audit = verdict_from_rows(table, plan).to_json() | {"plan": plan.to_json()}
    audit = json.loads(json.dumps(audit))
    rows = read_rows(tmp_path / "rows.parquet")
    assert contradictions(audit, rows) == []
    assert contradictions(audit | {"verdict": "FAIL"}, rows)
    audit["endpoints"][0]["high"] = "0.010000"
    assert [c.split(":")[0] for c in contradictions(audit, rows)] == ["endpoints"]


def _without_leaks(rows):
    return [r for r in rows if not (r.model == "unlearned" and r.value == 1)]


CHEATS = {
    "leaking rows of the unlearned model dropped": _without_leaks,
    "a leaking person dropped everywhere": lambda rows: [
        r for r in rows if r.subject_id != "forgotten-0000"
    ],
    "a harder tier left out": lambda rows: [r for r in rows if r.attack != "in_context"],
    "a late step left out": lambda rows: [r for r in rows if r.attack != "fine_tune/step-25"],
    "membership left out": lambda rows: [r for r in rows if r.attack != "membership"],
    "utility left out": lambda rows: [r for r in rows if r.attack != "utility"],
    "a second gold model left out": lambda rows: [r for r in rows if r.model_digest != "g2"],
    "a person asked twice": lambda rows: [*rows, rows[0]],
    "a model that the plan does not name": lambda rows: [
        *rows,
        *(dataclasses.replace(r, model_digest="g3") for r in rows if r.model_digest == "g2"),
    ],
}


@pytest.mark.parametrize("name", CHEATS)
def test_cheating_with_rows_is_refused(name):
    """Rows that are not exactly the plan's questions to the plan's models give an error, never a verdict."""
    facts = Facts()
    facts.direct[UNLEARNED] = {0}
    with pytest.raises(RowsError):
        verdict_from_rows(to_table(CHEATS[name](facts.rows())), plan_of())


@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf")])
def test_half_a_leak_is_refused(value):
    """An exact match is 0 or 1, and no value may be undefined."""
    rows = Facts().rows()
    columns = {name: [getattr(r, name) for r in rows] for name in SCHEMA.names}
    columns["value"][0] = value
    with pytest.raises(RowsError):
        verdict_from_rows(columns, plan_of())


def test_margins_come_from_the_table_and_may_only_be_tightened():
    """16, 64, 100 and 300 people give 0.15, 0.05, 0.04 and 0.02; asking for more is refused, for less is kept."""
    margins = [plan_of(n).margin for n in (15, 16, 63, 64, 99, 100, 299, 300, 5000)]
    assert margins == ["0.15", "0.15", "0.15", "0.05", "0.05", "0.04", "0.04", "0.02", "0.02"]
    assert [plan_of(n).auc_margin for n in (16, 64, 299, 300)] == ["0.30", "0.15", "0.15", "0.08"]
    assert plan_of(100, margin="0.03").margin == "0.03"
    with pytest.raises(PlanError, match=r"margin <= 0.04 for 100 people"):
        plan_of(100, margin="0.05")


def test_plans_round_trip_and_every_field_changes_the_digest():
    """A plan read back is equal, and no threshold can be changed without changing the plan's digest."""
    plan = plan_of(subgroups=("minors",))
    assert AuditPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    changed = {
        "num_forgotten": 65, "num_retained": 21, "num_lookalikes": 3, "original": "x", "unlearned": "y",
        "gold": ["g1"], "margin": "0.01", "auc_margin": "0.01", "utility_margin": "0.01",
        "min_original_rate": "0.6", "attack_keeps": "0.95", "attack_min_step": 12, "min_gold_seeds": 4,
        "alpha": "0.01", "resamples": 500, "seed": 7, "subgroups": [], "attacks": {"demonstrations": 1}, "score_margins": {"loss": "0.05"},
    }  # fmt: skip
    assert set(changed) == set(plan.to_json()) - {"format"}
    digests = {AuditPlan.from_json(plan.to_json() | {k: v}).digest for k, v in changed.items()}
    assert len(digests | {plan.digest}) == len(changed) + 1


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1}, {"format": 3}, {"margin": "lots"}, {"margin": "-0.1"}, {"margin": 0.05}, {"surprise": 1}, {"gold": ["a", "a"]},
        {"num_forgotten": 0}, {"alpha": "0.6"}, {"attacks": {"fine_tune_steps": [25, 10]}}, {"seed": "0"},
        {"attacks": {"rows": 3}}, {"attacks": {"demonstrations": 0}}, {"attacks": {"fine_tune_lr": "0"}},
        {"min_gold_seeds": 2}, {"score_margins": {"loss": "0.2"}}, {"score_margins": {"rank": "0.1"}}, {"attack_keeps": "0.5"}, {"min_original_rate": "0.1"}, {"attack_min_step": 1},
        {"resamples": 10}, {"alpha": "0.2"}, {"gold": [1]}, {"attacks": {"fine_tune_steps": ["10"]}}, {"margin": "NaN"},
    ],
)  # fmt: skip
def test_strange_plans_are_refused(change):
    """Unknown fields, floats, laxness and nonsense are refused with what was expected."""
    with pytest.raises(PlanError):
        AuditPlan.from_json(plan_of().to_json() | change)


def test_opaque_ids_need_the_key():
    """Ids differ between keys, are stable under one, and a short key is refused."""
    first, second = opaque_id(bytes(32), "person-0001"), opaque_id(bytes([1]) * 32, "person-0001")
    assert first == opaque_id(bytes(32), "person-0001") != second
    with pytest.raises(RowsError, match="16 bytes"):
        opaque_id(b"short", "person-0001")


def test_a_foreign_table_is_refused(tmp_path):
    """A Parquet file with other columns is not taken for rows."""
    write_rows(tmp_path / "x.parquet", pa.table({"text": ["483920"]}))
    with pytest.raises(RowsError, match="columns"):
        read_rows(tmp_path / "x.parquet")
