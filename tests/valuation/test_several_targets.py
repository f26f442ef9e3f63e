"""Several buyers' targets in one run: every model is measured on each, no number of one depends on another, nothing is trained twice."""

import hashlib

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
from valuation.bank import ORDER, bank_file, load_utilities, read_bank
from valuation.errors import UtilityError
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
