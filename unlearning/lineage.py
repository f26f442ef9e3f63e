"""Do the models of an audit belong together, and to the request? What their own run files say, before any weight is read.

A checkpoint lies in the folder of the run that made it, beside its `run.json`. From it follows, without trust in anybody's word::

    original   did its data hold forgotten records, and did its steps reach them?                    none → refused, some → said
    gold       same recipe (model, optimiser, batch, steps, tokenizer), forgotten records left out?  no → refused
    all        does the ledger know the checkpoint's digest? (where the caller names the digests that it knows)  no → refused

An audit against a gold model of another recipe compares recipes; one of records that the original never saw passes every method. What
cannot be told, because a checkpoint came without its run file or goes on from one that did, is listed as unchecked in
`audit.json`, never assumed: with one such sentence no audit says PASS (`verdict`). What was checked and is only partly so, such as
records that the original never reached, is noted beside it and blocks nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.manifest import ancestry
from unlearning.ensemble import read_ensemble
from unlearning.errors import LineageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from trainer.selection import RecordWeights
    from trainer.spec import RunSpec

RECIPE = ("model", "optim", "batch", "mixture", "precision")


@dataclass(frozen=True, slots=True)
class Lineage:
    """What is known of where the models of an audit come from, after nothing contradicted the request."""

    unchecked: tuple[str, ...]
    """What could not be checked, one sentence each; any of them stands against a PASS."""
    noted: tuple[str, ...]
    """What was checked and is worth saying."""


def check_lineage(
    models: Sequence[tuple[str, Path, str]],
    forgotten: Iterable[str],
    ledger: Sequence[str] | None = None,
) -> Lineage:
    """Check models against the request and against each other.

    Args:
        models: (role, checkpoint folder, digest) of original, unlearned and gold models.
        forgotten: record ids that are to be forgotten.
        ledger: digests of checkpoints that the ledger names, or None if nobody looked.

    Returns:
        What could not be checked, and what is to be said.

    Raises:
        LineageError: if something contradicts the request.
    """
    if ledger is not None:
        for role, _, digest in models:
            if digest not in ledger:
                raise LineageError(
                    f"the {role} model's digest {digest[:12]}… is in no window of the ledger: "
                    "audit a checkpoint that the ledger knows, or enter its run first"
                )
    ids = {bytes.fromhex(one) for one in forgotten if re.fullmatch(r"[0-9a-f]{64}", one)}
    listed = [(role, folder, read_ensemble(folder)) for role, folder, _ in models]
    runs = [(role, _run_of(folder), folder) for role, folder, parts in listed if parts is None]
    unchecked = [] if ledger is not None else ["whether the ledger knows the checkpoints: nobody looked"]  # fmt: skip
    if not ids:
        unchecked.append("whether the models saw the records: their ids are no record ids")
    ensembles = [(r, [folder / p.folder for p in parts]) for r, folder, parts in listed if parts]
    unchecked += [text for role, found in ensembles for text in _require_shards(role, found, ids)]
    unchecked += _recipes_of(ensembles, {role for role, *_ in runs})
    noted: list[str] = []
    original = next((run for role, run, _ in runs if role == "original"), None)
    for role, run, folder in runs:
        if role == "unlearned":
            continue
        if run is None:
            unchecked.append(f"the {role} model's data and recipe: its checkpoint has no run file beside it")  # fmt: skip
            continue
        if role == "gold" and original is not None:
            _require_recipe(original, run)
        if ids:
            missing, said = _require_data(role, folder, ids)
            unchecked, noted = unchecked + missing, noted + said
    return Lineage(tuple(dict.fromkeys(unchecked)), tuple(dict.fromkeys(noted)))


def _run_of(folder: Path) -> RunSpec | None:
    from trainer.spec import load_run

    return load_run(folder.parent) if (folder.parent / "run.json").exists() else None


def _require_recipe(original: RunSpec, gold: RunSpec) -> None:
    """Gold differs from the original in seed and in what it leaves out, in nothing else that shapes a model."""
    ours, theirs = ((_recipe(run) | {"start from a checkpoint": run.init != "none"}) for run in (original, gold))  # fmt: skip
    for name, value in ours.items():
        if theirs[name] != value:
            raise LineageError(
                f"gold was trained by another recipe: expected {name} {value}, got {theirs[name]}; "
                "retrain gold as the original was trained, without the forgotten records"
            )


def _recipe(run: RunSpec) -> dict[str, Any]:
    """What shapes a model besides its data and seed."""
    found = {name: getattr(run.config, name) for name in RECIPE}
    return found | {"steps": run.steps, "tokenizer": run.versions["tokenizer"], "entry": run.entry}


def _recipes_of(ensembles: Sequence[tuple[str, list[Path]]], single: set[str]) -> list[str]:
    """What can't be told of the recipes of ensembles: every constituent of a gold one must be made like all of the original's."""
    by_role = dict(ensembles)
    if not ({"original", "gold"} & by_role.keys()):
        return []
    if "original" not in by_role or "gold" in single:
        return ["the gold models' recipe: one of original and gold is an ensemble, the other one model"]  # fmt: skip
    ours = [_run_of(folder) for folder in by_role["original"]]
    told = []
    for role, folders in ensembles:
        theirs = [_run_of(folder) for folder in folders]
        if role != "gold" or None in (*ours, *theirs):
            continue  # a missing run file is said where the data are checked
        pairs = [(a, b) for a in map(_recipe, filter(None, ours)) for b in map(_recipe, filter(None, theirs))]  # fmt: skip
        if other := sorted({name for a, b in pairs for name in a if a[name] != b[name]}):
            told.append(f"the gold ensemble's recipe: its constituents differ from the original's in {', '.join(other)}")  # fmt: skip
    return told


def _held(runs: Sequence[tuple[Path, RunSpec]], ids: set[bytes]) -> set[bytes]:
    """Those of some records that one of some runs was trained on: in its tokens, selected, not excluded.

    A selection that leaves out whatever it doesn't list says so without tokens: an earlier erasure takes a corpus version's tokens away,
    not what a shard was trained on.
    """
    from trainer.errors import DataError
    from trainer.inputs import load_excluded, load_selection, open_store

    found: set[bytes] = set()
    for folder, run in runs:
        excluded, weights = load_excluded(run, folder), load_selection(run, folder)
        try:
            store = open_store(run, folder)
            held = {bytes(one) for _, block in store.record_ids() for one in block} & ids
        except (DataError, OSError):
            if weights is None or weights.default:
                raise
            held = ids
        found |= _selected(weights, held) - excluded
    return found


def _selected(weights: RecordWeights | None, ids: set[bytes]) -> set[bytes]:
    """Those of some records that a selection doesn't leave out."""
    if weights is None or not ids:
        return ids
    listed = sorted(ids)
    weight_N = weights.of(np.frombuffer(b"".join(listed), dtype=np.uint8).reshape(-1, 32))
    return {one for one, weight in zip(listed, weight_N.tolist(), strict=True) if weight}


