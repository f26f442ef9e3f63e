"""`pipelines.launch`: no trainer outlives its parent, a resume is a resume, a refusal reaches the reader."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
from graph_commands import ROOT, command, environment, processes, rows, started, until

from pipelines import launch as launching
from pipelines import preloaded
from pipelines.launch import RunFailedError, launch, new_lines, progress_text, trainer_command
from trainer.spec import Layout, load_run, save_run

HERE = Path(__file__).parent
STEP = "import os, subprocess, sys; sys.exit(subprocess.call([*sys.argv[1:], '--parent', str(os.getpid())]))"
"""A process between us and the launcher, like Dagster's step process."""


@pytest.fixture
def prepare(
    tiny_home: Path, copied: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Writes a run like the released model's, with other fields, into a home of this test's own."""
    monkeypatch.setenv(
        "PYTHONPATH", str(HERE), prepend=os.pathsep
    )  # for entries in `launch_entries`
    home = copied(tiny_home)
    (original,) = home.glob("runs/train-*")

    def write(name: str = "train-test", **fields: object) -> Path:
        directory = home / "runs" / name
        save_run(dataclasses.replace(load_run(original), run=name, **fields), directory)
        return directory

    return write


def home_of(directory: Path) -> Path:
    """The home that a run lies in."""
    return directory.parents[1]


def arguments(directory: Path, nproc: int = 1) -> list[str]:
    """The Pipes child's command line."""
    return [
        sys.executable,
        "-m",
        "pipelines.launch",
        "--run",
        str(directory),
        "--nproc",
        str(nproc),
    ]


def launched(directory: Path, nproc: int = 1):
    """Run the Pipes child to its end, outside of Dagster."""
    return command(home_of(directory), *arguments(directory, nproc))


def progress(directory: Path) -> bool:
    """Whether the trainer has taken a step."""
    return (directory / "progress.jsonl").exists() and bool(rows(directory / "progress.jsonl"))


# --- who dies with whom ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nproc", [1, 2])
def test_killing_the_parent_leaves_no_trainer(prepare: Callable[..., Path], nproc: int) -> None:
    """SIGKILL of the step process, in the middle of training, ends launcher, torchrun and every worker."""
    layout = Layout(dp_replicate=nproc)
    directory = prepare(layout=layout, steps=100_000)
    home = home_of(directory)
    with started(home, sys.executable, "-c", STEP, *arguments(directory, nproc)) as step:
        until(lambda: progress(directory), "the trainer took a step", 240)
        assert len(processes(home)) >= 2 + nproc
        os.kill(step.pid, signal.SIGKILL)
        step.wait()
        until(lambda: not processes(home), "every process of the run ended", 60)


def test_an_orphan_leaves_before_it_trains(prepare: Callable[..., Path]) -> None:
    """A launcher whose step was dead before it could ask the kernel for a signal starts nothing."""
    directory = prepare(entry="launch_entries:finish")
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)  # fmt: skip
    done = command(home_of(directory), *arguments(directory), "--parent", gone.stdout.strip())
    assert done.returncode == 1
    assert not (directory / "progress.jsonl").exists()


def test_a_stopped_run_stays_stopped_and_goes_on_later(prepare: Callable[..., Path]) -> None:
    """SIGTERM, as the UI's button sends it: a checkpoint, exit code 75, no resume; the next launch finishes the run."""
    directory = prepare(steps=30)
    home = home_of(directory)
    process = subprocess.Popen(arguments(directory), cwd=ROOT, env=environment(home), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
    until(lambda: progress(directory), "the trainer took a step", 240)
    process.terminate()
    assert process.wait(60) == launching.EXIT_RESUME
    assert processes(home) == []
    assert not (directory / "result.json").exists()
    reached = rows(directory / "progress.jsonl")[-1]["step"]
    assert (directory / f"step-{reached}/manifest.json").exists()
    assert launched(directory).returncode == 0
    assert json.loads((directory / "result.json").read_text())["steps"] == 30
    assert [row["step"] for row in rows(directory / "progress.jsonl")] == list(range(1, 31))


def test_without_the_preloaded_trainer_a_run_starts_the_slower_way(
    prepare: Callable[..., Path],
) -> None:
    """A server that is gone costs seconds and one line, never the run."""
    directory = prepare(entry="launch_entries:finish")
    done = command(home_of(directory), *arguments(directory), "--server", str(directory / "gone"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("no preloaded trainer ("), done.stdout


def test_sockets_of_killed_servers_are_removed_and_no_others(tmp_path: Path) -> None:
    """One on which nobody listens goes with its folder; a listener's, a young one, a file of that name and what lies beside a socket stay."""
    listening = []
    for name in ("dead", "alive", "young", "shared"):
        folder = tmp_path / f"dataworth-{name}"
        folder.mkdir()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(folder / "trainer"))
        server.listen()
        listening.append(server)
        os.utime(folder / "trainer", (0, 0))
    for server in (listening[0], *listening[2:]):
        server.close()
    os.utime(tmp_path / "dataworth-young/trainer")
    (tmp_path / "dataworth-shared/else").write_text("somebody's")
    (tmp_path / "dataworth-file").mkdir()
    (tmp_path / "dataworth-file/trainer").write_text("no socket")
    preloaded.sweep(tmp_path)
    kept = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*"))
    assert kept == ["dataworth-alive/trainer", "dataworth-file/trainer", "dataworth-shared/else", "dataworth-young/trainer"]  # fmt: skip
    assert not (tmp_path / "dataworth-dead").exists()
    listening[1].close()


def test_a_server_that_is_told_to_end_at_once_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before it can hear, with its folder made already: whoever started it tidies up. And it sweeps before it starts."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DATAWORTH_EXECUTOR", "in_process")
    left = tmp_path / "dataworth-left"
    left.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(left / "trainer"))
    os.utime(left / "trainer", (0, 0))
    preloaded.begin()
    assert [path.name == left.name for path in tmp_path.iterdir()] == [False]
    preloaded.end()
    assert list(tmp_path.iterdir()) == []


