"""Salts: 32 random bytes per record that make its commitment hiding, until they are shredded.

``commitment = SHA256(tag || salt || SHA256(canonical bytes))``: with the salt an owner can prove
what a leaf says; without it the leaf says nothing, not even to somebody who guesses the text.
So erasing a record means, last of all, shredding its salt.

The store is one sealed file (AES-256-GCM under k_salts), record id and salt in 64 bytes each, sorted
by id. It is rewritten as a whole, atomically: 64 bytes a record, 64 MB for a million records. A crash
leaves the old store. Salts are kept by record id, so publishing the same records again finds the same
salts and makes the same version id. After shredding, the old file's bytes are overwritten with zeros
before its disk blocks are given back; copies in backups and on flash cells are out of its reach, which
is why backups must be handled with the same care (README).

Demo salts are derived from the record id and the demo key, everything else is the same.
"""

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from pipelines.storage.errors import SaltError
from pipelines.storage.keys import CorpusKeys
from provenance.canonical import keyed, write_atomic
from provenance.errors import SealError
from provenance.sealing import seal, unseal

_AAD: Final = b"dataworth/salts/1"
_SIZE: Final = 32


class SaltStore:
    """The salts of one home. Writers hold the lock ``corpus``."""

    def __init__(self, path: Path, keys: CorpusKeys) -> None:
        """Open a store; a missing file is an empty store.

        Args:
            path: HOME/salts.
            keys: the corpus keys.

        Raises:
            SaltError: the file does not open: other keys, or changed bytes.
        """
        self._path = path
        self._keys = keys
        self._salts = self._read()

    def __len__(self) -> int:
        """Number of salts."""
        return len(self._salts)

    def __contains__(self, record_id: object) -> bool:
        """Whether a record has a salt."""
        return record_id in self._salts

    def get(self, record_id: bytes) -> bytes:
        """The salt of one record.

        Args:
            record_id: 32 bytes.

        Returns:
            32 bytes.

        Raises:
            SaltError: it was shredded, or never made.
        """
        try:
            return self._salts[record_id]
        except KeyError:
            raise SaltError(
                f"no salt for record {record_id.hex()[:12]}: it was shredded, or never made"
            ) from None

    def ensure(self, record_ids: Sequence[bytes]) -> list[bytes]:
        """The salts of some records; missing ones are made and are on disk when this returns.

        Args:
            record_ids: 32 bytes each.

        Returns:
            One salt per record, in order.

        Raises:
            OSError: the disk refused; no salt was kept.
        """
        missing = dict.fromkeys(
            record_id for record_id in record_ids if record_id not in self._salts
        )
        if missing:
            made = {record_id: self._make(record_id) for record_id in missing}
            self._write({**self._salts, **made})
        return [self._salts[record_id] for record_id in record_ids]

    def shred(self, record_ids: Iterable[bytes]) -> int:
        """Destroy salts: no one can open or confirm these commitments any more.

        Args:
            record_ids: 32 bytes each; unknown ones are ignored, so a shredding can be repeated.

        Returns:
            How many were destroyed.

        Raises:
            OSError: the disk refused; nothing was destroyed.
        """
        gone = set(record_ids) & self._salts.keys()
        if gone:
            kept = {
                record_id: salt for record_id, salt in self._salts.items() if record_id not in gone
            }
            with self._path.open("r+b") as old:
                self._write(kept)
                old.write(bytes(os.fstat(old.fileno()).st_size))
                old.flush()
                os.fsync(old.fileno())
        return len(gone)

    def reseal(self, keys: CorpusKeys) -> None:
        """Seal the salts under another key; the salts, and so all commitments, stay.

        Args:
            keys: the corpus keys with another k_salts.

        Raises:
            OSError: the disk refused; the store opens with the old key as before.
        """
        self._keys = keys
        if self._path.exists():
            self._write(self._salts)

    def _make(self, record_id: bytes) -> bytes:
        if self._keys.is_demo:
            return keyed(self._keys.k_salts, b"dataworth/demo salt/" + record_id)
        return secrets.token_bytes(_SIZE)

    def _write(self, salts: dict[bytes, bytes]) -> None:
        plain = b"".join(record_id + salts[record_id] for record_id in sorted(salts))
        write_atomic(self._path, seal(self._keys.k_salts, plain, _AAD), mode=0o600)
        self._salts = salts

    def _read(self) -> dict[bytes, bytes]:
        try:
            plain = unseal(self._keys.k_salts, self._path.read_bytes(), _AAD)
        except FileNotFoundError:
            return {}
        except SealError:
            raise SaltError(
                f"the salt store {self._path.name!r} does not open: it was changed or belongs to other keys; "
                "restore it from a backup"
            ) from None
        step = 2 * _SIZE
        return {
            plain[at : at + _SIZE]: plain[at + _SIZE : at + step]
            for at in range(0, len(plain), step)
        }
