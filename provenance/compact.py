r"""Compact ranges: the few hashes that stand for any run of leaves, and how two runs become one.

The range ``[begin, end)`` of a tree is covered by the largest *perfect* subtrees that fit, at most
two per level; their hashes are all that a longer range or the root ever needs from it::

    [3, 10):   3 | 4..7 | 8 9        3 hashes stand for 7 leaves
                                     [3, 10) + [10, 16) = [3, 16):  3 | 4..7 | 8..15

So leaves can be streamed in logarithmic memory, and several processes can each hash their own part
of a corpus: the parts are merged in order, and the result is bit for bit that of one process. A
range that begins at 0 has a root; one that begins elsewhere has none, because what stands before it
decides how it is folded.

Cost: amortised one hash a leaf, ``O(log n)`` for a merge, ``64 log2(n)`` bytes.

Source: transparency-dev/merkle, docs/compact_ranges.md (Apache-2.0); RFC 9162, section 2.1.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provenance.errors import FormatError, ProofShapeError
from provenance.hashing import HASH_SIZE, MAX_SIZE, node_hash, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class CompactRange:
    """A run of leaves ``[begin, end)`` as the hashes of its maximal perfect subtrees."""

    __slots__ = ("_nodes", "begin", "end")

    begin: int
    """Index of the first leaf."""
    end: int
    """One behind the last leaf."""

    def __init__(self, begin: int = 0, leaf_hashes: Iterable[bytes] = ()) -> None:
        """Cover leaves that follow each other.

        Args:
            begin: index of the first one, 0 <= begin < 2^63.
            leaf_hashes: 32-byte leaf hashes in order.

        Raises:
            FormatError: ``begin`` is out of range or a leaf hash is not 32 bytes long.
        """
        if not 0 <= begin <= MAX_SIZE:
            raise FormatError(f"a range begins in 0 ... 2^63 - 1, got {begin}")
        self.begin = self.end = begin
        self._nodes: list[tuple[int, bytes]] = []  # level and hash, from left to right
        for digest in leaf_hashes:
            self.append(digest)

    @classmethod
    def of_hashes(cls, begin: int, end: int, hashes: Sequence[bytes]) -> CompactRange:
        """The range that another process sent as :attr:`hashes`.

        Args:
            begin: index of the first leaf.
            end: one behind the last leaf, begin <= end < 2^63.
            hashes: 32 bytes each, in the order of :attr:`hashes`.

        Returns:
            The range; whether its hashes are true shows when its root is compared.

        Raises:
            FormatError: a number or a length is out of range.
            ProofShapeError: the number of hashes does not fit ``begin`` and ``end``.
        """
        if not 0 <= begin <= end <= MAX_SIZE:
            raise FormatError(f"expected 0 <= begin <= end < 2^63, got [{begin}, {end})")
        levels = cover(begin, end)
        if len(levels) != len(hashes):
            raise ProofShapeError(
                f"[{begin}, {end}) is covered by {len(levels)} hashes, got {len(hashes)}"
            )
        for position, digest in enumerate(hashes):
            _check(digest, position)
        made = cls(begin)
        made.end, made._nodes = end, list(zip(levels, hashes, strict=True))
        return made

    @property
    def hashes(self) -> list[bytes]:
        """The hashes of the perfect subtrees, left to right: what one process sends to another."""
        return [digest for _, digest in self._nodes]

    def append(self, digest: bytes) -> None:
        """Add the next leaf.

        Args:
            digest: 32-byte leaf hash.

        Raises:
            FormatError: the leaf hash is not 32 bytes long.
        """
        _check(digest, self.end)
        self._push(0, digest)

    def merge(self, following: CompactRange) -> None:
        """Take over the range that begins where this one ends.

        Args:
            following: a range with ``begin == self.end``; it stays as it is.

        Raises:
            ProofShapeError: there is a gap or an overlap, or the parts are in the wrong order.
        """
        if following.begin != self.end:
            raise ProofShapeError(
                f"expected the range that begins at {self.end}, got one that begins at {following.begin}"
            )
        for level, digest in list(following._nodes):
            self._push(level, digest)

    def root(self) -> bytes:
        """The root of the tree of the leaves ``[0, end)``.

        Returns:
            32 bytes; SHA-256 of the empty string for no leaves.

        Raises:
            ProofShapeError: the range does not begin at 0, so it has no root of its own.
        """
        if self.begin:
            raise ProofShapeError(f"a root needs a range that begins at 0, got {self.begin}")
        if not self._nodes:
            return sha256(b"")
        *others, (_, root) = self._nodes
        for _, digest in reversed(others):
            root = node_hash(digest, root)
        return root

    def copy(self) -> CompactRange:
        """An independent range over the same leaves.

        Returns:
            The copy.
        """
        twin = CompactRange(self.begin)
        twin.end, twin._nodes = self.end, list(self._nodes)
        return twin

    def _push(self, level: int, digest: bytes) -> None:
        """Put a perfect subtree behind the last one, and close every pair that this completes."""
        start = self.end
        self.end += 1 << level
        # Invariant: `digest` is the node of `level` that begins at leaf `start`.
        while self._nodes and self._nodes[-1][0] == level and (start >> level) & 1:
            digest = node_hash(self._nodes.pop()[1], digest)
            start -= 1 << level
            level += 1
        self._nodes.append((level, digest))


def cover(begin: int, end: int) -> list[int]:
    """Levels of the maximal perfect subtrees that cover a run of leaves.

    Args:
        begin: first leaf, 0 <= begin.
        end: one behind the last leaf, begin <= end.

    Returns:
        The levels from left to right; they rise to a summit and fall again.
    """
    levels = []
    while begin < end:
        level = (end - begin).bit_length() - 1
        if begin:
            # A subtree of level k begins at a multiple of 2^k.
            level = min(level, (begin & -begin).bit_length() - 1)
        levels.append(level)
        begin += 1 << level
    return levels


def _check(digest: bytes, position: int) -> None:
    if len(digest) != HASH_SIZE:
        raise FormatError(f"hash {position} has {len(digest)} bytes, expected {HASH_SIZE}")
