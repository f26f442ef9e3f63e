"""Canonical bytes and strict JSON: what is hashed has one spelling only."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import stat
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import (
    CANONICALISATION,
    FormatError,
    canonical_bytes,
    fingerprint,
    jcs,
    keyed,
    parse_json,
    record_id,
    write_atomic,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = st.one_of(st.integers(-(2**53) + 1, 2**53 - 1), st.booleans(), TEXT)
OBJECTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=12
)


def test_line_ends_and_composition_are_one_text():
    """Windows, old Mac and Unix line ends, composed or decomposed accents: the same bytes."""
    forms = ["caf\u00e9\nx\n", "cafe\u0301\r\nx\r\n", "cafe\u0301\rx\r"]
    assert {canonical_bytes(text) for text in forms} == {"caf\u00e9\nx\n".encode()}
    assert CANONICALISATION == 1


@given(TEXT)
def test_canonical_bytes_are_a_fixed_point(text):
    """Law: canonicalising twice changes nothing; the result is NFC, without CR."""
    once = canonical_bytes(text)
    assert canonical_bytes(once.decode()) == once
    assert b"\r" not in once
    assert unicodedata.is_normalized("NFC", once.decode())


def test_what_is_not_unicode_is_refused():
    """A lone surrogate has no UTF-8 form: refused in texts, in values and in keys."""
    for call in (
        lambda: canonical_bytes("a\ud800"),
        lambda: jcs({"a": "\udfff"}),
        lambda: jcs({"\ud800": 1}),
        lambda: parse_json(b'{"a":"\\ud800"}'),
        lambda: parse_json(b'"\xff"'),
    ):
        with pytest.raises(FormatError):
            call()


def test_invisible_letters_stay_different_texts():
    """Canonicalisation merges spellings, not look-alikes: nothing is normalised silently."""
    assert canonical_bytes("ab") != canonical_bytes("a\u200bb")
    assert canonical_bytes("A") != canonical_bytes("\u0410")
    # Compatibility forms (a ligature, a circled digit) are other texts: NFC, not NFKC.
    assert canonical_bytes("\ufb01 \u2460") == "\ufb01 \u2460".encode()


@given(OBJECTS)
def test_jcs_and_parse_are_inverse(obj):
    """Law: whatever may be committed is read back equal, and has one spelling."""
    data = jcs(obj)
    assert parse_json(data) == obj
    assert jcs(parse_json(data)) == data
    assert json.loads(data) == obj


def test_jcs_golden_vector():
    """Sorting by UTF-16 units and escaping, after the example of RFC 8785, section 3.2.3."""
    obj = {"\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": 1, "1": "One", "\U0001f600": 2}
    obj |= {"\u0080": "Control", "\u00f6": "o"}
    keys = ['"\\r"', '"1"', '"\u0080"', '"\u00f6"', '"\u20ac"', '"\U0001f600"', '"\ufb33"']
    text = jcs(obj).decode()
    assert [text.index(key) for key in keys] == sorted(text.index(key) for key in keys)
    assert jcs({"b": [True, "\u20ac\n"], "a": -3}) == '{"a":-3,"b":[true,"\u20ac\\n"]}'.encode()


@pytest.mark.parametrize(
    ("obj", "place"),
    [
        ({"a": 1.0}, r"float at \$\.a"),
        ({"a": [0, {"b": float("nan")}]}, r"float at \$\.a\[1\]\.b"),
        ({"a": None}, r"null at \$\.a"),
        ({1: 2}, "key of type int"),
        ({"a": 2**53}, r"2\^53 - 1 at \$\.a"),
        ({"a": b"x"}, r"bytes at \$\.a"),
        ({"a": {1}}, r"set at \$\.a"),
    ],
)
def test_what_has_two_spellings_is_refused_with_its_place(obj, place):
    """Floats, nulls, huge integers and foreign types: the message says where, not what."""
    with pytest.raises(FormatError, match=place):
        jcs(obj)


@pytest.mark.parametrize(
    "data",
    [
        b'{"price":1,"price":100}',
        b'{"a":{"b":1,"b":1}}',
        b'{"price":1.0}',
        b'{"price":1e3}',
        b'{"price":NaN}',
        b'{"price":-Infinity}',
        b'{"price":null}',
        b'{"price":9007199254740992}',
        b'{"a":1} trailing',
        b'\xef\xbb\xbf{"a":1}',
        b"",
        b"[" * 100_000,
        b"[" * 65 + b"]" * 65,
        b"1" * 5000,
    ],
)
def test_attack_json_that_two_readers_read_differently_is_refused(data):
    """Duplicate keys, floats, NaN, null, unsafe integers, trailing bytes, BOM, bombs: refused."""
    with pytest.raises(FormatError):
        parse_json(data)


def test_messages_do_not_quote_the_document():
    """A parse error of a private document names a position only."""
    with pytest.raises(FormatError) as caught:
        parse_json(b'{"phone": 555-0199}')
    assert "0199" not in str(caught.value)


def test_keyed_digests_are_hmac_sha256():
    """Fingerprint and record id by their written definition, with the standard library's HMAC."""
    key, canonical = bytes(range(32)), b"text"
    expected = hmac.new(key, canonical, hashlib.sha256).digest()
    assert keyed(key, canonical) == fingerprint(key, canonical) == expected
    row = b'["owner","file.txt",3,"' + expected.hex().encode() + b'"]'
    assert record_id(key, "owner", "file.txt", 3, expected) == hmac.digest(key, row, "sha256")


def test_a_short_key_is_refused():
    """A password for a key would make the digests guessable again."""
    with pytest.raises(FormatError, match="32 bytes, got 6"):
        keyed(b"secret", b"")


def test_record_ids_differ_where_any_part_differs():
    """Neighbouring fields cannot flow into each other: ("ab", "c") is not ("a", "bc")."""
    key, mark = bytes(32), bytes(32)
    ids = {
        record_id(key, "ab", "c", 1, mark),
        record_id(key, "a", "bc", 1, mark),
        record_id(key, "ab", "c", 2, mark),
        record_id(key, "ab", "c", 1, b"\x01" * 32),
        record_id(b"\x01" * 32, "ab", "c", 1, mark),
    }
    assert len(ids) == 5


def test_an_atomic_write_has_its_mode_and_leaves_no_other_file(tmp_path):
    """The new content replaces the old one, with the mode asked for, and nothing stays behind."""
    path = tmp_path / "key"
    write_atomic(path, b"old")
    write_atomic(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [item.name for item in tmp_path.iterdir()] == ["key"]


def test_a_failed_atomic_write_leaves_the_old_content(tmp_path, monkeypatch):
    """A full disk at any step: the old bytes stay, the temporary file goes."""
    path = tmp_path / "checkpoint"
    write_atomic(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [item.name for item in tmp_path.iterdir()] == ["checkpoint"]
