"""Core-sets at random and by gradients: the draw, the coverage, what an arm of the study pushes, and the study's arithmetic."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.sealing import unseal
from trainer.checkpoint import load_model
from unlearning.errors import PlanError
from unlearning.material import prepare as prepare_material
from unlearning.methods.coreset import core_records, core_set, coverage, random_set
from unlearning.methods.forget_retain import ForgetConfig, Forgotten
from unlearning.pilot.coreset_measures import differences, measured, student, summary
from unlearning.pilot.coresets import Arm, core_sets_of
from unlearning.pilot.models import KEY, prepare
from unlearning.pilot.profiles import SMOKE, Forgetting
from unlearning.plan import AttackPlan
from unlearning.probes import FileTokenizer, secret_in


@given(st.integers(1, 60), st.data())
def test_a_random_set_has_its_count_and_no_record_twice(size, data):
    """`count` different indices of the range, increasing; the same generator draws the same set again."""
    count = data.draw(st.integers(1, size))
    seed = data.draw(st.integers(0, 2**32))
    drawn = random_set(size, count, np.random.default_rng(seed))
    assert len(drawn) == len(set(drawn)) == count
    assert drawn == sorted(drawn)
    assert drawn[0] >= 0
    assert drawn[-1] < size
    assert drawn == random_set(size, count, np.random.default_rng(seed))


@pytest.mark.parametrize("count", [-1, 0, 8])
def test_a_random_set_of_none_or_too_many_is_refused(count):
    """As for the choice by gradients."""
    with pytest.raises(PlanError, match=r"expected 1\.\.7 records in the core-set"):
        random_set(7, count, np.random.default_rng(0))
    with pytest.raises(PlanError, match=r"expected 1\.\.7 records in the core-set"):
        core_set(np.eye(7), count)


def test_every_random_set_is_equally_likely():
    """3,000 draws of two of five: each of the ten pairs within five standard errors of a tenth."""
    generator, draws = np.random.default_rng(1), 3000
    pairs = [tuple(random_set(5, 2, generator)) for _ in range(draws)]
    error = math.sqrt(0.1 * 0.9 / draws)
    for pair in itertools.combinations(range(5), 2):
        assert abs(pairs.count(pair) / draws - 0.1) < 5 * error


@settings(max_examples=40)
@given(st.integers(2, 7), st.data())
def test_a_gradient_set_covers_nearly_as_much_as_the_best_set(size, data):
    """Coverage, shifted to 0..2, is at least 1 - 1/e of the largest over all sets (Nemhauser et al.); the chosen are covered by themselves."""
    count = data.draw(st.integers(1, size))
    gradients = np.random.default_rng(data.draw(st.integers(0, 999))).standard_normal((size, 3))

    def covered(chosen):
        return float((coverage(gradients, chosen) + 1).sum())

    greedy = core_set(gradients, count)
    best = max(covered(chosen) for chosen in itertools.combinations(range(size), count))
    assert covered(greedy) >= (1 - 1 / math.e) * best - 1e-9
    assert coverage(gradients, greedy)[greedy] == pytest.approx(1.0)


def test_records_are_chosen_at_random_without_a_model():
    """A random core-set asks no model, depends on its seed only, and keeps the order of the records; another choice is refused."""
    records = [Forgotten((number, 1), 1) for number in range(40)]
    sets = [core_records(None, records, 0.5, "random", seed) for seed in (0, 0, 1)]
    assert sets[0] == sets[1] != sets[2]
    assert all(len(one) == 20 and one == sorted(one, key=records.index) for one in sets)
    with pytest.raises(PlanError, match="by gradient or random, got 'centre'"):
        core_records(None, records, 0.5, "centre")
    extra = {"sealed": {}, "tokenizer": "t", "core_set": "0.5"}
    assert ForgetConfig.from_extra(extra).core_choice == "gradient"
    with pytest.raises(PlanError, match="core_choice"):
        ForgetConfig.from_extra(extra | {"core_choice": "centre"})


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A study of two training steps: nothing is memorised, everything is wired."""
    few = {"retained": 8, "forgotten": 6, "lookalike": 6}
    methods = {"npo": Forgetting(lr="0.0002")}
    profile = dataclasses.replace(SMOKE, counts=few, pages=2, steps=2, methods=methods)
    study = prepare(tmp_path_factory.mktemp("coresets"), profile)
    model = load_model(study.original(), profile.model(study.vocab_size)).eval()
    return core_sets_of(study, model, {"people": 0.5, "records": 0.3})


