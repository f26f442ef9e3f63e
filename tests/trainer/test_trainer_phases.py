"""Claims about the phase record: every question answered, by digests that can be recomputed; a gap is refused."""

import copy
import hashlib
import json

import pytest
import torch
from trainer_accidents import run_program
from trainer_corpus import make_run

from provenance.canonical import jcs
from trainer.checkpoint import newest, verify
from trainer.loop import fit
from trainer.phases import FIELDS, PHASES, RANK_FIELDS, check_phases, failures
from trainer.spec import Layout, run_digest, save_run
from trainer.timings import COLUMNS, rank_times


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """World -> (run, folder) of a finished run."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("phases")
    made = {}
    for layout in (Layout(), Layout(dp_replicate=2)):
        run = make_run(home, "r", steps=8, every=4, layout=layout)
        folder = home / str(layout)
        save_run(run, folder)
        assert set(run_program(layout.world_size, folder)[0]) == {0}
        made[layout.world_size] = run, folder
    return made


def _record(folder):
    return json.loads((folder / "phases.json").read_bytes())


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_answers_every_question(runs, world):
    """A finished run's record is complete and all its checks passed, for one process and for two."""
    record = _record(runs[world][1])
    assert check_phases(record) == []
    assert failures(record) == {}
    assert [entry["phase"] for entry in record["phases"]] == list(PHASES)
    assert record["processes"] == world


@pytest.mark.parametrize("phase", range(len(PHASES)))
@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_fails(runs, phase, name):
    """Negative control: without any one field of any phase, or with an empty one, the record is refused."""
    good = _record(runs[1][1])
    for change in (lambda entry: entry.pop(name), lambda entry: entry.update({name: ""})):
        bad = copy.deepcopy(good)
        change(bad["phases"][phase])
        assert check_phases(bad)


def test_other_gaps_fail(runs):
    """A phase too few, a process too few, an answer of the wrong kind, another format."""
    good = _record(runs[2][1])

    def changed(path, value):
        bad = copy.deepcopy(good)
        place = bad
        for key in path[:-1]:
            place = place[key]
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        return check_phases(bad)

    for path, value in (
        (("format",), 1), (("run_digest",), None), (("steps",), None), (("phases", 4), None), (("phases",), {}),
        (("phases", 0, "input", "tokens"), "abc"), (("phases", 1, "result"), "fine"), (("phases", 2, "rejected"), ["x"]),
        (("phases", 3, "decided_by"), "somebody"), (("phases", 4, "resources", "ranks", 1), None),
        *((("phases", 0, "resources", "ranks", 1, name), None) for name in RANK_FIELDS),
    ):  # fmt: skip
        assert changed(path, value), path
    assert check_phases([]) == check_phases(None) != []
    bad = copy.deepcopy(good)
    bad["phases"][2]["result"] = "failed: rank 1 differs"
    assert check_phases(bad) == []  # it answers; that the answer is bad is another question
    assert failures(bad) == {"communicate": "rank 1 differs"}


def test_digests_are_those_of_the_files(runs):
    """Partition begins with the run, update ends with the state of the checkpoint, whose manifest is named."""
    run, folder = runs[1]
    partition, local, communicate, update, saved = _record(folder)["phases"]
    windows = [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]
    assert partition["input"]["run"] == run_digest(run)
    assert partition["output"]["state"] == windows[0]["state_digest_before"]
    assert local["input"]["records"] == windows[-1]["records_root"]
    assert update["output"]["state"] == saved["input"]["state"] == verify(newest(folder)).root
    manifest = (newest(folder) / "manifest.json").read_bytes()
    assert saved["output"]["manifest"] == hashlib.sha256(manifest).hexdigest()
    lines = [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]
    rows = [[line["step"], repr(line["loss"]), repr(line["grad_norm"])] for line in lines]
    assert communicate["output"]["losses"] == hashlib.sha256(jcs(rows)).hexdigest()


def test_the_same_run_has_the_same_loss_digest(runs, tmp_path):
    """Losses are digested, not times: a second training gives the digest of the first."""
    run, folder = runs[1]
    save_run(run, tmp_path / "again")
    assert fit(run, tmp_path / "again") == 0
    digests = [_record(f)["phases"][2]["output"] for f in (folder, tmp_path / "again")]
    assert digests[0] == digests[1]


def test_times_of_every_process_add_up(runs):
    """Every step has every column of every rank; what is idle is what the others took longer; none is negative."""
    folder = runs[2][1]
    lines = [json.loads(line) for line in (folder / "timings.jsonl").read_text().splitlines()]
    assert sorted({line["step"] for line in lines}) == list(range(1, 9))
    assert all(len(line[column]) == 2 for line in lines for column in COLUMNS)
    times = rank_times(folder)
    for rank, time in enumerate(times):
        spent = sum(line[column][rank] for line in lines for column in COLUMNS) / 1e6
        total = time.compute + time.communicate + time.idle + time.checkpoint
        assert total == pytest.approx(spent, abs=1e-6)
        assert min(time.compute, time.communicate, time.idle) >= 0
        assert time.checkpoint > 0
    assert times[0].idle + times[1].idle > 0


def test_idle_is_waiting_for_the_slowest(tmp_path):
    """Oracle by hand: two steps of two ranks."""
    rows = [
        {"step": 1, "input": [10, 0], "local": [90, 300], "communicate": [220, 20], "update": [5, 5], "checkpoint": [0, 0]},
        {"step": 2, "input": [0, 0], "local": [100, 100], "communicate": [50, 50], "update": [5, 5], "checkpoint": [0, 7]},
    ]  # fmt: skip
    (tmp_path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = rank_times(tmp_path)
    got = [round(v * 1e6) for v in (first.compute, first.communicate, first.idle, first.checkpoint)]
    assert got == [210, 70, 200, 0]
    got = [round(v * 1e6) for v in (second.compute, second.communicate, second.idle, second.checkpoint)]  # fmt: skip
    assert got == [410, 70, 0, 7]
    assert rank_times(tmp_path / "none") == []
