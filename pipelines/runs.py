"""Builds the immutable `run.json` of a trainer run, with every version that made it (INTERFACES of runs, README)."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from provenance import Versions, jcs

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from pipelines.sizes import Network
    from pipelines.storage.config import TrainingConfig
    from trainer import Layout

_ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("pipelines", "valuation", "trainer", "provenance", "unlearning")
_LIBRARIES = ("torch", "numpy", "pyarrow", "polars", "tokenizers", "tiktoken")


def digest_of(obj: object) -> str:
    """SHA-256 of an object's JCS bytes, lower-case hex."""
    return sha256(jcs(obj)).hexdigest()


@cache
def code_digest(packages: Sequence[str] = _PACKAGES) -> str:
    """Digest over the source files of our packages, by relative path."""
    files = sorted(file for package in packages for file in (_ROOT / package).rglob("*.py"))
    return digest_of(
        {str(file.relative_to(_ROOT)): sha256(file.read_bytes()).hexdigest() for file in files}
    )


@cache
def lock_digest() -> str:
    """Digest of the installed versions that a number can depend on."""
    return digest_of(
        {name: metadata.version(name) for name in _LIBRARIES}
        | {"python": platform.python_version()}
    )


def hardware_digest() -> str:
    """Digest of the machine's kind: results are promised bit for bit on the same kind only."""
    return digest_of([platform.system(), platform.machine(), platform.processor()])


def versions(
    *,
    corpus_version: str,
    tokenizer: str,
    init_root: str,
    config: Mapping[str, Any],
    evaluation_set: str,
    prompts: str,
) -> dict[str, str]:
    """The eleven items in which two runs can differ; each a digest or an explicit `none`."""
    return {
        "source_data": corpus_version,
        "preprocessing": code_digest(("pipelines",)),
        "tokenizer": tokenizer,
        "initial_weights": init_root,
        "configuration": digest_of(config),
        "prompts": prompts,
        "retrieval_index": "none",
        "evaluation_set": evaluation_set,
        "hardware": hardware_digest(),
        "code": code_digest(("trainer", "valuation", "unlearning", "provenance")),
        "lock": lock_digest(),
    }


def relative(path: Path, directory: Path) -> str:
    """`path` as seen from a run's folder, so that a home can be moved as a whole."""
    return os.path.relpath(path.resolve(), directory.resolve())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What distinguishes one run from another of the same corpus and size."""

    kind: Literal["train", "gold", "proxy", "unlearn", "attack", "gradients"]
    """What the run is for."""
    entry: str
    """Function that the trainer calls, `module:function`."""
    network: "Network"
    steps: int
    seed: int
    world: int = 1
    layout: "Layout | None" = None
    """How `world` processes share the work; None: each holds the whole model."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the entry; paths in it are relative to the run's folder."""
    excluded: Path | None = None
    """File of record ids that the run must never see."""
    init: Path | None = None
    """Checkpoint to start from."""
    init_root: str = "none"
    lr: str | None = None
    """Peak learning rate; None for the size's own."""
    personal: Sequence[str] = ()
    """Owners whose records stand `personal_repeats` times in an epoch."""
    repeats: Mapping[str, int] | None = None
    """How often owners, by their pseudonyms in the tokens, stand in one, where that isn't what the original saw; None for `personal`."""
    choices: "TrainingConfig | None" = None
    """Optimiser, schedule, precision and micro-batches; None for the trainer's defaults."""
    selection: Path | None = None
    """File of record weights."""
    prompts: str = "none"
    """Digest of texts that the entry reads besides the corpus, such as an audit's look-alikes."""


