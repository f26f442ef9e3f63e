"""What an audit's report says was not tried, and which attacks each size carries."""

import dataclasses
import json
import math

import pytest

from pipelines.audits import NEVER_TESTED, SECONDARY, _side, not_tested
from pipelines.sizes import SIZES
from unlearning.plan import AttackPlan, AuditPlan
from unlearning.repertoire import NAMED
from unlearning.secondary import Secondary
from unlearning.verdict import _plain


def plan_of(name):
    """The JSON of a plan with a named repertoire."""
    plan = AuditPlan(
        num_forgotten=64, num_retained=9, num_lookalikes=9, original="o", unlearned="u", gold=("g",),
        attacks=AttackPlan(repertoire=NAMED[name]),
    )  # fmt: skip
    return json.loads(json.dumps(plan.to_json()))


@pytest.mark.parametrize(
    ("name", "missing"),
    [("none", set(SECONDARY)), ("cheap", {"sources", "shots"}), ("full", set())],
)
def test_a_report_names_every_attack_that_the_plan_left_out(name, missing):
    """An empty repertoire leaves all of them, a full one only what nobody here tries."""
    expected = tuple(what for attack, what in SECONDARY.items() if attack in missing)
    assert not_tested(plan_of(name)) == (*expected, *NEVER_TESTED)


def test_sizes_name_repertoires_and_the_small_ones_carry_none():
    """The dial is a known name at every size; tiny and small spend no time on secondary attacks, pilot and report spend all."""
    found = {name: size.secondary for name, size in SIZES.items()}
    assert found == {
        "tiny": "none",
        "small": "none",
        "default": "cheap",
        "pilot": "full",
        "report": "full",
    }
    assert set(found.values()) <= set(NAMED)


def test_a_repertoire_survives_the_way_into_a_run_file():
    """What a step writes into run.json is read back as the same repertoire."""
    from pipelines.steps.unlearning import _repertoire

    assert _repertoire("none") == {}
    written = json.loads(json.dumps(_repertoire("full")))["repertoire"]
    values = plan_of("none")
    values["attacks"]["repertoire"] = written
    read = AuditPlan.from_json(values).attacks.repertoire
    assert dataclasses.asdict(read) == dataclasses.asdict(NAMED["full"])


def test_a_secondary_attack_is_read_as_the_audit_wrote_it():
    """Numbers, the worst of several gold models, and whether it leaks after the adjustment."""
    row = Secondary(
        name="sampled/k-64", people=64, original=1.0, unlearned=0.54, gold=(0.0, 0.02), low=0.4, high=0.63, margin=0.05, p_value=0.0,
        p_holm=0.0, leaks=True, best="k = 64",
    )  # fmt: skip
    written = json.loads(json.dumps(_plain(dataclasses.asdict(row))))
    found = _side(written)
    assert (found.name, found.gold, found.bound, found.leaks) == ("sampled/k-64", 0.02, 0.63, True)
    assert math.isnan(_side(written | {"gold": []}).gold)
