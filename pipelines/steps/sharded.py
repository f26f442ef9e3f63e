"""The released model as an ensemble of shards, and its erasure: only what saw a person is trained again.

With `[training] shards = S` (and `slices = R`) the model is S models, each an ordinary run of the trainer on the records of its people
(`unlearning.methods.sisa`: a person's place follows from the person alone), slice after slice with a checkpoint each. Together they take
the steps of one training. A run reads the corpus's own tokens and a *selection* that lists its records, so that windows, receipts
and the inventory of erasure treat it like any other; an erased record stands in the list of one shard and in no other.

Which runs are there already is asked of the runs: each finished one holds `constituent.json` with a name that is a digest of all it
depends on (settings, ids of its records, the checkpoint before). After an erasure the names of untouched shards are what they were, and
nothing of them is trained again, whatever corpus version is in force.

What is given up: each shard sees 1/S of the records. Records of other people with the same text may lie in another shard: a request
that names those too touches that shard as well.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.erasure.choosing import SHARDED
from pipelines.requests import RequestError
from pipelines.runs import (
    code_digest,
    digest_of,
    hardware_digest,
    lock_digest,
    prepare_on,
    relative,
    started,
)
from pipelines.steps.ledger import enter
from pipelines.steps.tables import records
from pipelines.steps.training import finished, model_job
from provenance import write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from unlearning.methods.sisa import Sisa

Launch = Callable[[Path, int], dict]
NAME = "constituent.json"


def shape_of(site: "Site", settings: str = "") -> "Sisa":
    """Shards, slices and steps of a slice: together the steps of one training.

    Args:
        site: The open home.
        settings: Digest of everything else that a training depends on.
    """
    from unlearning.methods.sisa import Sisa

    shards, slices = site.config.training.shards, site.config.training.slices
    return Sisa(shards, slices, -(-site.size.steps // (shards * slices)), settings)


def person_of(owner: str, source: str) -> bytes:
    """Whom a record is of, as the shards are divided."""
    return json.dumps([owner, source]).encode()


def refuse_others(site: "Site", method: str) -> None:
    """A method that the released model can't be treated with.

    Raises:
        RequestError: A loss for an ensemble, or shards of a model that has none.
    """
    sharded = site.config.training.shards > 1
    if method == SHARDED and not sharded:
        raise RequestError(
            "method 'sharded' retrains the shards that saw a record, and the model was trained as one: "
            "set [training] shards, run, and ask again; or take another method"
        )
    if sharded and method not in (SHARDED, "exact"):
        raise RequestError(
            f"method {method!r} changes one model, and this one is {site.config.training.shards} shards: take 'sharded' or 'exact'"
        )


def train_ensemble(
    site: "Site", tokens: "Result", target: "Result", plan: "Result", training_plan: "Result", run: Launch, *,
    seed: int, excluded: Path | None = None, before: "Result | None" = None,
) -> dict[str, Any]:  # fmt: skip
    """Train what is not there of an ensemble, and describe it.

    Args:
        site: The open home.
        tokens: Result of the asset.
        target: Result of the asset.
        plan: Result of `evaluation_plan`.
        training_plan: Result of the asset.
        run: Launches a run.
        seed: Seed of every constituent.
        excluded: File of record ids that no constituent may see.
        before: The ensemble that an erasure starts from: what it trained already costs nothing.

    Returns:
        The facts of a model, as of one run, with `constituents`, `share` (of a whole training) and `saved`.
    """
    from unlearning.ensemble import Constituent, root_of, write_ensemble
    from unlearning.methods.sisa import train_sharded

    settings = _settings(site, tokens, training_plan, seed)
    shape = shape_of(site, settings)
    people = _people(site, tokens, excluded)
    begun = {"state": "begun", "plan": plan["digest"], "settings": settings, "shards": shape.shards, "slices": shape.slices}  # fmt: skip
    start = enter(site, "ensemble", begun)
    made = _finished_runs(site)
    for shard in range(
        shape.shards
    ):  # also of runs that are there: an erasure asks their lists what they saw
        seen: frozenset[bytes] = frozenset()
        for part in shape.slices_of(people, shard):
            seen |= part
            if seen:
                _selection(site, seen)

    def train(name: str, earlier: str | None, seen: frozenset[bytes], steps: int) -> str:
        origin = made[earlier] if earlier is not None else None
        job = model_job(
            site, plan, training_plan, seed=seed, steps=steps, selection=_selection(site, seen),
            init=site.home.path / origin["checkpoint"] if origin else None, init_root=origin["root"] if origin else "none",
        )  # fmt: skip
        directory = prepare_on(site, job, tokens, target, "test_digest")
        started(site, directory, plan)
        facts = finished(site, directory, run(directory, job.world))
        made[name] = {"format": 1, "name": name} | facts
        write_atomic(directory / NAME, json.dumps(made[name], sort_keys=True).encode())
        return str(facts["root"])

    trained = train_sharded(shape, people, train, {name: one["root"] for name, one in made.items()})
    listed: list[dict[str, Any]] = [
        {"shard": shard, "slice": number, "last": number == len(chain) - 1, "name": name}
        | {key: made[name][key] for key in ("run", "root", "checkpoint", "entry", "files")}
        for shard, chain in enumerate(trained.chains)
        for number, name in enumerate(chain)
    ]
    lasts = [one for one in listed if one["last"]]
    folder = site.home.path / "plans" / f"ensemble-{digest_of([one['root'] for one in listed])[:12]}"  # fmt: skip
    constituents = [
        Constituent(
            one["shard"], relative(site.home.path / one["checkpoint"], folder), one["root"],
            tuple(relative(site.home.path / other["checkpoint"], folder) for other in listed if other["shard"] == one["shard"]),
        )
        for one in lasts
    ]  # fmt: skip
    root = write_ensemble(folder, constituents)
    if root_of(folder) != root:
        raise RuntimeError(f"{folder.name} is not what was just written")
    old = set() if before is None else {one["name"] for one in before["constituents"]}
    spent = sum(shape.steps for one in listed if one["name"] not in old)
    body = {
        "state": "made", "ensemble": root, "plan": plan["digest"], "settings": settings, "trained_steps": spent, "all_steps": trained.all_steps,
        "constituents": [{key: one[key] for key in ("shard", "slice", "run", "root", "entry")} for one in listed],
    }  # fmt: skip
    facts = [made[one["name"]] for one in listed]
    described = str((folder / "ensemble.json").relative_to(site.home.path))
    return {
        "files": [described, *(file for one in listed for file in one["files"])],
        "run": lasts[0]["run"], "root": root, "checkpoint": str(folder.relative_to(site.home.path)), "start": start,
        "final_loss": sum(made[one["name"]]["final_loss"] for one in lasts) / len(lasts), "steps": trained.all_steps,
        "windows": [window for one in facts for window in one["windows"]], "spikes": sum(one["spikes"] for one in facts),
        "entry": enter(site, "ensemble", body), "tokens_per_s": sorted(one["tokens_per_s"] for one in facts)[len(facts) // 2],
        "peak_rss_bytes": max(one["peak_rss_bytes"] for one in facts), "curve": _curve(facts),
        "constituents": listed, "share": spent / trained.all_steps, "saved": 1 - spent / trained.all_steps,
        "shards_trained": sorted({one["shard"] for one in listed if one["name"] not in old}),
    }  # fmt: skip


def _settings(site: "Site", tokens: "Result", training_plan: "Result", seed: int) -> str:
    """What a constituent depends on besides its records; not the corpus version, which changes with others' records."""
    size = {name: str(value) for name, value in asdict(site.size).items()}
    packages = ("trainer", "valuation", "unlearning", "provenance")
    return digest_of(
        [
            size, asdict(site.config.training), tokens["tokenizer_digest"], tokens["vocab_size"], training_plan["chosen"],
            list(training_plan["repeated"]), seed, code_digest(packages), lock_digest(), hardware_digest(),
        ]
    )  # fmt: skip