# --- exit codes -----------------------------------------------------------------------------------------------------


def test_exit_code_75_resumes(prepare: Callable[..., Path]) -> None:
    """A trainer that asks to be resumed is started again, in the same folder, until it is done."""
    directory = prepare(entry="launch_entries:ask_twice")
    done = launched(directory)
    assert done.returncode == 0, done.stderr
    assert (directory / "starts").read_text() == "xxx"
    assert done.stdout.count("the trainer asked to be resumed") == 2


@pytest.mark.slow
def test_resuming_ends_at_some_point(prepare: Callable[..., Path]) -> None:
    """A trainer that never gets anywhere is given up after three resumes, with its own code."""
    directory = prepare(entry="launch_entries:ask_always")
    assert launched(directory).returncode == launching.EXIT_RESUME
    assert len((directory / "starts").read_text()) == 1 + launching.MAX_RESUMES


def test_a_crash_is_not_taken_for_an_older_wish(prepare: Callable[..., Path]) -> None:
    """What an earlier attempt left in `exit.json` doesn't turn a later crash into a resume."""
    directory = prepare(entry="launch_entries:ask_then_crash")
    done = launched(directory)
    assert done.returncode == 1
    assert (directory / "starts").read_text() == "xx"
    assert "the disk caught fire" in done.stderr


def test_a_killed_trainer_is_started_again(prepare: Callable[..., Path]) -> None:
    """SIGKILL leaves no word and no exit.json: the run goes on from its newest checkpoint by itself."""
    directory = prepare(entry="launch_entries:die_once")
    done = launched(directory)
    assert done.returncode == 0, done.stderr
    assert (directory / "starts").read_text() == "xx"


def test_a_code_without_a_word_is_a_death(tmp_path: Path) -> None:
    """A signal, or torchrun's 1 without exit.json, resumes; one process's own 1 is a defect; a word counts first."""
    own = launching.own_code
    assert own(tmp_path, -9) == own(tmp_path, 1, 2) == launching.EXIT_RESUME
    assert (own(tmp_path, 1), own(tmp_path, 0, 2)) == (1, 0)
    (tmp_path / "exit.json").write_text('{"code": 3}')
    assert own(tmp_path, -9) == own(tmp_path, 1, 2) == 3


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_refused_run_gives_the_trainers_message(prepare: Callable[..., Path], nproc: int) -> None:
    """Exit code 3 and one line with expected and got, also through torchrun, which knows no codes but 1."""
    layout = Layout(dp_replicate=nproc)
    directory = prepare(layout=layout, tokens_digest="0" * 64)
    done = launched(directory, nproc)
    assert done.returncode == 3, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "refused: " in line]
    assert "0" * 16 in line
    assert not (directory / "result.json").exists()


# --- under Dagster --------------------------------------------------------------------------------------------------


