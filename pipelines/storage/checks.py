"""The checks a row must pass to become a record, and the words for those that do not.

One function, :func:`examine`, looks at one row alone; what needs the whole inbox (duplicates, the
target) is decided in :mod:`pipelines.storage.intake`. Details name fields, sizes and limits, and never
quote the row: what was refused may be personal, and the quarantine table is read by other people.
"""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelines.storage.config import IntakeConfig, is_day
from pipelines.storage.deliveries import Delivery
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.rows import Row
from pipelines.storage.suppression import SuppressionList
from provenance.canonical import MAX_INTEGER, canonical_bytes, fingerprint, keyed, record_id

REASONS: Final[Mapping[str, str]] = {
    # of a whole file (row -1)
    "bad_owner": "the owner's folder has a name that cannot be an owner id",
    "changed_while_read": "the file was written to while it was read; deliver it again",
    "expands_too_much": "decompression grew beyond intake.max_expansion",
    "mostly_refused": "more rows were refused than accepted, and very many; nothing was taken",
    "misplaced": "the file does not lie directly in INBOX/OWNER/",
    "not_a_file": "a symbolic link, pipe or device",
    "too_large": "the file is larger than intake.max_file_bytes or has more rows than intake.max_file_rows",
    "unknown_format": "the file name has an ending that is not known",
    "unreadable": "the file is damaged, truncated or protected",
    # of a file or a row
    "bad_row": "not a row of its format",
    "bad_utf8": "not UTF-8",
    "bad_value": "a field holds the wrong kind of value",
    "empty": "no text, or only white space",
    "missing_text": "no field or column `text`",
    # of a row
    "duplicate_key": "the same owner, source and position as an earlier record, with another text",
    "erased": "the content was erased and must not come back",
    "in_target": "the content is part of the held-out target",
    "no_consent": "consent_train is false",
    "too_long": "longer than intake.max_record_chars",
    "unknown_licence": "no licence, or one that is not in intake.licences",
    "withdrawn": "the owner withdrew this content",
    # counted apart
    "duplicate": "the owner delivered the same content already",
}
"""Every reason that can stand in the tables `quarantine` and `duplicates`."""

