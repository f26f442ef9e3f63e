"""Claims about a run: its files, its recovery, and what it accepts from outside."""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal

import pytest
import torch
from trainer_corpus import make_run, record_id

from trainer.checkpoint import load_model, newest, read_tensors, verify
from trainer.data import BatchPlan
from trainer.errors import (
    EXIT_DONE,
    EXIT_NUMERICAL,
    EXIT_RESUME,
    CheckpointError,
    DataError,
    SpecError,
)
from trainer.inputs import batch_plan, initial_model
from trainer.loop import fit, train
from trainer.objective import LanguageModelling
from trainer.root import state_root
from trainer.spec import Excluded, Layout, run_digest, save_run

STEPS = 12


def _lines(directory, name="progress.jsonl"):
    return [json.loads(line) for line in (directory / name).read_text().splitlines()]


def _start(home, name="r", **fields):
    run = make_run(home, name, **({"steps": STEPS, "every": 4} | fields))
    save_run(run, home / name)
    return run, home / name


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 steps that nothing interrupted: (home, run, directory)."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("loop")
    run, directory = _start(home)
    assert train(run, directory) == EXIT_DONE
    return home, run, directory


def _same_end(directory, other):
    assert verify(newest(directory)).root == verify(newest(other)).root
    assert (directory / "windows.jsonl").read_bytes() == (other / "windows.jsonl").read_bytes()
    assert (directory / "result.json").read_bytes() == (other / "result.json").read_bytes()
    losses = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in _lines(d)]
        for d in (directory, other)
    ]
    assert losses[0] == losses[1]


def test_a_run_leaves_exactly_its_files(whole):
    """INTERFACES 4: run.json, progress, windows, phases, step-N with manifest, result; nothing else."""
    _, _, directory = whole
    assert sorted(path.name for path in directory.iterdir()) == [
        "phases.json", "progress.jsonl", "result.json", "run.json", "step-12", "step-8", "timings.jsonl",
        "windows.jsonl",
    ]  # fmt: skip
    assert (directory / "step-12" / "manifest.json").is_file()


def test_progress_has_one_line_per_step_and_the_loss_falls(whole):
    """Lines 1..12 with the agreed fields; the model learns."""
    lines = _lines(whole[2])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert {"step", "loss", "tokens_per_s", "rss_bytes", "time"} <= set(line)
        assert line["rss_bytes"] > 2**20
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3


def test_result_is_complete_and_consistent(whole):
    """result.json names run, state, loss and tokens by what can be checked; it was written last."""
    _, run, directory = whole
    result = json.loads((directory / "result.json").read_bytes())
    assert result == {
        "format": 1, "run": "r", "kind": "train", "status": "done", "steps": STEPS, "checkpoint": "step-12",
        "checkpoint_root": verify(directory / "step-12").root, "run_digest": run_digest(run),
        "tokens_digest": run.tokens_digest, "final_loss": repr(_lines(directory)[-1]["loss"]),
    }  # fmt: skip
    times = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert times["result.json"] == max(times[name] for name in times if "." in name)


def test_windows_join_states_and_name_their_records(whole):
    """Windows cover all steps without gap, each begins where the last ended, records are those of the batches."""
    from provenance.hashing import leaf_hash
    from provenance.merkle import root_of

    _, run, directory = whole
    windows, plan = _lines(directory, "windows.jsonl"), batch_plan(run, directory)
    assert [(w["first_step"], w["last_step"]) for w in windows] == [(1, 4), (5, 8), (9, 12)]
    for before, after in itertools.pairwise(windows):
        assert before["state_digest_after"] == after["state_digest_before"]
    assert windows[-1]["state_digest_after"] == verify(directory / "step-12").root
    optim = {name: one for name, one in read_tensors(directory / "step-12") if "optim." in name}
    assert windows[-1]["optimizer_digest_after"] == state_root(optim)
    assert len({w["optimizer_digest_after"] for w in windows}) == 3
    for window in windows:
        steps = range(window["first_step"] - 1, window["last_step"])
        seen = {name for step in steps for _, name in plan.records(step)}
        assert window["records"] == len(seen)
        assert window["records_root"] == root_of(leaf_hash(name) for name in sorted(seen)).hex()
        assert window["shards"] == [0]


