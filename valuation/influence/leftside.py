"""The queries' side of a pass over a corpus, kept on disk: H^-1 of their gradients, one file per parameter.

It is made once, by all processes together, and read memory-mapped by each. `FOLDER.json` is written last and has the files'
digests, so that after a kill a half-written side is never taken for a whole one.

Source: `valuation.influence`'s solvers.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from provenance.canonical import jcs, parse_json, write_atomic
from provenance.hashing import file_sha256
from valuation.capture import Capture
from valuation.influence.datainf import solver as datainf
from valuation.influence.ekfac import solver as ekfac
from valuation.influence.ekfac_cg import DAMPING, STEPS
from valuation.influence.ekfac_cg import solver as ekfac_cg
from valuation.influence.kfac import solver as kfac
from valuation.influence.pairing import gradient_blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from valuation.influence.pairing import Left, Pass
    from valuation.influence.scores import TokenSet


def left_side(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    identity: dict[str, Any],
    folder: Path,
    how: Pass,
    extra: dict[str, Any],
) -> Left:
    """H^-1 of the queries' gradients, from the disk if an earlier start has made them.

    Args:
        model: the model.
        train: records, for the curvature.
        queries: queries.
        identity: what the numbers depend on; other numbers are never taken.
        folder: where they are kept; `FOLDER.json` beside it says that they are whole.
        how: rows of a batch, processes.
        extra: `method`, `damping`, `steps`; a method without curvature leaves the gradients as they are.

    Returns:
        Parameter -> [Q, *shape], memory-mapped; a change in memory does not reach the file.
    """
    shapes, marker = Capture(model).shapes, folder.with_name(f"{folder.name}.json")
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
    damping = float(extra.get("damping", DAMPING if extra["method"] == "ekfac_cg" else "0.1"))
    if extra["method"] == "kfac":
        return kfac(model, train, how, damping=damping)
    if extra["method"] == "ekfac":
        return ekfac(model, train, how, damping=damping)
    if extra["method"] == "datainf":
        return datainf(model, train, how, damping)
    if extra["method"] == "ekfac_cg":
        solve = ekfac_cg(model, train, how, damping=damping, steps=int(extra.get("steps", STEPS)))
        return lambda left: solve(left)[0]
    return lambda left: left
