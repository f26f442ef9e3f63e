"""The name of a model state: a Merkle root over its logical tensors.

    leaf = SHA256(0x00 || length of header, 4 bytes || header || little-endian bytes of the tensor, row-major)
    header = JCS {"dtype", "name", "shape"};   root = RFC 9162 tree over the leaves, sorted by name

A distributed checkpoint of the same state has other files for every number of processes, and other bytes for every
save. This root depends on the numbers only, so every layout names the same state alike, and one tensor can be proved
to be part of a checkpoint with log2(n) hashes, without the others:

    python -m trainer.root prove DIR/step-8 model.embed.weight --bytes embed.bin > proof.json
    python -m trainer.root check proof.json ROOT --bytes embed.bin

ROOT comes from where it is trusted: the ledger, result.json. The name is in the leaf, so a proof can't pass one tensor
off as another. Processes share the hashing, each gathers one tensor at a time: memory is the largest tensor, once.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, parse_json
from provenance.errors import ProvenanceError
from provenance.hashing import LEAF_PREFIX
from provenance.merkle import MerkleTree, root_of
from provenance.proofs import verify_inclusion
from trainer.errors import EXIT_REFUSED, AlteredCheckpointError, CheckpointError, OtherModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from trainer.mesh import Mesh

PROOF_FORMAT = 1
_PROOF = {"format", "name", "dtype", "shape", "leaf", "index", "size", "path", "root"}


def tensor_leaf(name: str, tensor: Tensor) -> bytes:
    """The leaf hash of one named tensor.

    Args:
        name: logical name, such as "model.embed.weight".
        tensor: any dtype and shape, whole (not sliced).

    Returns:
        32 bytes.
    """
    return _leaf(name, _dtype(tensor), list(tensor.shape), tensor_bytes(tensor))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Little-endian bytes of a tensor, row-major; not a copy if it lies so on the CPU."""
    import torch

    assert sys.byteorder == "little", "tensor bytes are hashed in little-endian order"
    plain = tensor.detach().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


def state_root(tensors: Mapping[str, Tensor], mesh: Mesh | None = None) -> str:
    """Hex Merkle root of a state.

    Args:
        tensors: logical name -> tensor; sliced tensors are gathered one by one.
        mesh: the processes, each of which must call this with the tensors that it has a part of; None = this process
            has them all.

    Returns:
        64 hex digits, the same on every process and for every layout.
    """
    return leaves_root(state_leaves(tensors, mesh))


def leaves_root(leaves: Mapping[str, bytes]) -> str:
    """Hex Merkle root over named leaf hashes."""
    return root_of(leaves[name] for name in sorted(leaves)).hex()


def state_leaves(tensors: Mapping[str, Tensor], mesh: Mesh | None = None) -> dict[str, bytes]:
    """Leaf hash of every tensor of a state, on every process; arguments as for `state_root`."""
    from trainer.partition import full

    alone = mesh is None or mesh.world_size == 1
    rank, holders = 0, {name: [0] for name in tensors}
    if mesh is not None and not alone:
        rank, holders = mesh.rank, {}
        for other, names in enumerate(mesh.gather(sorted(tensors))):
            for name in names:
                holders.setdefault(name, []).append(other)
    leaves = {}
    for number, name in enumerate(sorted(holders)):
        if name in tensors:
            whole = full(tensors[name])  # every holder is in the gathering, one of them hashes
            if holders[name][number % len(holders[name])] == rank:
                leaves[name] = tensor_leaf(name, whole)
    if mesh is None or alone:
        return leaves
    return {name: leaf for part in mesh.gather(leaves) for name, leaf in part.items()}


def checkpoint_root(directory: Path) -> str:
    """Hex Merkle root of the state in a checkpoint, computed from its tensors.

    Args:
        directory: a step-N folder; its files are verified before they are read.

    Returns:
        64 hex digits.

    Raises:
        CheckpointError: a file is missing or altered.
    """
    from trainer.checkpoint import read_tensors  # a checkpoint is named by its root: circular

    return root_of(tensor_leaf(name, tensor) for name, tensor in read_tensors(directory)).hex()


