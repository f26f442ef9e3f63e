"""The inbox: which files were delivered by whom, and how to read one without trusting it.

A delivery is ``INBOX/OWNER/NAME.{jsonl,parquet,csv,txt,md}``, plain or with ``.gz`` or ``.zst`` behind.
Names that begin with a dot are the file system's or an editor's and are left alone; everything else
that lies in the inbox is either read or reported with a reason.

A file is a stranger's. It may be a pipe that never ends (only regular files are opened, and never
through a symbolic link), a bomb (decompression stops as soon as a limit is passed), one line of 200 MB
(:func:`lines` passes over it without holding it) or be written to while it is read (its keyed digest is
taken before and after). Cost: two passes of HMAC-SHA256, about 450 MB/s each.
"""

import contextlib
import hmac
import io
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from pipelines.storage.config import OWNER_PATTERN, IntakeConfig
from pipelines.storage.errors import IntakeError
from provenance.canonical import keyed

FORMATS: Final = ("jsonl", "parquet", "csv", "txt", "md")
COMPRESSIONS: Final = {".gz": "gzip", ".zst": "zstd"}
CHUNK_BYTES: Final = 1 << 18
_FREE_EXPANSION: Final = 16 << 20
"""Bytes that any compressed file may become, however small it is: short rows repeat a lot."""


class FileProblem(Exception):  # noqa: N818 - it is a reason for quarantine, not an error of the program
    """Why a whole file goes to quarantine. Never holds text of the file."""

    def __init__(self, reason: str, detail: str) -> None:
        """Keep the reason for the quarantine table."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Delivery:
    """One file of the inbox."""

    owner: str
    name: str
    """File name inside the owner's folder."""
    path: Path
    form: str
    """One of FORMATS, or "" if the file cannot be read at all."""
    compression: str
    """"gzip", "zstd" or ""."""
    size: int
    digest: bytes
    """HMAC-SHA256(K_file, file bytes), or of nothing if the file cannot be read."""
    problem: FileProblem | None = None
    """Why the file is not read."""

    @property
    def label(self) -> str:
        """OWNER/NAME, as it stands in tables."""
        return f"{self.owner}/{self.name}" if self.owner else self.name

    @property
    def source(self) -> str:
        """Name of the source for rows that state none: a file keeps it when it is compressed."""
        return self.name.removesuffix(".gz").removesuffix(".zst")


class Stream(Protocol):
    """What the row readers need: at most ``size`` bytes, b"" at the end."""

    def read(self, size: int, /) -> bytes:
        """The next bytes."""


class Line(NamedTuple):
    """One line of a file."""

    data: bytes | None
    """Without its LF; None if it is longer than the limit."""
    size: int
    digest: bytes
    """HMAC-SHA256(K_file, line)."""
    num_quotes: int = 0
    """Double quotes in a line that is too long to be seen."""


def scan(inbox: Path, k_file: bytes) -> list[Delivery]:
    """What lies in the inbox, in the order in which it is taken in.

    Args:
        inbox: a folder with one folder per owner.
        k_file: the key of file digests.

    Returns:
        Deliveries sorted by owner and name, those that cannot be read included.

    Raises:
        IntakeError: the inbox does not exist or holds no file; the message says what to do.
    """
    if not inbox.is_dir():
        raise IntakeError(
            f"no inbox folder {inbox.name!r}: make it, with one folder of files per owner"
        )
    found: list[Delivery] = []
    for entry in _visible(inbox):
        if not entry.is_dir(follow_symlinks=False):
            found.append(
                _unread(
                    "", Path(entry.path), FileProblem("misplaced", "deliveries lie in INBOX/OWNER/")
                )
            )
            continue
        try:
            files = _visible(Path(entry.path))
        except OSError as error:
            found.append(_unread("", Path(entry.path), FileProblem("unreadable", _harmless(error))))
            continue
        found += [examine_file(entry.name, Path(file.path), k_file) for file in files]
    if not found:
        raise IntakeError(
            f"the inbox {inbox.name!r} is empty: put files in {inbox.name}/OWNER/ ({', '.join(FORMATS)}, plain or "
            ".gz or .zst), or unset the inbox to use the default corpus"
        )
    return found


def examine_file(owner: str, path: Path, k_file: bytes) -> Delivery:
    """One file as a delivery of an owner, with its digest or its problem.

    Args:
        owner: owner id.
        path: anything that has a name; a link is not followed.
        k_file: the key of file digests.

    Returns:
        A delivery; nothing is raised for a file that cannot be read.
    """
    try:
        form, compression, size = _examine(owner, path)
        return Delivery(
            owner, _shown(path.name), path, form, compression, size, file_digest(path, k_file)
        )
    except OSError as error:
        return _unread(owner, path, FileProblem("unreadable", _harmless(error)))
    except FileProblem as problem:
        return _unread(owner, path, problem)