_KNOWN_LICENCES: Final = frozenset(
    {
        *("MIT", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MPL-2.0", "Unlicense"),
        *("GPL-2.0-only", "GPL-2.0-or-later", "GPL-3.0-only", "GPL-3.0-or-later", "LGPL-3.0-only"),
        *(
            "AGPL-3.0-only",
            "GFDL-1.3-only",
            "GFDL-1.3-or-later",
            "ODbL-1.0",
            "ODC-By-1.0",
            "PDDL-1.0",
        ),
        *(
            "CC0-1.0",
            "CC-PDDC",
            "CC-BY-2.0",
            "CC-BY-3.0",
            "CC-BY-4.0",
            "CC-BY-SA-3.0",
            "CC-BY-SA-4.0",
        ),
        *("CC-BY-ND-4.0", "CC-BY-NC-4.0", "CC-BY-NC-SA-4.0", "CC-BY-NC-ND-4.0", "public-domain"),
    }
)
"""Licences that a message may name; anything else in a licence field may be a text."""

_MAX_SOURCE_CHARS: Final = 512
_TRUE: Final = ("true", "1", "yes", "t", "y")
_FALSE: Final = ("false", "0", "no", "f", "n")


class Refusal(Exception):  # noqa: N818 - a verdict on a row, not an error of the program
    """Why a row does not become a record."""

    def __init__(self, reason: str, detail: str) -> None:
        """Keep the reason for the quarantine table."""
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Rules:
    """What rows are checked against."""

    limits: IntakeConfig
    keys: CorpusKeys
    suppression: SuppressionList
    owner_licences: Mapping[str, str]
    """Licence of an owner's records that state none."""


def examine(row: Row, delivery: Delivery, ordinal: int, rules: Rules) -> tuple[Any, ...]:
    """The record that a row stands for.

    Args:
        row: a row as read.
        delivery: the file it stands in.
        ordinal: number of the row in its file, from 0.
        rules: limits, keys and lists.

    Returns:
        The values of ``records.COLUMNS``, in order.

    Raises:
        Refusal: the row does not become a record.
    """
    if row.reason:
        raise Refusal(row.reason, row.detail)
    fields, limits, keys, owner = row.fields, rules.limits, rules.keys, delivery.owner
    text = _text(fields, limits.max_record_chars)
    source, position = _place(fields, delivery.source, ordinal)
    date = _date(fields.get("date"))
    personal = _flag(fields, "personal", default=False) or owner in limits.personal_owners
    consents = [
        _flag(fields, name, default=missing)
        for name, missing in (
            ("consent_train", True),
            ("consent_display", False),
            ("consent_resell", None),  # what was agreed with the owner decides, at the sale
        )
    ]
    licence = _licence(
        fields, rules.owner_licences.get(owner) or limits.text_licence, limits.licences
    )
    if not consents[0]:
        raise Refusal("no_consent", "consent_train is false")
    try:
        canonical, raw = canonical_bytes(text), text.encode()
    except ValueError:
        raise Refusal("bad_utf8", "the text holds half of a surrogate pair") from None
    content = fingerprint(keys.k_fp, canonical)
    suppressed = rules.suppression.reason(owner, content)
    if suppressed:
        raise Refusal(suppressed, REASONS[suppressed])
    identity = record_id(keys.k_id, owner, source, position, content)
    digest = keyed(keys.k_file, raw)
    return (
        identity,
        content,
        owner,
        source,
        position,
        text,
        licence,
        *consents,
        date,
        personal,
        digest,
    )


def _text(fields: Mapping[str, Any], max_chars: int) -> str:
    text = fields.get("text")
    if text is None:
        raise Refusal("missing_text", "the row has no text")
    if not isinstance(text, str):
        raise Refusal("bad_value", "text: expected a string")
    if len(text) > max_chars:
        raise Refusal("too_long", f"{len(text)} characters, at most {max_chars}")
    if not text.strip():
        raise Refusal("empty", "only white space")
    return text


def _place(fields: Mapping[str, Any], file_source: str, ordinal: int) -> tuple[str, int]:
    """Source and position: as stated, else from ``id``, else the file and the row's number in it."""
    source = fields.get("source", file_source)
    if not isinstance(source, str) or not source.strip() or len(source) > _MAX_SOURCE_CHARS:
        raise Refusal(
            "bad_value", f"source: expected a string of 1 to {_MAX_SOURCE_CHARS} characters"
        )
    identity = fields.get("id")
    if identity is not None:
        if (
            isinstance(identity, bool)
            or not isinstance(identity, int | str)
            or len(str(identity)) > _MAX_SOURCE_CHARS
        ):
            raise Refusal(
                "bad_value",
                f"id: expected an integer or a string of at most {_MAX_SOURCE_CHARS} characters",
            )
        source, ordinal = f"{source}#{identity}", 0
    try:
        source.encode()
    except UnicodeEncodeError:
        raise Refusal("bad_utf8", "source or id holds half of a surrogate pair") from None
    position = fields.get("position", ordinal)
    if (
        isinstance(position, str)
        and position.isascii()
        and position.isdigit()
        and len(position) < 17
    ):
        position = int(position)
    if (
        isinstance(position, bool)
        or not isinstance(position, int)
        or not 0 <= position <= MAX_INTEGER
    ):
        raise Refusal("bad_value", "position: expected an integer of at least 0")
    return source, position


def _date(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, dt.date):  # a datetime too
        return value.isoformat()[:10]
    if isinstance(value, str) and is_day(value[:10]) and value[10:11] in ("", "T", " "):
        return value[:10]
    raise Refusal("bad_value", "date: expected YYYY-MM-DD")


def _flag(fields: Mapping[str, Any], name: str, *, default: bool | None) -> bool | None:
    value = fields.get(name)
    if value is None:
        return default
    word = str(value).strip().lower()
    if isinstance(value, bool | int | str) and word in (*_TRUE, *_FALSE):
        return word in _TRUE
    raise Refusal("bad_value", f"{name}: expected true or false")


def _licence(fields: Mapping[str, Any], default: str, accepted: tuple[str, ...]) -> str:
    licence = fields.get("licence", fields.get("license"))
    if licence is None or licence == "":
        if not default:
            raise Refusal(
                "unknown_licence", "none stated, and no intake.text_licence or owner licence is set"
            )
        return default
    if not isinstance(licence, str):
        raise Refusal("bad_value", "licence: expected a string")
    if licence.strip() not in accepted:
        named = licence.strip() if licence.strip() in _KNOWN_LICENCES else "the stated one"
        raise Refusal("unknown_licence", f"{named} is not in intake.licences")
    return licence.strip()