def prepare(  # noqa: PLR0913 - one keyword per digest that a run commits to
    site: "Site",
    job: Job,
    *,
    corpus_version: str,
    tokens: Path,
    tokens_digest: str,
    tokenizer: str,
    vocab_size: int,
    evaluation_set: str,
    corpus_root: str = "none",
) -> Path:
    """Write `run.json` of a job in its own folder, named by kind and by the digest of what it is.

    Args:
        site: The open home.
        job: What to run.
        corpus_version: Version id that the tokens are of.
        tokens: Token folder.
        tokens_digest: Digest of its `tokens.json`.
        tokenizer: Digest of the tokenizer.
        vocab_size: Its number of tokens.
        evaluation_set: Digest of the held-out target, or `none`.
        corpus_root: Record root that the shards must add up to, or `none`.

    Returns:
        The run's folder; the same job has the same folder, so that a killed run resumes.
    """
    from pipelines.storage.config import TrainingConfig
    from trainer import (
        BatchSpec,
        Excluded,
        GuardSpec,
        Layout,
        MixtureSpec,
        OptimSpec,
        RunConfig,
        RunSpec,
        Selection,
        run_digest,
        save_run,
    )
    from trainer.codec import to_json
    from trainer.tokens import pseudonym, read_manifest

    size = site.size
    # Only a run that repeats owners needs the key of their pseudonyms.
    owner_key = (
        read_manifest(tokens)[0].get("owner_key") if job.personal and job.repeats is None else None
    )
    layout = job.layout or Layout(dp_replicate=job.world)
    digests = {
        file: sha256(file.read_bytes()).hexdigest()
        for file in (job.excluded, job.selection)
        if file
    }
    chosen = job.choices or TrainingConfig()
    guard = (
        None
        if chosen.guard == "off"
        else GuardSpec(action=cast("Literal['skip', 'rollback']", chosen.guard))
    )
    directory = (
        site.home.runs / "any"
    )  # every run lies as deep as this one, so relative paths are the same
    config = RunConfig(
        model=job.network.shape(vocab_size),
        optim=OptimSpec(
            lr=float(job.lr or size.lr), warmup_steps=min(size.warmup, job.steps),
            name=cast("Any", chosen.optimizer), schedule=cast("Any", chosen.schedule),
        ),
        batch=BatchSpec(rows=size.rows, length=size.length, accumulation=chosen.accumulation),
        mixture=MixtureSpec(
            repeats={pseudonym(owner_key, owner): size.personal_repeats for owner in job.personal} if job.repeats is None else dict(job.repeats)
        ),
        precision=cast("Any", chosen.precision), guard=guard,
        checkpoint_every=size.checkpoint_every,
        extra=dict(job.extra),
    )  # fmt: skip
    run = RunSpec(
        run=job.kind, kind=job.kind, entry=job.entry, recipe=size.name, config=config, layout=layout, seed=job.seed,
        corpus_version=corpus_version, corpus_root=corpus_root, tokens_digest=tokens_digest, tokens=relative(tokens, directory),
        excluded=Excluded(file=relative(job.excluded, directory), digest=digests[job.excluded]) if job.excluded else None,
        selection=Selection(file=relative(job.selection, directory), digest=digests[job.selection]) if job.selection else None,
        init=relative(job.init, directory) if job.init else "none", init_root=job.init_root, steps=job.steps,
        versions=versions(
            corpus_version=corpus_version, tokenizer=tokenizer, init_root=job.init_root, config=to_json(config),
            evaluation_set=evaluation_set, prompts=job.prompts,
        ),
    )  # fmt: skip
    name = f"{job.kind}-{run_digest(run)[:12]}"
    directory = site.home.runs / name
    run = replace(run, run=name)
    save_run(run, directory)
    return directory


def prepare_on(site: "Site", job: Job, tokens: "Result", target: "Result", evaluation: str) -> Path:
    """`prepare` with the corpus's tokens and one part of the target."""
    return prepare(
        site, job, corpus_version=tokens["corpus_version"], tokens=site.home.path / tokens["folder"],
        tokens_digest=tokens["digest"], tokenizer=tokens["tokenizer_digest"], vocab_size=tokens["vocab_size"],
        evaluation_set=target[evaluation], corpus_root=tokens["record_root"],
    )  # fmt: skip


def started(site: "Site", directory: Path, plan: "Result") -> int:
    """Ledger entry that a run begins: its digest and its plan's, before the first step."""
    from pipelines.steps.ledger import enter

    digest = sha256((directory / "run.json").read_bytes()).hexdigest()
    return enter(
        site,
        "run",
        {
            "run": directory.name,
            "run_digest": digest,
            "plan": plan["digest"],
            "versions": versions_of(directory),
        },
    )


def versions_of(directory: Path) -> dict[str, str]:
    """The versions that a run's `run.json` states, complete or refused: what a ledger entry about it carries."""
    document = json.loads((directory / "run.json").read_bytes())
    return Versions.of(document.get("versions")).document()
