"""Influence of a whole corpus as a run: `valuation.passes:run`, kind `gradients`, any number of processes.

    torchrun --standalone --nproc-per-node 4 -m trainer DIR/run.json

The run names the trained checkpoint (`init`, `init_root`), the records (`tokens`, without `excluded`), and in
`config.extra` the queries and the method. It goes through two stages:

1. *left*: where the method has one (`valuation.rowwise`), the queries' gradients, through the method's inverse
   (`valuation.influence`), are kept in `scores.part/left-K` for model K, memory-mapped. Curvature sums are added
   up over all processes and divided by the documents of all of them.
2. *rows*: one pass over the records, block by block; a process takes the blocks that are its own and
   still missing (`valuation.store`). No process waits for another here. The first process makes scores of the rows.

After `kill -9`, or SIGTERM (exit 75), the same command goes on: with stage 1 if `left` isn't whole, else with
the missing blocks, and the scores have the bits of an unbroken run. Scores don't depend on the number of
processes beyond the rounding of the curvature's sums.

    scores/          the rows, [N, W] float64 with record ids (`valuation.store`, `valuation.rowwise`)
    scores.npz, scores.json    the scores as `valuation.influence.Scores`, bound to data and weights
    result.json      last

`config.extra`: `method`, `queries` (token folder); optional `queries_digest`, `damping` (a decimal string, default "0.1",
of fisher "1", of ekfac_cg "30"; the ridge of trak), `steps` (of ekfac_cg, default 8), `size` (features of trak, default 1024; rows and columns
of logra, default 16; their seed is the run's), and for trak, tracin and less `checkpoints`: further models after `init`,
[folder, root] each. tracin and less need `weights`, a decimal string per model: its learning rate.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.checkpoint import read_tensors
from trainer.data import TokenStore
from trainer.errors import EXIT_DONE, EXIT_RESUME
from trainer.inputs import initial_model, load_excluded, open_store
from trainer.journal import RESULT_FILE, lock_folder, write_exit, write_result
from trainer.mesh import init_mesh
from trainer.spec import run_digest
from trainer.stop import StopFlag
from valuation.errors import GradientError
from valuation.heldout import refuse_overlap
from valuation.influence.leftside import left_side
from valuation.influence.less import AdamCheckpoint
from valuation.influence.pairing import Pass, query_check
from valuation.influence.scores import Scores, TokenSet, bind
from valuation.projection import OneSided, TwoSided
from valuation.rowwise import FeatureRows, FisherRows, LessRows, PairRows
from valuation.store import Layout, StoreWriter, prepare

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from trainer.mesh import Mesh
    from trainer.spec import RunSpec
    from valuation.rowwise import Rows

SOLVED, TRAJECTORY = ("dot", "kfac", "ekfac", "datainf", "ekfac_cg"), ("tracin", "less")
METHODS = (*SOLVED, *TRAJECTORY, "trak", "logra", "fisher")
_SETTINGS = {
    "damping": {*METHODS} - {"dot", *TRAJECTORY}, "steps": {"ekfac_cg"}, "size": {"trak", "logra"},
    "checkpoints": {"trak", *TRAJECTORY}, "weights": {*TRAJECTORY},
}  # fmt: skip
_EXTRA = {"method", "queries", "queries_digest", *_SETTINGS}


def run(spec: RunSpec, directory: Path) -> int:
    """Score every record for every query; the entry `valuation.passes:run`.

    Args:
        spec: see the module docstring; rows and length of a batch are `config.batch`'s.
        directory: the run's folder.

    Returns:
        EXIT_DONE, or EXIT_RESUME after SIGTERM or SIGINT.

    Raises:
        GradientError: settings that can't be meant, a loss that isn't finite, a layer without formula.
        HeldOutError: queries that are records.
        DataError: tokens are not the committed ones.
        CheckpointError: the checkpoint is altered or of another root.
    """
    _check(spec)
    mesh = init_mesh(spec.layout, spec.config.timeout_s)
    lock = lock_folder(directory) if mesh.rank == 0 else None
    try:
        with StopFlag() as stop:
            return _score(spec, directory, mesh, stop)
    finally:
        if lock is not None:
            os.close(lock)
        mesh.close()


def _check(spec: RunSpec) -> None:
    extra = spec.config.extra
    if set(extra) - _EXTRA or not {"method", "queries"} <= set(extra):
        raise GradientError(
            f"config.extra: expected method, queries and at most {sorted(_EXTRA)}, got {sorted(extra)}"
        )
    if extra["method"] not in METHODS:
        raise GradientError(
            f"config.extra.method: expected one of {', '.join(METHODS)}, got {extra['method']!r}"
        )
    if spec.layout.world_size != spec.layout.dp_replicate:
        raise GradientError(
            f"layout: expected whole models in every process (dp_replicate alone), got {spec.layout}; "
            "gradients per record need all of a layer's outputs"
        )
    _check_settings(extra)


def _check_settings(extra: dict[str, Any]) -> None:
    method, models = extra["method"], 1 + len(extra.get("checkpoints", []))
    for name in sorted(set(extra) & set(_SETTINGS)):
        # dot has always taken a damping and left it alone
        if method not in _SETTINGS[name] and (name, method) != ("damping", "dot"):
            raise GradientError(
                f"config.extra.{name}: expected with {', '.join(sorted(_SETTINGS[name]))} only, got it with {method}"
            )
    if method in TRAJECTORY and len(extra.get("weights", [])) != models:
        raise GradientError(
            f"config.extra.weights: expected one for each of {models} models, got {len(extra.get('weights', []))}"
        )
    for name, text in [("damping", extra.get("damping", "0.1"))] + [
        ("weights", one) for one in extra.get("weights", [])
    ]:
        try:
            float(text)
        except ValueError as error:
            raise GradientError(
                f"config.extra.{name}: expected a decimal string, got {text!r}"
            ) from error


def _score(spec: RunSpec, directory: Path, mesh: Mesh, stop: StopFlag) -> int:
    extra, batch = spec.config.extra, spec.config.batch
    train, queries = _sets(spec, directory)
    models = [one.to(mesh.device) for one in _models(spec, directory)]
    how = Pass(rows=batch.rows, mesh=mesh)
    binding = bind(models[0] if len(models) == 1 else models, train, queries)
    settings = {
        key: extra[key] for key in sorted(set(extra) & {"method", *_SETTINGS} - {"checkpoints"})
    }
    if extra["method"] in _SETTINGS["size"]:
        settings["seed"] = spec.seed
    identity = {**asdict(binding), **settings, "precision": spec.config.precision}
    if mesh.rank == 0:
        (directory / RESULT_FILE).unlink(missing_ok=True)
    ready = _ready(spec, models, train, queries, how)
    blocks = ready.blocks() if isinstance(ready, FisherRows) else train.blocks(batch.rows)
    layout = Layout(
        identity=identity,
        index=tuple(train.index_N.tolist()),
        ids=train.ids,
        width=ready.width if ready else len(queries.records),
        dtype="float64",
        blocks=tuple((block.start, block.stop) for block in blocks),
    )
    if mesh.rank == 0:
        prepare(directory / "scores", layout)
    mesh.barrier()
    rows = ready or _paired(spec, directory, models, train, queries, identity, how)
    mesh.barrier()  # nobody writes a block before all have read which are missing
    writer = StoreWriter.open(directory / "scores", layout, mesh.rank)
    todo = writer.missing(mesh.world_size)
    mesh.barrier()
    for number in todo:
        if stop.raised:
            break
        writer.write(number, _block(rows, blocks[number]))
    if any(mesh.gather(stop.raised)):
        if mesh.rank == 0:
            write_exit(directory, EXIT_RESUME, "stopped by a signal; finished blocks are kept")
        return EXIT_RESUME
    mesh.barrier()
    if mesh.rank == 0:
        _finish(spec, directory, writer, Scores(
            np.ascontiguousarray(rows.scores(np.asarray(writer.values))), queries.index_N, train.index_N, queries.ids, train.ids,
            ", ".join(f"{key}={value}" for key, value in settings.items()), binding,
        ))  # fmt: skip
    mesh.barrier()
    return EXIT_DONE


def _sets(spec: RunSpec, directory: Path) -> tuple[TokenSet, TokenSet]:
    """Records and queries, checked against their digests and against each other."""
    extra, length = spec.config.extra, spec.config.batch.length
    store, excluded = open_store(spec, directory), load_excluded(spec, directory)
    kept = [int(i) for i in store.live_N if store.record_id(int(i)) not in excluded]
    train = TokenSet.of(store, length, kept)
    asked = TokenStore.open(directory / extra["queries"], extra.get("queries_digest"))
    queries = TokenSet.of(asked, length)
    query_check(queries)
    if not train.records:
        raise GradientError("tokens: expected at least one record that isn't excluded, got none")
    refuse_overlap(train.texts(), {"queries": queries.texts()})
    return train, queries


def _models(spec: RunSpec, directory: Path) -> list[nn.Module]:
    """`init` and the further checkpoints."""
    found: list[nn.Module] = [initial_model(spec, directory)]
    for folder, root in spec.config.extra.get("checkpoints", []):
        found.append(initial_model(replace(spec, init=folder, init_root=root), directory))
    return found


def _ready(
    spec: RunSpec, models: list[nn.Module], train: TokenSet, queries: TokenSet, how: Pass
) -> FeatureRows | FisherRows | None:
    """The rows of a method that has no left side; None for the others."""
    extra = spec.config.extra
    if extra["method"] == "fisher":
        return FisherRows(models[0], train, queries, float(extra.get("damping", "1")), how.rows)
    damping, size = float(extra.get("damping", "0.1")), extra.get("size")
    if extra["method"] == "trak":
        one_sided = OneSided(seed=spec.seed, size=size or 1024)
        return FeatureRows(models, train, queries, one_sided, damping, how, per_block=False)
    if extra["method"] == "logra":
        two_sided = TwoSided(spec.seed, *[size or 16] * 2)
        return FeatureRows(models, train, queries, two_sided, damping, how, per_block=True)
    return None


def _paired(
    spec: RunSpec, directory: Path, models: list[nn.Module], train: TokenSet, queries: TokenSet,
    identity: dict[str, Any], how: Pass,
) -> PairRows | LessRows:  # fmt: skip
    """The rows of a method whose left side is on the disk, or is put there now."""
    extra = spec.config.extra
    lefts = [
        left_side(model, train, queries, identity, directory / "scores.part" / f"left-{number}", how, extra)
        for number, model in enumerate(models)
    ]  # fmt: skip
    weights = [float(text) for text in extra.get("weights", ["1"])]
    if extra["method"] == "less":
        folders = [spec.init, *(folder for folder, _ in extra.get("checkpoints", []))]
        states = [
            _adam(spec, directory / folder, model, weight)
            for folder, model, weight in zip(folders, models, weights, strict=True)
        ]
        return LessRows(states, train, lefts)
    return PairRows(models, train, lefts, weights)


def _adam(spec: RunSpec, folder: Path, model: nn.Module, lr: float) -> AdamCheckpoint:
    """The optimiser's state that lies beside a checkpoint's weights."""
    state = {name: tensor for name, tensor in read_tensors(folder) if name.startswith("optim.")}
    like, optim = next(model.parameters()), spec.config.optim

    def moments(kind: str) -> dict[str, torch.Tensor]:
        return {
            name[len("optim.") : -len(kind) - 1]: tensor.to(like)
            for name, tensor in state.items()
            if name.endswith(f".{kind}")
        }

    first, second = moments("exp_avg"), moments("exp_avg_sq")
    if "optim.step" not in state or not first.keys() == second.keys() == dict(model.named_parameters()).keys():  # fmt: skip
        raise GradientError(
            f"{folder.name}: expected a checkpoint with AdamW's moments of every parameter; LESS is for models trained with AdamW"
        )
    return AdamCheckpoint(
        model=model, lr=lr, first=first, second=second, count=int(state["optim.step"].item()),
        betas=(optim.betas[0], optim.betas[1]), eps=optim.eps,
    )  # fmt: skip


def _block(rows: Rows, block: range) -> np.ndarray:
    """The rows of a block's records, [n, W]."""
    return rows.block(block)


def _finish(spec: RunSpec, directory: Path, writer: StoreWriter, scores: Scores) -> None:
    """Name the store, write the scores, then result.json."""
    for path in writer.part.glob("left-*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    digest = writer.finish()
    write_result(
        directory,
        {
            "run": spec.run,
            "kind": spec.kind,
            "status": "done",
            "steps": 0,
            "final_loss": "none",
            "checkpoint_root": spec.init_root,
            "model_root": scores.binding.checkpoint_root,
            "run_digest": run_digest(spec),
            "tokens_digest": spec.tokens_digest,
            "unit": "nat",
            "binding": asdict(scores.binding),
            "values_digest": digest,
            "scores_digest": scores.save(directory),
            "records": len(scores.record_ids),
            "queries": len(scores.query_ids),
        },
    )
