r"""RFC 9162 Merkle trees: one root for n leaves, proofs of log2(n) hashes, every earlier size kept.

With ``k`` the largest power of two below ``n``::

    MTH({})     = SHA256("")                            root of 5 leaves:
    MTH({d})    = SHA256(0x00 || d)
    MTH(D[0:n]) = SHA256(0x01 || MTH(D[0:k]) || MTH(D[k:n]))          *
                                                                   /     \
    Only *perfect* subtrees are stored, level by level:           *       4
    level 0 = all leaf hashes, level 1 = all full pairs, ...    /   \
    The ragged right edge of any size is folded from them      *     *
    when it is asked for, so appending never rewrites         0 1   2 3
    a node, and the root of every earlier size is still there.

A *subtree* ``[start, end)`` with ``start`` a multiple of the next power of two is a node of the
tree: that is what a shard is. How proofs are checked stands in ``proofs``.

Cost: 0.8 to 1.2 million leaves a second and core, 64 bytes of memory per leaf, 16 microseconds a proof.

Source: RFC 9162, sections 2.1.1 - 2.1.5; subtrees after draft-ietf-plants-merkle-tree-certs.
"""

from __future__ import annotations

import hashlib
from itertools import islice, pairwise
from struct import unpack
from typing import TYPE_CHECKING, Final

from provenance.errors import FormatError, ProofShapeError
from provenance.hashing import HASH_SIZE, LEAF_PREFIX, NODE_PREFIX, node_hash, sha256
from provenance.proofs import check_index, check_subtree, split_point

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_CHUNK: Final = 1 << 12
"""Leaves hashed at a time, with all nodes above them, so that their hashes are still in the cache."""

_PAIR: Final = 2 * HASH_SIZE


