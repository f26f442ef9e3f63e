"""Reading a distributed checkpoint's files without running what is in them.

torch.distributed.checkpoint (DCP) keeps its index in `.metadata`, which is a pickle: reading it runs code. The
manifest's digests are checked before (`trainer.checkpoint.verify`), and the pickle is then read by an unpickler that
knows the dozen classes of an index and no other: whoever can write both file and manifest gains nothing either.

torch.distributed.checkpoint is imported on first use: a run that never saves and a verification do not pay for it.
"""

from __future__ import annotations

import pickle
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import AlteredCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

INDEX_FILE = ".metadata"

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


def open_files(directory: Path) -> Any:
    """DCP's reader of a step-N folder, with an unpickler that builds an index and nothing else."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(dcp.FileSystemReader):
        """Reads `.metadata` strictly."""

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            """The index of the checkpoint."""
            metadata = _read_index(Path(self.path, INDEX_FILE))
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(directory)


def read_index(directory: Path) -> dict[str, Any]:
    """Logical name -> DCP's description (`size`, `properties.dtype`) of every tensor of a step-N folder.

    Raises:
        AlteredCheckpointError: the index is not one, or names what no index needs.
    """
    return _read_index(directory / INDEX_FILE).state_dict_metadata


def load_tensors(directory: Path, tensors: Mapping[str, Tensor], *, alone: bool) -> None:
    """Fill tensors or slices in place from a verified step-N folder.

    Args:
        directory: the folder.
        tensors: logical name -> tensor or slice.
        alone: whether this process reads for itself; otherwise every process must call this.

    Raises:
        AlteredCheckpointError: the files do not hold the tensors that the index promises.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with quiet():
            dcp.load(dict(tensors), storage_reader=open_files(directory), no_dist=alone)
    except CheckpointException as error:  # not an Exception: it would pass every handler above
        causes = sorted({type(cause).__name__ for cause, _ in error.failures.values()})
        raise AlteredCheckpointError(
            f"{directory.name}: the files do not hold its tensors ({', '.join(causes)})"
        ) from error


@contextmanager
def quiet() -> Iterator[None]:
    """DCP warns that a single process is a single process; that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*torch.distributed is disabled.*", category=UserWarning
        )
        yield


def _read_index(path: Path) -> Any:
    """The index of a checkpoint, which is a pickle, by an unpickler that can build nothing else."""
    from torch.distributed.checkpoint.metadata import Metadata

    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, TypeError) as error:
        raise AlteredCheckpointError(
            f"{path.name}: not an index of tensors ({type(error).__name__})"
        ) from error
    if not isinstance(index, Metadata):
        raise AlteredCheckpointError(
            f"{path.name}: expected an index of tensors, got {type(index).__name__}"
        )
    return index


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes of a DCP index; a pickle that names anything else is refused before it runs."""

    def find_class(self, module: str, name: str) -> Any:
        """A class of the index, or an error."""
        if name not in _INDEX_CLASSES.get(module, ()):
            raise AlteredCheckpointError(
                f"{INDEX_FILE}: expected an index of tensors, got a reference to {module}.{name}"
            )
        return super().find_class(module, name)
