"""The append-only ledger: one signed line of history after another, in a plain folder.

::

    ledger/
    ├── entries.jsonl   one JCS line per entry; its bytes (without the newline) are the leaf data
    ├── checkpoint      signed note: origin, number of entries, root
    ├── bodies/HEX      bodies above 32 KiB, named by their SHA-256
    └── lock            flock of the one writer

An append writes bodies, then lines, then the checkpoint, each made durable before the next. Only
what the checkpoint covers *happened*: a crash leaves at most a tail of unsigned bytes, which
readers ignore and the next writer cuts off. A file that is *shorter* than the checkpoint, or has
another root, is damage or fraud and is refused, never repaired.

Several processes may append: each append takes the lock, takes over what others have added, and
checks that it extends what it knew. Cost of an append: two or three fsyncs, one signature,
O(log n) hashes; 64 bytes of memory per entry.

When it is wrong: whoever holds the key and the folder can sign a *second* history. A reader detects
that only against a checkpoint that was kept elsewhere (``consistency_path``), so owners keep theirs.

Source: C2SP tlog-checkpoint; RFC 9162.
"""

from __future__ import annotations

import fcntl
import os
import time as clock
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Self

from provenance.canonical import jcs, parse_json, sync_folder, write_atomic
from provenance.entries import decode_entry, encode_entry
from provenance.errors import FormatError, LedgerError, RootMismatchError, VerificationError
from provenance.hashing import leaf_hash, sha256
from provenance.merkle import MerkleTree, root_of
from provenance.signing import (
    Checkpoint,
    SigningKey,
    checkpoint_text,
    note_text,
    open_checkpoint,
    parse_checkpoint,
    sign_note,
    vkey,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_POLL_S: Final = 0.01


class Ledger:
    """A ledger folder, opened for reading, or for reading and appending.

    Use :meth:`open`. The object holds no file handle and no lock between two calls.
    """

    __slots__ = (
        "_key",
        "_lock_timeout_s",
        "_note",
        "_offset",
        "_starts",
        "_tree",
        "folder",
        "origin",
    )

    def __init__(
        self, folder: Path, origin: str, key: SigningKey | None, lock_timeout_s: float
    ) -> None:
        """Hold the arguments; :meth:`open` reads the folder."""
        self.folder = folder
        self.origin = origin
        self._key = key
        self._lock_timeout_s = lock_timeout_s
        self._note = b""
        self._tree = MerkleTree()
        self._starts: list[int] = []  # offset of each line in entries.jsonl
        self._offset = 0  # end of the last signed line

    @classmethod
    def open(
        cls,
        folder: Path,
        origin: str,
        key: SigningKey | None = None,
        *,
        lock_timeout_s: float = 30.0,
    ) -> Self:
        """Open a ledger; with a key, create it when it is missing and cut off an unsigned tail.

        Args:
            folder: the ledger folder.
            origin: name of the log, without white space and plus.
            key: the signing key; None opens for reading only.
            lock_timeout_s: how long to wait for another writer, in seconds.

        Returns:
            The ledger at its last signed state.

        Raises:
            LedgerError: no ledger there, another log's, damaged, truncated, or locked too long.
            SignatureError: the checkpoint was not signed by ``key``.
        """
        ledger = cls(folder, origin, key, lock_timeout_s)
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
            LedgerError: opened for reading only, damaged, or locked too long.
        """
        if self._key is None:
            raise LedgerError("the ledger is open for reading only: open it with its signing key")
        encoded = [encode_entry(kind, body, time) for kind, body in entries]
        with self._lock():
            self._refresh()
            first = self.size
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
        end = self._starts[index + 1] if index + 1 < self.size else self._offset
        with (self.folder / "entries.jsonl").open("rb") as file:
            file.seek(self._starts[index])
            line = file.read(end - self._starts[index])[:-1]
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

    def verify(self, vkey: str) -> Checkpoint:
        """Check everything anew from disk: signature, every line, every body, the root.

        Args:
            vkey: the verifier key that the caller trusts.

        Returns:
            The checkpoint that was verified.

        Raises:
            VerificationError: the signature or the root does not hold.
            LedgerError: a file is missing, truncated or changed.
            FormatError: an entry is not canonical.
        """
        checkpoint = open_checkpoint(self._read_note(), vkey)
        if checkpoint.origin != self.origin:
            raise LedgerError(f"expected the log {self.origin}, got {checkpoint.origin}")
        data = self._read_from(0)
        lines = data.split(b"\n")[: checkpoint.size]
        if data.count(b"\n") < checkpoint.size:
            raise LedgerError(_truncated(checkpoint.size, data.count(b"\n")))
        for index, line in enumerate(lines):
            if jcs(parse_json(line)) != line:
                raise FormatError(f"entry {index} is not canonical JSON")
            self._resolve(line)
        root = root_of(leaf_hash(line) for line in lines)
        if root != checkpoint.root:
            raise RootMismatchError(checkpoint.root, root)
        return checkpoint

    def _create(self) -> None:
        """Sign the empty log in an empty folder; from then on an empty file is visible damage."""
        path = self.folder / "checkpoint"
        if path.exists():
            return
        entries = self.folder / "entries.jsonl"
        if entries.exists() and entries.stat().st_size:
            raise LedgerError(
                f"{path.name} is missing beside {entries.name}: restore it from a backup"
            )
        write_atomic(entries, b"")
        write_atomic(path, self._signed(0, MerkleTree().root()))

    def _refresh(self) -> None:
        """Take over what the signed checkpoint on disk covers beyond what is known."""
        note = self._read_note()
        if note == self._note:
            return
        if self._key is not None:
            checkpoint = open_checkpoint(note, vkey(self.origin, self._key.public))
        else:
            checkpoint = _parse_unsigned(note)
        if checkpoint.origin != self.origin:
            raise LedgerError(f"expected the log {self.origin}, got {checkpoint.origin}")
        missing = checkpoint.size - self.size
        if missing < 0:
            message = f"the ledger was rolled back from {self.size} to {checkpoint.size} entries"
            raise LedgerError(message)
        data = self._read_from(self._offset)
        if data.count(b"\n") < missing:
            found = self.size + data.count(b"\n")
            raise LedgerError(_truncated(checkpoint.size, found))
        # The tree is extended in a copy, so that a refused state leaves this object as it was.
        tree = self._tree.copy()
        starts, offset = [], self._offset
        for line in data.split(b"\n")[:missing]:
            tree.append(leaf_hash(line))
            starts.append(offset)
            offset += len(line) + 1
        if tree.root() != checkpoint.root:
            raise LedgerError(
                f"entries.jsonl does not have the signed root {checkpoint.root.hex()} "
                f"({checkpoint.size} entries lead to {tree.root().hex()}): restore it from a backup"
            )
        self._tree, self._offset, self._note = tree, offset, note
        self._starts += starts

    def _write(self, lines: Sequence[bytes], bodies: Sequence[bytes]) -> None:
        for body in bodies:
            path = self.folder / "bodies" / sha256(body).hex()
            if not path.exists():
                write_atomic(path, body)
        self._cut_tail()
        with (self.folder / "entries.jsonl").open("ab") as file:
            file.write(b"".join(line + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        tree = self._tree.copy()
        for line in lines:
            tree.append(leaf_hash(line))
        note = self._signed(tree.size, tree.root())
        write_atomic(self.folder / "checkpoint", note)
        # From here on it happened; only now this object may believe it.
        self._tree, self._note = tree, note
        for line in lines:
            self._starts.append(self._offset)
            self._offset += len(line) + 1

    def _sweep(self) -> None:
        """Remove what a killed writer left behind; only under the lock, so it is nobody's."""
        self._cut_tail()
        for folder in (self.folder, self.folder / "bodies"):
            for path in folder.glob(".*.tmp"):
                path.unlink()

    def _cut_tail(self) -> None:
        path = self.folder / "entries.jsonl"
        if path.stat().st_size > self._offset:
            os.truncate(path, self._offset)
            sync_folder(self.folder)

    def _signed(self, size: int, root: bytes) -> bytes:
        assert self._key is not None
        return sign_note(checkpoint_text(self.origin, size, root), self.origin, self._key)

    def _read_note(self) -> bytes:
        try:
            return (self.folder / "checkpoint").read_bytes()
        except FileNotFoundError:
            message = f"no ledger in {self.folder.name}: open it with a signing key to create one"
            raise LedgerError(message) from None

    def _read_from(self, offset: int) -> bytes:
        try:
            with (self.folder / "entries.jsonl").open("rb") as file:
                file.seek(offset)
                return file.read()
        except FileNotFoundError:
            message = "entries.jsonl is missing beside a checkpoint: restore it from a backup"
            raise LedgerError(message) from None

    def _lines(self) -> list[bytes]:
        lines = self._read_from(0)[: self._offset].split(b"\n")[:-1]
        if len(lines) != self.size or root_of(map(leaf_hash, lines)) != self.root:
            raise LedgerError("entries.jsonl was changed on disk after the ledger was opened")
        return lines

    def _resolve(self, line: bytes) -> dict[str, Any]:
        return decode_entry(line, self.folder / "bodies")

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Hold the writers' lock; the kernel releases it when the process dies."""
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = clock.monotonic() + self._lock_timeout_s
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if clock.monotonic() >= deadline:
                        raise LedgerError(
                            f"another process has been writing for {self._lock_timeout_s:g} s: "
                            "wait for it or stop it"
                        ) from None
                    clock.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)


def _parse_unsigned(note: bytes) -> Checkpoint:
    try:
        return parse_checkpoint(note_text(note))
    except (VerificationError, FormatError) as error:
        raise LedgerError(f"the checkpoint is damaged: {error}") from error


def _truncated(expected: int, got: int) -> str:
    return (
        f"the ledger is truncated: {expected} entries are signed, entries.jsonl has {got}; "
        "restore it from a backup"
    )
