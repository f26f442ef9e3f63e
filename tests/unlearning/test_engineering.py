"""Depth and ripple in an audit: fixed points at gold and original, rows without texts, a kill that costs one stage; findings by hand."""

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.spec import save_run
from unlearning import engineering, ensemble, measuring
from unlearning.audit import audit, read_inputs
from unlearning.engineering import EVERYBODY, FILE, Scale, _row
from unlearning.errors import PlanError, RowsError
from unlearning.findings import Findings, distances, ranks
from unlearning.material import prepare
from unlearning.rows import Row, read_rows, to_table, write_rows

SCALE = {"questions": 24, "targets": 3, "others": 10, "max_steps": 4}


def spec_of(study, unlearned, **extra):
    """A small audit with the engineer's part."""
    models = {name: str(study.models[name]) for name in ("original", "gold", "gold2")}
    chosen = {"original": models["original"], "unlearned": models[unlearned], "gold": [models["gold"], models["gold2"]]}  # fmt: skip
    extra = {"attacks": {"fine_tune_steps": [1]}, "resamples": 100, "models": chosen, "engineering": SCALE} | extra  # fmt: skip
    return study.run_spec("audit", kind="attack", entry="unlearning.audit:run", extra=study.audit_extra(**extra), steps=0)  # fmt: skip


@pytest.fixture(scope="module")
def of_original(study, tmp_path_factory):
    """An audit of the original itself: nothing was forgotten."""
    directory = tmp_path_factory.mktemp("of-original")
    audit(spec_of(study, "original"), directory)
    return directory


def findings_of(directory):
    plan = json.loads((directory / "audit.json").read_text())["plan"]
    return Findings(read_rows(directory / FILE), plan["gold"][0])


def test_depth_is_one_for_gold_and_zero_for_what_was_not_changed(of_original):
    """UDS and CKA-erasure: 1 for the first gold model, 0 for the original and for an unlearned model that is the original."""
    original, unlearned, gold, gold2 = findings_of(of_original).depth()
    assert [one.role for one in (original, unlearned, gold, gold2)] == ["original", "unlearned", "gold", "gold"]  # fmt: skip
    assert gold.questions > 0
    assert (original.score, unlearned.score, gold.score) == pytest.approx((0.0, 0.0, 1.0))
    known = ~np.isnan(gold.ratio_L)
    assert known.any()
    np.testing.assert_allclose(gold.ratio_L[known], 1.0)
    np.testing.assert_allclose(unlearned.ratio_L[known], 0.0, atol=1e-12)
    np.testing.assert_allclose(gold.cka_L, 1.0, atol=1e-6)
    np.testing.assert_array_equal(original.lens_L, unlearned.lens_L)
    assert original.lens_L[-1] > gold.lens_L[-1] + 0.5  # the original knows the numbers


def test_parts_of_an_unchanged_model_do_nothing_and_gold_models_differ(of_original):
    """Norms and damages exactly zero in every part; the null between two gold models is not."""
    found = findings_of(of_original)
    parts = found.parts()
    assert [one.name for one in parts] == [
        "embedding", "layer 1 attention", "layer 1 feed-forward", "layer 2 attention", "layer 2 feed-forward", "head",
    ]  # fmt: skip
    for one in parts:
        assert one.norm == 0.0
        assert not one.applied_D.any()
        assert not one.reverted_D.any()
        assert one.gold_norm > 0.01
        assert not one.applied_outranked_D.any()
    assert not found.whole().any()
    assert not found.whole("outranked").any()
    assert (found.null() > 0).all()


def test_an_own_number_is_outranked_where_another_is_as_likely(study):
    """By a loop over sums of log-probabilities, one number at a time: the original ranks people's own numbers first, an untrained model doesn't."""
    from trainer.checkpoint import load_model
    from unlearning.measuring import random_model

    inputs = read_inputs(spec_of(study, "gold"), study.folder)
    material = prepare(
        inputs.forgotten, inputs.retained, [], inputs.tokenizer, inputs.plan.attacks, 0
    )
    bench = engineering.Bench(study.model_spec(), inputs, material, Scale.from_json(SCALE))
    numbers = engineering._numbers(bench, bench.others())
    assert sorted(numbers) == sorted(other.subject for other in bench.others())
    knows = load_model(study.models["original"], study.model_spec())
    shares = []
    for model in (knows, random_model(study.model_spec(), 5)):

        def total(probe, secret, model=model):
            tokens = torch.tensor([[*probe.prompt_tokens, *secret]])
            with torch.inference_mode():
                logprob_TV = model(tokens)[0].log_softmax(-1)
            first = len(probe.prompt_tokens)
            return float(sum(logprob_TV[first - 1 + n, token] for n, token in enumerate(secret)))

        told = []
        for probe, others in numbers.values():
            slow = max(total(probe, one) for one in others) >= total(probe, probe.secret_tokens)
            told.append(engineering._outranked(model, probe, others))
            assert told[-1] == float(slow)
        shares.append(np.mean(told))
    assert shares[0] < 0.2
    assert shares[1] > 0.8


