"""Intake: what was delivered becomes records, or stands in quarantine with a reason.

    received = accepted + held_out + quarantined + duplicates

holds for every inbox. A file that cannot be read counts as one, as the quarantine row -1. Of equal
contents from one owner the first counts (files by name, rows in order), the others are duplicates; equal
contents from *different* owners stay records and meet in the clusters.

Held out are records on or after ``target.since``; a content that is held out anywhere is never trained
on, whoever else delivered it with whatever date.

Memory: one chunk of a file, one row, and the accepted records themselves. Reading the same inbox again
gives the same result; deliveries stay where they are.

The raw digest in the tables is that of the text, or of the row where no text could be read, keyed with
k_file; so an owner who still has the row can find it, and nobody else can guess it.
"""

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import polars as pl

from pipelines.storage.checks import Refusal, Rules, examine
from pipelines.storage.config import Config
from pipelines.storage.deliveries import Delivery, FileProblem, examine_file, file_digest, scan
from pipelines.storage.errors import TargetError
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.readers import read_rows
from pipelines.storage.records import SCHEMA
from pipelines.storage.rows import Row
from pipelines.storage.suppression import SuppressionList
from provenance.canonical import keyed

QUARANTINE_SCHEMA: Final = pl.Schema(
    {
        "delivery": pl.String(),
        "owner": pl.String(),
        "row": pl.Int64(),
        "reason": pl.String(),
        "detail": pl.String(),
        "raw_digest": pl.Binary(),
    }
)
"""Columns of the tables quarantine and duplicates; row -1 is the whole file."""

_PLACE: Final = {"_file": pl.Int64(), "_row": pl.Int64()}
_CHUNK_CHARS: Final = 4 << 20
_CHUNK_ROWS: Final = 1 << 14
_MANY_REFUSED: Final = 10_000

_ACCEPTED, _HELD_OUT, _DUPLICATE, _DUPLICATE_KEY, _IN_TARGET = range(5)

Refused = tuple[str, str, int, str, str, bytes | None]


@dataclass(frozen=True, slots=True)
class Counts:
    """received = accepted + held_out + quarantined + duplicates."""

    received: int
    accepted: int
    held_out: int
    quarantined: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class FileReport:
    """What became of one file."""

    delivery: str
    digest: str
    """Hex of HMAC-SHA256(K_file, file bytes); "" if the file could not be opened."""
    size: int
    received: int
    """Rows, or 1 for a file that could not be read."""
    ignored_fields: int
    """Most fields of one row that are not ours and were left out."""


@dataclass(frozen=True, slots=True)
class Intake:
    """The result of reading an inbox."""

    records: pl.DataFrame
    """Accepted records, columns of ``records.SCHEMA``."""
    held_out: pl.DataFrame
    """Records of the target, same columns."""
    quarantine: pl.DataFrame
    """Refused rows and files, columns of QUARANTINE_SCHEMA."""
    duplicates: pl.DataFrame
    """Rows that an owner delivered twice, same columns."""
    counts: Counts
    files: tuple[FileReport, ...]


def read_deliveries(
    inbox: Path,
    *,
    config: Config,
    keys: CorpusKeys,
    suppression: SuppressionList,
    scratch: Path,
    target_fingerprints: AbstractSet[bytes] = frozenset(),
) -> Intake:
    """Take in everything that lies in an inbox.

    Args:
        inbox: a folder with one folder per owner.
        config: limits, licences, target date, owners.
        keys: the corpus keys.
        suppression: what must not come back.
        scratch: folder for a decompressed Parquet file; nothing stays there.
        target_fingerprints: contents of a target file; matches go to quarantine.

    Returns:
        Records, held-out records, quarantine, duplicates and counts.

    Raises:
        IntakeError: there is no inbox, or nothing in it; the message says what to do.
        OSError: the scratch folder cannot be written.
    """
    licences = {owner: entry.licence for owner, entry in config.owners.items() if entry.licence}
    rules = Rules(config.intake, keys, suppression, licences)
    read = _Reading(rules, scratch)
    for delivery in scan(inbox, keys.k_file):
        read.take(delivery)
    return _decide(read, config.target.since, target_fingerprints)


def read_target(path: Path, *, config: Config, keys: CorpusKeys, scratch: Path) -> pl.DataFrame:
    """The records of a target file (``target.path``).

    Args:
        path: a file in one of the delivery formats.
        config: limits and licences.
        keys: the corpus keys.
        scratch: folder for a decompressed Parquet file.

    Returns:
        Records of the owner ``target``, equal contents once.

    Raises:
        TargetError: the file cannot be read, or one of its rows cannot; a target is all or nothing.
    """
    if not path.is_file():
        raise TargetError(
            f"the target file {path.name!r} does not exist: check [target] path in dataworth.toml"
        )
    nothing = SuppressionList(scratch / "no-suppression-list", keys)
    read = _Reading(Rules(config.intake, keys, nothing, {}), scratch)
    read.take(examine_file("target", path, keys.k_file))
    if read.refused:
        _, _, row, reason, detail, _ = read.refused[0]
        place = "" if row < 0 else f", row {row}"
        raise TargetError(
            f"the target file {path.name!r}{place} cannot be used: {reason}: {detail}"
        )
    return _decide(read, None, frozenset()).records


