"""The RFC 9162 tree against its own definition, for every small size, and its laws for any."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import (
    FormatError,
    MerkleTree,
    ProofShapeError,
    RootMismatchError,
    leaf_hash,
    root_of,
    verify_consistency,
    verify_inclusion,
    verify_subtree_consistency,
    verify_subtree_inclusion,
)
from provenance.proofs import path_layout
from tests.oracles import merkle_recursion as oracle

LARGEST = 64

# Leaves and roots of certificate-transparency's merkletree_test.go, repeated in
# transparency-dev/merkle, testonly/constants.go (Apache-2.0); root n is over the first n leaves.
CT_LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
CT_ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def leaves(n: int) -> list[bytes]:
    return [b"leaf %d" % i for i in range(n)]


@pytest.mark.parametrize("size", range(9))
def test_certificate_transparency_roots(size):
    """The published roots of sizes 0 to 8 come out, from every way to compute a root."""
    tree = MerkleTree.from_data(CT_LEAVES)
    assert tree.root(size).hex() == CT_ROOTS[size]
    assert root_of(map(leaf_hash, CT_LEAVES[:size])).hex() == CT_ROOTS[size]


@pytest.mark.parametrize("size", range(LARGEST + 1))
def test_root_and_every_inclusion_path_equal_the_recursion(size):
    """For every size up to 64: root and all paths are those of the RFC's recursive definition."""
    data = leaves(size)
    tree, one_by_one = MerkleTree.from_data(data), MerkleTree()
    for position, leaf in enumerate(data):
        assert one_by_one.append(leaf_hash(leaf)) == position
    expected = oracle.root(data)
    assert tree.root() == one_by_one.root() == root_of(map(leaf_hash, data)) == expected
    for index in range(size):
        path = tree.inclusion_path(index)
        assert path == one_by_one.inclusion_path(index) == oracle.inclusion(index, data)
        assert oracle.inclusion_root(leaf_hash(data[index]), index, size, path) == expected
        verify_inclusion(leaf_hash(data[index]), index, size, path, expected)