@pytest.mark.parametrize("left", [("step-8",), ()])
def test_stop_and_resume_is_bitwise(whole, tmp_path, left):
    """From step 8, or from nothing, the run ends with the same root, windows, losses and result."""
    _, run, directory = whole
    again = tmp_path / "r"
    shutil.copytree(directory, again)
    for name in {"step-8", "step-12"} - set(left):
        shutil.rmtree(again / name)
    (again / "result.json").unlink()
    (again / "step-11.tmp").mkdir()  # what a kill during a save leaves
    with (again / "progress.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # and a torn line
    assert fit(run, again) == EXIT_DONE
    _same_end(again, directory)
    assert not (again / "step-11.tmp").exists()


def test_a_finished_run_is_not_trained_again(whole, tmp_path):
    """Starting it once more writes the same result from the same checkpoint."""
    _, run, directory = whole
    again = tmp_path / "r"
    shutil.copytree(directory, again)
    assert fit(run, again) == EXIT_DONE
    _same_end(again, directory)
    assert len(_lines(again)) == STEPS


def test_a_lost_window_line_is_restored(whole, tmp_path):
    """A kill between checkpoint and windows.jsonl loses nothing: the manifest has the line."""
    _, run, directory = whole
    again = tmp_path / "r"
    shutil.copytree(directory, again)
    lines = (again / "windows.jsonl").read_bytes().splitlines(keepends=True)
    (again / "windows.jsonl").write_bytes(b"".join(lines[:-1]))
    assert fit(run, again) == EXIT_DONE
    _same_end(again, directory)


class _Stopping(LanguageModelling):
    """Sends this process a signal at one step."""

    number, step = signal.SIGTERM, 5

    def batch(self, step, rank, world):
        """The batch, and the signal."""
        if step == self.step:
            os.kill(os.getpid(), self.number)
        return super().batch(step, rank, world)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_asks_to_be_resumed(whole, tmp_path, number):
    """SIGTERM and SIGINT: a checkpoint of the step, exit 75, exit.json, handlers put back; the resumed run is the same."""
    _, run, directory = whole
    again = tmp_path / "r"
    save_run(run, again)
    objective = _Stopping(batch_plan(run, again))
    objective.number = number
    before = signal.getsignal(number)
    assert fit(run, again, objective=objective) == EXIT_RESUME
    assert signal.getsignal(number) is before
    assert newest(again).name == "step-6"
    assert not (again / "result.json").exists()
    assert json.loads((again / "exit.json").read_bytes())["code"] == EXIT_RESUME
    assert fit(run, again) == EXIT_DONE
    assert verify(newest(again)).root == verify(newest(directory)).root
    assert [line["loss"] for line in _lines(again)] == [line["loss"] for line in _lines(directory)]
    assert not (again / "exit.json").exists()


class _Exploding(LanguageModelling):
    """A loss that is not a number from one step on."""

    def batch(self, step, rank, world):
        """The batch; remembers the step."""
        self.step = step
        return super().batch(step, rank, world)

    def loss(self, model, batch, totals_K):
        """The loss, or NaN."""
        return super().loss(model, batch, totals_K) * (math.nan if self.step >= 9 else 1.0)


def test_a_numerical_stop_keeps_the_last_good_checkpoint(whole, tmp_path):
    """Exit 4, the reason in exit.json, step-8 in place, no result."""
    _, run, _ = whole
    again = tmp_path / "r"
    save_run(run, again)
    assert fit(run, again, objective=_Exploding(batch_plan(run, again))) == EXIT_NUMERICAL
    assert newest(again).name == "step-8"
    assert "step 10" in json.loads((again / "exit.json").read_bytes())["reason"]
    assert not (again / "result.json").exists()


def test_excluded_records_are_in_no_window(whole, tmp_path):
    """A run with an exclusion file uses none of its records; a changed or malformed file is refused."""
    home, _, _ = whole
    file = tmp_path / "forgotten.txt"
    gone = {record_id(i) for i in range(0, 120, 2)}
    file.write_text("".join(f"{name.hex()}\n" for name in sorted(gone)))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    run = make_run(
        home,
        "gold",
        steps=8,
        every=4,
        kind="gold",
        excluded=Excluded(file=str(file), digest=digest),
    )
    directory = tmp_path / "gold"
    save_run(run, directory)
    plan = batch_plan(run, directory)
    assert plan.num_excluded == 60  # the two tombstones have odd indices
    assert not {name for step in range(60) for _, name in plan.records(step)} & gone
    assert fit(run, directory) == EXIT_DONE
    file.write_text(file.read_text()[:-65])
    with pytest.raises(DataError, match=r"excluded\.file"):
        fit(run, directory)


def test_a_run_starts_from_a_checkpoint_of_the_named_root(whole, tmp_path):
    """init: the weights are those of the checkpoint and the moments fresh; another root is refused."""
    _, source, directory = whole
    root = verify(directory / "step-12").root
    init = str(directory / "step-12")
    run, target = _start(tmp_path, "tuned", steps=2, init=init, init_root=root, kind="unlearn")
    model = initial_model(run, target)
    expected = load_model(directory / "step-12", source.config.model)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True)
    )
    assert model.training
    assert fit(run, target) == EXIT_DONE
    assert _lines(target)[0]["loss"] < _lines(directory)[0]["loss"] - 0.3
    bad, other = _start(tmp_path, "forged", steps=2, init=init, init_root="0" * 64)
    with pytest.raises(CheckpointError, match="expected root"):
        fit(bad, other)


