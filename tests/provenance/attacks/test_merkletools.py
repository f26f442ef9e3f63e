"""The ten flaws of merkletools 1.0.3, one test each: it falls for the forgery, ours does not.

Where the flaw lies in its verifier, ours gets the same forged Chainpoint proof; where it lies in its
tree, ours builds over the same records. Skipped visibly where the package is missing.
"""

from __future__ import annotations

import importlib
import unicodedata
import warnings
from hashlib import sha256
from importlib.util import find_spec

import pytest

from provenance import (
    FormatError,
    MerkleTree,
    ProofShapeError,
    RootMismatchError,
    VerificationError,
    canonical_bytes,
    chainpoint_leaf,
    chainpoint_tree,
    leaf_hash,
    to_chainpoint_v2,
    verify_chainpoint_v2,
    verify_inclusion,
)
from provenance.proofs import path_layout

ITEMS = [sha256(b"commitment %d" % number).digest() for number in range(8)]


@pytest.fixture(scope="module")
def merkletools():
    """The customer's package; its import warns because it looks for the archived pysha3."""
    if find_spec("merkletools") is None:
        pytest.skip("merkletools is not installed: pip install --no-deps merkletools==1.0.3")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "sha3 is not working", UserWarning)
        return importlib.import_module("merkletools")


def tree_of(merkletools, leaves):
    tree = merkletools.MerkleTools()
    tree.add_leaf([leaf.hex() for leaf in leaves])
    tree.make_tree()
    return tree


def digests(n):
    return [sha256(b"%d" % number).digest() for number in range(n)]


def test_flaw_1_no_domain_separation_between_leaf_and_node(merkletools):
    """A 64-byte "record" made of two leaf hashes is a member of theirs; for ours its leaf hash is another."""
    leaves = digests(4)
    forged = leaves[0] + leaves[1]
    theirs = tree_of(merkletools, leaves)
    assert theirs.validate_proof(
        theirs.get_proof(0)[1:], sha256(forged).hexdigest(), theirs.get_merkle_root()
    )
    ours = MerkleTree.from_data(leaves)
    assert leaf_hash(ours.leaf(0) + ours.leaf(1)) != ours.subtree_root(0, 2)
    with pytest.raises(ProofShapeError):
        verify_inclusion(leaf_hash(forged), 0, 4, ours.inclusion_path(0)[1:], ours.root())


def test_flaw_2_the_root_is_a_member_of_itself(merkletools):
    """An empty proof of the root: yes from theirs, refused by ours at every index."""
    tree = chainpoint_tree(ITEMS[:5])
    assert merkletools.MerkleTools().validate_proof([], tree.root.hex(), tree.root.hex())
    forged = to_chainpoint_v2(tree, 0) | {"targetHash": tree.root.hex(), "proof": []}
    for index in range(5):
        with pytest.raises(ProofShapeError):
            verify_chainpoint_v2(forged, index, 5, tree.root)


def test_flaw_3_the_number_of_leaves_is_not_committed(merkletools):
    """root([a, b, c]) = root([H(ab), c]): a moved odd node is another tree for ours, under a signed size."""
    a, b, c = digests(3)
    pair = sha256(a + b).digest()
    roots = {tree_of(merkletools, leaves).get_merkle_root() for leaves in ([a, b, c], [pair, c])}
    assert len(roots) == 1
    three = chainpoint_tree(ITEMS[:3])
    moved = to_chainpoint_v2(three, 2)
    # At (1, 2) its shape is the same: so the size is inside what is signed, and 2 is another binding.
    two = type(three)(((three.levels[1][0], three.levels[0][2]), (three.root,)))
    assert (two.root, two.binding == three.binding) == (three.root, False)
    for index, size in ((2, 4), (0, 3), (1, 3), (2, 2)):
        with pytest.raises(VerificationError):
            verify_chainpoint_v2(moved, index, size, three.root)
    assert MerkleTree.from_data([a, b, c]).root() != MerkleTree.from_data([a + b, c]).root()


def test_flaw_4_a_proof_has_no_index_and_no_size(merkletools):
    """The same record at two places: both proofs pass for theirs; for ours each holds at its own place only."""
    items = [ITEMS[0], ITEMS[1], ITEMS[0], ITEMS[2]]
    tree = chainpoint_tree(items)
    first, third = to_chainpoint_v2(tree, 0), to_chainpoint_v2(tree, 2)
    peer = merkletools.MerkleTools()
    assert first["targetHash"] == third["targetHash"]
    assert all(
        peer.validate_proof(p["proof"], p["targetHash"], p["merkleRoot"]) for p in (first, third)
    )
    verify_chainpoint_v2(first, 0, 4, tree.root)
    verify_chainpoint_v2(third, 2, 4, tree.root)
    for proof, index in ((first, 2), (third, 0)):
        with pytest.raises(VerificationError):
            verify_chainpoint_v2(proof, index, 4, tree.root)


