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

Cost: linear in the number of keys (one hash per key and about 1.4 per branch), log2(n) hashes to
change one key, proofs of about log2(n) + 1 hashes. When it is wrong: it proves the absence of a *key*; with keyed fingerprints the
holder of the key must open which fingerprint a text has, and a changed text has another one.

Source: Dahlberg, Pulls, Peeters, "Efficient sparse Merkle trees" (2016); the compact form after
Diem's Jellyfish Merkle tree (Gao, Hu, Wu 2021).
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from provenance.errors import FormatError, ProofShapeError, RootMismatchError, VerificationError
from provenance.hashing import HASH_SIZE, SPARSE_LEAF_PREFIX, sha256

if TYPE_CHECKING:
    from collections.abc import Iterable

EMPTY: Final = bytes(HASH_SIZE)
"""Hash of an empty subtree. Nobody knows a preimage of it."""

KEY_BITS: Final = 8 * HASH_SIZE

_LONE: Final = HASH_SIZE + 1
_MAX_SLOT_BITS: Final = 28
_RISING: Final = frozenset({0, _LONE})
_PLAIN: Final = frozenset({0, _LONE, 2 * HASH_SIZE})
_sha256: Final = hashlib.sha256


@dataclass(frozen=True, slots=True)
class SparseProof:
    """What stands at a key's place, and the way from there to the root."""

    siblings: tuple[bytes, ...]
    """32-byte hashes, from the root's child down to the place."""
    terminal: bytes | None
    """The 32-byte key whose leaf stands there, or None where the place is empty."""


