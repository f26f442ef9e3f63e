"""Several buyers' targets, and several seeds, in one run: no number of one depends on another, nothing is trained twice."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest

from provenance.canonical import jcs
from trainer.data import TokenStore, write_tokens
from trainer.errors import DataError
from trainer.spec import (
    BatchSpec,
    ModelSpec,
    OptimSpec,
    RunConfig,
    RunSpec,
    no_versions,
    save_run,
    with_extra,
)
from valuation import proxy
from valuation.bank import ORDER, bank_file, load_seeds, load_utilities, read_bank
from valuation.errors import ProxyError, UtilityError
from valuation.proxy import retrain

VOCAB = 31
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)


def tokens(folder, count, seed, step):
    """Texts that count in steps, of owners a and b in turn."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        body = (rng.integers(VOCAB - 1) + step * np.arange(rng.integers(4, 24))) % (VOCAB - 1)
        rows.append((i, hashlib.sha256(f"{seed} {i}".encode()).digest(), "ab"[i % 2], [*body.tolist(), VOCAB - 1]))  # fmt: skip
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1, records=rows
    )  # fmt: skip


def prepared(directory, *others, target="target"):
    """A run on two owners, with a target and others beside it."""
    (directory / "run").mkdir(parents=True, exist_ok=True)
    train = tokens(directory / "tokens", 24, seed=1, step=3)
    digests = {name: tokens(directory / name, count, seed=count, step=step) for name, count, step in (("target", 9, 3), ("second", 5, 2), ("third", 7, 5))}  # fmt: skip
    groups = [{"id": name, "owners": [name]} for name in "ab"]
    (directory / "run/groups.json").write_bytes(jcs({"groups": groups}))
    extra = {"groups": "groups.json", "target": f"../{target}", "target_digest": digests[target], "order": ORDER}  # fmt: skip
    if others:
        extra["others"] = [[f"../{name}", digests[name]] for name in others]
    run = RunSpec(
        run="proxy-test", kind="proxy", entry="valuation.proxy:retrain", seed=5, tokens="../tokens", tokens_digest=train, steps=4,
        versions=no_versions(),
        config=RunConfig(model=MODEL, optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=4, length=16), extra=extra),
    )  # fmt: skip
    save_run(run, directory / "run")
    return run, directory / "run"


def trained(directory, *others, target="target"):
    """The folder of a finished run."""
    run, folder = prepared(directory, *others, target=target)
    assert retrain(run, folder) == 0
    return folder


def test_each_target_has_the_losses_that_it_has_alone(tmp_path):
    """Parts of a bank of three targets are bit for bit the banks of three runs with one; without a part the run's own is meant."""
    folder = trained(tmp_path / "all", "second", "third")
    for part, name in enumerate(("target", "second", "third")):
        alone = load_utilities(trained(tmp_path / name, target=name))
        found = load_utilities(folder, part)
        for column in ("nll_CQ", "tokens_Q", "index_Q", "coalitions_C"):
            np.testing.assert_array_equal(getattr(found, column), getattr(alone, column))
    np.testing.assert_array_equal(load_utilities(folder).nll_CQ, load_utilities(folder, 0).nll_CQ)
    with pytest.raises(UtilityError, match="not asked for that target"):
        load_utilities(folder, 3)


def test_targets_asked_for_together_are_trained_for_once(tmp_path, monkeypatch):
    """Three targets take the trainings of one."""
    counted = []
    fit = proxy.fit_rows
    monkeypatch.setattr(proxy, "fit_rows", lambda *given: counted.append(1) or fit(*given))
    trained(tmp_path / "one")
    assert len(counted) == 4
    trained(tmp_path / "three", "second", "third")
    assert len(counted) == 8


def test_a_target_that_is_added_later_is_another_bank(tmp_path):
    """A bank that lacks a target is not taken for one that has it, and a change in any target's numbers is found."""
    run, folder = prepared(tmp_path)
    assert retrain(run, folder) == 0
    key = str(np.load(bank_file(folder, 1))["key"])
    assert read_bank(bank_file(folder, 1), key) is not None
    digest = TokenStore.open(tmp_path / "second").digest
    assert retrain(with_extra(run, others=[["../second", digest]]), folder) == 0
    assert str(np.load(bank_file(folder, 1))["key"]) != key
    content = dict(np.load(bank_file(folder, 1)))
    content["nll_Q"][-1] += 1e-6
    np.savez(bank_file(folder, 1), **content)
    with pytest.raises(UtilityError, match="other ones"):
        load_utilities(folder, 0)


def test_another_target_than_the_committed_one_is_refused(tmp_path):
    """A further target is opened by its digest, as the first is."""
    run, folder = prepared(tmp_path, "second")
    others = [["../second", "0" * 64]]
    with pytest.raises(DataError):
        retrain(with_extra(run, others=others), folder)


def test_each_seed_has_the_losses_that_a_run_of_it_alone_leaves(tmp_path, monkeypatch):
    """Banks under further seeds are bit for bit, keys too, those of runs with that seed; a file that is lost is trained again alone; targets go with seeds."""
    run, folder = prepared(tmp_path / "all", "second")
    run = with_extra(run, seeds=[11, 8])
    assert retrain(run, folder) == 0
    found = load_seeds(folder)
    assert len({one.nll_CQ.tobytes() for one in found}) == 3
    for seed, one in zip((5, 8, 11), found, strict=True):
        own, alone = prepared(tmp_path / str(seed), "second")
        assert retrain(dataclasses.replace(own, seed=seed), alone) == 0
        np.testing.assert_array_equal(one.nll_CQ, load_utilities(alone).nll_CQ)
        name = 3 if seed == 5 else f"3-{seed}"
        assert np.load(bank_file(folder, name))["key"] == np.load(bank_file(alone, 3))["key"]
        further = None if seed == 5 else seed
        np.testing.assert_array_equal(load_utilities(folder, 1, further).nll_CQ, load_utilities(alone, 1).nll_CQ)  # fmt: skip
    told = json.loads((folder / "result.json").read_bytes())
    assert set(told["seeds"]) == {"8", "11"}
    bank_file(folder, "2-8").unlink()
    calls = []
    train = proxy.train_coalition
    monkeypatch.setattr(proxy, "train_coalition", lambda job: calls.append(job) or train(job))
    assert retrain(run, folder) == 0
    assert [(job.coalition, job.seed) for job in calls] == [(2, 8)]
    assert json.loads((folder / "result.json").read_bytes()) == told


def test_seeds_that_cannot_be_meant_are_refused(tmp_path):
    """A seed twice, the run's own among the further ones, one that was not trained, and a bank file of another seed under its name."""
    run, folder = prepared(tmp_path)
    for seeds, said in (([8, 8], "different seeds"), ([5], "got it twice"), ([-1], "0 or more")):
        with pytest.raises(ProxyError, match=said):
            retrain(with_extra(run, seeds=seeds), folder)
    assert retrain(with_extra(run, seeds=[8]), folder) == 0
    with pytest.raises(UtilityError, match="not asked for that seed"):
        load_utilities(folder, 0, 9)
    bank_file(folder, "1-8").write_bytes(bank_file(folder, 1).read_bytes())
    with pytest.raises(UtilityError, match="other ones"):
        load_seeds(folder)
