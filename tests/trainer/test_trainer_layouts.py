"""Claims about layouts: they change where numbers are computed, never which."""

import dataclasses
import json
import shutil

import pytest
import torch
from trainer_corpus import MODEL, make_run
from trainer_processes import fit_run, run_processes

from trainer.checkpoint import load_model, newest, read_tensors, verify
from trainer.loop import fit
from trainer.root import checkpoint_root
from trainer.spec import BatchSpec, Layout, save_run

STEPS = 20
LAYOUTS = {
    "single": Layout(),
    "ddp": Layout(dp_replicate=2),
    "fsdp": Layout(dp_shard=2),
    "rows": Layout(sp=2, tp=2),
    "pipe": Layout(pp=2, microbatches=5),
}
SPREAD = sorted(set(LAYOUTS) - {"single"})
UNTIED = dataclasses.replace(MODEL, tied=False)  # which every layout can divide
# Five rows over two processes: their token counts differ, which a mean of means would not survive.
ODD = BatchSpec(rows=5, length=32)


def _losses(directory):
    lines = [json.loads(line) for line in (directory / "progress.jsonl").read_text().splitlines()]
    assert len(lines) == STEPS
    return torch.tensor([[line["loss"], line["grad_norm"]] for line in lines], dtype=torch.float64)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with one corpus for all layouts."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def fitted(home):
    """The same 20 steps in every layout: name -> (run, directory)."""
    runs = {}
    for kind, layout in LAYOUTS.items():
        world = layout.world_size
        run = make_run(home, kind, steps=STEPS, every=10, layout=layout, batch=ODD, model=UNTIED)
        directory = home / kind
        save_run(run, directory)
        if world == 1:
            assert fit(run, directory) == 0
        else:
            assert (
                run_processes(world, home / f"{kind}.group", fit_run, run, directory) == [0] * world
            )
        runs[kind] = run, directory
    return runs


@pytest.mark.parametrize("kind", SPREAD)
def test_several_processes_compute_the_losses_and_norms_of_one(fitted, kind):
    """Loss and gradient norm agree with one process within 1e-5 relative over 20 steps, with unequal shares."""
    torch.testing.assert_close(
        _losses(fitted[kind][1]), _losses(fitted["single"][1]), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize("kind", SPREAD)
def test_all_layouts_start_alike_and_use_the_same_records(fitted, kind):
    """The initial state has one root whatever the layout, and windows name the same records and shards."""
    first, expected = (
        json.loads((fitted[name][1] / "windows.jsonl").read_text().splitlines()[0])
        for name in (kind, "single")
    )
    for window in (first, expected):  # layouts add up in another order: equal but for rounding
        del window["state_digest_after"], window["optimizer_digest_after"]
    assert first == expected


def test_a_sliced_checkpoint_is_read_whole_by_one_process(fitted):
    """A checkpoint of two fsdp processes: the root over its whole tensors, and weights near those of one process."""
    run, directory = fitted["fsdp"]
    assert checkpoint_root(newest(directory)) == verify(newest(directory)).root
    model, expected = (
        load_model(newest(fitted[name][1]), run.config.model) for name in ("fsdp", "single")
    )
    for got, want in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", SPREAD)
def test_checkpoints_of_all_layouts_hold_the_same_tensors(fitted, kind):
    """Names, types and shapes in a checkpoint do not depend on the layout."""
    got, want = (
        [(name, tensor.dtype, tensor.shape) for name, tensor in read_tensors(newest(fitted[s][1]))]
        for s in (kind, "single")
    )
    assert got == want


@pytest.mark.parametrize("kind", SPREAD)
def test_stop_and_resume_of_several_processes_is_bitwise(fitted, home, kind):
    """Processes that go on from step 10 end with the root, windows and losses of those that were not interrupted."""
    run, whole = fitted[kind]
    resumed = home / f"{kind}-resumed"
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / f"step-{STEPS}")
    world = run.layout.world_size
    assert run_processes(world, home / f"{kind}.again", fit_run, run, resumed) == [0] * world
    assert verify(newest(resumed)).root == verify(newest(whole)).root
    assert (resumed / "windows.jsonl").read_bytes() == (whole / "windows.jsonl").read_bytes()
    assert torch.equal(_losses(resumed), _losses(whole))


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp", "single"), ("single", "fsdp"), ("pipe", "rows"), ("rows", "ddp")],
)
def test_a_checkpoint_is_where_another_layout_starts(fitted, home, source, target):
    """A run of any layout starts from a checkpoint of any other and computes the same losses as one process."""
    origin = newest(fitted[source][1])
    losses = []
    for kind in ("single", target):
        layout = LAYOUTS[kind]
        name = f"{source}-to-{target}-{kind}"
        if (home / name).exists():
            continue
        run = make_run(
            home, name, steps=STEPS, every=STEPS, layout=layout, batch=ODD, model=UNTIED,
            init=str(origin), init_root=verify(origin).root,
        )  # fmt: skip
        save_run(run, home / name)
        if kind == "single":
            assert fit(run, home / name) == 0
        else:
            file, world = home / f"{name}.group", layout.world_size
            assert run_processes(world, file, fit_run, run, home / name) == [0] * world
        losses.append(_losses(home / name))
    torch.testing.assert_close(losses[0], losses[-1], rtol=1e-5, atol=0)
    # It goes on from where the other run ended, under a new warm-up.
    assert losses[0][0, 0] < _losses(fitted[source][1])[0, 0] - 0.3