def test_an_arm_pushes_its_people_and_retains_nobody_of_the_forgotten(sets):
    """Its sealed file holds the chosen people's lines, all of them; everybody who is to be forgotten is excluded from its batches."""
    for arm in (Arm("npo", "random", 3), Arm("npo", "gradient", 3), Arm("npo", "all", 0)):
        sets.unlearned(arm, 1)
        chosen = {one.subject for one in sets.chosen(arm)}
        assert len(chosen) == (6 if arm.choice == "all" else 3)
        assert sets.touched(arm) == chosen
        lines = unseal(KEY, (sets.study.folder / f"{arm.name}.sealed").read_bytes()).splitlines()
        pushed = [json.loads(line)["subject"] for line in lines]
        assert {person: pushed.count(person) for person in chosen} == dict.fromkeys(chosen, 4)
        assert len(pushed) == 4 * len(chosen)
        run = json.loads((sets.study.folder / arm.name / "run.json").read_text())
        gone = (sets.study.folder / "excluded.txt").read_text().split()
        assert run["excluded"]["file"] == "../excluded.txt"
        assert set(gone) == {one.record_id for one in sets.study.people["forgotten"]}
        assert run["config"]["extra"]["sealed"]["file"] == f"../{arm.name}.sealed"
        assert run["seed"] == arm.seed
    for wrong in (Arm("npo", "half", 0), Arm("npo", "all", 0, "records")):
        with pytest.raises(ValueError, match="expected a choice of"):
            sets.chosen(wrong)


def test_records_are_pushed_one_by_one_or_spread_over_people(sets):
    """0.3 of 24 lines are seven by each choice; spread ones hold a number line of each of six people, and another seed draws others."""
    for choice in ("gradient", "random", "spread"):
        chosen = [one.record_id for one in sets.chosen(Arm("npo", choice, 0, "records"))]
        assert len(chosen) == len(set(chosen)) == 7
        again = [one.record_id for one in sets.chosen(Arm("npo", choice, 1, "records"))]
        assert (chosen == again) == (choice == "gradient")
    for seed in range(5):
        assert sets.touched(Arm("npo", "spread", seed, "records")) == set(sets.people)
    few = dataclasses.replace(sets, shares={"records": 0.125})
    for seed in range(5):  # three lines: three people
        assert len(few.touched(Arm("npo", "spread", seed, "records"))) == 3


def test_the_gradient_set_covers_more_than_draws_do(sets):
    """Of people or records left out, on average over ten draws; who leaves nobody out has covered everybody."""
    for unit in ("people", "records"):
        draws = [sets.covered(Arm("npo", "random", seed, unit)) for seed in range(10)]
        assert sets.covered(Arm("npo", "gradient", 0, unit)) > np.mean(draws)
    assert sets.covered(Arm("npo", "all", 0)) == 1.0


def test_cosines_tell_people_from_lines_of_one_person(sets):
    """Sketches made by hand: each person a direction of its own, the line without the number against it."""
    towards = np.eye(len(sets.people))
    places = [sets.people.index(one.subject) for one in sets.records]
    signs = np.array([1.0 if secret_in(one.text) else -1.0 for one in sets.records])
    made = dataclasses.replace(
        sets, sketches_RP=towards[places] * signs[:, None], gradients_NP=towards
    )
    assert made.cosines() == pytest.approx((0.0, 1.0))


def test_everybody_is_measured(sets):
    """A number per person, step and look-alike; an original that memorised nothing gives nobody away."""
    study = sets.study
    people = study.people
    limits = AttackPlan(fine_tune_steps=(1, 2), fine_tune_rows=2)
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    material = prepare_material(
        people["forgotten"], people["retained"], people["lookalike"], tokenizer, limits, 0
    )
    model = load_model(study.original(), study.profile.model(study.vocab_size)).eval()
    found = measured(model, study, material)
    assert sorted(found["people"]) == list(sets.people)
    assert len(found["strangers"]) == 6
    for one in found["people"].values():
        assert one["direct"] == 0
        assert one["steps"] == {"1": 0.0, "2": 0.0}
        assert 0 < one["loss"] < 2 * math.log(study.vocab_size)


def test_the_arithmetic_of_the_study_on_rows_made_by_hand():
    """Recovery counts at its best step, the AUC is of minus the losses, differences are by seed, the interval is Student's."""
    people = {
        "a": {"direct": 1.0, "steps": {"10": 1.0, "50": 0.0}, "loss": 1.0},
        "b": {"direct": 0.0, "steps": {"10": 0.0, "50": 1.0}, "loss": 3.0},
        "c": {"direct": 0.0, "steps": {"10": 0.0, "50": 1.0}, "loss": 9.0},
    }
    measures = {"people": people, "strangers": [2.0, 4.0], "retained": 0.5, "answered": 0.9}
    found = summary(measures, {"a", "b"})
    assert found == {
        "direct": 0.5, "recovered": 0.5, "membership": 0.75, "retained": 0.5, "answered": 0.9,
    }  # fmt: skip
    assert summary(measures, people)["recovered"] == pytest.approx(2 / 3)
    rows = {
        f"npo-{choice}-{seed}": {"x": value}
        for choice, values in (("gradient", (0.5, 0.4, 0.6)), ("random", (0.4, 0.4, 0.3)))
        for seed, value in enumerate(values)
    }
    arms = [
        [Arm("npo", choice, seed).name for seed in range(3)] for choice in ("gradient", "random")
    ]
    gaps = differences(rows, *arms, "x")
    assert gaps == pytest.approx([0.1, 0.0, 0.3])
    # t(0.975, 2) = 4.302653; s = 0.152753
    mean, low, high = student(gaps)
    half = 0.379458
    assert (mean, low, high) == pytest.approx((0.4 / 3, 0.4 / 3 - half, 0.4 / 3 + half), abs=1e-6)
    with pytest.raises(ValueError, match="at least two"):
        student([0.1])
