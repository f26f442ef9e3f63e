"""Compact ranges: parts hashed apart and merged are the tree that one process hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import CompactRange, FormatError, MerkleTree, ProofShapeError, leaf_hash
from provenance.compact import cover
from tests.oracles import merkle_recursion as oracle

LARGEST = 64
DATA = [b"leaf %d" % index for index in range(LARGEST)]
HASHES = [leaf_hash(data) for data in DATA]


@pytest.mark.parametrize("size", range(LARGEST + 1))
def test_every_way_to_cut_a_tree_in_two_gives_its_root(size):
    """For all sizes up to 64 and all borders: merged halves have the root of the recursion."""
    expected = oracle.root(DATA[:size])
    assert CompactRange(0, HASHES[:size]).root() == expected
    for border in range(size + 1):
        left = CompactRange(0, HASHES[:border])
        right = CompactRange(border, HASHES[border:size])
        left.merge(right)
        assert (left.begin, left.end, left.root()) == (0, size, expected)
        assert left.hashes == CompactRange(0, HASHES[:size]).hashes


def test_a_range_is_covered_by_the_roots_of_its_largest_perfect_subtrees():
    """For all ranges in 64 leaves: each hash is the recursion's root of its aligned power of two."""
    for begin in range(LARGEST):
        for end in range(begin, LARGEST + 1):
            place, found = begin, CompactRange(begin, HASHES[begin:end])
            for level, digest in zip(cover(begin, end), found.hashes, strict=True):
                width = 1 << level
                assert place % width == 0
                assert digest == oracle.root(DATA[place : place + width])
                place += width
            assert place == end
            assert len(found.hashes) <= 2 * max(1, (end - begin).bit_length())


@given(st.lists(st.integers(0, 40), max_size=6))
def test_merging_is_associative_and_streams(sizes):
    """Law: parts of any sizes merge to the same range from the left, from the right and streamed."""
    data = [leaf_hash(b"%d" % index) for index in range(sum(sizes))]
    parts, begin = [], 0
    for size in sizes:
        parts.append(CompactRange(begin, data[begin : begin + size]))
        begin += size
    left = CompactRange()
    for part in parts:
        left.merge(part)
    right = CompactRange(begin)
    for part in reversed(parts):
        whole = part.copy()
        whole.merge(right)
        right = whole
    streamed = CompactRange(0, data)
    assert left.hashes == right.hashes == streamed.hashes
    assert left.root() == streamed.root() == MerkleTree(data).root()


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_range_survives_the_way_between_two_processes(begin, length):
    """Law: its ends and hashes are all of it, for ranges far larger than memory."""
    levels = cover(begin, begin + length)
    hashes = [leaf_hash(b"%d" % number) for number in range(len(levels))]
    made = CompactRange.of_hashes(begin, begin + length, hashes)
    assert (made.begin, made.end, made.hashes) == (begin, begin + length, hashes)
    made.append(leaf_hash(b"next"))
    assert made.end == begin + length + 1
    assert len(made.hashes) == len(cover(begin, made.end))


def test_gaps_overlaps_and_swapped_parts_are_refused():
    """A merge that would move a leaf raises, says both numbers, and changes nothing."""
    first, second = CompactRange(0, HASHES[:5]), CompactRange(5, HASHES[5:9])
    for wrong in (CompactRange(4, HASHES[4:9]), CompactRange(6, HASHES[6:9]), first):
        with pytest.raises(ProofShapeError, match=r"begins at 5, got one that begins at \d"):
            first.merge(wrong)
    with pytest.raises(ProofShapeError, match="begins at 9, got one that begins at 0"):
        second.merge(first)
    assert first.root() == oracle.root(DATA[:5])
    with pytest.raises(ProofShapeError, match="begins at 0, got 5"):
        second.root()


def test_bad_numbers_and_lengths_are_refused():
    """Ranges, lengths of hashes and their number are checked before anything is believed."""
    for call in (
        lambda: CompactRange(-1),
        lambda: CompactRange(2**63),
        lambda: CompactRange(0, [b"short"]),
        lambda: CompactRange.of_hashes(3, 2, []),
        lambda: CompactRange.of_hashes(0, 2**63, []),
        lambda: CompactRange.of_hashes(0, 1, [b"short"]),
    ):
        with pytest.raises(FormatError):
            call()
    with pytest.raises(ProofShapeError, match="covered by 2 hashes, got 1"):
        CompactRange.of_hashes(0, 3, HASHES[:1])


def test_trees_of_parts_join_to_the_tree_of_all():
    """For every part size and every ragged end: joined trees equal the one built in one go."""
    for width in (1, 2, 3, 4, 6, 8, 16):
        for size in range(LARGEST + 1):
            cuts = range(0, size, width)
            parts = [MerkleTree(HASHES[at : min(at + width, size)]) for at in cuts]
            tree, whole = MerkleTree.joined(parts), MerkleTree(HASHES[:size])
            assert (tree.size, tree.root()) == (size, oracle.root(DATA[:size]))
            assert tree._levels == whole._levels
            tree.append(leaf_hash(b"more"))
            whole.append(leaf_hash(b"more"))
            assert tree.root() == whole.root()
