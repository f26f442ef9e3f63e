"""The home folder: one place that holds everything, with one name for each thing in it.

::

    HOME/
      format               {"format": 1}: a newer one is refused, never guessed at
      dataworth.toml       the configuration (config)
      keys                 secret keys of the corpus, mode 0600 (keys)
      salts, suppressed    sealed salts; keyed list of what must not come back (salts, suppression)
      HEAD                 id of the corpus version in force
      inbox/OWNER/*        deliveries, when the user has not named a folder of their own
      blocks/ versions/ storage/     the corpus: Parquet files, identities, where their rows lie
      tokenizer/ tokens/ target/     what the trainer reads
      tables/NAME.parquet  quarantine, clusters, values, prices: what ``dataworth sql`` sees
      runs/ ledger/ receipts/ requests/ erasure/ lookalikes/
      results/ plans/ reports/ logs/   what the asset graph made
      staging/ locks/      scratch space of one writer; advisory locks

Locks are ``flock``: the kernel frees them when a process dies, however it dies, so a lock file that
is left over means nothing. They do not work across machines on every network file system.
"""

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelines.storage.errors import HomeError
from provenance.canonical import jcs, parse_json, write_atomic

FORMAT: Final = 1

_FOLDERS: Final = (
    "inbox",
    "blocks",
    "versions",
    "storage",
    "tokenizer",
    "tokens",
    "target",
    "tables",
    "runs",
    "ledger",
    "receipts",
    "requests",
    "erasure",
    "lookalikes",
    "staging",
    "locks",
    "results",
    "plans",
    "reports",
    "logs",
)
_POLL_S: Final = 0.02
_THREAD: Final = threading.local()


@dataclass(frozen=True, slots=True)
class Home:
    """A home folder; making the object touches no disk."""

    path: Path

    def create(self) -> "Home":
        """Make the folder and its parts; what is there stays.

        Returns:
            This home.

        Raises:
            HomeError: the path is a file, is a folder of something else, or has another format.
        """
        if self.path.exists() and not self.path.is_dir():
            raise HomeError(f"home {self.path.name!r} is a file: name a folder")
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self.format_path.exists():
            self.check()
        for name in _FOLDERS:
            (self.path / name).mkdir(exist_ok=True)
        if not self.format_path.exists():
            write_atomic(self.format_path, jcs({"format": FORMAT}))
        return self

    def check(self) -> None:
        """Refuse a home that this program cannot read correctly.

        Raises:
            HomeError: there is no home, or it was written by another version of this program.
        """
        try:
            document = parse_json(self.format_path.read_bytes())
        except FileNotFoundError:
            raise HomeError("no home here: run `dataworth init`, or check DATAWORTH_HOME") from None
        except ValueError as error:
            raise HomeError(f"the file `format` of this home is damaged: {error}") from None
        found = document.get("format") if isinstance(document, dict) else None
        if type(found) is not int or found < 1 or document.keys() != {"format"}:
            raise HomeError('the file `format` of this home is damaged: expected {"format":1}')
        if found > FORMAT:
            raise HomeError(
                f"this home has format {found}, this program knows {FORMAT}: use a newer dataworth"
            )

    @contextlib.contextmanager
    def lock(self, name: str, timeout_s: float | None = None) -> Iterator[None]:
        """Hold a lock against every other process and thread; a thread may take its own lock again.

        Args:
            name: what is locked; ``corpus`` for everything that makes or moves a version.
            timeout_s: give up after so many seconds; None waits for ever.

        Yields:
            Nothing; the lock is held inside the ``with`` block.

        Raises:
            HomeError: the lock was not free in time.
        """
        held = _held()
        key = (os.path.realpath(self.path), name)
        if held.get(key):
            held[key] += 1
            try:
                yield
            finally:
                held[key] -= 1
            return
        self.locks.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            self.locks / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            while not _try_lock(descriptor, wait=deadline is None):
                if deadline is not None and time.monotonic() >= deadline:
                    raise HomeError(
                        f"another process holds the lock {name!r}: wait for it to finish, then try again"
                    )
                time.sleep(_POLL_S)
            held[key] = 1
            yield
        finally:
            held.pop(key, None)
            os.close(descriptor)  # closing frees the lock

    def table(self, name: str) -> Path:
        """The Parquet file of a table that ``dataworth sql`` shows.

        Args:
            name: quarantine, duplicates, clusters, values, prices.

        Returns:
            HOME/tables/NAME.parquet, which need not exist.
        """
        return self.path / "tables" / f"{name}.parquet"

    @property
    def format_path(self) -> Path:
        """The file that states the format."""
        return self.path / "format"

    @property
    def config_path(self) -> Path:
        """dataworth.toml."""
        return self.path / "dataworth.toml"

    @property
    def keys_path(self) -> Path:
        """The secret keys of the corpus."""
        return self.path / "keys"

    @property
    def salts_path(self) -> Path:
        """The sealed salts."""
        return self.path / "salts"

    @property
    def suppression_path(self) -> Path:
        """The keyed list of what must not come back."""
        return self.path / "suppressed"

    @property
    def head_path(self) -> Path:
        """The id of the version in force."""
        return self.path / "HEAD"

    @property
    def inbox(self) -> Path:
        """Deliveries, one folder per owner."""
        return self.path / "inbox"

    @property
    def blocks(self) -> Path:
        """Parquet files of the archive, named by keyed digest."""
        return self.path / "blocks"

    @property
    def versions(self) -> Path:
        """Identities: versions/ID/manifest.json."""
        return self.path / "versions"

    @property
    def storage(self) -> Path:
        """Where the rows of a version lie: storage/ID.json, ID.leaves and ID.crown."""
        return self.path / "storage"

    @property
    def tokenizer_path(self) -> Path:
        """The frozen tokenizer of this corpus lineage."""
        return self.path / "tokenizer" / "tokenizer.json"

    @property
    def tokens(self) -> Path:
        """Token folders: tokens/ID."""
        return self.path / "tokens"

    @property
    def target(self) -> Path:
        """Held-out records."""
        return self.path / "target"

    @property
    def tables(self) -> Path:
        """Tables for SQL."""
        return self.path / "tables"

    @property
    def runs(self) -> Path:
        """Training runs."""
        return self.path / "runs"

    @property
    def ledger(self) -> Path:
        """The append-only ledger."""
        return self.path / "ledger"

    @property
    def receipts(self) -> Path:
        """Receipts, one file per owner and version; secrets of the owners."""
        return self.path / "receipts"

    @property
    def requests(self) -> Path:
        """Erasure and withdrawal requests, without text."""
        return self.path / "requests"

    @property
    def erasure(self) -> Path:
        """Sealed texts of open requests."""
        return self.path / "erasure"

    @property
    def lookalikes(self) -> Path:
        """Records that were never delivered, for audits."""
        return self.path / "lookalikes"

    @property
    def staging(self) -> Path:
        """Scratch space of one writer."""
        return self.path / "staging"

    @property
    def results(self) -> Path:
        """What each asset left behind, by input digest: the cache of the graph."""
        return self.path / "results"

    @property
    def locks(self) -> Path:
        """Lock files; their presence means nothing."""
        return self.path / "locks"


def _held() -> dict[tuple[str, str], int]:
    """How often this thread holds each lock. A forked child holds none: its descriptor is a copy."""
    if getattr(_THREAD, "pid", None) != os.getpid():
        _THREAD.pid = os.getpid()
        _THREAD.locks = {}
    locks: dict[tuple[str, str], int] = _THREAD.locks
    return locks


def _try_lock(descriptor: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
