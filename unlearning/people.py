"""Records of people: the sealed ones that are to be forgotten, the retained ones, and look-alikes never trained.

A file is JSON lines, one record each: `{"subject", "record_id", "text"}` and, for forgotten people, optionally `"group"`
(one or several subgroups, joined by "|"; see `subgroups`). Rows in the form in which they were delivered are read too: `source` then stands for
`subject`, a missing `record_id` becomes `source/position`, other columns are ignored.

The forgotten records lie sealed (AES-256-GCM, `provenance.sealing`) beside their key file; this is the only place where
their text may still be read between suspension and shredding. It is held in memory only: no function here writes, and
no message quotes a line.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance.sealing import unseal
from unlearning.errors import PeopleError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, repr=False)
class Record:
    """One text about one person; without a `repr`, so that no traceback or log can show it."""

    subject: str
    """The person's id."""
    record_id: str
    """The record's id, hex."""
    text: str
    """The text."""
    group: str = ""
    """Subgroups of the person, joined by `rows.JOINT`, or ""."""


def read_records(path: Path) -> list[Record]:
    """Records of a plain file of JSON lines.

    Args:
        path: the file.

    Returns:
        Records in the order of the file.

    Raises:
        PeopleError: if the file is missing, empty or has a line that is no record.
    """
    return parse_records(_bytes_of(path), path.name)


def read_sealed(source: Mapping[str, Any], directory: Path = Path()) -> tuple[list[Record], bytes]:
    """Unseal the forgotten records.

    Args:
        source: `{"file": path of the sealed JSON lines, "key_file": path of the 32-byte key}` and, if the seal was bound
            to a context, `"aad"`: that context as text.
        directory: where relative paths start.

    Returns:
        Records in the order of the file, and the key (which salts the ids of the audit's rows).

    Raises:
        PeopleError: if a file is missing, the key does not open the seal, or a line is no record.
    """
    names, given = {"file", "key_file"}, set(source)
    if given - {"aad"} != names or not all(isinstance(v, str) for v in source.values()):
        raise PeopleError(f"expected 'sealed' with the paths {sorted(names)}, got {sorted(given)}")
    sealed, key = _bytes_of(directory / source["file"]), _bytes_of(directory / source["key_file"])
    try:
        plain = unseal(key, sealed, source.get("aad", "").encode())
    except ValueError as error:
        raise PeopleError(
            "the sealed records do not open with this key: wrong key, or the file was changed"
        ) from error
    return parse_records(plain, "the sealed file"), key


def parse_records(data: bytes, name: str) -> list[Record]:
    """Records of JSON lines.

    Args:
        data: UTF-8 bytes.
        name: how messages call the source.

    Returns:
        Records in order.

    Raises:
        PeopleError: if there is no record, or a line is none. The message gives the line's number, never its content.
    """
    records = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(json.loads(line)))
        # `from None`: the original error would carry the line, and with it the secret, into a log.
        except (ValueError, KeyError, TypeError):
            raise PeopleError(
                f"{name}, line {number}: expected a JSON object with subject, record_id and text"
            ) from None
    if not records:
        raise PeopleError(f"expected at least one record in {name}, got none")
    if len({r.record_id for r in records}) != len(records):
        raise PeopleError(f"expected distinct record ids in {name}, got one twice")
    return records


def by_subject(records: list[Record]) -> dict[str, list[Record]]:
    """Records of each person, people in order of their ids, records in the order of the file.

    Args:
        records: any records.

    Returns:
        subject → that person's records.

    Raises:
        PeopleError: if the records of one person name different subgroups.
    """
    people: dict[str, list[Record]] = {
        subject: [] for subject in sorted({r.subject for r in records})
    }
    for record in records:
        people[record.subject].append(record)
    if any(len({r.group for r in own}) > 1 for own in people.values()):
        raise PeopleError("expected the same subgroups in all records of a person, got two")
    return people


def _record(line: dict[str, Any]) -> Record:
    subject = line["subject"] if "subject" in line else line["source"]
    fallback = f"{subject}/{line.get('position', '')}"
    values = (subject, line.get("record_id", fallback), line["text"], line.get("group", ""))
    if not all(isinstance(value, str) for value in values) or not all(values[:3]):
        raise ValueError
    return Record(*values)


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PeopleError(f"cannot read {path.name}: {error.strerror}") from error