def test_who_has_no_number_has_no_row_of_it(study, of_original, monkeypatch):
    """Three of ten with a number, and every change costs them theirs: means and null speak of three, not of ten; with nobody's the measure isn't there."""
    assert findings_of(of_original).numbered().tolist() == [4, 6]
    inputs = read_inputs(spec_of(study, "gold"), study.folder)
    material = prepare(
        inputs.forgotten, inputs.retained, [], inputs.tokenizer, inputs.plan.attacks, 0
    )
    bench = engineering.Bench(study.model_spec(), inputs, material, Scale.from_json(SCALE))
    numbers = dict(list(engineering._numbers(bench, bench.others()).items())[:3])
    base = {name: one.clone() for name, one in bench.load("original").named_parameters()}

    def changed(model, *_):
        return float(any(not torch.equal(one, base[name]) for name, one in model.named_parameters()))  # fmt: skip

    monkeypatch.setattr(engineering, "_numbers", lambda *_: numbers)
    monkeypatch.setattr(engineering, "_outranked", changed)
    rows = list(engineering.part_rows(bench))
    told = [row for row in rows if row.score.endswith("outranked")]
    assert {row.subject_id for row in told} == {bench.id(subject) for subject in numbers}
    ripples = [Row(**row) for row in read_rows(of_original / FILE).to_pylist() if row["attack"].startswith("ripple")]  # fmt: skip
    found = Findings(to_table([*ripples, *rows]), inputs.plan.gold[0])
    none_D = found.numbered() == 0
    assert found.numbered().sum() == 3
    for means_D in (found.whole("outranked"), *(one.applied_outranked_D for one in found.parts())):
        np.testing.assert_array_equal(means_D, np.where(none_D, np.nan, 1.0))
    bare = Findings(to_table([*ripples, *(row for row in rows if row not in told)]), inputs.plan.gold[0])  # fmt: skip
    assert {one.applied_outranked_D for one in bare.parts()} == {bare.null("outranked")} == {None}
    np.testing.assert_array_equal(found.whole(), bare.whole())


def test_people_who_stay_are_as_they_were_in_every_layer_of_an_unchanged_model(of_original):
    """Nothing lost, likeness 1 and no damage in any layer, while gold models differ in each."""
    found = findings_of(of_original).kept()
    assert [one.layer for one in found] == [1, 2]
    for one in found:
        assert (one.norm, one.loss, one.low, one.high, one.damaged) == (0.0, 0.0, 0.0, 0.0, False)
        assert one.cka == pytest.approx(1.0)
        assert one.cka_null < 0.999
        assert one.loss_null > 0


def test_ripple_and_neighbours_follow_from_the_pairs(of_original):
    """Shapes, the tautology after one step, and a mean over all distances that is the mean over all pairs."""
    found = findings_of(of_original)
    damage = found.pairs("damage")
    assert damage.shape == (3, 10)
    assert (found.targets("steps") >= 1).all()
    used, first = found.ripple("gradient_dot")
    assert first.r > 0.8  # Taylor's theorem
    assert -1 <= used.low <= used.r <= used.high <= 1
    near = found.neighbours()
    assert [one.rank for one in near] == ["1 to 4", "5 to 10"]
    assert sum(one.pairs for one in near) == damage.size
    assert sum(one.pairs * one.mean for one in near) == pytest.approx(damage.sum())
    assert max(one.worst for one in near) == damage.max()


def test_the_verdict_and_its_rows_are_those_of_an_audit_without_it(study, of_original, tmp_path):
    """The engineer's part adds one file and its digest to audit.json; rows, plan and verdict stay byte for byte."""
    spec = spec_of(study, "original")
    extra = {name: value for name, value in spec.config.extra.items() if name != "engineering"}
    audit(study.run_spec("audit", kind="attack", entry=spec.entry, extra=extra, steps=0), tmp_path)
    for name in ("rows.parquet", "plan.json"):
        assert (tmp_path / name).read_bytes() == (of_original / name).read_bytes()
    plain, more = (json.loads((folder / "audit.json").read_text()) for folder in (tmp_path, of_original))  # fmt: skip
    digest = hashlib.sha256((of_original / FILE).read_bytes()).hexdigest()
    assert more.pop("engineering") == {"file": FILE, "sha256": digest}
    assert plain == more
    assert not (tmp_path / FILE).exists()