class MerkleTree:
    """An RFC 9162 tree over leaf hashes, in memory; made for appending."""

    __slots__ = ("_levels",)

    def __init__(self, leaf_hashes: Iterable[bytes] = ()) -> None:
        """Build the tree.

        Args:
            leaf_hashes: 32-byte *leaf hashes* in order (not leaf data: see :meth:`from_data`).

        Raises:
            FormatError: a leaf hash is not 32 bytes long.
        """
        self._levels, rest = [bytearray()], iter(leaf_hashes)
        while chunk := list(islice(rest, _CHUNK)):
            for position, digest in enumerate(chunk, self.size):
                if len(digest) != HASH_SIZE:
                    raise FormatError(f"leaf hash {position} has {len(digest)} bytes, expected 32")
            self._levels[0] += b"".join(chunk)
            self._grow()

    @classmethod
    def from_data(cls, leaves: Iterable[bytes]) -> MerkleTree:
        """Build the tree over leaf *data*.

        Args:
            leaves: leaf data in order.

        Returns:
            The tree over their leaf hashes.
        """
        tree = cls()
        tree.extend(leaves)
        return tree

    @classmethod
    def over(cls, levels: list[bytearray]) -> MerkleTree:
        """An empty tree whose hashes go where the caller wants them, into shared memory for instance.

        Args:
            levels: empty, one per level that the tree will have; each takes ``+=``, ``len`` and slices.

        Returns:
            The tree.
        """
        tree = cls()
        tree._levels = levels
        return tree

    @classmethod
    def joined(cls, parts: Iterable[MerkleTree]) -> MerkleTree:
        """One tree from trees over consecutive runs of leaves, built by several processes.

        Args:
            parts: trees in order. Where the size of each but the last is a multiple of the same power
                of two (``2^16``, say), no node below it is hashed again.

        Returns:
            The tree over all leaves, equal to the one that a single process builds.
        """
        tree = cls()
        for part in parts:
            tree.adopt(part._levels)  # noqa: SLF001 - our own class
        return tree

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Append many leaves.

        Args:
            leaves: leaf *data* in order, as for :meth:`from_data`.
        """
        rest = iter(leaves)
        while chunk := list(islice(rest, _CHUNK)):
            self._levels[0] += _hash_all(LEAF_PREFIX, chunk)
            self._grow()

    def adopt(self, levels: Sequence[bytes | bytearray | memoryview]) -> None:
        """Append leaves together with the hashes of the perfect subtrees above them.

        Args:
            levels: as :meth:`level` gives them for a tree over the new leaves alone, level 0 first; what
                they say is believed, only their lengths are checked.

        Raises:
            FormatError: a level has not the length that follows from the number of leaves.
        """
        count = len(levels[0]) // HASH_SIZE if levels else 0
        for number, level in enumerate(levels):
            if len(level) != (count >> number) * HASH_SIZE:
                raise FormatError(
                    f"level {number} over {count} leaves has {(count >> number) * HASH_SIZE} bytes, got {len(level)}"
                )
        # A node of ours is one of theirs as far up as the new leaves begin at a multiple of its width.
        shared = (self.size & -self.size).bit_length() if self.size else len(levels)
        for number, level in enumerate(levels[:shared]):
            if number == len(self._levels):
                self._levels.append(bytearray())
            self._levels[number] += level
        self._grow()

    @property
    def size(self) -> int:
        """Number of leaves."""
        return len(self._levels[0]) // HASH_SIZE

    def append(self, digest: bytes) -> int:
        """Add one leaf hash at the end, in amortised constant time.

        Args:
            digest: 32 bytes.

        Returns:
            The index of the new leaf.

        Raises:
            FormatError: the leaf hash is not 32 bytes long.
        """
        if len(digest) != HASH_SIZE:
            raise FormatError(f"leaf hash has {len(digest)} bytes, expected 32")
        index = self.size
        node, level = digest, 0
        self._levels[0] += digest
        # Invariant: `node` is the last node of `level`; it closes a pair when its number is odd.
        while (index >> level) & 1:
            node = node_hash(self._node(level, (index >> level) - 1), node)
            level += 1
            if level == len(self._levels):
                self._levels.append(bytearray())
            self._levels[level] += node
        return index

    def replace(self, changes: Mapping[int, bytes]) -> None:
        """Put other hashes in the place of some leaves; costs log2(n) hashes a leaf, not a new tree.

        This is what tombstones do to a tree of records. A log's tree is only ever appended to.

        Args:
            changes: index → 32-byte leaf hash, all indices below the size.

        Raises:
            FormatError: a leaf hash is not 32 bytes long; nothing was changed.
            ProofShapeError: an index is out of range; nothing was changed.
        """
        for index, digest in changes.items():
            check_index(index, self.size)
            if len(digest) != HASH_SIZE:
                raise FormatError(f"leaf hash {index} has {len(digest)} bytes, expected 32")
        for index, digest in changes.items():
            self._levels[0][index * HASH_SIZE : (index + 1) * HASH_SIZE] = digest
        touched = set(changes)
        for below, level in pairwise(self._levels):
            # A last node without a partner has no parent among the perfect subtrees.
            touched = {index >> 1 for index in touched if index >> 1 < len(level) // HASH_SIZE}
            for index in touched:
                both = bytes(below[index * _PAIR : (index + 1) * _PAIR])
                level[index * HASH_SIZE : (index + 1) * HASH_SIZE] = sha256(NODE_PREFIX + both)

    def copy(self) -> MerkleTree:
        """An independent tree with the same leaves.

        Returns:
            The copy; appending to it leaves this tree as it is.
        """
        twin = MerkleTree()
        twin._levels = [bytearray(level) for level in self._levels]
        return twin

    def level(self, level: int) -> bytes:
        """The hashes of all perfect subtrees of ``2^level`` leaves.

        Args:
            level: 0 <= level; 0 are the leaf hashes.

        Returns:
            32 bytes each, in order; empty above the top.
        """
        return bytes(self._levels[level]) if 0 <= level < len(self._levels) else b""

    def leaf(self, index: int) -> bytes:
        """The leaf hash at an index.

        Args:
            index: 0 <= index < size.

        Returns:
            32 bytes.

        Raises:
            ProofShapeError: the index is out of range.
        """
        check_index(index, self.size)
        return self._node(0, index)

    def root(self, size: int | None = None) -> bytes:
        """The root of the first ``size`` leaves.

        Args:
            size: 0 <= size <= self.size; all leaves if None.

        Returns:
            32 bytes; SHA-256 of the empty string for size 0.

        Raises:
            ProofShapeError: the size is out of range.
        """
        size = self._checked(size)
        return self._range_root(0, size) if size else sha256(b"")

    def subtree_root(self, first: int, count: int) -> bytes:
        """The root over leaves ``[first, first + count)``, a node of the tree: a shard's root.

        Args:
            first: a multiple of the smallest power of two that is not below ``count``.
            count: 1 <= count; a power of two, except at the end of the tree.

        Returns:
            32 bytes.

        Raises:
            ProofShapeError: the range is not an aligned subtree of this tree.
        """
        end = first + count
        check_subtree(first, end, self.size)
        if count & (count - 1) and end != self.size:
            raise ProofShapeError(f"a subtree of {count} leaves (no power of two) must be the last")
        return self._range_root(first, end)

    def inclusion_path(self, index: int, size: int | None = None) -> list[bytes]:
        """The audit path of one leaf in the tree of the first ``size`` leaves.

        Args:
            index: 0 <= index < size.
            size: 0 < size <= self.size; all leaves if None.

        Returns:
            Hashes from the leaf's sibling up to a child of the root.

        Raises:
            ProofShapeError: index or size is out of range.

        Source: RFC 9162, section 2.1.3.1.
        """
        size = self._checked(size)
        check_index(index, size)
        # Below the level where the ways to `index` and to the last leaf part, every level has a sibling,
        # perfect but for the topmost on the right; above it those on the left of the right edge.
        inner = (index ^ (size - 1)).bit_length()
        path = []
        for level in range(inner):
            place = (index >> level) ^ 1
            perfect = (place + 1) << level <= size
            path.append(
                self._node(level, place) if perfect else self._range_root(place << level, size)
            )
        for level in range(inner, size.bit_length()):
            if (index >> level) & 1:
                path.append(self._node(level, (index >> level) - 1))  # noqa: PERF401 - a loop like the one above
        return path

    def consistency_path(self, old: int, new: int | None = None) -> list[bytes]:
        """The proof that the tree of ``new`` leaves begins with the tree of ``old`` leaves.

        Args:
            old: 0 < old <= new.
            new: old <= new <= self.size; all leaves if None.

        Returns:
            Hashes in the order of RFC 9162.

        Raises:
            ProofShapeError: a size is out of range.

        Source: RFC 9162, section 2.1.4.1.
        """
        return self.subtree_consistency_path(0, old, new)

    def subtree_consistency_path(
        self, start: int, end: int, size: int | None = None
    ) -> list[bytes]:
        """The proof that the subtree ``[start, end)`` is part of the tree of ``size`` leaves.

        Args:
            start: a multiple of the smallest power of two that is not below ``end - start``.
            end: start < end <= size.
            size: end <= size <= self.size; all leaves if None.

        Returns:
            Hashes; for ``start == 0`` the consistency path of RFC 9162.

        Raises:
            ProofShapeError: the range is not an aligned subtree.

        Source: draft-ietf-plants-merkle-tree-certs, section 4.4.1.
        """
        size = self._checked(size)
        check_subtree(start, end, size)
        low, high, known, path = 0, size, True, []
        # Invariant: [low, high) contains [start, end); `known` is whether the verifier holds the
        # hash of [start, end) itself, which is so until the range is cut at a middle.
        while (start, end) != (low, high):
            middle = low + split_point(high - low)
            if end <= middle:
                path.append(self._range_root(middle, high))
                high = middle
            else:
                path.append(self._range_root(low, middle))
                low = middle
                known = known and middle <= start
                start = max(start, middle)
        if not known:
            path.append(self._range_root(low, high))
        return path[::-1]

    def _grow(self) -> None:
        """Hash the nodes that are still missing above the leaves."""
        for number, level in enumerate(self._levels):  # the list grows meanwhile, up to the top
            pairs = len(level) // _PAIR
            if pairs and number + 1 == len(self._levels):
                self._levels.append(bytearray())
            done = len(self._levels[number + 1]) // HASH_SIZE if pairs else 0
            for first in range(done, pairs, _CHUNK):
                # A pair of children is one slice of 64 bytes: no Python object per child.
                some = bytes(level[first * _PAIR : min(first + _CHUNK, pairs) * _PAIR])
                children = unpack("64s" * (len(some) // _PAIR), some)
                self._levels[number + 1] += _hash_all(NODE_PREFIX, children)

    def _checked(self, size: int | None) -> int:
        if size is None:
            return self.size
        if not 0 <= size <= self.size:
            raise ProofShapeError(f"size must be in 0 ... {self.size}, got {size}")
        return size

    def _node(self, level: int, position: int) -> bytes:
        at = position * HASH_SIZE
        return bytes(self._levels[level][at : at + HASH_SIZE])

    def _range_root(self, begin: int, end: int) -> bytes:
        """MTH(D[begin:end]); begin is a multiple of the next power of two >= end - begin >= 1."""
        # Folding the perfect parts from the right is the recursion of the RFC without recursion.
        parts = []
        while begin < end:
            level = (end - begin).bit_length() - 1
            parts.append(self._node(level, begin >> level))
            begin += 1 << level
        root = parts.pop()
        while parts:
            root = node_hash(parts.pop(), root)
        return root


def _hash_all(prefix: bytes, parts: Sequence[bytes]) -> bytes:
    """``SHA256(prefix || part)`` of each part, joined.

    A copy of a state that has taken in the prefix is cheaper than a new state and a concatenation.
    The condition is there to call ``update``, which returns None: a loop of statements takes longer.
    """
    started = hashlib.sha256(prefix).copy
    return b"".join(
        [
            state.digest()
            for part in parts
            if not (state := started()).update(part)  # type: ignore[func-returns-value]
        ]
    )


def root_of(leaf_hashes: Iterable[bytes]) -> bytes:
    """The root over leaf hashes, in one pass and logarithmic memory (a compact range).

    Args:
        leaf_hashes: 32-byte leaf hashes in order.

    Returns:
        32 bytes, equal to ``MerkleTree(leaf_hashes).root()``.

    Raises:
        FormatError: a leaf hash is not 32 bytes long.
    """
    peaks: list[bytes] = []
    for index, digest in enumerate(leaf_hashes):
        if len(digest) != HASH_SIZE:
            raise FormatError(f"leaf hash {index} has {len(digest)} bytes, expected 32")
        # Binary addition with carry: one peak per bit that is set in the size, largest first.
        node, bits = digest, index
        while bits & 1:
            node = node_hash(peaks.pop(), node)
            bits >>= 1
        peaks.append(node)
    if not peaks:
        return sha256(b"")
    root = peaks.pop()
    while peaks:
        root = node_hash(peaks.pop(), root)
    return root
