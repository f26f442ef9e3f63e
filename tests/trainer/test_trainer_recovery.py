"""Claims about what a run survives: every death, a hang, a wrong bit, a full disk, fewer processes; never a hang."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from trainer_accidents import run_program
from trainer_corpus import make_run

from trainer.checkpoint import newest, verify
from trainer.elastic import fitting_layout
from trainer.errors import EXIT_DONE, EXIT_REFUSED, EXIT_RESUME, SpecError
from trainer.spec import Layout, RunConfig, run_digest, save_run

STEPS, EVERY = 12, 4
DDP = Layout(dp_replicate=2)
KILLED = -9


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with one corpus."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("recovery")


def _start(home, name, layout, **config):
    """A run of 12 steps, its folder empty."""
    run = make_run(home, "r", steps=STEPS, every=EVERY, layout=layout)
    run = dataclasses.replace(
        run, config=dataclasses.replace(run.config, **({"timeout_s": 20} | config))
    )
    shutil.rmtree(home / name, ignore_errors=True)
    save_run(run, home / name)
    return run, home / name


@pytest.fixture(scope="module")
def whole(home):
    """Layout strategy -> folder of a run that nothing interrupted."""
    folders = {}
    for layout in (Layout(), DDP):
        _, folder = _start(home, f"whole-{layout}", layout)
        assert run_program(layout.world_size, folder)[0] == [EXIT_DONE] * layout.world_size
        folders[str(layout)] = folder
    return folders


def _losses(folder):
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def _same_end(folder, other):
    assert verify(newest(folder)).root == verify(newest(other)).root
    assert _losses(folder) == _losses(other)
    assert (folder / "windows.jsonl").read_bytes() == (other / "windows.jsonl").read_bytes()
    assert json.loads((folder / "result.json").read_bytes())["status"] == "done"
    assert not list(folder.glob("*.tmp"))
    timed = [
        json.loads(line)["step"] for line in (folder / "timings.jsonl").read_text().splitlines()
    ]
    assert sorted(set(timed)) == list(range(1, STEPS + 1))


@pytest.mark.parametrize(
    "fault", ["partition@1/1", "local@7/0", "communicate@6/1", "update@7/1", "writing@2/1"]
)
def test_a_death_in_each_phase_is_named_and_survived(home, whole, fault):
    """SIGKILL of one of two processes: the other names it and leaves with 75; started again, the end is bit-equal."""
    dead = int(fault[-1])
    _, folder = _start(home, f"dead-{fault[:4]}", DDP)
    codes, errors = run_program(2, folder, fault)
    assert codes[dead] == KILLED
    assert codes[1 - dead] == EXIT_RESUME, errors
    assert f"rank {dead} died" in errors[1 - dead]
    assert errors[1 - dead].count("\n") == 1
    assert json.loads((folder / "exit.json").read_bytes())["code"] == EXIT_RESUME
    assert not (folder / "result.json").exists()
    assert run_program(2, folder)[0] == [EXIT_DONE, EXIT_DONE]
    _same_end(folder, whole[str(DDP)])


@pytest.mark.parametrize(
    "fault",
    ["writing@2", "written@2", "manifest@2", "renamed@2", "window@2", "discard@1", "deleting@6"],
)
def test_a_death_inside_a_save_leaves_a_good_checkpoint(home, whole, fault):
    """SIGKILL between any two acts of a save: some step-N is whole and verifies, and the end is bit-equal."""
    _, folder = _start(home, "mid-save", Layout())
    assert run_program(1, folder, fault)[0] == [KILLED]
    found = newest(folder)
    assert verify(found).step in (4, 8, 12)
    assert run_program(1, folder)[0] == [EXIT_DONE]
    _same_end(folder, whole["single"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_random_deaths_never_change_the_result(home, whole, seed):
    """Up to three SIGKILLs at random steps of random phases in random processes, with saves of either kind."""
    rng = np.random.default_rng(seed)
    layout = [Layout(), DDP][seed % 2]
    names = ["partition", "local", "communicate", "update", "writing", "written", "manifest", "renamed", "window", "discard"]  # fmt: skip
    _, folder = _start(home, f"random{seed}", layout, asynchronous=bool(seed & 2))
    deaths = 0
    for _ in range(3):
        name = names[rng.integers(len(names))]
        last = {"partition": 1, "discard": 1}.get(name, 3 if names.index(name) > 3 else 11)
        at = int(rng.integers(1, last + 1))
        rank = int(rng.integers(layout.world_size)) if names.index(name) < 6 else 0
        codes, errors = run_program(layout.world_size, folder, f"{name}@{at}/{rank}")
        if codes == [EXIT_DONE] * layout.world_size:
            break  # what was left of the run is shorter than the fault is far
        assert codes[rank] == KILLED, errors
        deaths += 1
    assert deaths
    assert run_program(layout.world_size, folder)[0] == [EXIT_DONE] * layout.world_size
    reference = whole[str(layout)]
    assert verify(newest(folder)).root == verify(newest(reference)).root
    assert _losses(folder) == _losses(reference)


def test_a_process_that_hangs_is_named_within_the_timeout(home):
    """Rank 1 does not come to a collective: rank 0 says so after timeout_s, and both end with 75."""
    _, folder = _start(home, "hang", DDP, timeout_s=2)
    codes, errors = run_program(2, folder, "hang@7/1")
    assert codes == [EXIT_RESUME, EXIT_RESUME]
    assert "rank 1 died, or did not come to a collective within 2 s" in errors[0]
    assert errors[0].count("\n") == 1
    assert newest(folder).name == "step-4"


def test_the_last_words_of_a_process_reach_the_first(home):
    """A defect in rank 1: its traceback stays its own, rank 0 quotes it in one line and does not hang."""
    _, folder = _start(home, "bug", DDP)
    codes, errors = run_program(2, folder, "bug@7/1")
    assert codes[0] == EXIT_RESUME
    assert codes[1] not in (EXIT_DONE, KILLED)
    assert "rank 1 stopped: KeyError: 'a defect'" in errors[0]
    assert errors[0].count("\n") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_process_stops_all_after_the_same_step(home, whole, rank):
    """SIGTERM to either of two processes at step 7: both leave after it with 75 and a checkpoint; the end is bit-equal."""
    _, folder = _start(home, "stop", DDP)
    codes, errors = run_program(2, folder, f"stop@7/{rank}")
    assert codes == [EXIT_RESUME, EXIT_RESUME], errors
    assert newest(folder).name == "step-7"
    assert "after step 7 of 12" in json.loads((folder / "exit.json").read_bytes())["reason"]
    assert run_program(2, folder)[0] == [EXIT_DONE, EXIT_DONE]
    assert verify(newest(folder)).root == verify(newest(whole[str(DDP)])).root
    assert _losses(folder) == _losses(whole[str(DDP)])


@pytest.mark.parametrize(("every", "step"), [(0, 8), (1, 6)])
def test_a_flipped_weight_of_a_replica_is_named_before_it_is_saved(home, whole, every, step):
    """One bit of rank 1 after step 6: seen at the next comparison, no checkpoint has it, and the end is bit-equal."""
    _, folder = _start(home, "flip", DDP, compare_every=every)
    codes, errors = run_program(2, folder, "flip@6/1")
    assert codes == [EXIT_RESUME, EXIT_RESUME]
    assert (
        f"step {step}: rank 1 holds other numbers than its replicas in model.blocks.0." in errors[0]
    )
    assert not errors[1]
    assert newest(folder).name == "step-4"
    phases = json.loads((folder / "phases.json").read_bytes())["phases"]
    assert [entry["result"].split(":")[0] for entry in phases] == [
        "passed", "passed", "failed", "passed", "passed",
    ]  # fmt: skip
    assert run_program(2, folder)[0] == [EXIT_DONE, EXIT_DONE]
    assert verify(newest(folder)).root == verify(newest(whole[str(DDP)])).root


def test_the_majority_is_believed(home):
    """Of three replicas the one that differs is named, also if it is the first."""
    _, folder = _start(home, "three", Layout(dp_replicate=3))
    codes, errors = run_program(3, folder, "flip@6/0")
    assert codes == [EXIT_RESUME] * 3
    assert "rank 0 holds other numbers" in errors[0]


def test_a_wrong_cut_is_named_before_the_first_step(home):
    """Replicas that differ when training begins: the partition phase failed, nothing was trained."""
    _, folder = _start(home, "cut", DDP)
    codes, errors = run_program(2, folder, "cut@1/1")
    assert codes == [EXIT_RESUME, EXIT_RESUME]
    assert "step 0: rank 1" in errors[0]
    assert "model.norm.weight" in errors[0]
    phases = json.loads((folder / "phases.json").read_bytes())["phases"]
    assert phases[0]["result"].startswith("failed: step 0: rank 1")
    assert newest(folder) is None


def test_a_full_disk_keeps_the_last_good_checkpoint(home, whole):
    """ENOSPC while the second checkpoint is completed: 75, one line with the disk's words; then it goes on."""
    for world, layout in ((1, Layout()), (2, DDP)):
        _, folder = _start(home, "disk", layout)
        codes, errors = run_program(world, folder, "disk@2/0")
        assert codes == [EXIT_RESUME] * world
        assert "No space left on device" in errors[0]
        assert errors[0].count("\n") == 1
        assert verify(newest(folder)).step == 4
        phases = json.loads((folder / "phases.json").read_bytes())["phases"]
        assert phases[4]["result"].startswith("failed: the checkpoint could not be written")
        assert run_program(world, folder)[0] == [EXIT_DONE] * world
        _same_end(folder, whole[str(layout)])


