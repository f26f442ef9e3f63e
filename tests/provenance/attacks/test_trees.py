r"""Forgeries that other Merkle implementations accept, performed; ours must refuse each one.

The drawing of the second preimage, root = H(N0 || N1), N0 = H(L0 || L1)::

        root                    root
       /    \                  /    \
     N0      N1      shown   N0      N1      as a tree of two records, L0 || L1 and L2 || L3
    /  \    /  \       as     |       |
   L0  L1  L2  L3           L0||L1  L2||L3
"""

from __future__ import annotations

from hashlib import sha256

import pytest

from provenance import (
    MerkleTree,
    ProofShapeError,
    RootMismatchError,
    SparseTree,
    VerificationError,
    leaf_hash,
    root_of,
    verify_absence,
    verify_consistency,
    verify_inclusion,
    verify_presence,
)

DATA = [b"record %d" % i for i in range(8)]


def naive_root(leaves: list[bytes]) -> bytes:
    """A tree as textbooks draw it, without prefixes: what the attacks work on."""
    level = [sha256(leaf).digest() for leaf in leaves]
    while len(level) > 1:
        level = [sha256(b"".join(level[at : at + 2])).digest() for at in range(0, len(level), 2)]
    return level[0]


def test_attack_second_preimage():
    """Four records and two "records" made of their hashes: one root without prefixes, two with."""
    hashes = [sha256(leaf).digest() for leaf in DATA[:4]]
    forged = [hashes[0] + hashes[1], hashes[2] + hashes[3]]
    assert naive_root(forged) == naive_root(DATA[:4])
    prefixed = [leaf_hash(leaf) for leaf in DATA[:4]]
    attempts = [forged, [b"".join(prefixed[:2]), b"".join(prefixed[2:])]]
    attempts.append([b"\x01" + b"".join(prefixed[:2]), b"\x01" + b"".join(prefixed[2:])])
    for attempt in attempts:
        assert MerkleTree.from_data(attempt).root() != MerkleTree.from_data(DATA[:4]).root()


def test_attack_inner_node_shown_as_a_leaf():
    """The path of an inner node is real but too short for any (index, size) that is signed."""
    tree = MerkleTree.from_data(DATA)
    node = tree.subtree_root(0, 2)
    path = tree.inclusion_path(0)[1:]
    for index in range(8):
        with pytest.raises(ProofShapeError):
            verify_inclusion(node, index, 8, path, tree.root())
    with pytest.raises(RootMismatchError):
        verify_inclusion(leaf_hash(tree.leaf(0) + tree.leaf(1)), 0, 4, path, tree.root())


def test_attack_root_as_member_of_itself():
    """An empty path proves membership in a tree of one leaf only."""
    tree = MerkleTree.from_data(DATA)
    for index in range(8):
        with pytest.raises(ProofShapeError):
            verify_inclusion(tree.root(), index, 8, [], tree.root())
    verify_inclusion(leaf_hash(b"x"), 0, 1, [], leaf_hash(b"x"))


def test_attack_wrong_size_is_why_the_size_must_be_signed():
    """The path for (i=1, n=2) is valid for (i=2, n=3): only a signed size tells them apart."""
    tree = MerkleTree.from_data(DATA[:2])
    path = tree.inclusion_path(1)
    verify_inclusion(tree.leaf(1), 1, 2, path, tree.root())
    verify_inclusion(tree.leaf(1), 2, 3, path, tree.root())
    # With the signed size 2, index 2 does not exist; with every other pair it fails as well.
    for index, size in ((2, 2), (0, 2), (1, 3), (0, 3), (1, 4), (0, 1)):
        with pytest.raises(VerificationError):
            verify_inclusion(tree.leaf(1), index, size, path, tree.root())


@pytest.mark.parametrize("size", range(1, 9))
def test_attack_every_flipped_bit_of_every_inclusion_proof(size):
    """Each bit of leaf hash, path and root, for every size up to 8 and every index."""
    tree = MerkleTree.from_data(DATA[:size])
    for index in range(size):
        path = tree.inclusion_path(index)
        parts = [tree.leaf(index), tree.root(), *path]
        for number, part in enumerate(parts):
            for bit in range(256):
                forged = [*parts[:number], flip(part, bit), *parts[number + 1 :]]
                with pytest.raises(RootMismatchError):
                    verify_inclusion(forged[0], index, size, forged[2:], forged[1])


