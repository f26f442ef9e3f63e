"""Signed notes and checkpoints: who says that the log has this size and this root.

A *note* is text, an empty line, and signature lines ``— NAME base64(key id || signature)``. A
*checkpoint* is a note of three lines: origin, size, base64 root. The *vkey* ``NAME+key id+base64``
is the whole trust anchor: one line of ASCII that a person can paste or print. Signatures by unknown
keys are ignored (that is how a key is rotated and how witnesses join), but a bad signature by the
known key refuses the note. Base64 is accepted in its one canonical spelling only, so a flipped bit
is never silent.

The demo key is public by construction. It signs only under names that contain "demo", so nobody
can mistake a reproducible demonstration for a statement by somebody.

Source: C2SP signed-note, tlog-checkpoint (c2sp.org); RFC 8032 (Ed25519).
"""

from __future__ import annotations

import base64
import binascii
import os
from dataclasses import dataclass, field
from typing import Final, Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from provenance.errors import FormatError, SignatureError
from provenance.hashing import HASH_SIZE, MAX_SIZE, sha256

ED25519: Final = b"\x01"
"""Signature type byte of C2SP signed-note."""

COSIGNATURE: Final = b"\x04"
"""Signature type byte of a witness's timestamped Ed25519 cosignature (C2SP tlog-cosignature)."""

DEMO_SEED: Final = sha256(b"dataworth demo signing seed: public, never for real data")
"""Seed of the demo key; everybody can compute it."""

MAX_NOTE_BYTES: Final = 1 << 20
_DASH: Final = "\u2014 "