@pytest.mark.parametrize("damage", ["format", "model", "half", "altered"])
def test_a_bad_checkpoint_is_refused_by_all_in_one_line(home, damage):
    """Another format, another model, half-written, altered: 3 on both processes, one line on the first, no hang."""
    run, folder = _start(home, "bad", DDP)
    assert run_program(2, folder, "stop@5/0")[0] == [EXIT_RESUME] * 2
    step = newest(folder)
    manifest = json.loads((step / "manifest.json").read_bytes())
    data = max(step.glob("*.distcp"))  # the one that rank 1 checks
    if damage == "format":
        (step / "manifest.json").write_text(json.dumps(manifest | {"format": 1}))
    elif damage == "model":
        other = dataclasses.replace(run.config.model, rope_theta=500.0)
        config = dataclasses.replace(run.config, model=other)
        (folder / "run.json").unlink()
        save_run(dataclasses.replace(run, config=config), folder)
    elif damage == "half":
        data.unlink()
    else:
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.write_bytes(content)
    codes, errors = run_program(2, folder)
    assert codes == [EXIT_REFUSED, EXIT_REFUSED]
    expected = {
        "format": "FormatVersionError", "model": "OtherModelError", "half": "IncompleteCheckpointError",
        "altered": "AlteredCheckpointError",
    }  # fmt: skip
    assert expected[damage] in errors[0]
    assert errors[0].count("\n") == 1
    assert not errors[1]


