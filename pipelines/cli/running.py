"""Commands that make things: `init`, `run`, `ui`, `status`."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from pipelines.settings import Settings, read_settings

STEP = re.compile(r" - (?P<asset>\w+) - STEP_(?P<what>START|SUCCESS|FAILURE|SKIPPED) - ")
CAUSE = re.compile(
    r"^(?:\w+\.)*(?P<name>\w*(?:Error|Failure|Exception)): (?P<message>.+?)\n\s*(?:\n|Stack Trace:)",
    re.MULTILINE | re.DOTALL,
)
FULL_BYTES = 1 << 20  # what Dagster, SQLite and the trainer say on a full disk rarely names it
DISK_FULL = (
    "the run stopped: the disk of the home is full; free some space and run the same command again."
)
FAILED_CHECK = re.compile(
    r"Asset check '(?P<check>\w+)' on '(?P<asset>\w+)' did not pass\. Description: (['\"])(?P<why>.*)\3$",
    re.MULTILINE,
)
REUSED = re.compile(r" - (?P<asset>\w+): nothing changed, reused ")

if TYPE_CHECKING:
    from pipelines.storage.home import Home

console = Console()


def environment(settings: Settings, **changes: str | None) -> dict[str, str]:
    """Environment of a Dagster process that works in this home."""
    from pipelines.settings import child_environment

    extra = {
        "DATAWORTH_HOME": str(settings.home),
        "DAGSTER_HOME": str(settings.dagster_home),
        **{name: value for name, value in changes.items() if value},
    }
    return child_environment(1, **extra)


def init() -> None:
    """Make the home folder with its commented `dataworth.toml`; nothing that exists is changed."""
    from pipelines.site import make_home

    settings = read_settings()
    made = make_home(settings.home, own_inbox=settings.inbox is not None)
    console.print(
        f"{'made' if made else 'kept'} [bold]{settings.home}[/]; settings are in dataworth.toml, next: dataworth run"
    )


def run(
    select: Annotated[str, typer.Option(help="Dagster selection of assets.")] = "*",
    size: Annotated[str, typer.Option(help="tiny, small, default, pilot or report.")] = "",
    inbox: Annotated[
        str, typer.Option(help="Folder OWNER/* of deliveries instead of the home's own inbox.")
    ] = "",
) -> None:
    """Materialise the whole graph; a second run redoes only what changed."""
    from pipelines.site import open_site

    settings = read_settings()
    # Bad settings are refused before Dagster starts.
    site = open_site(settings.home, inbox or settings.inbox, size or settings.size, settings.world)
    site.config.require_target()
    log = (
        settings.home
        / "logs"
        / f"run-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.log"
    )
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "dagster",
        "asset",
        "materialize",
        "--select",
        select,
        "-m",
        "pipelines.definitions",
    ]
    started = time.monotonic()
    with _one_run_at_a_time(site.home), log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment(settings, DATAWORTH_SIZE=size or settings.size, DATAWORTH_INBOX=inbox or (str(settings.inbox or "") or None)),
        )  # fmt: skip
        try:
            code = _follow(process, log)
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if code:
        full = shutil.disk_usage(settings.home).free < FULL_BYTES
        raise RuntimeError(
            f"{DISK_FULL if full else _failure(log)}\nWhole log: {log}. The last good version stays readable; the next run goes on from here."
        )
    console.print(
        f"done in {time.monotonic() - started:.0f} s; next: dataworth report, dataworth verify, dataworth ui"
    )


@contextmanager
def _one_run_at_a_time(home: "Home") -> Iterator[None]:
    """One home has one newest result per asset, so runs of different content must not mix; a second one waits, and says so."""
    from pipelines.storage.errors import HomeError

    with ExitStack() as stack:
        try:
            stack.enter_context(home.lock("run", timeout_s=0.1))
        except HomeError:
            console.print(
                "another run is going on in this home; waiting for it to end (stop with Ctrl-C)"
            )
            stack.enter_context(home.lock("run"))
        yield


def _follow(process: subprocess.Popen, log: Path) -> int:
    """Show a bar of assets until the run ends."""
    from pipelines.defs import ASSETS

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    done: set[str] = set()
    reused: set[str] = set()
    offset = 0
    with Progress(*columns, console=console, transient=False) as bar:
        task = bar.add_task("starting", total=len(ASSETS))
        while True:
            ended = process.poll() is not None
            with log.open("rb") as file:
                file.seek(offset)
                text = file.read()
            end = text.rfind(b"\n") + 1
            offset += end
            for line in text[:end].decode("utf-8", errors="replace").splitlines():
                if match := REUSED.search(line):
                    reused.add(match["asset"])
                elif match := STEP.search(line):
                    if match["what"] == "SUCCESS" and match["asset"] in ASSETS:
                        done.add(match["asset"])
                    bar.update(task, completed=len(done), description=match["asset"])
            if ended:
                bar.update(task, description=f"{len(done)} assets, {len(reused)} unchanged")
                return process.returncode
            time.sleep(0.2)


def _failure(log: Path) -> str:
    """The cause of a failed run, out of Dagster's log, in one paragraph."""
    text = log.read_text(errors="replace")
    causes = [
        _without_traceback(match["message"])
        for match in CAUSE.finditer(text)
        if not match["name"].startswith("Dagster")
    ]
    failed = [
        f"check {match['check']} of {match['asset']} did not pass: {match['why']}"
        for match in FAILED_CHECK.finditer(text)
    ]
    found = causes[:1] or list(dict.fromkeys(failed)) or ["see the log"]
    return f"the run stopped: {'; '.join(found).rstrip('.')}."


