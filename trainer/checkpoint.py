"""Phase 5, checkpoint and recover: atomic, verified before anything is unpickled, readable by any layout.

    step-N/                      written as step-N.tmp, synced, renamed: it exists whole or not at all
        .metadata  *.distcp      torch.distributed.checkpoint: weights and moments under logical names
        manifest.json            canonical JSON: run digest, step, logical root, SHA-256 and size of every file

torch loads a bit-flipped `.distcp` without any error, and `.metadata` is a pickle, which runs code when it is read.
So the manifest's digests are checked first, on every file, and the pickle is then read by an unpickler that knows
the dozen classes of a DCP index and no other: whoever can write both file and manifest gains nothing either. Last,
the Merkle root over the loaded tensors (`trainer.root`) must be the manifest's, and the one the caller trusts if it
gives one. A checkpoint that fails is refused, never skipped in favour of an older one.

torch and torch.distributed.checkpoint are imported on first use: `verify` needs neither and stays cheap.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import shutil
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, parse_json, sync_folder, write_atomic
from trainer.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from torch import Tensor

    from trainer.mesh import Mesh
    from trainer.model import Transformer
    from trainer.spec import ModelSpec

FORMAT = 1
MANIFEST_FILE = "manifest.json"
_INDEX_FILE = ".metadata"
_STEP = re.compile(r"step-(\d+)")
_FIELDS = {"format", "run", "run_digest", "step", "root", "files", "window"}

# What an index of DCP is made of (torch 2.7 to 2.13); anything else in the pickle is refused.
_INDEX_CLASSES = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {
        "Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    },
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says about itself."""

    run: str
    """Name of the run that wrote it."""
    run_digest: str
    """Digest of that run's run.json."""
    step: int
    """Optimiser steps done."""
    root: str
    """Logical root of the state."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> sha256 and size."""
    window: dict[str, Any] = field(default_factory=dict)
    """The line of windows.jsonl that ends here; empty at step 0."""
    format: int = FORMAT
    """Format of the manifest."""


def save(
    directory: Path,
    manifest: Manifest,
    tensors: Mapping[str, Tensor],
    *,
    mesh: Mesh,
    keep_last: int,
) -> Path:
    """Write step-N; every process calls this with its slices.

    Args:
        directory: folder of the run.
        manifest: what stands in manifest.json; its `files` are filled in here.
        tensors: logical name -> tensor or slice; `manifest.root` is their `state_root`.
        mesh: the processes.
        keep_last: newest checkpoints to keep, >= 1.

    Returns:
        The folder step-N, complete and durable.
    """
    import torch.distributed.checkpoint as dcp

    final, unfinished = directory / f"step-{manifest.step}", directory / f"step-{manifest.step}.tmp"
    if mesh.rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
    mesh.barrier()
    alone = mesh.world_size == 1
    with _quiet():
        dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(unfinished), no_dist=alone)
    mesh.barrier()
    if mesh.rank == 0:
        files = {path.name: _file_entry(path) for path in sorted(unfinished.iterdir())}
        filled = replace(manifest, files=files)
        write_atomic(
            unfinished / MANIFEST_FILE, jcs({name: getattr(filled, name) for name in _FIELDS})
        )
        _discard(final)
        unfinished.rename(final)
        sync_folder(directory)
        for _, old in sorted(_steps(directory))[:-keep_last]:
            _discard(old)
    mesh.barrier()
    return final


def newest(directory: Path) -> Path | None:
    """The complete checkpoint of most steps in a run's folder, or None.

    Args:
        directory: folder of the run.

    Returns:
        A step-N folder. Completeness follows from its name; whether it is intact, `verify` says.
    """
    steps = _steps(directory) if directory.is_dir() else []
    return max(steps)[1] if steps else None


def clean(directory: Path) -> None:
    """Remove what an interrupted save or removal left behind."""
    for path in directory.glob("step-*.tmp"):
        shutil.rmtree(path)


