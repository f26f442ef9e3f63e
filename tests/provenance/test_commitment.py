"""Commitments, leaf data and tombstones: hiding, binding, and never one for the other."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import FormatError, commit, commit_digest, leaf_data, tombstone_leaf

SALT, TEXT, OWNER = bytes(range(32)), b"canonical", b"\x07" * 32


def test_commitment_and_leaf_by_their_written_definition():
    """Byte for byte the layout in the module docstring and in the README."""
    digest = sha256(TEXT).digest()
    expected = sha256(b"dataworth/commitment/v1\n" + SALT + digest).digest()
    assert commit(SALT, TEXT) == commit_digest(SALT, digest) == expected
    leaf = leaf_data(expected, OWNER, 1, "CC0-1.0")
    assert leaf == b"\x01" + expected + OWNER + b"\x01" + b"\x07CC0-1.0"
    mark = sha256(b"dataworth/tombstone/v1\n" + bytes(7) + b"\x05").digest()
    assert tombstone_leaf(5) == mark


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_the_salt_hides_the_text(first, second):
    """Law: the same text under two salts has two commitments, under one salt one."""
    assert (commit(first, TEXT) == commit(second, TEXT)) == (first == second)


def test_attack_guessing_a_phone_number_needs_the_salt():
    """All guesses fail once the salt is gone, the true text included; with it, one succeeds."""
    secret = commit(SALT, b"call 017")
    guesses = [b"call %03d" % number for number in range(1000)]
    assert [guess for guess in guesses if commit(SALT, guess) == secret] == [b"call 017"]
    assert all(commit(bytes(32), guess) != secret for guess in guesses)
    assert all(sha256(guess).digest() != secret for guess in guesses)


def test_owner_licence_and_profile_cannot_be_changed_later():
    """Every field of the leaf changes it, and a licence cannot swallow its neighbour."""
    inner = commit(SALT, TEXT)
    leaves = {
        leaf_data(inner, OWNER, 1, "MIT"),
        leaf_data(inner, b"\x08" * 32, 1, "MIT"),
        leaf_data(inner, OWNER, 2, "MIT"),
        leaf_data(inner, OWNER, 1, "MIT-0"),
        leaf_data(commit(bytes(32), TEXT), OWNER, 1, "MIT"),
    }
    assert len(leaves) == 5


def test_a_tombstone_is_no_record_and_a_record_no_tombstone():
    """The two forms differ in length, so neither can be shown as the other."""
    assert len(leaf_data(bytes(32), bytes(32), 0, "x")) > len(tombstone_leaf(0)) == 32
    assert len({tombstone_leaf(index) for index in range(100)}) == 100


@pytest.mark.parametrize(
    "call",
    [
        lambda: commit(b"short", TEXT),
        lambda: commit_digest(SALT, b"short"),
        lambda: leaf_data(b"short", OWNER, 1, "MIT"),
        lambda: leaf_data(bytes(32), b"short", 1, "MIT"),
        lambda: leaf_data(bytes(32), OWNER, 256, "MIT"),
        lambda: leaf_data(bytes(32), OWNER, 1, ""),
        lambda: leaf_data(bytes(32), OWNER, 1, "x" * 256),
        lambda: leaf_data(bytes(32), OWNER, 1, "Lizenz \u00e4"),
        lambda: tombstone_leaf(-1),
        lambda: tombstone_leaf(2**63),
    ],
)
def test_a_field_out_of_range_is_refused(call):
    """Lengths and ranges are part of the format."""
    with pytest.raises(FormatError):
        call()
