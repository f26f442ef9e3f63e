"""Files of the inbox that hold an erased content: a user's are listed, the home's own are rewritten without it.

A user's inbox lies outside of the home, and its files are the user's; the request stays open until they are gone or the user
says that they may stay (`dataworth erase --acknowledge`). Intake refuses the content from now on whatever happens to them.

A text file is cut into records anew once a piece of it is gone: what follows may begin at other borders and is then a new
record; rows of JSONL, CSV and Parquet keep theirs.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from provenance import canonical_bytes, fingerprint, write_atomic

if TYPE_CHECKING:
    from pipelines.site import Site
    from pipelines.storage.deliveries import Delivery

Gone = Callable[[Any], bool]
"""Whether a text is to go."""


def holding(site: "Site", fingerprints: frozenset[bytes]) -> list[str]:
    """Files of the inbox that still hold one of some contents.

    Args:
        site: The open home.
        fingerprints: Keyed digests of the contents.

    Returns:
        OWNER/FILE, sorted.
    """
    return sorted(delivery.label for delivery in _holding(site, _gone(site, fingerprints)))


def rewrite(site: "Site", fingerprints: frozenset[bytes]) -> int:
    """Take contents out of the files of an inbox that lies inside the home.

    Args:
        site: The open home.
        fingerprints: Keyed digests of the contents.

    Returns:
        Number of files rewritten; 0 for an inbox that is the user's.
    """
    if site.inbox.resolve() != site.home.inbox.resolve():
        return 0
    gone = _gone(site, fingerprints)
    found = list(_holding(site, gone))
    for delivery in found:
        kept = _FORMS[delivery.form](_content(site, delivery), gone)
        write_atomic(delivery.path, _compressed(kept, delivery.compression))
    return len(found)


def _gone(site: "Site", fingerprints: frozenset[bytes]) -> Gone:
    from pipelines.steps.ledger import corpus_keys

    key = corpus_keys(site).k_fp

    def gone(text: Any) -> bool:
        if not isinstance(text, str) or not text:
            return False
        with suppress(ValueError):  # a text that no record can have
            return fingerprint(key, canonical_bytes(text)) in fingerprints
        return False

    return gone


def _holding(site: "Site", gone: Gone) -> "Iterator[Delivery]":
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.deliveries import FileProblem, scan
    from pipelines.storage.errors import IntakeError
    from pipelines.storage.readers import read_rows

    keys, limits = corpus_keys(site), site.config.intake
    try:
        deliveries = scan(site.inbox, keys.k_file)
    except IntakeError:  # an inbox that is gone holds nothing
        return
    for delivery in deliveries:
        if delivery.problem is not None:
            continue
        with suppress(FileProblem):
            rows = read_rows(delivery, limits, keys.k_file, site.home.staging)
            if any(gone(row.fields.get("text")) for row in rows):
                yield delivery


def _content(site: "Site", delivery: "Delivery") -> bytes:
    from pipelines.storage.deliveries import CHUNK_BYTES, open_stream

    with open_stream(delivery, site.config.intake) as stream:
        return b"".join(iter(lambda: stream.read(CHUNK_BYTES), b""))


def _compressed(data: bytes, compression: str) -> bytes:
    import pyarrow as pa

    if not compression:
        return data
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, compression) as stream:
        stream.write(data)
    return bytes(sink.getvalue().to_pybytes())


def _jsonl(data: bytes, gone: Gone) -> bytes:
    def leaves(line: bytes) -> bool:
        with suppress(ValueError):
            row = json.loads(line)
            return isinstance(row, dict) and gone(row.get("text"))
        return False

    return b"".join(line for line in data.splitlines(keepends=True) if not leaves(line))


def _csv(data: bytes, gone: Gone) -> bytes:
    rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline="")))
    place = rows[0].index("text")
    out = io.StringIO(newline="")
    csv.writer(out).writerows(
        row
        for number, row in enumerate(rows)
        if number == 0 or len(row) <= place or not gone(row[place])
    )
    return out.getvalue().encode()


def _text(data: bytes, gone: Gone) -> bytes:
    from pipelines.storage.records import cut

    return "".join(run for run in cut([data.decode("utf-8-sig")]) if not gone(run)).encode()


def _parquet(data: bytes, gone: Gone) -> bytes:
    import polars as pl

    frame = pl.read_parquet(io.BytesIO(data))
    out = io.BytesIO()
    frame.filter(~frame["text"].map_elements(gone, return_dtype=pl.Boolean)).write_parquet(
        out, statistics=False
    )
    return out.getvalue()


_FORMS: dict[str, Callable[[bytes, Gone], bytes]] = {
    "jsonl": _jsonl, "csv": _csv, "txt": _text, "md": _text, "parquet": _parquet,
}  # fmt: skip
