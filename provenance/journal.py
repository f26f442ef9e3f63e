r"""The one file of the ledger: entries, and between them the signed checkpoints that make them count.

::

    {"body":{...},"format":1,"kind":"corpus","time":"..."}      entry 0: its bytes are leaf data
    {"checkpoint":"example.com/log\n1\nROOT\n\n\u2014 example.com/log SIG\n"}
    {"body":{...},...}                                          entries 1 and 2, under one signature
    {"body":{...},...}
    {"checkpoint":"example.com/log\n3\nROOT\n\n\u2014 example.com/log SIG\n"}

Entries and the checkpoint that covers them are one write and one fsync: the write *happened* exactly
if its checkpoint line is whole and has the root that follows from all lines above it. Whatever stands
behind the last such line is a *torn tail*, what a killed writer leaves. So an append is durable after
one fsync, a batch is taken over whole or not at all, and the file keeps every checkpoint ever signed.

A tail is torn only if nothing after it was signed: with a second checkpoint behind a bad line the
file was damaged or rewritten, and it is refused instead.

Source: write-ahead logging with a commit record (Gray and Reuter, 1992); C2SP tlog-checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from provenance.canonical import jcs, parse_json, sync_folder, write_atomic
from provenance.compact import CompactRange
from provenance.entries import decode_entry
from provenance.errors import FormatError, LedgerError, VerificationError
from provenance.hashing import leaf_hash, sha256
from provenance.signing import Checkpoint, note_text, open_checkpoint, parse_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from provenance.keylist import KeyList

_MARK: Final = b'{"checkpoint":'


@dataclass(frozen=True, slots=True)
class Commit:
    """Entries that one signature made count."""

    note: bytes
    """The signed checkpoint."""
    checkpoint: Checkpoint
    """What it says; its root was compared, its signature not yet."""
    starts: tuple[int, ...]
    """Offset of each new entry in the file."""
    leaves: tuple[bytes, ...]
    """Leaf hash of each new entry."""
    end: int
    """Offset behind the checkpoint line."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What stands behind the last commit."""

    offset: int
    """Where it begins."""
    data: bytes
    """Its bytes; empty for a file that ends with a commit."""
    refused: Checkpoint | None
    """The first checkpoint in it: signed over other entries than those above it."""
    later: bool
    """Whether another checkpoint follows that one: then it is no torn tail."""


def encode_commit(lines: list[bytes], note: bytes) -> bytes:
    """The bytes that one append writes.

    Args:
        lines: JCS lines of the entries.
        note: the signed checkpoint that covers them.

    Returns:
        Lines, each with its newline, the checkpoint line last.
    """
    mark = jcs({"checkpoint": note.decode("utf-8")})
    return b"".join(line + b"\n" for line in [*lines, mark])


def read_commits(
    data: bytes, offset: int, covered: CompactRange
) -> tuple[list[Commit], CompactRange, Tail]:
    """The commits in a part of the file.

    Args:
        data: the bytes from ``offset`` to the end of the file.
        offset: end of the last commit that is known.
        covered: the range over all entries before ``offset``; it stays as it is.

    Returns:
        Commits in order, each with the root that follows from all entries up to it; the range over
        all entries now; and what stands behind the last commit.
    """
    commits: list[Commit] = []
    starts: list[int] = []
    leaves: list[bytes] = []
    good, place = 0, 0
    for line in _lines(data):
        end = place + len(line) + 1
        checkpoint = _checkpoint_of(line)
        if checkpoint is None:
            starts.append(offset + place)
            leaves.append(leaf_hash(line))
        else:
            extended = covered.copy()
            for digest in leaves:
                extended.append(digest)
            note, said = checkpoint
            if (said.size, said.root) != (extended.end, extended.root()):
                later = any(_checkpoint_of(rest) for rest in _lines(data[end:]))
                return commits, covered, Tail(offset + good, data[good:], said, later)
            covered = extended
            commits.append(Commit(note, said, tuple(starts), tuple(leaves), offset + end))
            starts, leaves, good = [], [], end
        place = end
    return commits, covered, Tail(offset + good, data[good:], None, later=False)


