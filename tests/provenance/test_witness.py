"""A witness keeps the largest consistent checkpoint and refuses truncation, rollback and split view."""

from __future__ import annotations

from hashlib import sha256

import pytest

from provenance import (
    FormatError,
    HistoryError,
    KeyList,
    Ledger,
    MerkleTree,
    SignatureError,
    SigningKey,
    Witness,
    checkpoint_text,
    cosign,
    leaf_hash,
    open_checkpoint,
    sign_note,
    verify_cosignature,
    vkey,
)

KEY = SigningKey.demo()
ORIGIN = "dataworth.example/demo"
VKEY = vkey(ORIGIN, KEY.public)
OWN = SigningKey.from_seed(sha256(b"witness").digest())
NOW = 1_738_324_800


def log(*entries: bytes) -> MerkleTree:
    return MerkleTree.from_data(entries)


def signed(tree: MerkleTree, key: SigningKey = KEY, origin: str = ORIGIN) -> bytes:
    return sign_note(checkpoint_text(origin, tree.size, tree.root()), origin, key)


@pytest.fixture
def witness(tmp_path):
    """A witness that has seen the log [a, b, c]."""
    made = Witness(tmp_path / "witness", "witness.example", OWN)
    made.observe(signed(log(b"a", b"b", b"c")), VKEY, log(b"a", b"b", b"c").consistency_path, NOW)
    return made


def test_a_growing_log_is_followed_and_cosigned(witness):
    """Each consistent checkpoint is kept with a timestamped cosignature beside the log's own."""
    tree = log(b"a", b"b", b"c")
    for number in range(5):
        tree.append(leaf_hash(b"%d" % number))
        cosigned = witness.observe(signed(tree), VKEY, tree.consistency_path, NOW + number)
        assert witness.kept == cosigned
        assert verify_cosignature(cosigned, witness.vkey) == NOW + number
        assert open_checkpoint(cosigned, VKEY).size == 4 + number
    again = witness.observe(cosigned, VKEY, tree.consistency_path, NOW + 99)
    assert verify_cosignature(again, witness.vkey) == NOW + 99
    assert not (witness.folder / "evidence").exists()


def test_attack_truncation_and_rollback_are_refused_and_kept_as_evidence(witness):
    """A smaller size, signed by the log's own key: the larger one stays, both notes are kept whole."""
    before = witness.kept
    old = signed(log(b"a", b"b"))
    with pytest.raises(HistoryError, match="3 entries were signed, got 2"):
        witness.observe(old, VKEY, log(b"a", b"b").consistency_path, NOW)
    assert witness.kept == before
    kept = {path.read_bytes() for path in (witness.folder / "evidence").iterdir()}
    assert kept == {before, old}
    with pytest.raises(HistoryError):
        witness.observe(signed(log()), VKEY, log().consistency_path, NOW)


def test_attack_split_view_is_refused(witness):
    """The same size with another root, as another buyer may be shown it."""
    other = log(b"a", b"b", b"x")
    with pytest.raises(HistoryError, match="split view: two roots for 3 entries"):
        witness.observe(signed(other), VKEY, other.consistency_path, NOW)


def test_attack_truncate_and_rewrite_is_refused(witness):
    """A larger log whose beginning is another: no consistency path leads there, honest or bent."""
    evil = log(b"a", b"b", b"x", b"d", b"e")
    good = log(b"a", b"b", b"c", b"d", b"e")
    for path in (
        evil.consistency_path, good.consistency_path,
        lambda *_: [], lambda *_: [evil.root()] * 3,
    ):  # fmt: skip
        with pytest.raises(HistoryError, match="the first 3 entries are others"):
            witness.observe(signed(evil), VKEY, path, NOW)
    assert witness.observe(signed(good), VKEY, good.consistency_path, NOW)


def test_a_stranger_or_another_log_is_refused_before_anything_is_kept(witness):
    """Signature first: what the log's key did not sign is no evidence against the log."""
    before, tree = witness.kept, log(b"a", b"b", b"c", b"d")
    for note in (signed(tree, OWN), signed(tree, KEY, "other.example/demo"), b"no note\n"):
        with pytest.raises(SignatureError):
            witness.observe(note, VKEY, tree.consistency_path, NOW)
    assert witness.kept == before
    assert not (witness.folder / "evidence").exists()
    other = "other.example/demo"
    with pytest.raises(HistoryError, match=r"expected the log dataworth\.example/demo"):
        witness.observe(
            signed(tree, KEY, other), vkey(other, KEY.public), tree.consistency_path, NOW
        )


def test_a_rotated_log_is_followed_by_its_key_list(tmp_path):
    """The witness checks each size under the key that the list names for it."""
    keys = KeyList(ORIGIN, 2, ((0, VKEY), (2, vkey(ORIGIN, OWN.public))))
    made = Witness(tmp_path, "w.example", SigningKey.generate())
    one, two = log(b"a"), log(b"a", b"b")
    made.observe(signed(one), keys, one.consistency_path, NOW)
    with pytest.raises(SignatureError):
        made.observe(signed(two), keys, two.consistency_path, NOW)
    made.observe(signed(two, OWN), keys, two.consistency_path, NOW)


def test_attack_every_flipped_bit_of_a_cosignature_is_noticed():
    """Time, signature, key id and the text itself."""
    note = cosign(signed(log(b"a")), "w.example", OWN, NOW)
    trusted = vkey("w.example", OWN.public, b"\x04")
    assert verify_cosignature(note, trusted) == NOW
    for position in range(len(note)):
        for bit in (0, 5):
            bent = bytearray(note)
            bent[position] ^= 1 << bit
            ours = bent.rfind("\u2014 w.example".encode())
            if ours >= 0 and note.index(b"\n\n") < position < ours:
                continue  # the log's own line, which is checked with the log's key
            with pytest.raises((SignatureError, FormatError)):
                verify_cosignature(bytes(bent), trusted)


def test_a_cosignature_is_no_signature_of_a_log_and_the_other_way_round():
    """One key used for both purposes: the type byte and the text keep them apart."""
    note = signed(log(b"a"))
    with pytest.raises(FormatError, match="type 01"):
        open_checkpoint(note, vkey(ORIGIN, KEY.public, b"\x04"))
    with pytest.raises(FormatError, match="type 04"):
        verify_cosignature(note, VKEY)
    with pytest.raises(SignatureError, match="got 0"):
        verify_cosignature(note, vkey(ORIGIN, KEY.public, b"\x04"))
    both = cosign(note, ORIGIN, KEY, NOW)
    assert open_checkpoint(both, VKEY).size == 1
    assert verify_cosignature(both, vkey(ORIGIN, KEY.public, b"\x04")) == NOW


def test_a_witness_reads_a_ledger_folder(tmp_path):
    """The ledger's own reader gives the paths that the witness asks for."""
    ledger = Ledger.open(tmp_path / "ledger", ORIGIN, KEY)
    made = Witness(tmp_path / "witness", "w.example", OWN)
    for number in range(3):
        ledger.append("test", {"n": number}, "2025-01-31T12:00:00Z")
        reader = Ledger.open(tmp_path / "ledger", ORIGIN)
        path = reader.consistency_path
        made.observe(reader.checkpoint, VKEY, lambda old, _, path=path: path(old), NOW)
    assert open_checkpoint(made.kept, VKEY).size == 3
