r"""The crown of a sparse tree: its nodes at one depth, from which the root follows after a change of few keys.

A tree over n keys has about 2.4 n hashes, and a change of m keys alters m log2(n) of them. Whoever keeps the 2^d nodes of depth d (no keys, 32
bytes each) computes only the subtrees that hold a changed key, and what is above the crown::

             root                     above: 2^d - 1 hashes, all of them
            /    \
           *      *
          / \    / \
         c0 c1  c2 c3                 the crown, d = 2; only c2 has a changed key
                /\                    its subtree: computed from its keys

With d = log2(n) - 5 that is n / 32 + m * 32 * 2.4 hashes, and 100,000 keys have a crown of 64 KiB. A crown is believed only as far as it leads to a root that is
known: two crowns with one root under the same keys are a collision of SHA-256. How many keys a node holds is never stored but counted, because
a lone key's leaf stands for every subtree that holds nothing else.

When it is wrong to use: for a change of a large part of the keys build a :class:`~provenance.sparse.SparseTree`, which costs no more then.
"""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from typing import TYPE_CHECKING, Final

from provenance.errors import FormatError, RootMismatchError
from provenance.hashing import HASH_SIZE
from provenance.sparse import EMPTY, node_of, subtree_root

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_BITS: Final = 28


def crown_bits(size: int) -> int:
    """The depth at which a crown of so many keys lies.

    Args:
        size: number of different keys, 0 <= size.

    Returns:
        d with about 32 to 64 keys below a node of the crown.
    """
    return min(max(0, size.bit_length() - 6), MAX_BITS)


def changed_crown(
    crown: bytes,
    root: bytes,
    keys: Sequence[bytes],
    added: Sequence[bytes],
    removed: Sequence[bytes],
) -> tuple[bytes, bytes]:
    """The root and the crown over some keys, from the crown over almost the same.

    Args:
        crown: over the keys before the change, from ``SparseTree.crown`` or from here.
        root: 32 bytes, the root over these, from a source that is trusted.
        keys: 32-byte keys after the change, each once.
        added: those of ``keys`` that were not there before, each once.
        removed: those that were there and are not in ``keys``, each once.

    Returns:
        Root and crown over ``keys``, equal to those of ``SparseTree(keys)`` at this depth.

    Raises:
        FormatError: a key is not 32 bytes long, or the crown has no length that a crown can have.
        RootMismatchError: the crown does not lead to the root, or the change is not the one that was made.
    """
    num_nodes = len(crown) // HASH_SIZE
    bits = num_nodes.bit_length() - 1
    if len(crown) != HASH_SIZE << max(bits, 0) or bits > MAX_BITS:
        raise FormatError(f"a crown has 32 bytes for each of 2^d nodes, got {len(crown)} bytes")
    nodes = [crown[at : at + HASH_SIZE] for at in range(0, len(crown), HASH_SIZE)]
    slots = _slots(keys, bits)
    counts, before = [0] * num_nodes, [0] * num_nodes
    for slot, count in Counter(slots).items():
        counts[slot] = before[slot] = count
    news, olds = _slots(added, bits), _slots(removed, bits)
    for slot in news:
        before[slot] -= 1
    for slot in olds:
        before[slot] += 1
    if (found := _folded(nodes, before)) != root:
        raise RootMismatchError(root, found)
    held: dict[int, list[bytes]] = {slot: [] for slot in (*news, *olds)}
    for slot, key in zip(slots, keys, strict=True):
        if slot in held:
            held[slot].append(key)
    for slot, some in held.items():
        nodes[slot] = subtree_root(sorted(some), bits)
    return _folded(nodes, counts), b"".join(nodes)


def _slots(keys: Sequence[bytes], bits: int) -> list[int]:
    """The node of the crown that each key lies below: its first bits."""
    if set(map(len, keys)) - {HASH_SIZE}:
        raise FormatError(f"a key of the sparse tree has {HASH_SIZE} bytes")
    heads = array("Q", b"".join(keys))[::4]
    if sys.byteorder == "little":
        heads.byteswap()
    drop = 64 - bits
    return [head >> drop for head in heads]


def _folded(nodes: list[bytes], counts: list[int]) -> bytes:
    """The root over a crown; a lone key rises as it is, and a node without keys is empty."""
    if any(not count and node != EMPTY for node, count in zip(nodes, counts, strict=True)):
        return b""  # no tree has it
    while len(nodes) > 1:
        pairs = range(0, len(nodes), 2)
        nodes = [
            node_of(nodes[at], nodes[at + 1])
            if counts[at] + counts[at + 1] > 1
            else nodes[at if counts[at] else at + 1]
            for at in pairs
        ]
        counts = [counts[at] + counts[at + 1] for at in pairs]
    return nodes[0]
