"""Chainpoint v2: accepted by ``merkletools`` itself and by our strict verifier; forgeries by ours not."""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from hashlib import sha256
from importlib.util import find_spec

import pytest

from provenance import (
    FormatError,
    ProofShapeError,
    RootMismatchError,
    VerificationError,
    chainpoint_leaf,
    chainpoint_tree,
    to_chainpoint_v2,
    verify_chainpoint_v2,
)

SIZES = [*range(1, 20), 31, 33, 64]


def commitments(n: int) -> list[bytes]:
    return [sha256(b"commitment %d" % i).digest() for i in range(n)]


@pytest.fixture(scope="module")
def merkletools():
    """The customer's package; its import warns because it looks for the archived pysha3."""
    if find_spec("merkletools") is None:
        pytest.skip("merkletools is not installed: pip install --no-deps merkletools==1.0.3")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sha3 is not working", UserWarning)
        return importlib.import_module("merkletools")


@pytest.mark.parametrize("size", SIZES)
def test_every_proof_is_accepted_by_merkletools_and_by_ours(merkletools, size):
    """For every leaf: same root, same proof as merkletools makes, and both verifiers say yes."""
    tree, peer = chainpoint_tree(commitments(size)), merkletools.MerkleTools(hash_type="sha256")
    peer.add_leaf([chainpoint_leaf(item).hex() for item in commitments(size)])
    peer.make_tree()
    assert peer.get_merkle_root() == tree.root.hex()
    for index in range(size):
        receipt = json.loads(json.dumps(to_chainpoint_v2(tree, index)))
        assert receipt["targetHash"] == chainpoint_leaf(commitments(size)[index]).hex()
        assert receipt["proof"] == peer.get_proof(index)
        assert peer.validate_proof(receipt["proof"], receipt["targetHash"], receipt["merkleRoot"])
        verify_chainpoint_v2(receipt, index, size, tree.root)


def test_a_leaf_is_hashed_twice():
    """The leaf by its written definition: its preimage has 32 bytes, that of a node 64."""
    inner = sha256(b"\x00" + commitments(1)[0]).digest()
    assert chainpoint_leaf(commitments(1)[0]) == sha256(inner).digest()


def test_attack_root_as_member_is_accepted_by_merkletools_and_refused_by_ours(merkletools):
    """The root with an empty proof: "a member of itself" for merkletools, never for us."""
    tree = chainpoint_tree(commitments(5))
    forged = {**to_chainpoint_v2(tree, 0), "targetHash": tree.root.hex(), "proof": []}
    peer = merkletools.MerkleTools()
    assert peer.validate_proof(forged["proof"], forged["targetHash"], forged["merkleRoot"])
    for index in range(5):
        with pytest.raises(VerificationError):
            verify_chainpoint_v2(forged, index, 5, tree.root)


def test_attack_inner_node_as_record_is_accepted_by_merkletools_and_refused_by_ours(merkletools):
    """Second preimage: the 64 bytes of two leaves hash to a node, which passes as a record."""
    tree = chainpoint_tree(commitments(4))
    record = tree.levels[0][0] + tree.levels[0][1]
    target = sha256(record).digest()
    assert target == tree.levels[1][0]
    forged = to_chainpoint_v2(tree, 0) | {"targetHash": target.hex()}
    forged["proof"] = forged["proof"][1:]
    assert merkletools.MerkleTools().validate_proof(
        forged["proof"], forged["targetHash"], forged["merkleRoot"]
    )
    for index in range(4):
        with pytest.raises(ProofShapeError):
            verify_chainpoint_v2(forged, index, 4, tree.root)
    # And no commitment leads there: a leaf is the hash of 32 bytes, a node of 64.
    assert all(chainpoint_leaf(item) != target for item in (*commitments(4), record))


def test_attack_another_number_of_leaves_has_another_binding():
    """root([a, b, c]) == root([H(ab), c]): only the signed binding tells the sizes apart."""
    three = chainpoint_tree(commitments(3))
    level = (three.levels[1][0], three.levels[0][2])
    two = type(three)((level, (sha256(level[0] + level[1]).digest(),)))
    assert (two.root, two.size) == (three.root, 2)
    assert two.binding != three.binding


def test_attack_every_flipped_bit_and_swapped_side_is_refused():
    """Each bit of each digest in the receipt, each side turned round, each place but the right one."""
    size, index = 7, 4
    tree = chainpoint_tree(commitments(size))
    good = to_chainpoint_v2(tree, index)
    verify_chainpoint_v2(good, index, size, tree.root)
    for bit in range(256):
        for name in ("targetHash", "merkleRoot"):
            with pytest.raises(RootMismatchError):
                verify_chainpoint_v2({**good, name: flip(good[name], bit)}, index, size, tree.root)
        for step in range(len(good["proof"])):
            forged = copy.deepcopy(good)
            ((side, digest),) = forged["proof"][step].items()
            forged["proof"][step] = {side: flip(digest, bit)}
            with pytest.raises(RootMismatchError):
                verify_chainpoint_v2(forged, index, size, tree.root)
    for step in range(len(good["proof"])):
        forged = copy.deepcopy(good)
        ((side, digest),) = forged["proof"][step].items()
        forged["proof"][step] = {"left" if side == "right" else "right": digest}
        with pytest.raises(ProofShapeError):
            verify_chainpoint_v2(forged, index, size, tree.root)
    for other in set(range(size)) - {index}:
        with pytest.raises(VerificationError):
            verify_chainpoint_v2(good, other, size, tree.root)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "ChainpointMD5v2"},
        {"@context": "https://example.com"},
        {"extra": 1},
        {"targetHash": "AA" * 32},
        {"targetHash": "aa"},
        {"targetHash": 5},
        {"targetHash": "zz" * 32},
        {"proof": None},
        {"proof": [{"left": "aa" * 32, "right": "aa" * 32}] * 3},
        {"proof": [["left", "aa" * 32]] * 3},
    ],
)
def test_a_receipt_in_another_form_is_refused(change):
    """Other algorithms, unknown fields, other spellings: no field of a receipt is a switch."""
    tree = chainpoint_tree(commitments(8))
    with pytest.raises(ProofShapeError):
        verify_chainpoint_v2({**to_chainpoint_v2(tree, 0), **change}, 0, 8, tree.root)


def test_an_empty_tree_is_refused():
    """There is no root of nothing to give away."""
    with pytest.raises(FormatError):
        chainpoint_tree([])
    with pytest.raises(ProofShapeError):
        to_chainpoint_v2(chainpoint_tree(commitments(2)), 2)


def flip(text: str, bit: int) -> str:
    return (int(text, 16) ^ 1 << bit).to_bytes(32, "big").hex()
