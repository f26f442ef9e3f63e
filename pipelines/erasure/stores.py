"""The inventory of derivatives: every place where records or what was made of them may lie, and how they leave it.

A store's function removes and says how many things it removed (files, rows or lines); running it again removes nothing. Models
and what was computed with them are derivatives too: whatever was trained on the records goes, except what the audit found
fit to take its place. What a store can't remove is found by the search that follows, and keeps the request open.

To add a store: a function here, a line in `STORES`, and a plant in `tests/pipelines/test_erasure_complete.py`.
"""

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.erasure.deliveries import rewrite
from pipelines.erasure.needles import Needles
from pipelines.erasure.search import occurrences
from provenance import file_sha256, keyed, write_atomic

if TYPE_CHECKING:
    from pipelines.site import Site

EVIDENCE = frozenset(
    {
        "run.json", "result.json", "progress.jsonl", "phases.json", "windows.jsonl", "audit.json", "plan.json", "rows.parquet",
        "engineering.parquet", "evaluation.json", "trainer.log",
    }
)  # fmt: skip
"""Files of a run that tell what it did and hold no text, weight or gradient; an audit's rows carry opaque ids only."""

_SQLITE = b"SQLite format 3\x00"
_MARK = b"[erased]"


@dataclass(frozen=True, slots=True)
class Scope:
    """What is to go, and what may stay."""

    site: "Site"
    ids: frozenset[bytes]
    """Record ids."""
    texts: tuple[str, ...]
    """Their texts."""
    fingerprints: frozenset[bytes]
    """Contents that nobody else delivered."""
    needles: Needles
    versions: frozenset[str]
    """Corpus versions that held one of the records."""
    keep: frozenset[str]
    """Roots of models that may stay: retrained without the records, or audited."""


def corpus(scope: Scope) -> int:
    """Rows of every stored version; identities stay."""
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.versions import Versions

    return Versions(scope.site.home, corpus_keys(scope.site)).purge(scope.ids).num_rows


def inbox(scope: Scope) -> int:
    """Files of the home's own inbox."""
    return rewrite(scope.site, scope.fingerprints)


def tokens(scope: Scope) -> int:
    """Token folders of every version that held one of the records; the next run writes those of the version in force."""
    found = [path for path in scope.site.home.tokens.glob("*") if path.name in scope.versions]
    for path in found:
        shutil.rmtree(path)
    return len(found)


def target(scope: Scope) -> int:
    """Held-out records: token folders, the sealed part, the list of contents; and the targets of other buyers."""
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.buyers import erase_from_buyers
    from pipelines.storage.target import erase_held_out

    home = scope.site.home
    removed = erase_held_out(home, corpus_keys(scope.site), scope.ids, scope.fingerprints)
    removed += erase_from_buyers(home, scope.ids, scope.fingerprints)
    if removed:  # the note names the target that was
        (home.results / "target" / "latest.json").unlink(missing_ok=True)
    return removed


def tables(scope: Scope) -> int:
    """Rows by record id, and the keyed digests by which quarantine and duplicates name a text."""
    import polars as pl

    from pipelines.steps.ledger import corpus_keys
    from pipelines.steps.tables import write_table

    names = {record_id.hex() for record_id in scope.ids}
    k_file = corpus_keys(scope.site).k_file
    digests = [keyed(k_file, text.encode("utf-8", "surrogatepass")) for text in scope.texts]
    removed = 0
    for path in sorted(scope.site.home.tables.glob("*.parquet")):
        frame = pl.read_parquet(path, memory_map=False)
        kept = frame
        if "record_id" in frame.columns:
            kept = kept.filter(~pl.col("record_id").is_in(list(scope.ids)))
        if "subject_id" in frame.columns:
            kept = kept.filter(~pl.col("subject_id").is_in(names))
        if "raw_digest" in frame.columns and frame["raw_digest"].is_in(digests).any():
            known = pl.col("raw_digest").is_in(digests)
            kept = kept.with_columns(raw_digest=pl.when(known).then(None).otherwise("raw_digest"))
            removed += int(frame["raw_digest"].is_in(digests).sum())
        if not kept.equals(frame):
            removed += len(frame) - len(kept)
            digest = write_table(path, kept)
            _enter_table(scope.site, path.stem, digest)
    return removed


def _enter_table(site: "Site", kind: str, digest: str) -> None:
    """The ledger names a table that was made before; whoever checks it must find the later one named too."""
    from pipelines.steps.ledger import enter, open_ledger

    entries = [one["body"] for one in open_ledger(site).entries() if one["kind"] == kind]
    named = [body for body in entries if "buyer" not in body]  # theirs hold no records
    if named and "table" in named[-1]:
        enter(site, kind, {**named[-1], "table": digest, "erasure": True})


