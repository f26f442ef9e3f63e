"""Claims about [training] in dataworth.toml: what it says stands in run.json, for the released and gold models only."""

from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from pipelines.results import Result
from pipelines.runs import prepare_on
from pipelines.sizes import size_named
from pipelines.steps.training import model_job, plan_inputs, training_plan
from pipelines.storage.config import Config, TrainingConfig
from pipelines.storage.home import Home
from trainer import load_run
from trainer.selection import read_selection

ROOT = "a" * 64
PLAN = Result("evaluation_plan", "", "", {"digest": "p", "seeds": {"train": 7}})
TOKENS = Result(
    "tokens", "", "",
    {"digest": "1" * 64, "folder": "tokens/x", "corpus_version": "none", "record_root": ROOT, "tokenizer_digest": "2" * 64, "vocab_size": 512, "tokens": 999},
)  # fmt: skip
TARGET = Result("target", "", "", {"test_digest": "3" * 64})


def _site(path, **choices):
    config = Config(training=TrainingConfig(**choices))
    home = Home(path).create()
    return SimpleNamespace(home=home, config=config, size=size_named("tiny"), demo=False, world=1)


def _influence(site):
    """Credits of five records; the last was in no batch."""
    table = pl.DataFrame(
        {
            "record_id": [bytes([i]) * 32 for i in range(1, 6)],
            "credit": [2e-3, -1e-3, 0.0, 1e-3, 0.0],
            "steps_seen": [3, 2, 1, 1, 0],
        }
    )
    table.write_parquet(site.home.path / "influence.parquet")
    return Result("influence", "", "v1", {"files": ["influence.parquet"]})


def _run(site, planned, **changes):
    job = model_job(site, PLAN, planned, **changes)
    return load_run(prepare_on(site, job, TOKENS, TARGET, "test_digest"))


def _planned(site):
    version, values = training_plan(site, TOKENS, PLAN, _influence(site))
    return Result("training_plan", "", version, values)


def test_the_defaults_are_the_trainers(tmp_path):
    """Without [training]: AdamW, cosine, float32, one piece, no guard, no weights; the corpus root is committed."""
    site = _site(tmp_path)
    run = _run(site, _planned(site))
    assert (run.config.optim.name, run.config.optim.schedule) == ("adamw", "cosine")
    assert (run.config.precision, run.config.batch.accumulation) == ("float32", 1)
    assert run.config.guard is run.selection is None
    assert run.corpus_root == ROOT


def test_choices_reach_the_released_and_the_gold_model_only(tmp_path):
    """Every choice stands in run.json; an unlearning method keeps its own optimiser, but retains by the same weights."""
    site = _site(
        tmp_path, optimizer="muon", schedule="wsd", precision="bfloat16", accumulation=2, guard="rollback", selection="by-value"
    )  # fmt: skip
    planned = _planned(site)
    for kind in ("train", "gold", "unlearn"):
        run = _run(site, planned, kind=kind)
        found = (
            run.config.optim.name, run.config.optim.schedule, run.config.precision, run.config.batch.accumulation,
            run.config.guard.action if run.config.guard else "off",
        )  # fmt: skip
        plain = ("adamw", "cosine", "float32", 1, "off")
        assert found == (plain if kind == "unlearn" else ("muon", "wsd", "bfloat16", 2, "rollback"))
        assert run.selection.digest == planned["selection"]["digest"]


@pytest.mark.parametrize(
    ("rule", "weights"),
    [
        ("drop-negative", [10**6, 0, 10**6, 10**6, 10**6]),
        ("by-value", [2_666_666, 0, 0, 1_333_333, 10**6]),
    ],
)
def test_credits_become_the_weights_of_the_run(tmp_path, rule, weights):
    """The file that run.json names holds what the rule makes of the in-run credits; the plan says how many are left out."""
    site = _site(tmp_path, selection=rule)
    planned = _planned(site)
    run = _run(site, planned)
    read = read_selection(site.home.path / planned["selection"]["file"], run.selection.digest)
    ids_N32 = np.repeat(np.arange(1, 6, dtype=np.uint8), 32).reshape(5, 32)
    assert read.of(ids_N32).tolist() == weights
    assert planned["selection"]["left_out"] == weights.count(0)


def test_values_matter_to_the_plan_only_if_they_are_used(tmp_path):
    """New credits make a new plan when records are selected by them, and change nothing when they are not."""
    for rule, same in (("all", True), ("by-value", False)):
        site = _site(tmp_path / rule, selection=rule)
        old, new = _influence(site), Result("influence", "", "v2", {"files": []})
        inputs = [plan_inputs(site, TOKENS, PLAN, values) for values in (old, new)]
        assert (inputs[0] == inputs[1]) is same