@pytest.mark.parametrize("old", range(1, 9))
def test_attack_every_flipped_bit_of_every_consistency_proof(old):
    """Each bit of both roots and of the path, for every pair of sizes up to 8."""
    tree = MerkleTree.from_data(DATA)
    for new in range(old, 9):
        parts = [tree.root(old), tree.root(new), *tree.consistency_path(old, new)]
        for number, part in enumerate(parts):
            for bit in range(0, 256, 5):
                forged = [*parts[:number], flip(part, bit), *parts[number + 1 :]]
                with pytest.raises(VerificationError):
                    verify_consistency(old, new, forged[0], forged[1], forged[2:])


def test_attack_garbage_around_a_proof():
    """Longer, shorter, reordered or padded paths are refused, not cut to fit."""
    tree = MerkleTree.from_data(DATA)
    leaf, root, path = tree.leaf(5), tree.root(), tree.inclusion_path(5)
    for forged in (
        [*path, b""],
        [b"", *path],
        [*path, root],
        path[:-1],
        [*path[:-1], path[-1][:-1]],
    ):
        with pytest.raises(ProofShapeError):
            verify_inclusion(leaf, 5, 8, forged, root)
    with pytest.raises(RootMismatchError):
        verify_inclusion(leaf, 5, 8, path[::-1], root)
    # A hash cut elsewhere (31 + 33 bytes) has the same concatenation and must still be refused.
    shifted = [path[0] + path[1][:1], path[1][1:], path[2]]
    with pytest.raises(ProofShapeError):
        verify_inclusion(leaf, 5, 8, shifted, root)
    grown = tree.consistency_path(3)
    for forged in ([*grown, root], grown[:-1], [*grown[:-1], b"short"], []):
        with pytest.raises(ProofShapeError):
            verify_consistency(3, 8, tree.root(3), root, forged)


def test_attack_duplicated_last_leaf():
    """Bitcoin's CVE-2012-2459: [a, b, c] and [a, b, c, c] must not share a root."""
    assert root_of(map(leaf_hash, DATA[:3])) != root_of(map(leaf_hash, [*DATA[:3], DATA[2]]))


def test_attack_forged_history_is_not_consistent():
    """The pymerkle 6.1 bug: it accepted [evil, evil, x, y] as an extension of [x, y]; a rewrite is refused."""
    old, evil = MerkleTree.from_data(DATA[:2]), MerkleTree.from_data([b"e", b"f", *DATA[:2]])
    # The old root is a node of the forged tree, so every proof around it exists; none is accepted.
    assert evil.subtree_root(2, 2) == old.root()
    for path in (evil.consistency_path(2), [evil.root(2)], evil.inclusion_path(2), []):
        with pytest.raises(VerificationError):
            verify_consistency(2, 4, old.root(), evil.root(), path)


def test_attack_sorted_neighbours_prove_a_false_absence_and_the_sparse_tree_does_not():
    """One unsorted leaf makes "absent" and "present" both provable; in the sparse tree never.

    The operator keeps a list that should be sorted and appends the victim's key out of order.
    Two neighbours around the victim's place "prove" its absence, its own path proves its presence.
    """
    keys = sorted(sha256(b"%d" % i).digest() for i in range(7))
    victim = keys.pop(3)
    tree = MerkleTree.from_data([*keys, victim])
    for index in (2, 3):  # the two neighbours, adjacent and both proven
        verify_inclusion(leaf_hash(keys[index]), index, 7, tree.inclusion_path(index), tree.root())
    assert keys[2] < victim < keys[3]
    verify_inclusion(leaf_hash(victim), 6, 7, tree.inclusion_path(6), tree.root())

    sparse = SparseTree([*keys, victim])
    verify_presence(sparse.root, victim, sparse.prove(victim))
    without = SparseTree(keys)
    with pytest.raises(RootMismatchError):
        verify_absence(sparse.root, victim, without.prove(victim))


def test_attack_node_of_one_tree_in_another():
    """Leaf and node prefixes differ between the record, the sparse and the sum tree."""
    key = bytes(32)
    prefixes = (b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05")
    assert len({sha256(prefix + key).digest() for prefix in prefixes}) == 6
    assert SparseTree([key]).root == sha256(b"\x02" + key).digest() != leaf_hash(key)


def flip(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)
