"""Claims about saving: in the background it is the same checkpoint, later; nothing good is ever given up for it."""

import dataclasses
import json
import threading

import pytest
import torch
from trainer_accidents import run_program
from trainer_corpus import make_run

from trainer import saver as module
from trainer.checkpoint import clean, newest, read_tensors, verify
from trainer.errors import EXIT_DONE, EXIT_RESUME, SaveError
from trainer.loop import fit
from trainer.manifest import manifest_of
from trainer.mesh import Mesh
from trainer.root import state_root
from trainer.saver import Saver
from trainer.spec import Layout, save_run


def _state(value):
    return {"model.w": torch.full((3,), float(value)), "optim.step": torch.tensor(float(value))}


@pytest.fixture
def save(tmp_path):
    """Saves a state of one number under a step; returns the folder."""
    run = make_run(tmp_path, steps=99)
    saver = Saver(tmp_path / "r", Mesh(), keep_last=2)
    (tmp_path / "r").mkdir()

    def go(step, value=None, *, start=False, **more):
        state = _state(step if value is None else value)
        manifest = manifest_of(run, step, state_root(state), len(state))
        (saver.start if start else saver.save)(manifest, state, **more)
        return tmp_path / "r" / f"step-{step}"

    go.saver, go.folder = saver, tmp_path / "r"
    return go


def test_keep_last_never_removes_what_was_just_made(save):
    """The newest of the others stay beside it, also when it is of an earlier step than they are."""
    for step in (1, 2, 3):
        save(step)
    assert sorted(path.name for path in save.folder.iterdir()) == ["step-2", "step-3"]
    save(1)  # a run that was rolled back
    assert sorted(path.name for path in save.folder.iterdir()) == ["step-1", "step-3"]


def test_a_step_saved_again_replaces_the_first_without_a_gap(save, monkeypatch):
    """A crash between taking the old one away and putting the new one in place leaves the old one."""
    save(5, 1)

    rename, renamed = type(save.folder).rename, []

    def once(path, target):
        if path.name == "step-5.tmp":
            raise KeyboardInterrupt
        renamed.append(path.name)
        return rename(path, target)

    monkeypatch.setattr(type(save.folder), "rename", once)
    with pytest.raises(KeyboardInterrupt):
        save(5, 2)
    assert renamed[-1] == "step-5"
    monkeypatch.undo()
    assert newest(save.folder) is None
    clean(save.folder)
    assert dict(read_tensors(newest(save.folder)))["model.w"][0] == 1
    save(5, 2)
    assert dict(read_tensors(newest(save.folder)))["model.w"][0] == 2
    assert [path.name for path in save.folder.iterdir()] == ["step-5"]


def test_training_goes_on_while_it_is_written(save, monkeypatch):
    """`start` returns before the files are complete, with the numbers of that moment; until then there is no step-N."""
    go_on, entered = threading.Event(), threading.Event()
    real, said = module.write_atomic, []

    def slow(path, data):
        entered.set()
        assert go_on.wait(30)
        real(path, data)

    monkeypatch.setattr(module, "write_atomic", slow)
    state = _state(7)
    manifest = manifest_of(make_run(save.folder.parent), 7, state_root(state), 2)
    save.saver.start(manifest, state, then=lambda: said.append(newest(save.folder).name))
    state["model.w"].fill_(-1.0)  # the next update, in place
    assert entered.wait(30)
    assert newest(save.folder) is None
    assert said == []
    go_on.set()
    save.saver.wait()
    assert said == ["step-7"]
    assert state_root(dict(read_tensors(newest(save.folder)))) == verify(newest(save.folder)).root


@pytest.mark.parametrize("start", [False, True])
def test_a_disk_that_refuses_is_said_and_the_old_one_stands(save, monkeypatch, start):
    """ENOSPC in any file: SaveError with the disk's words, at once or at the next wait; older checkpoints are whole."""
    save(1)

    def full(*_):
        raise OSError(28, "No space left on device")

    for owner, name in ((module, "write_atomic"), (module, "file_entry"), (torch, "save")):
        monkeypatch.setattr(owner, name, full)
        if start:
            save(2, start=True)
        with pytest.raises(SaveError, match="No space left on device"):
            save.saver.wait() if start else save(2)
        monkeypatch.undo()
        assert verify(newest(save.folder)).step == 1
    save(2)
    assert verify(newest(save.folder)).step == 2


@pytest.mark.parametrize("layout", [
    Layout(), Layout(dp_replicate=2), Layout(dp_shard=2),
])  # fmt: skip
def test_a_run_that_saves_in_the_background_ends_with_the_same_bits(tmp_path, layout):
    """Same losses, windows and root as one that waits; kill -9 while writing is survived the same; a full disk is said."""
    ends = []
    for asynchronous in (False, True):
        run = make_run(tmp_path, "r", steps=12, every=2, layout=layout)
        config = dataclasses.replace(run.config, asynchronous=asynchronous, timeout_s=20)
        run = dataclasses.replace(run, config=config)
        folder = tmp_path / f"{asynchronous}"
        save_run(run, folder)
        good = [EXIT_DONE] * layout.world_size
        if asynchronous:
            codes, errors = run_program(layout.world_size, folder, "manifest@3/0")
            assert codes[0] == -9
            assert verify(newest(folder)).step == 4
            codes, errors = run_program(layout.world_size, folder, "disk@2/0")
            assert codes == [EXIT_RESUME] * layout.world_size
            assert "No space left" in errors[0]
            assert verify(newest(folder)).step == 6
        codes, errors = run_program(layout.world_size, folder)
        assert codes == good, errors
        lines = (folder / "progress.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss"] for line in lines]
        ends.append((losses, (folder / "windows.jsonl").read_bytes(), verify(newest(folder)).root))
        assert sorted(p.name for p in folder.glob("step-*")) == ["step-10", "step-12"]
    assert ends[0] == ends[1]


def test_a_numerical_stop_waits_for_the_checkpoint(tmp_path, monkeypatch):
    """A run that leaves while a checkpoint is being written leaves it complete."""
    from trainer import training
    from trainer.errors import EXIT_NUMERICAL, NumericalError

    run = make_run(tmp_path, "r", steps=6, every=2)
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, asynchronous=True))
    save_run(run, tmp_path / "r")
    real, steps = training.train_step, []

    def step(*args, **kwargs):
        steps.append(1)
        if len(steps) == 3:
            raise NumericalError("not a number")
        return real(*args, **kwargs)

    monkeypatch.setattr(training, "train_step", step)
    assert fit(run, tmp_path / "r") == EXIT_NUMERICAL
    assert verify(newest(tmp_path / "r")).step == 2
