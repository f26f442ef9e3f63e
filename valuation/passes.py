"""Influence of a whole corpus as a run: `valuation.passes:run`, kind `gradients`, any number of processes.

    torchrun --standalone --nproc-per-node 4 -m trainer DIR/run.json

The run names the trained checkpoint (`init`, `init_root`), the records (`tokens`, without `excluded`), and in
`config.extra` the queries and the method. It goes through two stages:

1. *left*: the queries' gradients, through the method's inverse (`valuation.influence`), are kept in
   `scores.part/left`, memory-mapped. Curvature sums are added up over all processes and divided by the
   documents of all of them.
2. *scores*: one pass over the records, block by block; a process takes the blocks that are its own and
   still missing (`valuation.store`). No process waits for another here.

After `kill -9`, or SIGTERM (exit 75), the same command goes on: with stage 1 if `left` isn't whole, else with
the missing blocks, and the scores have the bits of an unbroken run. Scores don't depend on the number of
processes beyond the rounding of the curvature's sums.

    scores/          [N, Q] float64 with record ids (`valuation.store`)
    scores.npz, scores.json    the same as `valuation.influence.Scores`, bound to data and weights
    result.json      last

`config.extra`: `method` (dot, kfac, ekfac, datainf, ekfac_cg), `queries` (token folder); optional
`queries_digest`, `damping` (a decimal string, default "0.1"), `steps` (of ekfac_cg, default 10).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from provenance.canonical import jcs, parse_json, write_atomic
from provenance.hashing import file_sha256
from trainer.data import TokenStore
from trainer.errors import EXIT_DONE, EXIT_RESUME
from trainer.inputs import initial_model, load_excluded, open_store
from trainer.journal import RESULT_FILE, lock_folder, write_exit, write_result
from trainer.mesh import init_mesh
from trainer.spec import run_digest
from trainer.stop import StopFlag
from valuation.capture import Capture
from valuation.errors import GradientError
from valuation.gradients import Segments, captured_pass
from valuation.influence.datainf import solver as datainf
from valuation.influence.ekfac import solver as ekfac
from valuation.influence.ekfac_cg import solver as ekfac_cg
from valuation.influence.kfac import solver as kfac
from valuation.influence.pairing import Pass, gradient_blocks, query_check
from valuation.influence.scores import Scores, TokenSet, bind, refuse_overlap
from valuation.routes import formed_dots
from valuation.store import Layout, StoreWriter, prepare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from trainer.mesh import Mesh
    from trainer.spec import RunSpec
    from valuation.influence.pairing import Left

METHODS = ("dot", "kfac", "ekfac", "datainf", "ekfac_cg")
_EXTRA = {"method", "queries", "queries_digest", "damping", "steps"}


def run(spec: RunSpec, directory: Path) -> int:
    """Score every record for every query; the entry `valuation.passes:run`.

    Args:
        spec: see the module docstring; rows and length of a batch are `config.batch`'s.
        directory: the run's folder.

    Returns:
        EXIT_DONE, or EXIT_RESUME after SIGTERM or SIGINT.

    Raises:
        GradientError: settings that can't be meant, queries that are records, a loss that isn't finite, a layer
            without formula.
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
    try:
        float(extra.get("damping", "0.1"))
    except ValueError as error:
        raise GradientError(
            f"config.extra.damping: expected a decimal string, got {extra['damping']!r}"
        ) from error


