"""Corpus versions: stage, check, move HEAD; append, tombstone, purge.

*Write-audit-publish.* :meth:`Versions.stage` writes a version beside the others, :meth:`Versions.verify`
recomputes every root from rows, tombstones and salts, :meth:`Versions.move_head` puts it in force. A crash
between any two writes leaves HEAD at the last good version: salts, blocks and maps are written first, the
manifest, whose presence means "complete", last. The next run makes the same version from the same input.

*Indices never move.* The first version holds its records by (owner, source, position); later ones append.
A tombstone keeps its index and rewrites only the block that holds it. A full block is never rewritten by
an append. Staging what is there already returns the parent itself.

*Erasure is physical.* :meth:`Versions.tombstone` takes records out of the next version;
:meth:`Versions.purge` then removes their rows from the files of *all* versions, whose identities stay: each
still verifies, with the leaf hash (not the text, not the salt) standing in for what was removed.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import polars as pl

from pipelines.storage import blocks
from pipelines.storage.archive import Archive
from pipelines.storage.errors import DiskFullError, StaleParentError, VersionError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.manifest import NO_PARENT, Block, Manifest, StorageMap, StoredBlock
from pipelines.storage.purging import Purged, purged
from pipelines.storage.records import COLUMNS, SCHEMA
from pipelines.storage.salts import SaltStore
from pipelines.storage.verification import Verified, verify_version
from provenance.canonical import write_atomic
from provenance.crown import changed_crown, crown_bits
from provenance.errors import FormatError, RootMismatchError
from provenance.hashing import HASH_SIZE
from provenance.merkle import MerkleTree, root_of
from provenance.sparse import SparseTree

LOCK: Final = "corpus"
"""The lock that every writer of versions, salts and suppression holds."""

Hook = Callable[[str], None]
"""Called with the name of each step that became durable; tests kill the process there."""

_IDENTITY: Final = ("index", "record_id", "owner", "fingerprint")
_CROWN_DRIFT: Final = 2
"""How many bits a crown may lie above or below the depth that a new one would have."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A block of a version in the making."""

    first: int
    count: int
    stored: StoredBlock
    root: str | None = None
    """Its row root where the parent states it and no leaf was changed."""


@dataclass(frozen=True, slots=True)
class _Base:
    """What a version in the making starts from: its parent, or nothing."""

    parent: str | None
    runs: list[_Run]
    tree: MerkleTree
    """Over the parent's leaves, which lead to its root."""
    live: pl.DataFrame
    """The parent's records, by index."""


