"""Rows of a CSV file: RFC 4180 with a header, in bounded memory.

Commas, double quotes, doubled quotes inside. Python's parser would hold a quoted cell of 200 MB before it
complains, so logical rows are found first, by following the quotes through bounded lines, and only rows of
an acceptable length are parsed. A row that is too long is passed over; its quotes are counted, so the next
row begins where it should.

When it is wrong: a quote that is opened and never closed makes one row of the rest of the file.
"""

import csv
import hmac
from collections.abc import Iterator

from pipelines.storage.config import IntakeConfig
from pipelines.storage.deliveries import FileProblem, Line
from pipelines.storage.rows import FIELDS, Row, row_bytes, too_long


def csv_rows(physical: Iterator[Line], limits: IntakeConfig, k_file: bytes) -> Iterator[Row]:
    """The rows of a CSV file.

    Args:
        physical: its lines, as bounded as ``rows.row_bytes`` says.
        limits: sizes that rows may have.
        k_file: key of raw digests.

    Yields:
        Rows in file order, without the header.

    Raises:
        FileProblem: no header, or one without a column ``text``.
    """
    limit = row_bytes(limits)
    header: list[str] | None = None
    for line in _csv_lines(physical, limit, k_file):
        if line.data is not None and not line.data.strip():
            continue
        cells = line.data and _csv_cells(line.data, limits.max_record_chars)
        if header is None:
            header = _csv_header(cells)
        elif line.data is None:
            yield too_long(line.size, limit, line.digest)
        elif isinstance(cells, Row):
            yield Row({}, cells.reason, cells.detail, line.digest)
        elif not cells or len(cells) != len(header):
            yield Row(
                {},
                "bad_row",
                f"{len(cells or ())} cells, the header has {len(header)}",
                line.digest,
            )
        else:
            # An empty cell is how CSV says that there is no value; an empty text must stay visible.
            filled = {
                key: cell for key, cell in zip(header, cells, strict=True) if cell or key == "text"
            }
            yield Row(
                {key: filled[key] for key in FIELDS if key in filled},
                raw_digest=line.digest,
                num_ignored=len(set(header) - set(FIELDS)),
            )
    if header is None:
        raise FileProblem("empty", "no header")


def _csv_header(cells: "list[str] | Row | bytes | None") -> list[str]:
    if not isinstance(cells, list):
        raise FileProblem("bad_row", "the header is not UTF-8 or not CSV")
    header = [cell.strip() for cell in cells]
    if "text" not in header:
        raise FileProblem(
            "missing_text", "no column `text` in the header (columns are separated by commas)"
        )
    if len(set(header)) != len(header):
        raise FileProblem("bad_row", "a column stands twice in the header")
    return header


def _csv_cells(data: bytes, max_chars: int) -> list[str] | Row:
    previous = csv.field_size_limit(max(max_chars, 1 << 17))
    try:
        return next(csv.reader([data.decode("utf-8")], strict=True), [])
    except UnicodeDecodeError as error:
        return Row({}, "bad_utf8", f"byte {error.start} of the row")
    except csv.Error as error:
        if "field larger" in str(error):
            return Row({}, "too_long", f"a cell has more than {max_chars} characters")
        return Row({}, "bad_row", "not CSV: quotes do not match")
    finally:
        csv.field_size_limit(previous)


def _csv_lines(physical: Iterator[Line], limit: int, key: bytes) -> Iterator[Line]:
    """Logical rows: physical lines joined while a quote is open."""
    row = _Open(key)
    inside = False
    for line in physical:
        if line.data is None:
            # Quotes inside a quoted cell are doubled, so an odd number opens or closes one.
            inside ^= bool(line.num_quotes % 2)
        else:
            inside = _quote_open(line.data, inside=inside)
        if not inside and not row.size:
            yield line  # by far the most: a row is a line
            continue
        row.add(line, limit)
        if not inside:
            yield row.line
            row = _Open(key)
    if row.size:
        yield row.line


class _Open:
    """A logical row of several lines; beyond the limit only its size and digest go on growing."""

    def __init__(self, key: bytes) -> None:
        self.size = 0
        self._held: list[bytes] | None = []
        self._mac = hmac.new(key, digestmod="sha256")

    def add(self, line: Line, limit: int) -> None:
        self.size += line.size + 1
        if line.data is None or self.size > limit:
            self._held = None
        if self._held is not None and line.data is not None:
            self._held.append(line.data)
        # A line that was not held is known by its digest only.
        self._mac.update(line.digest if line.data is None else line.data + b"\n")

    @property
    def line(self) -> Line:
        data = None if self._held is None else b"\n".join(self._held)
        return Line(data, self.size - 1, self._mac.digest())


def _quote_open(line: bytes, *, inside: bool) -> bool:
    """Whether a quoted cell is still open at the end of a line."""
    if b'"' not in line:
        return inside
    at, fresh = 0, True
    while at < len(line):
        if inside:
            quote = line.find(b'"', at)
            if quote < 0:
                return True
            if line[quote + 1 : quote + 2] == b'"':
                at = quote + 2
                continue
            inside, fresh, at = False, False, quote + 1
        elif fresh and line[at : at + 1] == b'"':
            inside, at = True, at + 1
        else:
            comma = line.find(b",", at)
            if comma < 0:
                return False
            fresh, at = True, comma + 1
    return inside
