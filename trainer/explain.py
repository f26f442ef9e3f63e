"""Walking back from a bad loss, a slow step or a stop to the phase and the input that caused it.

    stopped     exit.json and the failed check of phases.json name the phase and the process
    loss spike  step s measures the state after step s-1 on batch s. Back from it:
                  1. was a step before it done with another learning rate than the schedule's?        update
                  2. does the loss stay up on the batches that follow? then the state was damaged      update
                  3. otherwise the batch did it: its record ids, first those that only such steps use  local
    slow step   the column of timings.jsonl that grew most, after waiting was taken out of `communicate`:
                  input or local on one rank  a slow process, the others wait for it                   local
                  communicate on all          the network                                             communicate
                  update, checkpoint          the optimiser, the disk                                 themselves

A loss is a spike if it lies above the median of the WINDOW before by more than SPIKE typical differences between
neighbours; a step is slow if it lasts SLOW times the median. These are rules of thumb, and the evidence is given with
each finding: a cause that leaves no trace in loss, learning rate or times is not found. Only ids of records are
named, never their text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from provenance.hashing import leaf_hash
from provenance.merkle import root_of
from trainer.errors import SpecError, TrainerError
from trainer.journal import EXIT_FILE, WINDOWS_FILE
from trainer.metrics import PROGRESS_FILE, read_lines
from trainer.phases import PHASES_FILE, check_phases, failures
from trainer.spec import load_run
from trainer.timings import COLUMNS, TIMINGS_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from trainer.spec import RunSpec

WINDOW = 16
SPIKE = 8.0
SLOW = 3.0
SLOW_S = 0.05
"""A step is not called slow for less than this, seconds."""
MAX_FINDINGS = 8
_PHASE_OF = {"input": "local", "local": "local"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that went wrong, and where it came from."""

    symptom: str
    """"stopped", "loss spike", "slow step" or "record"."""
    step: int
    """Step that shows it, from 1; 0 before the first."""
    phase: str
    """Phase that caused it."""
    cause: str
    """One sentence."""
    rank: int | None = None
    """Process that caused it, if it was one."""
    records: tuple[str, ...] = ()
    """Hex ids of the records of the batch, the most suspect first."""
    evidence: tuple[str, ...] = ()
    """The numbers behind it."""


def explain(directory: Path, step: int | None = None) -> list[Finding]:
    """Find out what went wrong in a run.

    Args:
        directory: folder of the run.
        step: look at this step only, however usual it is; None looks for unusual ones.

    Returns:
        Findings, by step; empty if nothing is unusual.

    Raises:
        SpecError: no run, or it has no such step.
    """
    run = load_run(directory)
    progress = {line["step"]: line for line in read_lines(directory / PROGRESS_FILE)}
    times = _times(directory)
    if step is not None and step not in progress:
        raise SpecError(f"run {run.run} has no step {step}; it has {len(progress)} steps")
    streaks = _spikes({s: line["loss"] for s, line in progress.items()})
    spikes = [streak[0] for streak in streaks]
    findings = [] if step is not None else _stops(directory, max(progress, default=0))
    by_batch = [streak for streak in streaks if _cause_in_state(run, progress, streak[0]) is None]
    suspects = [s for streak in by_batch for s in streak]
    for spike in [step] if step is not None else spikes[:MAX_FINDINGS]:
        findings.append(_bad_loss(run, directory, progress, spike, suspects))
    slow = [step] if step is not None else _slow_steps(times)[:MAX_FINDINGS]
    findings += [_slow_step(times, s, run, directory) for s in slow if s in times]
    return sorted(findings, key=lambda finding: finding.step)


def _stops(directory: Path, done: int) -> list[Finding]:
    """What phases.json and exit.json say about a run that did not end well."""
    found = []
    record = _read(directory / PHASES_FILE)
    problems = check_phases(record) if record is not None else []
    if problems:
        found.append(Finding("record", done, "checkpoint", f"phases.json: {problems[0]}", evidence=tuple(problems)))  # fmt: skip
    elif record is not None:
        for phase, reason in failures(record).items():
            found.append(Finding("stopped", record["steps"], phase, reason, rank=_rank_in(reason)))
    left = _read(directory / EXIT_FILE)
    if left is not None and not found:
        reason = str(left["reason"])
        found.append(Finding("stopped", done, _phase_of_words(reason), reason, _rank_in(reason)))
    return found