class SparseTree:
    """The tree over a set of keys, in memory (about 300 bytes a key)."""

    __slots__ = ("_bits", "_levels", "_shared", "size")

    size: int
    """Number of different keys."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        """Build the tree bottom-up: keys fall into slots by their first bits, slots become levels.

        Args:
            keys: 32-byte keys in any order; equal ones count once.

        Raises:
            FormatError: a key is not 32 bytes long.
        """
        given = list(keys)
        for length in set(map(len, given)):
            _check_key(bytes(length))
        # About two slots a key: most hold one key or none, so few branches lie inside a slot. The
        # keys are never sorted as a whole, which would cost more than all hashes together.
        self._bits = min(len(given).bit_length() + 1, _MAX_SLOT_BITS)
        # The keys of slots with more than one, sorted and joined: a list apiece would keep the garbage
        # collector busy for half a second in a million.
        self._shared: dict[int, bytes] = {}
        level = [b""] * (1 << self._bits)
        heads = array("Q", b"".join(given))[::4]  # the first 8 bytes of each key, as one number
        if sys.byteorder == "little":
            heads.byteswap()
        drop, slots, later = 64 - self._bits, list[int](), list[bytes]()
        for key, head in zip(given, heads, strict=True):
            slot = head >> drop
            if level[slot]:
                slots.append(slot)
                later.append(key)
            else:
                level[slot] = b"\x02" + key
        self.size = len(given) - len(later)
        del given, heads
        self._share(level, slots, later)
        self._levels = [level]
        while len(level) > 1:
            lefts, digest = iter(level), _sha256
            # By the length of both together: 0 and 33 are no key and a lone one, which rises as it is;
            # 64 are two inner nodes. The rest has one key or nothing on a side.
            level = [
                (both if size in _RISING else digest(b"\x03" + both).digest())
                if (size := len(both := left + right)) in _PLAIN
                else _join(left, right)
                for left, right in zip(lefts, lefts, strict=True)
            ]
            self._levels.append(level)

    @property
    def root(self) -> bytes:
        """32 bytes; zero bytes for no keys."""
        return _digest(self._levels[-1][0])

    def crown(self, bits: int) -> bytes:
        """The nodes at one depth, for ``provenance.crown``.

        Args:
            bits: the depth, 0 <= bits <= log2 of the number of keys.

        Returns:
            32 bytes for each of ``2^bits`` nodes.

        Raises:
            FormatError: so deep the tree keeps no nodes.
        """
        if not 0 <= bits <= self._bits:
            raise FormatError(f"expected a depth in 0 ... {self._bits}, got {bits}")
        return b"".join(map(_digest, self._levels[self._bits - bits]))

    def update(self, add: Iterable[bytes] = (), remove: Iterable[bytes] = ()) -> None:
        """Add and remove keys; costs about log2(n) hashes a key, not a new tree.

        Args:
            add: 32-byte keys; those that are there already count once.
            remove: 32-byte keys; those that are not there are ignored.

        Raises:
            FormatError: a key is not 32 bytes long, or is to be added and removed; the tree is as
                it was.
        """
        added, removed = set(add), set(remove)
        for key in added | removed:
            _check_key(key)
        if added & removed:
            raise FormatError(
                "a key is to be added and removed: its place would depend on the order"
            )
        touched = set()
        for slot, mine in self._by_slot(added | removed).items():
            before = self._held(slot)
            after = sorted((set(before) | (mine & added)) - removed)
            if after == before:
                continue
            self.size += len(after) - len(before)
            touched.add(slot)
            self._shared.pop(slot, None)
            if len(after) > 1:
                self._shared[slot] = b"".join(after)
                self._levels[0][slot] = subtree_root(after, self._bits)
            else:
                self._levels[0][slot] = b"".join((SPARSE_LEAF_PREFIX, *after)) if after else b""
        for below, above in pairwise(self._levels):
            touched = {slot >> 1 for slot in touched}
            for slot in touched:
                above[slot] = _join(below[2 * slot], below[2 * slot + 1])

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
        slot = self._slot(key)
        siblings: list[bytes] = []
        for depth in range(self._bits + 1):
            level = self._levels[self._bits - depth]
            place = slot >> (self._bits - depth)
            if depth:
                siblings.append(_digest(level[place ^ 1]))
            value = level[place]
            if len(value) != HASH_SIZE:  # nothing, or a lone key
                return SparseProof(tuple(siblings), value[1:] or None)
        # Several keys share the slot: the way goes on below it.
        held = self._held(slot)
        while len(held) > 1:
            depth = len(siblings)
            middle = bisect_left(held, 1, key=lambda other: _bit(other, depth))
            sides = held[:middle], held[middle:]
            side = _bit(key, depth)
            siblings.append(subtree_root(sides[1 - side], depth + 1))
            held = sides[side]
        return SparseProof(tuple(siblings), held[0] if held else None)

    def _share(self, level: list[bytes], slots: list[int], later: list[bytes]) -> None:
        """Put keys into slots that hold one already; a key that was given twice counts once."""
        pairs: dict[int, bytes] = {}
        crowds: dict[int, bytearray] = {}  # a set apiece would wake the garbage collector
        for slot, key in zip(slots, later, strict=True):
            if slot in crowds:
                crowds[slot] += key
            elif slot in pairs:
                crowds[slot] = bytearray(level[slot][1:] + pairs.pop(slot) + key)
            elif level[slot][1:] != key:
                pairs[slot] = key
        depth, shared = self._bits, self._shared
        for slot, key in pairs.items():
            other = level[slot][1:]
            if other < key:
                shared[slot], level[slot] = other + key, _pair(other, key, depth)
            else:
                shared[slot], level[slot] = key + other, _pair(key, other, depth)
        self.size += len(pairs)
        for slot, crowd in crowds.items():
            places = range(0, len(crowd), HASH_SIZE)
            held = sorted({bytes(crowd[at : at + HASH_SIZE]) for at in places})
            self.size += len(held) - 1  # two at least: a key given again never made a pair
            shared[slot], level[slot] = b"".join(held), subtree_root(held, depth)

    def _slot(self, key: bytes) -> int:
        return int.from_bytes(key[:8], "big") >> (64 - self._bits)

    def _held(self, slot: int) -> list[bytes]:
        """The keys of a slot, sorted."""
        joined = self._shared.get(slot)
        if joined is None:
            lone = self._levels[0][slot][1:]
            return [lone] if lone else []
        return [joined[at : at + HASH_SIZE] for at in range(0, len(joined), HASH_SIZE)]

    def _by_slot(self, keys: set[bytes]) -> dict[int, set[bytes]]:
        found: dict[int, set[bytes]] = {}
        for key in keys:
            found.setdefault(self._slot(key), set()).add(key)
        return found


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
        node = node_of(sibling, node) if _bit(key, level) else node_of(node, sibling)
    if node != root:
        raise RootMismatchError(root, node)


# While a tree is built a node is written as b"" (no key below), 0x02 || key (a lone key: its hash is
# that of its leaf wherever it stands, and most leaves rise through several levels first), or 32 bytes.


def _join(left: bytes, right: bytes) -> bytes:
    if left and right:
        if len(left) == _LONE:
            left = _sha256(left).digest()
        if len(right) == _LONE:
            right = _sha256(right).digest()
        return _sha256(b"\x03" + left + right).digest()
    if left:
        return left if len(left) == _LONE else _sha256(b"\x03" + left + EMPTY).digest()
    if right:
        return right if len(right) == _LONE else _sha256(b"\x03" + EMPTY + right).digest()
    return b""


def _digest(value: bytes) -> bytes:
    """The hash of a node in the written form."""
    if not value:
        return EMPTY
    return sha256(value) if len(value) == _LONE else value


def subtree_root(keys: list[bytes], depth: int) -> bytes:
    """The hash of a subtree.

    Args:
        keys: different 32-byte keys, sorted, that share their first ``depth`` bits.
        depth: where the subtree hangs, 0 for the whole tree.

    Returns:
        32 bytes; zero bytes for no keys.
    """
    if not keys:
        return EMPTY
    if len(keys) == 1:
        return _leaf(keys[0])
    if len(keys) == 2:
        return _pair(keys[0], keys[1], depth)
    first = keys[0]
    fork = _common_bits(first, keys[-1])
    middle = bisect_left(keys, 1, key=lambda key: _bit(key, fork))
    digest = node_of(subtree_root(keys[:middle], fork + 1), subtree_root(keys[middle:], fork + 1))
    return _rise(digest, first, fork, depth)


def _pair(low: bytes, high: bytes, depth: int) -> bytes:
    """The hash of the subtree over two keys, low < high, that share their first ``depth`` bits."""
    digest = _sha256
    both = digest(b"\x02" + low).digest() + digest(b"\x02" + high).digest()
    fork = KEY_BITS - (int.from_bytes(low, "big") ^ int.from_bytes(high, "big")).bit_length()
    node = digest(b"\x03" + both).digest()
    return node if fork == depth else _rise(node, low, fork, depth)


def _rise(digest: bytes, key: bytes, fork: int, depth: int) -> bytes:
    """From a fork up to ``depth`` the keys below it go one way, past empty subtrees."""
    for level in range(fork - 1, depth - 1, -1):
        digest = node_of(EMPTY, digest) if _bit(key, level) else node_of(digest, EMPTY)
    return digest


def _leaf(key: bytes) -> bytes:
    return _sha256(b"\x02" + key).digest()


def node_of(left: bytes, right: bytes) -> bytes:
    """The hash of an inner node.

    Args:
        left: 32 bytes.
        right: 32 bytes.

    Returns:
        32 bytes.
    """
    return _sha256(b"\x03" + left + right).digest()


def _bit(key: bytes, depth: int) -> int:
    return key[depth >> 3] >> (7 - (depth & 7)) & 1


def _common_bits(left: bytes, right: bytes) -> int:
    return KEY_BITS - (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).bit_length()


def _check_key(key: bytes) -> None:
    if len(key) != HASH_SIZE:
        raise FormatError(f"a key of the sparse tree has {HASH_SIZE} bytes, got {len(key)}")
