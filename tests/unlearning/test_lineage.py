"""Bad input: records the original never saw, gold of another recipe or with the forgotten in it, checkpoints the ledger does not know."""

import json
import re
import shutil

import pytest

from trainer.checkpoint import newest, verify
from unlearning.audit import read_inputs
from unlearning.errors import LineageError, PeopleError
from unlearning.lineage import Lineage, check_lineage


def inputs_of(study, **extra):
    """Inputs of an audit with changed settings, checked."""
    spec = study.run_spec("audit", kind="attack", extra=study.audit_extra(**extra), steps=0)
    return read_inputs(spec, study.folder)


def saved_run(study, name, **changes):
    """A run of a few steps with its run file beside it, as whoever starts a run writes it; its checkpoint."""
    from trainer.loop import train
    from trainer.spec import save_run

    directory = study.folder / name
    if not directory.exists():
        directory.mkdir()
        spec = study.run_spec(name, **changes)
        save_run(spec, directory)
        assert train(spec, directory) == 0
    return newest(directory)


def models(study, original, gold):
    """Models of an audit, with roles and digests."""
    named = (("original", original), ("unlearned", gold), ("gold", gold))
    return [(role, folder, verify(folder).root) for role, folder in named]


@pytest.fixture(scope="module")
def short(records_only):
    """An original that saw every record, and its gold: 64 steps are two epochs of these records."""
    original = saved_run(records_only, "short", steps=64, rows=8)
    gold = saved_run(records_only, "short-gold", steps=64, rows=8, excluded=records_only.excluded())
    return original, gold


def ids(study):
    """Ids of the forgotten records."""
    return [r["record_id"] for r in study.people["forgotten"]]


def test_models_that_belong_together_are_taken(records_only, short):
    """Same recipe, all records seen by the original, none by gold: nothing is refused, and what was not looked at is said."""
    found = models(records_only, *short)
    assert check_lineage(found, ids(records_only), [digest for *_, digest in found]) == Lineage(
        (), ()
    )
    (only,) = check_lineage(found, ids(records_only)).unchecked
    assert "ledger" in only


def test_records_that_the_original_never_saw_are_refused(records_only, short):
    """Look-alikes' records are not in the data, forgotten ones not in the windows of one step; some of them is said, not refused."""
    others = [r["record_id"] for r in records_only.people["lookalike"]]
    with pytest.raises(
        LineageError, match="none of the 64 records is in the original's training data"
    ):
        check_lineage(models(records_only, *short), others)
    said = check_lineage(models(records_only, *short), [*others, *ids(records_only)])
    assert any(
        "64 of the 128 records are not in the original's training data" in one for one in said.noted
    )
    assert not any("128" in one for one in said.unchecked)
    one = saved_run(records_only, "one-step", steps=1, rows=1)
    first = saved_run(records_only, "one-gold", steps=1, rows=1, excluded=records_only.excluded())
    from trainer.inputs import batch_plan
    from trainer.spec import load_run

    seen = {r for _, r in batch_plan(load_run(one.parent), one.parent).records(0)}
    unseen = [i for i in ids(records_only) if bytes.fromhex(i) not in seen]
    with pytest.raises(LineageError, match="stands in a window"):
        check_lineage(models(records_only, one, first), unseen)


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("other-steps", {"steps": 32}, "steps"),
        ("other-rate", {"optim": {"lr": 0.001}}, "optim"),
        ("other-rows", {"rows": 4}, "batch"),
    ],
)
def test_gold_of_another_recipe_is_refused(records_only, short, name, changes, match):
    """Fewer steps, another rate, another batch: the message names the difference and what to do."""
    values = {"steps": 64, "rows": 8, "excluded": records_only.excluded()} | changes
    gold = saved_run(records_only, name, **values)
    with pytest.raises(LineageError, match=f"another recipe: expected {match}.*retrain gold"):
        check_lineage(models(records_only, short[0], gold), ids(records_only))


def test_gold_of_another_tokenizer_is_refused(records_only, short):
    """Two run files that name different tokenizers."""
    folder = records_only.folder / "other-tokenizer"
    shutil.copytree(short[1].parent, folder)
    values = json.loads((folder / "run.json").read_bytes())
    values["versions"]["tokenizer"] = "ab" * 32
    (folder / "run.json").write_text(json.dumps(values))
    with pytest.raises(LineageError, match="another recipe: expected tokenizer none, got abab"):
        check_lineage(models(records_only, short[0], newest(folder)), ids(records_only))