def _spikes(losses: Mapping[int, float]) -> list[list[int]]:
    """Steps whose loss is above what went before, neighbours together."""
    found: list[list[int]] = []
    good: list[float] = []
    before = False
    for step, loss in sorted(losses.items()):
        if len(good) >= 5:
            recent = good[-WINDOW:]
            typical = median(abs(b - a) for a, b in itertools.pairwise(recent))
            high = loss - median(recent[-5:]) > SPIKE * max(typical, 1e-3 * abs(recent[-1]))
            if high:
                found += [] if before else [[]]
                found[-1].append(step)
                before = True
                continue
        before = False
        good.append(loss)
    return found


def _bad_loss(
    run: RunSpec, directory: Path, progress: Mapping[int, dict[str, Any]], step: int, spikes: list[int]
) -> Finding:  # fmt: skip
    """From a loss back to the update or the batch behind it."""
    line = progress[step]
    usual = median([progress[s]["loss"] for s in range(max(1, step - 5), step) if s in progress] or [line["loss"]])  # fmt: skip
    evidence = [f"loss {line['loss']:.4f}, {usual:.4f} before"]
    if "grad_norm" in line:
        evidence.append(f"gradient norm {line['grad_norm']:.4f}")
    state = _cause_in_state(run, progress, step)
    if state is not None:
        return Finding("loss spike", step, "update", state, evidence=tuple(evidence))
    records, only = _records(run, directory, step, spikes, progress)
    cause = f"the batch of step {step}: {len(records)} records"
    if only:
        cause += f", {only} of them in no step without a spike"
    if not records:
        cause = (
            f"the batch of step {step}; its records can't be recomputed here (tokens or objective)"
        )
    return Finding("loss spike", step, "local", cause, None, records, tuple(evidence))


def _cause_in_state(run: RunSpec, progress: Mapping[int, dict[str, Any]], step: int) -> str | None:
    """Why the state before a step was bad already, or None if it was not."""
    from trainer.optim import learning_rate

    for earlier in range(step - 1, max(0, step - 4), -1):
        used = progress.get(earlier, {}).get("lr")
        planned = learning_rate(earlier - 1, run.config.optim, run.steps)
        if used is not None and abs(used - planned) > 1e-6 * planned:
            return f"step {earlier} was done with learning rate {used:.3g}, the schedule says {planned:.3g}"
    before = [progress[s]["loss"] for s in range(max(1, step - 5), step) if s in progress]
    after = [progress[s]["loss"] for s in range(step + 1, step + 4) if s in progress]
    if not before or len(after) < 2:
        return None
    usual = median(before)
    if min(after) - usual > 0.5 * (progress[step]["loss"] - usual) > 0:
        return f"the update of step {step - 1} damaged the weights: the loss stays up on the batches after step {step}"
    return None


def _records(
    run: RunSpec, directory: Path, step: int, spikes: list[int], progress: Mapping[int, Any]
) -> tuple[tuple[str, ...], int]:
    """Ids of a step's records, those that only spiking steps use first; and how many these are.

    They are recomputed from the tokens, and believed only if the window of the step commits to them: an objective of
    another package may have read something else.
    """
    from trainer.inputs import batch_plan

    try:
        plan = batch_plan(run, directory)
    except TrainerError:
        return (), 0
    for window in read_lines(directory / WINDOWS_FILE):
        if window["first_step"] <= step <= window["last_step"]:
            steps = range(window["first_step"], window["last_step"] + 1)
            ids = {name for s in steps for _, name in plan.records(s - 1)}
            if root_of(leaf_hash(name) for name in sorted(ids)).hex() != window["records_root"]:
                return (), 0
    # As far as an epoch or so around the step; further away a record has been seen by many other steps.
    near = [s for s in progress if abs(s - step) <= 256]
    used = {s: {name.hex() for _, name in plan.records(s - 1)} for s in {*near, step}}
    elsewhere = Counter(name for s in near if s not in {*spikes, step} for name in used[s])
    shared = Counter(name for s in spikes if s in used for name in used[s])
    ordered = sorted(used[step], key=lambda name: (elsewhere[name] - shared[name], name))
    return tuple(ordered), sum(not elsewhere[name] for name in ordered)


