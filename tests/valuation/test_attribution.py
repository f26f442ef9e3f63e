"""Influence at a checkpoint, as a run: bound to what it is of, refused when the questions were in the training."""

import dataclasses
import hashlib
import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from trainer.data import TokenStore, write_tokens
from trainer.errors import CheckpointError, DataError
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
from valuation.errors import GradientError, HeldOutError
from valuation.influence.attribution import owner_table, record_table, run, sample
from valuation.influence.scores import Binding, Scores
from valuation.inrun import train

VOCAB = 13
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)


def corpus(folder, count, seed, start=0):
    """Records of 18 to 24 tokens by two owners; the draws of `seed`, from the `start`-th record on."""
    rng = np.random.default_rng(seed)
    drawn = [
        [*rng.integers(0, VOCAB - 1, int(rng.integers(18, 24))).tolist(), VOCAB - 1]
        for _ in range(start + count)
    ]
    records = [
        (i, hashlib.sha256(f"{folder.name} {i}".encode()).digest(), ("ann", "bob")[i % 2], tokens)
        for i, tokens in enumerate(drawn[start:])
    ]
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=records,
    )  # fmt: skip


def scored(folder):
    """A credited run, and the run that scores records at its checkpoint; neither is started."""
    tokens = corpus(folder / "tokens", 12, seed=1)
    target = corpus(folder / "target", 4, seed=2)
    config = RunConfig(
        model=MODEL, optim=OptimSpec(lr=0.01, warmup_steps=1), batch=BatchSpec(rows=2, length=24),
        extra={"target": "../target", "target_digest": target},
    )  # fmt: skip
    first = RunSpec(
        run="credit", kind="gradients", entry="valuation.inrun:train", seed=5, tokens="../tokens", tokens_digest=tokens, steps=3,
        versions=no_versions(), config=config,
    )  # fmt: skip
    save_run(first, folder / "credit")
    assert train(first, folder / "credit") == 0
    credited = json.loads((folder / "credit" / "result.json").read_bytes())
    extra = config.extra | {"record_rows": 6, "query_rows": 9}
    second = dataclasses.replace(
        first, run="scores", entry="valuation.influence.attribution:run", steps=0, init=f"../credit/{credited['checkpoint']}",
        init_root=credited["checkpoint_root"], config=dataclasses.replace(config, extra=extra),
    )  # fmt: skip
    (folder / "scores").mkdir()
    return second, credited


def test_a_run_scores_the_checkpoint_it_names(tmp_path):
    """Scores, table and result agree, are bound to checkpoint and tokenizer, and a foreign binding is refused by name."""
    spec, credited = scored(tmp_path)
    assert run(spec, tmp_path / "scores") == 0
    result = json.loads((tmp_path / "scores" / "result.json").read_bytes())
    assert result["binding"]["checkpoint_root"] == credited["checkpoint_root"]
    assert result["binding"]["tokenizer_digest"] == "0" * 64
    binding = Binding(**result["binding"])
    found = Scores.load(tmp_path / "scores" / "scores", binding)
    other = dataclasses.replace(binding, checkpoint_root="f" * 64)
    with pytest.raises(GradientError, match="checkpoint_root"):
        Scores.load(tmp_path / "scores" / "scores", other)
    table = pq.read_table(tmp_path / "scores" / "records.parquet")
    assert table.num_rows == result["records"] < 12
    store = TokenStore.open(tmp_path / "target")
    labels = sum(int(store.lengths_N[int(i)]) - 1 for i in found.query_index_Q)
    np.testing.assert_allclose(table["value"].to_numpy(), found.totals_N() / labels / 12, rtol=1e-9)
    apart = (table["ci_low"].to_numpy() > 0) | (table["ci_high"].to_numpy() < 0)
    distinct = np.array(table["distinguishable"].to_pylist())
    assert not (distinct & ~apart).any(), "what survives the correction has an interval without 0"
    assert result["distinguishable"] == distinct.sum()
    owners = pq.read_table(tmp_path / "scores" / "owners.parquet")
    assert set(owners["owner"].to_pylist()) == {"ann", "bob"}


def test_other_inputs_than_named_are_refused(tmp_path):
    """Another checkpoint, target or tokenizer than the run names, and missing settings, are errors; nothing is left behind."""
    spec, _ = scored(tmp_path)
    folder = tmp_path / "scores"
    with pytest.raises(CheckpointError):
        run(dataclasses.replace(spec, init_root="f" * 64), folder)
    altered = dataclasses.replace(
        spec.config, extra=spec.config.extra | {"target_digest": "f" * 64}
    )
    with pytest.raises(DataError, match="digest"):
        run(dataclasses.replace(spec, config=altered), folder)
    with pytest.raises(DataError, match="tokenizer"):
        run(dataclasses.replace(spec, versions=no_versions(tokenizer="1" * 64)), folder)
    bare = dataclasses.replace(spec.config, extra={"target": "../target"})
    with pytest.raises(GradientError, match="query_rows"):
        run(dataclasses.replace(spec, config=bare), folder)
    assert not (folder / "result.json").exists()


def test_questions_from_the_training_are_refused(tmp_path):
    """A held-out set that is, token by token, the training's own is found by its fingerprints."""
    spec, _ = scored(tmp_path)
    digest = TokenStore.open(tmp_path / "tokens").digest
    spec = with_extra(spec, target="../tokens", target_digest=digest)
    with pytest.raises(HeldOutError, match="of target with the tokens"):
        run(spec, tmp_path / "scores")


def test_samples_are_nested_and_never_too_small(tmp_path):
    """A larger sample holds the smaller; `least` records are taken whatever they fill."""
    corpus(tmp_path / "tokens", 12, seed=1)
    store = TokenStore.open(tmp_path / "tokens")
    small, large = sample(store, 3, 60), sample(store, 3, 150)
    assert small == large[: len(small)]
    assert len(small) < len(large)
    assert len(sample(store, 3, 1)) == 1
    assert len(sample(store, 3, 1, least=2)) == 2
    assert large[0] not in sample(store, 3, 150, {store.record_id(large[0])})


def test_tables_are_ratios_and_means():
    """A record's value is nats over tokens; equal rates have no error; an owner's is the mean over its records."""
    scores = Scores(
        scores_QN=np.array([[2.0, -1.0, 4.0], [4.0, 5.0, 8.0]]), query_index_Q=np.arange(2), train_index_N=np.arange(3),
        query_ids=(bytes(32), b"1" * 32), record_ids=(bytes(32), b"1" * 32, b"2" * 32), method="m",
        binding=Binding("a", "b", "c", "d", "e"),
    )  # fmt: skip
    labels_Q = np.array([10, 20])
    table = record_table(scores, labels_Q)
    np.testing.assert_allclose(table["value"], [0.2, 4 / 30, 0.4])
    assert table["se"][0] == pytest.approx(0, abs=1e-12)
    assert table["distinguishable"].tolist() == [True, False, True]
    owners = owner_table(scores, labels_Q, ["x", "y", "x"], ["p", "q"])
    found = {
        (o, t): v
        for o, t, v in zip(owners["owner"], owners["target_owner"], owners["value"], strict=True)
    }
    assert found == pytest.approx(
        {("x", "p"): 0.3, ("x", "q"): 0.3, ("y", "p"): -0.1, ("y", "q"): 0.25}
    )