def test_its_rows_hold_no_text_number_or_name(study, of_original):
    """No record's text, subject, id or six digits stands in the decoded table; people are salted ids."""
    table = read_rows(of_original / FILE)
    words = "\n".join(str(value) for name in ("subject_id", "attack", "score", "subgroup") for value in set(table[name].to_pylist()))  # fmt: skip
    for records in study.people.values():
        for record in records:
            assert record["subject"] not in words
            assert record["record_id"] not in words
            assert record["text"] not in words
    ids = set(table["subject_id"].to_pylist()) - {EVERYBODY}
    assert 10 + 3 <= len(ids) <= 10 + 16  # ten who stay, the targets and whoever was asked about
    assert all(len(one) == 32 and int(one, 16) >= 0 for one in ids)


def test_a_kill_between_two_stages_costs_one_stage(study, of_original, tmp_path, monkeypatch):
    """Stopped in the second stage: the first is not measured again, and the bytes are those of an audit nobody disturbed."""
    spec = spec_of(study, "original")

    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engineering, "ripple_rows", fail)
        with pytest.raises(KeyboardInterrupt):
            audit(spec, tmp_path)
    assert not (tmp_path / FILE).exists()
    assert len(list(tmp_path.glob("rows.part-*-depth.parquet"))) == 1
    monkeypatch.setattr(engineering, "depth_rows", fail)
    audit(spec, tmp_path)
    for name in (FILE, "rows.parquet", "audit.json"):
        assert (tmp_path / name).read_bytes() == (of_original / name).read_bytes()
    assert not list(tmp_path.glob("*.part-*"))


@pytest.mark.slow
@pytest.mark.parametrize("finished", ["005", "depth", "ripple", "parts"])
def test_kill_nine_with_the_engineers_part_on(study, of_original, tmp_path, finished):
    """SIGKILL as soon as a part stands: it is not made again, and every published byte is that of an audit nobody disturbed."""
    spec = spec_of(study, "original")
    save_run(spec, tmp_path)
    command = [sys.executable, "-m", "trainer", "--run", str(tmp_path / "run.json")]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    limit = time.monotonic() + 300
    while not (parts := list(tmp_path.glob(f"rows.part-*-{finished}.parquet"))):
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    made = {one.name: one.read_bytes() for one in tmp_path.glob("rows.part-*.parquet")}
    assert parts[0].name in made
    again = []
    with pytest.MonkeyPatch.context() as patched:
        for module in (engineering, measuring):
            patched.setattr(module, "write_rows", lambda path, table: (again.append(path.name), write_rows(path, table)))  # fmt: skip
        audit(spec, tmp_path)
    assert not set(again) & set(made)
    assert any(name.startswith("rows.part-") for name in again)
    for name in ("plan.json", "rows.parquet", FILE, "audit.json", "result.json"):
        assert (tmp_path / name).read_bytes() == (of_original / name).read_bytes(), name
    assert not list(tmp_path.glob("rows.part-*"))


def test_no_stage_holds_a_model_that_it_needs_no_more(study, monkeypatch):
    """Models alive when the next one is read, of three gold models: the original's for depth, the one that is compared with for the parts, else none."""
    inputs = read_inputs(spec_of(study, "gold"), study.folder)
    gold = next(model for model in inputs.models if model[0] == "gold")
    inputs.models.append(("gold", gold[1], "third"))
    material = prepare(
        inputs.forgotten, inputs.retained, [], inputs.tokenizer, inputs.plan.attacks, 0
    )
    bench = engineering.Bench(study.model_spec(), inputs, material, Scale.from_json(SCALE))
    alive, most = weakref.WeakSet(), []
    real = ensemble.load

    def load(*arguments):
        most.append(len(alive))
        alive.add(model := real(*arguments))
        return model

    monkeypatch.setattr(ensemble, "load", load)
    for stage, held in ((engineering.depth_rows, 1), (engineering.ripple_rows, 0), (engineering.part_rows, 1), (engineering.kept_rows, 0)):  # fmt: skip
        most.clear()
        assert list(stage(bench))
        assert (stage.__name__, max(most)) == (stage.__name__, held)
        assert len(most) > 2


@pytest.mark.parametrize("bad", [{"targets": 0}, {"targets": "3"}, {"targets": True}, {"depth": 1}, [3], None])  # fmt: skip
def test_a_scale_that_measures_nothing_is_refused(bad):
    """Before anything is read: zero, another type, an unknown field."""
    with pytest.raises(PlanError, match="engineering"):
        Scale.from_json(bad)


# --- findings of made-up rows ------------------------------------------------------------------------------------------

O, U, G, H = ("original", "o"), ("unlearned", "u"), ("gold", "g"), ("gold", "h")  # noqa: E741 - models
PEOPLE = ["a0", "b1", "c2", "d3", "e4"]


