"""Sharded training and erasure: what a person's shard costs, what other shards keep, and the bits of never having seen the person."""

import dataclasses
import hashlib
import json
from types import SimpleNamespace

import pytest
from graph_commands import dataworth, text_of, values

from pipelines.erasure.choosing import SHARDED, measured
from pipelines.requests import RequestError
from pipelines.sizes import size_named
from pipelines.steps.sharded import person_of, refuse_others, shape_of, touched_share
from pipelines.storage.config import Config, ConfigError, ErasureConfig, TrainingConfig


def site_of(**training):
    """As much of an open home as the shape of shards needs."""
    return SimpleNamespace(
        config=Config(training=TrainingConfig(**training)), size=size_named("tiny")
    )


@pytest.mark.parametrize(
    ("choices_", "match"),
    [
        ({"shards": 0}, "shards: expected 1..64"),
        ({"slices": 2}, "shards of 2 or more"),
        ({"shards": 2, "selection": "by-value"}, "with shards it is all"),
    ],
)
def test_shapes_that_make_no_sense_are_refused(choices_, match):
    """No shard, slices of one model, and weights of records together with shards."""
    with pytest.raises(ConfigError, match=match):
        TrainingConfig(**choices_)


def test_a_method_that_does_not_fit_the_model_is_refused():
    """Losses want one model, sharded retraining wants shards; exact goes with both."""
    refuse_others(site_of(), "npo")
    refuse_others(site_of(shards=4), SHARDED)
    for shards in (1, 4):
        refuse_others(site_of(shards=shards), "exact")
    with pytest.raises(RequestError, match=r"set .training. shards"):
        refuse_others(site_of(), SHARDED)
    with pytest.raises(RequestError, match="this one is 4 shards"):
        refuse_others(site_of(shards=4), "npo")
    assert ErasureConfig(method=SHARDED).method == SHARDED


@pytest.mark.parametrize(("shards", "slices"), [(2, 1), (4, 3), (16, 2)])
def test_a_person_costs_at_most_one_shard(shards, slices):
    """From the person's slice on: (R - r) / (S R) of a training; several people add up over the earliest slice of each shard."""
    site = site_of(shards=shards, slices=slices)
    shape = shape_of(site)
    assert shape.steps * shards * slices >= site.size.steps
    first: dict[int, int] = {}
    for number in range(40):
        person = person_of("registry", f"person-{number:04d}")
        shard, part = shape.place(person)
        alone, touched = touched_share(site, {person: 0})
        assert alone == pytest.approx((slices - part) / (shards * slices))
        assert touched == 1
        assert alone <= 1 / shards
        first[shard] = min(part, first.get(shard, slices))
    people = {person_of("registry", f"person-{number:04d}"): 0 for number in range(40)}
    both = sum(slices - part for part in first.values()) / (shards * slices)
    assert touched_share(site, people) == (pytest.approx(both), len(first))


def test_past_audits_are_read_only_where_the_ledger_names_them(tmp_path):
    """The worst tier and the utility above the mildest gold; nothing from another file, an INVALID audit, or none."""

    def endpoint(name, unlearned, *gold):
        return {"name": name, "subgroup": "", "unlearned": unlearned, "gold": list(gold)}

    rows = [endpoint("direct", "0.1", "0.0", "0.05"), endpoint("fine_tune", "0.5", "0.1", "0.2"), endpoint("utility", "3.5", "3.2")]  # fmt: skip
    path = tmp_path / "audit.json"

    def written(verdict):
        path.write_text(json.dumps({"verdict": verdict, "endpoints": rows}))
        return hashlib.sha256(path.read_bytes()).hexdigest()

    assert measured(path, written("FAIL")) == (pytest.approx(0.4), pytest.approx(0.3))
    assert measured(path, "0" * 64) == (None, None)
    assert measured(path, written("INVALID")) == (None, None)
    assert measured(tmp_path / "none.json", "0" * 64) == (None, None)