def prove(directory: Path, name: str) -> tuple[dict[str, Any], bytes]:
    """The proof that a tensor is in a checkpoint.

    Args:
        directory: a step-N folder; its files are verified before they are read.
        name: logical name of the tensor.

    Returns:
        The proof as canonical JSON holds it, and the tensor's bytes.

    Raises:
        CheckpointError: a file is missing or altered, or there is no such tensor.
    """
    from trainer.checkpoint import read_tensors

    leaves, index, found, data = [], -1, {}, b""
    for number, (other, tensor) in enumerate(read_tensors(directory)):
        leaves.append(tensor_leaf(other, tensor))
        if other == name:
            index, data = number, bytes(tensor_bytes(tensor))
            found = {"name": name, "dtype": _dtype(tensor), "shape": list(tensor.shape)}
    if index < 0:
        raise OtherModelError(f"{directory.name}: has no tensor {name!r}")
    tree = MerkleTree(leaves)
    proof = {
        "format": PROOF_FORMAT,
        **found,
        "leaf": leaves[index].hex(),
        "index": index,
        "size": tree.size,
        "path": [step.hex() for step in tree.inclusion_path(index)],
        "root": tree.root().hex(),
    }
    return proof, data


def check_proof(proof: Mapping[str, Any], root: str, data: bytes | None = None) -> None:
    """Check that a tensor is under a root; returns nothing, raises if it is not.

    Args:
        proof: from `prove`.
        root: hex root from a trusted source, never from the proof.
        data: the tensor's bytes; None checks only that the tensor of the proof's leaf is under the root.

    Raises:
        AlteredCheckpointError: not a proof of format 1, of another tensor, or under another root.
    """
    if not isinstance(proof, dict) or set(proof) != _PROOF or proof["format"] != PROOF_FORMAT:
        raise AlteredCheckpointError(f"not a proof of format {PROOF_FORMAT} with {sorted(_PROOF)}")
    name = proof["name"]
    try:
        leaf, path = bytes.fromhex(proof["leaf"]), [bytes.fromhex(step) for step in proof["path"]]
        got = leaf if data is None else _leaf(name, proof["dtype"], proof["shape"], data)
        verify_inclusion(leaf, proof["index"], proof["size"], path, bytes.fromhex(root))
    except (ProvenanceError, ValueError, TypeError) as error:
        raise AlteredCheckpointError(f"{name}: not under the root {root}: {error}") from error
    if got != leaf:
        raise AlteredCheckpointError(
            f"{name}: expected leaf {leaf.hex()}, the bytes have {got.hex()}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m trainer.root`: prove that a tensor is in a checkpoint, check such a proof."""
    parser = argparse.ArgumentParser(prog="python -m trainer.root", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    proving = commands.add_parser("prove", help="print the proof of one tensor")
    proving.add_argument("directory", type=Path, metavar="DIR/step-N")
    proving.add_argument("name", help="logical name, such as model.embed.weight")
    proving.add_argument("--bytes", type=Path, help="write the tensor's bytes to this file")
    checking = commands.add_parser("check", help="say whether a proof holds")
    checking.add_argument("proof", type=Path)
    checking.add_argument("root", help="hex root from a source you trust")
    checking.add_argument("--bytes", type=Path, help="the tensor's bytes, to be hashed")
    given = parser.parse_args(arguments)
    try:
        if given.command == "prove":
            proof, data = prove(given.directory, given.name)
            if given.bytes:
                given.bytes.write_bytes(data)
            sys.stdout.write(json.dumps(proof, indent=1) + "\n")
            return 0
        proof = parse_json(given.proof.read_bytes())
        check_proof(proof, given.root, given.bytes.read_bytes() if given.bytes else None)
    except (CheckpointError, OSError, ValueError) as error:
        sys.stderr.write(f"no: {error}\n")
        return EXIT_REFUSED
    what = "its bytes are" if given.bytes else "the tensor of its leaf is"
    sys.stdout.write(f"yes: {proof['name']}: {what} under {given.root}\n")
    return 0


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _leaf(name: str, dtype: str, shape: list[int], data: memoryview | bytes) -> bytes:
    """`provenance.hashing.leaf_hash` of header and bytes, without a second copy of the tensor."""
    header = jcs({"name": name, "dtype": dtype, "shape": shape})
    leaf = hashlib.sha256(LEAF_PREFIX + len(header).to_bytes(4, "big") + header)
    leaf.update(data)
    return leaf.digest()


if __name__ == "__main__":
    sys.exit(main())