def models(scope: Scope) -> int:
    """Weights, gradients, banks and probe outputs of every run that saw the records; its evidence stays."""
    gone: set[str] = set()
    removed = 0
    for folder in sorted(scope.site.home.runs.glob("*-*"), key=_order):
        if _saw(scope, folder, gone):
            gone |= _roots(folder)
            removed += _strip(folder)
    return removed


def run_inputs(scope: Scope) -> int:
    """Lists that runs were given: copies by record id, lots and weights by a record's place; the next run writes its own."""
    found = list(scope.site.home.runs.glob("inputs/*"))
    for path in found:
        path.unlink()
    return len(found)


def by_token(scope: Scope) -> int:
    """Numbers of every token in the order of the records: nothing in them tells which are whose, so all go.

    So does what a writer that was killed left beside the tables: no name of a table begins with a dot.
    """
    found = [
        path
        for path in scope.site.home.tables.iterdir()
        if path.name.startswith(".") or ("surprisal" in path.name and path.suffix != ".parquet")
    ]
    for path in found:
        path.unlink()
    return len(found)


def receipts(scope: Scope) -> int:
    """Receipts that open a commitment of one of the records: they hold its salt. Owners keep the copies that they were given."""
    return _unlink_holding(scope, scope.site.home.receipts.rglob("*.receipt.json"))


def results(scope: Scope) -> int:
    """Notes of assets whose files are gone or that name one of the records: the next run makes them again."""
    home, removed = scope.site.home, 0
    for path in sorted(home.results.glob("*/latest.json")):
        values = json.loads(path.read_text())["values"]
        missing = [file for file in values.get("files", ()) if not (home.path / file).exists()]
        stale = path.parent.name not in ("corpus", "quarantine") and any(
            file_sha256(home.path / file) != digest
            for file, digest in values.get("tables", {}).items()
            if file not in missing
        )
        if missing or stale or occurrences(path, scope.needles):
            path.unlink()
            removed += 1
    return removed


def pages(scope: Scope) -> int:
    """Reports that show one of the records; and every PDF, whose streams no search reads: `dataworth audit --pdf` prints it again."""
    folder = scope.site.home.path / "reports"
    printed = list(folder.glob("*.pdf"))
    for path in printed:
        path.unlink()
    return len(printed) + _unlink_holding(scope, folder.glob("*"))


def logs(scope: Scope) -> int:
    """Lines of log files."""
    home = scope.site.home.path
    found = [
        *home.glob("logs/**/*"),
        *home.glob("dagster/**/compute_logs/*"),
        *home.glob("runs/*/trainer.log"),
    ]
    return sum(_redact(path, scope.needles) for path in found if path.is_file())


def databases(scope: Scope) -> int:
    """Values in SQLite files: overwritten, with secure_delete, and the free pages given back by VACUUM."""
    return sum(
        _clean_database(path, scope.needles)
        for path in _files(scope.site.home.path)
        if _begins(path, _SQLITE) and occurrences(path, scope.needles)
    )


def scratch(scope: Scope) -> int:
    """Scratch space of writers, none of which is alive; and copies of retained people's text for an audit that was killed."""
    home = scope.site.home
    found = [*home.staging.iterdir(), *home.erasure.glob("*/retained.jsonl")]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(found)


def salts(scope: Scope) -> int:
    """Salts: nobody can open or confirm the commitments any more."""
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.salts import SaltStore

    return SaltStore(scope.site.home.salts_path, corpus_keys(scope.site)).shred(scope.ids)


STORES: dict[str, Callable[[Scope], int]] = {
    "corpus versions": corpus, "deliveries in the home": inbox, "token shards": tokens, "held-out target": target, "tables": tables,
    "numbers by token": by_token, "models, gradients and banks": models, "inputs of runs": run_inputs, "receipts": receipts, "reports": pages, "logs": logs, "databases": databases,
    "scratch space": scratch, "salts": salts, "results": results,
}  # fmt: skip


def outside(site: "Site") -> list[str]:
    """Copies of the home that no command reaches: homes that a restore replaced, beside this one."""
    home = site.home.path.resolve()
    return [path.name for path in sorted(home.parent.glob(f"{home.name}.replaced*"))]


