"""The audit: the same questions to the original, the unlearned and the gold model, and a verdict anyone can recompute.

Order, and why it is this one::

    1  read and unseal the records, check that forgotten, retained and look-alike people are different people
    2  write plan.json: thresholds, limits of the adversary, digests of the models       (before any model is asked about the forgotten; where the
       demonstrations are to be calibrated, the original alone has been asked about people who stay: `calibration`)
    3  the original alone: what has it memorised, and of whom?                          (`memorisation`; without that an audit says nothing)
    4  for each model in turn: tiers 1 to 3, membership, utility, the plan's repertoire  (one model in memory at a time; what is
       finished is kept and not repeated after a kill: `measuring`); random weights: utility
    5  write rows.parquet, then judge *the file that was written*, then audit.json and result.json

Files in the run's folder: `calibration.json` (if asked for), `plan.json`, `progress.jsonl`, `rows.parquet`, `audit.json`, `result.json`. None holds a prompt, a
secret, a text or a name; people are ids salted with the request's key. `verdict.contradictions(audit, rows)` repeats every
number. Without gold the audit runs and is INVALID: what it found about the unlearned model is still shown.

Settings, in `run.config.extra` (real numbers as decimal strings)::

    models       {"original": folder, "unlearned": folder, "gold": folder or list of folders or "none"}
    sealed       {"file", "key_file"[, "aad"]}     forgotten records, sealed
    retained     {"file"}                          records of people who stay and were trained on
    lookalikes   {"file"}                          records never trained; optional, without it no PASS
    tokenizer    path of the tokenizer file
    margin, auc_margin, utility_margin, min_original_rate, min_gold_seeds, resamples, subgroups,
    score_margins                                   optional, see plan.py
    attacks      {"fine_tune_lr": "0.0001", …}     optional, see plan.AttackPlan
    calibrate    true: find the demonstrations of tier 2 on people who stay; `attacks.demonstrations` is then one more number that is tried
    ledger       digests of checkpoints that the ledger names; optional, without it "unchecked" in audit.json says so, and there is no PASS
    derived_subgroups  true: label the forgotten people (`subgroups.labelled`) and register every one given to 16 people or more
    engineering  {"targets": 8, …}                 optional: depth and ripple, written to engineering.parquet (`engineering.Scale`)

Cost: about 60 forward passes of one line per forgotten person and model, and 50 small training steps per model.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, write_atomic
from unlearning.description import describe
from unlearning.engineering import FILE, Scale, measure_engineering
from unlearning.errors import PeopleError, PlanError
from unlearning.lineage import Lineage, check_lineage
from unlearning.measuring import measure, random_model, remove_parts
from unlearning.people import read_records, read_sealed
from unlearning.plan import AuditPlan
from unlearning.presentations import times_shown
from unlearning.probes import FileTokenizer
from unlearning.rows import Evidence, labels_of, read_rows, to_table, write_rows
from unlearning.subgroups import labelled, registered
from unlearning.verdict import Verdict, verdict_from_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainer.spec import RunSpec
    from unlearning.calibration import Tried
    from unlearning.people import Record

FORMAT = 1
_REQUIRED = ("models", "sealed", "retained", "tokenizer")
_PLANNED = (
    "margin", "auc_margin", "utility_margin", "min_original_rate", "min_gold_seeds", "resamples", "subgroups", "score_margins",
)  # fmt: skip
_KNOWN = {
    *_REQUIRED,
    *_PLANNED,
    "lookalikes",
    "attacks",
    "calibrate",
    "ledger",
    "engineering",
    "derived_subgroups",
}


@dataclass(frozen=True, slots=True, repr=False)
class Inputs:
    """Everything an audit reads, checked; without a `repr`, so that no log can show a text."""

    forgotten: list[Record]
    retained: list[Record]
    lookalikes: list[Record]
    key: bytes
    models: list[tuple[str, Path, str]]
    """(role, checkpoint folder, digest), gold models of equal weights only once."""
    plan: AuditPlan
    lineage: Lineage
    """What could not be told about the models' data and recipes, and what is to be said of them."""
    tokenizer: FileTokenizer
    times: dict[str, int] | None
    """Record id → how often the original was shown the text; None where that can't be told."""
    calibration: tuple[Tried, ...] = ()
    """What was tried on people who stay to choose the demonstrations; empty where that wasn't asked for."""


def run(run: RunSpec, directory: Path) -> int:
    """Entry `unlearning.audit:run`.

    Args:
        run: specification; `config.model` is the shape of all models, `config.extra` as in the module's docstring.
        directory: the run's folder; relative paths start there.

    Returns:
        0, whatever the verdict.

    Raises:
        UnlearningError: if records, settings or an earlier plan are refused (exit code 3).
        TrainerError: if a checkpoint is incomplete, altered or of another shape (exit code 3).
    """
    audit(run, directory)
    return 0