def _reached(runs: Sequence[tuple[Path, RunSpec]], ids: set[bytes]) -> set[bytes]:
    """Those of some records that stand in a window of a step of one of some runs."""
    from trainer.inputs import batch_plan

    left = set(ids)
    for folder, run in runs:
        plan = batch_plan(run, folder)
        for step in range(run.steps):
            if not left:
                return ids
            left -= {record for _, record in plan.records(step)}
    return ids - left


def _require_shards(role: str, folders: Sequence[Path], ids: set[bytes]) -> list[str]:
    """An ensemble, constituent by constituent: the original saw some of the records, gold and a sharded erasure none."""
    from trainer.errors import DataError

    if not ids:
        return []
    trained, known = set[bytes](), True
    for checkpoint in folders:
        if _run_of(checkpoint) is None:
            return [f"the {role} model's data: a constituent has no run file beside it"]
        runs, whole = ancestry(checkpoint)
        known &= whole
        try:
            trained |= _held(runs, ids)
        except (DataError, OSError):
            return [f"the {role} model's data: a constituent's tokens are not there any more, or not as they were"]  # fmt: skip
    if role == "original" and known and not trained:
        raise LineageError(
            f"none of the {len(ids)} records is in the original's shards: there is nothing to forget; "
            "ask about records that it was trained on"
        )
    if role != "original" and trained:
        raise LineageError(
            f"the {role} ensemble was trained on {len(trained)} of the {len(ids)} forgotten records: leave them out of its shards"
        )
    return [] if known else [f"the {role} model's data: a run of a constituent can't be read, or didn't make its checkpoint"]  # fmt: skip


def _require_data(role: str, checkpoint: Path, ids: set[bytes]) -> tuple[list[str], list[str]]:
    """Original: all records were trained on. Gold: none was. Both with the runs that they went on from.

    Returns:
        What is unchecked, and what is to be said.
    """
    from trainer.errors import DataError

    runs, whole = ancestry(checkpoint)
    try:
        trained = _held(runs, ids)
        reached = _reached(runs, trained) if role == "original" else set[bytes]()
    except (DataError, OSError):
        return [f"the {role} model's data: its tokens are not there any more, or not as they were"], []  # fmt: skip
    if role == "gold":
        if trained:
            raise LineageError(
                f"gold was trained on {len(trained)} of the {len(ids)} forgotten records: it is no reference; exclude them"
            )
        return ([] if whole else ["whether gold saw the records: a run that it comes from can't be read, or didn't make its checkpoint"]), []  # fmt: skip
    if whole and not trained:
        raise LineageError(
            f"none of the {len(ids)} records is in the original's training data: there is nothing to forget; "
            "ask about records of its windows"
        )
    if not whole:
        before = len(ids) - len(reached)
        return ([f"whether the original saw {before} of the {len(ids)} records: a run that it comes from can't be read, or didn't make its checkpoint"] if before else []), []  # fmt: skip
    if not reached:
        raise LineageError(
            f"none of the {len(ids)} records stands in a window of the original's {runs[0][1].steps} steps: there is nothing to forget"
        )
    told = ((len(ids) - len(trained), "are not in the original's training data"), (len(trained - reached), "stand in no window of its steps"))  # fmt: skip
    return [], [f"{count} of the {len(ids)} records {what}: nothing was forgotten there" for count, what in told if count]  # fmt: skip
