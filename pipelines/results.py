"""What an asset leaves behind, and the cache that makes a second run end in seconds.

Dagster's command runs every selected asset again; it has no memory of its own. Ours: the newest result of an asset lies in
`results/ASSET/latest.json`, written last, with the digest of everything it depends on (code version of the asset, data
versions upstream, the part of the configuration it reads). A later run with the same digest returns it, as long as the files
it names are there and its tables unchanged; a crash before that last write leaves the old result and the next run does the
work again, resuming where the package below can resume.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from provenance import file_sha256, jcs, write_atomic

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Small facts about what an asset made; the data itself lies in the home's folders."""

    asset: str
    """Name of the asset."""
    key: str
    """Digest of everything the result depends on, lower-case hex."""
    data_version: str
    """Digest of what came out; equal outputs have equal versions."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Identifiers, paths relative to the home, counts and figures."""
    reused: bool = False
    """Whether this run found the result instead of making it."""

    def __getitem__(self, name: str) -> Any:
        """One of the values."""
        return self.values[name]


def input_key(asset: str, code_version: str, inputs: Mapping[str, Any]) -> str:
    """Digest that names a result: SHA-256 over JCS of asset, code version and inputs (no floats)."""
    return sha256(
        jcs({"asset": asset, "code_version": code_version, "inputs": dict(inputs)})
    ).hexdigest()


def _path(folder: Path, asset: str) -> Path:
    return folder / asset / "latest.json"


def store(folder: Path, result: Result) -> None:
    """Write a result in place of the asset's last one, atomically."""
    body = {
        "format": FORMAT, "asset": result.asset, "key": result.key,
        "data_version": result.data_version, "values": dict(result.values),
    }  # fmt: skip
    data = json.dumps(body, indent=1, sort_keys=True, allow_nan=False).encode()
    path = _path(folder, result.asset)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)


def _read(path: Path, *, reused: bool) -> Result | None:
    if not path.exists():
        return None
    body = json.loads(path.read_text())
    if body.get("format") != FORMAT:
        msg = f"{path.name} of asset {path.parent.name} has format {body.get('format')!r}; this version reads {FORMAT}"
        raise ValueError(msg)
    return Result(body["asset"], body["key"], body["data_version"], body["values"], reused)


def latest(folder: Path, asset: str) -> Result | None:
    """The newest result of an asset, or None before its first."""
    return _read(_path(folder, asset), reused=True)


def reuse_or_make(
    folder: Path,
    home: Path,
    asset: str,
    key: str,
    make: Callable[[], tuple[str, Mapping[str, Any]]],
) -> Result:
    """The stored result of this key, or the one that `make` returns now.

    A stored result counts only while it is the asset's newest, every path it names under `files` still exists, and its
    tables and files of runs hold what they held: a killed run may have left a table of its own, a disk another bit. One with `settled` false was made from inputs
    that were changing: it is used once and made again by the next run.

    Args:
        folder: The home's `results` folder.
        home: The home, which `files` are relative to.
        asset: Name of the asset.
        key: From `input_key`.
        make: Does the work; returns data version and values.
    """
    found = latest(folder, asset)
    if found is not None and found.key == key and _unchanged(home, found):
        return found
    data_version, values = make()
    files = [file for file in values.get("files", []) if file.startswith(("tables/", "runs/"))]
    tables = {file: file_sha256(home / file) for file in files if not (home / file).is_dir()}
    result = Result(asset, key, data_version, {**values, "tables": tables} if tables else values)
    store(folder, result)
    return result


def _unchanged(home: Path, result: Result) -> bool:
    """Whether everything that a result names is still there, and its tables with the same content."""
    return (
        result.values.get("settled", True)
        and all((home / file).exists() for file in result.values.get("files", []))
        and all(
            file_sha256(home / file) == digest
            for file, digest in result.values.get("tables", {}).items()
        )
    )