def materialized(directory: Path):
    """An asset that launches a run, in an instance of its own; its failure or result, and what was logged."""
    kept: dict[str, object] = {}

    @dg.asset
    def run(
        context: dg.AssetExecutionContext, pipes: dg.PipesSubprocessClient
    ) -> dg.MaterializeResult:
        """A run."""
        try:
            kept["result"] = launch(context, pipes, directory, 1)
        except RunFailedError as error:
            kept["error"] = error
            raise
        return dg.MaterializeResult()

    with dg.DagsterInstance.ephemeral() as instance:
        client = dg.PipesSubprocessClient()
        done = dg.materialize(
            [run], resources={"pipes": client}, instance=instance, raise_on_error=False
        )
        kept["success"] = done.success
        kept["log"] = [record.user_message for record in instance.all_logs(done.run_id)]
        kept["observations"] = instance.fetch_observations(dg.AssetKey("run"), limit=10).records
    return kept


def under_dagster(test):
    """Dagster's own Pipes client calls a preview and a deprecated function of its own."""
    theirs = (
        "ignore::dagster.PreviewWarning",
        "ignore:.*AssetExecutionContext.run_id:DeprecationWarning",
    )
    return pytest.mark.filterwarnings(*theirs)(test)


@under_dagster
def test_progress_reaches_the_assets_page(
    prepare: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the run lasts its steps stand in the run's log and, as numbers, on the asset's page."""
    monkeypatch.setattr(launching, "OBSERVE_EVERY_S", 0.2)
    kept = materialized(prepare(entry="launch_entries:finish"))
    assert kept["success"], kept
    assert kept["result"] == {"status": "done"}
    line = re.compile(r"step \d+, loss \d\.\d{4}, 1,000 tokens/s, 1\.00 GiB")
    assert any(line.fullmatch(text) for text in kept["log"])
    metadata = kept["observations"][0].asset_observation.metadata
    assert {"step", "loss", "tokens_per_s", "rss_bytes"} == set(metadata)
    assert 1 <= metadata["step"].value <= 20


@under_dagster
def test_a_failed_run_fails_the_asset_in_the_trainers_words(prepare: Callable[..., Path]) -> None:
    """The error names the run and ends with the trainer's own line; nothing says only `exit code 3`."""
    kept = materialized(prepare(tokens_digest="0" * 64))
    assert not kept["success"]
    assert str(kept["error"]).startswith("run train-test stopped: refused: ")


@under_dagster
def test_a_finished_run_is_not_started_again(prepare: Callable[..., Path]) -> None:
    """A result that is there is read: a step that died after the training doesn't train twice."""
    directory = prepare(entry="launch_entries:no_such_function")
    (directory / "result.json").write_text('{"status": "done", "steps": 7}')
    assert materialized(directory)["result"] == {"status": "done", "steps": 7}


# --- small parts ----------------------------------------------------------------------------------------------------


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    """A torn last line waits for its end; a file that is not there yet is empty."""
    path = tmp_path / "progress.jsonl"
    assert new_lines(path, 0) == ([], 0)
    path.write_bytes(b'{"step": 1}\n{"st')
    lines, offset = new_lines(path, 0)
    assert lines == [{"step": 1}]
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    assert new_lines(path, offset) == ([{"step": 2}], path.stat().st_size)


def test_a_resumed_run_may_rewrite_its_progress(tmp_path: Path) -> None:
    """After a resume the file is shorter, or grown again to another length: neither is an error."""
    path = tmp_path / "progress.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    _, offset = new_lines(path, 0)
    path.write_bytes(b'{"step": 1}\n')
    assert new_lines(path, offset)[0] == [{"step": 1}]
    path.write_bytes(
        b'{"step": 1, "loss": 5.5}\n{"step": 2, "loss": 5.25}\n{"step": 3, "loss": 5.0}\n'
    )
    lines, end = new_lines(path, offset)
    assert lines == [{"step": 3, "loss": 5.0}]
    assert end == path.stat().st_size


def test_the_command_fits_the_number_of_processes(tmp_path: Path) -> None:
    """One process needs no torchrun; several get `--standalone`, and no bare `--run`, which torchrun would take."""
    alone = trainer_command(tmp_path / "run.json", 1)
    assert alone[1:] == ["-m", "trainer", "--run", str(tmp_path / "run.json")]
    several = trainer_command(tmp_path / "run.json", 3)
    assert several[1:3] == ["-m", "torch.distributed.run"]
    assert {"--standalone", "3"} <= set(several)
    assert "--run" not in several


def test_progress_is_told_as_far_as_it_is_known() -> None:
    """A line of an audit has no loss: what is missing is left out."""
    assert progress_text({"step": 3, "loss": 2.5, "tokens_per_s": 1234.5, "rss_bytes": 2**29}) == "step 3, loss 2.5000, 1,234 tokens/s, 0.50 GiB"  # fmt: skip
    assert progress_text({"step": 3, "of": 15}) == "step 3"
