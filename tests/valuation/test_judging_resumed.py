"""The judge as a run: killed in the middle of its retrainings it goes on, and says what an unbroken one says, bit for bit."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer_corpus import END, make_run, write_corpus

from trainer.data import TokenStore
from trainer.model import Transformer, init_parameters
from trainer.shape import ModelSpec
from trainer.spec import BatchSpec, RunSpec, save_run
from valuation import judging
from valuation.influence import TokenSet, dot

REPOSITORY = Path(__file__).parents[2]
MODEL = ModelSpec(vocab_size=END + 1, num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=16)


def digest_of(folder: Path) -> str:
    return hashlib.sha256((folder / "tokens.json").read_bytes()).hexdigest()


def start(home: Path, name: str) -> tuple[RunSpec, Path]:
    """A judge of twelve halves, with curves, on scores that lie beside it."""
    for folder, seed in (("target", 9), ("test", 10)):
        if not (home / folder).exists():
            write_corpus(home / folder, 4, dead=(), seed=seed)
    run = make_run(
        home, name, steps=0, kind="gradients", entry="valuation.judging:run", model=MODEL, batch=BatchSpec(rows=4, length=32),
        extra={
            "target": str(home / "target"), "target_digest": digest_of(home / "target"), "test": str(home / "test"),
            "test_digest": digest_of(home / "test"), "scores": str(home / "scores"), "epochs": 2, "subsets": 12, "seeds": 1,
            "top_queries": 2, "random_sets": 2, "curve_percents": [25], "curve_seeds": 2, "jobs": 1,
        },
    )  # fmt: skip
    save_run(run, home / name)
    return run, home / name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens and the scores that are to be judged."""
    home = tmp_path_factory.mktemp("judging")
    write_corpus(home / "tokens", 40)
    start(home, "first")
    train, queries = (
        TokenSet.of(TokenStore.open(home / name), 32) for name in ("tokens", "target")
    )
    (home / "scores").mkdir()
    model = Transformer(MODEL)
    init_parameters(model, 7)
    dot.scores(model, train, queries).save(home / "scores")
    return home


def test_kill_9_between_retrainings_goes_on_to_the_same_words(home: Path) -> None:
    """What was retrained before the kill is not retrained again; rows and verdict have the unbroken run's bytes."""
    run, whole = start(home, "whole")
    assert judging.run(run, whole) == 0
    run, killed = start(home, "killed")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "trainer", "--run", str(killed / "run.json")]
    process = subprocess.Popen(command, cwd=REPOSITORY, env=environment)
    until = time.monotonic() + 120
    while len(list(killed.glob("bank/*.npz"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "result.json").exists()
    before = {path: path.stat().st_mtime_ns for path in killed.glob("bank/*.npz")}
    assert len(before) < len(list(whole.glob("bank/*.npz")))
    assert judging.run(run, killed) == 0
    assert all(path.stat().st_mtime_ns == then for path, then in before.items())
    for name in (judging.JUDGEMENT_FILE, judging.ROWS_FILE):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
