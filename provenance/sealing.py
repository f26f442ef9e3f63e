"""Text at rest that only the holder of a key can read: AES-256-GCM with a versioned header.

Format: ``b"DWS1" || nonce (12) || ciphertext || tag (16)``. The header and the caller's context
(``aad``, for instance the request id) are authenticated: a sealed file that is moved to another
request does not open. Destroying the key destroys every copy of the text (crypto-shredding).

When it is wrong: nonces are random, so one key must not seal more than 2^32 texts (NIST SP 800-38D,
section 8.3); a whole text is held in memory; the length of the text is visible.
"""

from __future__ import annotations

import os
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from provenance.errors import SealError

HEADER: Final = b"DWS1"
"""Magic and format version of a sealed text."""

_NONCE_SIZE: Final = 12
_TAG_SIZE: Final = 16


def seal(key: bytes, plaintext: bytes, aad: bytes = b"") -> bytes:
    """Encrypt and authenticate.

    Args:
        key: 32 random bytes.
        plaintext: at most 2^31 - 1 bytes.
        aad: context that must be the same at opening; it is not stored.

    Returns:
        32 bytes more than the plaintext.

    Raises:
        SealError: the key has the wrong length, or the text is too long.
    """
    cipher = _cipher(key)
    nonce = os.urandom(_NONCE_SIZE)
    try:
        return HEADER + nonce + cipher.encrypt(nonce, plaintext, HEADER + aad)
    except OverflowError:
        raise SealError("text is too long to be sealed in one piece (2^31 - 1 bytes)") from None


def unseal(key: bytes, blob: bytes, aad: bytes = b"") -> bytes:
    """Decrypt, after checking that nothing was changed.

    Args:
        key: the key given to :func:`seal`.
        blob: the output of :func:`seal`.
        aad: the context given to :func:`seal`.

    Returns:
        The plaintext.

    Raises:
        SealError: not a sealed text of this version, wrong key, wrong context or changed bytes.
    """
    if blob[: len(HEADER)] != HEADER or len(blob) < len(HEADER) + _NONCE_SIZE + _TAG_SIZE:
        raise SealError(f"not a sealed text: expected {HEADER!r} first, got {blob[:4]!r}")
    nonce, body = blob[len(HEADER) :][:_NONCE_SIZE], blob[len(HEADER) + _NONCE_SIZE :]
    try:
        return _cipher(key).decrypt(nonce, body, HEADER + aad)
    except InvalidTag:
        message = "cannot open the sealed text: wrong key, wrong context or changed bytes"
        raise SealError(message) from None


def _cipher(key: bytes) -> AESGCM:
    if len(key) != 32:
        raise SealError(f"a sealing key has 32 bytes, got {len(key)}")
    return AESGCM(key)
