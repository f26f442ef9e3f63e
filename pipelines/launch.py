"""The one Pipes child: starts a trainer run, forwards its progress, dies with its parent.

An asset calls `launch`, which starts `python -m pipelines.launch` under Dagster Pipes; that child starts

    torchrun --standalone --nproc-per-node N -m trainer DIR/run.json

(or, for one process, a fork of the preloaded `trainer.forkserver`, plain `python -m trainer` where there is none), tails
`DIR/progress.jsonl` into the run's log, and passes the exit code on.
The files of the run are the contract: whoever started it, the asset re-reads and re-verifies `result.json`.

All of them ask the kernel for SIGTERM when their parent dies (`trainer.parent`), so that killing the step, even with
SIGKILL, leaves no trainer behind.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trainer.parent import die_with

if TYPE_CHECKING:
    from trainer.forkserver import ForkedRun

EXIT_RESUME = 75
MAX_RESUMES = 3
LOG_EVERY_S = 2.0
OBSERVE_EVERY_S = 5.0
POLL_S = 0.02  # a tiny run lasts a second, and a graph waits for nine
TAIL_BYTES = 4000  # an error in Dagster's UI stays readable


class RunFailedError(RuntimeError):
    """A trainer run ended without a result; the message is the end of its log."""


def trainer_command(run_file: Path, nproc: int) -> list[str]:
    """Command line of one run: torchrun for several processes, plain Python for one."""
    if nproc == 1:
        return [sys.executable, "-m", "trainer", "--run", str(run_file)]
    return [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc),
        "-m", "trainer", str(run_file),  # a bare --run would be taken for torchrun's own --run-path
    ]  # fmt: skip


def start(
    run_file: Path, nproc: int, server: Path | None, log: IO[bytes], report: "Reporter"
) -> "subprocess.Popen | ForkedRun":
    """Start the trainer: a fork of the preloaded server for one process, else a program of its own.

    Args:
        run_file: The run.
        nproc: Number of trainer processes on this machine.
        server: Socket of the fork server, or None.
        log: Receives what the trainer says.
        report: Told when the server could not be reached and the run starts the slower way.
    """
    if nproc == 1 and server is not None:
        from trainer.forkserver import ForkedRun

        try:
            return ForkedRun(server, run_file.resolve(), log.fileno())
        except OSError as error:
            report(f"no preloaded trainer ({error}), starting a new one")
    parent = os.getpid()
    return subprocess.Popen(
        trainer_command(run_file, nproc),
        stdout=log, stderr=log, stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with(parent, signal.SIGTERM),  # noqa: PLW1509 - the child has one thread here
    )  # fmt: skip


OBSERVED = (
    "step",
    "loss",
    "tokens_per_s",
    "rss_bytes",
    "target_loss",
    "drop",
    "credit",
    "residual",
)
"""Numbers of a progress line that the asset's page draws while a run goes on; the last four are those of a credited run."""


def new_lines(path: Path, offset: int) -> tuple[list[dict], int]:
    """Complete JSON lines of a file after `offset`, and the new offset; a torn last line waits.

    A resumed run writes its file anew, up to its checkpoint: then reading starts anew, and the rest of a line is passed over.
    """
    if not path.exists():
        return [], 0
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) < offset:
            offset = 0
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    found = []
    for line in data[:end].splitlines():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found, offset + end


def progress_text(line: dict) -> str:
    """One line of progress for a person."""
    parts = [f"step {line.get('step', '?')}"]
    if isinstance(line.get("loss"), int | float):
        parts.append(f"loss {line['loss']:.4f}")
    if isinstance(line.get("residual"), int | float):
        parts.append(
            f"target's drop {line['drop']:.2e} = credit {line['credit']:.2e} + residual {line['residual']:.2e}"
        )
    if isinstance(line.get("tokens_per_s"), int | float):
        parts.append(f"{line['tokens_per_s']:,.0f} tokens/s")
    if isinstance(line.get("rss_bytes"), int | float):
        parts.append(f"{line['rss_bytes'] / 2**30:.2f} GiB")
    return ", ".join(parts)


def log_tail(directory: Path) -> str:
    """The end of the trainer's own log, for an error message."""
    log = directory / "trainer.log"
    data = log.read_bytes()[-TAIL_BYTES:] if log.exists() else b""
    return data.decode("utf-8", errors="replace").strip()


def own_code(directory: Path, code: int, nproc: int = 1) -> int:
    """The trainer's own exit code; torchrun replaces it by 1, so the trainer leaves it in `exit.json` as well.

    Without that file it had no chance to say anything: it was killed, or a process of several was, and may be resumed.
    """
    stopped = directory / "exit.json"
    if code and stopped.exists():
        return int(json.loads(stopped.read_text())["code"])
    return EXIT_RESUME if code < 0 or (code and nproc > 1) else code


