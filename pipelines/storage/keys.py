"""The secret keys of one corpus, and what is lost with each of them.

===========  ==============================================  =========================================
key          used for                                        lost with it
===========  ==============================================  =========================================
k_fp         fingerprint = HMAC(k_fp, canonical bytes)       duplicates, absence proofs, suppression
k_id         record_id = HMAC(k_id, owner, source, ...)      the names of all records
k_file       digests of deliveries, blocks and raw texts     finding damaged files
k_owner      owner pseudonym = HMAC(k_owner, owner)          proving whose a leaf is
k_salts      seals the salt store                            every commitment: receipts cannot be made
k_seal       seals the target_confirm part and other texts   the sealed texts
ledger_seed  ed25519 seed of the ledger's signature          signing on; old entries stay verifiable
===========  ==============================================  =========================================

The file is mode 0600. With `DATAWORTH_KEY` (or a key file) in the environment it is also sealed, AES-256-GCM: then nothing in
the home opens the salts or signs without what is kept elsewhere.

One key per purpose: a digest that is stored under one of them never doubles as a key of another.

The default corpus, tests and benchmarks use :meth:`CorpusKeys.demo`, fixed keys that everybody
knows, so that roots and numbers can be reproduced; whatever they sign says ``demo``. A user's inbox
never gets them: :func:`load_or_create` draws random ones unless it is told otherwise.
"""

import contextlib
import dataclasses
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pipelines.settings import home_key
from pipelines.storage.errors import KeysError
from provenance.canonical import jcs, keyed, parse_json, sync_folder, write_atomic
from provenance.errors import SealError
from provenance.hashing import sha256
from provenance.sealing import HEADER, seal, unseal

FORMAT: Final = 1
_AAD: Final = b"dataworth/keys/1"
_DEMO_TAG: Final = b"dataworth/demo key, known to everybody/"


@dataclass(frozen=True, slots=True)
class CorpusKeys:
    """Seven keys of 32 bytes; ``repr`` shows none of them."""

    k_fp: bytes = field(repr=False)
    k_id: bytes = field(repr=False)
    k_file: bytes = field(repr=False)
    k_owner: bytes = field(repr=False)
    k_salts: bytes = field(repr=False)
    k_seal: bytes = field(repr=False)
    ledger_seed: bytes = field(repr=False)
    is_demo: bool = False

    def __post_init__(self) -> None:
        """Seven different keys of the right length."""
        values = [getattr(self, name) for name in _NAMES]
        if any(len(value) != 32 for value in values) or len(set(values)) != len(values):
            raise KeysError("a corpus has seven different keys of 32 bytes")

    @classmethod
    def demo(cls) -> "CorpusKeys":
        """The fixed keys of the default corpus; they protect nothing."""
        return _from({name: sha256(_DEMO_TAG + name.encode()) for name in _NAMES}, is_demo=True)

    @classmethod
    def random(cls) -> "CorpusKeys":
        """Fresh keys from the operating system."""
        return _from({name: secrets.token_bytes(32) for name in _NAMES}, is_demo=False)

    def sealing_key(self, purpose: str) -> bytes:
        """A key of its own for one kind of sealed text.

        Args:
            purpose: for instance ``target_confirm``.

        Returns:
            32 bytes, derived from k_seal, which seals nothing itself.
        """
        return keyed(self.k_seal, b"dataworth/sealing/" + purpose.encode())


_NAMES: Final = tuple(
    part.name for part in dataclasses.fields(CorpusKeys) if part.name != "is_demo"
)


LOST: Final = {
    "k_fp": ("fingerprints of contents", "duplicates are no longer found, and no absence can be proven"),
    "k_id": ("record ids", "the names of all records"),
    "k_file": ("digests of deliveries and blocks", "damaged files are no longer found"),
    "k_owner": ("owner pseudonyms", "nobody can prove whose a leaf is, or that a price is an owner's"),
    "k_salts": ("the sealed salts", "every commitment: no receipt can be made again"),
    "k_seal": ("sealed texts, target_confirm, the suppression list", "the sealed texts, and erased contents could come back"),
    "ledger_seed": ("the ledger's signature", "signing on; old entries stay verifiable"),
}  # fmt: skip
"""What each key is used for, and what is lost with it."""