def audit(run: RunSpec, directory: Path) -> Verdict:
    """Run an audit and write its files.

    Args:
        run: specification, as for `run`.
        directory: the run's folder.

    Returns:
        The verdict.

    Raises:
        UnlearningError: if records, settings or an earlier plan are refused.
        TrainerError: if a checkpoint is incomplete, altered or of another shape.
    """
    from unlearning.material import prepare

    extra = run.config.extra
    scale = Scale.from_json(extra["engineering"]) if "engineering" in extra else None
    inputs = read_inputs(run, directory)
    if extra.get("calibrate"):
        inputs = _calibrated(run, directory, inputs)
    _write_plan(directory, inputs.plan)
    material = prepare(
        inputs.forgotten,
        inputs.retained,
        inputs.lookalikes,
        inputs.tokenizer,
        inputs.plan.attacks,
        inputs.plan.seed,
        inputs.times,
    )
    rows = measure(run.config.model, directory, inputs, material)
    write_rows(directory / "rows.parquet", to_table(rows))
    table = read_rows(directory / "rows.parquet")
    verdict = verdict_from_rows(table, inputs.plan, inputs.lineage.unchecked)
    if scale is not None:
        measure_engineering(run.config.model, directory, inputs, material, scale)
    _write_results(run, directory, inputs, verdict, len(rows))
    remove_parts(directory)
    return verdict


def read_inputs(run: RunSpec, directory: Path) -> Inputs:
    """Read and check records and checkpoints, and fix the plan.

    Args:
        run: specification.
        directory: the run's folder; relative paths start there.

    Returns:
        The inputs; no model has been opened, only digests were read.

    Raises:
        UnlearningError: if settings or records are refused.
        TrainerError: if a checkpoint folder is incomplete or altered.
    """
    from trainer.root import state_root

    extra = run.config.extra
    if run.layout.world_size != 1:
        raise PlanError(f"expected one process for an audit, got {run.layout.world_size}")
    missing, unknown = sorted(set(_REQUIRED) - set(extra)), sorted(set(extra) - _KNOWN)
    if missing or unknown:
        raise PlanError(f"settings of an audit: missing {missing}, unknown {unknown}")
    for name in ("calibrate", "derived_subgroups"):
        if type(value := extra.get(name, False)) is not bool:
            raise PlanError(f"expected {name} as true or false, got {value!r}")
    forgotten, key = read_sealed(extra["sealed"], directory)
    retained = read_records(directory / _file(extra, "retained"))
    lookalikes = (
        read_records(directory / _file(extra, "lookalikes")) if extra.get("lookalikes") else []
    )
    people = [{r.subject for r in records} for records in (forgotten, retained, lookalikes)]
    if people[0] & people[1] or people[0] & people[2] or people[1] & people[2]:
        raise PeopleError(
            "expected forgotten, retained and look-alike people to be different people"
        )
    models = _models(extra["models"], directory)
    lineage = check_lineage(models, [r.record_id for r in forgotten], extra.get("ledger"))
    roots = {
        role: [digest for name, _, digest in models if name == role]
        for role in ("original", "unlearned", "gold")
    }
    tokenizer = FileTokenizer(directory / extra["tokenizer"])
    times = _times(models, (*forgotten, *retained, *lookalikes), tokenizer)
    settings = {name: extra[name] for name in _PLANNED if name in extra}
    if extra.get("derived_subgroups"):
        forgotten = labelled(forgotten, [*retained, *lookalikes], times, tokenizer)
        asked = settings.get("subgroups", ())
        settings["subgroups"] = sorted({*asked, *registered(forgotten)})
    plan = AuditPlan.from_json(
        settings
        | {
            "num_forgotten": len(people[0]),
            "num_retained": len(people[1]),
            "num_lookalikes": len(people[2]),
            "original": roots["original"][0],
            "unlearned": roots["unlearned"][0],
            "gold": roots["gold"],
            "seed": run.seed,
            "attacks": dict(extra.get("attacks", {})),
            "random_init": state_root(random_model(run.config.model, run.seed).state_dict()),
        }
    )
    stray = set(plan.subgroups) - {label for r in forgotten for label in labels_of(r.group)}
    if stray:
        raise PlanError(f"no forgotten person is in the subgroup {min(stray)!r}")
    return Inputs(forgotten, retained, lookalikes, key, models, plan, lineage, tokenizer, times)


