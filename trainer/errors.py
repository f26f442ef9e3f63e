"""Everything the trainer raises on purpose, in one tree, and the exit codes they turn into.

    TrainerError
    ├── SpecError (ValueError)        a run, model or layout that cannot be meant: refused, exit 3
    ├── DataError (ValueError)        tokens that are not what was committed: refused, exit 3
    ├── CheckpointError (ValueError)  a checkpoint that is incomplete, altered or of another run: refused, exit 3
    └── NumericalError                a loss or gradient norm that is not finite: exit 4

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


class NumericalError(TrainerError):
    """Training left the finite numbers; the last good checkpoint stays."""
