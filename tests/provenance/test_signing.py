"""Signed notes against Go's published note, and every way a note must be refused."""

from __future__ import annotations

import base64
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance import (
    Checkpoint,
    FormatError,
    SignatureError,
    SigningKey,
    checkpoint_text,
    open_checkpoint,
    parse_checkpoint,
    parse_vkey,
    sign_note,
    verify_note,
    vkey,
)

# Source: package documentation and tests of golang.org/x/mod/sumdb/note (BSD-3-Clause).
GO_SECRET = "AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz"
GO_VKEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_TEXT = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
)
GO_NOTE = (
    GO_TEXT
    + "\n\u2014 PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXg"
    "KvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)

KEY = SigningKey.from_seed(bytes(range(32)))
NAME = "example.com/log"
VKEY = vkey(NAME, KEY.public)


def test_the_note_of_the_go_documentation_comes_out_byte_for_byte():
    """Go's published key signs Go's published text to Go's published note, and it verifies."""
    key = SigningKey.from_seed(base64.b64decode(GO_SECRET)[1:])
    assert vkey("PeterNeumann", key.public) == GO_VKEY
    assert sign_note(GO_TEXT, "PeterNeumann", key) == GO_NOTE.encode()
    assert verify_note(GO_NOTE, GO_VKEY) == GO_TEXT


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_accepts_the_signature(tmp_path):
    """A verifier that shares no code with ours: openssl on the raw text, key and signature."""
    note = sign_note(checkpoint_text(NAME, 7, bytes(32)), NAME, KEY)
    text, _, line = note.rpartition(b"\n\n")
    (tmp_path / "text").write_bytes(text + b"\n")
    (tmp_path / "sig").write_bytes(base64.b64decode(line.split()[-1])[4:])
    # SubjectPublicKeyInfo of Ed25519 is this prefix and the key (RFC 8410).
    (tmp_path / "key").write_bytes(bytes.fromhex("302a300506032b6570032100") + KEY.public)
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", "key", "-keyform", "DER"]
    command += ["-rawin", "-in", "text", "-sigfile", "sig"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert b"Verified Successfully" in done.stdout, done.stderr


@given(st.integers(0, 2**63 - 1), st.binary(min_size=32, max_size=32))
def test_a_checkpoint_is_read_back_as_it_was_signed(size, root):
    """Law: origin, size and root survive signing and reading, for any size."""
    note = sign_note(checkpoint_text(NAME, size, root), NAME, KEY)
    assert open_checkpoint(note, VKEY) == Checkpoint(NAME, size, root)


def test_attack_every_flipped_bit_of_a_checkpoint_is_noticed():
    """Each single bit: text, dash, name, key id, signature, padding bits of base64."""
    note = sign_note(checkpoint_text(NAME, 5, bytes(range(32))), NAME, KEY)
    for bit in range(8 * len(note)):
        forged = bytearray(note)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SignatureError):
            open_checkpoint(bytes(forged), VKEY)


def test_unknown_signatures_are_ignored_and_a_known_one_is_needed():
    """Key rotation and witnesses: a second signature does no harm, alone it is not enough."""
    text = checkpoint_text(NAME, 1, bytes(32))
    witness = SigningKey.generate()
    own, other = sign_note(text, NAME, KEY), sign_note(text, "witness.example", witness)
    both = own + other.rpartition(b"\n\n")[2]
    assert open_checkpoint(both, VKEY).size == 1
    with pytest.raises(SignatureError, match=r"expected a signature by example\.com/log"):
        open_checkpoint(other, VKEY)
    same_name = sign_note(text, NAME, witness)
    with pytest.raises(SignatureError):
        verify_note(same_name, VKEY)


def test_attack_a_checkpoint_of_another_log_is_refused():
    """The same key under the same name may sign other texts; their origin is compared."""
    foreign = sign_note(checkpoint_text("example.com/other", 9, bytes(32)), NAME, KEY)
    with pytest.raises(SignatureError, match=r"example\.com/other"):
        open_checkpoint(foreign, VKEY)


def test_the_demo_key_signs_only_in_the_name_of_a_demo():
    """Everybody has the demo key, so it must never look like somebody's statement."""
    assert SigningKey.demo() == SigningKey.demo()
    with pytest.raises(FormatError, match="demo"):
        sign_note("text\n", "example.com/log", SigningKey.demo())
    assert sign_note("text\n", "example.com/demo", SigningKey.demo())


def test_a_key_does_not_show_its_seed():
    """A key in a log line or a traceback stays secret."""
    assert KEY.seed.hex() not in repr(KEY)
    assert repr(KEY.seed) not in repr(KEY)
    assert SigningKey.generate() != SigningKey.generate()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "log\n1\n",
        "log\n01\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n-1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n\u0661\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n9999999999999999999\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
        "log\n1\nAAAA\n",
        "log\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAB=\n",
        "log\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\nextension\n",
        "a log\n1\nAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=\n",
    ],
)
def test_a_checkpoint_has_one_spelling(text):
    """Leading zeros, other digits, short roots, loose base64, extension lines: refused."""
    with pytest.raises(FormatError):
        parse_checkpoint(text)


@pytest.mark.parametrize(
    "text", ["", "name", "name+00000000+AQ==", GO_VKEY.replace("c74f", "c74e"), f"x{GO_VKEY}"]
)
def test_a_mistyped_vkey_is_refused(text):
    """The key id catches a wrong letter in the one line a person types."""
    with pytest.raises(FormatError):
        parse_vkey(text)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\nb", "a\u2003b"])
def test_a_name_that_could_break_the_line_is_refused(name):
    """Spaces and plus signs would let one name pass for another."""
    for call in (lambda: vkey(name, KEY.public), lambda: sign_note("x\n", name, KEY)):
        with pytest.raises(FormatError):
            call()


def test_text_without_newline_or_with_control_characters_is_refused():
    """The signed text has exactly one end, and nothing invisible."""
    for text in ("no newline", "tab\t\n", "return\r\n"):
        with pytest.raises(FormatError):
            sign_note(text, NAME, KEY)
    for call in (lambda: SigningKey.from_seed(b"short"), lambda: vkey(NAME, b"short")):
        with pytest.raises(FormatError):
            call()