def save(keys: CorpusKeys, path: Path) -> None:
    """Write the key file, mode 0600, atomically; sealed when the environment holds a key.

    Args:
        keys: the keys.
        path: HOME/keys.

    Raises:
        OSError: the disk refused.
    """
    data, wrap = encode(keys), home_key()
    write_atomic(path, data if wrap is None else seal(wrap, data, _AAD), mode=0o600)


def encode(keys: CorpusKeys) -> bytes:
    """The keys as the plain bytes of a key file.

    Args:
        keys: the keys.

    Returns:
        JCS and a newline.
    """
    document = {name: getattr(keys, name).hex() for name in _NAMES}
    return jcs({"format": FORMAT, "demo": keys.is_demo, **document}) + b"\n"


def shown(key: bytes) -> str:
    """Eight hex digits by which two people can compare a key without showing it.

    Args:
        key: 32 bytes.

    Returns:
        The beginning of a keyed digest; it says nothing about the key.
    """
    return keyed(key, b"dataworth/shown key").hex()[:8]


def load(path: Path) -> CorpusKeys:
    """Read the key file.

    Args:
        path: HOME/keys.

    Returns:
        The keys.

    Raises:
        KeysError: missing, readable by other users, damaged or of another format.
    """
    try:
        mode = path.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise KeysError(
                f"the key file can be read by other users (mode {mode & 0o777:o}): chmod 600 it"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise KeysError(
            "no key file in this home: run `dataworth keys init`, or import a backup of the keys"
        ) from None
    except PermissionError:
        raise KeysError("the key file belongs to another user") from None
    return decode(_opened(data))


def _opened(data: bytes) -> bytes:
    if not data.startswith(HEADER):
        return data
    wrap = home_key()
    if wrap is None:
        raise KeysError(
            "the key file is sealed: set DATAWORTH_KEY, or DATAWORTH_KEY_FILE to the file that holds it"
        )
    try:
        return unseal(wrap, data, _AAD)
    except SealError:
        raise KeysError("the key file does not open with the DATAWORTH_KEY that is set") from None


def decode(data: bytes) -> CorpusKeys:
    """The keys that plain bytes hold.

    Args:
        data: from :func:`encode`.

    Returns:
        The keys.

    Raises:
        KeysError: damaged, or of another format.
    """
    try:
        document = parse_json(data)
    except ValueError:
        raise KeysError("the key file is damaged: import a backup of the keys") from None
    if not isinstance(document, dict) or document.keys() != {"format", "demo", *_NAMES}:
        raise KeysError("the key file has unknown or missing fields: import a backup of the keys")
    if document["format"] != FORMAT:
        raise KeysError(
            f"the key file has format {document['format']!r}, this program knows {FORMAT}"
        )
    try:
        values = {name: bytes.fromhex(document[name]) for name in _NAMES}
    except (TypeError, ValueError):
        raise KeysError(
            "the key file holds something that is not hexadecimal: import a backup"
        ) from None
    return _from(values, is_demo=document["demo"] is True)


def load_or_create(path: Path, *, demo: bool) -> CorpusKeys:
    """The keys of a home, made at the first call.

    Args:
        path: HOME/keys.
        demo: whether a *new* key file gets the demo keys; an existing one stays as it is.

    Returns:
        The keys.

    Raises:
        KeysError: an existing key file cannot be used.
        OSError: the disk refused.
    """
    if not os.path.lexists(path):
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            save(CorpusKeys.demo() if demo else CorpusKeys.random(), fresh)
            # A link, not a rename: of two processes at once the second must not replace the keys.
            with contextlib.suppress(FileExistsError):
                os.link(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
        sync_folder(path.parent)
    return load(path)


def _from(values: dict[str, bytes], *, is_demo: bool) -> CorpusKeys:
    fields: dict[str, Any] = {**values, "is_demo": is_demo}
    return CorpusKeys(**fields)
