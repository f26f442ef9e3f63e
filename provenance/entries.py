"""One entry of the ledger: a JCS line, and a file of its own for a large body.

::

    {"body": {...}, "format": 1, "kind": "corpus", "time": "2025-01-31T12:00:00Z"}
    {"body_sha256": HEX, "body_size": 40011, "format": 1, "kind": "windows", "time": ...}

The second form is for bodies above 32 KiB: C2SP tiles limit an entry to 65,535 bytes, and a log
that everybody mirrors should hold digests, not payloads. The time is what the writer says it was;
the order of the entries is what is proven.

Source: C2SP tlog-tiles (limit of an entry).
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from provenance.canonical import jcs, parse_json
from provenance.errors import FormatError, LedgerError
from provenance.hashing import sha256
from provenance.versions import check_versions

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ENTRY_FORMAT: Final = 1
"""Format number of an entry; another one is refused."""

MAX_INLINE_BODY: Final = 32 * 1024
"""A body with more JCS bytes than this stands in a file of its own."""

_KIND: Final = re.compile(r"[a-z][a-z0-9_.-]{0,63}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HEAD: Final = frozenset({"format", "kind", "time"})
_FORMS: Final = (_HEAD | {"body"}, _HEAD | {"body_sha256", "body_size"})


def encode_entry(kind: str, body: Mapping[str, Any], time: str) -> tuple[bytes, bytes | None]:
    """The line of an entry, and its body where that is too large to stand in the line.

    Args:
        kind: lower-case word of at most 64 letters.
        body: integers, strings, booleans, lists and objects only.
        time: ISO 8601 in UTC.

    Returns:
        The JCS line without newline, and the JCS body above :data:`MAX_INLINE_BODY` bytes or None.

    Raises:
        FormatError: kind, body or time is not in the allowed form, or the entry is about a run, a
            valuation or an audit and its ``versions`` are incomplete.
    """
    if not _KIND.fullmatch(kind):
        raise FormatError(
            f"an entry's kind is a lower-case word of at most 64 letters, got {kind!r}"
        )
    _check_time(time)
    if not isinstance(body, dict):
        raise FormatError(f"the body of an entry is an object, got {type(body).__name__}")
    check_versions(kind, body)
    entry: dict[str, Any] = {"format": ENTRY_FORMAT, "kind": kind, "time": time}
    encoded = jcs(body)
    if len(encoded) > MAX_INLINE_BODY:
        entry |= {"body_sha256": sha256(encoded).hex(), "body_size": len(encoded)}
        return jcs(entry), encoded
    return jcs(entry | {"body": body}), None


def decode_entry(line: bytes, bodies: Path) -> dict[str, Any]:
    """The entry that a line stands for, with its body even where that is a file.

    Args:
        line: JCS bytes without newline.
        bodies: the folder of large bodies.

    Returns:
        ``{format, kind, time, body}``, plus ``body_sha256`` and ``body_size`` for a large body.

    Raises:
        FormatError: the line is not strict JSON.
        LedgerError: unknown format or fields, or a large body is missing or changed.
    """
    entry: dict[str, Any] = parse_json(line)
    if not isinstance(entry, dict) or entry.get("format") != ENTRY_FORMAT:
        found = entry.get("format") if isinstance(entry, dict) else type(entry).__name__
        raise LedgerError(f"unknown entry format {found!r}, expected {ENTRY_FORMAT}")
    if set(entry) not in _FORMS:
        raise LedgerError(f"unknown fields of an entry: {sorted(entry)}")
    if "body" not in entry:
        entry["body"] = _read_body(bodies, str(entry["body_sha256"]), entry["body_size"])
    return entry


def _read_body(bodies: Path, digest: str, size: int) -> Any:
    # The digest becomes a file name, so its form is checked before it is used as one.
    if not _DIGEST.fullmatch(digest):
        raise LedgerError(f"body_sha256 is not a lower-case hex digest: {digest[:80]!r}")
    try:
        body = (bodies / digest).read_bytes()
    except FileNotFoundError:
        raise LedgerError(f"bodies/{digest} is missing: restore it from a backup") from None
    if sha256(body).hex() != digest or len(body) != size:
        raise LedgerError(f"bodies/{digest} was changed: restore it from a backup")
    return parse_json(body)


def check_clock(before: str, now: str) -> None:
    """Refuse a time that lies before the last entry's.

    Args:
        before: time of the last entry, ISO 8601 in UTC.
        now: time of the next one.

    Raises:
        FormatError: a time is not in the allowed form.
        LedgerError: the clock runs backwards.
    """
    if _check_time(now) < _check_time(before):
        raise LedgerError(
            f"the clock runs backwards: expected a time from {before} on, got {now}; set the clock"
        )


def _check_time(time: str) -> datetime:
    try:
        moment = datetime.fromisoformat(time)
    except ValueError:
        moment = None
    if moment is None or moment.utcoffset() != timedelta(0):
        raise FormatError(f"time is ISO 8601 in UTC (2025-01-31T12:00:00Z), got {time[:40]!r}")
    return moment