def left(scope: Scope) -> list[str]:
    """Files of the home that still hold one of the records, by path; the sealed batches themselves excepted.

    A request may name records by id, so that a restored backup can be erased again: ids in `requests/` are no finding.
    """
    home = scope.site.home.path
    found = []
    for path in _files(home):
        place = path.relative_to(home).parts[0]
        if place == "erasure":
            continue
        wanted = scope.needles.without_ids() if place == "requests" else scope.needles
        if occurrences(path, wanted):
            found.append(str(path.relative_to(home)))
    return found


def shred(path: Path) -> None:
    """Overwrite a file with zeros before its disk blocks are given back; a missing one is shredded already."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
        file.flush()
        os.fsync(file.fileno())
    path.unlink()


def _files(home: Path) -> Iterator[Path]:
    yield from (
        path for path in sorted(home.rglob("*")) if path.is_file() and not path.is_symlink()
    )


def _order(folder: Path) -> tuple[int, str]:
    # Originals before what was made from them.
    kinds = ("train", "gold", "proxy", "gradients", "unlearn", "attack")
    kind = folder.name.split("-")[0]
    return (kinds.index(kind) if kind in kinds else 0, folder.name)


def _saw(scope: Scope, folder: Path, gone: set[str]) -> bool:
    """Whether a run read one of the records, or began from a model that did."""
    try:
        run = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return True  # nobody can tell what it saw
    if _roots(folder) & scope.keep:
        return False
    if run.get("init_root") in gone or run["kind"] == "attack":
        return True
    elsewhere = run["corpus_version"] not in scope.versions
    if elsewhere or _selected_others(scope, folder, run.get("selection")):
        return False
    excluded = run.get("excluded")
    path = folder / excluded["file"] if excluded else None
    if path is None or not path.exists():
        return True
    listed = {bytes.fromhex(line) for line in path.read_text().split()}
    return not scope.ids <= listed


def _selected_others(scope: Scope, folder: Path, selection: dict[str, str] | None) -> bool:
    """Whether a run's list of weights gives every one of the records none: the shards of other people."""
    import numpy as np

    from trainer.errors import DataError
    from trainer.selection import read_selection

    if not selection or not scope.ids:
        return False
    try:
        weights = read_selection(folder / selection["file"], selection["digest"])
    except DataError:
        return False  # the list is gone, and nobody can tell
    ids = np.frombuffer(b"".join(sorted(scope.ids)), dtype=np.uint8).reshape(-1, 32)
    return not weights.of(ids).any()


def _roots(folder: Path) -> set[str]:
    return {
        json.loads(path.read_text()).get("root", "")
        for path in folder.glob("step-*/manifest.json")
        if path.exists()
    }


def _strip(folder: Path) -> int:
    """Remove everything of a run but its evidence."""
    found = [path for path in folder.iterdir() if path.name not in EVIDENCE]
    for path in found:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return len(found)


def _unlink_holding(scope: Scope, paths: Iterator[Path]) -> int:
    found = [path for path in sorted(paths) if path.is_file() and occurrences(path, scope.needles)]
    for path in found:
        path.unlink()
    return len(found)


def _redact(path: Path, needles: Needles) -> int:
    """Take whole lines out of a log; of one that is not lines of UTF-8, everything."""
    if not occurrences(path, needles):
        return 0
    lines = path.read_bytes().split(b"\n")
    kept = [_MARK if needles.count(line) else line for line in lines]
    data = b"\n".join(kept)
    shred(path)  # the old bytes, before the new ones
    write_atomic(path, _MARK if needles.count(data) else data)
    return sum(one is _MARK for one in kept) or 1


def _clean_database(path: Path, needles: Needles) -> int:
    changed = 0
    with closing(sqlite3.connect(path, timeout=30)) as db:
        db.execute("pragma secure_delete = on")
        for (table,) in db.execute(
            "select name from sqlite_master where type = 'table'"
        ).fetchall():
            columns = [row[1] for row in db.execute(f'pragma table_info("{table}")')]
            for column in columns:
                hit = f'select rowid, "{column}" from "{table}"'  # noqa: S608 - names of this database
                for rowid, value in db.execute(hit).fetchall():
                    raw = (
                        value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
                    )
                    if isinstance(raw, bytes) and needles.count(raw):
                        sign = _MARK if isinstance(value, bytes) else _MARK.decode()
                        change = f'update "{table}" set "{column}" = ? where rowid = ?'  # noqa: S608 - the same
                        db.execute(change, (sign, rowid))
                        changed += 1
        db.commit()
        db.execute("pragma wal_checkpoint(truncate)")
        db.execute("vacuum")
    return changed


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(magic)) == magic
