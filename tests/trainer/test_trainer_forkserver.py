"""Claims about the preloaded trainer: the same bits as a program of its own, and nobody outlives anybody."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trainer_corpus import make_run

from trainer.errors import EXIT_REFUSED, EXIT_RESUME
from trainer.forkserver import ForkedRun
from trainer.loop import fit
from trainer.spec import save_run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
CLIENT = """
import sys, time
from pathlib import Path
from trainer.forkserver import ForkedRun
with open(sys.argv[2] + "/client.log", "ab") as log:
    run = ForkedRun(Path(sys.argv[1]), Path(sys.argv[2]) / "run.json", log.fileno())
print(run.pid, flush=True)
while run.poll() is None:
    time.sleep(0.05)
"""


def _wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def _ended(pid):
    """Whether a process is gone; one that nobody has reaped yet is gone too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.fixture
def server(tmp_path):
    """A fork server of this test's own: (process, socket)."""
    address = tmp_path / "server" / "s"
    address.parent.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.forkserver", "--socket", address, "--parent", str(os.getpid())],
        cwd=ROOT, env=ENVIRONMENT,
    )  # fmt: skip
    _wait_for(address.exists)
    yield process, address
    process.kill()
    process.wait()


def _forked(address, directory):
    with (directory / "log").open("ab") as log:
        return ForkedRun(address, directory / "run.json", log.fileno())


def _training(tmp_path, **fields):
    run = make_run(tmp_path, **fields)
    save_run(run, tmp_path / run.run)
    return run, tmp_path / run.run


def _well_under_way(directory):
    progress = directory / "progress.jsonl"
    return progress.exists() and progress.read_bytes().count(b"\n") >= 3


def test_a_forked_run_has_the_bits_of_a_plain_one(tmp_path, server):
    """The same run gives the same result, root included; a second fork of the same server as well."""
    run, directory = _training(tmp_path)
    plain = tmp_path / "plain"
    assert fit(run, plain) == 0
    forked = _forked(server[1], directory)
    _wait_for(lambda: forked.poll() is not None)
    assert forked.returncode == 0
    expected = json.loads((plain / "result.json").read_bytes())
    assert json.loads((directory / "result.json").read_bytes()) == expected
    again = tmp_path / "again"
    save_run(run, again)
    second = _forked(server[1], again)
    _wait_for(lambda: second.poll() is not None)
    assert json.loads((again / "result.json").read_bytes()) == expected


def test_the_server_has_no_thread_that_a_fork_would_lose(server, tmp_path):
    """A fork copies one thread only; jemalloc, which pyarrow brings, starts its own again in the child."""
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    _, directory = _training(tmp_path)
    run = _forked(server[1], directory)  # it answers, so the server's imports are done
    _wait_for(lambda: run.poll() is not None)
    tasks = Path(f"/proc/{server[0].pid}/task").iterdir()
    names = [(task / "comm").read_text().strip() for task in tasks]
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1


def test_a_refused_run_says_so_in_its_log(tmp_path, server):
    """The exit code and the one line are those of the plain program."""
    _, directory = _training(tmp_path)
    (tmp_path / "tokens" / "tokens.json").write_bytes(b"{}")
    run = _forked(server[1], directory)
    _wait_for(lambda: run.poll() is not None)
    assert run.returncode == EXIT_REFUSED
    assert (directory / "log").read_text().startswith("refused: ")


def test_sigterm_checkpoints_and_asks_to_be_resumed(tmp_path, server):
    """A stopped run leaves with 75 and a checkpoint of the step it had reached."""
    _, directory = _training(tmp_path, steps=100_000, every=50_000)
    run = _forked(server[1], directory)
    _wait_for(lambda: _well_under_way(directory))
    run.send_signal(signal.SIGTERM)
    _wait_for(lambda: run.poll() is not None)
    assert run.returncode == EXIT_RESUME
    assert list(directory.glob("step-*/manifest.json"))


def test_a_killed_run_is_told_from_a_finished_one(tmp_path, server):
    """SIGKILL leaves no exit code, and the client says so; the server goes on serving."""
    _, directory = _training(tmp_path, steps=100_000, every=50_000)
    run = _forked(server[1], directory)
    _wait_for(lambda: _well_under_way(directory))
    run.send_signal(signal.SIGKILL)
    _wait_for(lambda: run.poll() is not None)
    assert run.returncode == -signal.SIGKILL
    assert server[0].poll() is None


@pytest.mark.parametrize("victim", ["client", "server"])
def test_a_run_outlives_neither_client_nor_server(tmp_path, server, victim):
    """A SIGKILL of whoever asked for the run, or of the server, stops it; it leaves a checkpoint behind."""
    _, directory = _training(tmp_path, steps=100_000, every=50_000)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, server[1], directory], cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with client:
        pid = int(client.stdout.readline())
        _wait_for(lambda: _well_under_way(directory))
        (client if victim == "client" else server[0]).kill()
        _wait_for(lambda: _ended(pid))
        client.kill()
    assert list(directory.glob("step-*/manifest.json"))


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.6, 0.9, 1.5, 3.0])
def test_a_server_that_ends_leaves_no_file(server, after_s):
    """The socket and its folder go with the server, whose parent may have been killed; also while it still imports."""
    process, address = server
    time.sleep(after_s)
    process.terminate()
    assert process.wait(60) == 0
    assert not address.parent.exists()


def test_without_a_server_the_client_says_so(tmp_path):
    """No socket, or one that nobody listens on, is an error that the caller can act on."""
    _, directory = _training(tmp_path)
    with pytest.raises(OSError, match="No such file"):
        _forked(tmp_path / "nobody", directory)
