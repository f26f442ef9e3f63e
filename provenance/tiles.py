"""The ledger as static files that any web server can serve: C2SP tlog-tiles.

::

    checkpoint                     the signed note, with the lines of witnesses behind ours
    tile/0/x001/067                leaf hashes 256 * 1067 ..., 256 * 32 bytes
    tile/0/x001/068.p/17           the last tile so far: 17 hashes
    tile/1/004                     roots over 256 leaves each, 256 of them
    tile/entries/x001/067          the entries themselves, each behind its length in two bytes
    bodies/HEX                     bodies above 32 KiB (ours, not C2SP's)

A full tile never changes, so copies and caches may keep it for ever; partial ones are replaced by
longer ones. The checkpoint is written last: whoever reads it finds every tile that it needs. Readers
compute the root from the tiles (:func:`read_tiles`) and believe nothing that does not lead to it.

Cost: 32 bytes and the entry itself per entry; a second :func:`publish` writes what is new.

Source: C2SP tlog-tiles (c2sp.org/tlog-tiles).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from provenance.canonical import write_atomic
from provenance.errors import FormatError, RootMismatchError
from provenance.hashing import HASH_SIZE
from provenance.merkle import MerkleTree
from provenance.signing import note_text, split_note

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from provenance.ledger import Ledger
    from provenance.signing import Checkpoint

WIDTH: Final = 256
"""Hashes in a full tile."""

_LEVELS_PER_TILE: Final = 8
_MAX_ENTRY: Final = 0xFFFF


def publish(ledger: Ledger, folder: Path, cosigned: bytes = b"") -> int:
    """Write the ledger's signed state as tiles.

    Args:
        ledger: an open ledger; nothing in it changes.
        folder: the folder that is served; made when it is missing.
        cosigned: the ledger's own newest checkpoint with the signature lines of witnesses.

    Returns:
        How many files were written; 0 when the folder was up to date.

    Raises:
        FormatError: ``cosigned`` is not the newest checkpoint.
        OSError: the disk refused; what was published before is still whole.
    """
    note = cosigned or ledger.checkpoint
    if not set(split_note(ledger.checkpoint)[1]) <= set(split_note(note)[1]) or (
        note_text(note) != note_text(ledger.checkpoint)
    ):
        raise FormatError("the cosigned checkpoint is not the ledger's newest one")
    written = 0
    for path, data in _tiles(ledger):
        written += _write(folder / path, data)
    for index in range(ledger.size):
        entry = ledger.entry(index) if b'"body_sha256":' in ledger.entry_bytes(index) else {}
        if "body_sha256" in entry:
            name = f"bodies/{entry['body_sha256']}"
            written += _write(folder / name, (ledger.folder / name).read_bytes())
    target = folder / "checkpoint"
    if not target.exists() or target.read_bytes() != note:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(target, note)
        written += 1
    return written


def read_tiles(fetch: Callable[[str], bytes], checkpoint: Checkpoint) -> MerkleTree:
    """The tree over a published log, computed from its level-0 tiles.

    Args:
        fetch: content of a file by its path below the served folder.
        checkpoint: what was signed, from an opened note.

    Returns:
        The tree, with the signed root.

    Raises:
        FormatError: a tile has another length than its place says.
        RootMismatchError: the tiles lead to another root than was signed.
    """
    hashes: list[bytes] = []
    for number in range(0, checkpoint.size, WIDTH):
        count = min(WIDTH, checkpoint.size - number)
        path = tile_path("0", number // WIDTH, count)
        data = fetch(path)
        if len(data) != count * HASH_SIZE:
            raise FormatError(f"{path} has {len(data)} bytes, expected {count * HASH_SIZE}")
        hashes += (data[at : at + HASH_SIZE] for at in range(0, len(data), HASH_SIZE))
    tree = MerkleTree(hashes)
    if tree.root() != checkpoint.root:
        raise RootMismatchError(checkpoint.root, tree.root())
    return tree


def tile_path(level: str, number: int, count: int = WIDTH) -> str:
    """The path of a tile.

    Args:
        level: the tile's level as a decimal number, or ``entries``.
        number: its place on that level, 0 <= number.
        count: hashes or entries in it, 1 <= count <= 256.

    Returns:
        For instance ``tile/0/x001/067.p/17``.
    """
    groups = [f"{number % 1000:03d}"]
    while number := number // 1000:
        groups.append(f"x{number % 1000:03d}")
    return f"tile/{level}/{'/'.join(reversed(groups))}" + ("" if count == WIDTH else f".p/{count}")


def split_bundle(data: bytes) -> list[bytes]:
    """The entries of an entry bundle.

    Args:
        data: content of ``tile/entries/N``.

    Returns:
        The entries, in order.

    Raises:
        FormatError: a length points behind the end.
    """
    entries, place = [], 0
    while place < len(data):
        end = place + 2 + int.from_bytes(data[place : place + 2], "big")
        if place + 2 > len(data) or end > len(data):
            raise FormatError(f"the entry bundle ends inside the entry at byte {place}")
        entries.append(data[place + 2 : end])
        place = end
    return entries


def _tiles(ledger: Ledger) -> Iterable[tuple[str, bytes]]:
    """Path and content of every tile of the current size, lowest level first."""
    for number in range(0, ledger.size, WIDTH):
        entries = [
            ledger.entry_bytes(index) for index in range(number, min(number + WIDTH, ledger.size))
        ]
        if any(len(entry) > _MAX_ENTRY for entry in entries):
            raise FormatError(f"an entry of a tile has at most {_MAX_ENTRY} bytes")
        bundle = b"".join(len(entry).to_bytes(2, "big") + entry for entry in entries)
        yield tile_path("entries", number // WIDTH, len(entries)), bundle
    level = 0
    while hashes := ledger.tree_level(level * _LEVELS_PER_TILE):
        for at in range(0, len(hashes), WIDTH * HASH_SIZE):
            tile = hashes[at : at + WIDTH * HASH_SIZE]
            path = tile_path(str(level), at // (WIDTH * HASH_SIZE), len(tile) // HASH_SIZE)
            yield path, tile
        level += 1


def _write(path: Path, data: bytes) -> bool:
    """Write a file unless it holds these bytes."""
    if path.exists() and path.stat().st_size == len(data) and path.read_bytes() == data:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data, durable=False)
    return True