def test_gold_that_saw_the_forgotten_is_refused(records_only, short):
    """A second training on everything is no gold model, whatever it is called."""
    gold = saved_run(records_only, "no-gold", steps=64, rows=8, seed=1)
    with pytest.raises(LineageError, match="trained on 64 of the 64 forgotten records"):
        check_lineage(models(records_only, short[0], gold), ids(records_only))


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(study):
    """Through the audit's own settings, before anything is written."""
    known = [verify(study.models[name]).root for name in ("original", "gold")]
    with pytest.raises(LineageError, match=r"gold model's digest .* is in no window of the ledger"):
        inputs_of(study, ledger=known)
    everything = [*known, verify(study.models["gold2"]).root]
    assert not any("ledger" in one for one in inputs_of(study, ledger=everything).lineage.unchecked)


def test_checkpoints_without_a_run_file_are_said_to_be_unchecked(study):
    """Nothing is assumed about a checkpoint that came alone."""
    unchecked = inputs_of(study).lineage.unchecked
    assert any(one.startswith("the original model's data and recipe") for one in unchecked)
    assert any(one.startswith("the gold model's data and recipe") for one in unchecked)


def going_on(study, name, before, **changes):
    """A run of a step that goes on from a checkpoint."""
    place = f"../{before.parent.name}/{before.name}"
    return saved_run(study, name, steps=1, rows=1, init=place, init_root=verify(before).root, **changes)  # fmt: skip


def test_runs_that_a_model_went_on_from_count_as_its_own(records_only, short):
    """One further step of one row: what the runs before it were shown is known, for the original and for gold."""
    original, gold = short
    on = going_on(records_only, "on", original)
    off = going_on(records_only, "on-gold", gold, excluded=records_only.excluded())
    known = [verify(one).root for one in (on, off, gold)]
    assert check_lineage(models(records_only, on, off), ids(records_only), known) == Lineage((), ())
    tainted = going_on(records_only, "tainted", original, excluded=records_only.excluded())
    with pytest.raises(LineageError, match="gold was trained on 64 of the 64 forgotten records"):
        check_lineage(models(records_only, on, tainted), ids(records_only))
    with pytest.raises(LineageError, match="recipe"):  # one goes on, the other does not
        check_lineage(models(records_only, on, gold), ids(records_only))


def test_a_line_that_ends_at_a_checkpoint_without_a_run_file_is_unchecked(records_only, short):
    """Nobody can tell what such a checkpoint saw: the original may have seen the records there, and gold too."""
    bare = []
    for one in short:
        folder = records_only.folder / f"bare-{one.parent.name}"
        shutil.copytree(one, folder / one.name, dirs_exist_ok=True)
        bare.append(folder / one.name)
    on = going_on(records_only, "bare-on", bare[0])
    off = going_on(records_only, "bare-gold", bare[1], excluded=records_only.excluded())
    found = models(records_only, on, off)
    saw, gold = check_lineage(found, ids(records_only), [digest for *_, digest in found]).unchecked
    assert re.match(r"whether the original saw 6\d of the 64 records: ", saw)
    assert gold.startswith("whether gold saw the records: ")


@pytest.mark.parametrize("swapped", ["its own", "of the run before"])
def test_a_run_file_that_did_not_make_its_checkpoint_is_not_believed(records_only, short, swapped):
    """Gold that saw everything, with a run.json beside it, or beside what it goes on from, that says otherwise: nothing is known, and nothing passes."""
    original, gold = short
    name = "swapped" if swapped == "its own" else "swapped-before"
    before = records_only.folder / f"{name}-from"
    shutil.copytree(original.parent, before)
    saw_all = going_on(records_only, name, before / original.name, excluded=records_only.excluded())
    on = going_on(records_only, "on", original)
    found = models(records_only, on, saw_all)
    with pytest.raises(LineageError, match="gold was trained on 64"):
        check_lineage(found, ids(records_only))
    if swapped == "its own":
        honest = going_on(records_only, "on-gold", gold, excluded=records_only.excluded())
        shutil.copy(honest.parent / "run.json", saw_all.parent)
    else:
        shutil.copy(gold.parent / "run.json", before)
    (said,) = check_lineage(found, ids(records_only), [one for *_, one in found]).unchecked
    assert said.startswith("whether gold saw the records: ")
    assert "didn't make its checkpoint" in said


