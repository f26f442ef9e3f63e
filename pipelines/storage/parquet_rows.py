"""Rows of a Parquet file from a stranger, in bounded memory.

What can go wrong is bounded before it is read: page sizes by their headers
(:mod:`pipelines.storage.parquet_pages`), kinds of columns by the schema, rows per batch by the largest page.
String columns are read as dictionaries, so a text that stands in a thousand rows is held once, and a value
that is too long or not UTF-8 costs its own row only.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

from pipelines.storage import parquet_pages
from pipelines.storage.config import IntakeConfig
from pipelines.storage.deliveries import (
    CHUNK_BYTES,
    Delivery,
    FileProblem,
    open_regular,
    open_stream,
)
from pipelines.storage.rows import FIELDS, Row, row_bytes

_BATCH_ROWS: Final = 1024
_BATCH_BYTES: Final = 64 << 20


@contextmanager
def parquet_file(delivery: Delivery, limits: IntakeConfig, scratch: Path) -> Iterator[BinaryIO]:
    """The Parquet file itself, or its decompressed bytes in an unnamed file: Parquet needs seeks.

    Args:
        delivery: a Parquet delivery without a problem.
        limits: sizes that files may have.
        scratch: folder for the unnamed file.

    Yields:
        A file that can be read and seeked.

    Raises:
        FileProblem: it cannot be opened or is too large.
        OSError: the scratch folder cannot be written.
    """
    if delivery.compression:
        with tempfile.TemporaryFile(dir=scratch) as spool:
            with open_stream(delivery, limits) as stream:
                while chunk := stream.read(CHUNK_BYTES):
                    spool.write(chunk)
            spool.seek(0)
            yield spool
        return
    if delivery.size > limits.max_file_bytes:
        raise FileProblem(
            "too_large", f"more than {limits.max_file_bytes} bytes (intake.max_file_bytes)"
        )
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(open_regular(delivery.path))
        except OSError:
            raise FileProblem("unreadable", "cannot be opened") from None
        yield stack.enter_context(os.fdopen(os.dup(descriptor), "rb"))


def parquet_rows(file: BinaryIO, limits: IntakeConfig) -> Iterator[Row]:
    """The rows of a Parquet file.

    Args:
        file: from :func:`parquet_file`.
        limits: sizes that rows and files may have.

    Yields:
        Rows in file order.

    Raises:
        FileProblem: not Parquet, no usable column ``text``, or larger than it may be.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(file)
        file.seek(0)
        names = schema.names
        wanted = [name for name in FIELDS if name in names]
        _check_schema(schema, wanted)
        # As dictionaries: a long value that stands in a thousand rows is held once.
        repeated = [name for name in wanted if _is_text(schema.field(name).type)]
        source = pq.ParquetFile(file, read_dictionary=repeated, buffer_size=CHUNK_BYTES)
        page = parquet_pages.largest_data_page(source, file, wanted, limits)
        size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, page)))
        seen = 0
        for batch in source.iter_batches(batch_size=size, columns=wanted, use_threads=False):
            rows = _parquet_batch(batch, wanted, limits)
            seen += sum(len(row.fields.get("text", "")) + 1 for row in rows)
            if seen > limits.max_file_bytes:  # few pages can stand for many rows
                raise FileProblem(
                    "too_large",
                    f"more than {limits.max_file_bytes} characters (intake.max_file_bytes)",
                )
            ignored = len(names) - len(wanted)
            yield from (replace(row, num_ignored=ignored) for row in rows)
    except (pa.ArrowException, OSError, ValueError, EOFError):
        raise FileProblem("unreadable", "not a Parquet file, or damaged") from None


def _check_schema(schema: Any, wanted: list[str]) -> None:
    import pyarrow.types as kinds

    if "text" not in wanted:
        raise FileProblem("missing_text", "no column `text`")
    simple = (kinds.is_integer, kinds.is_boolean, kinds.is_date, kinds.is_timestamp, kinds.is_null)
    for name in wanted:
        kind = schema.field(name).type
        if not _is_text(kind) and (name == "text" or not any(check(kind) for check in simple)):
            raise FileProblem(
                "bad_value", f"column `{name}` holds neither strings nor simple values"
            )


def _is_text(kind: Any) -> bool:
    import pyarrow.types as kinds

    kind = kind.value_type if kinds.is_dictionary(kind) else kind
    return bool(kinds.is_string(kind) or kinds.is_large_string(kind) or kinds.is_string_view(kind))


def _parquet_batch(batch: Any, names: list[str], limits: IntakeConfig) -> list[Row]:
    limit = row_bytes(limits)
    columns = {name: _parquet_column(batch.column(name), limit) for name in names}
    rows = []
    for number in range(batch.num_rows):
        fields = {
            name: values[number] for name, values in columns.items() if values[number] is not None
        }
        problem = next((value for value in fields.values() if isinstance(value, Row)), None)
        rows.append(problem or Row(fields))
    return rows


def _parquet_column(column: Any, limit: int) -> list[Any]:
    """The values of a column; a :class:`Row` stands for a value that cannot be used."""
    import pyarrow as pa

    if not pa.types.is_dictionary(column.type):
        return column.to_pylist()
    codes = column.indices.to_pylist()
    # As bytes, and only values that occur: one that cannot be used must not cost the others.
    dictionary = column.dictionary.cast(pa.large_binary())
    values = {code: _value(dictionary[code], limit) for code in set(codes) if code is not None}
    return [None if code is None else values[code] for code in codes]


def _value(raw: Any, limit: int) -> str | Row | None:
    data = raw.as_buffer()
    if data is None:
        return None
    if data.size > limit:
        return Row({}, "too_long", f"value of {data.size} bytes, at most {limit}")
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        return Row({}, "bad_utf8", f"byte {error.start} of a value")
