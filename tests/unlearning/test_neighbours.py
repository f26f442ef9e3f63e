"""Retained batches hold as much of the forgotten people's neighbours as a run asks for, by its mixture and by nothing else."""

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.checkpoint import verify
from trainer.data import BatchPlan, TokenStore
from trainer.order import MICRO
from trainer.selection import RecordWeights, sorted_ids
from trainer.spec import BatchSpec, MixtureSpec
from trainer.tokens import write_tokens
from unlearning.errors import PlanError
from unlearning.methods.neighbours import raised, share_of, with_neighbours

END = 99


def identity(index):
    """A record's id."""
    return hashlib.sha256(b"%d" % index).digest()


def store_of(folder, owners, owner_key=None):
    """One record of ten tokens per entry."""
    records = ((n, identity(n), owner, [*range(9), END]) for n, owner in enumerate(owners))
    write_tokens(
        folder, corpus_version="toy", tokenizer_digest="0" * 64, vocab_size=100, end_of_text=END, records=records, owner_key=owner_key
    )  # fmt: skip
    return TokenStore.open(folder)


def share_in_batches(store, mixture, excluded, owners, steps, weights=None):
    """Oracle: of the tokens that so many steps really draw, those of some owners."""
    plan = BatchPlan(store, 7, BatchSpec(rows=8, length=25), mixture, excluded, weights)
    counts = dict.fromkeys(store.owners, 0)
    for step in range(steps):
        for row in plan.batch(step).segments:
            for segment in row:
                counts[store.owner_of(segment.index)] += segment.count
    return sum(counts[owner] for owner in owners) / sum(counts.values())


def test_repeats_by_hand(tmp_path):
    """30 lines of speech and 10 of people, 4 of them pushed: 6 lines stay, 160 times each would be 0.97; once each 1/6; for a half five times."""
    store = store_of(tmp_path, ["speech"] * 30 + ["people"] * 10)
    forgotten = {identity(n) for n in range(30, 34)}
    assert raised(store, MixtureSpec(), (), forgotten, 0.5, drawn=100).repeats == {"people": 5}
    assert raised(store, MixtureSpec(), forgotten, forgotten, 0.75, drawn=100).repeats == {
        "people": 15
    }
    # Excluded beside the pushed: five fewer speeches.
    gone = {identity(n) for n in range(5, 10)}
    assert raised(store, MixtureSpec(repeats={"speech": 2}), gone, forgotten, 0.5, drawn=100).repeats == {"speech": 2, "people": 8}  # fmt: skip
    enough = MixtureSpec(repeats={"people": 160})
    assert raised(store, enough, (), forgotten, 0.9, drawn=100) is enough


def test_neighbours_are_named_by_pseudonym(tmp_path):
    """What the mixture says of owners, by id or by pseudonym, comes back by pseudonym alone, with the repeats of a folder without a key."""
    store = store_of(tmp_path, ["speech"] * 30 + ["people"] * 10, b"k" * 32)
    speech, people = store.pseudonym("speech"), store.pseudonym("people")
    forgotten = {identity(n) for n in range(30, 34)}
    for name in ("speech", speech):
        found = raised(store, MixtureSpec(repeats={name: 2}), (), forgotten, 0.5, drawn=100)
        assert found.repeats == {speech: 2, people: 10}


def test_few_neighbours_are_not_drilled(tmp_path):
    """60 tokens of neighbours: in a run of 4,000 they get 20 looks each, 0.3 of it, where 0.9 was asked for; in one of 12,000 what training gave."""
    store = store_of(tmp_path, ["speech"] * 30 + ["people"] * 10)
    forgotten = {identity(n) for n in range(30, 34)}
    assert raised(store, MixtureSpec(), (), forgotten, 0.9, drawn=1000).repeats == {"people": 45}
    assert raised(store, MixtureSpec(), (), forgotten, 0.9, drawn=4000).repeats == {"people": 2}
    same = MixtureSpec()
    assert raised(store, same, (), forgotten, 0.9, drawn=12_000) is same
    # Repeats of training are no further tokens: the looks are at records.
    often = MixtureSpec(repeats={"people": 3, "speech": 12})
    assert raised(store, often, (), forgotten, 0.9, drawn=4000).repeats == {"people": 26, "speech": 12}  # fmt: skip


