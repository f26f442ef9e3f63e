"""What a run leaves behind for others to check: windows.jsonl, result.json, exit.json.

*windows.jsonl*, one canonical line per checkpoint: from which state to which state, by which steps, on which records.
It is what the ledger commits to and what a replay recomputes. `records_root` is the RFC 9162 root over the sorted
record ids of the window, so that one record's use can be proved without naming the others.

*result.json* is written last: a run without it is not done. *exit.json* says why a run stopped early; a launcher such
as torchrun replaces a process's exit code by its own, a file keeps it.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, write_atomic
from provenance.hashing import leaf_hash
from provenance.merkle import root_of
from trainer.codec import decimal_string
from trainer.errors import SpecError
from trainer.metrics import read_lines
from trainer.tokens import SHARD_LEAVES

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

FORMAT = 1
WINDOWS_FILE, RESULT_FILE, EXIT_FILE = "windows.jsonl", "result.json", "exit.json"


def lock_folder(directory: Path) -> int:
    """Hold a run's folder against a second writer until the descriptor is closed or the process dies.

    Args:
        directory: folder of the run; made if needed.

    Returns:
        The descriptor.

    Raises:
        SpecError: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SpecError(
            "the run is being worked on by another process; wait for it, or end it first"
        ) from error
    return descriptor


def window_line(
    first_step: int,
    last_step: int,
    records: Iterable[tuple[int, bytes]] | None,
    before: str,
    after: str,
    optimizer: str,
) -> dict[str, Any]:
    """One line of windows.jsonl.

    No random state stands in it, because a run keeps none: every draw follows from the seed and the step.

    Args:
        first_step: first step of the window, counted from 1; step s trains on `plan.batch(s - 1)`.
        last_step: its last step, the N of step-N.
        records: (index, record_id) that its batches hold, or None if the objective can't say.
        before: logical root before the window.
        after: logical root after it.
        optimizer: root over the optimiser's tensors alone, after it.

    Returns:
        The line as a mapping.
    """
    seen = {} if records is None else {record_id: index for index, record_id in records}
    return {
        "format": FORMAT,
        "first_step": first_step,
        "last_step": last_step,
        "shards": sorted({index // SHARD_LEAVES for index in seen.values()}),
        "records": len(seen),
        "records_root": "none"
        if records is None
        else root_of(leaf_hash(i) for i in sorted(seen)).hex(),
        "state_digest_before": before,
        "state_digest_after": after,
        "optimizer_digest_after": optimizer,
    }


def restore_windows(directory: Path, done: int, last: dict[str, Any]) -> None:
    """Bring windows.jsonl to the state of the checkpoint that a run goes on from.

    Args:
        directory: folder of the run.
        done: steps of that checkpoint; later lines are of steps that will be done again.
        last: the checkpoint's own window, added if the process died between checkpoint and line.
    """
    lines = [line for line in read_lines(directory / WINDOWS_FILE) if line["last_step"] <= done]
    if last and (not lines or lines[-1]["last_step"] < done):
        lines.append(last)
    _write_lines(directory / WINDOWS_FILE, lines)


def append_window(directory: Path, line: dict[str, Any]) -> None:
    """Add one line to windows.jsonl, atomically."""
    _write_lines(directory / WINDOWS_FILE, [*read_lines(directory / WINDOWS_FILE), line])


def write_result(directory: Path, result: dict[str, Any]) -> None:
    """Write result.json, the last file of a run that is done.

    Args:
        directory: folder of the run.
        result: strings, integers, lists and objects; floats become decimal strings.
    """
    texts = {
        key: decimal_string(value) if isinstance(value, float) else value
        for key, value in result.items()
    }
    (directory / EXIT_FILE).unlink(missing_ok=True)
    write_atomic(directory / RESULT_FILE, jcs({"format": FORMAT, **texts}))


def write_exit(directory: Path, code: int, reason: str) -> None:
    """Write exit.json: why a run stopped without being done.

    Args:
        directory: folder of the run.
        code: exit code.
        reason: one line.
    """
    write_atomic(directory / EXIT_FILE, jcs({"format": FORMAT, "code": code, "reason": reason}))


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    write_atomic(path, b"".join(jcs(line) + b"\n" for line in lines))
