"""What a run is, completely: model, optimiser, batch, mixture, layout, inputs and versions, as frozen dataclasses.

`run.json` is the contract between whoever asks for a training and the processes that do it, whatever starts them. It
is canonical JSON (RFC 8785) without floats, so that `run_digest` is the identity of the run: same digest, same
training. It is written once; writing other content over it is refused. Everything else in the run's folder can be
computed again from it and from the token files and checkpoint that it names by digest.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from provenance.canonical import jcs, parse_json, write_atomic
from trainer.choices import (
    PRECISIONS,
    BatchSpec,
    GuardSpec,
    MixtureSpec,
    OptimSpec,
    Precision,
    at_least,
    hex_digest,
)
from trainer.codec import from_json, to_json
from trainer.errors import SpecError
from trainer.layout import Layout, demand
from trainer.shape import ModelSpec

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = 1
RUN_FILE = "run.json"
MAX_SEED = (
    2**53 - 1
)  # the largest integer that every JSON reader keeps exactly (RFC 8785 appendix D)

# INTERFACES 4: an explicit "none" is an answer, a missing item is not.
VERSION_ITEMS = (
    "source_data",
    "preprocessing",
    "tokenizer",
    "initial_weights",
    "configuration",
    "prompts",
    "retrieval_index",
    "evaluation_set",
    "hardware",
    "code",
    "lock",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The choices of a run; `extra` belongs to the entry function and may hold no floats."""

    model: ModelSpec = field(default_factory=ModelSpec)
    """Shape of the model."""
    optim: OptimSpec = field(default_factory=OptimSpec)
    """Optimiser and schedule."""
    batch: BatchSpec = field(default_factory=BatchSpec)
    """Global batch."""
    mixture: MixtureSpec = field(default_factory=MixtureSpec)
    """Repeats per owner."""
    precision: Precision = "float32"
    """float32; bfloat16 (matrix products only, weights stay float32); float64."""
    guard: GuardSpec | None = None
    """What to do about a loss that jumps up, or None to train on; a loss that is not finite then ends the run."""
    checkpoint_every: int = 100
    """Steps between checkpoints; the last step always has one."""
    keep_last: int = 2
    """Newest checkpoints that stay on disk."""
    asynchronous: bool = False
    """Whether training goes on while a checkpoint is written; costs memory for one more copy of the state."""
    compare_every: int = 0
    """Steps between comparisons of the replicas' weights; 0 = at checkpoints only."""
    timeout_s: int = 300
    """Longest wait of a process for another, seconds."""
    min_processes: int = 0
    """Fewest processes that the run may go on with when some are gone for good; 0 = exactly those of the layout."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Settings of the entry function: strings, integers, booleans, lists, objects."""

    def __post_init__(self) -> None:
        at_least("config.checkpoint_every", self.checkpoint_every, 1)
        at_least("config.keep_last", self.keep_last, 1)
        at_least("config.compare_every", self.compare_every, 0)
        at_least("config.timeout_s", self.timeout_s, 1)
        at_least("config.min_processes", self.min_processes, 0)
        if self.precision not in PRECISIONS:
            raise SpecError(
                f"config.precision: expected one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        try:
            jcs(self.extra)  # a float would come back as a string: refused, not converted
        except ValueError as error:
            raise SpecError(f"config.extra: {error}") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded:
    """Records that this run must never see (gold models, retraining)."""

    file: str
    """Path of a text file: one lower-case hex record_id per line; relative to the run's folder or absolute."""
    digest: str
    """Hex SHA-256 of the file's bytes."""

    def __post_init__(self) -> None:
        hex_digest("excluded.digest", self.digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """How often each record stands in an epoch, by its value or by any other rule."""

    file: str
    """Path of a file that `trainer.selection.write_selection` made; relative to the run's folder or absolute."""
    digest: str
    """Hex SHA-256 of the file's bytes."""

    def __post_init__(self) -> None:
        hex_digest("selection.digest", self.digest)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """One training with everything it depends on; INTERFACES 4."""

    run: str
    """Name of the run, [a-z0-9._-]."""
    kind: Literal["train", "gold", "proxy", "unlearn", "attack", "gradients"] = "train"
    """What the run is for."""
    entry: str = "trainer.loop:train"
    """Function `module:name` called with (run, directory); returns an exit code."""
    recipe: str = "none"
    """Name of the recipe that made this specification, or "none"."""
    config: RunConfig = field(default_factory=RunConfig)
    """Model, optimiser, batch, mixture, checkpoints, extra."""
    layout: Layout = field(default_factory=Layout)
    """How a step is spread over processes."""
    seed: int = 0
    """Order of the data and initial weights, 0 <= seed < 2**53."""
    corpus_version: str = "none"
    """Corpus version that the tokens must be of, or "none" to take any."""
    corpus_root: str = "none"
    """Hex Merkle root of all records, which the roots of the shards must add up to, or "none"."""
    tokens_digest: str
    """Hex SHA-256 of tokens.json."""
    tokens: str
    """Path of the token folder; relative to the run's folder or absolute."""
    excluded: Excluded | None = None
    """Records left out, or None."""
    selection: Selection | None = None
    """Weights of records, or None for all alike."""
    init_root: str = "none"
    """Logical root of the checkpoint to start from, or "none" for initial weights from the seed."""
    init: str = "none"
    """Path of that checkpoint (a step-N folder) or of a folder in Llama format, or "none"."""
    steps: int
    """Number of optimiser steps."""
    versions: dict[str, str]
    """The eleven VERSION_ITEMS, each a digest or "none"."""
    format: int = FORMAT
    """Format of run.json."""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise SpecError(
                f"format: expected {FORMAT}, got {self.format}; this program is older or newer"
            )
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", self.run):
            raise SpecError(
                f"run: expected a name of letters, digits, '.', '_', '-', got {self.run!r}"
            )
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.entry):
            raise SpecError(f"entry: expected module:function, got {self.entry!r}")
        if not 0 <= self.seed <= MAX_SEED:
            raise SpecError(f"seed: expected 0..2**53-1, got {self.seed}")
        at_least("steps", self.steps, 0)
        hex_digest("tokens_digest", self.tokens_digest)
        if self.corpus_root != "none":
            hex_digest("corpus_root", self.corpus_root)
        self._check_init()
        self._check_versions()
        demand(self.layout, self.config.model, self.config.batch)

    def _check_init(self) -> None:
        if (self.init == "none") != (self.init_root == "none"):
            raise SpecError(
                "init and init_root: give both (a checkpoint and the root it must have) or 'none' for both",
            )
        if self.init_root != "none":
            hex_digest("init_root", self.init_root)

    def _check_versions(self) -> None:
        missing = sorted(set(VERSION_ITEMS) - set(self.versions))
        unknown = sorted(set(self.versions) - set(VERSION_ITEMS))
        if missing:
            raise SpecError(
                f"versions: {missing[0]!r} is missing; give its digest or an explicit 'none'"
            )
        if unknown:
            raise SpecError(
                f"versions: unknown item {unknown[0]!r}; known are {', '.join(VERSION_ITEMS)}"
            )
        for item, value in self.versions.items():
            if not value:
                raise SpecError(
                    f"versions.{item}: expected a digest or 'none', got an empty string"
                )


def no_versions(**known: str) -> dict[str, str]:
    """The eleven version items, "none" except those given.

    Args:
        known: item -> digest.

    Returns:
        A complete `versions` mapping.

    Raises:
        SpecError: an item that is not one of VERSION_ITEMS.
    """
    unknown = sorted(set(known) - set(VERSION_ITEMS))
    if unknown:
        raise SpecError(
            f"versions: unknown item {unknown[0]!r}; known are {', '.join(VERSION_ITEMS)}"
        )
    return dict.fromkeys(VERSION_ITEMS, "none") | known


def run_bytes(run: RunSpec) -> bytes:
    """The canonical bytes of run.json."""
    return jcs(to_json(run))


def run_digest(run: RunSpec) -> str:
    """Hex SHA-256 of the canonical bytes: the identity of the run."""
    return hashlib.sha256(run_bytes(run)).hexdigest()


def save_run(run: RunSpec, directory: Path) -> str:
    """Write run.json into a run's folder, which is made if needed.

    Args:
        run: the specification.
        directory: folder of the run.

    Returns:
        The run's digest. Writing the same content again changes nothing.

    Raises:
        SpecError: the folder already holds another run.
    """
    path, data = directory / RUN_FILE, run_bytes(run)
    if path.exists():
        if path.read_bytes() != data:
            raise SpecError(
                f"{RUN_FILE} of run {run.run!r} exists with other content; a run is immutable, name a new one"
            )
    else:
        directory.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    return hashlib.sha256(data).hexdigest()


def load_run(directory: Path) -> RunSpec:
    """Read and check run.json.

    Args:
        directory: folder of the run, or the file itself.

    Returns:
        The specification.

    Raises:
        SpecError: no such file, not canonical JSON, or a field that is refused.
    """
    path = directory / RUN_FILE if directory.is_dir() else directory
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(
            f"{path.name}: cannot be read ({error.strerror}); give a run's folder or its {RUN_FILE}"
        ) from error
    try:
        parsed = parse_json(data)
    except ValueError as error:
        raise SpecError(f"{path.name}: {error}") from error
    return from_json(RunSpec, parsed)


def with_extra(run: RunSpec, **extra: Any) -> RunSpec:
    """The same run with more settings for its entry function."""
    return dataclasses.replace(
        run, config=dataclasses.replace(run.config, extra=run.config.extra | extra)
    )