def test_who_is_nobodys_neighbour_changes_nothing(tmp_path):
    """All of an owner pushed, or nothing else there, or an owner that stands 0 times: the mixture is the training's."""
    store = store_of(tmp_path, ["speech"] * 3 + ["people"] * 2)
    people, speech = {identity(3), identity(4)}, {identity(n) for n in range(3)}
    same = MixtureSpec()
    assert raised(store, same, (), people, 0.9, drawn=100) is same
    assert raised(store, same, speech, {identity(3)}, 0.9, drawn=100) is same
    none = MixtureSpec(repeats={"people": 0})
    assert raised(store, none, (), {identity(3)}, 0.9, drawn=100) is none
    # An id that no token folder has is nobody's.
    assert raised(store, same, (), {bytes(32)}, 0.9, drawn=100) is same


@settings(deadline=None, max_examples=15)
@given(
    share=st.floats(0.1, 0.9), people=st.integers(3, 30), repeats=st.integers(1, 40), half=st.booleans()
)  # fmt: skip
def test_batches_hold_the_share(tmp_path_factory, share, people, repeats, half):
    """Law, against the batches that are really drawn: the share, or the training's where that is more; with weights too; never less."""
    folder = tmp_path_factory.mktemp("tokens")
    store = store_of(folder, ["speech"] * 40 + ["people"] * people)
    forgotten = {identity(40)}
    before = MixtureSpec(repeats={"speech": 20, "people": repeats})
    weights = None
    if half:
        ids = sorted_ids({identity(n): 0 for n in range(20)})
        weights = RecordWeights(ids, np.full(20, MICRO // 2))
    after = raised(store, before, (), forgotten, share, weights, drawn=100)
    assert after.repeats["speech"] == 20
    assert after.repeats["people"] >= repeats
    close, others = after.repeats["people"] * (people - 1), 20 * (30 if half else 40)
    found = close / (close + others)
    training = repeats * (people - 1) / (repeats * (people - 1) + others)
    # A repeat more or less is the rounding.
    least = (after.repeats["people"] - 1) * (people - 1)
    assert found >= max(share, training) - (found - least / (least + others)) - 1e-12
    plan = BatchPlan(store, 7, BatchSpec(rows=8, length=25), after, forgotten, weights)
    epoch = round(plan.steps_per_epoch)
    if epoch >= 20:
        drawn = share_in_batches(store, after, forgotten, ["people"], epoch, weights)
        assert drawn == pytest.approx(found, abs=0.05)


@pytest.mark.parametrize("wrong", ["1", "-0.1", "nan", "x", "1.5"])
def test_a_share_out_of_range_is_refused(wrong):
    """1 would leave no other text; words and negative numbers are no shares."""
    with pytest.raises(PlanError, match="neighbours as a decimal string"):
        share_of(wrong)


def test_a_run_says_its_neighbours_in_its_mixture(study, tmp_path):
    """Nothing but the mixture changes, nothing at all for 0; and whose records are pushed is read from the sealed file."""
    extra = {k: study.audit_extra()[k] for k in ("sealed", "tokenizer")}
    original = study.models["original"]
    run = study.run_spec(
        "near", kind="unlearn", steps=2, excluded=study.excluded(), init=str(original), init_root=verify(original).root, extra=extra
    )  # fmt: skip
    assert with_neighbours(run, study.folder, "0") is run
    store = TokenStore.open(study.folder / "tokens")
    # Everything in this study is of one owner, so that all are neighbours already.
    assert len(store.owners) == 1
    assert with_neighbours(run, study.folder, "0.9") == run
    owners = [*(["people"] * store.size), *(["speech"] * 40 * store.size)]
    names = [store.record_id(n) if n < store.size else identity(n) for n in range(len(owners))]
    records = ((n, names[n], owner, [*range(9), END]) for n, owner in enumerate(owners))
    digest = write_tokens(
        tmp_path, corpus_version="toy", tokenizer_digest="0" * 64, vocab_size=100, end_of_text=END, records=records
    )  # fmt: skip
    wide = dataclasses.replace(run, tokens=str(tmp_path), tokens_digest=digest)
    near = with_neighbours(wide, study.folder, "0.9")
    assert set(near.config.mixture.repeats) == {"people"}
    assert near.config.mixture.repeats["people"] > 1
    assert dataclasses.replace(near, config=dataclasses.replace(near.config, mixture=run.config.mixture)) == wide  # fmt: skip