class _Ascent:
    """An objective from outside with two terms and no records: what an unlearning method brings."""

    def __init__(self, plan):
        self.inner = LanguageModelling(plan)

    def batch(self, step, rank, world):
        """The same batch twice: one to forget, one to keep."""
        return self.inner.batch(step, rank, world), self.inner.batch(step + 100, rank, world)

    def counts(self, batch):
        """Two counts."""
        return torch.cat([self.inner.counts(part) for part in batch])

    def loss(self, model, batch, totals_K):
        """Minus the first, plus the second."""
        first, second = (
            self.inner.loss(model, part, totals_K[k : k + 1]) for k, part in enumerate(batch)
        )
        return second - 0.1 * first


def test_an_objective_from_outside_is_minimised(whole, tmp_path):
    """Two-term losses run and resume through the same loop; windows say that records are not known."""
    _, run, _ = whole
    directory = tmp_path / "r"
    save_run(run, directory)
    assert fit(run, directory, objective=_Ascent(batch_plan(run, directory))) == EXIT_DONE
    window = _lines(directory, "windows.jsonl")[0]
    assert (window["records"], window["records_root"]) == (0, "none")
    root = verify(newest(directory)).root
    shutil.rmtree(directory / "step-12")
    assert fit(run, directory, objective=_Ascent(batch_plan(run, directory))) == EXIT_DONE
    assert verify(newest(directory)).root == root


def test_a_model_hook_sees_the_model_first(whole, tmp_path):
    """Parameters frozen by the hook keep their initial bits; the others move; the checkpoint holds both."""
    _, run, _ = whole
    directory = tmp_path / "r"
    save_run(run, directory)

    def freeze(model):
        model.embed.weight.requires_grad_(requires_grad=False)

    assert fit(run, directory, model_hook=freeze) == EXIT_DONE
    model, start = load_model(newest(directory), run.config.model), initial_model(run, directory)
    assert torch.equal(model.embed.weight, start.embed.weight)
    assert not torch.equal(model.norm.weight, start.norm.weight)


def test_what_belongs_to_another_run_is_refused(whole, tmp_path):
    """A checkpoint of another run, other tokens, another corpus version, too small a vocabulary, a wrong world."""
    home, run, directory = whole
    mixed = tmp_path / "mixed"
    other = make_run(home, "other", steps=STEPS, every=4, seed=8)
    save_run(other, mixed)
    shutil.copytree(directory / "step-8", mixed / "step-8")
    with pytest.raises(CheckpointError, match="of another run"):
        fit(other, mixed)
    empty = tmp_path / "empty"
    empty.mkdir()
    import dataclasses

    with pytest.raises(DataError, match="expected digest"):
        fit(dataclasses.replace(run, tokens_digest="0" * 64), empty)
    with pytest.raises(DataError, match="corpus version"):
        fit(dataclasses.replace(run, corpus_version="1" * 64), empty)
    small = dataclasses.replace(
        run.config, model=dataclasses.replace(run.config.model, vocab_size=32)
    )
    with pytest.raises(DataError, match="vocab_size"):
        fit(dataclasses.replace(run, config=small), empty)
    with pytest.raises(SpecError, match="torchrun"):
        fit(dataclasses.replace(run, layout=Layout(dp_replicate=2)), empty)
    assert list(empty.iterdir()) == []


def test_a_damaged_checkpoint_stops_the_resume(whole, tmp_path):
    """Attack: a flipped byte in the newest checkpoint is refused, not skipped in favour of an older one."""
    _, run, directory = whole
    again = tmp_path / "r"
    shutil.copytree(directory, again)
    path = again / "step-12" / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="was changed"):
        fit(run, again)


def test_two_writers_are_refused(whole, tmp_path):
    """A folder that another process works on is not touched."""
    import fcntl

    _, run, directory = whole
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(SpecError, match="another process"):
            fit(run, directory)
    finally:
        os.close(descriptor)


def test_a_run_of_no_steps_saves_its_start(whole, tmp_path):
    """With steps = 0, step-0 is the initial state, named as a state computed from the seed."""
    home, _, _ = whole
    run = make_run(home, "zero", steps=0)
    directory = tmp_path / "zero"
    save_run(run, directory)
    assert fit(run, directory) == EXIT_DONE
    from trainer.checkpoint import model_state
    from trainer.optim import build_optimizer

    model = initial_model(run, directory)
    optim = {f"optim.{n}": t for n, t in build_optimizer(model, run.config.optim).state().items()}
    assert verify(newest(directory)).root == state_root(model_state(model) | optim)
    assert (directory / "windows.jsonl").read_bytes() == b""


def test_the_plan_of_a_run_is_its_specification(whole):
    """batch_plan takes seed, batch and mixture from the run."""
    _, run, directory = whole
    plan = batch_plan(run, directory)
    assert isinstance(plan, BatchPlan)
    assert (plan.seed, plan.spec, plan.mixture) == (run.seed, run.config.batch, run.config.mixture)
