"""Rows out of a file that nobody has checked yet: which reader for which format.

Every reader yields rows in order and in bounded memory. JSONL and text files are read here, CSV and Parquet
in modules of their own.
"""

import codecs
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.storage.config import IntakeConfig
from pipelines.storage.csv_rows import csv_rows
from pipelines.storage.deliveries import (
    CHUNK_BYTES,
    Delivery,
    FileProblem,
    Line,
    Stream,
    lines,
    open_stream,
)
from pipelines.storage.parquet_rows import parquet_file, parquet_rows
from pipelines.storage.records import cut
from pipelines.storage.rows import FIELDS, Row, row_bytes, too_long


def read_rows(
    delivery: Delivery, limits: IntakeConfig, k_file: bytes, scratch: Path
) -> Iterator[Row]:
    """The rows of a delivery.

    Args:
        delivery: a delivery without a problem.
        limits: sizes that rows and files may have.
        k_file: key of raw digests.
        scratch: folder for a decompressed Parquet file; nothing stays there.

    Yields:
        Rows in file order.

    Raises:
        FileProblem: the file as a whole goes to quarantine.
    """
    if delivery.form == "parquet":
        with parquet_file(delivery, limits, scratch) as file:
            yield from parquet_rows(file, limits)
        return
    with open_stream(delivery, limits) as stream:
        if delivery.form == "jsonl":
            yield from _jsonl_rows(_lines(stream, limits, k_file), limits)
        elif delivery.form == "csv":
            yield from csv_rows(_lines(stream, limits, k_file), limits, k_file)
        else:
            yield from _text_rows(stream)


def _lines(stream: Stream, limits: IntakeConfig, k_file: bytes) -> Iterator[Line]:
    """The lines, the first without a byte order mark."""
    for number, line in enumerate(lines(stream, row_bytes(limits), k_file)):
        if number == 0 and line.data is not None and line.data.startswith(codecs.BOM_UTF8):
            yield line._replace(data=line.data.removeprefix(codecs.BOM_UTF8))
        else:
            yield line


def _jsonl_rows(physical: Iterator[Line], limits: IntakeConfig) -> Iterator[Row]:
    limit = row_bytes(limits)
    for line in physical:
        if line.data is None:
            yield too_long(line.size, limit, line.digest)
        elif line.data.strip():
            yield _jsonl_row(line.data, line.digest)


def _jsonl_row(data: bytes, digest: bytes) -> Row:
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        return Row({}, "bad_utf8", f"byte {error.start} of the row", digest)
    except _DuplicateError:
        return Row({}, "bad_row", "a key stands twice: two readers would see two rows", digest)
    except RecursionError:
        return Row({}, "bad_row", "nested too deeply", digest)
    except ValueError as error:
        return Row({}, "bad_row", f"not JSON at character {getattr(error, 'pos', 0)}", digest)
    if not isinstance(document, dict):
        return Row({}, "bad_row", "a row is a JSON object", digest)
    return _row(document, digest)


def _row(document: Mapping[str, Any], digest: bytes | None) -> Row:
    fields = {key: document[key] for key in FIELDS if document.get(key) is not None}
    return Row(fields, raw_digest=digest, num_ignored=len(document.keys() - set(FIELDS)))


class _DuplicateError(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        raise _DuplicateError
    return document


def _text_rows(stream: Stream) -> Iterator[Row]:
    for run in cut(_decoded(stream)):
        yield Row({"text": run})


def _decoded(stream: Stream) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    seen = 0
    while True:
        chunk = stream.read(CHUNK_BYTES)
        try:
            yield decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            raise FileProblem(
                "bad_utf8", f"near byte {seen + error.start}: save the file as UTF-8"
            ) from None
        if not chunk:
            return
        seen += len(chunk)