def retrained(home, stages, folder):
    """Root of a shard trained from nothing in another way: everything outside of it excluded, no list of weights."""
    from trainer import Excluded, load_run
    from trainer.checkpoint import newest, verify
    from trainer.inputs import open_store
    from trainer.loop import train
    from trainer.selection import read_selection

    before = None
    for stage in stages:
        source = home / "runs" / stage["run"]
        run = load_run(source)
        listed = read_selection(source / run.selection.file, run.selection.digest)
        members = {bytes(one).ljust(32, b"\0") for one in listed.ids_M}
        store = open_store(run, source)
        out = {one.tobytes() for _, block in store.record_ids() for one in block} - members
        lines = "".join(f"{one.hex()}\n" for one in sorted(out - {bytes(32)}))
        directory = folder / stage["run"]
        directory.mkdir(parents=True)
        (directory / "out.txt").write_text(lines)
        again = dataclasses.replace(
            run, tokens=str((source / run.tokens).resolve()), selection=None,
            excluded=Excluded(file="out.txt", digest=hashlib.sha256(lines.encode()).hexdigest()),
            init=str(before) if before else "none", init_root=verify(before).root if before else "none",
        )  # fmt: skip
        assert train(again, directory) == 0
        before = newest(directory)
    return verify(before).root


def forget_one(home, folder):
    """Ask for one person in a finished home whose open request is finished first; every claim about shards on the way."""
    shards = values(home, "checkpoint")["constituents"][-1]["shard"] + 1
    slices = len(values(home, "checkpoint")["constituents"]) // shards
    assert dataworth(home, "erase", "--finish").returncode == 0
    asked = ("erase", "--owner", "registry", "--source", "person-0002")
    planned = text_of(dataworth(home, *asked, "--plan"))
    assert f"1 of {shards} shards" in planned
    assert "recommended: sharded" in planned
    assert dataworth(home, *asked).returncode == 0
    done = dataworth(home, "run")
    assert done.returncode == 0, text_of(done)
    original, unlearned = values(home, "checkpoint"), values(home, "unlearned_checkpoint")
    roots = [{(c["shard"], c["slice"]): c["root"] for c in v["constituents"]} for v in (original, unlearned)]  # fmt: skip
    (shard,) = unlearned["shards_trained"]
    changed = {place for place in roots[0] if roots[0][place] != roots[1][place]}
    assert {place[0] for place in changed} == {shard}
    assert 0 < unlearned["share"] <= 1 / shards
    assert unlearned["share"] == pytest.approx(len(changed) / (shards * slices))
    stages = [c for c in unlearned["constituents"] if c["shard"] == shard]
    assert retrained(home, stages, folder) == stages[-1]["root"]
    assert values(home, "robustness_audit")["method"] == "sharded retraining"
    assert dataworth(home, "verify").returncode == 0
    assert dataworth(home, "erase", "--finish").returncode == 0
    left = {path.parent.name for path in home.glob("runs/train-*/step-*")}
    gone = {c["run"] for c in original["constituents"] if (c["shard"], c["slice"]) in changed}
    assert gone.isdisjoint(left)
    assert {c["run"] for c in unlearned["constituents"]} <= left
    assert dataworth(home, "run").returncode == 0
    assert values(home, "checkpoint")["root"] == unlearned["root"]
    assert {path.parent.name for path in home.glob("runs/train-*/step-*")} == left


@pytest.mark.slow
def test_forgetting_one_person_retrains_one_shard_and_nothing_afterwards(tmp_path):
    """Other shards keep their digests, the touched one is that of training without the person; after shredding nothing is trained again."""
    home = tmp_path / "home"
    assert dataworth(home, "init").returncode == 0
    path = home / "dataworth.toml"
    text = path.read_text().replace("\nshards = 1", "\nshards = 4").replace("\nslices = 1", "\nslices = 2")  # fmt: skip
    path.write_text(text.replace('\nmethod = "npo"', f'\nmethod = "{SHARDED}"'))
    assert dataworth(home, "run").returncode == 0
    forget_one(home, tmp_path / "again")
