"""A released model of shards, erased exactly: digests against trainings that never held the person, and the audit of the smoke profile."""

import dataclasses

import pytest

from unlearning.endpoints import Status
from unlearning.ensemble import read_ensemble
from unlearning.pilot.audits import audits_of
from unlearning.pilot.profiles import SMOKE, SMOKE_SHOTS
from unlearning.pilot.sharded import METHOD, prepare_sharded, subjects
from unlearning.plan import AttackPlan

FEW = dataclasses.replace(SMOKE, steps=8, counts=SMOKE.counts | {"retained": 24, "forgotten": 4})


def roots(folder):
    """Digests of an ensemble's constituents."""
    return [one.root for one in read_ensemble(folder)]


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A sharded study of a few steps: digests don't depend on what a model knows."""
    return prepare_sharded(tmp_path_factory.mktemp("short"), FEW)


def test_forgotten_people_stand_in_one_shard_and_nobody_is_lost(short):
    """All of shard 0, as many as asked for; the others stay, each once."""
    place = short.shape(0).place
    gone, stay = (subjects(short.people[name]) for name in ("forgotten", "retained"))
    assert {place(one.encode())[0] for one in gone} == {0}
    assert (len(gone), len(stay), len({*gone, *stay})) == (4, 24, 28)
    with pytest.raises(ValueError, match="people in shard 0"):
        prepare_sharded(short.folder / "no", dataclasses.replace(FEW, counts=FEW.counts | {"retained": 0, "forgotten": 20}))  # fmt: skip


def test_a_deleted_person_leaves_the_digest_of_a_training_that_never_held_them(short, tmp_path):
    """Bit for bit, over tokens without the person's records; one shard is trained, the other is the original's."""
    before = roots(short.original())
    person = subjects(short.people["forgotten"])[0]
    folder, done = short.ensemble("without", 0, frozenset([person]))
    other = short.never_held(person, tmp_path / "other")
    assert other.tokens_digest != short.tokens_digest
    assert roots(folder) == roots(other.original())
    assert roots(folder)[0] != before[0]
    assert roots(folder)[1] == before[1]
    assert done.share == 0.5
    assert short.ensemble("without", 0, frozenset([person]))[1].share == 0
    with pytest.raises(ValueError, match="forgotten person"):
        short.never_held(subjects(short.people["retained"])[0], tmp_path / "no")
    with pytest.raises(ValueError, match="other methods"):
        short.unlearned("npo")


@pytest.mark.slow
def test_an_ensemble_that_leaks_is_erased_and_told_from_itself(tmp_path):
    """At the smoke profile the mean of two shards memorises: every control holds, no endpoint of the erased model fails; the original fails.

    Sixteen people decide neither membership nor, after one line, tier 2: the verdict there is INCONCLUSIVE, never FAIL.
    """
    study = prepare_sharded(tmp_path, SMOKE)
    audits = audits_of(study, AttackPlan(demonstrations=SMOKE_SHOTS, fine_tune_steps=(10, 20)))
    verdict = audits.audit(METHOD)
    ends = {end.name: end for end in verdict.endpoints if not end.subgroup}
    assert ends["direct"].original >= 0.95
    assert [c.detail for c in verdict.controls if not c.holds] == []
    assert {ends[name].status for name in ("direct", "fine_tune", "utility")} == {Status.PASS}
    assert verdict.status in (Status.PASS, Status.INCONCLUSIVE)
    assert audits.audit("original").status is Status.FAIL