def _times(directory: Path) -> dict[int, dict[str, list[float]]]:
    """Step -> column -> seconds by rank, with the waiting taken out of `communicate`."""
    found: dict[int, dict[str, list[float]]] = {}
    for line in read_lines(directory / TIMINGS_FILE):
        busy = [i + p for i, p in zip(line["input"], line["local"], strict=True)]
        row = {column: [value / 1e6 for value in line[column]] for column in COLUMNS}
        row["communicate"] = [
            max(0.0, spent - (max(busy) - own) / 1e6)
            for spent, own in zip(row["communicate"], busy, strict=True)
        ]
        known = found.setdefault(line["step"], row)
        if known is not row:
            for column in COLUMNS:
                known[column] = [a + b for a, b in zip(known[column], row[column], strict=True)]
    return found


def _slow_steps(times: Mapping[int, dict[str, list[float]]]) -> list[int]:
    """Steps that last much longer than the median; a checkpoint is compared with other checkpoints."""
    steps = sorted(times)[1:]  # the first one warms up
    if len(steps) < 5:
        return []
    training = {s: _duration(times[s]) - max(times[s]["checkpoint"]) for s in steps}
    saving = {s: max(times[s]["checkpoint"]) for s in steps if max(times[s]["checkpoint"]) > 0}
    found = {s for s, spent in training.items() if _slow(spent, list(training.values()))}
    if len(saving) > 1:
        found |= {
            s for s, spent in saving.items()
            if _slow(spent, [other for t, other in saving.items() if t != s])
        }  # fmt: skip
    return sorted(found)


def _slow_step(
    times: Mapping[int, dict[str, list[float]]], step: int, run: RunSpec, directory: Path
) -> Finding:
    """From a slow step back to the column, and the process, that grew most."""
    row = times[step]
    others = [other for s, other in times.items() if s != step]
    usual = {column: _usual(column, others) for column in COLUMNS}
    column = max(COLUMNS, key=lambda name: max(row[name]) - usual[name])
    spent, phase = max(row[column]), _PHASE_OF.get(column, column)
    rank: int | None = row[column].index(spent)
    rest = [value for r, value in enumerate(row[column]) if r != rank]
    if not rest or max(rest) > spent / 2:
        rank = None
    who = "every process" if rank is None else f"rank {rank}"
    where = {"input": "waiting for its batch", "checkpoint": "saving"}.get(column, f"in {column}")
    cause = f"{who} spent {spent:.3f} s {where}, usually {usual[column]:.3f} s"
    if rank is not None and column in ("input", "local"):
        cause += "; the others waited for it"
    records = _records(run, directory, step, [], {step: None})[0] if column == "input" else ()
    evidence = tuple(
        f"{name}: {', '.join(f'{value:.4f}' for value in row[name])} s by rank" for name in COLUMNS
    )
    return Finding("slow step", step, phase, cause, rank, records, evidence)


def _usual(column: str, rows: list[dict[str, list[float]]]) -> float:
    values = [max(row[column]) for row in rows if column != "checkpoint" or max(row[column]) > 0]
    return median(values) if values else 0.0


def _duration(row: dict[str, list[float]]) -> float:
    """Seconds of a step: every phase lasts as long as in its slowest process."""
    return sum(max(row[column]) for column in COLUMNS)


def _slow(spent: float, all_of_them: list[float]) -> bool:
    usual = median(all_of_them)
    return spent > SLOW * usual and spent - usual > SLOW_S


def _rank_in(reason: str) -> int | None:
    """The rank that a message names, if it is one."""
    match = re.search(r"rank (\d+)(?!\d*,)", reason)
    return int(match[1]) if match else None


def _phase_of_words(reason: str) -> str:
    """The phase of a stop that left no record, from the class of its error."""
    if "CheckpointError" in reason or "SaveError" in reason or "ModelError" in reason:
        return "checkpoint"
    if "SpecError" in reason or "DataError" in reason:
        return "partition"
    return "local" if "NumericalError" in reason else "communicate"


def _read(path: Path) -> Any:
    return json.loads(path.read_bytes()) if path.exists() else None
