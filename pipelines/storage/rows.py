"""One row of a delivery, or the reason why it cannot be read.

A row that cannot be read carries its reason instead of its fields; a file that cannot be read raises
``FileProblem``. Neither ever holds a word of the file in its message: a quarantine table must not become
a second copy of what was refused.

Fields that are read: ``text`` (needed), ``source``, ``id``, ``position``, ``licence`` (or ``license``),
``date``, ``personal``, ``consent_train``, ``consent_display``, ``consent_resell``. Others are counted and
left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines.storage.config import IntakeConfig

FIELDS: Final = (
    "text",
    "source",
    "id",
    "position",
    "licence",
    "license",
    "date",
    "personal",
    "consent_train",
    "consent_display",
    "consent_resell",
)
_JSON_BYTES_PER_CHAR: Final = 12
"""A character outside the BMP written as two escapes (backslash, u, four digits) takes twelve bytes."""

_OTHER_FIELDS_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Row:
    """One row, or why it cannot be read."""

    fields: Mapping[str, Any]
    reason: str = ""
    detail: str = ""
    raw_digest: bytes | None = None
    """HMAC-SHA256(K_file, row as delivered) if there is a row as delivered (not in Parquet)."""
    num_ignored: int = 0
    """Fields that are not ours."""


def row_bytes(limits: IntakeConfig) -> int:
    """The longest row, in bytes as delivered, that can hold an acceptable text.

    Args:
        limits: sizes that records may have.

    Returns:
        Bytes; a longer row is refused without being held.
    """
    return limits.max_record_chars * _JSON_BYTES_PER_CHAR + _OTHER_FIELDS_BYTES


def too_long(size: int, limit: int, digest: bytes) -> Row:
    """The row that stands for one that was too long to be held.

    Args:
        size: its bytes.
        limit: bytes allowed.
        digest: HMAC-SHA256(K_file, row).

    Returns:
        A row with the reason ``too_long``.
    """
    return Row({}, "too_long", f"row of {size} bytes, at most {limit}", digest)
