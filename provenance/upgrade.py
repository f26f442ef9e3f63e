r"""A ledger of the first layout, taken over into the one file of today: copy, verify, switch.

The first layout kept the newest checkpoint beside the entries only::

    entries.jsonl    entry lines, nothing else         becomes    the same lines, byte for byte, then
    checkpoint       signed note over all of them                 {"checkpoint": that note}

No entry is written anew and nothing is signed: whoever holds a receipt or a checkpoint of the old folder
finds the same leaves under the same root. The copy is read back and checked before it takes the old
file's place in one rename; a kill before that leaves the old folder, one after it the new.
What no checkpoint covered is a torn tail and goes to ``torn/``.

Source: the layout of this package's first ledger; INTERFACES, section 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provenance import journal
from provenance.canonical import jcs, parse_json, sync_folder, write_atomic
from provenance.compact import CompactRange
from provenance.entries import decode_entry
from provenance.errors import FormatError, LedgerError
from provenance.hashing import sha256
from provenance.locking import writers_lock
from provenance.signing import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path


def upgrade_ledger(
    folder: Path, origin: str, trusted: str, lock_timeout_s: float = 30.0
) -> Checkpoint | None:
    """Take a ledger folder of the first layout over; a folder of today's is left as it is.

    Args:
        folder: the ledger folder.
        origin: name of the log.
        trusted: its verifier key; the first layout knew no rotation.
        lock_timeout_s: how long to wait for a writer, in seconds.

    Returns:
        The checkpoint that was taken over; None if there was nothing to do.

    Raises:
        SignatureError: the checkpoint is not signed by this key.
        LedgerError: another log's, truncated, changed, or locked too long; the folder is as it was.
        FormatError: an entry is not canonical; the folder is as it was.
    """
    if not journal.is_older(folder):
        return None
    with writers_lock(folder / "lock", lock_timeout_s):
        if not journal.is_older(folder):  # another process was faster
            return None
        note = journal.read_note(folder)
        checkpoint = open_checkpoint(note, trusted)
        journal.check_origin(checkpoint, origin)
        data = journal.read_from(folder, 0)
        lines = data.split(b"\n")[:-1][: checkpoint.size]
        covered = sum(len(line) + 1 for line in lines)
        copy = folder / ".entries.jsonl.upgrade.tmp"
        try:
            write_atomic(copy, journal.encode_commit(lines, note))
            _check(copy.read_bytes(), checkpoint, folder)
            if tail := data[covered:]:
                (folder / "torn").mkdir(exist_ok=True)
                write_atomic(folder / "torn" / f"{covered}-{sha256(tail).hex()[:16]}", tail)
            copy.replace(folder / "entries.jsonl")
        finally:
            copy.unlink(missing_ok=True)
        sync_folder(folder)
    return checkpoint


def _check(data: bytes, expected: Checkpoint, folder: Path) -> None:
    commits, _, tail = journal.read_commits(data, 0, CompactRange())
    if [commit.checkpoint for commit in commits] != [expected] or tail.data:
        found = len(journal.entry_lines(data))
        raise LedgerError(
            f"expected {expected.size} entries with the signed root {expected.root.hex()}, got {found} or another root: "
            "this ledger of the first layout is damaged, restore it from a backup"
        )
    for index, line in enumerate(journal.entry_lines(data)):
        if jcs(parse_json(line)) != line:
            raise FormatError(f"entry {index} is not canonical JSON")
        decode_entry(line, folder / "bodies")
