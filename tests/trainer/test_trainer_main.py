"""Claims about `python -m trainer`: exit codes, one clear line, and survival of kill -9, alone and under torchrun."""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer_accidents import run_program
from trainer_corpus import make_run
from trainer_processes import fit_run, run_processes

from trainer.__main__ import load_entry, main
from trainer.checkpoint import newest, verify
from trainer.errors import EXIT_DONE, EXIT_REFUSED, EXIT_RESUME, SpecError
from trainer.loop import fit, train
from trainer.spec import Layout, save_run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}",
}  # fmt: skip


@pytest.fixture
def start():
    """Starts Python subprocesses; whatever is left of them when the test ends is killed."""
    processes = []

    def go(*command):
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        return process

    yield go
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _steps(directory):
    path = directory / "progress.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def test_kill_9_and_start_again_is_bitwise_the_same(tmp_path, start):
    """A process that is killed in the middle, then asked to stop, then started again ends with the same root."""
    run = make_run(tmp_path, steps=160, every=20)
    whole, again = tmp_path / "whole", tmp_path / "again"
    for directory in (whole, again):
        save_run(run, directory)
    assert fit(run, whole) == EXIT_DONE
    command = ("-m", "trainer", "--run", str(again / "run.json"))
    for number, code, after in ((signal.SIGKILL, -9, 30), (signal.SIGTERM, EXIT_RESUME, 70)):
        process = start(*command)
        _wait_for(lambda after=after: _steps(again) >= after)
        process.send_signal(number)
        assert process.wait(60) == code, process.stderr.read()
        process.communicate()
        assert newest(again) is not None
        assert not (again / "result.json").exists()
    process = start(*command)
    assert process.wait(120) == EXIT_DONE, process.stderr.read()
    assert process.communicate() == ("", "")
    assert verify(newest(again)).root == verify(newest(whole)).root
    texts = [(folder / "progress.jsonl").read_text() for folder in (whole, again)]
    losses = [[json.loads(line)["loss"] for line in text.splitlines()] for text in texts]
    assert losses[0] == losses[1]
    assert (again / "result.json").read_bytes() == (whole / "result.json").read_bytes()


def test_kill_9_of_torchrun_leaves_no_worker_and_resumes_bitwise(tmp_path, start):
    """Killing the torchrun agent kills its workers too; killed, asked to stop and started again, it ends the same."""
    run = make_run(tmp_path, steps=200, every=20, layout=Layout(dp_replicate=2))
    whole, again = tmp_path / "whole", tmp_path / "again"
    for directory in (whole, again):
        save_run(run, directory)
    assert run_processes(2, tmp_path / "group", fit_run, run, whole) == [0, 0]
    command = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "trainer",
    )
    agent = start(*command, str(again / "run.json"))
    _wait_for(lambda: _steps(again) >= 50)
    workers = [
        int(pid) for pid in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    ]
    assert len(workers) == 2
    agent.kill()
    agent.communicate()
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 20)
    done = verify(newest(again)).step
    assert 0 < done < 200
    (again / "progress.jsonl").unlink()  # it is for people: a run goes on without it
    agent = start(*command, str(again / "run.json"))
    _wait_for(lambda: _steps(again) > 10)
    agent.terminate()
    agent.communicate(timeout=60)
    # torchrun exits with a code of its own: the file says that both processes left after the same step.
    assert json.loads((again / "exit.json").read_bytes())["code"] == EXIT_RESUME
    assert done < verify(newest(again)).step < 200
    agent = start(*command, str(again / "run.json"))
    _, errors = agent.communicate(timeout=180)
    assert agent.returncode == EXIT_DONE, errors
    assert verify(newest(again)).root == verify(newest(whole)).root


def test_torchrun_restarts_a_run_whose_process_died(tmp_path, start):
    """`--max-restarts`: one of two processes is killed at step 7; torchrun starts both again, the end is bit-equal."""
    layout = Layout(dp_replicate=2)
    fields = {"steps": 12, "every": 4, "layout": layout}
    whole, again = tmp_path / "whole", tmp_path / "again"
    save_run(make_run(tmp_path, **fields), whole)
    save_run(make_run(tmp_path, entry="trainer_accidents:train_dying_once", **fields), again)
    assert run_program(2, whole)[0] == [0, 0]
    agent = start(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "trainer",
        str(again / "run.json"),
    )  # fmt: skip
    _, errors = agent.communicate(timeout=180)
    assert agent.returncode == EXIT_DONE, errors
    assert (tmp_path / "died").exists()
    assert verify(newest(again)).root == verify(newest(whole)).root
    assert (again / "progress.jsonl").read_text().count("\n") == 12


