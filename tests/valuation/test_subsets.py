"""A subset trains on its own records in the shared order, and the bank keeps every retraining under its own name."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from provenance.canonical import jcs
from trainer.data import IGNORE, TokenStore, write_tokens
from trainer.errors import DataError
from trainer.generate import evaluate
from trainer.spec import BatchSpec, ModelSpec, OptimSpec, RunConfig, RunSpec, no_versions, save_run
from valuation.bank import ORDER, load_utilities
from valuation.errors import ProxyError
from valuation.proxy import retrain
from valuation.subsets import Setting, fit_subset, random_subsets, retrain_subsets

VOCAB = 31
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)
REPOSITORY = Path(__file__).parents[2]


def write_folder(folder, count, seed):
    """Short records of two owners that count in threes."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        body = (rng.integers(VOCAB) + 3 * np.arange(rng.integers(4, 24))) % (VOCAB - 1)
        identity = hashlib.sha256(f"{seed} {i}".encode()).digest()
        records.append((i, identity, ("ada", "ben")[i % 2], [*body.tolist(), VOCAB - 1]))
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=records,
    )  # fmt: skip


@pytest.fixture
def setting(tmp_path):
    """Forty records, six queries, two passes."""
    return Setting(
        train_digest=write_folder(tmp_path / "train", 40, 1), target_digest=write_folder(tmp_path / "target", 6, 2),
        train=tmp_path / "train", target=tmp_path / "target", model=MODEL, optim=OptimSpec(lr=0.02, warmup_steps=2),
        batch=BatchSpec(rows=4, length=16), epochs=2,
    )  # fmt: skip


def everyone(setting):
    return np.ones(TokenStore.open(setting.train).size, dtype=bool)


def test_a_subset_trains_as_the_coalition_of_the_same_records_does(setting, tmp_path):
    """The bank of owners and the bank of records hold the same bits for the same set."""
    run_folder = tmp_path / "run"
    run_folder.mkdir()
    groups = [{"id": name, "owners": [name]} for name in ("ada", "ben")]
    (run_folder / "groups.json").write_bytes(jcs({"groups": groups}))
    extra = {"groups": "groups.json", "target": str(setting.target), "epochs": 2, "order": ORDER}
    config = RunConfig(model=MODEL, optim=setting.optim, batch=setting.batch, extra=extra)
    run = RunSpec(
        run="same", kind="proxy", entry="valuation.proxy:retrain", seed=5, tokens=str(setting.train), steps=1000,
        tokens_digest=TokenStore.open(setting.train).digest, versions=no_versions(), config=config,
    )  # fmt: skip
    save_run(run, run_folder)
    assert retrain(run, run_folder) == 0
    ada_N = np.arange(40) % 2 == 0
    found = retrain_subsets(
        setting, np.stack([~everyone(setting), ada_N, ~ada_N, everyone(setting)]), 5, tmp_path
    )
    np.testing.assert_array_equal(found.nll_MQ, load_utilities(run_folder).nll_CQ)


def test_the_model_of_a_subset_is_the_one_the_bank_measured(setting, tmp_path):
    """`fit_subset` gives the weights behind a bank file, and copies of them on the way."""
    member_N = np.arange(40) < 25
    fit = fit_subset(setting, member_N, 3, keep=(0, 2, -1))
    target = TokenStore.open(setting.target)
    nll_Q, _ = evaluate(fit.model, [target.tokens(i) for i in range(6)], 4, 16)
    bank = retrain_subsets(setting, member_N[None], 3, tmp_path)
    np.testing.assert_array_equal(bank.nll_MQ[0], nll_Q)
    assert sorted(fit.states) == [0, 2, fit.steps]
    assert fit.steps == bank.steps_M[0]
    assert fit.states[2].optimizer["step"] == 2
    assert fit.states[fit.steps].lr < fit.states[2].lr
    for name, parameter in fit.model.named_parameters():
        assert torch.equal(fit.states[fit.steps].weights[name], parameter)
    assert not torch.equal(
        fit.states[0].weights["blocks.0.ffn.w1.weight"],
        fit.states[2].weights["blocks.0.ffn.w1.weight"],
    )


