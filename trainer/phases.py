"""phases.json: one entry per phase of a run, so that a reader need not take the trainer's word for it.

Each of partition, local, communicate, update and checkpoint says who did it, what went in and came out (by digest, or
an explicit "none"), how that was checked and with what result, what it cost, which alternatives were rejected and why,
how uncertain it is, and whether a human or a rule decided. `check_phases` refuses a record that leaves one of these
out. Seconds are those of `timings.jsonl` over all starts of the run; bytes follow from the layout.
"""

from __future__ import annotations

import hashlib
import re
from math import isfinite
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, write_atomic
from trainer import entries
from trainer.codec import decimal_string
from trainer.errors import DesyncError, NumericalError, SaveError
from trainer.journal import WINDOWS_FILE
from trainer.metrics import PROGRESS_FILE, read_lines
from trainer.spec import run_digest
from trainer.timings import RankTime, rank_times

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.entries import Facts
    from trainer.spec import RunSpec

FORMAT = 2
PHASES_FILE = "phases.json"
PHASES = ("partition", "local", "communicate", "update", "checkpoint")
FIELDS = (
    "phase", "responsible", "input", "output", "check", "result", "resources", "rejected", "uncertainty", "decided_by",
)  # fmt: skip
RANK_FIELDS = ("rank", "compute_s", "communicate_s", "idle_s", "checkpoint_s")


def write_phases(directory: Path, run: RunSpec, facts: Facts) -> None:
    """Write phases.json.

    Args:
        directory: folder of the run.
        run: the run.
        facts: what this process knows.
    """
    windows = read_lines(directory / WINDOWS_FILE)
    window = windows[-1] if windows else {}
    losses = _losses_digest(directory)
    found = {
        "partition": entries.partition(run, facts),
        "local": entries.local(run, facts, window),
        "communicate": entries.communicate(run, facts, losses),
        "update": entries.update(run, window, losses),
        "checkpoint": entries.checkpoint(directory, facts),
    }
    ranks = [_rank(*item) for item in enumerate(_every_rank(directory, facts.layout.world_size))]
    for name, entry in found.items():
        passed = entry.pop("passed")
        failed = facts.failure[0] == name
        entry["result"] = f"failed: {facts.failure[1]}" if failed else f"passed: {passed}"
        entry["resources"] = {"ranks": ranks, **entry.get("resources", {})}
    record = {
        "format": FORMAT,
        "run": run.run,
        "run_digest": run_digest(run),
        "steps": facts.done,
        "processes": facts.layout.world_size,
        "phases": [{"phase": name, **found[name]} for name in PHASES],
    }
    write_atomic(directory / PHASES_FILE, jcs(record))


def check_phases(record: Any) -> list[str]:
    """What a phase record lacks.

    Args:
        record: parsed phases.json.

    Returns:
        One text per problem; empty if every phase answers every question.
    """
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return [f"expected a phase record of format {FORMAT}"]
    problems = [f"{name}: missing" for name in ("run", "run_digest", "steps", "processes") if name not in record]  # fmt: skip
    phases = record.get("phases")
    names = [p.get("phase") if isinstance(p, dict) else p for p in phases] if isinstance(phases, list) else phases  # fmt: skip
    if names != list(PHASES):
        return [*problems, f"phases: expected {', '.join(PHASES)}, got {names}"]
    for entry in record["phases"]:
        problems += [f"{entry['phase']}.{text}" for text in _entry_problems(entry, record)]
    return problems


def failures(record: dict[str, Any]) -> dict[str, str]:
    """Phase -> what its check found, for those whose check did not pass."""
    return {
        entry["phase"]: entry["result"].removeprefix("failed: ")
        for entry in record["phases"]
        if not entry["result"].startswith("passed")
    }


def failed_phase(error: BaseException, done: int) -> str:
    """The phase that an error belongs to.

    Args:
        error: what ended the run.
        done: steps done; replicas that differ before the first step were cut wrongly.
    """
    if isinstance(error, SaveError):
        return "checkpoint"
    if isinstance(error, NumericalError):
        return "local"
    return "partition" if isinstance(error, DesyncError) and not done else "communicate"


def _entry_problems(entry: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """What one entry lacks."""
    missing = [name for name in FIELDS if not entry.get(name)]
    if missing:
        return [f"{name}: missing" for name in missing]
    problems = []
    for name in ("input", "output"):
        digests = entry[name]
        good = isinstance(digests, dict) and all(_is_digest(value) for value in digests.values())
        if not good:
            problems.append(f"{name}: expected names with a digest or 'none' each")
    if not re.match(r"passed: .|failed: .", str(entry["result"])):
        problems.append("result: expected 'passed: ...' or 'failed: ...'")
    if not re.match(r"human: .|rule: .", str(entry["decided_by"])):
        problems.append("decided_by: expected 'human: ...' or 'rule: ...'")
    ranks = entry["resources"].get("ranks", []) if isinstance(entry["resources"], dict) else []
    whole = all(isinstance(rank, dict) and set(RANK_FIELDS) <= set(rank) for rank in ranks)
    if len(ranks) != record.get("processes") or not whole:
        problems.append(f"resources.ranks: expected {', '.join(RANK_FIELDS)} of every process")
    reasons = isinstance(entry["rejected"], list) and all(
        isinstance(other, dict) and other.get("what") and other.get("reason")
        for other in entry["rejected"]
    )
    if not reasons:
        problems.append("rejected: expected 'what' and 'reason' each")
    return problems


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and bool(re.fullmatch(r"none|[0-9a-f]{64}", value))


def _every_rank(directory: Path, world: int) -> list[RankTime]:
    """Times of all processes; zeros for those that have not finished a step."""
    found = rank_times(directory)
    return (found + [RankTime(0.0, 0.0, 0.0, 0.0)] * world)[:world]


def _rank(rank: int, time: RankTime) -> dict[str, Any]:
    return {
        "rank": rank,
        "compute_s": f"{time.compute:.6f}",
        "communicate_s": f"{time.communicate:.6f}",
        "idle_s": f"{time.idle:.6f}",
        "checkpoint_s": f"{time.checkpoint:.6f}",
    }


def _losses_digest(directory: Path) -> str:
    """SHA-256 over step, loss and gradient norm of every step: equal for runs that computed the same."""
    lines = read_lines(directory / PROGRESS_FILE)
    if not lines:
        return "none"
    rows = [
        [line["step"], *(_number(line.get(name, 0.0)) for name in ("loss", "grad_norm"))]
        for line in lines
    ]
    return hashlib.sha256(jcs(rows)).hexdigest()


def _number(value: float) -> str:
    """A decimal string; the loss of a step that the spike guard refused may not be finite."""
    return decimal_string(value) if isfinite(value) else str(value)