def is_older(folder: Path) -> bool:
    """Whether a ledger folder has the first layout: entries without any checkpoint between them.

    Args:
        folder: the ledger folder.

    Returns:
        False too for a folder without a ledger; ``upgrade`` takes an older one over.
    """
    entries, note = folder / "entries.jsonl", folder / "checkpoint"
    if not entries.exists() or not note.exists() or not note.stat().st_size:
        return False
    with entries.open("rb") as file:
        return not any(line.startswith(_MARK) for line in file)


def entry_lines(data: bytes) -> list[bytes]:
    """The entries in a part of the file, without the checkpoints.

    Args:
        data: whole lines.

    Returns:
        JCS lines without newline.
    """
    return [line for line in _lines(data) if _checkpoint_of(line) is None]


def damage(tail: Tail, known: int, published: Checkpoint | None) -> LedgerError | None:
    """Why a tail is no torn tail, if it is not.

    Args:
        tail: from :func:`read_commits`.
        known: number of entries that the last good commit covers.
        published: what the file ``checkpoint`` says.

    Returns:
        The error to raise, or None for a tail that a killed writer leaves.
    """
    if published is not None and published.size > known:
        if tail.refused is not None and tail.refused.size <= published.size:
            return LedgerError(
                f"entries.jsonl does not have the signed root {tail.refused.root.hex()} of "
                f"{tail.refused.size} entries: restore it from a backup"
            )
        return LedgerError(
            f"the ledger is truncated: {published.size} entries are signed, entries.jsonl has {known} "
            "under its last whole checkpoint; restore it from a backup"
        )
    if tail.later:
        return LedgerError(
            f"entries.jsonl was changed behind entry {known - 1}, and a signed checkpoint follows: "
            "restore it from a backup"
        )
    return None


def check_tail(
    published: tuple[bytes, Checkpoint] | None, notes: Sequence[set[bytes]], size: int, tail: Tail
) -> None:
    """Refuse a file that does not hold what was signed.

    Args:
        published: from :func:`read_copy`, read before the entries.
        notes: sets of digests, together of all checkpoints in the file.
        size: number of entries that the last of them covers.
        tail: what stands behind it.

    Raises:
        LedgerError: damaged, truncated, or not the file that the copy of the checkpoint belongs to.
    """
    if not any(notes) and published and b"\n" in tail.data and _MARK not in tail.data:
        raise LedgerError(
            "expected checkpoints between the entries, got a ledger of the first layout: take it over with "
            "upgrade_ledger (`dataworth status` or `run` does)"
        )
    if (error := damage(tail, size, published and published[1])) is not None:
        raise error
    if not any(notes):
        raise LedgerError("entries.jsonl holds no whole checkpoint: restore it from a backup")
    known = published and any(sha256(published[0]) in digests for digests in notes)
    if published and published[1].size <= size and not known:
        raise LedgerError(
            "the checkpoint is damaged: it is none of those in entries.jsonl; restore it from a backup"
        )


def verify_folder(folder: Path, origin: str, trusted: str | KeyList) -> Checkpoint:
    """Check a ledger folder anew: every signature, every line, every body, every root.

    Args:
        folder: the ledger folder.
        origin: name of the log.
        trusted: the verifier key, or the key list of a trusted root key.

    Returns:
        The newest checkpoint.

    Raises:
        VerificationError: a signature does not hold.
        LedgerError: a file is missing, truncated or changed, or a root does not hold.
        FormatError: an entry is not canonical.
    """
    published = read_copy(folder, origin)
    data = read_from(folder, 0)
    commits, covered, tail = read_commits(data, 0, CompactRange())
    for commit in commits:
        size = commit.checkpoint.size
        known = trusted if isinstance(trusted, str) else trusted.vkey_at(size)
        check_origin(open_checkpoint(commit.note, known), origin)
    check_tail(published, [{sha256(commit.note) for commit in commits}], covered.end, tail)
    for index, line in enumerate(entry_lines(data[: tail.offset])):
        if jcs(parse_json(line)) != line:
            raise FormatError(f"entry {index} is not canonical JSON")
        decode_entry(line, folder / "bodies")
    return commits[-1].checkpoint


