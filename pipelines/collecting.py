"""What may be removed from a home: runs that no result names, no receipt leans on and no open request needs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelines.storage.home import Home


def named_runs(home: "Home") -> set[str]:
    """Runs that a newest result or an issued receipt names."""
    found: set[str] = set()
    for path in home.results.glob("*/*.json"):
        text = path.read_text()
        found |= {folder.name for folder in home.runs.iterdir() if folder.name in text}
    for path in home.receipts.glob("*/*.receipt.json"):
        found |= {window["run"] for window in json.loads(path.read_bytes())["windows"]}
    return found


def unneeded_runs(home: "Home") -> list[tuple[Path, int]]:
    """Run folders that may go, with their size in bytes; never while a request is open or a run is unfinished.

    Args:
        home: The home.
    """
    from pipelines.requests import pending

    if not home.runs.exists():
        return []
    keep = named_runs(home) | {"inputs"}
    found = []
    for folder in sorted(home.runs.iterdir()):
        finished = (folder / "result.json").exists()
        # An open request's audit may have to be repeated: its models stay.
        wanted = bool(pending(home)) and folder.name.split("-")[0] in {
            "train",
            "gold",
            "unlearn",
            "attack",
        }
        if folder.is_dir() and folder.name not in keep and finished and not wanted:
            found.append(
                (folder, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
            )
    return found
