"""Chainpoint v2 receipts for users of ``merkletools``, made and checked so that they are sound.

``merkletools`` hashes inner nodes as ``SHA256(left || right)`` with no prefix. Its tree alone is
forgeable: the 64 bytes of an inner node pass as a record, the root is "a member of itself", and the
number of leaves is not committed. Two measures make its *format* usable:

* leaves are double hashes, ``SHA256(SHA256(0x00 || commitment))``: the preimage of a leaf has 32
  bytes and that of a node 64, so neither can be shown as the other (a 0x00 prefix alone does not
  help: every 256th node begins with that byte);
* our verifier takes index and size from a signed source and recomputes the shape of the proof. The
  signed statement is :attr:`ChainpointTree.binding`, which holds both size and root.

``merkletools`` itself still accepts a forged proof, so its answer is worth something only for
proofs that ours accepts too. The RFC 9162 tree stays the one that is trusted.

Source: Chainpoint v2 (chainpoint.org); merkletools 1.0.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from provenance.errors import FormatError, ProofShapeError, RootMismatchError
from provenance.hashing import HASH_SIZE, leaf_hash, sha256
from provenance.proofs import path_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONTEXT: Final = "https://w3id.org/chainpoint/v2"
TYPE: Final = "ChainpointSHA256v2"
TAG_BINDING: Final = b"dataworth/chainpoint/v1\n"

_FIELDS: Final = {"@context", "type", "targetHash", "merkleRoot", "proof", "anchors"}


@dataclass(frozen=True, slots=True)
class ChainpointTree:
    """The levels of an unprefixed Merkle tree over double-hashed leaves."""

    levels: tuple[tuple[bytes, ...], ...]
    """Leaves first, the root last; an odd node at the end of a level moves up as it is."""

    @property
    def size(self) -> int:
        """Number of leaves."""
        return len(self.levels[0])

    @property
    def root(self) -> bytes:
        """32 bytes, equal to the ``merkleRoot`` of ``merkletools``."""
        return self.levels[-1][0]

    @property
    def binding(self) -> bytes:
        """``SHA256(tag || size as 8 bytes || root)``: what has to be signed, size included."""
        return sha256(TAG_BINDING + self.size.to_bytes(8, "big") + self.root)


def chainpoint_leaf(commitment: bytes) -> bytes:
    """The leaf of a record, ``SHA256(SHA256(0x00 || commitment))``.

    Args:
        commitment: the record's commitment.

    Returns:
        32 bytes; a verifier compares them with ``targetHash``.
    """
    return sha256(leaf_hash(commitment))


def chainpoint_tree(commitments: Iterable[bytes]) -> ChainpointTree:
    """The tree over the records' commitments.

    Args:
        commitments: at least one, in the order of the record tree.

    Returns:
        The tree.

    Raises:
        FormatError: there is no commitment.
    """
    level = tuple(chainpoint_leaf(commitment) for commitment in commitments)
    if not level:
        raise FormatError("a Chainpoint tree has at least one leaf")
    levels = [level]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        odd = level[-1:] if len(level) % 2 else ()
        level = tuple(sha256(left + right) for left, right in pairs) + odd
        levels.append(level)
    return ChainpointTree(tuple(levels))


def to_chainpoint_v2(tree: ChainpointTree, index: int) -> dict[str, Any]:
    """The Chainpoint v2 receipt of one leaf.

    Args:
        tree: from :func:`chainpoint_tree`.
        index: 0 <= index < tree.size.

    Returns:
        ``@context, type, targetHash, merkleRoot, proof, anchors`` with hex digests.

    Raises:
        ProofShapeError: the index is out of range.
    """
    sides = iter(path_layout(index, tree.size))
    target, proof = tree.levels[0][index], []
    for level in tree.levels[:-1]:
        if index ^ 1 < len(level):
            proof.append({"left" if next(sides) else "right": level[index ^ 1].hex()})
        index >>= 1
    return {
        "@context": CONTEXT,
        "type": TYPE,
        "targetHash": target.hex(),
        "merkleRoot": tree.root.hex(),
        "proof": proof,
        "anchors": [],
    }


def verify_chainpoint_v2(proof: Mapping[str, Any], index: int, size: int, root: bytes) -> None:
    """Check a Chainpoint v2 receipt strictly: its shape must be that of (index, size).

    The caller computes ``chainpoint_leaf(commitment)`` and compares it with ``targetHash``.

    Args:
        proof: the whole receipt.
        index: 0 <= index < size, from a signed source.
        size: number of leaves, from a signed source.
        root: 32 bytes, from the same signed source.

    Raises:
        ProofShapeError: unknown fields, another type, or a shape that does not fit index and size.
        RootMismatchError: the receipt names or leads to another root.
    """
    if set(proof) != _FIELDS or (proof["@context"], proof["type"]) != (CONTEXT, TYPE):
        raise ProofShapeError(f"not a {TYPE} receipt with exactly {sorted(_FIELDS)}")
    layout, steps = path_layout(index, size), proof["proof"]
    if not isinstance(steps, list) or len(steps) != len(layout):
        raise ProofShapeError(f"leaf {index} of {size} has a proof of {len(layout)} steps")
    node = _digest(proof["targetHash"])
    for position, (left, step) in enumerate(zip(layout, steps, strict=True)):
        side = "left" if left else "right"
        if not isinstance(step, dict) or list(step) != [side]:
            raise ProofShapeError(f"step {position} of the proof must be on the {side}")
        sibling = _digest(step[side])
        node = sha256(sibling + node) if left else sha256(node + sibling)
    for claimed in (_digest(proof["merkleRoot"]), node):
        if claimed != root:
            raise RootMismatchError(root, claimed)


def _digest(text: Any) -> bytes:
    """Exactly 64 lower-case hex digits: one spelling, and no digest of another length."""
    try:
        data = bytes.fromhex(text)
    except (TypeError, ValueError):
        raise ProofShapeError("a digest is a string of hex digits") from None
    if len(data) != HASH_SIZE or data.hex() != text:
        raise ProofShapeError("a digest has exactly 64 lower-case hex digits")
    return data