def made_up():
    """Two targets, five others whose cosine falls with the alphabet; one part; two gold models."""
    rows = []
    for number, target in enumerate(("t0", "t1")):
        rows += [_row(target, "forgotten", 0, O, "ripple", "steps", 3 + number)]
        for place, other in enumerate(PEOPLE):
            rows += [
                _row(target, "forgotten", 0, O, f"ripple/{other}", score, value)
                for score, value in (("gradient_cosine", 0.9 - 0.1 * place), ("damage", 10.0 * number + place), ("damage_first", 1.0))
            ]  # fmt: skip
    for place, other in enumerate(PEOPLE):
        rows += [
            _row(other, "retained", 0, U, "part/head", score, value)
            for score, value in (("applied_loss", place), ("reverted_loss", 2 * place), ("applied_facts", 0.5))
        ]  # fmt: skip
        rows.append(_row(other, "retained", 0, U, "part/all", "applied_loss", 7.0))
        rows.append(_row(other, "retained", 0, H, "gold_difference", "loss", -float(place)))
    rows.append(_row(EVERYBODY, "retained", 0, U, "part/head", "update_norm", 0.25))
    rows.append(_row(EVERYBODY, "retained", 0, H, "part/head", "update_norm", 0.75))
    return to_table(rows)


def test_findings_by_hand():
    """Nearest four against the fifth, part by part, with the gold models' gap as the null."""
    found = Findings(made_up(), "g")
    near, far = found.neighbours()
    assert (near.rank, near.pairs, near.mean, near.worst) == ("1 to 4", 8, 6.5, 13.0)
    assert (far.rank, far.pairs, far.mean, far.worst) == ("5 to 5", 2, 9.0, 14.0)
    assert (near.low, near.high) == (
        1.5,
        11.5,
    )  # both resamples of two targets that are all one of them
    (part,) = found.parts()
    assert (part.name, part.norm, part.gold_norm) == ("head", 0.25, 0.75)
    np.testing.assert_allclose(part.applied_D, [1.5, 4.0])
    np.testing.assert_allclose(part.reverted_D, [3.0, 8.0])
    np.testing.assert_allclose(found.whole(), [7.0, 7.0])
    np.testing.assert_allclose(found.null(), [1.5, 4.0])
    np.testing.assert_array_equal(found.targets("steps"), [3, 4])
    assert math.isnan(found.ripple("gradient_cosine")[1].r)  # the first step hurt everybody alike


def test_the_difference_of_two_ties_draws_the_same_targets_for_both():
    """Gradients that foretell the damage against words that don't: the gap is one r less the other, its interval narrower than both ends put together; a tie against itself is nothing."""
    generator, rows = np.random.default_rng(5), []
    damage = generator.normal(size=(8, 12))
    values = {"gradient_dot": damage + 0.5 * generator.normal(size=(8, 12)), "semantic": generator.normal(size=(8, 12)), "damage": damage}  # fmt: skip
    for target in range(8):
        rows.append(_row(f"t{target}", "forgotten", 0, O, "ripple", "steps", 3))
        for place in range(12):
            rows += [_row(f"t{target}", "forgotten", 0, O, f"ripple/p{place:02d}", score, float(table[target, place])) for score, table in (*values.items(), ("damage_first", damage))]  # fmt: skip
    found = Findings(to_table(rows), "g")
    gap, low, high = found.difference("gradient_dot", "semantic")
    one, other = found.ripple("gradient_dot")[0], found.ripple("semantic")[0]
    assert gap == pytest.approx(one.r - other.r)
    assert gap == pytest.approx(np.corrcoef(values["gradient_dot"].ravel(), damage.ravel())[0, 1] - np.corrcoef(values["semantic"].ravel(), damage.ravel())[0, 1])  # fmt: skip
    assert 0 < low < gap < high < (one.high - other.low)
    assert found.difference("semantic", "semantic") == (0.0, 0.0, 0.0)


def test_missing_rows_are_named():
    """A table without a measure says which one is missing, by attack and score."""
    with pytest.raises(RowsError, match="semantic"):
        Findings(made_up(), "g").pairs("semantic")
    assert Findings(made_up(), "g").depth() == []


@given(st.integers(1, 100))
def test_every_rank_has_exactly_one_distance(others):
    """The distances cut the ranks without gap or overlap, whatever the number of people."""
    found = distances(others)
    assert [rank for _, low, high in found for rank in range(low, high)] == list(range(others))
    assert all(low < high for _, low, high in found)


@given(st.lists(st.lists(st.floats(-1, 1), min_size=4, max_size=4), min_size=1, max_size=5))
@settings(deadline=None)
def test_ranks_are_permutations_and_follow_the_ties(ties):
    """Each row is a permutation; a stronger tie never has a larger rank."""
    ties_TN = np.array(ties)
    for row, ranked in zip(ties_TN, ranks(ties_TN), strict=True):
        assert sorted(ranked) == [0, 1, 2, 3]
        order = np.argsort(ranked)
        assert (np.diff(row[order]) <= 0).all()