def verify(directory: Path) -> Manifest:
    """Check every file of a checkpoint against its manifest; nothing is unpickled.

    Args:
        directory: a step-N folder.

    Returns:
        The manifest.

    Raises:
        CheckpointError: no manifest, another format, or a file that is missing, extra or altered.
    """
    name = directory.name
    try:
        parsed = parse_json((directory / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise CheckpointError(
            f"{name}: no readable {MANIFEST_FILE} ({error.strerror}); not a complete checkpoint"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{name}: {MANIFEST_FILE}: {error}") from error
    if not isinstance(parsed, dict) or parsed.get("format") != FORMAT or set(parsed) != _FIELDS:
        raise CheckpointError(f"{name}: {MANIFEST_FILE} is not of format {FORMAT}")
    manifest = Manifest(**parsed)
    present = {path.name for path in directory.iterdir()} - {MANIFEST_FILE}
    if present != set(manifest.files):
        raise CheckpointError(
            f"{name}: expected the files {sorted(manifest.files)}, got {sorted(present)}"
        )
    for file, entry in manifest.files.items():
        got = _file_entry(directory / file)
        if got != entry:
            raise CheckpointError(
                f"{name}: {file} was changed: expected SHA-256 {entry['sha256']} of {entry['size']} bytes, "
                f"got {got['sha256']} of {got['size']}; restore it, or delete {name} to go on from an older one",
            )
    return manifest


def load_into(directory: Path, tensors: Mapping[str, Tensor], mesh: Mesh | None = None) -> Manifest:
    """Fill a state in place from a checkpoint of any layout; every process calls this with its slices.

    Args:
        directory: a step-N folder.
        tensors: logical name -> tensor or slice, all of them in the checkpoint.
        mesh: the processes; None = one.

    Returns:
        The manifest.

    Raises:
        CheckpointError: a file is altered, or names or shapes differ.
    """
    manifest = verify(directory)
    reader = _reader(directory)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if mesh is not None:
        shapes = mesh.merge(shapes)  # of all pipeline stages
    _same_tensors(directory.name, reader.read_metadata().state_dict_metadata, shapes)
    _load(reader, tensors, alone=mesh is None or mesh.world_size == 1)
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
    reader = _reader(directory)
    index = reader.read_metadata().state_dict_metadata
    for name in sorted(index):
        tensor = torch.empty(index[name].size, dtype=index[name].properties.dtype)
        _load(_reader(directory), {name: tensor}, alone=True)
        yield name, tensor


def load_model(directory: Path, spec: ModelSpec, expected_root: str | None = None) -> Transformer:
    """The model of a checkpoint, whole, on the CPU, in evaluation mode.

    Args:
        directory: a step-N folder.
        spec: shape of the model.
        expected_root: logical root that the checkpoint must have (of weights and moments); None trusts its manifest.

    Returns:
        The model.

    Raises:
        CheckpointError: altered, of another root, or of another shape.
    """
    import torch

    from trainer.model import Transformer
    from trainer.root import state_root

    manifest = verify(directory)
    if expected_root is not None and manifest.root != expected_root:
        raise CheckpointError(
            f"{directory.name}: expected root {expected_root}, got {manifest.root}"
        )
    reader = _reader(directory)
    index = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in index.items()
    }
    _load(reader, state, alone=True)
    if (got := state_root(state)) != manifest.root:
        raise CheckpointError(
            f"{directory.name}: expected root {manifest.root}, its tensors have {got}"
        )
    model = Transformer(spec)
    weights = model_state(model)
    _same_tensors(
        directory.name,
        {n: meta for n, meta in index.items() if n.startswith("model.")},
        {n: tuple(weight.shape) for n, weight in weights.items()},
    )
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(state[name])
    return model.eval()


def model_state(model: torch.nn.Module) -> dict[str, Tensor]:
    """Weights and lasting buffers under their logical names, not copies; a tied head counts once."""
    lasting = model.state_dict()
    named = {name: parameter.detach() for name, parameter in model.named_parameters()}
    named |= {name: buffer for name, buffer in model.named_buffers() if name in lasting}
    return {f"model.{name}": tensor for name, tensor in named.items()}


def _steps(directory: Path) -> list[tuple[int, Path]]:
    found = [(match, path) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [(int(match[1]), path) for match, path in found if (path / MANIFEST_FILE).is_file()]


def _discard(folder: Path) -> None:
    """Remove a checkpoint so that a crash in between leaves no half of it under its name."""
    if folder.exists():
        doomed = folder.with_name(f"{folder.name}.old.tmp")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _file_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "size": os.fstat(file.fileno()).st_size}


def _same_tensors(
    name: str, index: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    missing, extra = sorted(set(shapes) - set(index)), sorted(set(index) - set(shapes))
    if missing or extra:
        raise CheckpointError(
            f"{name}: of another model: lacks {missing[:2]}, has beyond it {extra[:2]}"
        )
    for key, shape in shapes.items():
        if tuple(index[key].size) != shape:
            raise CheckpointError(
                f"{name}: of another model: {key} expected shape {shape}, got {tuple(index[key].size)}",
            )


def _load(reader: Any, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with _quiet():
            dcp.load(dict(tensors), storage_reader=reader, no_dist=alone)
    except CheckpointException as error:  # not an Exception: it would pass every handler above
        causes = sorted({type(cause).__name__ for cause, _ in error.failures.values()})
        raise CheckpointError(
            f"the files of the checkpoint do not hold its tensors ({', '.join(causes)})"
        ) from error


def _reader(directory: Path) -> Any:
    """DCP's reader with an unpickler that builds an index and nothing else."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(dcp.FileSystemReader):
        """Reads `.metadata` strictly."""

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            """The index of the checkpoint."""
            metadata = _read_index(Path(self.path, _INDEX_FILE))
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(directory)


def _read_index(path: Path) -> Any:
    """The index of a checkpoint, which is a pickle, by an unpickler that can build nothing else."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise CheckpointError(
            f"{path.name}: not an index of tensors ({type(error).__name__})"
        ) from error
    if not isinstance(index, Metadata):
        raise CheckpointError(
            f"{path.name}: expected an index of tensors, got {type(index).__name__}"
        )
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of a DCP index; a pickle that names anything else is refused before it runs."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of the index, or an error."""
        if name not in _INDEX_CLASSES.get(module, ()):
            raise CheckpointError(
                f"{_INDEX_FILE}: expected an index of tensors, got a reference to {module}.{name}"
            )
        return super().find_class(module, name)


@contextmanager
def _quiet() -> Iterator[None]:
    """DCP warns that a single process is a single process; that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*torch.distributed is disabled.*", category=UserWarning
        )
        yield
