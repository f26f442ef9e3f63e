"""A pass over a corpus gives the same scores for 1, 2 and 4 processes, and the same bits after a kill."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from trainer_corpus import END, make_run, write_corpus
from trainer_processes import run_processes
from valuation_ranks import all_scores, run_pass

from trainer.data import TokenStore
from trainer.errors import EXIT_DONE, EXIT_RESUME
from trainer.inputs import initial_model
from trainer.layout import Layout
from trainer.shape import ModelSpec
from trainer.spec import BatchSpec, save_run
from valuation import passes
from valuation.errors import GradientError, HeldOutError
from valuation.influence import Scores, TokenSet, ekfac
from valuation.influence.pairing import Pass
from valuation.store import Stored

REPOSITORY = Path(__file__).parents[2]
SMALL = ModelSpec(vocab_size=97, num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=16)


def start(home, name, *, count=24, queries=3, query_seed=9, layout=None, rows=2, **extra):
    """A run over `count` records in blocks of about `rows` rows, in float64."""
    home.mkdir(exist_ok=True, parents=True)
    if not (home / "tokens").exists():
        write_corpus(home / "tokens", count)
    if not (home / f"queries{query_seed}").exists():
        write_corpus(home / f"queries{query_seed}", queries, dead=(), seed=query_seed)
    run = make_run(
        home, name, steps=0, layout=layout, kind="gradients", entry="valuation.passes:run",
        model=dataclasses.replace(SMALL, vocab_size=END + 1), batch=BatchSpec(rows=rows, length=32), precision="float64",
        extra={"method": "ekfac", "queries": str(home / f"queries{query_seed}"), **extra},
    )  # fmt: skip
    directory = home / name
    save_run(run, directory)
    return run, directory


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_method_is_the_same_for_any_number_of_processes(tmp_path, world):
    """No score is off by the number of processes, or by the rounding of more than 1e-9 of the largest."""
    one = all_scores(1)
    for rank, answer in enumerate(run_processes(world, tmp_path / "join", all_scores, world)):
        for name, scores in one.items():
            error = np.abs(answer[name] - scores).max() / np.abs(scores).max()
            assert error < 1e-9, (rank, name, error)


def test_a_pass_writes_the_methods_own_scores(tmp_path):
    """Store, scores.npz and `ekfac.scores` agree, for 1, 2 and 4 processes; ids and binding stand beside them."""
    found = {}
    for world in (1, 2, 4):
        layout = Layout(dp_replicate=world)
        run, directory = start(tmp_path, f"world{world}", rows=4, layout=layout)
        answers = run_processes(world, tmp_path / f"join{world}", run_pass, run, directory)
        assert answers == [EXIT_DONE] * world
        found[world] = Scores.load(directory)
        np.testing.assert_array_equal(
            Stored.open(directory / "scores").values.T, found[world].scores_QN
        )
        assert not (directory / "scores.part").exists()
        result = json.loads((directory / "result.json").read_bytes())
        assert result["status"] == "done"
        assert result["records"] == 22  # 24 without two tombstones
    run, directory = start(tmp_path, "world1", rows=4)
    train = TokenSet.of(TokenStore.open(tmp_path / "tokens"), 32)
    queries = TokenSet.of(TokenStore.open(tmp_path / "queries9"), 32)
    want = ekfac.scores(initial_model(run, directory), train, queries, how=Pass(rows=4))
    for scores in found.values():
        scores.require(want.binding)
        assert scores.record_ids == train.ids
        np.testing.assert_allclose(
            scores.scores_QN, want.scores_QN, rtol=1e-9, atol=1e-10 * np.abs(want.scores_QN).max()
        )


def test_kill_9_in_the_middle_goes_on_to_the_same_bits(tmp_path):
    """The process dies with some blocks on the disk; the same command finishes, and the store's digest is the unbroken run's."""
    run, directory = start(tmp_path, "unbroken", count=90, rows=1)
    assert passes.run(run, directory) == EXIT_DONE
    run, killed = start(tmp_path, "killed", count=90, rows=1)
    command = [sys.executable, "-m", "trainer", "--run", str(killed / "run.json")]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
    journal, deadline = killed / "scores.part" / "done-0", time.monotonic() + 120
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 6):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    blocks = len(json.loads((killed / "scores.part" / "store.json").read_bytes())["blocks"])
    done = journal.read_text().split("\n")
    assert 0 < len([line for line in done if line]) < blocks
    assert not (killed / "result.json").exists()
    with pytest.raises(GradientError, match="unfinished"):
        Stored.open(killed / "scores")
    journal_before = journal.read_bytes()
    counted = []
    block = passes._block
    try:
        passes._block = lambda *a: (counted.append(1), block(*a))[1]
        assert passes.run(run, killed) == EXIT_DONE
    finally:
        passes._block = block
    assert len(counted) == blocks - sum(
        len(line.split()) == 2 for line in journal_before.decode().splitlines()
    )
    assert Stored.open(killed / "scores").digest == Stored.open(directory / "scores").digest
    assert (killed / "scores.npz").read_bytes() == (directory / "scores.npz").read_bytes()


def test_sigterm_ends_after_the_block_and_goes_on(tmp_path, monkeypatch):
    """Exit code 75 with the finished blocks kept; another checkpoint would have started anew."""
    run, directory = start(tmp_path, "stopped", rows=1)
    block, calls = passes._block, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return block(*arguments)

    monkeypatch.setattr(passes, "_block", interrupted)
    assert passes.run(run, directory) == EXIT_RESUME
    assert len(calls) == 3
    assert passes.run(run, directory) == EXIT_DONE
    whole = json.loads((directory / "scores" / "store.json").read_bytes())["blocks"]
    assert len(calls) == len(whole)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"method": "magic"}, "config.extra.method"),
        ({"damping": "much"}, "decimal string"),
        ({"damping": "0"}, "damping"),
        ({"seed": 3}, "config.extra"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path, extra, message):
    """Each names the setting."""
    run, directory = start(tmp_path, "bad", **extra)
    with pytest.raises(GradientError, match=message):
        passes.run(run, directory)


def test_held_out_text_that_is_trained_on_is_refused(tmp_path):
    """Found by the tokens' fingerprint, though index and id differ."""
    run, directory = start(tmp_path, "leak", query_seed=0)  # the records' own seed
    with pytest.raises(HeldOutError, match="got 3 of queries"):
        passes.run(run, directory)
    layout = Layout(dp_shard=2)
    run, directory = start(tmp_path, "sliced", layout=layout)
    with pytest.raises(GradientError, match="dp_replicate"):
        passes.run(run, directory)
