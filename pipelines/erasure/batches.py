"""Batches: requests whose records were sealed together, and whether the time has come to finish them.

`erasure/BATCH/` holds `batch.json` (which requests), `excluded.txt` (record ids), `held_out.txt` (those of them that stand in
the held-out target), `sealed`, `sealed_held_out` and `key`. Requests that share a batch are finished together: their texts lie in one sealed file.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.requests import STATES, Request, load

if TYPE_CHECKING:
    from pipelines.site import Site

BATCH_FILE = "batch.json"
JOURNAL = "finish.json"
SEALED = ("sealed", "sealed_held_out")
"""What the models were trained on, and what was held out: a method must not push records that no model has seen."""


@dataclass(frozen=True, slots=True)
class Group:
    """Folders that share requests, directly or through others."""

    folders: tuple[Path, ...]
    requests: tuple[Request, ...]
    """All their requests, open ones and finished ones."""

    @property
    def record_ids(self) -> frozenset[bytes]:
        """What is to go."""
        return frozenset(
            bytes.fromhex(line)
            for folder in self.folders
            for name in ("excluded.txt", "held_out.txt")
            if (folder / name).exists()
            for line in (folder / name).read_text().split()
        )

    @property
    def audited(self) -> bool:
        """Whether every request has its audit."""
        return all(STATES.index(one.state) >= STATES.index("audited") for one in self.requests)

    def overdue(self, today: str) -> bool:
        """Whether one of the open requests has passed its deadline."""
        return any(
            one.overdue(today) for one in self.requests if one.state not in ("shredded", "refused")
        )

    @property
    def begun(self) -> bool:
        """Whether finishing it was interrupted."""
        return any((folder / JOURNAL).exists() for folder in self.folders)


def groups(site: "Site") -> list[Group]:
    """Every group of batches in the home, by its first folder."""
    known = {request.id: request for request in load(site.home)}
    parts: list[tuple[set[Path], set[str]]] = []
    for folder in sorted(site.home.erasure.glob(f"*/{BATCH_FILE}")):
        ids = set(json.loads(folder.read_text())["requests"])
        joined = [part for part in parts if part[1] & ids]
        parts = [part for part in parts if not part[1] & ids]
        parts.append(
            (
                {folder.parent}.union(*(part[0] for part in joined)),
                ids.union(*(part[1] for part in joined)),
            )
        )
    return [
        Group(tuple(sorted(folders)), tuple(known[one] for one in sorted(ids) if one in known))
        for folders, ids in parts
    ]


def today() -> str:
    """The day, ISO 8601 in UTC."""
    return datetime.now(UTC).date().isoformat()


def sealed_lines(folder: Path) -> Iterator[dict[str, Any]]:
    """Records of a batch: subject, record_id, text. Nothing when the key is destroyed already."""
    from provenance import unseal

    for name in SEALED:
        if (folder / "key").exists() and (folder / name).exists():
            plain = unseal((folder / "key").read_bytes(), (folder / name).read_bytes())
            for line in plain.decode().split("\n"):
                if line:
                    yield json.loads(line)