@pytest.mark.slow
def test_torchrun_goes_on_with_the_machine_that_is_left(tmp_path, start):
    """Two agents of one process each; one is killed with its process: the other goes on alone, from the checkpoint."""
    run = make_run(tmp_path, steps=40, every=4, layout=Layout(dp_replicate=2), entry="trainer_accidents:train_slowly")  # fmt: skip
    config = dataclasses.replace(run.config, min_processes=1, timeout_s=20)
    directory = tmp_path / "r"
    save_run(dataclasses.replace(run, config=config), directory)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = (
        "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "left",
        "--rdzv-conf", "last_call_timeout=10,join_timeout=120", "-m", "trainer", str(directory / "run.json"),
    )  # fmt: skip
    first = start(*command)  # hosts the rendezvous
    time.sleep(2)
    second = start(*command)
    _wait_for(lambda: _steps(directory) >= 6)
    second.kill()
    _, errors = first.communicate(timeout=240)
    assert first.returncode == EXIT_DONE, errors
    assert json.loads((directory / "phases.json").read_bytes())["processes"] == 1
    single = make_run(tmp_path, steps=40, every=4)
    save_run(single, tmp_path / "single")
    assert fit(single, tmp_path / "single") == 0
    losses = [
        [json.loads(line)["loss"] for line in (folder / "progress.jsonl").read_text().splitlines()]
        for folder in (directory, tmp_path / "single")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_refused_input_is_one_line_and_exit_3(tmp_path):
    """A wrong field: exit 3, one line that names it, exit.json; no traceback."""
    run = make_run(tmp_path)
    save_run(run, tmp_path / "r")
    path = tmp_path / "r" / "run.json"
    path.write_bytes(path.read_bytes().replace(b'"steps":10', b'"stops":10'))
    done = subprocess.run(
        [sys.executable, "-m", "trainer", str(path)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_REFUSED
    assert done.stderr.count("\n") == 1
    assert "stops" in done.stderr
    assert "Traceback" not in done.stderr
    left = json.loads((tmp_path / "r" / "exit.json").read_bytes())
    assert left["code"] == EXIT_REFUSED
    assert "stops" in left["reason"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"entry": "trainer.loop:nothing"}, "no function 'nothing'"),
        ({"entry": "trainer.nowhere:train"}, "no module"),
        ({"entry": "nowhere:train"}, "no module"),
        ({"layout": Layout(dp_replicate=2)}, "torchrun"),
        ({"init": "step-9", "init_root": "0" * 64}, "not a complete checkpoint"),
    ],
)
def test_every_kind_of_refusal_is_exit_3(tmp_path, capsys, fields, message):
    """Entries, launchers and checkpoints that do not fit are refused in words."""
    run = make_run(tmp_path, **fields)
    save_run(run, tmp_path / "r")
    assert main(["--run", str(tmp_path / "r")]) == EXIT_REFUSED
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert str(tmp_path) not in said  # messages name files, not where this machine keeps them


def test_a_missing_run_is_refused(tmp_path, capsys):
    """No such run.json: exit 3."""
    assert main(["--run", str(tmp_path / "none" / "run.json")]) == EXIT_REFUSED
    assert "cannot be read" in capsys.readouterr().err


def test_the_entry_of_a_run_is_called_and_its_code_returned(tmp_path, monkeypatch):
    """An entry from another package gets (run, directory); its exit code is the program's."""
    (tmp_path / "some_entry.py").write_text(
        "def go(run, directory):\n    (directory / 'called').write_text(run.run)\n    return 75\n"
        "def bug(run, directory):\n    raise ValueError('a defect')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    save_run(make_run(tmp_path, entry="some_entry:go"), tmp_path / "r")
    assert main(["--run", str(tmp_path / "r" / "run.json")]) == EXIT_RESUME
    assert (tmp_path / "r" / "called").read_text() == "r"
    save_run(make_run(tmp_path, entry="some_entry:bug"), tmp_path / "b")
    with pytest.raises(
        ValueError, match="a defect"
    ):  # a bare ValueError is a defect: it keeps its traceback
        main(["--run", str(tmp_path / "b")])


def test_the_default_entry_is_train():
    """trainer.loop:train is what a run calls unless it says otherwise."""
    assert load_entry("trainer.loop:train") is train
    with pytest.raises(SpecError):
        load_entry("json:__doc__")


def test_a_start_imports_only_what_it_needs(tmp_path):
    """A run of one process imports neither the compiler nor pandas, and DCP only when it saves."""
    run = make_run(tmp_path, steps=3, every=10)
    save_run(run, tmp_path / "r")
    code = (
        "import sys, pathlib; from trainer.loop import fit; from trainer.spec import load_run\n"
        "heavy = ('torch._dynamo', 'pandas', 'torch.distributed.checkpoint', 'polars')\n"
        "print([m for m in heavy if m in sys.modules])\n"
        "folder = pathlib.Path(sys.argv[1]); fit(load_run(folder), folder)\n"
        "print([m for m in heavy if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "r")],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["[]", "['torch.distributed.checkpoint']"]
