"""A witness keeps the largest consistent state of a log and cosigns nothing that contradicts it.

Whoever holds a log's key can sign two histories and show each to somebody else. A witness makes that
visible without trusting anybody: it remembers *one* checkpoint, and takes over another only if a
consistency proof shows that the old log is its beginning. So it refuses

* *truncation and rollback*: a size below the one it keeps,
* *a split view*: the same size with another root,
* *a rewritten history*: a larger size whose beginning is another log.

Both signed notes of a refusal are kept whole under ``evidence/``: two signatures of one key that
cannot both be true convince everybody. What it accepts it cosigns, with the time; an owner who wants
k of n witnesses counts their lines in the checkpoint (:func:`verify_cosignature`).

The first checkpoint is believed as it comes. The time is the witness's own word.

Source: C2SP tlog-cosignature and tlog-witness (c2sp.org).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from provenance.canonical import write_atomic
from provenance.errors import HistoryError, SignatureError, VerificationError
from provenance.hashing import sha256
from provenance.locking import writers_lock
from provenance.proofs import verify_consistency
from provenance.signing import (
    COSIGNATURE,
    key_id,
    note_text,
    open_checkpoint,
    parse_checkpoint,
    parse_vkey,
    signature_line,
    split_note,
    vkey,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from provenance.keylist import KeyList
    from provenance.signing import Checkpoint, SigningKey

_STAMP: Final = 8
"""Bytes of the time in a cosignature."""


class Witness:
    """The state of one witness about one log, in a folder of its own."""

    __slots__ = ("_key", "folder", "name")

    def __init__(self, folder: Path, name: str, key: SigningKey) -> None:
        """Open or begin a state.

        Args:
            folder: holds ``checkpoint`` and ``evidence/``; made when it is missing.
            name: name of the witness, without white space and plus.
            key: its own key; never the one of a log.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name, self._key = folder, name, key

    @property
    def vkey(self) -> str:
        """The verifier key of this witness's cosignatures."""
        return vkey(self.name, self._key.public, COSIGNATURE)

    @property
    def kept(self) -> bytes:
        """The largest consistent checkpoint so far, with our cosignature; empty before the first."""
        path = self.folder / "checkpoint"
        return path.read_bytes() if path.exists() else b""

    def observe(
        self,
        note: bytes,
        trusted: str | KeyList,
        consistency: Callable[[int, int], Sequence[bytes]],
        time: int,
    ) -> bytes:
        """Take over a checkpoint, or refuse it and keep the evidence.

        Args:
            note: the log's signed checkpoint.
            trusted: the log's vkey, or its key list.
            consistency: the log's consistency path from a size to a larger one.
            time: seconds since 1970, for the cosignature.

        Returns:
            The note with our cosignature, which is what is kept now.

        Raises:
            SignatureError: the note is not signed by the log's key.
            HistoryError: it contradicts what was seen before; what is kept stays as it was.
            LedgerError: another witness process held the state for too long.
        """
        found = _open(note, trusted)
        with writers_lock(self.folder / "lock", 30.0):
            if before := self.kept:
                self._check(before, note, found, consistency)
            cosigned = cosign(note, self.name, self._key, time)
            write_atomic(self.folder / "checkpoint", cosigned)
        return cosigned

    def _check(
        self,
        before: bytes,
        note: bytes,
        found: Checkpoint,
        consistency: Callable[[int, int], Sequence[bytes]],
    ) -> None:
        known = parse_checkpoint(note_text(before))
        if found.origin != known.origin:
            raise HistoryError(f"expected the log {known.origin}, got {found.origin}")
        if found.size < known.size:
            self._refuse(
                before,
                note,
                f"rolled back or cut: {known.size} entries were signed, got {found.size}",
            )
        if found.size == known.size and found.root != known.root:
            self._refuse(
                before, note,
                f"split view: two roots for {known.size} entries, {known.root.hex()} and {found.root.hex()}",
            )  # fmt: skip
        if 0 < known.size < found.size:
            try:
                path = consistency(known.size, found.size)
                verify_consistency(known.size, found.size, known.root, found.root, path)
            except VerificationError as error:
                self._refuse(
                    before, note, f"rewritten: the first {known.size} entries are others ({error})"
                )

    def _refuse(self, before: bytes, note: bytes, reason: str) -> None:
        folder = self.folder / "evidence"
        folder.mkdir(exist_ok=True)
        for evidence in (before, note):
            write_atomic(folder / sha256(evidence).hex()[:16], evidence)
        raise HistoryError(f"the log was {reason}; both signed checkpoints are kept in evidence/")


def cosign(note: bytes, name: str, key: SigningKey, time: int) -> bytes:
    """Add a witness's cosignature to a signed checkpoint.

    Args:
        note: the checkpoint.
        name: name of the witness.
        key: its key.
        time: seconds since 1970, 0 <= time < 2^63.

    Returns:
        The note with one line more; an older line of the same witness is replaced.

    Raises:
        SignatureError: not a note.

    Source: C2SP tlog-cosignature, cosignature/v1.
    """
    text, signatures = split_note(note)
    mine = key_id(name, key.public, COSIGNATURE)
    blob = mine + time.to_bytes(_STAMP, "big") + key.sign(_message(text, time))
    kept = [(who, other) for who, other in signatures if (who, other[:4]) != (name, mine)]
    lines = b"".join(signature_line(who, other) for who, other in [*kept, (name, blob)])
    return text.encode("utf-8") + b"\n" + lines


def verify_cosignature(note: bytes | str, witness_vkey: str) -> int:
    """Check that a witness cosigned a checkpoint.

    Args:
        note: the checkpoint with its signature lines.
        witness_vkey: vkey of the witness, from a source you trust.

    Returns:
        The time that the witness states, in seconds since 1970.

    Raises:
        FormatError: the vkey is malformed, or not one of a witness.
        SignatureError: no cosignature by this witness, or one over another text.
    """
    name, public = parse_vkey(witness_vkey, COSIGNATURE)
    text, signatures = split_note(note)
    wanted = key_id(name, public, COSIGNATURE)
    blobs = [blob[4:] for who, blob in signatures if who == name and blob[:4] == wanted]
    if len(blobs) != 1 or len(blobs[0]) != _STAMP + 64:
        raise SignatureError(f"expected one cosignature by {name}+{wanted.hex()}, got {len(blobs)}")
    time = int.from_bytes(blobs[0][:_STAMP], "big")
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(blobs[0][_STAMP:], _message(text, time))
    except InvalidSignature:
        raise SignatureError(f"the cosignature by {name} does not fit the text") from None
    return time


def _message(text: str, time: int) -> bytes:
    return f"cosignature/v1\ntime {time}\n{text}".encode()


def _open(note: bytes, trusted: str | KeyList) -> Checkpoint:
    if isinstance(trusted, str):
        return open_checkpoint(note, trusted)
    size = parse_checkpoint(note_text(note)).size
    return open_checkpoint(note, trusted.vkey_at(size))
