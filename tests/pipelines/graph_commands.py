"""The real commands in homes of the tests: Dagster's and our own, started as a user starts them.

A home at `tiny` takes one run of about a minute, so tests share finished homes and copy them before they change one.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PATIENCE_S = 600  # for one command on a machine that does other work too
MATERIALIZE = [
    str(BIN / "dagster"), "asset", "materialize", "--select", "*", "-m", "pipelines.definitions"
]  # fmt: skip
"""The required command, from the repository root."""

LETTER = (
    "Fellow citizens, the roads that were begun in the spring are now open, and the debt that "
    "was left from the war grows smaller with every quarter.\n\n"
    "Of the canals I can say as much.\n"
)
"""A delivery that no other owner made: one record of one owner."""

LETTER_FILE = "inbox/washington/letter.txt"

FORGET = ["erase", "--owner", "registry"]
"""The command by which eight more people ask to be forgotten: half of those that the demo's own request left."""
for _number in range(2, 33, 4):
    FORGET += ["--source", f"person-{_number:04d}"]

Done = subprocess.CompletedProcess[str]


def environment(home: Path, **extra: str) -> dict[str, str]:
    """Our own variables set for a home, those of the caller's deployment left out."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DATAWORTH_", "DAGSTER_", "PYTEST_"))
    }
    return kept | {
        "DATAWORTH_HOME": str(home), "DAGSTER_HOME": str(home / "dagster"), "DATAWORTH_SIZE": "tiny",
        "COLUMNS": "200", "NO_COLOR": "1",
    } | extra  # fmt: skip


def command(home: Path, *arguments: str, timeout_s: float = PATIENCE_S, **extra: str) -> Done:
    """Run any program in a home; its output comes back as text."""
    return subprocess.run(
        arguments, cwd=ROOT, env=environment(home, **extra), timeout=timeout_s,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip


def dataworth(home: Path, *arguments: str, **extra: str) -> Done:
    """Our command line in a home."""
    return command(home, str(BIN / "dataworth"), *arguments, **extra)


def materialize(home: Path, select: str = "*", **extra: str) -> Done:
    """Dagster's command over a part of the graph, or all of it."""
    return command(home, *[select if word == "*" else word for word in MATERIALIZE], **extra)


def text_of(done: Done) -> str:
    """Everything a command said, on one line, without the boxes of tables."""
    return flat(done.stdout + done.stderr)


def flat(text: str) -> str:
    """A text on one line, without the boxes of tables."""
    return " ".join(re.sub(r"[┃│┏┓┗┛┡┩╇╈━─┼├┤└┘┴┬┌┐]", " ", text).split())


def log_of(home: Path) -> str:
    """Dagster's log of the newest `dataworth run`."""
    return max(
        (home / "logs").glob("run-*.log"), key=lambda path: path.stat().st_mtime_ns
    ).read_text()


def made(log: str) -> set[str]:
    """Assets that a run made instead of reusing them."""
    return set(re.findall(r" - (\w+): made [0-9a-f]{12}", log))


def reused(log: str) -> set[str]:
    """Assets whose earlier result a run returned."""
    return set(re.findall(r" - (\w+): nothing changed, reused [0-9a-f]{12}", log))


def results(home: Path) -> dict[str, dict[str, Any]]:
    """The newest result of every asset."""
    return {
        path.parent.name: json.loads(path.read_text())
        for path in sorted(home.glob("results/*/latest.json"))
    }


def values(home: Path, asset: str) -> dict[str, Any]:
    """The values of an asset's newest result."""
    return results(home)[asset]["values"]


def data_versions(home: Path) -> dict[str, str]:
    """Data version of every asset."""
    return {asset: body["data_version"] for asset, body in results(home).items()}


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def ledger(home: Path) -> list[dict[str, Any]]:
    """Every entry of the ledger."""
    return [row for row in rows(home / "ledger/entries.jsonl") if "checkpoint" not in row]


def stored(home: Path, version: str) -> list[Path]:
    """The block files of a corpus version."""
    storage = json.loads((home / f"storage/{version}.json").read_text())
    return [home / "blocks" / block["file"] for block in storage["blocks"]]


def head(home: Path) -> str:
    """The corpus version in force."""
    return (home / "HEAD").read_text().strip()


def contents(home: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a home with its time of change and bytes, but Dagster's own, logs and locks."""
    return {
        str(path.relative_to(home)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(home.rglob("*"))
        if path.is_file() and path.relative_to(home).parts[0] not in ("dagster", "logs", "locks")
    }


def flip(path: Path, place: float = 0.5) -> None:
    """Change one bit of a file, at a share of its length."""
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 1
    path.write_bytes(data)


@contextmanager
def started(home: Path, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program in a process group of its own, ended with all its children when the block is left."""
    # A background job of a shell has SIGINT ignored, and Dagster would hand that on to SIGTERM.
    process = subprocess.Popen(
        ["env", "--default-signal=INT,TERM", *arguments], cwd=ROOT, env=environment(home, **extra),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        kill(process)
        until(lambda: not processes(home), "the last process of the home ended", 60)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a whole process group at once, as a power cut would."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def processes(home: Path) -> list[str]:
    """Command lines of living processes that work in this home."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            named = (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it ended while we looked, or belongs to another user
            continue
        if str(home).encode() in named and state != "Z" and int(folder.name) != os.getpid():
            found.append(named.replace(b"\0", b" ")[:200].decode(errors="replace"))
    return found


def until(holds: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(0.02)


def data_of(home: Path, folder: str) -> dict[str, tuple[int, bytes]]:
    """Every file below one folder of a home."""
    return {name: data for name, data in contents(home).items() if name.startswith(f"{folder}/")}
