"""A crown gives the root of the tree that is built anew, and a crown that is not the tree's gives none."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import FormatError, MerkleTree, ProofShapeError, RootMismatchError, SparseTree
from provenance.crown import changed_crown, crown_bits

# Few letters in front: keys that share their first bits, nodes with one key, and nodes with none.
KEYS = st.sets(
    st.tuples(st.sampled_from([0, 1, 64, 128, 255]), st.integers(0, 9)).map(
        lambda pair: bytes([pair[0]]) + sha256(bytes([pair[1]])).digest()[1:]
    ),
    max_size=24,
)


@given(KEYS, KEYS, st.integers(0, 4))
def test_a_changed_crown_is_that_of_the_tree_built_anew(before, after, bits):
    """Law: at every depth, for every change, also to and from no key at all."""
    tree = SparseTree(before)
    bits = min(bits, len(before).bit_length())
    root, crown = changed_crown(
        tree.crown(bits), tree.root, list(after), list(after - before), list(before - after)
    )
    padded = SparseTree(after)
    assert root == padded.root
    if bits <= len(after).bit_length():
        assert crown == padded.crown(bits)


def test_a_crown_is_believed_only_as_far_as_it_leads_to_the_root():
    """Each damaged node, a swapped pair, a crown of another depth, and a change that was another one."""
    keys = [sha256(b"%d" % number).digest() for number in range(300)]
    tree = SparseTree(keys)
    crown, left = tree.crown(crown_bits(300)), keys[:-1]
    assert changed_crown(crown, tree.root, left, [], keys[-1:])[0] == SparseTree(left).root
    for node in range(len(crown) // 32):
        wrong = bytearray(crown)
        wrong[32 * node + 5] ^= 1
        with pytest.raises(RootMismatchError):
            changed_crown(bytes(wrong), tree.root, left, [], keys[-1:])
    with pytest.raises(RootMismatchError):
        changed_crown(crown[32:64] + crown[:32] + crown[64:], tree.root, left, [], keys[-1:])
    few = keys[:3]
    with pytest.raises(RootMismatchError):  # a key that was there is called new: its node had none
        changed_crown(SparseTree(few).crown(2), SparseTree(few).root, few, few, [])
    for size in (0, 31, 96):
        with pytest.raises(FormatError):
            changed_crown(crown[:size], tree.root, left, [], keys[-1:])
    with pytest.raises(FormatError):
        changed_crown(crown, tree.root, [b"short"], [], [])
    with pytest.raises(FormatError):
        tree.crown(30)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 4097])
def test_replaced_leaves_give_the_tree_that_is_built_anew(size):
    """Every level after one, some and all leaves were replaced; a bad change changes nothing."""
    leaves = [sha256(b"%d" % number).digest() for number in range(size)]
    for places in ({size - 1}, {0, size // 2}, set(range(size))):
        tree = MerkleTree(leaves)
        changes = {place: sha256(b"new %d" % place).digest() for place in places}
        tree.replace(changes)
        fresh = MerkleTree([changes.get(place, leaf) for place, leaf in enumerate(leaves)])
        assert tree.root() == fresh.root()
        assert all(tree.level(number) == fresh.level(number) for number in range(14))
    before = tree.root()
    with pytest.raises(ProofShapeError):
        tree.replace({0: bytes(32), size: bytes(32)})
    with pytest.raises(FormatError):
        tree.replace({0: bytes(31)})
    assert tree.root() == before
