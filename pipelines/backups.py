"""A home in one file, and back: a restore never forgets what was erased after the backup was made.

The file is a tar whose first member, `backup.json`, lists every other one with size and SHA-256; a restore unpacks beside the
home, checks all of them and the ledger, and only then changes places with the home, which stays as HOME.replaced. It holds
texts, salts and keys (sealed if the home's are), mode 0600: whoever has it has the home. Run data of Dagster, logs, locks
and scratch space are left out.

An old backup holds records that were erased since. So a restore takes over what the home that it replaces knows: requests
with their states, the suppression list, sealed erasures, and the ledger when it goes on from the backup's (a ledger that
contradicts it is refused). Then the records of every request that was acted on leave HEAD again, and of every finished one
the rows and salts are destroyed. Where no home is left, the folder `requests/` alone, kept elsewhere, gives the same.
"""

import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipelines.requests import STATES, Request, load, matching
from pipelines.storage.errors import HomeError
from pipelines.storage.home import Home
from provenance import (
    HistoryError,
    Ledger,
    VerificationError,
    file_sha256,
    jcs,
    parse_json,
    upgrade_ledger,
    verify_consistency,
)

if TYPE_CHECKING:
    import polars as pl

    from pipelines.storage.keys import CorpusKeys

FORMAT: Final = 1
LEFT_OUT: Final = frozenset({"dagster", "logs", "locks", "staging"})
_INDEX: Final = "backup.json"
_ACTED_ON: Final = STATES[1:5]
"""States from `suspended` to `shredded`."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did."""

    files: int
    """Files taken from the backup."""
    replaced: Path | None
    """Where the home that was there lies now."""
    applied: tuple[str, ...]
    """Requests whose erasure was applied again."""
    records: int
    """Records that left HEAD again."""
    kept_ledger: bool
    """Whether the ledger of the replaced home was kept, because it goes on from the backup's."""


def backup(home: Home, target: Path) -> int:
    """Write a home into one file.

    Args:
        home: The home; no run may be writing to it.
        target: A file that isn't there yet, outside of the home.

    Returns:
        Number of files.

    Raises:
        HomeError: The file exists or lies in the home.
    """
    if target.exists():
        raise HomeError(f"{target.name} exists: a backup is never written over another file")
    if home.path.resolve() in target.resolve().parents:
        raise HomeError("a backup inside of the home would hold itself: name a file elsewhere")
    temporary = target.with_name(f".{target.name}.tmp")
    with home.lock("corpus"), home.lock("ledger-enter"):
        files = {str(path.relative_to(home.path)): path for path in _files(home.path)}
        index = {name: file_sha256(path) for name, path in files.items()}
        modes = {name: path.stat().st_mode & 0o777 for name, path in files.items()}
        temporary.touch(mode=0o600)
        with temporary.open("r+b") as out:
            with tarfile.open(fileobj=out, mode="w") as archive:
                document = jcs({"format": FORMAT, "files": index, "modes": modes})
                head = tarfile.TarInfo(_INDEX)
                head.size, head.mode = len(document), 0o600
                archive.addfile(head, io.BytesIO(document))
                for name, path in files.items():
                    archive.add(path, arcname=name, recursive=False)
            out.flush()
        temporary.replace(target)
    return len(files)


def restore(source: Path, home: Home, *, requests: Path | None = None) -> Restored:
    """Put a backup in the place of a home and apply every later erasure again.

    Args:
        source: The backup.
        home: Where; what is there is kept as HOME.replaced.
        requests: A copy of a `requests` folder that is newer than the backup, where no home is left.

    Returns:
        What was done.

    Raises:
        HomeError: Not a whole backup, or HOME.replaced is in the way.
        HistoryError: The home's ledger and the backup's contradict each other.
    """
    staged = home.path.with_name(f"{home.path.name}.restoring")
    replaced = home.path.with_name(f"{home.path.name}.replaced")
    there = home.path.exists() and any(home.path.iterdir())
    if there and replaced.exists():
        raise HomeError(
            f"{replaced.name} of an earlier restore is in the way: look into it, then remove it"
        )
    shutil.rmtree(staged, ignore_errors=True)
    count = _unpack(source, staged)
    fresh = Home(staged).create()
    fresh.check()
    kept = _take_over(home.path, fresh) if there else False
    for path in sorted(requests.glob("*.json")) if requests else ():
        _newer_request(path, fresh)
    applied, records = _apply(fresh)
    if there:
        home.path.replace(replaced)
    elif home.path.exists():
        home.path.rmdir()
    staged.replace(home.path)
    return Restored(count, replaced if there else None, applied, records, kept)


def _files(root: Path) -> Iterator[Path]:
    for path in sorted(root.rglob("*")):
        if (
            path.is_file()
            and not path.is_symlink()
            and path.relative_to(root).parts[0] not in LEFT_OUT
        ):
            yield path


