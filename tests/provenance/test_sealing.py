"""Sealed texts: nobody without the key and the context reads or changes them."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as st

from provenance import SealError, seal, unseal

KEY = bytes(range(32))


@given(st.binary(max_size=200), st.binary(max_size=20))
def test_what_is_sealed_opens_again(plaintext, context):
    """Law: unseal inverts seal, with 32 bytes more and never twice the same bytes."""
    blob = seal(KEY, plaintext, context)
    assert unseal(KEY, blob, context) == plaintext
    assert len(blob) == len(plaintext) + 32
    assert blob != seal(KEY, plaintext, context)


def test_the_written_format_opens_with_the_library_alone():
    """Header, nonce, ciphertext: a reader needs AES-GCM and this line, not our code."""
    blob = seal(KEY, b"text", b"request-1")
    assert blob[:4] == b"DWS1"
    assert AESGCM(KEY).decrypt(blob[4:16], blob[16:], b"DWS1request-1") == b"text"


def test_attack_every_flipped_bit_is_noticed():
    """Each single bit of header, nonce, ciphertext and tag."""
    blob = seal(KEY, b"secret")
    for bit in range(8 * len(blob)):
        forged = bytearray(blob)
        forged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(SealError):
            unseal(KEY, bytes(forged))


def test_wrong_key_wrong_context_and_short_blobs_are_refused():
    """A sealed file moved to another request does not open; a torn one neither."""
    blob = seal(KEY, b"secret", b"request-1")
    attempts = [(b"\x01" * 32, blob, b"request-1"), (KEY, blob, b"request-2")]
    attempts += [(KEY, blob[:length], b"request-1") for length in range(len(blob))]
    for key, data, context in attempts:
        with pytest.raises(SealError):
            unseal(key, data, context)
    with pytest.raises(SealError, match="32 bytes, got 16"):
        seal(bytes(16), b"secret")
