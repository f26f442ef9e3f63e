"""Everything that can go wrong in storage, as one small tree.

::

    StorageError
    ├── ConfigError (a ValueError)      dataworth.toml is missing something or says something unknown
    ├── HomeError                       the home folder is missing, of another format, or locked too long
    ├── KeysError                       the key file is missing, damaged or readable by others
    ├── SaltError                       a salt was shredded, or the salt store does not open
    ├── IntakeError (a ValueError)      there is nothing to take in, and what to do about it
    ├── VersionError (a ValueError)     a corpus version cannot be made or found
    │   ├── UnknownVersionError         no such version in this home
    │   ├── StaleParentError            HEAD moved since the version was staged
    │   └── CorruptionError             stored bytes do not lead to the committed roots (findings)
    ├── DiskFullError (an OSError)      the disk is full; the last good version stays
    ├── TokenizerError (a ValueError)   the tokenizer is missing, changed, or does not round-trip
    ├── TargetError (a ValueError)      the target is empty, overlaps the corpus, or was opened already
    ├── DemoError                       the default corpus is not installed or was changed
    └── QueryError (a ValueError)       the SQL is not one reading statement, or fails

Messages name files, indices, counts and digests only, never a text.
"""

import errno


class StorageError(Exception):
    """The root of all errors of this package."""


class ConfigError(StorageError, ValueError):
    """The configuration says something unknown, or lacks something that is needed."""


class HomeError(StorageError):
    """The home folder is missing, of another format, or locked by another process for too long."""


class KeysError(StorageError):
    """The key file is missing, damaged, or readable by other users."""


class SaltError(StorageError):
    """A salt was shredded or never made, or the salt store does not open."""


class IntakeError(StorageError, ValueError):
    """There is nothing to take in; the message says what to do."""


class VersionError(StorageError, ValueError):
    """A corpus version cannot be made."""


class UnknownVersionError(VersionError):
    """This home has no such corpus version."""


class StaleParentError(VersionError):
    """HEAD moved since the version was staged; staging it again on the new HEAD is enough."""


class CorruptionError(VersionError):
    """Stored bytes do not lead to the committed roots.

    Attributes:
        findings: one line per place: block, file, index, and what differs there.
    """

    def __init__(self, version: str, findings: tuple[str, ...]) -> None:
        """Keep every place, and show the first few."""
        shown = "; ".join(findings[:5])
        more = f"; and {len(findings) - 5} more" if len(findings) > 5 else ""
        super().__init__(
            f"corpus version {version[:12]} does not verify: {shown}{more}. "
            "Restore the named files from a backup, or publish the corpus again from its deliveries"
        )
        self.findings = findings


class DiskFullError(StorageError, OSError):
    """The disk is full; nothing that was complete has been lost."""

    def __init__(self, what: str, head: str | None) -> None:
        """Say what was being written and which version still stands."""
        kept = (
            f"version {head[:12]} is still HEAD and complete" if head else "no version existed yet"
        )
        message = f"disk full while writing {what}: {kept}; free some space and run the same command again"
        super().__init__(errno.ENOSPC, message)

    def __str__(self) -> str:
        """The message alone: the errno adds nothing that it does not say."""
        return str(self.args[1])


class TokenizerError(StorageError, ValueError):
    """The tokenizer is missing, was changed, or its tokens do not stand for the text."""


class TargetError(StorageError, ValueError):
    """The target is empty, overlaps the corpus, was split already, or was opened already."""


class DemoError(StorageError):
    """The default corpus is not installed, or its files are not the published ones."""


class QueryError(StorageError, ValueError):
    """The SQL is not one reading statement, or DuckDB refused it."""
