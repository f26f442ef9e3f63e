"""What a record leaves in the public tree: a hiding commitment, its owner and its licence.

``commitment = SHA256(tag || salt32 || SHA256(canonical bytes))``. The salt is 32 random bytes, one
per record, in a store of its own. While it exists the owner can open the commitment; when it is
shredded, 32 random-looking bytes remain from which nobody can confirm even a guessed text
(a phone number has only 10^10 values, hours of work for an unsalted digest).

Leaf data of a live record::

    version 0x01 || commitment (32) || owner pseudonym (32) || canonicalisation (1)
                 || length of licence (1) || SPDX licence

so whose it was and under what terms cannot be changed later. Leaf data of an erased one is the
32 bytes ``SHA256(tag_tombstone || index as 8 bytes big-endian)``: the index never moves, and the
two forms differ in length (67 bytes at least against 32).

Source: the commit-and-reveal scheme; tags after BIP 340's domain separation.
"""

from __future__ import annotations

from typing import Final

from provenance.errors import FormatError
from provenance.hashing import HASH_SIZE, MAX_SIZE, sha256

TAG_COMMITMENT: Final = b"dataworth/commitment/v1\n"
TAG_TOMBSTONE: Final = b"dataworth/tombstone/v1\n"

LEAF_VERSION: Final = 1
"""First byte of the leaf data of a live record."""


def commit(salt: bytes, canonical: bytes) -> bytes:
    """The hiding commitment to a text, ``SHA256(tag || salt || SHA256(canonical))``.

    Args:
        salt: 32 random bytes, used for this record only.
        canonical: the output of ``canonical_bytes``.

    Returns:
        32 bytes that say nothing about the text without the salt.

    Raises:
        FormatError: the salt is not 32 bytes long.
    """
    return commit_digest(salt, sha256(canonical))


def commit_digest(salt: bytes, text_digest: bytes) -> bytes:
    """The commitment from the SHA-256 of the canonical bytes, for whoever holds no text.

    Args:
        salt: 32 random bytes, used for this record only.
        text_digest: 32 bytes, SHA-256 of the canonical bytes; secret like the text itself.

    Returns:
        32 bytes.

    Raises:
        FormatError: an argument is not 32 bytes long.
    """
    _check_size("salt", salt)
    _check_size("text digest", text_digest)
    return sha256(TAG_COMMITMENT + salt + text_digest)


def leaf_data(
    commitment: bytes, owner_pseudonym: bytes, canonicalisation: int, licence: str
) -> bytes:
    """The leaf data of a live record.

    Args:
        commitment: 32 bytes, from :func:`commit`.
        owner_pseudonym: 32 bytes, HMAC(K_owner, owner).
        canonicalisation: profile number of the canonical bytes, 0 <= number <= 255.
        licence: SPDX expression, 1 to 255 ASCII characters.

    Returns:
        67 + len(licence) bytes.

    Raises:
        FormatError: a length or a number is out of its range.
    """
    _check_size("commitment", commitment)
    _check_size("owner pseudonym", owner_pseudonym)
    if not 0 <= canonicalisation <= 255:
        raise FormatError(f"canonicalisation profile is one byte, got {canonicalisation}")
    if not licence.isascii() or not 1 <= len(licence) <= 255:
        raise FormatError(f"licence has 1 to 255 ASCII characters, got {licence[:40]!r}")
    tail = bytes((canonicalisation, len(licence))) + licence.encode("ascii")
    return bytes((LEAF_VERSION,)) + commitment + owner_pseudonym + tail


def tombstone_leaf(index: int) -> bytes:
    """The leaf data that an erased or withdrawn record leaves behind.

    Args:
        index: position of the record in the record tree, 0 <= index < 2^63.

    Returns:
        32 bytes; the same for everybody, so anyone can see which index is a tombstone.

    Raises:
        FormatError: the index is out of range.
    """
    if not 0 <= index <= MAX_SIZE:
        raise FormatError(f"index must be in 0 ... 2^63 - 1, got {index}")
    return sha256(TAG_TOMBSTONE + index.to_bytes(8, "big"))


def _check_size(name: str, value: bytes) -> None:
    if len(value) != HASH_SIZE:
        raise FormatError(f"{name} has {HASH_SIZE} bytes, got {len(value)}")
