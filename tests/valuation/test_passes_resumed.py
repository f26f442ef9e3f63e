"""Methods whose rows are no scores: a pass over the corpus gives the method's own scores, and goes on after a kill to the same bits."""

import dataclasses
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from trainer_corpus import END, make_run, write_corpus
from trainer_processes import run_processes
from valuation_ranks import run_pass

from trainer.checkpoint import read_tensors
from trainer.data import TokenStore
from trainer.errors import EXIT_DONE, EXIT_RESUME
from trainer.inputs import initial_model
from trainer.layout import Layout
from trainer.loop import train as trained
from trainer.manifest import read_manifest
from trainer.shape import ModelSpec
from trainer.spec import BatchSpec, save_run
from valuation import passes
from valuation.errors import GradientError
from valuation.influence import Scores, TokenSet, fisher, less, logra, tracin, trak
from valuation.influence.pairing import Pass
from valuation.projection import OneSided, TwoSided
from valuation.store import Stored

MODEL = ModelSpec(vocab_size=END + 1, num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=16)
HOW = Pass(rows=4)
WEIGHTS = ["0.5", "0.25"]
METHODS = {
    "trak": {"size": 24, "damping": "0.2"}, "logra": {"size": 3}, "fisher": {"damping": "0.5"},
    "tracin": {"weights": WEIGHTS}, "less": {"weights": WEIGHTS},
}  # fmt: skip
MANY = {"trak", "tracin", "less"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, queries, and a training in float64 with checkpoints at steps 2 and 4."""
    home = tmp_path_factory.mktemp("trajectory")
    write_corpus(home / "tokens", 30)
    write_corpus(home / "queries", 3, dead=(), seed=9)
    run = make_run(
        home, "training", steps=4, every=2, model=MODEL, batch=BatchSpec(rows=4, length=32), precision="float64"
    )  # fmt: skip
    save_run(run, home / "training")
    assert trained(run, home / "training") == EXIT_DONE
    return home


def start(home: Path, name: str, method: str, *, world: int = 1, rows: int = 4, **extra: object):
    """The pass of a method, over both checkpoints where it takes several."""
    steps = [home / "training" / f"step-{number}" for number in (2, 4)]
    roots = [read_manifest(step).root for step in steps]
    more = {"checkpoints": [[str(steps[1]), roots[1]]]} if method in MANY else {}
    run = make_run(
        home, name, steps=0, layout=Layout(dp_replicate=world), kind="gradients", entry="valuation.passes:run", model=MODEL,
        batch=BatchSpec(rows=rows, length=32), precision="float64", init=str(steps[0]), init_root=roots[0],
        extra={"method": method, "queries": str(home / "queries"), **METHODS[method], **more, **extra},
    )  # fmt: skip
    save_run(run, home / name)
    return run, home / name


def own_scores(home: Path, method: str) -> Scores:
    """The method as a function, on the same models, records and queries."""
    run, directory = start(home, f"own-{method}", method)
    models = [
        initial_model(dataclasses.replace(run, init=folder, init_root=root), directory)
        for folder, root in [(run.init, run.init_root), *run.config.extra.get("checkpoints", [])]
    ]
    train, queries = (
        TokenSet.of(TokenStore.open(home / name), 32) for name in ("tokens", "queries")
    )
    if method == "trak":
        return trak.scores(models, train, queries, projection=OneSided(run.seed, 24), ridge=0.2, how=HOW)  # fmt: skip
    if method == "logra":
        return logra.scores(models[0], train, queries, projection=TwoSided(run.seed, 3, 3), how=HOW)
    if method == "fisher":
        return fisher.scores(models[0], train, queries, damping=0.5, how=HOW)
    if method == "tracin":
        return tracin.scores(models, train, queries, weights=[0.5, 0.25], how=HOW)
    states = []
    for number, model, lr in zip((2, 4), models, (0.5, 0.25), strict=True):
        state = dict(read_tensors(home / "training" / f"step-{number}"))
        moments = [
            {name: state[f"optim.{name}.{kind}"] for name, _ in model.named_parameters()}
            for kind in ("exp_avg", "exp_avg_sq")
        ]
        optim = run.config.optim
        states.append(
            less.AdamCheckpoint(
                model=model, lr=lr, first=moments[0], second=moments[1], count=number, betas=optim.betas, eps=optim.eps
            )
        )  # fmt: skip
    return less.scores(states, train, queries, how=HOW)


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_gives_the_methods_own_scores(home: Path, method: str) -> None:
    """Within rounding, bound to the same data and weights, under 1 and 2 processes; nothing of the left side is left."""
    want = own_scores(home, method)
    for world in (1, 2):
        run, directory = start(home, f"{method}-{world}", method, world=world)
        answers = run_processes(world, home / f"join-{method}-{world}", run_pass, run, directory)
        assert answers == [EXIT_DONE] * world
        found = Scores.load(directory)
        found.require(want.binding)
        assert found.record_ids == want.record_ids
        size = np.abs(want.scores_QN).max()
        np.testing.assert_allclose(found.scores_QN, want.scores_QN, rtol=1e-8, atol=1e-9 * size)
        assert sorted(path.name for path in directory.iterdir() if "part" in path.name) == []
        assert not list((directory / "scores").glob("left*"))


@pytest.mark.parametrize("method", METHODS)
def test_a_pass_that_was_stopped_goes_on_to_the_same_bits(
    home: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finished blocks are not made again, and rows and scores are those of an unbroken run, bit for bit."""
    monkeypatch.setattr("valuation.rowwise.MAX_FISHER_BLOCK", 8)
    run, whole = start(home, f"{method}-whole", method, rows=2)
    assert passes.run(run, whole) == EXIT_DONE
    run, stopped = start(home, f"{method}-stopped", method, rows=2)
    block, calls = passes._block, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return block(*arguments)

    monkeypatch.setattr(passes, "_block", interrupted)
    assert passes.run(run, stopped) == EXIT_RESUME
    assert not (stopped / "result.json").exists()
    assert passes.run(run, stopped) == EXIT_DONE
    first, second = (Stored.open(directory / "scores") for directory in (whole, stopped))
    assert first.digest == second.digest
    assert (whole / "scores.npz").read_bytes() == (stopped / "scores.npz").read_bytes()
    assert len(calls) > 3


@pytest.mark.parametrize(
    ("method", "extra", "message"),
    [
        ("tracin", {"weights": ["1"]}, "expected one for each of 2 models, got 1"),
        ("less", {"weights": ["1", "much"]}, "weights: expected a decimal string, got 'much'"),
        ("logra", {"steps": 3}, "config.extra.steps: expected with ekfac_cg only, got it with logra"),
        ("fisher", {"weights": ["1"]}, "expected with less, tracin only"),
        ("trak", {"size": 4000, "damping": "0"}, "ridge: expected a number above 0 with 4000 features"),
    ],
)  # fmt: skip
def test_a_setting_of_another_method_is_refused(
    home: Path, method: str, extra: dict, message: str
) -> None:
    """Nothing is silently left aside, and what a method cannot do it says before it has cost a pass."""
    run, directory = start(home, f"bad-{method}", method, **extra)
    with pytest.raises(GradientError, match=message):
        passes.run(run, directory)
