"""Claims about checkpoints of several processes: any layout reads them whole, and no file of theirs may change."""

import shutil

import pytest
import torch
from trainer_accidents import run_program
from trainer_corpus import make_run
from trainer_processes import run_processes
from trainer_replicas import reload

from trainer.checkpoint import newest, verify
from trainer.errors import CheckpointError
from trainer.spec import Layout, save_run

LAYOUTS = {
    "single": Layout(), "ddp2": Layout(dp_replicate=2), "fsdp2": Layout(dp_shard=2),
    "fsdp3": Layout(dp_shard=3),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Layout -> (run, newest step) of two steps of training in it."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("reshard")
    made = {}
    for name, layout in LAYOUTS.items():
        run = make_run(home, name, steps=2, every=2, layout=layout)
        save_run(run, home / name)
        assert run_program(layout.world_size, home / name)[0] == [0] * layout.world_size
        made[name] = run, newest(home / name)
    return made


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_reads_a_checkpoint_of_any_other(saved, tmp_path, source, target):
    """Weights and moments, loaded into zeros of another layout, have the root that the manifest names, on every process."""
    run, step = saved[source]
    world = LAYOUTS[target].world_size
    roots = (
        [reload(run, step, LAYOUTS[target])]
        if world == 1
        else run_processes(world, tmp_path / "group", reload, run, step, LAYOUTS[target])
    )
    assert roots == [verify(step).root] * world


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "delete"])
def test_every_file_of_a_checkpoint_counts(saved, tmp_path, damage):
    """Attack: each file of a sliced checkpoint in turn, at its beginning, middle and end, the manifest included."""
    step = saved["fsdp3"][1]
    names = sorted(path.name for path in step.iterdir())
    assert len(names) >= 5  # index, manifest and a file per process
    for name in names:
        copy = tmp_path / name / step.name
        shutil.copytree(step, copy)
        good = (copy / name).read_bytes()
        for at in (0, len(good) // 3, len(good) - 1):
            bad = bytearray(good)
            bad[at] ^= 1
            if damage == "delete":
                (copy / name).unlink(missing_ok=True)
            else:
                content = {"flip": bytes(bad), "truncate": good[:at], "empty": b""}[damage]
                (copy / name).write_bytes(content)
            with pytest.raises(CheckpointError):
                verify(copy)
