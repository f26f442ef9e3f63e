"""Everything that can go wrong in provenance, as one small tree.

::

    ProvenanceError (a ValueError)
    ├── FormatError             the bytes or the JSON are not in the one allowed form
    ├── VerificationError       a proof was checked and does not hold
    │   ├── RootMismatchError   the proof leads to another root (expected, got)
    │   ├── ProofShapeError     the proof has the wrong length or form for its index and size
    │   ├── SignatureError      no valid signature of the expected key
    │   └── HistoryError        two signed states of one log that cannot both be true
    ├── SealError               a sealed text cannot be opened (wrong key, changed bytes)
    ├── LedgerError             the ledger folder is damaged, locked, or not ours
    └── WorkerError             a process that hashes a part of a tree failed

A verifier function *raises*; it never returns a boolean that a caller can forget to look at.
Messages name digests, sizes and file names only, never the text that was hashed.
"""

from __future__ import annotations


class ProvenanceError(ValueError):
    """The root of all errors of this package."""


class FormatError(ProvenanceError):
    """Bytes, text or JSON are not in the one form that may be hashed or signed."""


class VerificationError(ProvenanceError):
    """A proof was checked and does not hold."""


class RootMismatchError(VerificationError):
    """The proof is well formed, but it leads to another root.

    Attributes:
        expected: the root the caller trusts.
        got: the root that the proof leads to.
    """

    def __init__(self, expected: bytes, got: bytes) -> None:
        """Keep both sides, so that a log line is enough to see which one is stale."""
        super().__init__(
            f"root mismatch: expected {expected.hex() or 'empty'}, the proof leads to {got.hex()}; "
            "check that index, size and root come from the same signed checkpoint"
        )
        self.expected = expected
        self.got = got


class ProofShapeError(VerificationError):
    """The proof has the wrong length or form for the stated index and size."""


class SignatureError(VerificationError):
    """The note carries no valid signature of the expected key."""


class HistoryError(VerificationError):
    """Two signed states of one log cannot both be true: cut, rolled back, rewritten or split."""


class SealError(ProvenanceError):
    """A sealed text cannot be opened: wrong key, wrong context or changed bytes."""


class LedgerError(ProvenanceError):
    """The ledger folder is damaged, locked by another writer, or belongs to another log."""


class WorkerError(ProvenanceError):
    """A process that hashes a part of a tree failed or was killed."""