def test_an_earlier_slice_counts_as_its_constituent(records_only, short, tmp_path):
    """Gold whose last slice leaves the records out, and whose slice before it did not, was trained on them."""
    from unlearning.ensemble import Constituent, root_of, write_ensemble

    last = going_on(records_only, "slice", short[0], excluded=records_only.excluded())
    write_ensemble(tmp_path / "gold", [Constituent(0, str(last), verify(last).root)])
    found = [("gold", tmp_path / "gold", root_of(tmp_path / "gold"))]
    with pytest.raises(LineageError, match="gold ensemble was trained on 64 of the 64"):
        check_lineage(found, ids(records_only))


def test_ensembles_of_one_recipe_are_checked_and_of_two_are_not(records_only, short, tmp_path):
    """Gold constituents made like the original's leave nothing open; another batch, or one model beside an ensemble, does."""
    from unlearning.ensemble import Constituent, root_of, write_ensemble

    def made(name, *checkpoints):
        parts = [Constituent(n, str(one), verify(one).root) for n, one in enumerate(checkpoints)]
        write_ensemble(tmp_path / name, parts)
        return tmp_path / name, root_of(tmp_path / name)

    other = saved_run(records_only, "gold-rows", steps=64, rows=4, excluded=records_only.excluded())
    original, gold, odd = made("original", *short), made("gold", short[1]), made("odd", other)

    def unchecked(reference):
        found = [("original", *original), ("unlearned", *gold), ("gold", *reference)]
        known = [original[1], gold[1], reference[1]]
        return check_lineage(found, ids(records_only), known).unchecked

    assert unchecked(gold) == ()
    assert unchecked(odd) == (
        "the gold ensemble's recipe: its constituents differ from the original's in batch",
    )
    (mixed,) = unchecked((short[1], verify(short[1]).root))
    assert mixed.startswith("the gold models' recipe: one of original and gold is an ensemble")


def test_a_shard_whose_tokens_an_earlier_erasure_took_is_known_by_its_list(
    records_only, short, tmp_path
):
    """The list of its records stands in its run file; with it nothing is open, without tokens and list everything is."""
    from trainer import Selection, write_selection
    from trainer.order import MICRO
    from unlearning.ensemble import Constituent, root_of, write_ensemble

    forgotten = {bytes.fromhex(one) for one in ids(records_only)}
    others = {bytes.fromhex(r["record_id"]) for r in records_only.people["retained"]}
    found = []
    for role, listed in (("original", forgotten | others), ("gold", others)):
        path = records_only.folder / f"list-{role}.jsonl"
        digest = write_selection(path, dict.fromkeys(listed, MICRO), default=0)
        checkpoint = saved_run(records_only, f"listed-{role}", steps=2, rows=8, selection=Selection(file=f"../{path.name}", digest=digest))  # fmt: skip
        write_ensemble(tmp_path / role, [Constituent(0, str(checkpoint), verify(checkpoint).root)])
        found.append((role, tmp_path / role, root_of(tmp_path / role)))
    known = [digest for *_, digest in found]
    tokens = records_only.folder / "tokens"
    tokens.rename(tmp_path / "taken")
    try:
        assert check_lineage(found, ids(records_only), known) == Lineage((), ())
        mistaken = [("gold", *found[0][1:])]
        with pytest.raises(LineageError, match="gold ensemble was trained on 64 of the 64"):
            check_lineage(mistaken, ids(records_only), known)
        (records_only.folder / "list-gold.jsonl").unlink()
        (said,) = check_lineage(found, ids(records_only), known).unchecked
    finally:
        (tmp_path / "taken").rename(tokens)
    assert said.startswith("the gold model's data: a constituent's tokens are not there any more")


def test_an_empty_forget_set_is_refused(study, tmp_path):
    """Nothing sealed is nothing to audit."""
    from provenance.sealing import seal

    (tmp_path / "empty").write_bytes(seal((study.folder / "key").read_bytes(), b""))
    sealed = {"file": str(tmp_path / "empty"), "key_file": str(study.folder / "key")}
    with pytest.raises(PeopleError, match="at least one record"):
        inputs_of(study, sealed=sealed)
