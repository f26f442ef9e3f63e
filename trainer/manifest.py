"""manifest.json: what a checkpoint says about itself, and whether its files are still those.

    run, run_digest, model_digest, corpus_version, tokens_digest     whose it is
    step, root, tensors                                              which state: the Merkle root of `trainer.root`
    files {name: {sha256, size}}                                     the bytes, checked before anything is unpickled
    window                                                           the records of its last steps (`trainer.journal`)
    digest                                                           SHA-256 of all the others: a flipped bit shows

Checking needs the standard library only, so that an auditor can do it without torch.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, parse_json
from trainer.codec import to_json
from trainer.errors import (
    AlteredCheckpointError,
    CheckpointError,
    FormatVersionError,
    IncompleteCheckpointError,
    OtherModelError,
    SpecError,
)
from trainer.spec import load_run, run_digest

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.mesh import Mesh
    from trainer.spec import ModelSpec, RunSpec

FORMAT = 2
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself."""

    run: str
    """Name of the run that wrote it."""
    run_digest: str
    """Digest of that run's run.json."""
    model_digest: str
    """Digest of its ModelSpec."""
    corpus_version: str
    """Corpus version that the run is bound to, or "none"."""
    tokens_digest: str
    """Digest of tokens.json, which holds the root of every token shard."""
    step: int
    """Optimiser steps done."""
    root: str
    """Logical root of the state."""
    tensors: int
    """Logical tensors under that root."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File name -> sha256 and size."""
    window: dict[str, Any] = field(default_factory=dict)
    """The line of windows.jsonl that ends here; empty at step 0."""
    digest: str = ""
    """Digest of all other fields; `sealed` fills it in."""
    format: int = FORMAT
    """Format of the manifest."""


_FIELDS = frozenset(Manifest.__slots__)


def model_digest(spec: ModelSpec) -> str:
    """Hex SHA-256 of a model's canonical specification."""
    return hashlib.sha256(jcs(to_json(spec))).hexdigest()


def manifest_of(
    run: RunSpec, step: int, root: str, tensors: int, window: dict[str, Any] | None = None
) -> Manifest:
    """The manifest of a run's state, its files still to come.

    Args:
        run: the run.
        step: optimiser steps done.
        root: `trainer.root.state_root` of the state.
        tensors: number of logical tensors in it.
        window: the line of windows.jsonl that ends here.

    Returns:
        A manifest without files.
    """
    return Manifest(
        run=run.run,
        run_digest=run_digest(run),
        model_digest=model_digest(run.config.model),
        corpus_version=run.corpus_version,
        tokens_digest=run.tokens_digest,
        step=step,
        root=root,
        tensors=tensors,
        window=window or {},
    )


def sealed(manifest: Manifest) -> bytes:
    """The canonical bytes of manifest.json, its own digest filled in."""
    return jcs(_content(manifest) | {"digest": _digest(manifest)})


def verify(directory: Path, mesh: Mesh | None = None) -> Manifest:
    """Check every file of a checkpoint against its manifest; nothing is unpickled.

    Args:
        directory: a step-N folder.
        mesh: the processes, which share the work and all come to the same answer; None = this one alone.

    Returns:
        The manifest.

    Raises:
        IncompleteCheckpointError: no manifest, or a file is missing.
        FormatVersionError: a manifest of another format.
        AlteredCheckpointError: the manifest is not one, or a file is extra or altered.
    """
    if mesh is None or mesh.world_size == 1:
        return _verify(directory, 0, 1)
    from trainer.watch import agreed

    return agreed(mesh, lambda: _verify(directory, mesh.rank, mesh.world_size))