def _people(site: "Site", tokens: "Result", excluded: Path | None) -> dict[bytes, bytes]:
    """Record → person, of the records that may be trained on."""
    frame = records(site, tokens["corpus_version"], "record_id", "owner", "source")
    out = {bytes.fromhex(line) for line in excluded.read_text().split()} if excluded else set()
    return {
        row["record_id"]: person_of(row["owner"], row["source"])
        for row in frame.iter_rows(named=True)
        if row["record_id"] not in out
    }


def _finished_runs(site: "Site") -> dict[str, dict[str, Any]]:
    """Constituents that are there with the weights that they ended with, by name."""
    from trainer.checkpoint import verify
    from trainer.errors import TrainerError

    found = {}
    for path in sorted(site.home.runs.glob(f"train-*/{NAME}")):
        if ".damaged-" in path.parent.name:
            continue
        body = json.loads(path.read_bytes())
        try:
            root = verify(site.home.path / body["checkpoint"]).root
        except TrainerError:
            continue  # trained again; the launcher sets the damaged folder aside
        if root == body["root"]:
            found[body["name"]] = body
    return found


def _selection(site: "Site", members: frozenset[bytes]) -> Path:
    """The file that lists a constituent's records, named by what it lists."""
    from trainer import write_selection
    from trainer.order import MICRO

    name = digest_of([one.hex() for one in sorted(members)])[:12]
    path = site.home.runs / "inputs" / f"shard-{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_selection(path, dict.fromkeys(members, MICRO), default=0)
    return path


def _curve(facts: list[dict[str, Any]]) -> list[list[Any]]:
    """Losses of all runs, one after the other."""
    curve: list[list[Any]] = []
    for one in facts:
        first = curve[-1][0] if curve else 0
        curve += [[first + step, loss] for step, loss in one["curve"]]
    return curve


def touched_share(site: "Site", people: Mapping[bytes, int]) -> tuple[float, int]:
    """What forgetting people would cost of a training.

    Args:
        site: The open home, with shards.
        people: From `person_of` → anything.

    Returns:
        Share of a training's steps, and how many shards are touched.
    """
    shape = shape_of(site)
    first: dict[int, int] = {}
    for person in people:
        shard, part = shape.place(person)
        first[shard] = min(part, first.get(shard, shape.slices))
    slices = sum(shape.slices - part for part in first.values())
    return slices / (shape.shards * shape.slices), len(first)