class _Reading:
    """Rows of the files read so far; a file that fails leaves nothing but its reason."""

    def __init__(self, rules: Rules, scratch: Path) -> None:
        self._rules = rules
        self._scratch = scratch
        self.chunks: list[pl.DataFrame] = []
        self.refused: list[Refused] = []
        self.files: list[FileReport] = []
        self.labels: list[str] = []

    def take(self, delivery: Delivery) -> None:
        """Read one file."""
        chunks, refused = len(self.chunks), len(self.refused)
        self.labels.append(delivery.label)
        received = ignored = 0
        try:
            if delivery.problem is not None:
                raise delivery.problem
            for row in self._rows(delivery):
                received += 1
                ignored = max(ignored, row.num_ignored)
            self._check_complete(delivery, received)
        except FileProblem as problem:
            del self.chunks[chunks:], self.refused[refused:]
            received = 1
            reason, detail = problem.reason, problem.detail
            self.refused.append(
                (delivery.label, delivery.owner, -1, reason, detail, delivery.digest or None)
            )
        self.files.append(
            FileReport(delivery.label, delivery.digest.hex(), delivery.size, received, ignored)
        )

    def _rows(self, delivery: Delivery) -> Iterator[Row]:
        """Every row, after it went into a chunk of records or to the refused ones."""
        rules, limits = self._rules, self._rules.limits
        pending: list[tuple[Any, ...]] = []
        chars = num_refused = 0
        file = len(self.labels) - 1
        rows = read_rows(delivery, limits, rules.keys.k_file, self._scratch)
        for number, row in enumerate(rows):
            if number >= limits.max_file_rows:
                most = f"more than {limits.max_file_rows} rows (intake.max_file_rows)"
                raise FileProblem("too_large", f"{most}: split the file")
            try:
                pending.append((*examine(row, delivery, number, rules), file, number))
                chars += len(row.fields["text"])
            except Refusal as refusal:
                what = (number, refusal.reason, refusal.detail, self._digest(row))
                self.refused.append((delivery.label, delivery.owner, *what))
                num_refused += 1
                # A file of another kind must not fill the memory with reasons.
                if num_refused > _MANY_REFUSED and 2 * num_refused > number + 1:
                    raise FileProblem(
                        "mostly_refused",
                        f"{num_refused} of {number + 1} rows, last {refusal.reason}",
                    ) from None
            if chars > _CHUNK_CHARS or len(pending) >= _CHUNK_ROWS:
                self.chunks.append(_frame(pending))
                pending, chars = [], 0
            yield row
        self.chunks.append(_frame(pending))

    def _digest(self, row: Row) -> bytes | None:
        text = row.fields.get("text")
        if isinstance(text, str):
            return keyed(self._rules.keys.k_file, text.encode("utf-8", "surrogatepass"))
        return row.raw_digest

    def _check_complete(self, delivery: Delivery, received: int) -> None:
        try:
            same = file_digest(delivery.path, self._rules.keys.k_file) == delivery.digest
        except OSError:
            same = False
        if not received:
            raise FileProblem("empty", "no rows")
        if not same:
            raise FileProblem(
                "changed_while_read", "the file was written to while it was read; deliver it again"
            )


def _frame(rows: list[tuple[Any, ...]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={**SCHEMA, **_PLACE}, orient="row")


def _decide(read: _Reading, since: str | None, target: AbstractSet[bytes]) -> Intake:
    """What needs the whole inbox: duplicates, and what is held out."""
    rows = pl.concat([_frame([]), *read.chunks])
    verdicts = pl.Series(_verdicts(rows, since, target), dtype=pl.Int8)
    records, held_out, duplicates = (
        rows.filter(verdicts == code).drop("_file", "_row")
        if code != _DUPLICATE
        else rows.filter(verdicts == code)
        for code in (_ACCEPTED, _HELD_OUT, _DUPLICATE)
    )
    refused = _table(
        [
            *read.refused,
            *_listed(
                rows.filter(verdicts == _DUPLICATE_KEY),
                read,
                "duplicate_key",
                "another text has this place",
            ),
            *_listed(
                rows.filter(verdicts == _IN_TARGET), read, "in_target", "the content is held out"
            ),
        ]
    )
    repeated = _table(_listed(duplicates, read, "duplicate", "delivered already"))
    counts = Counts(
        received=sum(file.received for file in read.files),
        accepted=records.height,
        held_out=held_out.height,
        quarantined=refused.height,
        duplicates=repeated.height,
    )
    assert (
        counts.received
        == counts.accepted + counts.held_out + counts.quarantined + counts.duplicates
    )
    return Intake(records, held_out, refused, repeated, counts, tuple(read.files))


def _verdicts(rows: pl.DataFrame, since: str | None, target: AbstractSet[bytes]) -> Iterator[int]:
    def is_held(date: str | None) -> bool:
        return since is not None and date is not None and date >= since

    columns = rows.select("owner", "source", "position", "fingerprint", "date")
    held = {content for *_, content, date in columns.iter_rows() if is_held(date)} | set(target)
    places: dict[tuple[str, str, int], bytes] = {}
    seen: set[tuple[str, bytes, bool]] = set()
    for owner, source, position, content, date in columns.iter_rows():
        out = is_held(date)
        if content in (target if out else held):
            yield _IN_TARGET
        elif (owner, content, out) in seen:
            yield _DUPLICATE
        elif places.setdefault((owner, source, position), content) != content:
            yield _DUPLICATE_KEY
        else:
            seen.add((owner, content, out))
            yield _HELD_OUT if out else _ACCEPTED


def _listed(rows: pl.DataFrame, read: _Reading, reason: str, detail: str) -> Iterator[Refused]:
    for owner, digest, file, row in rows.select("owner", "raw_digest", "_file", "_row").iter_rows():
        yield read.labels[file], owner, row, reason, detail, digest


def _table(rows: Iterable[Refused]) -> pl.DataFrame:
    # Sorted, so that the table does not depend on the order of the checks.
    ordered = sorted(rows, key=lambda row: (row[0], row[2]))
    return pl.DataFrame(ordered, schema=QUARANTINE_SCHEMA, orient="row")
