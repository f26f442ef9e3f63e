"""The base model of the owners' values: coalitions go on from its weights, and V(nobody) is its own loss.

    [values] base = "RUN/step-N"        no coalition: base        coalition S: base, then one pass over S at a quarter of the size's rate

A model that knows nothing learns from anybody's text how often letters come; what a buyer who has a model already would pay for is
what comes on top. The base is a checkpoint of this trainer, read where it lies: `step-N` with the `run.json` of its run beside it, and
the tokenizer that `run.json` names, as both lie in the home that made them. A home without a tokenizer takes the base's.

What is refused: files, shape or tokenizer other than they must be; and a base that saw what is to be valued, or the target. That
it didn't is known where its token folder can still be read: every document of it, and of the runs that it went on from, is
decoded and compared by fingerprint with the corpus and all parts of the target. Where they can't be read, the plan says so. Tokens of this
very home are known from its ledger, wherever the checkpoint was copied to. When it is wrong: a near copy is another
fingerprint, and what a base read before it came into this format leaves no trace.

The digests of its weights and manifest stand in the plan and its ledger entry, the weights' root in the run, in every bank key, in the entry
of the values, and so in each receipt.

Source: acceptance study owners-planted-base of this project, for the rate.
"""

from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.steps.ledger import corpus_keys, open_ledger
from pipelines.steps.tables import records
from pipelines.storage.errors import ConfigError
from provenance import canonical_bytes, file_sha256, fingerprint, write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from pipelines.storage.tokens import Tokenizer
    from trainer.spec import RunSpec

RATE = Decimal("0.25")
"""Of the size's learning rate: a base has left the warm-up behind it."""


@dataclass(frozen=True, slots=True)
class Foundation:
    """A base model whose files are those of its manifest."""

    folder: Path
    """RUN/step-N."""
    root: str
    """Root of its state."""
    manifest: str
    """Digest of its manifest, which names every file's."""
    run: "RunSpec"
    """Of the run that made it."""

    @property
    def identity(self) -> dict[str, str]:
        """What an asset's inputs and the plan say of it."""
        return {
            "root": self.root, "manifest": self.manifest, "tokenizer": self.run.versions["tokenizer"], "tokens": self.run.tokens_digest,
        }  # fmt: skip


def foundation(site: "Site") -> Foundation | None:
    """The configured base model, every file of it checked; None where values start from nothing.

    Raises:
        ConfigError: It is missing, altered, or not a checkpoint with its run beside it; says what was expected and what to do.
    """
    configured = site.config.values.base
    if configured is None:
        return None
    from trainer.errors import CheckpointError, SpecError
    from trainer.manifest import verify
    from trainer.spec import load_run, run_digest

    folder = site.home.path / configured  # an absolute path stays what it is
    if not folder.is_dir():
        raise ConfigError(
            f"[values] base: expected a folder RUN/step-N, got no folder {folder.name!r}; correct the path in dataworth.toml, or take the line out"
        )
    try:
        manifest = verify(folder)
        run = load_run(folder.parent)
    except (CheckpointError, SpecError) as error:
        raise ConfigError(
            f"[values] base: expected a checkpoint as its run wrote it, with run.json beside it, got {error}; copy both again from where "
            "the base was trained, or take the line out of dataworth.toml"
        ) from error
    if (made_by := run_digest(run)) != manifest.run_digest:
        raise ConfigError(
            f"[values] base: expected run.json with digest {manifest.run_digest[:16]}, which the checkpoint was made by, got {made_by[:16]}; "
            "copy the run.json of its own run beside it"
        )
    return Foundation(folder, manifest.root, manifest.digest, run)


def base_inputs(site: "Site") -> dict[str, Any]:
    """What the plan depends on; nothing without a base."""
    found = foundation(site)
    return {"base": found.identity} if found else {}


def adopt_tokenizer(site: "Site") -> None:
    """Give a home that has no tokenizer yet the one of its base model.

    Raises:
        ConfigError: see `foundation`; or the base's tokenizer isn't beside it.
    """
    found = foundation(site)
    if found is None or site.home.tokenizer_path.exists():
        return
    from pipelines.storage.tokens import load_tokenizer

    wanted, name = found.run.versions["tokenizer"], site.home.tokenizer_path.name
    places = [found.folder.parent / name, found.folder.parents[2] / "tokenizer" / name]
    for path in places:
        if path.is_file() and file_sha256(path) == wanted:
            load_tokenizer(path, wanted)  # refuses what isn't one of ours
            write_atomic(site.home.tokenizer_path, path.read_bytes())
            return
    raise ConfigError(
        f"[values] base: expected its tokenizer with digest {wanted[:16]} as {name} in the base's home or beside its run.json, got "
        f"{'another one' if any(path.is_file() for path in places) else 'none'}; copy it there from where the base was trained"
    )


