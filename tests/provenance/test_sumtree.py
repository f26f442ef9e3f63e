"""The Merkle-sum tree: definition, conservation, and the attack on its textbook form."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import (
    FormatError,
    ProofShapeError,
    RootMismatchError,
    SumTree,
    VerificationError,
    verify_sum,
)
from tests.oracles import merkle_recursion as oracle

PAYOUTS = [(b"owner %d" % i, 10 * i + 1) for i in range(13)]


@pytest.mark.parametrize("size", range(1, 34))
def test_root_equals_the_definition_and_every_payout_verifies(size):
    """For every size: hash and total are those of the recursion, and each leaf proves itself."""
    leaves = [(b"owner %d" % i, i * i) for i in range(size)]
    tree = SumTree(leaves)
    assert tree.root == oracle.sum_root(leaves)
    assert tree.root[1] == sum(amount for _, amount in leaves)
    for index, (label, amount) in enumerate(leaves):
        verify_sum(label, amount, index, size, tree.path(index), tree.root)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), st.data())
def test_no_amount_but_the_committed_one_verifies(amounts, data):
    """Law: one unit more or less, for any owner, is refused."""
    leaves = [(b"%d" % i, amount) for i, amount in enumerate(amounts)]
    tree = SumTree(leaves)
    index = data.draw(st.integers(0, len(leaves) - 1))
    label, amount = leaves[index]
    verify_sum(label, amount, index, tree.size, tree.path(index), tree.root)
    for wrong in (amount + 1, amount - 1, 0 if amount else 7):
        with pytest.raises(VerificationError):
            verify_sum(label, wrong, index, tree.size, tree.path(index), tree.root)


def test_attack_on_the_textbook_sum_tree_fails_on_ours():
    """H(sum || h_L || h_R) lets an operator owe 200 and publish 100; ours refuses both proofs.

    The operator gives each of two owners a sibling of sum 0. In the textbook form only the total
    stands in the hash, so one root fits both stories.
    """

    def textbook(total: int, left: bytes, right: bytes) -> bytes:
        return sha256(total.to_bytes(8, "big") + left + right).digest()

    first, second = sha256(b"first owns 100").digest(), sha256(b"second owns 100").digest()
    root, total = textbook(100, first, second), 100
    # To the first owner the second one is shown with sum 0, and the other way round.
    assert textbook(100 + 0, first, second) == root
    assert textbook(0 + 100, first, second) == root
    assert total < 100 + 100

    honest = SumTree([(b"first", 100), (b"second", 100)])
    (sibling_of_first,), (sibling_of_second,) = honest.path(0), honest.path(1)
    for label, index, sibling in (
        (b"first", 0, sibling_of_first),
        (b"second", 1, sibling_of_second),
    ):
        lie = [(sibling[0], 0)]
        with pytest.raises(RootMismatchError):
            verify_sum(label, 100, index, 2, lie, (honest.root[0], total))


def test_attack_negative_sibling_and_overflow_are_refused():
    """A sibling of -50 would hide a debt, one near 2^53 would wrap a total: out of range."""
    tree = SumTree(PAYOUTS)
    path = tree.path(3)
    for bad in (-50, 2**53, 2**64):
        forged = [(path[0][0], bad), *path[1:]]
        with pytest.raises(VerificationError, match="range"):
            verify_sum(*PAYOUTS[3], 3, tree.size, forged, tree.root)
    with pytest.raises(VerificationError, match="must be in"):
        verify_sum(b"x", -1, 3, tree.size, path, tree.root)
    for leaves in ([(b"a", -1)], [(b"a", 2**53)], [(b"a", 2**52), (b"b", 2**52)], []):
        with pytest.raises(FormatError):
            SumTree(leaves)


def test_attack_another_total_with_the_right_hash_is_refused():
    """Hash and total are compared separately: a published total must be the one in the tree."""
    tree = SumTree([(b"only", 5)])
    with pytest.raises(VerificationError, match="expected a total of 6"):
        verify_sum(b"only", 5, 0, 1, [], (tree.root[0], 6))


def test_attack_every_flipped_bit_of_a_path_is_noticed():
    """Each bit of each sibling's hash, and each of its 53 sum bits."""
    tree = SumTree(PAYOUTS)
    path = tree.path(12)
    assert path
    for step, (digest, total) in enumerate(path):
        lies = [(bytes(flip(digest, bit)), total) for bit in range(256)]
        lies += [(digest, total ^ 1 << bit) for bit in range(53)]
        for lie in lies:
            forged = [*path[:step], lie, *path[step + 1 :]]
            with pytest.raises(VerificationError):
                verify_sum(*PAYOUTS[12], 12, tree.size, forged, tree.root)


def test_wrong_place_and_wrong_length_are_refused():
    """Index, size and lengths are not up to the prover."""
    tree = SumTree(PAYOUTS)
    path = tree.path(3)
    for index, size, attempt in ((3, 13, path[:-1]), (3, 13, [*path, path[0]]), (13, 13, path)):
        with pytest.raises(ProofShapeError):
            verify_sum(*PAYOUTS[3], index, size, attempt, tree.root)
    with pytest.raises(ProofShapeError):
        verify_sum(*PAYOUTS[3], 3, 13, [(b"short", 0), *path[1:]], tree.root)
    with pytest.raises(VerificationError):
        verify_sum(*PAYOUTS[3], 2, 13, path, tree.root)
    with pytest.raises(ProofShapeError):
        tree.path(13)


def flip(data: bytes, bit: int) -> bytearray:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return out
