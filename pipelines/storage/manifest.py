"""The identity of a corpus version, and beside it where its rows lie.

``versions/ID/manifest.json`` is JCS, and ID is the hex SHA-256 of its bytes::

    format, parent, size, live, record_root, sparse_root, canonicalisation,
    owners: {owner: live records}, blocks: [{first, count, row_root}]

``parent`` is an ID or "none"; tombstones are ``size - live``; a ``row_root`` is the RFC 9162 root of
the block's own leaves. Nothing in it depends on a Parquet writer, a disk or a clock, so the same
deliveries under the same keys give the same ID on any machine.

``storage/ID.json`` is outside the identity and can be replaced (after an erasure, a move, a
re-compression)::

    format, version, blocks: [{file, rows, digest}], erased: [index]

``digest`` is HMAC-SHA256(K_file, file bytes). ``erased`` lists indices that the identity still counts
as live but whose rows were physically removed later; their leaf hashes remain in ``storage/ID.leaves``
(32 bytes each), so the roots can still be recomputed, and their salts are gone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines.storage.errors import VersionError
from provenance.canonical import CANONICALISATION, jcs, parse_json
from provenance.hashing import sha256

FORMAT: Final = 1
NO_PARENT: Final = "none"


@dataclass(frozen=True, slots=True)
class Block:
    """A run of leaves that lie in one Parquet file."""

    first: int
    """Index of its first leaf."""
    count: int
    """Number of leaves, tombstones included."""
    row_root: str
    """Hex RFC 9162 root over these leaves alone."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A corpus version."""

    parent: str
    size: int
    """Number of leaves."""
    live: int
    """Number of records, size minus tombstones."""
    record_root: str
    sparse_root: str
    owners: Mapping[str, int]
    """Live records of each owner that has any."""
    blocks: tuple[Block, ...]
    canonicalisation: int = CANONICALISATION

    @property
    def data(self) -> bytes:
        """The bytes of manifest.json."""
        blocks = [
            {"first": block.first, "count": block.count, "row_root": block.row_root}
            for block in self.blocks
        ]
        return jcs(
            {
                "format": FORMAT,
                "parent": self.parent,
                "size": self.size,
                "live": self.live,
                "record_root": self.record_root,
                "sparse_root": self.sparse_root,
                "canonicalisation": self.canonicalisation,
                "owners": dict(self.owners),
                "blocks": blocks,
            }
        )

    @property
    def version(self) -> str:
        """The version id, hex SHA-256 of the bytes."""
        return sha256(self.data).hex()

    @property
    def num_tombstones(self) -> int:
        """Leaves without a record."""
        return self.size - self.live


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The Parquet file of a block."""

    rows: int
    """Records in the file."""
    digest: str
    """Hex HMAC-SHA256(K_file, file bytes)."""

    @property
    def file(self) -> str:
        """File name inside ``blocks/``."""
        return f"{self.digest}.parquet"


@dataclass(frozen=True, slots=True)
class StorageMap:
    """Where the rows of a version lie."""

    version: str
    blocks: tuple[StoredBlock, ...]
    erased: tuple[int, ...] = ()

    @property
    def data(self) -> bytes:
        """The bytes of storage/ID.json."""
        blocks = [
            {"file": block.file, "rows": block.rows, "digest": block.digest}
            for block in self.blocks
        ]
        return jcs(
            {
                "format": FORMAT,
                "version": self.version,
                "blocks": blocks,
                "erased": list(self.erased),
            }
        )


def parse_manifest(data: bytes, version: str) -> Manifest:
    """Read manifest.json, refusing whatever is not exactly of this format.

    Args:
        data: the bytes of the file.
        version: the id it must have.

    Returns:
        The manifest.

    Raises:
        VersionError: other bytes than the id stands for, an unknown format or field.
    """
    what = f"manifest of version {version[:12]}"
    if sha256(data).hex() != version:
        raise VersionError(f"{what}: expected the SHA-256 in its name, got {sha256(data).hex()}")
    fields = _document(data, what, set(Manifest.__slots__))
    blocks = tuple(_build(Block, entry, what) for entry in _list(fields.pop("blocks"), what))
    manifest: Manifest = _build(Manifest, {**fields, "blocks": blocks}, what)
    digests = [manifest.record_root, manifest.sparse_root, *(block.row_root for block in blocks)]
    numbers = [manifest.size, manifest.live, manifest.canonicalisation]
    numbers += [number for block in blocks for number in (block.first, block.count)]
    owners = manifest.owners if isinstance(manifest.owners, dict) else {"": None}
    if (
        not all(_is_digest(digest) for digest in digests)
        or not all(type(number) is int and number >= 0 for number in (*numbers, *owners.values()))
        or not (manifest.parent == NO_PARENT or _is_digest(manifest.parent))
    ):
        raise VersionError(f"{what}: a field holds the wrong kind of value")
    return manifest


def parse_storage(data: bytes, version: str) -> StorageMap:
    """Read storage/ID.json, refusing whatever is not exactly of this format.

    Args:
        data: the bytes of the file.
        version: the id it must state.

    Returns:
        The map.

    Raises:
        VersionError: damaged, of another version, an unknown format or field.
    """
    what = f"storage map of version {version[:12]}"
    fields = _document(data, what, set(StorageMap.__slots__))
    if fields["version"] != version:
        raise VersionError(f"{what}: it is the map of another version")
    blocks = []
    for entry in _list(fields["blocks"], what):
        file = entry.pop("file", None) if isinstance(entry, dict) else None
        block = _build(StoredBlock, entry, what)
        # A file name that is not the digest could point anywhere on the disk.
        if file != block.file or not _is_digest(block.digest):
            raise VersionError(f"{what}: a file is not named by its digest")
        blocks.append(block)
    erased = _list(fields["erased"], what)
    if not all(type(number) is int for number in (*erased, *(block.rows for block in blocks))):
        raise VersionError(f"{what}: a field holds the wrong kind of value")
    return StorageMap(version, tuple(blocks), tuple(erased))


def _document(data: bytes, what: str, names: set[str]) -> dict[str, Any]:
    try:
        document = parse_json(data)
    except ValueError as error:
        raise VersionError(f"{what}: {error}") from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise VersionError(f"{what}: expected format {FORMAT}; use a newer dataworth")
    if document.keys() != names:
        unknown = sorted(document.keys() ^ names)
        raise VersionError(f"{what}: unknown or missing fields {', '.join(unknown)}")
    return document


def _build(kind: Any, fields: Any, what: str) -> Any:
    if not isinstance(fields, dict) or fields.keys() != set(kind.__slots__):
        raise VersionError(f"{what}: unknown or missing fields")
    return kind(**fields)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise VersionError(f"{what}: expected a list")
    return value


def _is_digest(text: Any) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= set("0123456789abcdef")
