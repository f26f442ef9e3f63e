"""What an audit's report says was not tried, and which attacks each size carries."""

import dataclasses
import json
import math
from hashlib import sha256

import pytest
from custody_home import user_site

from pipelines.audits import NEVER_TESTED, SECONDARY, _side, memory_of, not_tested
from pipelines.evidence import _calibration, read_evidence
from pipelines.reports import NotAvailable
from pipelines.results import Result, latest, store
from pipelines.runs import started
from pipelines.site import make_home, open_site
from pipelines.sizes import SIZES
from pipelines.steps import audit_trail, provenance
from pipelines.steps.ledger import enter, open_ledger
from pipelines.storage.errors import ConfigError
from provenance import jcs
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
    """More gold models than the size has; fewer are refused, with what to do; a number of lines fixes them, none has them found."""
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
    assert [opened("pilot", gold_models=n).size.gold_seeds for n in (0, 3)] == [3, 3]
    with pytest.raises(
        ConfigError, match=r"gold_models is 2 and size pilot has 3: expected at least 3, or 0"
    ):
        opened("pilot", gold_models=2)
    found = _attacks(opened("tiny"))
    assert found == {"attacks": {"fine_tune_steps": [2]}, "calibrate": True}
    fixed = _attacks(opened("tiny", demonstrations=5))
    assert fixed == {"attacks": {"fine_tune_steps": [2], "demonstrations": 5}, "calibrate": True}


def test_the_page_says_what_every_way_brought_out_and_which_the_plan_took(tiny_home):
    """Each count of `calibration.json` in its order, and one way marked, the plan's; with five lines by hand their two ways too."""
    folder = tiny_home / "runs" / latest(tiny_home / "results", "robustness_audit")["run"]
    tried = json.loads((folder / "calibration.json").read_bytes())["tried"]
    limits = json.loads((folder / "plan.json").read_bytes())["attacks"]
    shown = [one for one in read_evidence(folder, 0).plan if one.name.startswith("calibration")]
    more = [{"demonstrations": 5, "between": one, "given_away": 9, "people": 9} for one in ("newline", "space")]  # fmt: skip
    by_hand = _calibration([*tried, *more], limits | {"demonstrations": 5, "between": "space"})
    for found, of, way in (
        (shown, tried, (limits["demonstrations"], limits.get("between", "newline"))),
        (by_hand, [*tried, *more], (5, "space")),
    ):
        assert len(found) == len(of)
        for fact, one in zip(found, of, strict=True):
            told = (
                f"{one['given_away']} of {one['people']} people who stay given away by the original"
            )
            taken = (one["demonstrations"], one["between"]) == way
            assert fact.value == told + ("; the plan's" if taken else "")
            assert fact.name.split(": ")[1].replace("s,", ",") == f"{one['demonstrations']} line, {one['between']}"  # fmt: skip
        assert sum(fact.value.endswith("plan's") for fact in found) == 1


def test_another_number_of_gold_models_is_another_plan_of_the_same_draw(tmp_path):
    """0 leaves a plan's inputs as they were; 3 commits a plan with 3, with the nonce and every seed of before, and back to 0 one with 1."""
    site = user_site(tmp_path)
    commitment = Result("commitment", "k", "c", {"version": "v", "demo": False})
    parts = {f"{name}_digest": name for name in ("value", "test", "confirm")}
    target = Result("target", "k", "t", parts)
    made, keys = [], []
    for number in (1, 3, 1):
        asked = dataclasses.replace(site, size=dataclasses.replace(site.size, gold_seeds=number))
        keys.append(provenance.plan_inputs(asked, commitment, target))
        digest, values = provenance.evaluation_plan(asked, commitment, target)
        store(site.home.results, Result("evaluation_plan", "k", digest, values))
        made.append(json.loads((site.home.path / f"plans/{digest}.json").read_bytes()))
    assert keys[0] == keys[2] == {"commitment": "c", "target": "t", "size": "tiny"}
    assert keys[1] == {**keys[0], "gold_models": 3}
    assert [plan["audit"].pop("gold_seeds") for plan in made] == [1, 3, 1]
    assert made[0] == made[1] == made[2]
    again = Result("target", "k", "t", parts | {"test_digest": "another"})
    digest, _ = provenance.evaluation_plan(site, commitment, again)
    drawn = json.loads((site.home.path / f"plans/{digest}.json").read_bytes())
    assert drawn["nonce"] != made[0]["nonce"]


def test_an_audit_with_fewer_gold_models_than_its_plan_is_found(tiny_home, copied):
    """The check and `verify` say NO where the plan under which the audit began names more than were seen."""
    home = copied(tiny_home)
    site = open_site(home, None, "tiny", None)
    audit, plan = (latest(home / "results", name) for name in ("robustness_audit", "evaluation_plan"))  # fmt: skip
    assert audit_trail.verdict(site, audit) == []
    body = json.loads((home / plan["files"][0]).read_bytes())
    body["audit"]["gold_seeds"] = 3
    digest = sha256(jcs(body)).hexdigest()
    (home / f"plans/{digest}.json").write_bytes(jcs(body))
    began = started(site, home / "runs" / audit["run"], Result("evaluation_plan", "k", digest, {"digest": digest}))  # fmt: skip
    later = enter(site, "audit", {**open_ledger(site).entry(audit["entry"])["body"], "again": True})
    assert began < later
    found = dataclasses.replace(audit, values={**audit.values, "entry": later})
    assert audit_trail.verdict(site, audit) == []  # it began before that plan
    assert audit_trail.verdict(site, found) == [
        "the audit used 1 gold models, the plan that was committed before it names 3: set [audit] gold_models = 3 and run again"
    ]
    (home / f"plans/{digest}.json").write_bytes(jcs({**body, "audit": {"gold_seeds": 1}}))
    assert "is not the plan that the ledger names" in audit_trail.verdict(site, found)[0]


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