def _score(spec: RunSpec, directory: Path, mesh: Mesh, stop: StopFlag) -> int:
    extra, batch = spec.config.extra, spec.config.batch
    train, queries = _sets(spec, directory)
    model = initial_model(spec, directory).to(mesh.device)
    how = Pass(rows=batch.rows, mesh=mesh)
    binding = bind(model, train, queries)
    settings = {key: extra[key] for key in sorted(set(extra) & {"method", "damping", "steps"})}
    blocks = train.blocks(batch.rows)
    layout = Layout(
        identity={**asdict(binding), **settings, "precision": spec.config.precision},
        index=tuple(train.index_N.tolist()),
        ids=train.ids,
        width=len(queries.records),
        dtype="float64",
        blocks=tuple((block.start, block.stop) for block in blocks),
    )
    if mesh.rank == 0:
        (directory / RESULT_FILE).unlink(missing_ok=True)
        prepare(directory / "scores", layout)
    mesh.barrier()
    left = _left_side(
        model, train, queries, layout.identity, directory / "scores.part" / "left", how, extra
    )
    mesh.barrier()  # nobody writes a block before all have read which are missing
    writer = StoreWriter.open(directory / "scores", layout, mesh.rank)
    todo = writer.missing(mesh.world_size)
    mesh.barrier()
    capture = Capture(model)
    for number in todo:
        if stop.raised:
            break
        writer.write(number, _block(model, capture, train, blocks[number], left))
    if any(mesh.gather(stop.raised)):
        if mesh.rank == 0:
            write_exit(directory, EXIT_RESUME, "stopped by a signal; finished blocks are kept")
        return EXIT_RESUME
    mesh.barrier()
    if mesh.rank == 0:
        _finish(spec, directory, writer, Scores(
            np.ascontiguousarray(np.asarray(writer.values).T), queries.index_N, train.index_N, queries.ids, train.ids,
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
    refuse_overlap(train, queries)
    return train, queries


def _left_side(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    identity: dict[str, Any],
    folder: Path,
    how: Pass,
    extra: dict[str, Any],
) -> Left:
    """H^-1 of the queries' gradients, from the disk if an earlier start has made them."""
    shapes, marker = Capture(model).shapes, folder.with_name("left.json")
    like, num = next(model.parameters()), len(queries.records)
    files = {name: folder / f"{number:05d}.npy" for number, name in enumerate(sorted(shapes))}
    whole = marker.is_file() and _is_whole(marker, files, identity)
    if not all(how.mesh.gather(whole)):
        solve = _solver(model, train, how, extra)
        numpy_type = torch.empty(0, dtype=like.dtype).numpy().dtype
        maps: dict[str, Any] = {}
        if how.mesh.rank == 0:
            marker.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name, shape in shapes.items():
                maps[name] = np.lib.format.open_memmap(
                    files[name], mode="w+", dtype=numpy_type, shape=(num, *shape)
                )
        for places, left in gradient_blocks(model, queries, how):
            for name, values in solve(left).items():
                if how.mesh.rank == 0:
                    maps[name][places] = values.cpu().numpy()
        for values in maps.values():
            values.flush()
        if how.mesh.rank == 0:
            digests = {name: file_sha256(file) for name, file in files.items()}
            write_atomic(marker, jcs({"identity": identity, "digests": digests}))
        how.mesh.barrier()
    # Copy on write: torch wants a writable array, the file stays as it is.
    return {
        name: torch.from_numpy(np.load(files[name], mmap_mode="c")).to(like.device)
        for name in shapes
    }


def _is_whole(marker: Path, files: dict[str, Path], identity: dict[str, Any]) -> bool:
    document = parse_json(marker.read_bytes())
    return document["identity"] == identity and all(
        file.is_file() and file_sha256(file) == document["digests"].get(name)
        for name, file in files.items()
    )


def _solver(
    model: nn.Module, train: TokenSet, how: Pass, extra: dict[str, Any]
) -> Callable[[Left], Left]:
    """The method's inverse."""
    damping = float(extra.get("damping", "0.1"))
    if extra["method"] == "dot":
        return lambda left: left
    if extra["method"] == "kfac":
        return kfac(model, train, how, damping=damping)
    if extra["method"] == "ekfac":
        return ekfac(model, train, how, damping=damping)
    if extra["method"] == "datainf":
        return datainf(model, train, how, damping)
    solve = ekfac_cg(model, train, how, damping=damping, steps=int(extra.get("steps", 10)))
    return lambda left: solve(left)[0]


def _block(
    model: nn.Module, capture: Capture, train: TokenSet, block: range, left: Left
) -> np.ndarray:
    """The scores of a block's records, [n, Q]."""
    rows = np.zeros((len(block), len(next(iter(left.values())))))
    batch = train.batch(block)
    if batch.num_labels:
        nll_BT = captured_pass(model, batch, capture)
        groups = Segments.of(batch).groups(nll_BT.device)
        places = np.searchsorted(train.index_N[block.start : block.stop], groups.index_N)
        rows[places] = formed_dots(capture, groups, left).T.cpu().numpy()
    return rows


def _finish(spec: RunSpec, directory: Path, writer: StoreWriter, scores: Scores) -> None:
    """Name the store, write the scores, then result.json."""
    shutil.rmtree(writer.part / "left")
    (writer.part / "left.json").unlink()
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
