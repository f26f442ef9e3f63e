"""Key rotation: a root key, kept offline, signs which key may sign which sizes of the log.

The list is a signed note::

    dataworth key list v1
    example.com/log                     origin of the log
    2                                   serial number: a list with a larger one replaces this one
    0 example.com/log+1a2b3c4d+AT...    from this size on checkpoints are signed by this key,
    812 example.com/log+99887766+AX...  from that size on by that one

    \u2014 example.com/log/root SIGNATURE

A key signs sizes from its own first one up to the next key's: whoever steals a retired key can
neither extend the log nor sign a second ending, because a larger size under the old key is refused.
What it can still do is sign another history of *its own* sizes, which a kept checkpoint or a witness
shows. Whoever holds the root's vkey needs no other trust; the list may come from anywhere.

Source: C2SP signed-note (unknown keys are ignored, so rotation needs a rule of its own); TUF's root
role for the idea of an offline key (theupdateframework.io, specification 1.0, section 2.1.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from provenance.errors import FormatError, SignatureError
from provenance.hashing import MAX_SIZE
from provenance.signing import parse_vkey, sign_note, verify_note

if TYPE_CHECKING:
    from provenance.signing import SigningKey

_HEADER: Final = "dataworth key list v1"
_ROW: Final = re.compile(r"(0|[1-9][0-9]{0,18}) (\S+)")
_NUMBER: Final = re.compile(r"[1-9][0-9]{0,15}")


@dataclass(frozen=True, slots=True)
class KeyList:
    """Which key signs which sizes of one log."""

    origin: str
    """Name of the log, and of each of its keys."""
    serial: int
    """1 for the first list; a later list has a larger one."""
    keys: tuple[tuple[int, str], ...]
    """Smallest size and vkey of each key, in order; the first one begins at size 0."""

    def __post_init__(self) -> None:
        """Refuse a list that leaves a size without a key, or names another log.

        Raises:
            FormatError: a number, an order or a name is not allowed.
        """
        firsts = [first for first, _ in self.keys]
        if not 1 <= self.serial < 10**16:
            raise FormatError(f"the serial number of a key list is at least 1, got {self.serial}")
        if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)) or firsts[-1] > MAX_SIZE:
            raise FormatError(f"a key list begins at size 0 and rises, got {firsts[:8]}")
        for _, line in self.keys:
            name, _ = parse_vkey(line)
            if name != self.origin:
                raise FormatError(f"expected keys of {self.origin}, got one of {name}")

    def vkey_at(self, size: int) -> str:
        """The key that signs the checkpoint of a size.

        Args:
            size: number of entries, 0 <= size.

        Returns:
            Its vkey.

        Raises:
            FormatError: the size is negative.
        """
        if size < 0:
            raise FormatError(f"a size is not negative, got {size}")
        return [line for first, line in self.keys if first <= size][-1]

    def rotated(self, first: int, vkey: str) -> KeyList:
        """The list in which another key takes over.

        Args:
            first: smallest size that it signs, above the first size of the last key.
            vkey: its vkey.

        Returns:
            The list with the next serial number.

        Raises:
            FormatError: the size does not rise, or the key is of another log.
        """
        return KeyList(self.origin, self.serial + 1, (*self.keys, (first, vkey)))

    def text(self) -> str:
        """The text that the root key signs.

        Returns:
            Lines, each with its newline.
        """
        rows = [f"{first} {line}" for first, line in self.keys]
        return "\n".join([_HEADER, self.origin, str(self.serial), *rows, ""])


def root_name(origin: str) -> str:
    """The name under which the root key of a log signs.

    Args:
        origin: name of the log.

    Returns:
        The origin and ``/root``.
    """
    return f"{origin}/root"


def sign_key_list(keys: KeyList, root: SigningKey) -> bytes:
    """Sign a key list.

    Args:
        keys: the list.
        root: the offline key.

    Returns:
        The signed note.
    """
    return sign_note(keys.text(), root_name(keys.origin), root)


def open_key_list(note: bytes | str, root_vkey: str, newer_than: int = 0) -> KeyList:
    """The content of a signed key list.

    Args:
        note: the signed note.
        root_vkey: vkey of the root key, from a source you trust.
        newer_than: serial number of the list that is known; an older one is a rollback.

    Returns:
        The list.

    Raises:
        FormatError: the text is no key list.
        SignatureError: not signed by the root key, of another log, or older than the known list.
    """
    lines = verify_note(note, root_vkey).split("\n")
    if lines[0] != _HEADER or len(lines) < 5 or lines[-1] or not _NUMBER.fullmatch(lines[2]):
        raise FormatError(f"expected a text that begins with {_HEADER!r}, got {lines[0][:40]!r}")
    rows = [_ROW.fullmatch(line) for line in lines[3:-1]]
    parsed = [(int(row[1]), row[2]) for row in rows if row]
    if len(parsed) != len(rows):
        raise FormatError("a row of a key list is a size, a space and a vkey")
    found = KeyList(lines[1], int(lines[2]), tuple(parsed))
    if root_name(found.origin) != parse_vkey(root_vkey)[0]:
        raise SignatureError(
            f"expected a key list of the log of {parse_vkey(root_vkey)[0]}, got one of {found.origin}"
        )
    if found.serial < newer_than:
        raise SignatureError(
            f"expected a key list of serial {newer_than} or later, got {found.serial}"
        )
    return found