def _without_traceback(message: str) -> str:
    """A message as it is, or the last line of a trainer's traceback."""
    message = message.strip()
    return message.splitlines()[-1] if "Traceback (most recent call last)" in message else message


def ui(
    port: Annotated[int, typer.Option(help="Port on this machine.")] = 3000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; there is no authentication, keep it local.")
    ] = "127.0.0.1",
) -> None:
    """Open Dagster's web page of the graph, with schedule and sensor running."""
    from pipelines.site import make_home

    settings = read_settings()
    make_home(settings.home, own_inbox=settings.inbox is not None)
    console.print(f"asset graph: [bold]http://{host}:{port}/asset-groups[/] (stop with Ctrl-C)")
    # Background jobs of a shell have SIGINT ignored, and Dagster would copy that: give it the default back.
    command = [
        sys.executable,
        "-m",
        "dagster",
        "dev",
        "-m",
        "pipelines.definitions",
        "-h",
        host,
        "-p",
        str(port),
    ]
    os.execvpe(command[0], command, environment(settings, DATAWORTH_SIZE=settings.size))


def status() -> None:
    """What this home holds: every asset's newest result, open requests with their deadlines, the size of the ledger."""
    from pipelines.cli.asking import this_site
    from pipelines.defs import ASSETS
    from pipelines.requests import load
    from pipelines.results import latest

    site = this_site()
    table = Table(
        "asset", "data version", "facts", title=f"{site.home.path}  (size {site.size.name})"
    )
    for name in ASSETS:
        result = latest(site.home.results, name)
        facts = result.values if result else {}
        shown = ", ".join(
            f"{key} {value}"
            for key, value in facts.items()
            if isinstance(value, int | float | bool)
        )
        table.add_row(name, result.data_version[:12] if result else "never made", shown[:100])
    console.print(table)
    requests = Table("request", "kind", "state", "received", "deadline", title="requests")
    for request in load(site.home):
        requests.add_row(
            request.id, request.kind, request.state, request.received, request.deadline
        )
    if requests.row_count:
        console.print(requests)


COMMANDS = [init, run, ui, status]
