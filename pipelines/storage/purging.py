"""Purging: rows leave the Parquet files of all versions, whose identities stay.

A version that held an erased record keeps its roots: the leaf hash stands in for the row. Of a block that tombstoning has already
written without the rows for the next version, that file is taken for the older versions too, so no block is compressed twice::

    version 1:  block A        ──▶  block A' = A without the rows
    version 2:  block A' (tombstones)

Every step can be repeated: maps are replaced one by one, and files that no map names are removed last.
"""

from dataclasses import dataclass
from typing import Final

from pipelines.storage import blocks
from pipelines.storage.archive import Archive
from pipelines.storage.deliveries import file_digest
from pipelines.storage.errors import VersionError
from pipelines.storage.manifest import StorageMap, StoredBlock
from provenance.canonical import write_atomic

_BUT_TEXT: Final = tuple(name for name in blocks.BLOCK_SCHEMA if name != "text")


@dataclass(frozen=True, slots=True)
class Purged:
    """What a physical removal touched."""

    versions: tuple[str, ...]
    """Versions whose files were rewritten."""
    num_rows: int
    """Rows removed, counted once per file."""
    num_files: int
    """Files removed, orphans of crashes included."""


def purged(archive: Archive, gone: set[bytes]) -> Purged:
    """Remove rows from the files of all versions; the caller holds the lock.

    Args:
        archive: the versions of a home.
        gone: 32 bytes each; none may be live in HEAD.

    Returns:
        What was touched.

    Raises:
        VersionError: a record is live in HEAD: tombstone it and move HEAD first.
        OSError: the disk refused; run it again.
    """
    head, checked = archive.head(), set[StoredBlock]()
    if head is not None:
        live = int(archive.read(head, ["record_id"])["record_id"].is_in(list(gone)).sum())
        checked |= set(archive.storage(head).blocks)
        if live:
            raise VersionError(
                f"{live} records are live in HEAD: tombstone them and move HEAD first"
            )
    rewritten: dict[str, tuple[StoredBlock, list[int]]] = {}
    touched: list[str] = []
    maps = {version: archive.storage(version) for version in _mapped(archive)}
    known = {block for storage in maps.values() for block in storage.blocks}
    for version, storage in maps.items():
        parts, erased = [], set(storage.erased)
        for stored in storage.blocks:
            if stored.digest not in rewritten:
                rewritten[stored.digest] = _without(archive, stored, gone, known, checked)
            new, indices = rewritten[stored.digest]
            parts.append(new)
            erased |= set(indices)
        if tuple(parts) != storage.blocks:
            replaced = StorageMap(version, tuple(parts), tuple(sorted(erased)))
            write_atomic(archive.storage_path(version), replaced.data)
            touched.append(version)
    num_rows = sum(len(indices) for _, indices in rewritten.values())
    return Purged(tuple(touched), num_rows, _remove_unreferenced(archive))


def _without(
    archive: Archive,
    stored: StoredBlock,
    gone: set[bytes],
    known: set[StoredBlock],
    checked: set[StoredBlock],
) -> tuple[StoredBlock, list[int]]:
    """A block's file without some rows, and the indices of those.

    Tombstoning has mostly written that file already for the next version. It is taken if all its rows are what would be written,
    because compressing a block costs several times as much as reading it.
    """
    ids = blocks.read_block(archive.home.blocks, stored, ["index", "record_id"])
    found = ids.filter(ids["record_id"].is_in(list(gone)))["index"].to_list()
    if not found:
        return stored, []
    candidates = [other for other in known - {stored} if other.rows == ids.height - len(found)]
    for other in sorted(candidates, key=lambda block: block.digest):
        if _holds(archive, other, stored, found, is_checked=other in checked):
            return other, found
    rows = blocks.read_block(archive.home.blocks, stored)
    kept = rows.filter(~rows["index"].is_in(found))
    return blocks.write_block(archive.home.blocks, kept, archive.keys.k_file), found


def _holds(
    archive: Archive, other: StoredBlock, stored: StoredBlock, found: list[int], *, is_checked: bool
) -> bool:
    """Whether a block's file is undamaged and has exactly the rows of another without some.

    Both files are named by a keyed digest of their bytes, so a row's text is the one that its raw digest was taken of, and
    unpacking and comparing the texts themselves would tell nothing that the digests don't.
    """
    path = archive.home.blocks / other.file
    if not path.exists() or not (
        is_checked or file_digest(path, archive.keys.k_file).hex() == other.digest
    ):
        return False
    rows = blocks.read_block(archive.home.blocks, stored, _BUT_TEXT)
    if rows["raw_digest"].has_nulls():
        rows = blocks.read_block(archive.home.blocks, stored)
    kept = rows.filter(~rows["index"].is_in(found))
    return blocks.read_block(archive.home.blocks, other, rows.columns).equals(kept)


def _mapped(archive: Archive) -> list[str]:
    """Every version that has a storage map, complete or not."""
    return sorted(path.stem for path in archive.home.storage.glob("*.json"))


def _remove_unreferenced(archive: Archive) -> int:
    """Remove block files that no version names; a crash may have left texts in them."""
    named = {
        block.file for version in _mapped(archive) for block in archive.storage(version).blocks
    }
    orphans = [path for path in archive.home.blocks.glob("*.parquet") if path.name not in named]
    for path in orphans:
        path.unlink()
    return len(orphans)