@dataclass(frozen=True, slots=True)
class SigningKey:
    """An Ed25519 key, held as its 32-byte seed."""

    seed: bytes = field(repr=False)
    """32 secret bytes; kept out of ``repr`` so that it cannot reach a log."""

    def __post_init__(self) -> None:
        """Refuse a seed of another length.

        Raises:
            FormatError: the seed is not 32 bytes long.
        """
        if len(self.seed) != 32:
            raise FormatError(f"an Ed25519 seed has 32 bytes, got {len(self.seed)}")

    @classmethod
    def generate(cls) -> Self:
        """A new key from the system's random source.

        Returns:
            The key.
        """
        return cls(os.urandom(32))

    @classmethod
    def from_seed(cls, seed: bytes) -> Self:
        """The key of a stored seed.

        Args:
            seed: 32 bytes.

        Returns:
            The key.

        Raises:
            FormatError: the seed is not 32 bytes long.
        """
        return cls(seed)

    @classmethod
    def demo(cls) -> Self:
        """The fixed, public key of demonstrations and tests.

        Returns:
            The key of :data:`DEMO_SEED`.
        """
        return cls(DEMO_SEED)

    @property
    def public(self) -> bytes:
        """The 32-byte public key."""
        public_key = Ed25519PrivateKey.from_private_bytes(self.seed).public_key()
        return public_key.public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, message: bytes) -> bytes:
        """Sign bytes.

        Args:
            message: any bytes.

        Returns:
            64 bytes.
        """
        return Ed25519PrivateKey.from_private_bytes(self.seed).sign(message)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a signed checkpoint says."""

    origin: str
    """Name of the log."""
    size: int
    """Number of entries."""
    root: bytes
    """32 bytes, the root over the entries."""


def vkey(name: str, public: bytes, kind: bytes = ED25519) -> str:
    """The verifier key: name, key id and public key in one line.

    Args:
        name: key name without white space and plus, by custom the origin of the log.
        public: 32 bytes.
        kind: :data:`ED25519`, or :data:`COSIGNATURE` for a witness.

    Returns:
        ``NAME+8 hex digits+base64(kind || public)``.

    Raises:
        FormatError: the name is not allowed, or the key is not 32 bytes long.
    """
    _check_name(name)
    if len(public) != 32:
        raise FormatError(f"an Ed25519 public key has 32 bytes, got {len(public)}")
    return f"{name}+{key_id(name, public, kind).hex()}+{encode_base64(kind + public)}"


def parse_vkey(text: str, kind: bytes = ED25519) -> tuple[str, bytes]:
    """Name and public key of a vkey.

    Args:
        text: one line, from :func:`vkey`.
        kind: the signature type that is expected.

    Returns:
        The name and the 32-byte public key.

    Raises:
        FormatError: not a vkey, another algorithm, or a key id that does not fit.
    """
    parts = text.split("+", 2)
    if len(parts) != 3:
        raise FormatError("a vkey has the form NAME+KEYID+BASE64")
    name, stated, encoded = parts
    _check_name(name)
    key = decode_base64(encoded)
    if key[:1] != kind or len(key) != 33:
        raise FormatError(
            f"only Ed25519 vkeys (type {kind.hex()}, 33 bytes), got {key[:1].hex()}, {len(key)}"
        )
    if key_id(name, key[1:], kind).hex() != stated:
        raise FormatError(f"key id {stated!r} does not belong to this name and key")
    return name, key[1:]


def sign_note(text: str, name: str, key: SigningKey) -> bytes:
    """Sign a text as a note.

    Args:
        text: ends with a newline; no other control characters.
        name: key name; contains "demo" if ``key`` is the demo key.
        key: the signing key.

    Returns:
        The note in UTF-8.

    Raises:
        FormatError: the text or the name is not allowed.
    """
    _check_name(name)
    if not text.endswith("\n") or any(ord(letter) < 32 and letter != "\n" for letter in text):
        raise FormatError("the text of a note ends with a newline and has no control characters")
    if key.seed == DEMO_SEED and "demo" not in name:
        raise FormatError(
            f'the demo key signs only under a name that contains "demo", got {name!r}'
        )
    message = text.encode("utf-8")
    return message + b"\n" + signature_line(name, key_id(name, key.public) + key.sign(message))


def verify_note(note: bytes | str, vkey: str) -> str:
    """The text of a note, after its signature was checked.

    Args:
        note: the whole note.
        vkey: the verifier key that the caller trusts.

    Returns:
        The signed text, final newline included.

    Raises:
        FormatError: the vkey is malformed.
        SignatureError: not a note, no signature by this key, or a wrong one.
    """
    name, public = parse_vkey(vkey)
    text, signatures = split_note(note)
    wanted = key_id(name, public)
    mine = [blob[4:] for who, blob in signatures if who == name and blob[:4] == wanted]
    if not mine:
        names = ", ".join(sorted({who for who, _ in signatures}))
        raise SignatureError(f"expected a signature by {name}+{wanted.hex()}, got one by: {names}")
    for signature in mine:
        try:
            Ed25519PublicKey.from_public_bytes(public).verify(signature, text.encode("utf-8"))
        except InvalidSignature:
            raise SignatureError(f"the signature by {name} does not fit the text") from None
    return text


def checkpoint_text(origin: str, size: int, root: bytes) -> str:
    """The three lines of a checkpoint.

    Args:
        origin: name of the log, without white space and plus.
        size: number of entries, 0 <= size < 2^63.
        root: 32 bytes.

    Returns:
        The text to be signed.

    Raises:
        FormatError: an argument is out of range.
    """
    _check_name(origin)
    if not 0 <= size <= MAX_SIZE or len(root) != HASH_SIZE:
        raise FormatError(f"expected 0 <= size < 2^63 and a 32-byte root, got {size}, {len(root)}")
    return f"{origin}\n{size}\n{encode_base64(root)}\n"


def parse_checkpoint(text: str) -> Checkpoint:
    """What the text of a checkpoint says; its signature must have been checked before.

    Args:
        text: the text of the note, from :func:`verify_note`.

    Returns:
        Origin, size and root.

    Raises:
        FormatError: not three lines, or extension lines, or a second spelling of a number.
    """
    lines = text.split("\n")
    if len(lines) != 4 or lines[3]:
        raise FormatError(
            f"a checkpoint has three lines (origin, size, root), got {len(lines) - 1}"
        )
    origin, size, root = lines[:3]
    if not (size.isascii() and size.isdigit() and len(size) < 20 and str(int(size)) == size):
        raise FormatError("the second line of a checkpoint is a decimal size")
    checkpoint = Checkpoint(origin, int(size), decode_base64(root))
    checkpoint_text(checkpoint.origin, checkpoint.size, checkpoint.root)  # ranges, name
    return checkpoint


def open_checkpoint(note: bytes | str, vkey: str) -> Checkpoint:
    """The content of a signed checkpoint of the log that the vkey names.

    Args:
        note: the signed checkpoint.
        vkey: the verifier key; its name must be the origin of the log.

    Returns:
        Origin, size and root, all of them signed.

    Raises:
        FormatError: the vkey or the checkpoint text is malformed.
        SignatureError: wrong signature, or a checkpoint of another log.
    """
    checkpoint = parse_checkpoint(verify_note(note, vkey))
    name, _ = parse_vkey(vkey)
    if checkpoint.origin != name:
        raise SignatureError(f"expected a checkpoint of {name}, got one of {checkpoint.origin}")
    return checkpoint


def note_text(note: bytes | str) -> str:
    """The text of a note *without* checking who signed it, for a reader that has no key yet.

    Args:
        note: the whole note.

    Returns:
        The text; not to be trusted.

    Raises:
        SignatureError: not a note.
    """
    return split_note(note)[0]


def decode_base64(text: str) -> bytes:
    """Decode standard base64 in its one canonical spelling.

    Args:
        text: base64 with padding.

    Returns:
        The bytes.

    Raises:
        FormatError: not base64, or a second spelling of the same bytes (unused bits set).
    """
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise FormatError(f"not base64: {text[:16]!r}") from None
    if encode_base64(data) != text:
        raise FormatError(f"base64 with unused bits set: {text[:16]!r}")
    return data


def split_note(note: bytes | str) -> tuple[str, list[tuple[str, bytes]]]:
    """Text and signatures of a note, none of them checked.

    Args:
        note: the whole note.

    Returns:
        The text, and name and blob (key id, then signature) of each signature line.

    Raises:
        SignatureError: not a note.
    """
    try:
        whole = note.decode("utf-8") if isinstance(note, bytes) else note
    except UnicodeDecodeError:
        raise SignatureError("a note is UTF-8 text") from None
    text, blank, tail = whole.rpartition("\n\n")
    if len(whole) > MAX_NOTE_BYTES or not blank or not tail.endswith("\n"):
        raise SignatureError("not a signed note: expected text, an empty line, signature lines")
    signatures = []
    for line in tail[:-1].split("\n"):
        name, space, encoded = line.removeprefix(_DASH).partition(" ")
        try:
            blob = decode_base64(encoded)
        except FormatError:
            blob = b""
        if not line.startswith(_DASH) or not name or not space or len(blob) < 5:
            raise SignatureError("not a signed note: malformed signature line")
        signatures.append((name, blob))
    return text + "\n", signatures


def signature_line(name: str, blob: bytes) -> bytes:
    """One signature line of a note.

    Args:
        name: key name.
        blob: key id, then the signature.

    Returns:
        The line in UTF-8, with its newline.
    """
    return f"{_DASH}{name} {encode_base64(blob)}\n".encode()


def key_id(name: str, public: bytes, kind: bytes = ED25519) -> bytes:
    """The four bytes by which a note names the key of a signature; a hint, never a proof.

    Args:
        name: key name.
        public: 32 bytes.
        kind: signature type.

    Returns:
        The first 4 bytes of SHA-256 over name, newline, type and key.
    """
    return sha256(name.encode("utf-8") + b"\n" + kind + public)[:4]


def _check_name(name: str) -> None:
    if not name or "+" in name or any(letter.isspace() or ord(letter) < 32 for letter in name):
        raise FormatError(f"a key name is not empty and has no white space and no plus: {name!r}")


def encode_base64(data: bytes) -> str:
    """Standard base64 with padding.

    Args:
        data: any bytes.

    Returns:
        ASCII text.
    """
    return base64.b64encode(data).decode("ascii")
