"""What must not come back: a keyed, unpublished list of erased and withdrawn contents.

A user's inbox lies outside the home and may hold an erased text for ever; so intake asks this list
about every record. An *erased* content is refused from whoever delivers it; a *withdrawn* one only
from the owner who withdrew it, since another owner's copy is another contribution.

The list would be an oracle ("was this text ever erased?") for anyone who holds it and can guess
texts. So it keeps HMACs of fingerprints under a key of its own, stands in a file of mode 0600, and
is never exported, signed or committed.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from pipelines.storage.errors import StorageError
from pipelines.storage.keys import CorpusKeys
from provenance.canonical import jcs, keyed, parse_json, write_atomic

FORMAT: Final = 1
ERASED: Final = "erased"
WITHDRAWN: Final = "withdrawn"


class SuppressionList:
    """The suppressed contents of one home. Writers hold the lock ``corpus``."""

    def __init__(self, path: Path, keys: CorpusKeys) -> None:
        """Read the list; a missing file is an empty list.

        Args:
            path: HOME/suppressed.
            keys: the corpus keys.

        Raises:
            StorageError: the file is damaged; going on would let erased texts back in.
        """
        self._path = path
        self._key = keys.sealing_key("suppression")
        self._erased, self._withdrawn = self._read()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._erased) + len(self._withdrawn)

    def reason(self, owner: str, fingerprint: bytes) -> str | None:
        """Why a content is not accepted from an owner.

        Args:
            owner: owner id.
            fingerprint: 32 bytes, the keyed digest of the content.

        Returns:
            ``erased``, ``withdrawn`` or None.
        """
        if not self._erased and not self._withdrawn:
            return None
        if self._entry(fingerprint) in self._erased:
            return ERASED
        return WITHDRAWN if self._entry(fingerprint, owner) in self._withdrawn else None

    def add_erased(self, fingerprints: Iterable[bytes]) -> None:
        """Refuse contents from now on, from everybody.

        Args:
            fingerprints: 32 bytes each.

        Raises:
            OSError: the disk refused; the list is as before.
        """
        self._write(self._erased | {self._entry(item) for item in fingerprints}, self._withdrawn)

    def add_withdrawn(self, owner: str, fingerprints: Iterable[bytes]) -> None:
        """Refuse contents from now on, from one owner.

        Args:
            owner: who withdrew them.
            fingerprints: 32 bytes each.

        Raises:
            OSError: the disk refused; the list is as before.
        """
        self._write(
            self._erased, self._withdrawn | {self._entry(item, owner) for item in fingerprints}
        )

    def take_over(self, other: "SuppressionList") -> None:
        """Refuse what another list of the same corpus refuses, too.

        Args:
            other: read with the same keys.

        Raises:
            OSError: the disk refused; the list is as before.
        """
        if other._erased - self._erased or other._withdrawn - self._withdrawn:  # noqa: SLF001 - our own class
            self._write(self._erased | other._erased, self._withdrawn | other._withdrawn)  # noqa: SLF001 - the same

    def _entry(self, fingerprint: bytes, owner: str = "") -> str:
        return keyed(self._key, fingerprint + owner.encode()).hex()

    def _write(self, erased: set[str], withdrawn: set[str]) -> None:
        document = {"format": FORMAT, ERASED: sorted(erased), WITHDRAWN: sorted(withdrawn)}
        write_atomic(self._path, jcs(document), mode=0o600)
        self._erased, self._withdrawn = erased, withdrawn

    def _read(self) -> tuple[set[str], set[str]]:
        try:
            document = parse_json(self._path.read_bytes())
        except FileNotFoundError:
            return set(), set()
        except ValueError:
            document = None
        if (
            not isinstance(document, dict)
            or document.keys() != {"format", ERASED, WITHDRAWN}
            or document["format"] != FORMAT
        ):
            raise StorageError(
                f"the list {self._path.name!r} is damaged or of another format: erased texts could come back; "
                "restore it from a backup"
            )
        return set(document[ERASED]), set(document[WITHDRAWN])