class Versions(Archive):
    """The versions of one home, for the one writer."""

    def __init__(
        self, home: Home, keys: CorpusKeys, *, block_bytes: int = blocks.BLOCK_BYTES
    ) -> None:
        """Make the object; nothing is read.

        Args:
            home: a created home.
            keys: its keys.
            block_bytes: text of a full block; it shapes the identity, so other values are for tests.
        """
        super().__init__(home, keys)
        self._block_bytes = block_bytes

    def stage(
        self, records: pl.DataFrame, parent: str | None = None, *, hook: Hook | None = None
    ) -> str:
        """Write a version with the records of its parent and new ones; HEAD stays.

        Args:
            records: columns of ``records.SCHEMA``; what the parent holds already is passed over.
            parent: id of the version to append to; None begins a lineage.
            hook: called after each durable step.

        Returns:
            The id of the version; the parent's own id if there is nothing new.

        Raises:
            VersionError: no records at all, wrong columns, or a parent that holds erased records.
            UnknownVersionError: there is no such parent.
            CorruptionError: a file of the parent was changed.
            DiskFullError: no space left; what was complete stays.
        """
        with self.home.lock(LOCK), self._translated("a corpus version"):
            return self._stage(records, parent, hook or _no_hook)

    def move_head(self, version: str, *, expected: str | None = None) -> None:
        """Put a version in force.

        Args:
            version: a complete version.
            expected: the version that must be in force now; None means the version's parent. To go
                back to an older version, give the present HEAD.

        Raises:
            UnknownVersionError: there is no such version.
            StaleParentError: another version is in force.
            DiskFullError: no space left; HEAD stays.
        """
        with self.home.lock(LOCK), self._translated("HEAD"):
            self._move_head(version, expected)

    def publish(self, records: pl.DataFrame, *, hook: Hook | None = None) -> str:
        """Stage on HEAD, verify, and move HEAD, all under one lock.

        Args:
            records: columns of ``records.SCHEMA``.
            hook: called after each durable step.

        Returns:
            The id of the version in force afterwards.

        Raises:
            VersionError: see :meth:`stage`; HEAD stays.
            CorruptionError: the staged version does not verify; HEAD stays.
            DiskFullError: no space left; HEAD stays.
        """
        with self.home.lock(LOCK), self._translated("a corpus version"):
            head = self.head()
            version = self._stage(records, head, hook or _no_hook)
            verify_version(self, version)
            if version != head:
                self._move_head(version, head)
            (hook or _no_hook)("head")
            return version

    def verify(self, version: str) -> Verified:
        """Recompute every root of a version from what is stored.

        Args:
            version: its id.

        Returns:
            What was recomputed.

        Raises:
            UnknownVersionError: there is no such version.
            CorruptionError: something differs; ``findings`` says what and where.
        """
        return verify_version(self, version)

    def tombstone(
        self, version: str, record_ids: Iterable[bytes], *, hook: Hook | None = None
    ) -> str:
        """Make the version without some records; indices and all untouched blocks stay.

        Args:
            version: id of the parent.
            record_ids: 32 bytes each, all of them live in the parent.
            hook: called after each durable step.

        Returns:
            The id of the child; HEAD stays.

        Raises:
            VersionError: no ids, an id that is not live in the parent, or no record would be left.
            UnknownVersionError: there is no such version.
            DiskFullError: no space left; what was complete stays.
        """
        with self.home.lock(LOCK), self._translated("a corpus version"):
            return self._tombstone(version, set(record_ids), hook or _no_hook)

    def purge(self, record_ids: Iterable[bytes]) -> Purged:
        """Remove rows from the files of all versions; identities stay. Can be repeated after a crash.

        Args:
            record_ids: 32 bytes each; none may be live in HEAD.

        Returns:
            What was touched.

        Raises:
            VersionError: a record is live in HEAD: tombstone it and move HEAD first.
            DiskFullError: no space left; run it again.
        """
        with self.home.lock(LOCK), self._translated("rewritten blocks"):
            self._clean()
            return purged(self, set(record_ids))

    def _stage(self, records: pl.DataFrame, parent: str | None, hook: Hook) -> str:
        self._clean()
        if records.schema != SCHEMA:
            raise VersionError(f"records: expected the columns {', '.join(COLUMNS)}")
        base = self._parent(parent)
        rows = _new_rows(records, base.live)
        if not rows.height:
            if parent is None:
                raise VersionError(
                    "no records to publish: everything delivered is in quarantine or held out"
                )
            return parent
        first = base.tree.size
        rows = rows.with_columns(
            pl.int_range(first, first + rows.height, dtype=pl.UInt64).alias("index")
        ).select(blocks.BLOCK_SCHEMA.names())
        salts = SaltStore(self.home.salts_path, self.keys)
        salts.ensure(rows["record_id"].to_list())
        hook("salts")
        appended = MerkleTree(blocks.leaves_of(rows, salts.get, self.keys.k_owner))
        tree = MerkleTree.joined([base.tree, appended])
        runs = self._append(base.runs, rows, hook)
        return self._write(base, runs, tree, pl.concat([base.live, rows.select(_IDENTITY)]), hook)

    def _parent(self, parent: str | None) -> _Base:
        """Blocks, leaves and live records to start from."""
        if parent is None:
            nothing = pl.DataFrame(schema={name: blocks.BLOCK_SCHEMA[name] for name in _IDENTITY})
            return _Base(None, [], MerkleTree(), nothing)
        storage = self.storage(parent)
        if storage.erased:
            raise VersionError(
                f"version {parent[:12]} holds records that were erased since: build on a later version"
            )
        runs = [
            _Run(block.first, block.count, stored, block.row_root)
            for block, stored in zip(self.manifest(parent).blocks, storage.blocks, strict=True)
        ]
        return _Base(parent, runs, self.tree(parent), self.read(parent, _IDENTITY))

    def _append(self, runs: list[_Run], rows: pl.DataFrame, hook: Hook) -> list[_Run]:
        """Fill the last block if it is open, then make new ones."""
        first = runs[-1].first + runs[-1].count if runs else 0
        if runs:
            last = blocks.read_block(self.home.blocks, runs[-1].stored)
            size = int(last["text"].str.len_bytes().sum())
            if not blocks.is_full(runs[-1].first, runs[-1].count, size, self._block_bytes):
                first, runs, rows = runs[-1].first, runs[:-1], pl.concat([last, rows])
        end = int(rows["index"][-1]) + 1
        sizes = [0] * (end - first)
        for index, size in rows.select("index", pl.col("text").str.len_bytes()).iter_rows():
            sizes[index - first] = size
        runs = list(runs)
        for count in blocks.block_counts(first, sizes, self._block_bytes):
            part = rows.filter(pl.col("index").is_between(first, first + count - 1))
            stored = blocks.write_block(self.home.blocks, part, self.keys.k_file)
            runs.append(_Run(first, count, stored))
            hook(f"block {first}")
            first += count
        return runs

    def _write(
        self, base: _Base, runs: list[_Run], tree: MerkleTree, live: pl.DataFrame, hook: Hook
    ) -> str:
        """Give the version its roots and make it complete; the manifest is the last file."""
        owners = dict(live.group_by("owner").len().sort("owner").iter_rows())
        data, whole = tree.level(0), tree.root().hex()
        sparse_root, crown = self._contents(base, live)
        manifest = Manifest(
            parent=base.parent or NO_PARENT,
            size=tree.size,
            live=live.height,
            record_root=whole,
            sparse_root=sparse_root.hex(),
            owners=owners,
            blocks=tuple(
                # A corpus of one block has one root: hashing its leaves again would tell nothing new.
                Block(
                    run.first, run.count, whole if run.count == tree.size else _row_root(run, data)
                )
                for run in runs
            ),
        )
        version = manifest.version
        storage = StorageMap(version, tuple(run.stored for run in runs))
        write_atomic(self.leaves_path(version), data)
        hook("leaves")
        write_atomic(self.crown_path(version), crown)
        hook("crown")
        write_atomic(self.storage_path(version), storage.data)
        hook("storage")
        self.manifest_path(version).parent.mkdir(exist_ok=True)
        write_atomic(self.manifest_path(version), manifest.data)
        hook("manifest")
        return version

    def _contents(self, base: _Base, live: pl.DataFrame) -> tuple[bytes, bytes]:
        """Root and crown of the sparse tree over the contents; from the parent's crown where few change."""
        # Copies of several owners are one content.
        old, new = (frame["fingerprint"].unique() for frame in (base.live, live))
        after, bits = new.to_list(), crown_bits(len(new))
        if base.parent is not None and abs(len(new) - len(old)) * 8 < len(new):
            root = bytes.fromhex(self.manifest(base.parent).sparse_root)
            added, removed = (a.filter(~a.is_in(b.implode())).to_list() for a, b in ((new, old), (old, new)))  # fmt: skip
            # An older version has no crown, and a damaged one is as good as none.
            with contextlib.suppress(FileNotFoundError, FormatError, RootMismatchError):
                crown = self.crown_path(base.parent).read_bytes()
                if abs(len(crown).bit_length() - 6 - bits) <= _CROWN_DRIFT:
                    return changed_crown(crown, root, after, added, removed)
        tree = SparseTree(after)
        return tree.root, tree.crown(bits)

    def _move_head(self, version: str, expected: str | None) -> None:
        parent = self.manifest(version).parent
        self.storage(version)
        wanted = expected or (None if parent == NO_PARENT else parent)
        head = self.head()
        if head not in (wanted, version):
            raise StaleParentError(
                f"HEAD is {(head or 'unset')[:12]}, expected {(wanted or 'unset')[:12]}: another version "
                "was published in between; stage the records again on the new HEAD"
            )
        write_atomic(self.home.head_path, f"{version}\n".encode())

    def _tombstone(self, version: str, gone: set[bytes], hook: Hook) -> str:
        self._clean()
        base = self._parent(version)
        marked = base.live["record_id"].is_in(list(gone))
        indices = base.live["index"].filter(marked).to_list()
        missing = len(gone) - len(indices)
        if not gone or missing:
            raise VersionError(
                f"{missing} of {len(gone)} records are not live in version {version[:12]}: nothing was changed"
            )
        if len(gone) == base.live.height:
            raise VersionError("no record would be left: a corpus version holds at least one")
        kept: list[_Run] = []
        for run in base.runs:
            mine = [index for index in indices if 0 <= index - run.first < run.count]
            if not mine:
                kept.append(run)
                continue
            rows = blocks.read_block(self.home.blocks, run.stored)
            rows = rows.filter(~rows["index"].is_in(mine))
            stored = blocks.write_block(self.home.blocks, rows, self.keys.k_file)
            kept.append(replace(run, stored=stored, root=None))
            hook(f"block {run.first}")
        base.tree.replace({index: blocks.tombstone_hash(index) for index in indices})
        return self._write(base, kept, base.tree, base.live.filter(~marked), hook)

    def _clean(self) -> None:
        for folder in (self.home.blocks, self.home.storage, *self.home.versions.glob("*")):
            blocks.remove_leftovers(folder)
        for name in (self.home.salts_path.name, self.home.head_path.name):
            blocks.remove_leftovers(self.home.path, f".{name}.*.tmp")

    @contextlib.contextmanager
    def _translated(self, what: str) -> Iterator[None]:
        """A full disk as one clear message, whoever found it."""
        try:
            yield
        except OSError as error:
            if isinstance(error, DiskFullError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise DiskFullError(what, self.head()) from error
        except pl.exceptions.ComputeError as error:
            if not re.search(r"os error (28|122)\b", str(error)):
                raise
            raise DiskFullError(what, self.head()) from error


def _new_rows(records: pl.DataFrame, live: pl.DataFrame) -> pl.DataFrame:
    """What the parent does not hold, in the order in which it is appended.

    The same content from the same owner under another place is the same contribution: a paragraph that
    moved inside a file is not a new record.
    """
    unseen = records.unique(["owner", "fingerprint"], keep="first", maintain_order=True).join(
        live, on=["owner", "fingerprint"], how="anti"
    )
    return unseen.sort("owner", "source", "position", "record_id")


def _row_root(run: _Run, leaves: bytes) -> str:
    """The root over a run's own leaves."""
    if run.root is not None:
        return run.root
    places = range(run.first * HASH_SIZE, (run.first + run.count) * HASH_SIZE, HASH_SIZE)
    return root_of(leaves[at : at + HASH_SIZE] for at in places).hex()


def _no_hook(_step: str) -> None:
    pass
