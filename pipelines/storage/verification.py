"""Verification: every root of a version from its rows, tombstones and salts, and where it fails.

A root only says *that* something changed. The stored leaf hashes say where: the leaf of each row is computed
anew and compared with the stored one, and both lead, or do not lead, to the committed roots:

=======================  ====================  ===========================================
computed leaves lead     stored leaves lead    so
to the block's root      to the block's root
=======================  ====================  ===========================================
yes                      yes                   the block is good
yes                      no                    storage/ID.leaves was changed
no                       yes                   rows or salts were changed: those that differ
no                       no                    both were changed, or the keys are others
=======================  ====================  ===========================================

A row whose text still has its fingerprint but whose leaf differs has lost its salt, owner or licence.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from pipelines.storage import blocks
from pipelines.storage.archive import Archive
from pipelines.storage.errors import CorruptionError, SaltError, VersionError
from pipelines.storage.manifest import Block, StoredBlock
from pipelines.storage.salts import SaltStore
from provenance.canonical import canonical_bytes, fingerprint, keyed, record_id
from provenance.merkle import root_of
from provenance.sparse import SparseTree

_NOTHING = bytes(32)


@dataclass(frozen=True, slots=True)
class Verified:
    """What was recomputed and found equal."""

    version: str
    num_blocks: int
    num_records: int
    """Rows whose leaf was computed from text, salt, owner and licence."""
    num_tombstones: int
    num_erased: int
    """Leaves taken from storage, because their rows were physically erased."""


class _Check:
    """One verification: findings, and what the whole version must add up to."""

    def __init__(self, archive: Archive, version: str) -> None:
        self.findings: list[str] = []
        self._archive = archive
        self._keys = archive.keys
        self.manifest = archive.manifest(version)
        self.storage = archive.storage(version)
        self._stored = archive.stored_leaves(version)
        self._erased = set(self.storage.erased)
        self._salts = self._open_salts()
        self.leaves: list[bytes] = []
        self.owners: Counter[str] = Counter()
        self.contents: set[bytes] = set()
        self._pseudonyms: dict[str, bytes] = {}

    def run(self) -> None:
        """Check all blocks, then the version."""
        blocks_, files = self.manifest.blocks, self.storage.blocks
        if len(blocks_) != len(files):
            self.findings.append(f"storage map: {len(files)} files for {len(blocks_)} blocks")
            return
        if len(self._stored) != self.manifest.size:
            self.findings.append(
                f"storage leaves: expected {self.manifest.size}, got {len(self._stored)}"
            )
            self._stored = (self._stored + [_NOTHING] * self.manifest.size)[: self.manifest.size]
        for block, file in zip(blocks_, files, strict=True):
            self._block(block, file)
        if not self.findings:
            self._whole()

    def _open_salts(self) -> SaltStore | None:
        try:
            return SaltStore(self._archive.home.salts_path, self._keys)
        except SaltError as error:
            self.findings.append(str(error))
            return None

    def _block(self, block: Block, file: StoredBlock) -> None:
        finding = self._archive.file_finding(block, file)
        folder = self._archive.home.blocks
        if finding:
            self.findings.append(finding)
            rows = blocks.salvage_block(folder, file)
        else:
            rows = blocks.read_block(folder, file)
            if rows.schema != blocks.BLOCK_SCHEMA or rows.height != file.rows:
                self.findings.append(
                    f"block at leaf {block.first}: other columns or rows than stated"
                )
                return
        if rows is None or self._salts is None:
            return
        computed = self._computed(block, rows, self._salts)
        stored = self._stored[block.first : block.first + block.count]
        self.leaves += computed
        if root_of(computed).hex() == block.row_root:
            self.findings += [
                f"storage leaves: index {index} was changed"
                for index, (left, right) in enumerate(
                    zip(computed, stored, strict=True), block.first
                )
                if left != right
            ]
            return
        differing = [
            block.first + place
            for place, (left, right) in enumerate(zip(computed, stored, strict=True))
            if left != right
        ]
        self.findings += list(self._causes(block, rows, differing))
        if not differing:
            self.findings.append(
                f"block at leaf {block.first}: rows and stored leaves do not lead to its root: "
                "both were changed, or these are not the keys of this corpus"
            )

    def _computed(self, block: Block, rows: pl.DataFrame, salts: SaltStore) -> list[bytes]:
        """The leaf of every index of a block; zeros where it cannot be computed."""
        leaves = [
            self._stored[index] if index in self._erased else blocks.tombstone_hash(index)
            for index in range(block.first, block.first + block.count)
        ]
        for index, record, content, owner, source, position, text, licence in rows.select(
            *("index", "record_id", "fingerprint", "owner", "source", "position", "text", "licence")
        ).iter_rows():
            if not block.first <= index < block.first + block.count:
                self.findings.append(f"block at leaf {block.first}: holds a row of index {index}")
                continue
            try:
                # Ids that do not follow from their content: the leaf alone would not show these.
                if fingerprint(self._keys.k_fp, canonical_bytes(text)) != content:
                    self.findings.append(f"index {index}: the text was changed")
                elif record_id(self._keys.k_id, owner, source, position, content) != record:
                    self.findings.append(
                        f"index {index}: owner, source, position or record id was changed"
                    )
                salt = salts.get(record) if record in salts else _NOTHING
                leaf = blocks.leaf_of(salt, text, self._pseudonym(owner), licence)
            except (ValueError, TypeError, AttributeError):  # a damaged row may hold anything
                leaf = _NOTHING
            leaves[index - block.first] = leaf
            self.owners[owner] += 1
            self.contents.add(content)
        return leaves

    def _pseudonym(self, owner: str) -> bytes:
        if owner not in self._pseudonyms:
            self._pseudonyms[owner] = keyed(self._keys.k_owner, owner.encode())
        return self._pseudonyms[owner]

    def _causes(self, block: Block, rows: pl.DataFrame, differing: list[int]) -> Iterator[str]:
        """Why leaves differ, for those that :meth:`_computed` does not explain."""
        records = dict(rows.select("index", "record_id").iter_rows())
        explained = {finding.split(":")[0] for finding in self.findings}
        for index in differing:
            if index not in records:
                yield f"index {index}: the row is missing from block at leaf {block.first}"
            elif self._salts is not None and records[index] not in self._salts:
                yield f"index {index}: the salt is missing"
            elif f"index {index}" not in explained:
                yield f"index {index}: the salt, owner or licence was changed"

    def _whole(self) -> None:
        manifest = self.manifest
        live = sum(self.owners.values()) + len(self._erased)
        if len(self.leaves) != manifest.size or live != manifest.live:
            self.findings.append(
                f"expected {manifest.live} live of {manifest.size} leaves, got {live} of {len(self.leaves)}"
            )
        if root_of(self.leaves).hex() != manifest.record_root:
            self.findings.append("the record root does not follow from the blocks")
        # Erased contents cannot be counted any more: the sparse root stands for them too.
        if not self._erased:
            if SparseTree(self.contents).root.hex() != manifest.sparse_root:
                self.findings.append("the sparse root does not follow from the fingerprints")
            if dict(self.owners) != dict(manifest.owners):
                self.findings.append("the owners' counts do not follow from the rows")


def verify_version(archive: Archive, version: str) -> Verified:
    """Recompute a version from what is stored.

    Args:
        archive: the home's archive.
        version: its id.

    Returns:
        What was recomputed.

    Raises:
        UnknownVersionError: there is no such version.
        CorruptionError: something differs; ``findings`` says what and where.
    """
    try:
        check = _Check(archive, version)
    except VersionError as error:
        if isinstance(error, CorruptionError) or type(error) is not VersionError:
            raise
        raise CorruptionError(version, (str(error),)) from None
    check.run()
    if check.findings:
        raise CorruptionError(version, tuple(check.findings))
    erased = len(check.storage.erased)
    return Verified(
        version,
        num_blocks=len(check.manifest.blocks),
        num_records=check.manifest.live - erased,
        num_tombstones=check.manifest.num_tombstones,
        num_erased=erased,
    )
