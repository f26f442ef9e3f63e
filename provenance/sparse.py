r"""Compact sparse Merkle tree: a proof that a fingerprint is *not* in the corpus.

The tree is a binary trie over the bits of 32-byte keys, most significant first, in which a subtree
with one key is that key's leaf and an empty subtree is 32 zero bytes::

    H({})    = 0^32                            keys 00.., 010.., 011..
    H({key}) = SHA256(0x02 || key)                     *            depth 0
    H(S)     = SHA256(0x03 || H(S_0) || H(S_1))       / \
                                                     *   0^32       depth 1   (nothing starts with 1)
    A key's place follows from the key alone,       / \
    so "absent" means: its place holds nothing,   00..  *           depth 2
    or another key's leaf.                            /   \
                                                  010..  011..      depth 3

Sound whoever built the root: on one path a node would have to be empty, a leaf and an inner node at
once, which is a collision of SHA-256. "Sorted leaves and two neighbours" has no such argument: there
the verifier must know that the whole list is sorted, which no owner can check.

Cost: linear in the number of keys (one hash per key and about 1.4 per branch), proofs of about
log2(n) + 1 hashes. When it is wrong: it proves the absence of a *key*; with keyed fingerprints the
holder of the key must open which fingerprint a text has, and a changed text has another one.

Source: Dahlberg, Pulls, Peeters, "Efficient sparse Merkle trees" (2016); the compact form after
Diem's Jellyfish Merkle tree (Gao, Hu, Wu 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from provenance.errors import FormatError, ProofShapeError, RootMismatchError, VerificationError
from provenance.hashing import HASH_SIZE, SPARSE_LEAF_PREFIX, SPARSE_NODE_PREFIX, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable

EMPTY: Final = bytes(HASH_SIZE)
"""Hash of an empty subtree. Nobody knows a preimage of it."""

KEY_BITS: Final = 8 * HASH_SIZE


@dataclass(frozen=True, slots=True)
class SparseProof:
    """What stands at a key's place, and the way from there to the root."""

    siblings: tuple[bytes, ...]
    """32-byte hashes, from the root's child down to the place."""
    terminal: bytes | None
    """The 32-byte key whose leaf stands there, or None where the place is empty."""


