"""Key rotation: a signed list says which key signs which sizes, and a retired key can do no more."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import (
    FormatError,
    KeyList,
    Ledger,
    LedgerError,
    MerkleTree,
    ProvenanceError,
    SignatureError,
    SigningKey,
    checkpoint_text,
    open_key_list,
    sign_key_list,
    sign_note,
    vkey,
)
from provenance.journal import encode_commit

ORIGIN = "example.com/log"
TIME = "2025-01-31T12:00:00Z"


def key(name: str) -> SigningKey:
    return SigningKey.from_seed(sha256(name.encode()).digest())


OLD, NEW, ROOT = key("old"), key("new"), key("root")
ROOT_VKEY = vkey(f"{ORIGIN}/root", ROOT.public)
FIRST = KeyList(ORIGIN, 1, ((0, vkey(ORIGIN, OLD.public)),))


@pytest.fixture
def rotated(tmp_path):
    """A ledger of three entries by the old key and two by the new one, and its key list."""
    ledger = Ledger.open(tmp_path, ORIGIN, OLD, keys=FIRST)
    ledger.append_many([("test", {"n": n}) for n in range(3)], TIME)
    keys = FIRST.rotated(4, vkey(ORIGIN, NEW.public))
    ledger = Ledger.open(tmp_path, ORIGIN, NEW, keys=keys)
    ledger.append("test", {"n": 3}, TIME)
    ledger.append("test", {"n": 4}, TIME)
    return tmp_path, keys


def test_a_ledger_goes_on_under_a_new_key_and_verifies_as_a_whole(rotated):
    """With the list every checkpoint is checked under the key of its size; with one key alone it is not."""
    folder, keys = rotated
    note = sign_key_list(keys, ROOT)
    trusted = open_key_list(note, ROOT_VKEY)
    assert trusted == keys
    assert Ledger.open(folder, ORIGIN, keys=trusted).verify(trusted).size == 5
    for single in (vkey(ORIGIN, OLD.public), vkey(ORIGIN, NEW.public)):
        with pytest.raises(SignatureError):
            Ledger.open(folder, ORIGIN).verify(single)


def test_attack_a_retired_key_can_neither_extend_the_log_nor_end_it_otherwise(rotated):
    """The thief of the old key signs size 4 and more: refused on writing and on reading."""
    folder, keys = rotated
    ledger = Ledger.open(folder, ORIGIN, OLD, keys=keys)
    before = (folder / "entries.jsonl").read_bytes()
    with pytest.raises(LedgerError, match="may not sign size 6"):
        ledger.append("test", {"forged": True}, TIME)
    assert (folder / "entries.jsonl").read_bytes() == before
    lines = [ledger.entry_bytes(index) for index in range(5)]
    lines[4] = lines[4].replace(b'"n":4', b'"n":9')
    note = sign_note(checkpoint_text(ORIGIN, 5, MerkleTree.from_data(lines).root()), ORIGIN, OLD)
    (folder / "entries.jsonl").write_bytes(encode_commit(lines, note))
    (folder / "checkpoint").write_bytes(note)
    reader = Ledger.open(folder, ORIGIN)
    with pytest.raises(SignatureError):
        reader.verify(keys)
    with pytest.raises(SignatureError):
        Ledger.open(folder, ORIGIN, keys=keys)


def test_attack_a_list_signed_by_another_key_of_another_log_or_older_is_refused():
    """Only the root key's newest list counts."""
    keys = FIRST.rotated(4, vkey(ORIGIN, NEW.public))
    with pytest.raises(SignatureError):
        open_key_list(sign_key_list(keys, NEW), ROOT_VKEY)
    with pytest.raises(SignatureError, match="serial 2 or later, got 1"):
        open_key_list(sign_key_list(FIRST, ROOT), ROOT_VKEY, newer_than=2)
    other = KeyList("other.org/log", 1, ((0, vkey("other.org/log", OLD.public)),))
    for note in (
        sign_key_list(other, ROOT),
        sign_note(other.text(), f"{ORIGIN}/root", ROOT),
        sign_note(checkpoint_text(ORIGIN, 1, bytes(32)), f"{ORIGIN}/root", ROOT),
    ):
        with pytest.raises(ProvenanceError):
            open_key_list(note, ROOT_VKEY)


@pytest.mark.parametrize(
    "keys",
    [
        (),
        ((1, vkey(ORIGIN, OLD.public)),),
        ((0, vkey(ORIGIN, OLD.public)), (0, vkey(ORIGIN, NEW.public))),
        (
            (0, vkey(ORIGIN, OLD.public)),
            (5, vkey(ORIGIN, NEW.public)),
            (4, vkey(ORIGIN, OLD.public)),
        ),
        ((0, vkey("other.org/log", OLD.public)),),
        ((0, "no vkey"),),
        ((0, vkey(ORIGIN, OLD.public)), (2**63, vkey(ORIGIN, NEW.public))),
    ],
)
def test_a_list_that_leaves_a_size_without_one_key_is_refused(keys):
    """Sizes begin at 0 and rise, and every key is one of this log."""
    with pytest.raises(FormatError):
        KeyList(ORIGIN, 1, keys)


@given(st.lists(st.integers(1, 10**6), max_size=5, unique=True), st.integers(0, 2 * 10**6))
def test_every_size_has_exactly_one_key_and_the_text_reads_back(firsts, size):
    """Law: the key of a size is the last that begins at or below it; signing keeps the list as it is."""
    keys = FIRST
    for number, first in enumerate(sorted(firsts)):
        keys = keys.rotated(first, vkey(ORIGIN, key(f"key {number}").public))
    expected = max(first for first, _ in keys.keys if first <= size)
    assert dict(keys.keys)[expected] == keys.vkey_at(size)
    assert open_key_list(sign_key_list(keys, ROOT), ROOT_VKEY) == keys
    with pytest.raises(FormatError):
        keys.vkey_at(-1)
