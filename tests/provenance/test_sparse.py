"""The compact sparse tree: its definition, both kinds of proof, and why no root proves both."""

from __future__ import annotations

import itertools
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import (
    FormatError,
    ProofShapeError,
    RootMismatchError,
    SparseProof,
    SparseTree,
    VerificationError,
    verify_absence,
    verify_presence,
)
from tests.oracles import merkle_recursion as oracle

# Keys from few letters share long prefixes, which random digests almost never do.
KEYS = st.lists(
    st.lists(st.sampled_from([0, 1, 128, 255]), min_size=32, max_size=32).map(bytes)
    | st.integers(0, 40).map(lambda number: number.to_bytes(32, "big"))
    | st.binary(min_size=32, max_size=32),
    max_size=12,
)


def keys(n: int) -> list[bytes]:
    return [sha256(b"key %d" % i).digest() for i in range(n)]


@given(KEYS)
def test_root_equals_the_definition_and_ignores_order_and_repeats(some):
    """Law: the root is that of the recursive definition over the set of keys."""
    tree = SparseTree(some)
    assert tree.root == oracle.sparse_root(sorted(set(some)))
    assert tree.root == SparseTree(reversed(some + some)).root
    assert tree.size == len(set(some))


@given(KEYS, KEYS)
def test_every_key_is_provably_present_or_provably_absent(inside, asked):
    """Law: exactly one of the two proofs verifies, for keys inside and outside."""
    tree = SparseTree(inside)
    for key in inside + asked:
        proof = tree.prove(key)
        right, wrong = verify_presence, verify_absence
        if key not in inside:
            right, wrong = wrong, right
        right(tree.root, key, proof)
        with pytest.raises(VerificationError):
            wrong(tree.root, key, proof)


@given(KEYS, KEYS, KEYS)
def test_an_update_gives_the_tree_that_is_built_anew(inside, add, remove):
    """Law: after any additions and removals root, size and all proofs are those of a fresh tree."""
    add = [key for key in add if key not in remove]
    tree = SparseTree(inside)
    tree.update(add, remove)
    left = (set(inside) | set(add)) - set(remove)
    fresh = SparseTree(left)
    assert tree.root == fresh.root == oracle.sparse_root(sorted(left))
    assert tree.size == len(left)
    for key in inside + add + remove:
        assert tree.prove(key) == fresh.prove(key)


def test_a_tree_grown_key_by_key_equals_one_built_at_once():
    """600 keys one after the other, then most of them removed again: each root is the fresh tree's."""
    tree, everything = SparseTree([]), keys(600)
    for number, key in enumerate(everything):
        tree.update([key])
        if number % 97 == 0:
            assert tree.root == SparseTree(everything[: number + 1]).root
    tree.update(remove=everything[5:])
    assert tree.root == oracle.sparse_root(everything[:5])


def test_an_update_that_contradicts_itself_changes_nothing():
    """A key to be added and removed, or of another length, is refused before anything moves."""
    tree = SparseTree(keys(5))
    before = tree.root
    for add, remove in (([keys(1)[0]], [keys(1)[0]]), ([b"short"], []), ([], [b"short"])):
        with pytest.raises(FormatError):
            tree.update(add, remove)
    assert (tree.root, tree.size) == (before, 5)


def test_erasing_a_key_gives_the_tree_that_never_held_it():
    """After an erasure the root equals that of a corpus without the record: no trace stays."""
    everything = keys(20)
    without = SparseTree(everything[:7] + everything[8:])
    assert without.root == oracle.sparse_root(everything[:7] + everything[8:])
    verify_absence(without.root, everything[7], without.prove(everything[7]))


def test_small_trees_by_hand():
    """No key: zeros. One key: its leaf. Two keys that part at the first bit: one branch."""
    low, high = bytes(32), b"\xff" * 32
    assert SparseTree([]).root == bytes(32)
    leaf = [sha256(b"\x02" + key).digest() for key in (low, high)]
    assert SparseTree([low]).root == leaf[0]
    assert SparseTree([high, low]).root == sha256(b"\x03" + leaf[0] + leaf[1]).digest()
    assert SparseTree([low]).prove(high) == SparseProof((), low)


def test_attack_every_flipped_bit_of_a_proof_is_noticed():
    """Each bit of every sibling, terminal key, key and root, in an absence proof."""
    tree, absent = SparseTree(keys(9)), sha256(b"absent").digest()
    proof = tree.prove(absent)
    assert proof.siblings
    for number, bit in itertools.product(range(len(proof.siblings)), range(256)):
        siblings = list(proof.siblings)
        siblings[number] = flip(siblings[number], bit)
        with pytest.raises(RootMismatchError):
            verify_absence(tree.root, absent, SparseProof(tuple(siblings), proof.terminal))
    for bit in range(256):
        with pytest.raises(RootMismatchError):
            verify_absence(flip(tree.root, bit), absent, proof)


def test_attack_present_key_cannot_be_shown_absent():
    """All ways to bend the presence proof of a key into an absence proof fail."""
    tree = SparseTree(keys(9))
    key = keys(9)[4]
    proof = tree.prove(key)
    others = [other for other in keys(9) if other != key]
    forged = [SparseProof(proof.siblings, None)]
    forged += [SparseProof(proof.siblings, other) for other in others]
    forged += [SparseProof(proof.siblings[:depth], None) for depth in range(len(proof.siblings))]
    forged += [tree.prove(other) for other in others]
    forged += [SparseProof((*proof.siblings, bytes(32)), None), SparseProof((), None)]
    for attempt in forged:
        with pytest.raises(VerificationError):
            verify_absence(tree.root, key, attempt)


def test_attack_neighbour_that_is_not_on_the_path_is_refused():
    """A real leaf from elsewhere in the tree, shown with its real path, says nothing about a key."""
    left, right, asked = bytes(32), b"\xff" * 32, b"\xfe" + bytes(31)
    tree = SparseTree([left, right])
    honest = tree.prove(asked)
    verify_absence(tree.root, asked, honest)
    with pytest.raises(ProofShapeError, match="does not stand on the path"):
        verify_absence(tree.root, asked, SparseProof(honest.siblings, left))


def test_proofs_of_another_length_are_refused():
    """Keys, roots and siblings have 32 bytes, and no path is longer than the key."""
    tree = SparseTree(keys(3))
    proof = tree.prove(keys(3)[0])
    for root, key, attempt in (
        (tree.root[:-1], keys(3)[0], proof),
        (tree.root, keys(3)[0][:-1], proof),
        (tree.root, keys(3)[0], SparseProof((b"short",), None)),
        (tree.root, keys(3)[0], SparseProof((bytes(32),) * 257, None)),
        (tree.root, keys(3)[0], SparseProof((), b"short")),
    ):
        with pytest.raises(ProofShapeError):
            verify_presence(root, key, attempt)
    for call in (lambda: SparseTree([b"short"]), lambda: tree.prove(b"short")):
        with pytest.raises(FormatError):
            call()


def flip(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)