def test_masking_keeps_every_place_and_every_divisor(setting):
    """A masked record loses its labels and nothing else; the sum of losses is divided as for the full set."""
    masked = dataclasses.replace(setting, leave_out="mask")
    member_N = np.arange(40) % 3 > 0
    full, part, rest = (masked.rows(m, 7) for m in (everyone(setting), member_N, ~member_N))
    np.testing.assert_array_equal(full.rows.tokens_BT, part.rows.tokens_BT)
    np.testing.assert_array_equal(full.divisor_S, part.divisor_S)
    kept, left = part.rows.labels_BT != IGNORE, rest.rows.labels_BT != IGNORE
    assert not (kept & left).any()
    np.testing.assert_array_equal(kept | left, full.rows.labels_BT != IGNORE)
    np.testing.assert_array_equal(
        full.divisor_S,
        [(full.batch(s).labels_BT != IGNORE).sum() for s in range(full.steps)],
    )


def test_a_cap_cuts_the_passes(setting):
    """No training reads more tokens than max_tokens; one below it is whole."""
    capped = dataclasses.replace(setting, epochs=50, max_tokens=333)
    few_N = np.arange(40) < 3
    assert (capped.rows(few_N, 1).rows.documents_BT >= 0).sum() == 333
    single = dataclasses.replace(setting, epochs=1, max_tokens=10_000)
    used = (single.rows(everyone(setting), 1).rows.documents_BT >= 0).sum()
    assert used == TokenStore.open(setting.train).lengths_N.sum()


def test_nobody_left_out_is_the_same_training_either_way(setting, tmp_path):
    """With all records in, masking and refilling give the same bits under two keys."""
    masked = dataclasses.replace(setting, leave_out="mask")
    both = [
        retrain_subsets(s, everyone(setting)[None], 1, tmp_path / "bank-of-two")
        for s in (setting, masked)
    ]
    np.testing.assert_array_equal(both[0].nll_MQ, both[1].nll_MQ)
    assert both[0].keys != both[1].keys


def test_masking_everything_leaves_the_untrained_model(setting, tmp_path):
    """No label, no gradient: weights move by decay only, so without decay the losses are the untrained model's."""
    still = dataclasses.replace(setting.optim, weight_decay=0.0)
    masked = dataclasses.replace(setting, leave_out="mask", optim=still)
    fit = fit_subset(masked, ~everyone(setting), 1, keep=(0,))
    for name, parameter in fit.model.named_parameters():
        assert torch.equal(parameter, fit.states[0].weights[name])


def test_processes_and_a_second_call_change_no_bit(setting, tmp_path):
    """Two processes write what one writes; a second call trains nothing; other seeds are other retrainings."""
    member_MN = random_subsets(4, 40, 0.5, np.random.default_rng(1))
    one = retrain_subsets(setting, member_MN, 1, tmp_path / "one")
    two = retrain_subsets(setting, member_MN, 1, tmp_path / "two", jobs=2)
    np.testing.assert_array_equal(one.nll_MQ, two.nll_MQ)
    assert one.keys == two.keys
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "one" / "bank").iterdir()}
    again = retrain_subsets(setting, member_MN, [1, 1, 1, 2], tmp_path / "one")
    np.testing.assert_array_equal(again.nll_MQ[:3], one.nll_MQ[:3])
    assert (again.nll_MQ[3] != one.nll_MQ[3]).all()
    now = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "one" / "bank").iterdir()}
    assert len(now) == 5
    assert now | written == now