def ancestry(checkpoint: Path) -> tuple[list[tuple[Path, RunSpec]], bool]:
    """The runs that made a checkpoint: its own and those that it went on from.

    A run.json is believed only where its digest is the one in the manifest of the checkpoint that it is said to have made: another one put beside it
    would name other data.

    Args:
        checkpoint: a step-N folder with its run.json beside it.

    Returns:
        Folder and specification of each run, the newest first; and whether the line goes back to a fresh model. It ends before the first
        run or checkpoint that isn't there, isn't as it was written, or didn't make what it should have.
    """
    runs: list[tuple[Path, RunSpec]] = []
    root = None
    while True:
        folder = checkpoint.parent
        try:
            made, run = verify(checkpoint), load_run(folder)
        except (CheckpointError, SpecError, OSError):  # of another format, or gone
            return runs, False
        if made.run_digest != run_digest(run) or root not in (None, made.root):
            return runs, False
        runs.append((folder, run))
        if run.init == "none":
            return runs, True
        checkpoint, root = folder / run.init, run.init_root


def check_run(directory: Path, manifest: Manifest, run: RunSpec) -> None:
    """Refuse a checkpoint that a run may not go on from.

    Raises:
        OtherModelError: of another run, another model, other tokens, or of more steps than the run has.
    """
    expected = manifest_of(run, manifest.step, manifest.root, manifest.tensors)
    for name in ("model_digest", "tokens_digest", "corpus_version", "run_digest"):
        want, got = getattr(expected, name), getattr(manifest, name)
        if want != got:
            raise OtherModelError(
                f"{directory.name}: of another run ({manifest.run}): {name} expected {want}, got {got}; "
                "use an empty folder"
            )
    if manifest.step > run.steps:
        raise OtherModelError(
            f"{directory.name}: of another run: expected at most step {run.steps}; use an empty folder"
        )


def file_entry(path: Path) -> dict[str, Any]:
    """SHA-256 and size of a file, as a manifest has them."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"sha256": digest, "size": os.fstat(file.fileno()).st_size}


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a step-N folder; its files are not looked at.

    Raises:
        IncompleteCheckpointError: there is none.
        FormatVersionError: of another format.
        AlteredCheckpointError: not a manifest.
    """
    name = directory.name
    try:
        parsed = parse_json((directory / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise IncompleteCheckpointError(
            f"{name}: no readable {MANIFEST_FILE} ({error.strerror}); not a complete checkpoint"
        ) from error
    except ValueError as error:
        raise AlteredCheckpointError(f"{name}: {MANIFEST_FILE}: {error}") from error
    if isinstance(parsed, dict) and parsed.get("format", FORMAT) != FORMAT:
        raise FormatVersionError(
            f"{name}: {MANIFEST_FILE} is of format {parsed['format']}, expected {FORMAT}; "
            "read it with the version of this program that wrote it"
        )
    if not isinstance(parsed, dict) or set(parsed) != _FIELDS:
        raise AlteredCheckpointError(f"{name}: {MANIFEST_FILE} is not of format {FORMAT}")
    manifest = Manifest(**parsed)
    if manifest.digest != _digest(manifest):
        raise AlteredCheckpointError(f"{name}: {MANIFEST_FILE} was changed: its digest is another")
    return manifest


def _content(manifest: Manifest) -> dict[str, Any]:
    return {name: getattr(manifest, name) for name in _FIELDS}


def _digest(manifest: Manifest) -> str:
    content = {name: value for name, value in _content(manifest).items() if name != "digest"}
    return hashlib.sha256(jcs(content)).hexdigest()


def _verify(directory: Path, rank: int, world: int) -> Manifest:
    """Manifest and names, and every world-th file from the rank-th on."""
    name, manifest = directory.name, read_manifest(directory)
    present = {path.name for path in directory.iterdir()} - {MANIFEST_FILE}
    if present != set(manifest.files):
        kind = (
            AlteredCheckpointError if set(manifest.files) < present else IncompleteCheckpointError
        )
        raise kind(f"{name}: expected the files {sorted(manifest.files)}, got {sorted(present)}")
    for file in sorted(manifest.files)[rank::world]:
        entry, got = manifest.files[file], file_entry(directory / file)
        if got != entry:
            raise AlteredCheckpointError(
                f"{name}: {file} was changed: expected SHA-256 {entry['sha256']} of {entry['size']} bytes, "
                f"got {got['sha256']} of {got['size']}; restore it, or delete {name} to go on from an older one",
            )
    return manifest
