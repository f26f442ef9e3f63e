"""Phase 5, checkpoint and recover: verified before anything is unpickled, readable by any layout.

    step-N/                      written as step-N.tmp, synced, renamed (`trainer.saver`): it exists whole or not at all
        .metadata  *.distcp      torch.distributed.checkpoint: weights and moments under logical names
        manifest.json            canonical JSON: run, model, tokens, step, logical root, SHA-256 and size of every file

torch loads a bit-flipped `.distcp` without any error, and `.metadata` is a pickle, which runs code when it is read.
So the manifest's digests are checked first, on every file, and only then is the index read, strictly
(`trainer.index`). Last, the Merkle root over the loaded tensors (`trainer.root`) must be the manifest's, and the one
the caller trusts if it gives one. A checkpoint that fails is refused, never skipped in favour of an older one; the
error's class says why (`trainer.errors`): half-written, another format version, altered, or of another model.

torch and torch.distributed.checkpoint are imported on first use: `verify` needs neither and stays cheap.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING, Any

from trainer.errors import AlteredCheckpointError, OtherModelError
from trainer.index import load_tensors, read_index
from trainer.manifest import MANIFEST_FILE, Manifest, model_digest, verify

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from trainer.mesh import Mesh
    from trainer.model import Transformer
    from trainer.spec import ModelSpec

REPLACED = ".replaced.tmp"
"""Suffix of a checkpoint while another of the same step takes its place."""
_GROUP_BYTES = 2**24  # read at a time: enough that small checkpoints are read at once
_STEP = re.compile(r"step-(\d+)")


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of most steps in a run's folder, or None.

    Args:
        directory: folder of the run.

    Returns:
        A step-N folder. Completeness follows from its name; whether it is intact, `verify` says.
    """
    found = complete_steps(directory) if directory.is_dir() else []
    return found[-1][1] if found else None


def complete_steps(directory: Path) -> list[tuple[int, Path]]:
    """(N, folder) of every complete checkpoint, ascending."""
    found = [(match, path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return sorted((int(m[1]), path) for m, path in found if (path / MANIFEST_FILE).is_file())


def clean(directory: Path) -> None:
    """Remove what an interrupted save or removal left, and put back a checkpoint whose successor never came."""
    for path in directory.glob(f"step-*{REPLACED}"):
        place = path.with_name(path.name.removesuffix(REPLACED))
        if not place.exists():
            path.rename(place)
    for path in directory.glob("step-*.tmp"):
        shutil.rmtree(path)


def load_into(directory: Path, tensors: Mapping[str, Tensor], mesh: Mesh | None = None) -> Manifest:
    """Fill a state in place from a checkpoint of any layout; every process calls this with its slices.

    Args:
        directory: a step-N folder.
        tensors: logical name -> tensor or slice; over all processes, the tensors of the checkpoint.
        mesh: the processes; None = one.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file is altered, or names or shapes differ.
    """
    manifest = verify(directory, mesh)
    alone = mesh is None or mesh.world_size == 1
    everywhere = set(tensors) if mesh is None else set().union(*mesh.gather(set(tensors)))
    _same_tensors(directory.name, read_index(directory), tensors, everywhere)
    load_tensors(directory, tensors, alone=alone)
    return manifest


def read_tensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """All tensors of a checkpoint, whole, one at a time, sorted by name.

    Args:
        directory: a step-N folder, verified first.

    Yields:
        (logical name, tensor on the CPU).

    Raises:
        CheckpointError: a file is missing or altered.
    """
    import torch

    verify(directory)
    index = read_index(directory)
    for name in sorted(index):
        tensor = torch.empty(index[name].size, dtype=index[name].properties.dtype)
        load_tensors(directory, {name: tensor}, alone=True)
        yield name, tensor


def load_model(
    directory: Path,
    spec: ModelSpec,
    expected_root: str | None = None,
    dtype: torch.dtype | None = None,
) -> Transformer:
    """The model of a checkpoint, whole, on the CPU, in evaluation mode.

    Args:
        directory: a step-N folder.
        spec: shape of the model.
        expected_root: logical root that the checkpoint must have (of weights and moments); None trusts its manifest.
        dtype: type of the model's weights; None = float32, to which those of a float64 run are rounded.

    Returns:
        The model.

    Raises:
        CheckpointError: altered, of another root, or of another shape.
    """
    import torch

    from trainer.model import Transformer
    from trainer.root import leaves_root, state_leaves

    manifest = verify(directory)
    if expected_root is not None and manifest.root != expected_root:
        raise AlteredCheckpointError(
            f"{directory.name}: expected root {expected_root}, got {manifest.root}"
        )
    index = read_index(directory)
    model = Transformer(spec).to(dtype or torch.float32)
    weights = model_state(model)
    _same_tensors(
        directory.name,
        {n: meta for n, meta in index.items() if n.startswith("model.")},
        weights,
        set(weights),
    )
    if manifest.model_digest != model_digest(spec):
        raise OtherModelError(
            f"{directory.name}: of another model: expected specification {model_digest(spec)}, "
            f"got {manifest.model_digest}"
        )
    leaves: dict[str, bytes] = {}
    for names in _groups(index):
        state = {
            name: torch.empty(index[name].size, dtype=index[name].properties.dtype)
            for name in names
        }
        load_tensors(directory, state, alone=True)
        leaves |= state_leaves(state)
        with torch.no_grad():
            for name in weights.keys() & state.keys():
                weights[name].copy_(state[name])
    if (got := leaves_root(leaves)) != manifest.root:
        raise AlteredCheckpointError(
            f"{directory.name}: expected root {manifest.root}, its tensors have {got}"
        )
    return model.eval()


def _groups(index: Mapping[str, Any]) -> Iterator[list[str]]:
    """Names in groups of about 16 MB: a checkpoint is three times its model, and only a group of it is held beside the model."""
    group: list[str] = []
    room = _GROUP_BYTES
    for name, meta in index.items():
        size = meta.size.numel() * meta.properties.dtype.itemsize
        if group and size > room:
            yield group
            group, room = [], _GROUP_BYTES
        group.append(name)
        room -= size
    if group:
        yield group


def model_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights and lasting buffers under their logical names, not copies; a tied head counts once."""
    lasting = model.state_dict()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named |= {name: buffer for name, buffer in model.named_buffers() if name in lasting}
    return {f"model.{name}": tensor for name, tensor in named.items()}


def _same_tensors(
    name: str, index: Mapping[str, Any], tensors: Mapping[str, Tensor], everywhere: set[str]
) -> None:
    """Names over all processes are those of the index, and so are the shapes of this process's tensors."""
    missing, extra = sorted(everywhere - set(index)), sorted(set(index) - everywhere)
    if missing or extra:
        raise OtherModelError(
            f"{name}: of another model: lacks {missing[:2]}, has beyond it {extra[:2]}"
        )
    for key, tensor in tensors.items():
        if tuple(index[key].size) != tuple(tensor.shape):
            raise OtherModelError(
                f"{name}: of another model: {key} expected shape {tuple(tensor.shape)}, got {tuple(index[key].size)}",
            )
