"""How large the pages of a Parquet file become, read from their headers before anything is unpacked.

A Parquet column is a run of pages, and a reader must unpack a whole page to see one value of it. The
file's footer states totals only, and a stranger wrote it; the page headers are what the reader will
believe. So we walk them: a header is a small Thrift struct (compact protocol) whose fields 1, 2 and 3 are
the kind and the sizes without and with compression; the rest is skipped over. A page of 1 GB of zeros takes 30 kB.

Cost: one seek and a few dozen bytes per page (about 1 MB of text each).

Source: apache/parquet-format, PageHeader; Apache Thrift, compact protocol.
"""

from typing import Any, BinaryIO, Final

from pipelines.storage.config import IntakeConfig
from pipelines.storage.deliveries import FileProblem

MAX_PAGE_BYTES: Final = 101 << 20
"""DuckDB writes pages of up to 100 MiB, other writers 1 MiB; what is larger is no delivery of texts."""

MAX_DICTIONARY_BYTES: Final = 16 << 20
"""Writers end a dictionary at about 1 MiB; it is unpacked again for every batch of rows."""

_DICTIONARY_PAGE: Final = 2
_HEADER_BYTES: Final = 1 << 16
_MAX_DEPTH: Final = 16

# Types of the compact protocol: bytes that follow for true, false, i8 and double; the rest by name.
_FIXED: Final = {1: 0, 2: 0, 3: 1, 7: 8}
_INTEGERS: Final = (4, 5, 6)
_I32: Final = 5
_BINARY: Final = 8
_LISTS: Final = (9, 10)
_STRUCT: Final = 12


def largest_data_page(source: Any, file: BinaryIO, columns: list[str], limits: IntakeConfig) -> int:
    """The unpacked size of the largest data page of some columns, all pages checked.

    Args:
        source: the ``pyarrow.parquet.ParquetFile`` of the file.
        file: the same file, for seeking; its position is restored.
        columns: names of top-level columns that will be read.
        limits: sizes that files may have.

    Returns:
        Bytes.

    Raises:
        FileProblem: a page or all pages together are too large, or the headers make no sense.
    """
    at = file.tell()
    try:
        return _walk(source.metadata, file, set(columns), limits)
    except (IndexError, ValueError, OverflowError):
        raise FileProblem("unreadable", "page headers are damaged") from None
    finally:
        file.seek(at)


def _walk(metadata: Any, file: BinaryIO, columns: set[str], limits: IntakeConfig) -> int:
    largest = total = 0
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(number)
            if chunk.path_in_schema.split(".")[0] not in columns:
                continue
            at = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset:
                at = min(at, chunk.dictionary_page_offset)
            end = at + chunk.total_compressed_size
            while at < end:
                file.seek(at)
                header, kind, unpacked, packed = _sizes(file.read(_HEADER_BYTES))
                at, total = at + header + packed, total + unpacked
                most = MAX_DICTIONARY_BYTES if kind == _DICTIONARY_PAGE else MAX_PAGE_BYTES
                if unpacked > most:
                    raise FileProblem(
                        "expands_too_much", f"a page of {unpacked} bytes, at most {most}"
                    )
                # A dictionary is shared by the rows of a batch, data pages add up.
                largest = largest if kind == _DICTIONARY_PAGE else max(largest, unpacked)
                if total > limits.max_file_bytes:
                    raise FileProblem(
                        "too_large",
                        f"more than {limits.max_file_bytes} bytes (intake.max_file_bytes)",
                    )
    return largest


def _sizes(data: bytes) -> tuple[int, int, int, int]:
    """Length of the header, kind of page, and its sizes without and with compression."""
    sizes = {1: 0, 2: 0, 3: 0}
    at = field = 0
    while data[at]:
        kind = data[at] & 0x0F
        delta = data[at] >> 4
        at += 1
        if delta:
            field += delta
        else:
            zigzag, at = _varint(data, at)
            field = zigzag >> 1
        if field in sizes and kind == _I32:
            zigzag, at = _varint(data, at)
            sizes[field] = zigzag >> 1
            if zigzag & 1:
                raise ValueError("negative size")
        else:
            at = _skip(data, at, kind, 0)
    return at + 1, sizes[1], sizes[2], sizes[3]


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 63:
            raise ValueError("varint too long")


def _skip(data: bytes, at: int, kind: int, depth: int) -> int:
    """The place behind a value of a Thrift compact type."""
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if kind in _FIXED:
        return at + _FIXED[kind]
    if kind in _INTEGERS:
        return _varint(data, at)[1]
    if kind == _BINARY:
        length, at = _varint(data, at)
        return at + length
    if kind in _LISTS:
        return _skip_list(data, at, depth)
    if kind == _STRUCT:
        return _skip_struct(data, at, depth)
    raise ValueError("unknown type")


def _skip_list(data: bytes, at: int, depth: int) -> int:
    count, inner = data[at] >> 4, data[at] & 0x0F
    at += 1
    if count == 15:
        count, at = _varint(data, at)
    if count > len(data):
        raise ValueError("list longer than the header")
    for _ in range(count):
        # Inside a list a boolean takes a byte; as a field it is part of the type.
        at = at + 1 if inner in (1, 2) else _skip(data, at, inner, depth + 1)
    return at


def _skip_struct(data: bytes, at: int, depth: int) -> int:
    while data[at]:
        inner, has_long_id = data[at] & 0x0F, not data[at] >> 4
        at += 1
        if has_long_id:
            at = _varint(data, at)[1]
        at = _skip(data, at, inner, depth + 1)
    return at + 1
