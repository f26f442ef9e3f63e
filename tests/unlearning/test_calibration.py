"""The demonstrations of tier 2 are found on people who stay, and only there."""

import dataclasses
import json

import numpy as np
import pytest
from facts import Facts, plan_of

from trainer.checkpoint import load_model
from trainer.generate import generate
from unlearning.audit import _calibrated, audit, read_inputs
from unlearning.calibration import CANDIDATES, FILE, MAX_PEOPLE, Tried, best, calibrated, kept, ways
from unlearning.errors import PlanError
from unlearning.people import Record, read_records
from unlearning.plan import BETWEEN, AttackPlan, AuditPlan
from unlearning.probes import FileTokenizer, trained_probes
from unlearning.rows import to_table
from unlearning.verdict import contradictions, verdict_from_rows

SEED = 3


def original(study):
    """The study's original."""
    return load_model(study.models["original"], study.model_spec())


@pytest.fixture(scope="module")
def parts(study):
    """Records of people who stay, tokenizer, limits."""
    return read_records(study.folder / "retained.jsonl"), FileTokenizer(study.folder / "tokenizer.json"), AttackPlan()  # fmt: skip


def slow(study, parts, number, between):
    """People whose answer the decoding loop gives, one prompt at a time, with lines written as text."""
    records, tokenizer, limits = parts
    model, people = original(study), sorted({r.subject for r in records})
    asked = set(np.random.default_rng([SEED, 8]).permutation(people)[: min(MAX_PEOPLE, len(people) // 2)].tolist())  # fmt: skip
    probes = trained_probes(records, tokenizer, limits.max_probe_tokens)
    pools = {}
    for probe in probes:
        if probe.subject_id not in asked:
            pools.setdefault(probe.phrasing, []).append(probe)
    text = {r.record_id: r.text for r in records}
    generator, told = np.random.default_rng([SEED, 2]), set()
    for probe in probes:
        if probe.subject_id in asked:
            pool = pools[probe.phrasing]
            lines = [pool[i] for i in generator.choice(len(pool), size=number, replace=False)]
            prefix = [t for one in lines for t in (*tokenizer.encode(text[one.record_id])[0], *tokenizer.encode(BETWEEN[between])[0])]  # fmt: skip
            said = generate(model, [(*prefix, *probe.prompt_tokens)], len(probe.secret_tokens))[0]
            told |= {probe.subject_id} if tuple(said) == tuple(probe.secret_tokens) else set()
    return len(told), len(asked)


def test_counts_are_those_of_a_decoding_loop(study, parts):
    """Every way is tried, on the drawn half of the people; for one line and a space, and for two lines, the counts are the loop's."""
    records, tokenizer, limits = parts
    tried = calibrated(lambda: original(study), records, tokenizer, limits, SEED)
    assert [(one.demonstrations, one.between) for one in tried] == list(CANDIDATES)
    for number, between in ((1, "space"), (2, "newline")):
        found = tried[CANDIDATES.index((number, between))]
        assert (found.given_away, found.people) == slow(study, parts, number, between)
    assert best(tried).given_away == max(one.given_away for one in tried)


def test_of_equals_the_default_is_taken():
    """A model that says nothing in any way keeps the plan's own demonstrations."""
    equal = [Tried(demonstrations=n, between=b, given_away=0, people=4) for n, b in CANDIDATES]
    assert best(equal) == equal[0]
    assert (equal[0].demonstrations, equal[0].between) == (AttackPlan().demonstrations, AttackPlan().between)  # fmt: skip
    assert best([]) is None


def test_too_few_people_are_not_asked(parts):
    """One person who stays can't both be asked about and stand before the question: no model is opened."""
    _, tokenizer, limits = parts
    alone = [Record("a", "1", "The phone number of Ada is 123456.")]
    assert calibrated(lambda: pytest.fail("opened"), alone, tokenizer, limits, SEED) == []


def test_what_was_tried_survives_a_kill_and_belongs_to_its_records(tmp_path, monkeypatch):
    """The file is used again; of other records, under another key or after other candidates it is made anew."""
    made = [Tried(demonstrations=1, between="space", given_away=2, people=4)]
    assert kept(tmp_path, b"k", ["a"], lambda: made) == made
    assert kept(tmp_path, b"k", ["a"], lambda: pytest.fail("asked again")) == made
    for key, of in ((b"k", ["b"]), (b"l", ["a"])):
        assert kept(tmp_path, key, of, list) == []
        kept(tmp_path, b"k", ["a"], lambda: made)
    for name, value in (("CANDIDATES", CANDIDATES[:3]), ("MAX_PEOPLE", 9), ("BETWEEN", {"space": "  "}), ("FORMAT", 9)):  # fmt: skip
        with monkeypatch.context() as patched:
            patched.setattr(f"unlearning.calibration.{name}", value)
            assert kept(tmp_path, b"k", ["a"], list) == []
        kept(tmp_path, b"k", ["a"], lambda: made)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.replace(b'"given_away":2', b'"given_away":0'),
        lambda data: data.replace(b'"space"', b'"newline"'),
        lambda data: data[:-9],
        lambda _: b"[]",
        lambda _: b'{"of":"a","tried":[]}',
        lambda _: b'{"tried":[7]}',
        lambda _: b"\xff",
    ],
)
def test_a_kept_file_that_was_changed_is_made_anew(tmp_path, damage):
    """Counts are under the tag too, and what doesn't parse is no calibration; the new file stands and is used."""
    made = [Tried(demonstrations=1, between="space", given_away=2, people=4)]
    kept(tmp_path, b"k", ["a"], lambda: made)
    whole = (tmp_path / FILE).read_bytes()
    assert damage(whole) != whole
    (tmp_path / FILE).write_bytes(damage(whole))
    assert kept(tmp_path, b"k", ["a"], lambda: made) == made
    assert (tmp_path / FILE).read_bytes() == whole


def test_a_calibrated_audit_plans_the_best_way(study, tmp_path):
    """The plan and the rows are of the way that told most of people who stay; the plan is read back."""
    extra = study.audit_extra(calibrate=True)
    spec = study.run_spec(
        "audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0
    )
    audit(spec, tmp_path)
    body = json.loads((tmp_path / "audit.json").read_bytes())
    chosen = max(body["calibration"], key=lambda one: one["given_away"])
    assert {chosen["people"]} == {one["people"] for one in body["calibration"]} == {32}
    told = body["plan"]["attacks"]
    assert (told["demonstrations"], told.get("between", "newline")) == (chosen["demonstrations"], chosen["between"])  # fmt: skip
    assert AuditPlan.from_json(body["plan"]).to_json() == body["plan"]
    assert (chosen["demonstrations"], chosen["between"]) == next(
        way for way, one in zip(CANDIDATES, body["calibration"], strict=True) if one["given_away"] == chosen["given_away"]
    )  # fmt: skip


def test_what_stands_between_lines_is_in_the_plan_only_where_it_is_not_the_default():
    """Old plans keep their digests; an unknown separator is refused by name."""
    assert "between" not in AuditPlan(num_forgotten=1, num_retained=1, num_lookalikes=0, original="a", unlearned="b", gold=()).to_json()["attacks"]  # fmt: skip
    assert dataclasses.asdict(AttackPlan().demonstrating(1, "space"))["between"] == "space"
    with pytest.raises(PlanError, match="between as one of"):
        AttackPlan(between="tab")


def test_a_number_by_hand_is_one_more_way_and_never_the_weaker_one(study, tmp_path, monkeypatch):
    """Five lines are tried with both separators beside the eight; they tell fewer, so the plan doesn't take them; where all tell as many it takes the default."""
    limits = AttackPlan(demonstrations=5)
    assert ways(AttackPlan()) == ways(AttackPlan(demonstrations=2, between="space")) == CANDIDATES
    assert ways(limits) == (*CANDIDATES, (5, "newline"), (5, "space"))
    extra = study.audit_extra(calibrate=True, attacks={"demonstrations": 5})
    spec = study.run_spec(
        "audit", kind="attack", entry="unlearning.audit:run", extra=extra, steps=0
    )
    for name, counts in (("less", [1, 0, 0, 4, 0, 0, 0, 0, 3, 2]), ("equal", [2] * 10), ("more", [0] * 9 + [1])):  # fmt: skip
        told = iter(counts)

        def planted(load, retained, tokenizer, limits, seed, told=told):
            return [Tried(demonstrations=n, between=b, given_away=next(told), people=9) for n, b in ways(limits)]  # fmt: skip

        monkeypatch.setattr("unlearning.calibration.calibrated", planted)
        (tmp_path / name).mkdir()
        found = _calibrated(spec, tmp_path / name, read_inputs(spec, study.folder))
        expected = ways(limits)[counts.index(max(counts))]
        assert (found.plan.attacks.demonstrations, found.plan.attacks.between) == expected
        assert [one.given_away for one in found.calibration] == counts


@pytest.mark.parametrize("name", ["calibrate", "derived_subgroups"])
def test_a_switch_is_true_or_false(study, tmp_path, name):
    """A text that says false is not taken for true."""
    spec = study.run_spec(
        "audit", kind="attack", entry="unlearning.audit:run", extra=study.audit_extra(**{name: "false"}), steps=0
    )  # fmt: skip
    with pytest.raises(PlanError, match=f"{name} as true or false, got 'false'"):
        audit(spec, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_published_calibration_is_held_against_the_plan():
    """The best way that was counted is the plan's; a weaker one, counts that can't be, and no counts are said; an audit without a calibration is not contradicted."""
    table, plan = to_table(Facts().rows()), plan_of()
    body = verdict_from_rows(table, plan).to_json() | {"plan": plan.to_json()}
    told = [dataclasses.asdict(Tried(demonstrations=n, between=b, given_away=2 * (n == 3), people=9)) for n, b in CANDIDATES]  # fmt: skip
    assert contradictions(body, table) == []
    assert contradictions(body | {"calibration": told}, table) == []
    weaker = [*told[:2], told[2] | {"given_away": 3}, *told[3:]]
    (said,) = contradictions(body | {"calibration": weaker}, table)
    assert "given away by (2, 'newline'), the plan asks by (3, 'newline')" in said
    for broken in ([told[0] | {"given_away": 10}], [told[0] | {"given_away": -1}], [{}], 7):
        (said,) = contradictions(body | {"calibration": broken}, table)
        assert said.startswith("calibration: expected counts")