def file_digest(path: Path, key: bytes) -> bytes:
    """The keyed digest of a file, read in pieces.

    Args:
        path: a regular file.
        key: the key of file digests.

    Returns:
        ``keyed(key, file bytes)``.

    Raises:
        OSError: the file cannot be read.
    """
    mac = hmac.new(key, digestmod="sha256")
    with open_regular(path) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            mac.update(chunk)
    return mac.digest()


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a file for reading, if it is one.

    Args:
        path: what should be a regular file.

    Yields:
        A descriptor, closed afterwards.

    Raises:
        FileProblem: a symbolic link, a pipe, a device.
        OSError: the file cannot be opened.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to must not hang before we can look at it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise FileProblem("not_a_file", "only regular files are read")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def open_stream(delivery: Delivery, limits: IntakeConfig) -> Iterator[Stream]:
    """The decompressed bytes of a delivery; reading past a limit raises.

    Args:
        delivery: a delivery without a problem.
        limits: sizes that a file may have.

    Yields:
        A stream; every failure of it is a :class:`FileProblem`.

    Raises:
        FileProblem: unreadable, larger than ``max_file_bytes``, or a bomb.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_regular(delivery.path))
            file = stack.enter_context(os.fdopen(os.dup(descriptor), "rb", buffering=0))
        except OSError as error:
            raise FileProblem("unreadable", _harmless(error)) from None
        yield _Bounded(_decompressor(file, delivery.compression), delivery, limits)


def lines(stream: Stream, limit: int, key: bytes) -> Iterator[Line]:
    r"""The lines of a stream, never holding more than the limit and one chunk.

    Args:
        stream: bytes.
        limit: longest line in bytes that is handed out.
        key: key of the lines' digests.

    Yields:
        Lines in order; the last one may end without LF.
    """
    held = b""
    mac = None  # of a line that is too long to be held
    passed = quotes = 0
    while chunk := stream.read(CHUNK_BYTES):
        pieces = chunk.split(b"\n")
        for number, piece in enumerate(pieces):
            if mac is None and len(held) + len(piece) > limit:
                mac = hmac.new(key, held, "sha256")
                passed, quotes, held = len(held), held.count(b'"'), b""
            if mac is not None:
                mac.update(piece)
                passed += len(piece)
                quotes += piece.count(b'"')
            else:
                held = held + piece if held else piece
            if number < len(pieces) - 1:
                yield (
                    Line(None, passed, mac.digest(), quotes)
                    if mac
                    else Line(held, len(held), keyed(key, held))
                )
                held, mac = b"", None
    if mac is not None:
        yield Line(None, passed, mac.digest(), quotes)
    elif held:
        yield Line(held, len(held), keyed(key, held))


class _Bounded:
    """A stream that counts what it hands out."""

    def __init__(
        self, read: Callable[[int], bytes], delivery: Delivery, limits: IntakeConfig
    ) -> None:
        self._read = read
        self._count = 0
        self._most = limits.max_file_bytes
        self._expansion = limits.max_expansion
        grown = max(delivery.size * limits.max_expansion, _FREE_EXPANSION)
        self._most_grown = grown if delivery.compression else limits.max_file_bytes

    def read(self, size: int, /) -> bytes:
        try:
            data = self._read(size)
        except (OSError, ValueError) as error:  # Arrow's errors are one of the two
            raise FileProblem("unreadable", _harmless(error)) from None
        self._count += len(data)
        if self._count > self._most:
            raise FileProblem("too_large", f"more than {self._most} bytes (intake.max_file_bytes)")
        if self._count > self._most_grown:
            raise FileProblem(
                "expands_too_much",
                f"more than {self._expansion} bytes from each compressed one (intake.max_expansion)",
            )
        return data


def _decompressor(file: io.FileIO, compression: str) -> Callable[[int], bytes]:
    if not compression:
        return file.read
    import pyarrow as pa

    # Arrow's stream checks checksums and refuses a truncated end, also for zstd; it reads several
    # members or frames in a row and holds one window (at most 128 MB, 8 MB as zstd is mostly used).
    reader = pa.CompressedInputStream(pa.PythonFile(file, mode="r"), compression)
    read: Callable[[int], bytes] = reader.read
    return read


def _visible(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted(
            (entry for entry in entries if not entry.name.startswith(".")),
            key=lambda entry: entry.name,
        )


def _examine(owner: str, path: Path) -> tuple[str, str, int]:
    """Format, compression and size of a file that may be read."""
    if not OWNER_PATTERN.fullmatch(owner):
        allowed = "owner ids: letters, digits, '.', '_', '-', at most 64"
        raise FileProblem("bad_owner", allowed)
    status = path.stat(follow_symlinks=False)
    if stat.S_ISDIR(status.st_mode):
        raise FileProblem("misplaced", "files lie directly in INBOX/OWNER/")
    if not stat.S_ISREG(status.st_mode):
        raise FileProblem("not_a_file", "only regular files are read")
    compression = COMPRESSIONS.get(path.suffix.lower(), "")
    form = (path.with_suffix("") if compression else path).suffix.lower().removeprefix(".")
    if form not in FORMATS:
        raise FileProblem("unknown_format", f"known are {', '.join(FORMATS)} (.gz, .zst)")
    return form, compression, status.st_size


def _unread(owner: str, path: Path, problem: FileProblem) -> Delivery:
    return Delivery(_shown(owner), _shown(path.name), path, "", "", 0, b"", problem)


def _shown(name: str) -> str:
    """A file name as text: names are bytes on a disk and need not be UTF-8."""
    return os.fsencode(name).decode("utf-8", "replace")


def _harmless(error: BaseException) -> str:
    """What went wrong, without words that may come from inside the file."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return "truncated or damaged"