def check_origin(checkpoint: Checkpoint, origin: str) -> None:
    """Refuse a checkpoint of another log.

    Args:
        checkpoint: what was signed.
        origin: name of the log.

    Raises:
        LedgerError: it is another log's.
    """
    if checkpoint.origin != origin:
        raise LedgerError(f"expected the log {origin}, got {checkpoint.origin}")


def read_note(folder: Path) -> bytes:
    """The copy of the newest checkpoint.

    Args:
        folder: the ledger folder.

    Returns:
        The note; empty after a power cut.

    Raises:
        LedgerError: there is none.
    """
    try:
        return (folder / "checkpoint").read_bytes()
    except FileNotFoundError:
        message = f"no ledger in {folder.name}: open it with a signing key to create one"
        raise LedgerError(message) from None


def read_copy(folder: Path, origin: str) -> tuple[bytes, Checkpoint] | None:
    """The copy of the newest checkpoint and what it says, its signature not checked.

    Read it *before* the entries: a writer may go on meanwhile, and then the entries hold more than
    the copy says, never less.

    Args:
        folder: the ledger folder.
        origin: name of the log.

    Returns:
        Note and content; None where a power cut left it empty.

    Raises:
        LedgerError: it is missing, no checkpoint, or another log's.
    """
    note = read_note(folder)
    if not note:
        return None
    try:
        checkpoint = parse_checkpoint(note_text(note))
    except (VerificationError, FormatError) as error:
        raise LedgerError(f"the checkpoint is damaged: {error}") from error
    check_origin(checkpoint, origin)
    return note, checkpoint


def read_from(folder: Path, offset: int) -> bytes:
    """The journal from an offset on.

    Args:
        folder: the ledger folder.
        offset: 0 <= offset.

    Returns:
        The bytes to the end of the file.

    Raises:
        LedgerError: the file is missing.
    """
    try:
        with (folder / "entries.jsonl").open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        message = "entries.jsonl is missing beside a checkpoint: restore it from a backup"
        raise LedgerError(message) from None


def set_aside(folder: Path, offset: int) -> str:
    """Move the bytes behind the last commit to ``torn/``, durably, before they leave the file.

    Args:
        folder: the ledger folder; its lock is held.
        offset: end of the last commit.

    Returns:
        The name in ``torn/``.
    """
    path, tail = folder / "entries.jsonl", read_from(folder, offset)
    name = f"{offset}-{sha256(tail).hex()[:16]}"
    (folder / "torn").mkdir(exist_ok=True)
    write_atomic(folder / "torn" / name, tail)
    os.truncate(path, offset)
    sync_folder(folder)
    return name


def _lines(data: bytes) -> Iterator[bytes]:
    """Whole lines without newline; bytes behind the last newline are none."""
    begin = 0
    while (end := data.find(b"\n", begin)) >= 0:
        yield data[begin:end]
        begin = end + 1


def _checkpoint_of(line: bytes) -> tuple[bytes, Checkpoint] | None:
    """Note and content of a checkpoint line; None for an entry, or for a line that is neither."""
    if not line.startswith(_MARK):
        return None
    try:
        document = parse_json(line)
        note = document["checkpoint"]
        if not isinstance(note, str) or jcs({"checkpoint": note}) != line:
            return None
        return note.encode("utf-8"), parse_checkpoint(note_text(note))
    except (FormatError, VerificationError):
        return None