def test_every_earlier_size_is_still_there():
    """A tree of 64 leaves gives the roots and paths of all its earlier sizes."""
    data = leaves(LARGEST)
    tree = MerkleTree.from_data(data)
    for size in range(1, LARGEST + 1):
        assert tree.root(size) == oracle.root(data[:size])
        for index in {0, size // 2, size - 1}:
            assert tree.inclusion_path(index, size) == oracle.inclusion(index, data[:size])


@pytest.mark.parametrize("new", range(1, LARGEST + 1))
def test_every_consistency_path_equals_the_recursion(new):
    """For every pair of sizes up to 64 the consistency path is the RFC's, and it verifies."""
    data = leaves(new)
    tree = MerkleTree.from_data(data)
    for old in range(1, new + 1):
        path = tree.consistency_path(old)
        assert path == oracle.consistency(old, data)
        verify_consistency(old, new, tree.root(old), tree.root(), path)


def test_every_aligned_subtree_is_proven_in_every_tree():
    """Shards: each aligned subtree's root is the root of its leaves and is proven in the tree."""
    data = leaves(24)
    tree = MerkleTree.from_data(data)
    for size, width in itertools.product(range(1, 25), (1, 2, 4, 8, 16)):
        for start in range(0, size, width):
            end = min(start + width, size)
            part = oracle.root(data[start:end])
            path = tree.subtree_consistency_path(start, end, size)
            assert path == oracle.subtree(start, end, data[:size])
            verify_subtree_consistency(start, end, size, part, tree.root(size), path)
            if size == tree.size:
                assert tree.subtree_root(start, end - start) == part
            for index in range(start, end):
                inner = oracle.inclusion(index - start, data[start:end])
                verify_subtree_inclusion(tree.leaf(index), index, start, end, inner, part)


def test_record_to_shard_and_shard_to_corpus_are_one_inclusion_path():
    """For a full shard of 2^s leaves the first s hashes of the record's path stay in the shard."""
    tree = MerkleTree.from_data(leaves(50))
    for index in range(48):
        start = index // 8 * 8
        path = tree.inclusion_path(index)
        verify_subtree_inclusion(
            tree.leaf(index), index, start, start + 8, path[:3], tree.subtree_root(start, 8)
        )


@given(st.integers(1, 300), st.data())
def test_appending_never_changes_what_was_proven(new, data):
    """Law: a root proven once is consistent with the root of any later size."""
    tree = MerkleTree.from_data(leaves(new))
    old = data.draw(st.integers(1, new))
    verify_consistency(old, new, tree.root(old), tree.root(), tree.consistency_path(old))
    index = data.draw(st.integers(0, old - 1))
    path = tree.inclusion_path(index, old)
    verify_inclusion(tree.leaf(index), index, old, path, tree.root(old))


@given(st.integers(1, 2**63 - 1), st.data())
def test_the_shape_of_a_path_follows_from_index_and_size(size, data):
    """Law: the layout is that of the recursion, for sizes far beyond any tree in memory."""
    index = data.draw(st.integers(0, size - 1))
    layout, begin, end = [], 0, size
    while end - begin > 1:
        middle = begin + oracle.split(end - begin)
        layout.append(index >= middle)
        begin, end = (middle, end) if index >= middle else (begin, middle)
    assert path_layout(index, size) == layout[::-1]


def test_changing_any_leaf_changes_the_root():
    """No leaf is left out of the root, at any position of a ragged tree."""
    data = leaves(13)
    roots = {MerkleTree.from_data(data).root()}
    for index in range(13):
        roots.add(MerkleTree.from_data([*data[:index], b"other", *data[index + 1 :]]).root())
    assert len(roots) == 14


def test_a_copy_is_independent():
    """Appending to a copy leaves the original as it was, in every level."""
    tree = MerkleTree.from_data(leaves(7))
    before = tree.root()
    twin = tree.copy()
    twin.append(leaf_hash(b"8th"))
    assert (tree.size, tree.root(), twin.size) == (7, before, 8)


def test_an_index_or_a_size_out_of_range_is_refused():
    """Every range in the docstrings is enforced with the named error, never by a wrong proof."""
    tree = MerkleTree.from_data(leaves(5))
    for call in (
        lambda: tree.leaf(5),
        lambda: tree.leaf(-1),
        lambda: tree.root(6),
        lambda: tree.inclusion_path(5),
        lambda: tree.inclusion_path(-1),
        lambda: tree.inclusion_path(3, 3),
        lambda: tree.consistency_path(0),
        lambda: tree.consistency_path(6),
        lambda: tree.consistency_path(3, 2),
        lambda: tree.subtree_root(1, 2),
        lambda: tree.subtree_root(0, 3),
        lambda: tree.subtree_root(4, 2),
        lambda: tree.subtree_root(0, 0),
        lambda: path_layout(0, 2**63),
        lambda: verify_inclusion(tree.leaf(0), 0, 0, [], tree.root()),
        lambda: verify_inclusion(b"short", 0, 1, [], tree.root()),
        lambda: verify_consistency(0, 5, tree.root(0), tree.root(), []),
        lambda: verify_consistency(3, 2, tree.root(3), tree.root(2), []),
    ):
        with pytest.raises(ProofShapeError):
            call()


def test_leaf_hashes_of_another_length_are_refused():
    """Leaf data given for a leaf hash is noticed (merkletools takes digests of any length)."""
    for call in (lambda: MerkleTree([b"data"]), lambda: root_of([b"data"])):
        with pytest.raises(FormatError, match="leaf hash 0 has 4 bytes"):
            call()
    with pytest.raises(FormatError, match="4 bytes"):
        MerkleTree().append(b"data")


def test_a_mismatch_names_both_roots():
    """The error carries the expected and the calculated root."""
    tree = MerkleTree.from_data(leaves(3))
    with pytest.raises(RootMismatchError) as caught:
        verify_inclusion(tree.leaf(0), 0, 3, tree.inclusion_path(0), bytes(32))
    assert (caught.value.expected, caught.value.got) == (bytes(32), tree.root())
    assert tree.root().hex() in str(caught.value)
