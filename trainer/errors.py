"""Everything the trainer raises on purpose, in one tree, and the exit codes they turn into.

    TrainerError
    ├── SpecError (ValueError)        a run, model or layout that cannot be meant: refused, exit 3
    ├── DataError (ValueError)        tokens that are not what was committed: refused, exit 3
    ├── CheckpointError (ValueError)  a checkpoint that does not fit: refused, exit 3
    │   ├── IncompleteCheckpointError   half-written: no manifest, or a file is missing
    │   ├── FormatVersionError          written by another version of this program
    │   ├── AlteredCheckpointError      not the bytes, or not the numbers, that its manifest names
    │   └── OtherModelError             of another run or another model
    ├── NumericalError                a loss or gradient norm that is not finite: exit 4
    └── InterruptedRunError           the run stopped, its last good checkpoint stands: exit 75, start it again
        ├── LostProcessError            a process died, or missed a collective within the timeout
        ├── DesyncError                 processes that should hold the same numbers do not
        └── SaveError                   a checkpoint could not be written

Exit codes are the only message a launcher needs: 75 (EX_TEMPFAIL of sysexits.h) means "start me again, I go on
from my newest checkpoint"; 3 and 4 mean that starting again would fail in the same way.
"""

from __future__ import annotations

EXIT_DONE = 0
EXIT_REFUSED = 3
EXIT_NUMERICAL = 4
EXIT_RESUME = 75


class TrainerError(Exception):
    """Base of all errors raised on purpose by this package."""


class SpecError(TrainerError, ValueError):
    """A specification with a field that is missing, unknown, of the wrong type or out of range."""


class DataError(TrainerError, ValueError):
    """Token files that are missing, altered, or unfit for the requested batches."""


class CheckpointError(TrainerError, ValueError):
    """A checkpoint that is incomplete, altered, or does not belong to this run."""


class IncompleteCheckpointError(CheckpointError):
    """A half-written checkpoint: no manifest, or files that are missing."""


class FormatVersionError(CheckpointError):
    """A checkpoint that another version of this program wrote."""


class AlteredCheckpointError(CheckpointError):
    """A checkpoint whose bytes or numbers are not those that its manifest names."""


class OtherModelError(CheckpointError):
    """A checkpoint of another run, or of a model of another shape."""


class NumericalError(TrainerError):
    """Training left the finite numbers; the last good checkpoint stays."""


class InterruptedRunError(TrainerError):
    """A run that stopped and can be started again: it goes on from its last good checkpoint."""


class LostProcessError(InterruptedRunError):
    """A process of the run died, or did not come to a collective within the timeout."""

    def __init__(self, message: str, speaker: int = 0) -> None:
        """The message, and the rank of the first process that is still there: the one that reports."""
        super().__init__(message)
        self.speaker = speaker


class DesyncError(InterruptedRunError):
    """Processes that should hold the same numbers hold different ones."""


class SaveError(InterruptedRunError):
    """A checkpoint could not be written; the last good one stands."""


def exit_code(error: TrainerError) -> int:
    """The exit code that an error turns into."""
    if isinstance(error, NumericalError):
        return EXIT_NUMERICAL
    return EXIT_RESUME if isinstance(error, InterruptedRunError) else EXIT_REFUSED