class SparseTree:
    """The tree over a set of keys, in memory (about 230 bytes a key)."""

    __slots__ = ("_branches", "_children", "_hashes", "_keys", "_top", "root")

    root: bytes
    """32 bytes; zero bytes for no keys."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        """Build the tree bottom-up over the sorted keys.

        Args:
            keys: 32-byte keys in any order; equal ones count once.

        Raises:
            FormatError: a key is not 32 bytes long.
        """
        self._keys = sorted(set(keys))
        for key in self._keys:
            _check_key(key)
        numbers = [int.from_bytes(key, "big") for key in self._keys]
        # Branch i parts keys[i] and keys[i + 1]; its depth is the length of their common prefix.
        self._branches = [
            KEY_BITS - (left ^ right).bit_length() for left, right in pairwise(numbers)
        ]
        self._children: list[tuple[int, int]] = [(0, 0)] * len(self._branches)
        self._hashes: list[tuple[bytes, bytes]] = [(EMPTY, EMPTY)] * len(self._branches)
        self._top = ~0
        self.root = self._build() if self._keys else EMPTY

    @property
    def size(self) -> int:
        """Number of different keys."""
        return len(self._keys)

    def prove(self, key: bytes) -> SparseProof:
        """The proof of what stands at a key's place, for :func:`verify_absence` or ``_presence``.

        Args:
            key: 32 bytes; present or not.

        Returns:
            The proof.

        Raises:
            FormatError: the key is not 32 bytes long.
        """
        _check_key(key)
        if not self._keys:
            return SparseProof((), None)
        siblings: list[bytes] = []
        node = self._top
        while node >= 0:
            depth, common = self._branches[node], _common_bits(key, self._keys[node])
            if common < depth:
                # The key leaves the common prefix of this subtree, into the empty side.
                siblings += [EMPTY] * (common - len(siblings))
                whole = _node(*self._hashes[node])
                siblings.append(_lift(whole, self._keys[node], depth, common + 1))
                return SparseProof(tuple(siblings), None)
            siblings += [EMPTY] * (depth - len(siblings))
            side = _bit(key, depth)
            siblings.append(self._hashes[node][1 - side])
            node = self._children[node][side]
        return SparseProof(tuple(siblings), self._keys[~node])

    def _build(self) -> bytes:
        """One pass with a stack of branches that wait for their right side.

        A node is a branch number >= 0, or ~i for the leaf of key i.
        """
        waiting: list[tuple[int, int, bytes]] = []  # branch, its left child, that child's hash
        node, digest = ~0, EMPTY
        for index, key in enumerate(self._keys):
            before = self._branches[index - 1] if index else -1
            after = self._branches[index] if index < len(self._branches) else -1
            node, digest = ~index, _leaf(key)
            depth = max(before, after) + 1
            # Invariant: `digest` is the hash of `node` seen from `depth`. Every waiting branch
            # that is deeper than the next one has its right side complete.
            while waiting and self._branches[waiting[-1][0]] > after:
                branch, left, left_digest = waiting.pop()
                right_digest = _lift(digest, key, depth, self._branches[branch] + 1)
                self._children[branch] = (left, node)
                self._hashes[branch] = (left_digest, right_digest)
                node, digest = branch, _node(left_digest, right_digest)
                depth = self._branches[branch]
            digest = _lift(digest, key, depth, after + 1)
            waiting.append((index, node, digest))
        self._top = node
        return digest


def verify_presence(root: bytes, key: bytes, proof: SparseProof) -> None:
    """Check that a key is in the set; return nothing, raise if it is not.

    Args:
        root: 32 bytes, from a signed source.
        key: 32 bytes.
        proof: from :meth:`SparseTree.prove`.

    Raises:
        ProofShapeError: a length is wrong.
        RootMismatchError: the proof leads to another root.
        VerificationError: the proof shows the key's absence.
    """
    _verify(root, key, proof)
    if proof.terminal != key:
        raise VerificationError("expected a proof of presence, got one of absence")


def verify_absence(root: bytes, key: bytes, proof: SparseProof) -> None:
    """Check that a key is not in the set; return nothing, raise if it may be.

    Args:
        root: 32 bytes, from a signed source.
        key: 32 bytes.
        proof: from :meth:`SparseTree.prove`.

    Raises:
        ProofShapeError: a length is wrong, or the leaf shown does not belong on the key's path.
        RootMismatchError: the proof leads to another root.
        VerificationError: the proof shows the key's presence.
    """
    _verify(root, key, proof)
    if proof.terminal == key:
        raise VerificationError("expected a proof of absence, got one of presence")


def _verify(root: bytes, key: bytes, proof: SparseProof) -> None:
    for name, value in (("root", root), ("key", key), ("terminal key", proof.terminal or key)):
        if len(value) != HASH_SIZE:
            raise ProofShapeError(f"{name} has {len(value)} bytes, expected {HASH_SIZE}")
    depth = len(proof.siblings)
    if depth > KEY_BITS or any(len(digest) != HASH_SIZE for digest in proof.siblings):
        raise ProofShapeError(f"expected at most {KEY_BITS} siblings of 32 bytes, got {depth}")
    if proof.terminal is None:
        node = EMPTY
    elif _common_bits(key, proof.terminal) < depth:
        raise ProofShapeError("the leaf shown does not stand on the path of the key")
    else:
        node = _leaf(proof.terminal)
    for level in reversed(range(depth)):
        sibling = proof.siblings[level]
        node = _node(sibling, node) if _bit(key, level) else _node(node, sibling)
    if node != root:
        raise RootMismatchError(root, node)


def _lift(digest: bytes, key: bytes, depth: int, target: int) -> bytes:
    """The hash of a lone subtree seen from a smaller depth, through branches with an empty side."""
    for level in range(depth - 1, target - 1, -1):
        digest = _node(EMPTY, digest) if _bit(key, level) else _node(digest, EMPTY)
    return digest


def _leaf(key: bytes) -> bytes:
    return sha256(SPARSE_LEAF_PREFIX + key)


def _node(left: bytes, right: bytes) -> bytes:
    return sha256(SPARSE_NODE_PREFIX + left + right)


def _bit(key: bytes, depth: int) -> int:
    return key[depth >> 3] >> (7 - (depth & 7)) & 1


def _common_bits(left: bytes, right: bytes) -> int:
    return KEY_BITS - (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).bit_length()


def _check_key(key: bytes) -> None:
    if len(key) != HASH_SIZE:
        raise FormatError(f"a key of the sparse tree has {HASH_SIZE} bytes, got {len(key)}")
