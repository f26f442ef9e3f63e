"""What a finished run left, by digest, so that a file that changed later is noticed before anybody reads it.

A run's folder holds `outputs.json`, written after `result.json`: `{"format": 1, "files": {relative path: SHA-256}}`. Checkpoints
and banks stand in it by nothing: they carry digests of their own, which their readers check. Logs and timings are no outputs.

A disk, a copy or a hand can change a file years after the run. The launcher reuses a finished run only if it is as it was left;
else the folder is set aside under a name of its own, nothing of it is lost, and the run is made again, with the same seeds.
"""

import json
import os
import shutil
from pathlib import Path

from provenance import file_sha256, jcs, write_atomic

NAME = "outputs.json"
FORMAT = 1
_NOT_OUTPUTS = frozenset(
    {NAME, "run.json", "trainer.log", "progress.jsonl", "events.jsonl", "timings.jsonl", "exit.json"}
)  # fmt: skip


def seal(directory: Path) -> None:
    """Write down what a finished run left.

    Args:
        directory: Folder of a run that has its `result.json`.
    """
    body = {"format": FORMAT, "files": {name: file_sha256(directory / name) for name in _names(directory)}}  # fmt: skip
    write_atomic(directory / NAME, jcs(body))


def damage(directory: Path) -> list[str]:
    """How a finished run differs from what it left; nothing for a run that was never sealed.

    Args:
        directory: Folder of the run.

    Returns:
        One sentence per file that is missing or has another digest.
    """
    try:
        text = (directory / NAME).read_bytes()
    except FileNotFoundError:
        return []
    try:
        files = json.loads(text)["files"]
    except (ValueError, LookupError, TypeError):
        return [f"{directory.name}/{NAME} is not readable"]
    problems = []
    for name, expected in files.items():
        path = directory / name
        got = file_sha256(path) if path.is_file() else "no file"
        if got != expected:
            problems.append(f"{directory.name}/{name}: expected {expected[:12]}, got {got[:12]}")
    return problems


def set_aside(directory: Path) -> Path:
    """Move a damaged run out of the way and leave its `run.json` in a fresh folder, ready to be run again.

    Args:
        directory: Folder of the run.

    Returns:
        Where the damaged one lies now: `NAME.damaged-K`, which an erasure empties like any other run.
    """
    number = 1
    while (aside := directory.with_name(f"{directory.name}.damaged-{number}")).exists():
        number += 1
    directory.rename(aside)
    fresh = directory.with_name(f"{directory.name}.fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    shutil.copy2(aside / "run.json", fresh / "run.json")
    fresh.rename(
        directory
    )  # whole or not there: a crash before leaves no run, and the step writes it
    return aside


def _names(directory: Path) -> list[str]:
    names = []
    for folder, folders, files in os.walk(directory):
        inside = Path(folder).relative_to(directory)
        if inside == Path():
            folders[:] = [one for one in folders if one != "bank" and not one.startswith("step-")]
            files = [one for one in files if one not in _NOT_OUTPUTS]  # noqa: PLW2901 - of the top only
        names += [(inside / one).as_posix() for one in files]
    return sorted(names)