def supervise(directory: Path, nproc: int, report: "Reporter", server: Path | None = None) -> int:
    """Run the trainer in `directory` until it ends; resume it where it asks for that.

    Args:
        directory: Folder with `run.json`.
        nproc: Number of trainer processes on this machine.
        report: Receives one text per forwarded line of progress.
        server: Socket of the preloaded trainer, or None.

    Returns:
        The trainer's exit code.
    """
    progress = directory / "progress.jsonl"
    for attempt in range(MAX_RESUMES + 1):
        offset = progress.stat().st_size if progress.exists() else 0
        (directory / "exit.json").unlink(
            missing_ok=True
        )  # what an earlier attempt said is not this one's word
        with (directory / "trainer.log").open("ab") as log:
            child = start(directory / "run.json", nproc, server, log, report)
            with forward_signals(child) as told_to_stop:
                last = 0.0
                while (ended := child.poll()) is None:
                    time.sleep(POLL_S)
                    lines, offset = new_lines(progress, offset)
                    if lines and time.monotonic() - last >= LOG_EVERY_S:
                        report(progress_text(lines[-1]))
                        last = time.monotonic()
        code = own_code(directory, ended, nproc)
        # A trainer that was stopped asks to be resumed too, but whoever stopped it wants it to stay stopped.
        if code != EXIT_RESUME or attempt == MAX_RESUMES or told_to_stop.is_set():
            return code
        report("the trainer asked to be resumed")
    return EXIT_RESUME


class Reporter:
    """Sends texts to Dagster's run log through Pipes, or to standard output outside of Dagster."""

    def __init__(self, pipes: object | None) -> None:
        """`pipes` is an open Pipes context, or None."""
        self._pipes = pipes

    def __call__(self, text: str) -> None:
        """Report one line."""
        if self._pipes is None:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
        else:
            self._pipes.log.info(text)  # type: ignore[attr-defined]


@contextmanager
def forward_signals(child: "subprocess.Popen | ForkedRun") -> Iterator[threading.Event]:
    """Pass SIGINT and SIGTERM on to the trainer, which then checkpoints and leaves; says whether one came."""
    told_to_stop = threading.Event()

    def forward(number: int, _frame: object) -> None:
        told_to_stop.set()
        child.send_signal(number)

    previous = {
        number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield told_to_stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main() -> int:
    """Entry of the Pipes child."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.launch", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder that holds run.json")
    parser.add_argument("--nproc", type=int, default=1, help="trainer processes on this machine")
    parser.add_argument("--parent", type=int, default=0, help="process whose end ends this one")
    parser.add_argument("--server", type=Path, help="socket of a preloaded trainer")
    arguments = parser.parse_args()
    if arguments.parent:
        die_with(arguments.parent, signal.SIGTERM)
    import dagster_pipes

    under_dagster = dagster_pipes.PipesEnvVarParamsLoader().is_dagster_pipes_process()
    with dagster_pipes.open_dagster_pipes() if under_dagster else nullcontext() as pipes:
        code = supervise(arguments.run, arguments.nproc, Reporter(pipes), arguments.server)
    if code:
        sys.stderr.write(f"{log_tail(arguments.run)}\n")
    return code if code >= 0 else 128 - code


@contextmanager
def observed(context: object, directory: Path) -> Iterator[None]:
    """While a run lasts, put its newest progress on the asset's page every few seconds."""
    import dagster as dg

    done = threading.Event()
    key = context.asset_key  # type: ignore[attr-defined]
    instance = context.instance  # type: ignore[attr-defined]

    def watch() -> None:
        offset = 0
        while not done.wait(OBSERVE_EVERY_S):
            lines, offset = new_lines(directory / "progress.jsonl", offset)
            if not lines:
                continue
            metadata = {
                name: float(lines[-1][name])
                for name in OBSERVED
                if isinstance(lines[-1].get(name), int | float)
            }
            instance.report_runless_asset_event(
                dg.AssetObservation(asset_key=key, metadata=metadata)
            )

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def launch(context: object, pipes_client: object, directory: Path, nproc: int) -> dict:
    """Run the trainer on `directory/run.json` from an asset and return its `result.json`.

    A finished run is not repeated, as long as its files are those that it left (`pipelines.outputs`).

    Args:
        context: The asset's execution context.
        pipes_client: A `dagster.PipesSubprocessClient`.
        directory: Folder of the run.
        nproc: Number of trainer processes.

    Raises:
        RunFailedError: The run ended without a complete result; says the exit code and the end of its log.
    """
    from dagster._core.errors import DagsterPipesExecutionError

    from pipelines import outputs, preloaded
    from pipelines.settings import child_environment, read_settings

    result = directory / "result.json"
    if result.exists() and (problems := outputs.damage(directory)):
        aside = outputs.set_aside(directory)
        context.log.warning(  # type: ignore[attr-defined]
            f"run {directory.name} is not as it was left, so it is made again ({'; '.join(problems)}); what was found lies in {aside.name}"
        )
    if not result.exists():
        command = [
            sys.executable,
            "-m",
            "pipelines.launch",
            "--run",
            str(directory),
            "--nproc",
            str(nproc),
            "--parent",
            str(os.getpid()),
            *preloaded.option(),
        ]
        try:
            with observed(context, directory):
                pipes_client.run(  # type: ignore[attr-defined]
                    context=context,
                    command=command,
                    env=child_environment(read_settings().threads),
                )
        except DagsterPipesExecutionError as error:
            raise RunFailedError(
                f"run {directory.name} stopped: {log_tail(directory) or error}"
            ) from error
    if not result.exists():
        raise RunFailedError(
            f"run {directory.name} ended without result.json: {log_tail(directory)}"
        )
    if not (directory / outputs.NAME).exists():
        outputs.seal(directory)
    return json.loads(result.read_text())


def launcher(context: object, pipes_client: object) -> Callable[[Path, int], dict]:
    """`launch` with the asset's context and client bound: what a step gets to start runs with."""
    return lambda directory, nproc: launch(context, pipes_client, directory, nproc)


if __name__ == "__main__":
    sys.exit(main())
