"""The judge as a run: killed in the middle of its retrainings it goes on, and says what an unbroken one says, bit for bit."""

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from trainer_corpus import END, make_run, write_corpus

from trainer.data import TokenStore
from trainer.model import Transformer, init_parameters
from trainer.shape import ModelSpec
from trainer.spec import BatchSpec, Excluded, RunSpec, save_run
from valuation import inrun, judging
from valuation.influence import TokenSet, ekfac
from valuation.influence.scores import Scores
from valuation.subsets import Setting, random_subsets

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
            "test_digest": digest_of(home / "test"), "scores": str(home / "scores"), "epochs": 2,
            "subsets": 12, "seeds": 1, "again": 10, "top_queries": 2, "random_sets": 2, "curve_percents": [25], "curve_seeds": 2, "planted": 4, "jobs": 1,
        },
    )  # fmt: skip
    save_run(run, home / name)
    return run, home / name


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, and the scores that are to be judged."""
    home = tmp_path_factory.mktemp("judging")
    write_corpus(home / "tokens", 40)
    start(home, "first")
    train, queries = (
        TokenSet.of(TokenStore.open(home / name), 32) for name in ("tokens", "target")
    )
    (home / "scores").mkdir()
    model = Transformer(MODEL)
    init_parameters(model, 7)
    ekfac.scores(model, train, queries).save(home / "scores")
    return home


def setting_of(home: Path, run: RunSpec) -> Setting:
    """What the run's retrainings share."""
    return Setting(
        train=home / "tokens", train_digest=run.tokens_digest, target=home / "target", target_digest=digest_of(home / "target"),
        model=MODEL, optim=run.config.optim, batch=run.config.batch, epochs=2,
    )  # fmt: skip


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
    for name in (judging.JUDGEMENT_FILE, judging.ROWS_FILE, judging.PLANTED_FILE):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_in_run_credit_is_judged_on_the_target_as_a_whole(home: Path) -> None:
    """A row for the credits and none for a query; the ceiling stands beside all; what the rows don't give is named."""
    run, judged = start(home, "with-credit")
    assert judging.run(run, judged) == 0
    document = json.loads((judged / judging.JUDGEMENT_FILE).read_bytes())
    assert list(document["whole"]) == [
        "bm25",
        document["method"],
        "inrun.trapezoid",
        "random",
    ]  # JCS sorts
    assert document["method"].startswith("ekfac(")
    assert list(document["planted"]["gains"]) == ["duplicate", "noise", "shuffled"]
    assert "inrun.trapezoid" not in document["beside"]
    assert document["ceiling"]["subsets"] == document["again"] == 10
    rows = (judged / judging.ROWS_FILE).read_bytes()
    planted = (judged / judging.PLANTED_FILE).read_bytes()
    assert judging.contradictions(document, rows, planted) == []
    table = pq.read_table(io.BytesIO(rows)).to_pylist()
    of_credit = [row for row in table if row["method"] == "inrun.trapezoid"]
    assert {row["query"] for row in of_credit} == {judging.WHOLE}
    setting = setting_of(home, run)
    ((_, credit_N),) = judging.in_run_credits(
        Scores.load(home / "scores"), setting, run.seed
    ).items()
    half_MN = random_subsets(12, len(credit_N), 0.5, np.random.default_rng(run.seed))
    assert [row["value"] for row in of_credit] == pytest.approx((half_MN @ credit_N).tolist())
    for place, what in (("whole", "LDS of inrun.trapezoid"), ("ceiling", "ceiling, each")):
        key = "inrun.trapezoid" if place == "whole" else "each"
        better = document[place] | {key: document[place][key] | {"estimate": "0.876543"}}
        (said,) = judging.contradictions(document | {place: better}, rows, planted)
        assert said.startswith(what)
    (said,) = judging.contradictions(document | {"format": 3}, rows)
    assert said.startswith("judged by an earlier version, format: expected 4, got 3")
    (said,) = judging.contradictions(document | {"format": 5}, rows)
    assert said.startswith("format: expected 4, got 5")
    # Neither the rows nor the figures of planted records can be left out alone.
    for pair in ((document, None), (document | {"planted": "none"}, planted)):
        (said,) = judging.contradictions(pair[0], rows, pair[1])
        assert said.startswith("planted records: expected planted.parquet")
    better = document["planted"] | {"auc": document["planted"]["auc"] | {"noise": document["planted"]["auc"]["noise"] | {"estimate": "0.999999"}}}  # fmt: skip
    (said,) = judging.contradictions(document | {"planted": better}, rows, planted)
    assert said.startswith("planted records, AUC of noise, estimate: expected")


def test_a_training_on_the_scored_records_alone_credits_them_and_nobody_else(home: Path) -> None:
    """What the trainer's own in-run entry gives with all others excluded, as long as a retraining: its sums, record by record."""
    run, _ = start(home, "alone")
    scores = Scores.load(home / "scores")
    part = replace(
        scores, scores_QN=scores.scores_QN[:, ::2].copy(), train_index_N=scores.train_index_N[::2], record_ids=scores.record_ids[::2]
    )  # fmt: skip
    setting = setting_of(home, run)
    ((name, credit_N),) = judging.in_run_credits(part, setting, 3).items()
    assert name == "inrun.trapezoid"
    assert (credit_N != 0).all()
    store = TokenStore.open(home / "tokens")
    steps = -(-2 * int(store.lengths_N[part.train_index_N].sum()) // (4 * 32))
    left_out = home / "left-out.txt"
    ids = [store.record_id(int(index)) for index in store.live_N]
    left_out.write_text("".join(i.hex() + "\n" for i in ids if i not in part.record_ids))
    optim = replace(run.config.optim, warmup_steps=min(run.config.optim.warmup_steps, steps // 5))
    same = make_run(
        home, "entry", steps=steps, kind="gradients", entry="valuation.inrun:train", model=MODEL, batch=BatchSpec(rows=4, length=32),
        seed=3, optim=optim, excluded=Excluded(file=str(left_out), digest=hashlib.sha256(left_out.read_bytes()).hexdigest()),
        extra={"target": str(home / "target"), "target_digest": digest_of(home / "target"), "target_rows": 1000},
    )  # fmt: skip
    save_run(same, home / "entry")
    assert inrun.train(same, home / "entry") == 0
    books = {row["index"]: row["credit"] for row in pq.read_table(home / "entry" / inrun.INFLUENCE_FILE).to_pylist()}  # fmt: skip
    assert credit_N.tolist() == pytest.approx([books[int(i)] for i in part.train_index_N], rel=1e-4, abs=1e-7)  # fmt: skip
    one = replace(
        part, scores_QN=part.scores_QN[:1].copy(), query_index_Q=part.query_index_Q[:1], query_ids=part.query_ids[:1]
    )  # fmt: skip
    ((_, other_N),) = judging.in_run_credits(one, setting, 3).items()
    assert np.abs(other_N - credit_N).max() > 1e-3 * np.abs(credit_N).max(), (
        "credits are for the judged queries"
    )
