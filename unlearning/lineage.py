"""Do the models of an audit belong together, and to the request? What their own run files say, before any weight is read.

A checkpoint lies in the folder of the run that made it, beside its `run.json`. From it follows, without trust in anybody's word::

    original   did its data hold forgotten records, and did its steps reach them?                    none → refused, some → said
    gold       same recipe (model, optimiser, batch, steps, tokenizer), forgotten records left out?  no → refused
    all        does the ledger know the checkpoint's digest? (where the caller names the digests that it knows)  no → refused

An audit against a gold model of another recipe compares recipes; one of records that the original never saw passes every method. What
cannot be told, because a checkpoint came without its run file or was trained on from another one, is listed as unchecked in
`audit.json`, never assumed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning.ensemble import read_ensemble
from unlearning.errors import LineageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from trainer.spec import RunSpec
    from trainer.store import TokenStore

RECIPE = ("model", "optim", "batch", "mixture", "precision")


def check_lineage(
    models: Sequence[tuple[str, Path, str]],
    forgotten: Iterable[str],
    ledger: Sequence[str] | None = None,
) -> list[str]:
    """Check models against the request and against each other.

    Args:
        models: (role, checkpoint folder, digest) of original, unlearned and gold models.
        forgotten: record ids that are to be forgotten.
        ledger: digests of checkpoints that the ledger names, or None if nobody looked.

    Returns:
        What could not be checked, one sentence each.

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
    runs = [
        (role, _run_of(folder), folder.parent) for role, folder, parts in listed if parts is None
    ]
    unchecked = [] if ledger is not None else ["whether the ledger knows the checkpoints: nobody looked"]  # fmt: skip
    if not ids:
        unchecked.append("whether the models saw the records: their ids are no record ids")
    ensembles = ((r, [folder / p.folder for p in parts]) for r, folder, parts in listed if parts)
    unchecked += [text for role, found in ensembles for text in _require_shards(role, found, ids)]
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
            unchecked += _require_data(role, run, folder, ids)
    return unchecked


def _run_of(folder: Path) -> RunSpec | None:
    from trainer.spec import load_run

    return load_run(folder.parent) if (folder.parent / "run.json").exists() else None


def _require_recipe(original: RunSpec, gold: RunSpec) -> None:
    """Gold differs from the original in seed and in what it leaves out, in nothing else that shapes a model."""
    ours: Mapping[str, Any] = {name: getattr(original.config, name) for name in RECIPE}
    theirs = {name: getattr(gold.config, name) for name in RECIPE}
    ours = {**ours, "steps": original.steps, "tokenizer": original.versions["tokenizer"], "entry": original.entry}  # fmt: skip
    theirs |= {"steps": gold.steps, "tokenizer": gold.versions["tokenizer"], "entry": gold.entry}
    for name, value in ours.items():
        if theirs[name] != value:
            raise LineageError(
                f"gold was trained by another recipe: expected {name} {value}, got {theirs[name]}; "
                "retrain gold as the original was trained, without the forgotten records"
            )


def _trained_on(run: RunSpec, folder: Path, store: TokenStore, ids: set[bytes]) -> set[bytes]:
    """Those of some records that a run's tokens hold and that its selection does not leave out."""
    from trainer.inputs import load_selection

    held = {bytes(one) for _, block in store.record_ids() for one in block} & ids
    weights = load_selection(run, folder)
    if weights is None or not held:
        return held
    listed = sorted(held)
    weight_N = weights.of(np.frombuffer(b"".join(listed), dtype=np.uint8).reshape(-1, 32))
    return {one for one, weight in zip(listed, weight_N.tolist(), strict=True) if weight}


def _require_shards(role: str, folders: Sequence[Path], ids: set[bytes]) -> list[str]:
    """An ensemble, constituent by constituent: the original saw some of the records, gold and a sharded erasure none."""
    from trainer.errors import DataError
    from trainer.inputs import load_excluded, open_store

    if not ids:
        return []
    trained: set[bytes] = set()
    for checkpoint in folders:
        folder, run = checkpoint.parent, _run_of(checkpoint)
        if run is None:
            return [f"the {role} model's data: a constituent has no run file beside it"]
        try:
            excluded, store = load_excluded(run, folder), open_store(run, folder)
            trained |= _trained_on(run, folder, store, ids) - excluded
        except (DataError, OSError):
            return [f"the {role} model's data: a constituent's tokens are not there any more, or not as they were"]  # fmt: skip
    if role == "original" and not trained:
        raise LineageError(
            f"none of the {len(ids)} records is in the original's shards: there is nothing to forget; "
            "ask about records that it was trained on"
        )
    if role != "original" and trained:
        raise LineageError(
            f"the {role} ensemble was trained on {len(trained)} of the {len(ids)} forgotten records: leave them out of its shards"
        )
    return [f"the {role} ensemble's recipe: its constituents are not compared with each other's"]


def _require_data(role: str, run: RunSpec, folder: Path, ids: set[bytes]) -> list[str]:
    """Original: all records were trained on. Gold: none was."""
    from trainer.errors import DataError
    from trainer.inputs import batch_plan, load_excluded, open_store

    try:
        excluded, store = load_excluded(run, folder), open_store(run, folder)
    except (DataError, OSError):
        return [f"the {role} model's data: its tokens are not there any more, or not as they were"]
    trained = _trained_on(run, folder, store, ids) - excluded
    if role == "gold":
        if trained:
            raise LineageError(
                f"gold was trained on {len(trained)} of the {len(ids)} forgotten records: it is no reference; exclude them"
            )
        return []
    if run.init != "none":
        return ["whether the original's steps reached the records: it goes on from another checkpoint"]  # fmt: skip
    if not trained:
        raise LineageError(
            f"none of the {len(ids)} records is in the original's training data: there is nothing to forget; "
            "ask about records of its windows"
        )
    plan, left = batch_plan(run, folder), set(trained)
    for step in range(run.steps):
        left -= {record for _, record in plan.records(step)}
        if not left:
            break
    if left == trained:
        raise LineageError(
            f"none of the {len(ids)} records stands in a window of the original's {run.steps} steps: there is nothing to forget"
        )
    told = ((len(ids) - len(trained), "are not in the original's training data"), (len(left), "stand in no window of its steps"))  # fmt: skip
    return [f"{count} of the {len(ids)} records {what}: nothing was forgotten there" for count, what in told if count]  # fmt: skip
