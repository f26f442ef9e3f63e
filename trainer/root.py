"""The name of a model state: a Merkle root over its logical tensors.

    leaf = SHA256(0x00 || length of header, 4 bytes || header || little-endian bytes of the tensor, row-major)
    header = JCS {"dtype", "name", "shape"};   root = RFC 9162 tree over the leaves, sorted by name

A distributed checkpoint of the same state has other files for every number of processes, and other bytes for every
save. This root depends on the numbers only, so one process, ddp and fsdp name the same state alike, and one tensor
can be proved to be part of a checkpoint with log2(n) hashes. Memory: the largest tensor, twice.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch

from provenance.canonical import jcs
from provenance.hashing import leaf_hash
from provenance.merkle import root_of
from trainer.partition import full

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer.mesh import Mesh


def tensor_leaf(name: str, tensor: Tensor) -> bytes:
    """The leaf hash of one named tensor.

    Args:
        name: logical name, such as "model.embed.weight".
        tensor: any dtype and shape, whole (not sliced).

    Returns:
        32 bytes.
    """
    assert sys.byteorder == "little", "tensor bytes are hashed in little-endian order"
    plain = tensor.detach().cpu().contiguous()
    header = jcs(
        {"name": name, "dtype": str(plain.dtype).removeprefix("torch."), "shape": list(plain.shape)}
    )
    body = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return leaf_hash(len(header).to_bytes(4, "big") + header + body)


def state_root(tensors: Mapping[str, Tensor], mesh: Mesh | None = None) -> str:
    """Hex Merkle root of a state.

    Args:
        tensors: logical name -> tensor; sliced tensors are gathered one by one, so with several processes every
            process must call this.
        mesh: the processes, whose pipeline stages hold different tensors; None = all tensors are here.

    Returns:
        64 hex digits, the same on every process and for every layout.
    """
    leaves = {name: tensor_leaf(name, full(tensors[name])) for name in sorted(tensors)}
    if mesh is not None:
        leaves = mesh.merge(leaves)
    return root_of([leaves[name] for name in sorted(leaves)]).hex()


def checkpoint_root(directory: Path) -> str:
    """Hex Merkle root of the state in a checkpoint, computed from its tensors.

    Args:
        directory: a step-N folder; its files are verified before they are read.

    Returns:
        64 hex digits.

    Raises:
        CheckpointError: a file is missing or altered.
    """
    from trainer.checkpoint import (
        read_tensors,
    )  # a checkpoint is named by its root: the import would be circular

    return root_of([tensor_leaf(name, tensor) for name, tensor in read_tensors(directory)]).hex()