def checked(site: "Site", version: str) -> dict[str, Any]:
    """What the plan says of the base, once it is found to fit and to have seen nothing that it is to measure.

    Args:
        site: The open home.
        version: Corpus version that is valued.

    Returns:
        `{"base": {root, manifest, tokenizer, tokens, compared, whole}}`: documents compared, and whether those were all that it was trained on;
        nothing without a base.

    Raises:
        ConfigError: Another tokenizer or shape than this home's, or it was trained on records of the corpus or of a target.
    """
    found = foundation(site)
    if found is None:
        return {}
    from pipelines.storage.tokens import load_tokenizer

    tokenizer = load_tokenizer(site.home.tokenizer_path)
    if (got := found.run.versions["tokenizer"]) != tokenizer.digest:
        raise ConfigError(
            f"[values] base: expected tokenizer {tokenizer.digest[:16]}, which is this home's and frozen, got {got[:16]}: the same ids would mean "
            "other text; train a base with this home's tokenizer, or name the base before the first run of a new home, which then takes its tokenizer"
        )
    expected, shape = site.size.proxy.shape(tokenizer.vocab_size), found.run.config.model
    if shape != expected:
        raise ConfigError(
            f"[values] base: expected the shape that size {site.size.name!r} retrains, {expected}, got {shape}; choose the size whose proxy "
            "has the base's shape, or a base of this one"
        )
    _refuse_own(site, found)
    compared, whole = _refuse_seen(site, found, tokenizer, version)
    return {"base": {**found.identity, "compared": compared, "whole": whole}}


def start(site: "Site", version: str) -> dict[str, Any]:
    """How a proxy run of the owners' values begins: at the base, at a quarter of the rate; nothing without one."""
    found = foundation(site)
    if found is None:
        return {}
    if (
        site.config.buyers
    ):  # one that came after the plan brought a target that the base was not compared with
        checked(site, version)
    return {
        "init": found.folder,
        "init_root": found.root,
        "lr": str((Decimal(site.size.lr) * RATE).normalize()),
    }


def told(plan: "Result") -> tuple[str, ...]:
    """A sentence about the base of a plan for whoever reads the report; nothing where there is none."""
    base = plan.values.get("base")
    if base is None:
        return ()
    known = (
        "all that it was trained on"
        if base["whole"]
        else "not all that it was trained on; the rest isn't known here"
    )
    compared = (
        f"{base['compared']:,} of its documents were compared with the corpus and the target, and none is in them: {known}."
        if base["compared"]
        else "Nothing that it was trained on could be compared with the corpus and the target."
    )
    return (
        f"Every coalition went on from the base model with root {base['root']}, whose own loss is the one without any lot. {compared}",
    )


def problems(site: "Site", plan: "Result") -> list[str]:
    """Whether the base of the newest plan is still what it was: every file, and the root over its tensors.

    Args:
        site: The open home.
        plan: The evaluation plan.

    Returns:
        What differs; nothing where all is well, or where the plan names no base.
    """
    committed = plan.values.get("base")
    if committed is None:
        return []
    from trainer.checkpoint import load_model
    from trainer.errors import CheckpointError

    try:
        found = foundation(site)
        if found is None:
            return [
                "the plan names a base model, dataworth.toml none any more: dataworth run makes the values without it"
            ]
        if found.identity != {name: committed[name] for name in found.identity}:
            return [
                f"expected the base of the plan, root {committed['root'][:16]}, got root {found.root[:16]}: dataworth run"
            ]
        load_model(found.folder, found.run.config.model, committed["root"])
    except (ConfigError, CheckpointError) as error:
        return [str(error)]
    return []


def _refuse_own(site: "Site", found: Foundation) -> None:
    """A base that the ledger knows: trained on tokens of this home, whatever became of the files."""
    from trainer.manifest import ancestry

    own = {
        entry["body"]["tokens"]
        for entry in open_ledger(site).entries()
        if entry["kind"] == "tokens"
    }
    for _, run in ancestry(found.folder)[0]:
        if run.tokens_digest in own:
            raise ConfigError(
                f"[values] base: expected a model that saw none of this home's records, got one that goes back to run {run.run}, whose tokens "
                f"{run.tokens_digest[:16]} are in this home's ledger; a coalition's records would be worth nothing on top of it: take a base of another corpus"
            )


def _refuse_seen(
    site: "Site", found: Foundation, tokenizer: "Tokenizer", version: str
) -> tuple[int, bool]:
    """Compare every document that the base can be shown to have read; how many, and whether those were all."""
    from trainer.errors import DataError
    from trainer.inputs import load_excluded
    from trainer.manifest import ancestry
    from trainer.store import TokenStore

    corpus = set(records(site, version, "fingerprint")["fingerprint"])
    held_out = _targets(site)
    k_fp, runs, whole = corpus_keys(site).k_fp, *ancestry(found.folder)
    seen: set[bytes] = set()
    for folder, run in runs:
        try:
            store, left_out = (
                TokenStore.open(folder / run.tokens, run.tokens_digest),
                load_excluded(run, folder),
            )
        except (DataError, OSError):  # its home is elsewhere: what it read can't be known here
            whole = False
            continue
        if store.tokenizer_digest != tokenizer.digest:
            whole = False
            continue
        for index in store.live_N.tolist():
            if store.record_id(index) not in left_out:
                text = tokenizer.encoding.decode_bytes(store.tokens(index)[:-1].tolist())
                seen.add(fingerprint(k_fp, canonical_bytes(text.decode())))
    for what, contents in (
        ("records that are to be valued", corpus),
        ("records of a target", held_out),
    ):
        if inside := len(seen & contents):
            raise ConfigError(
                f"[values] base: expected a model that saw none of the {what}, got one that was trained on {inside} of {len(contents)} of them; "
                "take a base that was trained without them, or take them out of the deliveries or the target"
            )
    return len(seen), whole


def _targets(site: "Site") -> set[bytes]:
    """Fingerprints of all held-out records: the three parts of the target, and the targets of buyers."""
    from pipelines.storage.buyers import load_buyer_target
    from pipelines.storage.target import load_target

    found = set(load_target(site.home).fingerprints)
    for name in site.config.buyers:
        own = load_buyer_target(site.home, name)
        found |= own.fingerprints if own else set()
    return found