def test_a_run_goes_on_with_fewer_processes_if_it_may(home, whole):
    """2 -> 1 after a death: the global batch stays, losses are those of two processes within 1e-5; else refused."""
    run, folder = _start(home, "fewer", DDP, min_processes=1)
    assert run_program(2, folder, "local@7/1")[0] == [EXIT_RESUME, KILLED]
    assert run_program(1, folder)[0] == [EXIT_DONE]
    got, want = (torch.tensor(_losses(f), dtype=torch.float64) for f in (folder, whole[str(DDP)]))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    phases = json.loads((folder / "phases.json").read_bytes())
    assert phases["processes"] == 1
    assert phases["phases"][0]["decided_by"].startswith("rule: config.min_processes")
    assert verify(newest(folder)).run_digest == run_digest(run)
    _, strict = _start(home, "strict", DDP)
    codes, errors = run_program(1, strict)
    assert codes == [EXIT_REFUSED]
    assert "torchrun" in errors[0]


def test_the_layout_for_those_that_are_left():
    """Fewer copies or slices, what a copy is divided into stays; not below the least, never more than the layout."""
    hybrid = Layout(dp_replicate=2, dp_shard=2, tp=2)
    assert fitting_layout(hybrid, 4, 1) == Layout(dp_shard=2, tp=2)
    assert fitting_layout(hybrid, 2, 1) == Layout(tp=2)
    with pytest.raises(SpecError, match="a multiple of sp \\* tp \\* pp = 2 processes"):
        fitting_layout(hybrid, 5, 1)
    four = Layout(dp_shard=4)
    assert fitting_layout(four, 3, 2) == Layout(dp_shard=3)
    assert fitting_layout(four, 1, 1) == Layout()
    assert fitting_layout(four, 3, 0) is four  # and is then refused by `init_mesh`
    assert fitting_layout(four, 8, 1) is four
    with pytest.raises(SpecError, match="min_processes"):
        fitting_layout(four, 1, 2)
    with pytest.raises(SpecError, match="min_processes"):
        RunConfig(min_processes=-1)