def _unpack(source: Path, target: Path) -> int:
    """Unpack into an empty folder and check every file against the index."""
    try:
        with tarfile.open(source, mode="r:") as archive:
            first = archive.next()
            data = (
                archive.extractfile(first) if first is not None and first.name == _INDEX else None
            )
            if data is None:
                raise HomeError(f"{source.name}: expected a backup that begins with {_INDEX}")
            index = parse_json(data.read())
            if not isinstance(index, dict) or index.get("format") != FORMAT:
                found = index.get("format") if isinstance(index, dict) else index
                raise HomeError(
                    f"{source.name} has backup format {found!r}, this program knows {FORMAT}"
                )
            archive.extractall(target, filter="data")
    except (tarfile.TarError, EOFError) as error:
        raise HomeError(f"{source.name} is no whole backup: {error}") from None
    (target / _INDEX).unlink()
    found = {str(path.relative_to(target)): file_sha256(path) for path in _files(target)}
    wrong = sorted(
        name
        for name in index["files"].keys() | found.keys()
        if index["files"].get(name) != found.get(name)
    )
    if wrong:
        raise HomeError(
            f"{source.name} is damaged: {len(wrong)} files differ from its index, the first is {wrong[0]}"
        )
    for name, mode in index["modes"].items():
        (target / name).chmod(mode)
    return len(found)


def _take_over(old: Path, fresh: Home) -> bool:
    """What the home that is replaced knows better: requests, suppression, sealed erasures, the longer ledger."""
    for path in sorted((old / "requests").glob("*.json")):
        _newer_request(path, fresh)
    for folder in sorted((old / "erasure").glob("*")) if (old / "erasure").exists() else ():
        if not (fresh.erasure / folder.name).exists():
            shutil.copytree(folder, fresh.erasure / folder.name)
    _union_of_suppressed(old / fresh.suppression_path.name, fresh)
    return _longer_ledger(old / "ledger", fresh)


def _newer_request(path: Path, fresh: Home) -> None:
    target = fresh.requests / path.name
    body = json.loads(path.read_bytes())
    known = json.loads(target.read_bytes())["state"] if target.exists() else STATES[0]
    if not target.exists() or STATES.index(body["state"]) > STATES.index(known):
        shutil.copy2(path, target)


def _union_of_suppressed(path: Path, fresh: Home) -> None:
    from pipelines.storage.suppression import SuppressionList

    if path.exists() and fresh.keys_path.exists():
        SuppressionList(fresh.suppression_path, _keys(fresh)).take_over(
            SuppressionList(path, _keys(fresh))
        )


def _longer_ledger(old: Path, fresh: Home) -> bool:
    """Whether the old home's ledger goes on from the backup's and was kept.

    Raises:
        HistoryError: One is not the beginning of the other.
    """
    if not (old / "checkpoint").exists():
        return False
    if not (fresh.ledger / "checkpoint").exists():
        shutil.rmtree(fresh.ledger)
        shutil.copytree(old, fresh.ledger)
        return True
    trusted = (old / "vkey").read_text().strip()
    name = trusted.split("+", 1)[0]
    for folder in (old, fresh.ledger):  # a backup may be of the first layout
        upgrade_ledger(folder, name, trusted)
    newer, older = Ledger.open(old, name), Ledger.open(fresh.ledger, name)
    longer, shorter = (newer, older) if newer.size >= older.size else (older, newer)
    try:
        if shorter.size:
            path = longer.consistency_path(shorter.size)
            verify_consistency(shorter.size, longer.size, shorter.root, longer.root, path)
    except VerificationError as error:
        raise HistoryError(
            f"the ledger of this home ({newer.size} entries) and the backup's ({older.size}) are two histories: {error}"
        ) from None
    if longer is older:
        return False
    shutil.rmtree(fresh.ledger)
    shutil.copytree(old, fresh.ledger)
    return True


def _apply(fresh: Home) -> tuple[tuple[str, ...], int]:
    """Take the records of every request that was acted on out of HEAD, and destroy those of finished ones."""
    wanted = [
        request for request in load(fresh) if request.kind == "erase" and request.state in _ACTED_ON
    ]
    if not wanted or not fresh.head_path.exists():
        return (), 0
    from pipelines.storage.salts import SaltStore
    from pipelines.storage.suppression import SuppressionList
    from pipelines.storage.versions import Versions

    keys = _keys(fresh)
    versions = Versions(fresh, keys)
    head = versions.head()
    assert head is not None
    columns = ["record_id", "owner", "source", "fingerprint"]
    chosen = {
        request.id: matching(versions.read(head, columns), [request], required=False)
        for request in wanted
    }
    again = tuple(sorted(name for name, rows in chosen.items() if len(rows)))
    gone = _ids(chosen[name] for name in again)
    if gone:
        versions.move_head(versions.tombstone(head, gone), expected=head)
    finished = [request for request in wanted if request.state == "shredded"]
    destroyed = _everywhere(versions, finished, columns)
    if len(destroyed):
        SuppressionList(fresh.suppression_path, keys).add_erased(destroyed["fingerprint"].to_list())
        ids = destroyed["record_id"].to_list()
        versions.purge(ids)
        SaltStore(fresh.salts_path, keys).shred(ids)
    return again, len(gone)


def _everywhere(versions: object, requests: list[Request], columns: list[str]) -> "pl.DataFrame":
    """The records of some requests in any version of the home."""
    import polars as pl

    from pipelines.storage.versions import Versions

    assert isinstance(versions, Versions)
    frames = [
        matching(versions.read(version, columns), requests, required=False)
        for version in versions.ids()
    ]
    return pl.concat(frames).unique("record_id") if frames and requests else pl.DataFrame()


def _ids(frames: "Iterator[pl.DataFrame]") -> set[bytes]:
    return {record_id for rows in frames for record_id in rows["record_id"].to_list()}


def _keys(home: Home) -> "CorpusKeys":
    from pipelines.storage.keys import load as load_keys

    return load_keys(home.keys_path)