def test_a_killed_bank_goes_on_with_the_same_bits(setting, tmp_path):
    """`kill -9` in the middle leaves whole files only; the next call ends with the bits of an unbroken run."""
    member_MN = random_subsets(60, 40, 0.5, np.random.default_rng(2))
    code = (
        "import sys, numpy as np; from pathlib import Path; from trainer.spec import *; from valuation.subsets import *;"
        "from dataclasses import replace; f = Path(sys.argv[1]);"
        "s = Setting(train=f / 'train', target=f / 'target', train_digest=sys.argv[2], target_digest=sys.argv[3], model=ModelSpec(vocab_size=31, num_layers=1, dim=8,"
        "num_heads=2, num_kv_heads=1, ffn_dim=12), optim=OptimSpec(lr=0.02, warmup_steps=2),"
        "batch=BatchSpec(rows=4, length=16), epochs=2);"
        "retrain_subsets(s, random_subsets(60, 40, 0.5, np.random.default_rng(2)), 1, f / 'killed')"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), setting.train_digest, setting.target_digest], cwd=REPOSITORY
    )  # fmt: skip
    bank, until = tmp_path / "killed" / "bank", time.monotonic() + 60
    while len(list(bank.glob("*.npz"))) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    finished = len(list(bank.glob("*.npz")))
    assert 2 <= finished < 60, "the kill should come in the middle"
    resumed = retrain_subsets(setting, member_MN[:12], 1, tmp_path / "killed")
    unbroken = retrain_subsets(setting, member_MN[:12], 1, tmp_path / "unbroken")
    np.testing.assert_array_equal(resumed.nll_MQ, unbroken.nll_MQ)


def test_every_part_of_the_setting_is_in_the_key(setting, tmp_path):
    """Model, optimiser, batch, passes, way of leaving out, data, subset and seed each change the name."""
    change = dataclasses.replace
    other = write_folder(tmp_path / "other", 40, 9)
    settings = [
        setting,
        change(setting, model=change(MODEL, ffn_dim=16)),
        change(setting, optim=OptimSpec(lr=0.01)),
        change(setting, batch=BatchSpec(rows=8, length=16)),
        change(setting, epochs=3),
        change(setting, leave_out="mask"),
        change(setting, max_tokens=100),
        change(setting, train=tmp_path / "other", train_digest=other),
        change(setting, target=tmp_path / "other", target_digest=other),
    ]
    keys = [s.key(everyone(setting), 1) for s in settings]
    keys += [setting.key(np.arange(40) > 0, 1), setting.key(everyone(setting), 2)]
    assert len(set(keys)) == len(keys)


def test_a_corpus_that_changed_is_refused(setting, tmp_path):
    """The same folder with other records is an error that names the digests, never a quiet retraining."""
    write_folder(tmp_path / "train", 40, 8)
    with pytest.raises(DataError, match=setting.train_digest):
        retrain_subsets(setting, np.ones((1, 40), bool), 1, tmp_path)


def test_random_subsets_have_one_size_and_favour_nobody():
    """Every subset has round(share N) members; each record is in a share of the subsets, within 5 standard errors."""
    member_MN = random_subsets(2000, 30, 0.4, np.random.default_rng(3))
    assert (member_MN.sum(1) == 12).all()
    error = np.sqrt(0.4 * 0.6 / 2000)
    assert np.abs(member_MN.mean(0) - 0.4).max() < 5 * error


@pytest.mark.parametrize("share", [0.0, 1.0, 0.01])
def test_a_share_of_nothing_or_all_is_refused(share):
    """Subsets that are all alike can't be ranked."""
    with pytest.raises(ProxyError, match="some"):
        random_subsets(3, 10, share, np.random.default_rng(0))


def test_mistakes_are_refused(setting, tmp_path):
    """A subset of another corpus, seeds that don't fit, no process, no pass, an unknown way of leaving out."""
    with pytest.raises(ProxyError, match=r"booleans \[40\]"):
        retrain_subsets(setting, np.ones((1, 39), bool), 1, tmp_path)
    with pytest.raises(ProxyError, match="seeds"):
        retrain_subsets(setting, everyone(setting)[None], [1, 2], tmp_path)
    with pytest.raises(ProxyError, match="jobs"):
        retrain_subsets(setting, everyone(setting)[None], 1, tmp_path, jobs=0)
    with pytest.raises(ProxyError, match="epochs"):
        dataclasses.replace(setting, epochs=0)
    with pytest.raises(ProxyError, match="max_tokens"):
        dataclasses.replace(setting, max_tokens=0)
    with pytest.raises(ProxyError, match="mask"):
        dataclasses.replace(setting, leave_out="reweight")