def _calibrated(run: RunSpec, directory: Path, inputs: Inputs) -> Inputs:
    """The inputs with the demonstrations under which the original tells most of people who stay; the default's where too few stay to ask."""
    from unlearning.calibration import CANDIDATES, best, calibrated, kept
    from unlearning.ensemble import load

    plan = inputs.plan
    original = next(folder for role, folder, _ in inputs.models if role == "original")
    asked = jcs([[r.subject, r.record_id, r.text] for r in inputs.retained])
    tokenizer = (directory / run.config.extra["tokenizer"]).read_bytes()
    digests = [hashlib.sha256(data).hexdigest() for data in (asked, tokenizer)]
    tried = kept(
        directory, inputs.key,
        [plan.original, *digests, plan.seed, plan.attacks.max_probe_tokens, plan.attacks.demonstrations],
        lambda: calibrated(lambda: load(original, run.config.model), inputs.retained, inputs.tokenizer, plan.attacks, plan.seed),
    )  # fmt: skip
    chosen = best(tried)
    way = (chosen.demonstrations, chosen.between) if chosen else CANDIDATES[0]
    attacks = plan.attacks.demonstrating(*way)
    return replace(inputs, plan=replace(plan, attacks=attacks), calibration=tuple(tried))


def _times(
    models: Sequence[tuple[str, Path, str]], records: Sequence[Record], tokenizer: FileTokenizer
) -> dict[str, int] | None:
    """How often the original was shown each text, if that can be told."""
    original = next(folder for role, folder, _ in models if role == "original")
    texts = {
        record.record_id: (*tokenizer.encode(record.text)[0], tokenizer.end_of_text)
        for record in records
    }
    return times_shown(original, texts)


def _models(folders: Mapping[str, Any], directory: Path) -> list[tuple[str, Path, str]]:
    from unlearning.ensemble import root_of

    if not {"original", "unlearned"} <= set(folders) <= {"original", "unlearned", "gold"}:
        raise PlanError(f"expected models original, unlearned and gold, got {sorted(folders)}")
    gold = folders.get("gold") or []
    gold = [] if gold == "none" else [gold] if isinstance(gold, str) else gold
    named = [("original", folders["original"]), ("unlearned", folders["unlearned"])]
    found: list[tuple[str, Path, str]] = []
    for role, name in (*named, *(("gold", g) for g in gold)):
        folder = _checkpoint(directory / name)
        digest = root_of(folder)
        # The same weights given twice are one gold seed, not two.
        if (role, digest) not in {(r, d) for r, _, d in found}:
            found.append((role, folder, digest))
    return found


def _checkpoint(folder: Path) -> Path:
    """A step-N folder or an ensemble's folder as it is, or the newest checkpoint of a run's folder."""
    from trainer.checkpoint import newest
    from unlearning.ensemble import FILE

    if (folder / "manifest.json").exists() or (folder / FILE).exists():
        return folder
    last = newest(folder) if folder.is_dir() else None
    if last is None:
        raise PlanError(
            f"no checkpoint in {folder.name}: expected a step-N folder or a run with one"
        )
    return last


def _file(extra: Mapping[str, Any], name: str) -> str:
    value = extra[name]
    if not isinstance(value, dict) or set(value) != {"file"} or not isinstance(value["file"], str):
        raise PlanError(f'expected {name} as {{"file": path}}')
    return value["file"]


def _write_plan(directory: Path, plan: AuditPlan) -> None:
    path, data = directory / "plan.json", jcs(plan.to_json())
    if path.exists() and path.read_bytes() != data:
        raise PlanError(
            "plan.json exists with other content; a plan is fixed before the first look, so start a new run"
        )
    write_atomic(path, data)


def _write_results(
    run: RunSpec, directory: Path, inputs: Inputs, verdict: Verdict, num_rows: int
) -> None:
    from unlearning.ensemble import UNDEFINED, read_ensemble

    rows_digest = hashlib.sha256((directory / "rows.parquet").read_bytes()).hexdigest()
    report = verdict.to_json() | {
        "run": run.run,
        "plan": inputs.plan.to_json(),
        "rows": {"file": "rows.parquet", "count": num_rows, "sha256": rows_digest},
        "unchecked": list(inputs.lineage.unchecked),
        "noted": list(inputs.lineage.noted),
        "description": describe(Evidence(read_rows(directory / "rows.parquet")), inputs.plan),
    }
    if inputs.calibration:
        report["calibration"] = [asdict(one) for one in inputs.calibration]
    measured = directory / FILE
    if measured.exists():
        report["engineering"] = {
            "file": FILE,
            "sha256": hashlib.sha256(measured.read_bytes()).hexdigest(),
        }
    if any(read_ensemble(folder) for _, folder, _ in inputs.models):
        report["undefined"] = [
            {"what": what, "reason": reason} for what, reason in UNDEFINED.items()
        ]
    data = jcs(report)
    write_atomic(directory / "audit.json", data)
    result = {
        "format": FORMAT,
        "status": "done",
        "verdict": str(verdict.status),
        "plan_digest": inputs.plan.digest,
        "audit_digest": hashlib.sha256(data).hexdigest(),
        "rows_digest": rows_digest,
    }
    write_atomic(directory / "result.json", jcs(result))
