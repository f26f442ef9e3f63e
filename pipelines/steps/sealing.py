"""The text of suspended records, sealed under a key of their own: the last place where it can be read before it is shredded."""

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from provenance import seal, write_atomic

if TYPE_CHECKING:
    import polars as pl


def listed(frame: "pl.DataFrame") -> bytes:
    """Record ids in hex, one per line, as trainers read them."""
    return "".join(record_id.hex() + "\n" for record_id in frame["record_id"]).encode()


def seal_records(folder: Path, chosen: "pl.DataFrame", held_out: "pl.DataFrame") -> None:
    """Seal the records' text under a key of its own, which shredding destroys; once per batch."""
    from unlearning.rows import opaque_id

    if (folder / "sealed").exists() and (folder / "key").exists():
        return
    key = secrets.token_bytes(32)
    write_atomic(folder / "key", key, 0o600)
    if len(held_out):
        write_atomic(folder / "held_out.txt", listed(held_out), 0o600)
        write_atomic(folder / "sealed_held_out", seal(key, record_lines(held_out)), 0o600)
    owners = sorted(set(chosen["owner"]))
    # Several owners are a subgroup each, under a name that only the key links to them: the report names none.
    named = {one: f"owner/{opaque_id(key, one)[:8]}" for one in owners} if owners[1:] else {}
    write_atomic(folder / "sealed", seal(key, record_lines(chosen, named)), 0o600)


def record_lines(frame: "pl.DataFrame", groups: Mapping[str, str] | None = None) -> bytes:
    """JSON lines of subject, record id, text and, where owners are subgroups, theirs; a subject is an owner's source."""
    rows = frame.select("owner", "source", "record_id", "text").iter_rows(named=True)
    lines = [
        {
            "subject": f"{row['owner']}/{row['source']}",
            "record_id": row["record_id"].hex(),
            "text": row["text"],
        }
        | ({"group": groups[row["owner"]]} if groups else {})
        for row in rows
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