def test_flaw_5_the_length_of_a_digest_is_never_checked(merkletools):
    """["00", "aabbcc"] and ["00aa", "bbcc"] have one root for theirs; ours takes 32 bytes or nothing."""
    roots = set()
    for leaves in (["00", "aabbcc"], ["00aa", "bbcc"]):
        tree = merkletools.MerkleTools()
        tree.add_leaf(leaves)
        tree.make_tree()
        roots.add(tree.get_merkle_root())
    assert len(roots) == 1
    for short in (b"\x00", b"\xaa\xbb\xcc", b""):
        with pytest.raises(FormatError):
            MerkleTree([short])
    good = to_chainpoint_v2(chainpoint_tree(ITEMS[:2]), 0)
    moved = [{"right": good["targetHash"][-2:] + good["proof"][0]["right"]}]
    with pytest.raises(ProofShapeError):
        verify_chainpoint_v2(
            good | {"targetHash": good["targetHash"][:-2], "proof": moved}, 0, 2, bytes.fromhex(good["merkleRoot"])
        )  # fmt: skip


def test_flaw_6_a_prefix_on_the_leaves_alone_does_not_help(merkletools):
    """With leaves SHA256(0x00 || record) every 256th node is a record's preimage; double hashing leaves none."""
    leaves = [sha256(b"\x00" + b"record %d" % number).digest() for number in range(2048)]
    level, found = leaves, None
    pairs = list(zip(level[::2], level[1::2], strict=True))
    found = next(number for number, (left, _) in enumerate(pairs) if left[0] == 0)
    forged = (pairs[found][0] + pairs[found][1])[1:]  # a "record" of 63 bytes
    theirs = tree_of(merkletools, leaves)
    proof = theirs.get_proof(2 * found)[1:]
    assert theirs.validate_proof(
        proof, sha256(b"\x00" + forged).hexdigest(), theirs.get_merkle_root()
    )
    # Ours: a leaf's preimage has 32 bytes and a node's 64, so no record hashes to a node.
    tree = chainpoint_tree(ITEMS)
    nodes = {node for nodes in tree.levels[1:] for node in nodes}
    assert chainpoint_leaf(forged) not in nodes
    receipt = to_chainpoint_v2(tree, 0)
    forged_receipt = receipt | {
        "targetHash": tree.levels[1][0].hex(),
        "proof": receipt["proof"][1:],
    }
    assert merkletools.MerkleTools().validate_proof(
        forged_receipt["proof"], forged_receipt["targetHash"], forged_receipt["merkleRoot"]
    )
    for index in range(8):
        with pytest.raises(ProofShapeError):
            verify_chainpoint_v2(forged_receipt, index, 8, tree.root)


def test_flaw_7_weak_hashes_and_bare_exceptions(merkletools):
    """Theirs takes md5 and fails with KeyError on a malformed step; ours knows SHA-256 and its own errors."""
    weak = merkletools.MerkleTools("md5")
    weak.add_leaf("text", do_hash=True)
    weak.make_tree()
    assert len(weak.get_merkle_root()) == 32
    good = to_chainpoint_v2(chainpoint_tree(ITEMS[:2]), 0)
    with pytest.raises(KeyError):
        merkletools.MerkleTools().validate_proof([{"left": "zz"}], "aa" * 32, "bb" * 32)
    for bad in (
        good | {"type": "ChainpointMD5v2"},
        good | {"proof": [{"right": "zz" * 32}]},
        good | {"proof": [{"middle": "aa" * 32}]},
    ):
        with pytest.raises(ProofShapeError):
            verify_chainpoint_v2(bad, 0, 2, bytes.fromhex(good["merkleRoot"]))


def test_flaw_8_text_is_hashed_as_it_comes(merkletools):
    """Two spellings of one word are two leaves for theirs (and bytes an AttributeError); canonical bytes are one."""
    twins = [unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")]
    hashes = set()
    for twin in twins:
        tree = merkletools.MerkleTools()
        tree.add_leaf(twin, do_hash=True)
        hashes.add(tree.get_leaf(0))
    assert len(hashes) == 2
    with pytest.raises(AttributeError):
        merkletools.MerkleTools().add_leaf(b"bytes", do_hash=True)
    assert len({canonical_bytes(twin) for twin in twins}) == 1


def test_flaw_9_a_finished_tree_changes_when_a_leaf_is_added(merkletools):
    """Adding to theirs changes the finished tree's leaf level under an old root; ours keeps every earlier size."""
    leaves = digests(4)
    theirs = tree_of(merkletools, leaves)
    theirs.add_leaf(sha256(b"late").hexdigest())
    assert len(theirs.levels[-1]) == 5
    ours = MerkleTree.from_data(leaves)
    before, path = ours.root(), ours.inclusion_path(3)
    ours.append(leaf_hash(b"late"))
    assert (ours.root(4), ours.inclusion_path(3, 4)) == (before, path)


def test_flaw_10_indices_are_floats(merkletools):
    """int(index / 2.) is wrong from 2^53 on; our layout is exact to the last index of 2^62 leaves."""
    index = 9_007_199_254_740_995  # odd and above 2^53
    assert int(index / 2.0) != index // 2
    layout = path_layout(index, 2**62)
    assert sum(bit << level for level, bit in enumerate(layout)) == index
    assert path_layout(2**62 - 1, 2**62) == [True] * 62
    tree = chainpoint_tree(ITEMS)
    with pytest.raises(RootMismatchError):
        verify_chainpoint_v2(to_chainpoint_v2(tree, 0), 0, 8, bytes(32))
