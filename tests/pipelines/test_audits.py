"""What an audit's report says was not tried, and which attacks each size carries."""

import dataclasses
import json
import math

import pytest

from pipelines.audits import NEVER_TESTED, SECONDARY, _side, memory_of, not_tested
from pipelines.reports import NotAvailable
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


def test_the_file_asks_for_gold_models_and_demonstrations(tmp_path):
    """More gold models than the size has, never fewer; a number of lines fixes them, none has them found."""
    from pipelines.site import make_home, open_site
    from pipelines.steps.unlearning import _attacks

    make_home(tmp_path)
    path = tmp_path / "dataworth.toml"
    text = path.read_text()

    def opened(size, **audit):
        changed = text
        for name, value in audit.items():
            changed = changed.replace(f"{name} = 0", f"{name} = {value}")
        path.write_text(changed)
        return open_site(tmp_path, None, size, None)

    assert [opened("default", gold_models=n).size.gold_seeds for n in (0, 2, 3)] == [1, 2, 3]
    assert opened("pilot", gold_models=2).size.gold_seeds == 3
    found = _attacks(opened("tiny"))
    assert found == {"attacks": {"fine_tune_steps": [2]}, "calibrate": True}
    fixed = _attacks(opened("tiny", demonstrations=5))
    assert fixed == {"attacks": {"fine_tune_steps": [2], "demonstrations": 5}, "calibrate": True}


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
        p_holm=0.0, leaks=True, best="k = 64", has_power=True,
    )  # fmt: skip
    written = json.loads(json.dumps(_plain(dataclasses.asdict(row))))
    found = _side(written)
    assert (found.name, found.gold, found.bound, found.leaks) == ("sampled/k-64", 0.02, 0.63, True)
    assert math.isnan(_side(written | {"gold": []}).gold)


def test_memory_is_read_as_the_audit_wrote_it():
    """Groups in words, intervals and bits as they stand, who ranks first; an audit of before has no memory."""
    person = {"subject_id": "x", "population": "forgotten", "times": 4, "given_away": 1, "asked": 2}
    group = {"people": 2, "given_away": 1, "low": "0.094500", "high": "0.905500"}
    found = memory_of(
        {
            "description": {
                "memorisation": {
                    "memory": "too little", "statement": "memorised too little", "chance_exposure": "1.371000",
                    "people": [person | {"exposure": f"{math.log2(64 / rank):.6f}", "candidates": 64} for rank in (1, 1.5, 2)]
                    + [person | {"exposure": "none", "candidates": 0}],
                    "groups": [
                        group | {"first": first, "last": last, "ranked": ranked, "exposure": "5.5" if ranked else "none"}
                        for first, last, ranked in ((0, 0, 0), (1, 1, 2), (4, 7, 2), (-1, -1, 0))
                    ],
                }
            }
        }
    )  # fmt: skip
    assert [row.shown for row in found.rows] == [
        "never",
        "once",
        "4 to 7 times",
        "how often can't be told",
    ]
    assert (found.hardest, found.ranked) == (1, 3)
    assert (found.rows[1].low, found.rows[1].exposure.value) == (0.0945, 5.5)
    assert found.rows[0].exposure == NotAvailable(reason="nobody has a number")
    assert memory_of({"description": {}}) is None
    assert memory_of({}) is None
