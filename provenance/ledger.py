"""The append-only ledger: one signed line of history after another, in a plain folder.

::

    ledger/
    ├── entries.jsonl   one JCS line per entry, and after each append the signed checkpoint (journal)
    ├── checkpoint      copy of the newest checkpoint: origin, number of entries, root, signature
    ├── bodies/HEX      bodies above 32 KiB, named by their SHA-256
    ├── torn/           tails that a killed writer left, kept for whoever wants to look
    └── lock            flock of the one writer

An append is one write and one fsync of entries and checkpoint together. What no checkpoint covers
did not happen: readers ignore it, the next writer moves it to ``torn/``, says so (:attr:`Ledger.torn`)
and goes on. A file that holds *less* than the copy of the checkpoint, or other roots, is damage or
fraud and is refused, never repaired.

Several processes may append: each append takes the lock, takes over what others have added, and
checks that it extends what it knew. Cost of an append: one fsync (two more for a body above 32 KiB),
one signature, O(log n) hashes; 64 bytes of memory per entry.

When it is wrong: whoever holds the key and the folder can sign a *second* history. A reader detects
that only against a checkpoint that was kept elsewhere: owners keep theirs, a ``witness`` keeps one.

Source: C2SP tlog-checkpoint; RFC 9162.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from provenance import journal
from provenance.canonical import parse_json, write_atomic
from provenance.compact import CompactRange
from provenance.entries import check_clock, decode_entry, encode_entry
from provenance.errors import LedgerError
from provenance.hashing import leaf_hash, sha256
from provenance.locking import writers_lock
from provenance.merkle import MerkleTree, root_of
from provenance.signing import (
    Checkpoint,
    SigningKey,
    checkpoint_text,
    open_checkpoint,
    sign_note,
    vkey,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from provenance.keylist import KeyList


class Ledger:
    """A ledger folder, opened for reading, or for reading and appending.

    Use :meth:`open`. The object holds no file handle and no lock between two calls.
    """

    __slots__ = (
        "_covered",
        "_key",
        "_keys",
        "_lock_timeout_s",
        "_mark",
        "_note",
        "_notes",
        "_offset",
        "_starts",
        "_tree",
        "folder",
        "origin",
        "torn",
    )

    torn: tuple[str, ...]
    """Names in ``torn/`` of the tails that this object moved there."""

    def __init__(
        self,
        folder: Path,
        origin: str,
        key: SigningKey | None,
        keys: KeyList | None,
        lock_timeout_s: float,
    ) -> None:
        """Hold the arguments; :meth:`open` reads the folder."""
        self.folder, self.origin = folder, origin
        self._key, self._keys = key, keys
        self._lock_timeout_s = lock_timeout_s
        self.torn = ()
        self._note = self._mark = b""  # the last checkpoint, and its line in entries.jsonl
        self._notes: set[bytes] = set()  # digests of all checkpoints
        self._tree, self._covered = MerkleTree(), CompactRange()
        self._starts: list[int] = []  # offset of each entry in entries.jsonl
        self._offset = 0  # end of the last checkpoint line

    @classmethod
    def open(
        cls,
        folder: Path,
        origin: str,
        key: SigningKey | None = None,
        *,
        keys: KeyList | None = None,
        lock_timeout_s: float = 30.0,
    ) -> Self:
        """Open a ledger; with a key, create it when it is missing and set a torn tail aside.

        Args:
            folder: the ledger folder.
            origin: name of the log, without white space and plus.
            key: the signing key; None opens for reading only.
            keys: which key signed which sizes, after a rotation; None if there was one key only.
            lock_timeout_s: how long to wait for another writer, in seconds.

        Returns:
            The ledger at its last signed state.

        Raises:
            LedgerError: no ledger there, another log's, damaged, truncated, or locked too long.
            SignatureError: the checkpoint was not signed by the key of its size.
        """
        ledger = cls(folder, origin, key, keys, lock_timeout_s)
        if key is None:
            ledger._refresh()
            return ledger
        (folder / "bodies").mkdir(parents=True, exist_ok=True)
        with ledger._lock():
            ledger._create()
            ledger._refresh()
            ledger._sweep()
        return ledger

    @property
    def size(self) -> int:
        """Number of signed entries."""
        return self._tree.size

    @property
    def root(self) -> bytes:
        """Root over the signed entries, 32 bytes."""
        return self._tree.root()

    @property
    def checkpoint(self) -> bytes:
        """The signed note over origin, size and root: what others keep to hold us to it."""
        return self._note

    @property
    def vkey(self) -> str:
        """The verifier key of the signing key that the ledger was opened with.

        Raises:
            LedgerError: opened for reading only.
        """
        if self._key is None:
            raise LedgerError("the ledger is open for reading only: it knows no key")
        return vkey(self.origin, self._key.public)

    def append(self, kind: str, body: Mapping[str, Any], time: str) -> int:
        """Append one entry and sign the new state.

        Args:
            kind: lower-case word, for instance ``corpus``.
            body: integers, strings, booleans, lists and objects only; digests, never texts.
            time: ISO 8601 in UTC, for instance ``2025-01-31T12:00:00Z``.

        Returns:
            The index of the entry.

        Raises:
            FormatError: kind, body or time is not in the allowed form.
            LedgerError: opened for reading only, damaged, or locked too long.
        """
        return self.append_many([(kind, body)], time)[0]

    def append_many(self, entries: Sequence[tuple[str, Mapping[str, Any]]], time: str) -> range:
        """Append several entries under one signature: all of them, or after a crash none.

        Args:
            entries: pairs of kind and body, see :meth:`append`.
            time: ISO 8601 in UTC, the same for all.

        Returns:
            The range of their indices.

        Raises:
            FormatError: a kind, a body or the time is not in the allowed form; nothing is written.
            LedgerError: opened for reading only, damaged, locked too long, a retired key, or a
                time before the last entry's.
        """
        if self._key is None:
            raise LedgerError("the ledger is open for reading only: open it with its signing key")
        encoded = [encode_entry(kind, body, time) for kind, body in entries]
        with self._lock():
            self._refresh()
            first = self.size
            if first:
                check_clock(parse_json(self.entry_bytes(first - 1))["time"], time)
            if encoded:
                self._write([line for line, _ in encoded], [body for _, body in encoded if body])
        return range(first, first + len(encoded))

    def entry_bytes(self, index: int) -> bytes:
        """The leaf data of an entry: its JCS line without the newline.

        Args:
            index: 0 <= index < size.

        Returns:
            The bytes whose leaf hash is in the tree.

        Raises:
            LedgerError: no such entry, or the file was changed since it was read.
        """
        if not 0 <= index < self.size:
            raise LedgerError(f"entry index must be in [0, {self.size}), got {index}")
        with (self.folder / "entries.jsonl").open("rb") as file:
            file.seek(self._starts[index])
            line = file.readline()[:-1]
        if leaf_hash(line) != self._tree.leaf(index):
            raise LedgerError(f"entry {index} was changed on disk after the ledger was opened")
        return line

    def entry(self, index: int) -> dict[str, Any]:
        """One entry, with its body even where that stands in a file of its own.

        Args:
            index: 0 <= index < size.

        Returns:
            ``{format, kind, time, body}``, plus ``body_sha256`` and ``body_size`` for a large body.

        Raises:
            LedgerError: no such entry, changed on disk, or its body is missing or changed.
        """
        return self._resolve(self.entry_bytes(index))

    def entries(self) -> list[dict[str, Any]]:
        """All signed entries in order, in the form of :meth:`entry`.

        Returns:
            A list of ``size`` entries.

        Raises:
            LedgerError: changed on disk, or a body is missing or changed.
        """
        return [self._resolve(line) for line in self._lines()]

    def inclusion_path(self, index: int) -> list[bytes]:
        """The proof that an entry is under the current checkpoint.

        Args:
            index: 0 <= index < size.

        Returns:
            The RFC 9162 audit path.

        Raises:
            ProofShapeError: the index is out of range.
        """
        return self._tree.inclusion_path(index)

    def tree_level(self, level: int) -> bytes:
        """The hashes of the perfect subtrees of ``2^level`` entries: what tiles are made of.

        Args:
            level: 0 <= level.

        Returns:
            32 bytes each, in order; empty above the top.
        """
        return self._tree.level(level)

    def consistency_path(self, old_size: int) -> list[bytes]:
        """The proof that the current checkpoint extends an earlier one.

        Args:
            old_size: 0 < old_size <= size.

        Returns:
            The RFC 9162 consistency path.

        Raises:
            ProofShapeError: the size is out of range.
        """
        return self._tree.consistency_path(old_size)

    def verify(self, trusted: str | KeyList) -> Checkpoint:
        """Check everything anew from disk: every signature, every line, every body, every root.

        Args:
            trusted: the verifier key that the caller trusts, or the key list of a trusted root key.

        Returns:
            The newest checkpoint.

        Raises:
            VerificationError: a signature does not hold.
            LedgerError: a file is missing, truncated or changed, or a root does not hold.
            FormatError: an entry is not canonical.
        """
        return journal.verify_folder(self.folder, self.origin, trusted)

    def _create(self) -> None:
        """Sign the empty log in an empty folder; from then on an empty file is visible damage."""
        path = self.folder / "checkpoint"
        if path.exists():
            return
        entries = self.folder / "entries.jsonl"
        note = self._signed(0, MerkleTree().root())
        first = journal.encode_commit([], note)
        # A writer that was killed right here left the signed empty log, or a part of it.
        if entries.exists() and not first.startswith(entries.read_bytes()):
            raise LedgerError(
                f"{path.name} is missing beside {entries.name}: restore it from a backup"
            )
        write_atomic(entries, first)
        write_atomic(path, note)

    def _refresh(self) -> None:
        """Take over what signed checkpoints on disk cover beyond what is known."""
        published = journal.read_copy(self.folder, self.origin)
        data = journal.read_from(self.folder, self._offset - len(self._mark))
        if not data.startswith(self._mark):
            if published is not None and published[1].size < self.size:
                raise LedgerError(
                    f"the ledger was rolled back from {self.size} to {published[1].size} entries"
                )
            raise LedgerError(
                f"entries.jsonl does not have the signed root {self.root.hex()} of {self.size} entries "
                "any more: its history was rewritten"
            )
        commits, covered, tail = journal.read_commits(
            data[len(self._mark) :], self._offset, self._covered
        )
        new = {sha256(commit.note) for commit in commits}
        journal.check_tail(published, (self._notes, new), covered.end, tail)
        if commits:
            journal.check_origin(commits[-1].checkpoint, self.origin)
            self._check_signature(commits[-1].note, covered.end)
        # From here on nothing can be refused, so that a refused state leaves this object as it was.
        for commit in commits:
            self._take(commit.note, commit.leaves, commit.starts, commit.end)
        self._covered = covered

    def _write(self, lines: list[bytes], bodies: Sequence[bytes]) -> None:
        for body in bodies:
            path = self.folder / "bodies" / sha256(body).hex()
            if not path.exists():
                write_atomic(path, body)
        self._set_tail_aside()
        leaves = [leaf_hash(line) for line in lines]
        covered = self._covered.copy()
        for digest in leaves:
            covered.append(digest)
        note = self._signed(covered.end, covered.root())
        with (self.folder / "entries.jsonl").open("ab", buffering=0) as file:
            try:
                rest = memoryview(journal.encode_commit(lines, note))
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                with suppress(OSError):  # a full disk: our own unfinished lines are no torn tail
                    file.truncate(self._offset)
                raise
        # From here on it happened; only now this object may believe it.
        starts, place = [], self._offset
        for line in lines:
            starts.append(place)
            place += len(line) + 1
        self._take(note, leaves, starts, place + len(journal.encode_commit([], note)))
        self._covered = covered
        # The copy can be made again from entries.jsonl, so it is neither synced nor worth an error.
        with suppress(OSError):
            write_atomic(self.folder / "checkpoint", note, durable=False)

    def _take(self, note: bytes, leaves: Sequence[bytes], starts: Sequence[int], end: int) -> None:
        for digest in leaves:
            self._tree.append(digest)
        self._starts += starts
        self._note, self._mark, self._offset = note, journal.encode_commit([], note), end
        self._notes.add(sha256(note))

    def _sweep(self) -> None:
        """Put away what a killed writer left behind; only under the lock, so it is nobody's."""
        self._set_tail_aside()
        for folder in (self.folder, self.folder / "bodies"):
            for path in folder.glob(".*.tmp"):
                path.unlink()
        if journal.read_note(self.folder) != self._note:
            write_atomic(self.folder / "checkpoint", self._note)

    def _set_tail_aside(self) -> None:
        if (self.folder / "entries.jsonl").stat().st_size > self._offset:
            self.torn = (*self.torn, journal.set_aside(self.folder, self._offset))

    def _signed(self, size: int, root: bytes) -> bytes:
        assert self._key is not None
        if self._keys is not None and self._keys.vkey_at(size) != self.vkey:
            raise LedgerError(
                f"the key {self.vkey.split('+')[1]} may not sign size {size}, expected "
                f"{self._keys.vkey_at(size).split('+')[1]}: finish the rotation, or open it with the new key"
            )
        return sign_note(checkpoint_text(self.origin, size, root), self.origin, self._key)

    def _check_signature(self, note: bytes, size: int) -> None:
        if self._keys is not None:
            open_checkpoint(note, self._keys.vkey_at(size))
        elif self._key is not None:
            open_checkpoint(note, self.vkey)

    def _lines(self) -> list[bytes]:
        lines = journal.entry_lines(journal.read_from(self.folder, 0)[: self._offset])
        if len(lines) != self.size or root_of(map(leaf_hash, lines)) != self.root:
            raise LedgerError("entries.jsonl was changed on disk after the ledger was opened")
        return lines

    def _resolve(self, line: bytes) -> dict[str, Any]:
        return decode_entry(line, self.folder / "bodies")

    def _lock(self) -> AbstractContextManager[None]:
        return writers_lock(self.folder / "lock", self._lock_timeout_s)
