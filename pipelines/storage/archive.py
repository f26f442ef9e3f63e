"""The reading side of the corpus: versions by id, their rows, leaves and differences.

Everything here can run beside a writer and in another process: a version that has a manifest is complete
and never changes its identity; files are only ever added under new names, or removed by an erasure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from pipelines.storage import blocks
from pipelines.storage.deliveries import FileProblem, file_digest
from pipelines.storage.errors import CorruptionError, UnknownVersionError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.manifest import (
    Block,
    Manifest,
    StorageMap,
    StoredBlock,
    parse_manifest,
    parse_storage,
)
from provenance.hashing import HASH_SIZE
from provenance.merkle import MerkleTree, root_of

_DIFF_COLUMNS: Final = ("record_id", "owner", "source", "position")


@dataclass(frozen=True, slots=True)
class Diff:
    """What is different in version B, seen from version A."""

    added: pl.DataFrame
    """Records of B that A has not: record_id, owner, source, position."""
    removed: pl.DataFrame
    """Records of A that B has not."""
    per_owner: dict[str, tuple[int, int]]
    """owner: (added, removed)."""


class Archive:
    """The versions of one home, for readers."""

    def __init__(self, home: Home, keys: CorpusKeys) -> None:
        """Make the object; nothing is read.

        Args:
            home: a created home.
            keys: its keys.
        """
        self.home = home
        self.keys = keys

    def head(self) -> str | None:
        """The version in force, or None if nothing was published yet."""
        try:
            return self.home.head_path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            return None

    def ids(self) -> list[str]:
        """All complete versions, sorted by id."""
        return sorted(path.parent.name for path in self.home.versions.glob("*/manifest.json"))

    def manifest(self, version: str) -> Manifest:
        """The identity of a version.

        Args:
            version: its id.

        Returns:
            The checked manifest.

        Raises:
            UnknownVersionError: there is no such version.
            VersionError: the file is not the one that the id stands for.
        """
        return parse_manifest(_read(self.manifest_path(version), version), version)

    def storage(self, version: str) -> StorageMap:
        """Where the rows of a version lie.

        Args:
            version: its id.

        Returns:
            The map.

        Raises:
            UnknownVersionError: there is no such version.
            VersionError: the map is damaged.
        """
        return parse_storage(_read(self.storage_path(version), version), version)

    def scan(self, version: str) -> pl.LazyFrame:
        """The live records of a version, read when needed and not checked.

        Args:
            version: its id.

        Returns:
            ``index`` and the columns of a record, by index.

        Raises:
            UnknownVersionError: there is no such version.
        """
        files = [self.home.blocks / block.file for block in self.storage(version).blocks]
        return pl.scan_parquet(files)

    def read(self, version: str, columns: Sequence[str] | None = None) -> pl.DataFrame:
        """The live records of a version; the digest of every file is checked on the way.

        Args:
            version: its id.
            columns: which columns; all if None.

        Returns:
            Rows by index.

        Raises:
            UnknownVersionError: there is no such version.
            CorruptionError: a file was changed or is missing.
        """
        return pl.concat([rows for _, rows in self.iter_blocks(version, columns)])

    def iter_blocks(
        self, version: str, columns: Sequence[str] | None = None
    ) -> Iterator[tuple[Block, pl.DataFrame]]:
        """The blocks of a version one after the other: bounded memory for a corpus of any size.

        Args:
            version: its id.
            columns: which columns; all if None.

        Yields:
            Each block with its live rows by index.

        Raises:
            UnknownVersionError: there is no such version.
            CorruptionError: a file was changed or is missing.
        """
        manifest, storage = self.manifest(version), self.storage(version)
        for block, stored in zip(manifest.blocks, storage.blocks, strict=True):
            finding = self.file_finding(block, stored)
            if finding:
                raise CorruptionError(version, (finding,))
            yield block, blocks.read_block(self.home.blocks, stored, columns)

    def leaves(self, version: str) -> list[bytes]:
        """The leaf hashes of a version, checked against its root.

        Args:
            version: its id.

        Returns:
            32 bytes per index, tombstones included.

        Raises:
            UnknownVersionError: there is no such version.
            CorruptionError: they do not lead to the committed root.
        """
        leaves = self.stored_leaves(version)
        if root_of(leaves).hex() != self.manifest(version).record_root:
            raise self._other_leaves(version)
        return leaves

    def tree(self, version: str) -> MerkleTree:
        """The tree over the leaf hashes of a version, checked against its root.

        Args:
            version: its id.

        Returns:
            A tree of the caller's own.

        Raises:
            UnknownVersionError: there is no such version.
            CorruptionError: they do not lead to the committed root.
        """
        tree = MerkleTree(self.stored_leaves(version))
        if tree.root().hex() != self.manifest(version).record_root:
            raise self._other_leaves(version)
        return tree

    def diff(self, old: str, new: str) -> Diff:
        """Which records one version has and another has not.

        Args:
            old: id of version A.
            new: id of version B.

        Returns:
            Added and removed records, and both counts per owner.

        Raises:
            UnknownVersionError: there is no such version.
            CorruptionError: a file was changed or is missing.
        """
        before, after = self.read(old, _DIFF_COLUMNS), self.read(new, _DIFF_COLUMNS)
        added = after.join(before, on="record_id", how="anti", maintain_order="left")
        removed = before.join(after, on="record_id", how="anti", maintain_order="left")
        gains, losses = (
            dict(part.group_by("owner").len().iter_rows()) for part in (added, removed)
        )
        per_owner = {
            owner: (gains.get(owner, 0), losses.get(owner, 0))
            for owner in sorted(gains.keys() | losses.keys())
        }
        return Diff(added, removed, per_owner)

    def stored_leaves(self, version: str) -> list[bytes]:
        """The leaf hashes as they are stored, not checked.

        Args:
            version: its id.

        Returns:
            32 bytes per index.

        Raises:
            UnknownVersionError: there is no such version.
        """
        data = _read(self.leaves_path(version), version)
        return [data[at : at + HASH_SIZE] for at in range(0, len(data), HASH_SIZE)]

    def file_finding(self, block: Block, stored: StoredBlock) -> str | None:
        """What is wrong with the file of a block as a file, or None.

        Args:
            block: which block.
            stored: its file.

        Returns:
            One line that names the block and the file.
        """
        where = f"block at leaf {block.first} (blocks/{stored.file[:12]}....parquet)"
        try:
            digest = file_digest(self.home.blocks / stored.file, self.keys.k_file).hex()
        except FileNotFoundError:
            return f"{where}: the file is missing"
        except (OSError, FileProblem):
            return f"{where}: the file cannot be read"
        return None if digest == stored.digest else f"{where}: the file was changed"

    def manifest_path(self, version: str) -> Path:
        """versions/ID/manifest.json."""
        return self.home.versions / version / "manifest.json"

    def storage_path(self, version: str) -> Path:
        """storage/ID.json."""
        return self.home.storage / f"{version}.json"

    def crown_path(self, version: str) -> Path:
        """storage/ID.crown, hashes from which the next version's sparse root follows; it can be made again."""
        return self.home.storage / f"{version}.crown"

    def leaves_path(self, version: str) -> Path:
        """storage/ID.leaves."""
        return self.home.storage / f"{version}.leaves"

    def _other_leaves(self, version: str) -> CorruptionError:
        finding = f"storage/{version[:12]}....leaves does not lead to the record root"
        return CorruptionError(version, (finding,))


def _read(path: Path, version: str) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        message = f"no corpus version {version[:12]} in this home ({path.name} is missing)"
        raise UnknownVersionError(message) from None
