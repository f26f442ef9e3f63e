"""Steps of the training group: the layout, the run, its evaluation against the plan."""

import dataclasses
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipelines.runs import Job, digest_of, prepare_on, relative, started
from pipelines.settings import cores
from pipelines.steps.ledger import enter
from pipelines.steps.tables import token_store

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from trainer.layout import Layout

Made = tuple[str, Mapping[str, Any]]
Launch = Callable[[Path, int], dict]


def plan_inputs(
    site: "Site", tokens: "Result", plan: "Result", influence: "Result"
) -> dict[str, Any]:
    """What the training plan depends on."""
    size = {name: str(value) for name, value in dataclasses.asdict(site.size).items()}
    return {
        "tokens": tokens["digest"],
        "plan": plan["digest"],
        "size": size,
        "world": site.world,
        "cores": cores(),
        "demo": site.demo,
        "personal_owners": list(site.config.intake.personal_owners),
        "choices": dataclasses.asdict(site.config.training),
        "values": influence.data_version if site.config.training.selection != "all" else "none",
    }


def training_plan(site: "Site", tokens: "Result", plan: "Result", influence: "Result") -> Made:
    """The layout that was asked for, with its cost; the others with the reason."""
    from trainer.layout import demand
    from trainer.plan import alternatives, estimate
    from trainer.presets import count_parameters

    size, chosen = site.size, _layout(site.size.layout, site.world)
    model, batch = size.trained(tokens["vocab_size"])
    trained = model, dataclasses.replace(batch, accumulation=site.config.training.accumulation)
    demand(chosen, *trained)
    parameters = count_parameters(trained[0])
    others = [(other.layout, other.cost, other.reason) for other in alternatives(chosen, *trained)]
    layouts = [
        {
            "layout": str(layout), "world": layout.world_size, "reason": reason,
            "predicted_bytes_per_process": cost.memory if cost else 0, "sent_bytes_per_step": cost.sent if cost else 0,
        }
        for layout, cost, reason in [(chosen, estimate(chosen, *trained), "chosen"), *others]
    ]  # fmt: skip
    # The demonstration quotes its synthetic people more often than speeches, or there would be nothing to forget.
    owners = set(token_store(site, tokens).owners) if site.demo else set()
    repeated = sorted(owners & set(site.config.intake.personal_owners))
    selected = _selection(site, influence)
    config = {
        "repeated": repeated, "repeats": size.personal_repeats, "steps": size.steps, "rows": size.rows, "length": size.length, "lr": size.lr, "seed": plan["seeds"]["train"],
        "parameters": parameters, "tokens": tokens["digest"], "plan": plan["digest"], "layout": str(chosen), "world": chosen.world_size,
        "choices": dataclasses.asdict(site.config.training), "selection": selected["digest"],
    }  # fmt: skip
    return digest_of(config), {
        "selection": selected, "files": [selected["file"]] if selected["file"] else [],
        "layouts": layouts, "repeated": repeated, "chosen": str(chosen), "world": chosen.world_size, "parameters": parameters,
        "training_tokens": size.steps * size.rows * size.length,
        "epochs": size.steps * size.rows * size.length / max(1, tokens["tokens"]),
    }  # fmt: skip


def _selection(site: "Site", influence: "Result") -> dict[str, Any]:
    """The file of record weights that the configured rule makes of the in-run credits, and what it does."""
    rule = site.config.training.selection
    if rule == "all":
        return {"rule": rule, "file": "", "digest": "none", "left_out": 0}
    import numpy as np
    import polars as pl

    from trainer import write_selection
    from valuation import selection_weights

    credit = pl.read_parquet(site.home.path / influence["files"][0])
    nano_N = np.rint(credit["credit"].to_numpy() * 1e9).astype(np.int64)
    weight_N = selection_weights(nano_N, credit["steps_seen"].to_numpy() > 0, cast("Any", rule))
    name = digest_of([rule, influence.data_version])[:12]
    path = site.home.runs / "inputs" / f"weights-{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = dict(zip(credit["record_id"], weight_N.tolist(), strict=True))
    return {
        "rule": rule, "file": str(path.relative_to(site.home.path)), "digest": write_selection(path, weights),
        "left_out": int((weight_N == 0).sum()),
    }  # fmt: skip


def _layout(text: str, world: int) -> "Layout":
    """A layout in the trainer's words; copies where there are none."""
    from trainer.layout import parse_layout

    return parse_layout(text or str(world))


def model_job(site: "Site", plan: "Result", training_plan: "Result", **changes: Any) -> Job:
    """The recipe of the released model; gold models change the excluded records and the seed only.

    An unlearning method has an optimiser of its own, but retains the records that the model was trained on, on the same layout.
    """
    layout = _layout(training_plan["chosen"], training_plan["world"])
    selected = training_plan["selection"]["file"]
    values: dict[str, Any] = {
        "kind": "train", "entry": "trainer.loop:train", "network": site.size.model, "steps": site.size.steps,
        "seed": plan["seeds"]["train"], "world": layout.world_size, "layout": layout, "personal": tuple(training_plan["repeated"]),
        "choices": site.config.training if changes.get("kind", "train") in ("train", "gold") else None,
        "selection": site.home.path / selected if selected else None,
    }  # fmt: skip
    return Job(**(values | changes))


def finished(site: "Site", directory: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Facts of a finished model run, with its windows entered in the ledger."""
    import json

    windows = [
        json.loads(line) for line in (directory / "windows.jsonl").read_text().splitlines() if line
    ]
    manifest = directory / result["checkpoint"] / "manifest.json"
    seed = json.loads((directory / "run.json").read_bytes())["seed"]  # of the order of records, too
    body = {
        "run": directory.name, "manifest": sha256(manifest.read_bytes()).hexdigest(), "seed": seed,
        "windows": [
            {
                "run": directory.name, "first_step": row["first_step"], "last_step": row["last_step"], "shards": row["shards"],
                "records": row["records"], "records_root": row["records_root"],
                "state_digest_before": row["state_digest_before"], "state_digest": row["state_digest_after"],
                "optimizer_digest": row["optimizer_digest_after"],
            }
            for row in windows
        ],
    }  # fmt: skip
    progress = [
        json.loads(line) for line in (directory / "progress.jsonl").read_text().splitlines() if line
    ]
    checkpoint = directory / result["checkpoint"]
    return {
        "files": [f"runs/{directory.name}/result.json", f"runs/{directory.name}/{result['checkpoint']}/manifest.json"],
        "run": directory.name, "root": result["checkpoint_root"], "checkpoint": str(checkpoint.relative_to(site.home.path)),
        "final_loss": float(result["final_loss"]), "steps": result["steps"], "windows": body["windows"],
        "spikes": result.get("spikes", 0), "entry": enter(site, "windows", body),
        "tokens_per_s": _median([row["tokens_per_s"] for row in progress]),
        "peak_rss_bytes": max((row["rss_bytes"] for row in progress), default=0),
        "curve": [[row["step"], row["loss"]] for row in progress],
    }  # fmt: skip


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def checkpoint(
    site: "Site",
    tokens: "Result",
    target: "Result",
    plan: "Result",
    training_plan: "Result",
    run: Launch,
) -> Made:
    """Train the released model; as an ensemble where the configuration divides it into shards."""
    if site.config.training.shards > 1:
        from pipelines.steps.sharded import train_ensemble

        made = train_ensemble(
            site, tokens, target, plan, training_plan, run, seed=plan["seeds"]["train"]
        )
        return made["root"], made
    job = model_job(site, plan, training_plan)
    directory = prepare_on(site, job, tokens, target, "test_digest")
    start = started(site, directory, plan)
    values = finished(site, directory, run(directory, job.world))
    return values["root"], values | {"start": start}


def evaluation(
    site: "Site",
    tokens: "Result",
    target: "Result",
    plan: "Result",
    checkpoint: "Result",
    run: Launch,
) -> Made:
    """Loss of the checkpoint on `target_test`, and the decision that the committed rule gives."""
    import json

    anywhere = site.home.runs / "any"
    job = Job(
        kind="gradients", entry="pipelines.evaluate:run", network=site.size.model, steps=0, seed=plan["seeds"]["train"],
        init=site.home.path / checkpoint["checkpoint"], init_root=checkpoint["root"],
        extra={
            "target": relative(site.home.path / target["test_folder"], anywhere), "target_digest": target["test_digest"],
        },
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "test_digest")
    result = run(directory, 1)
    measured = json.loads((directory / "evaluation.json").read_text())
    gain = measured["baseline"] - measured["loss"]
    threshold = plan["threshold_millinats"] / 1000
    decision = "promote" if gain >= threshold else "keep the previous champion"
    body = {
        "plan": plan["digest"], "checkpoint": checkpoint["root"], "loss_micronats": round(measured["loss"] * 1e6),
        "baseline_micronats": round(measured["baseline"] * 1e6), "decision": decision,
    }  # fmt: skip
    return digest_of(body), {
        "files": [f"runs/{directory.name}/evaluation.json"], "run": directory.name, "loss": measured["loss"], "loss_se": measured["se"], "gain_se": measured["gain_se"],
        "baseline": measured["baseline"], "gain": gain, "threshold": threshold, "holds": gain >= threshold, "plan": plan["digest"], "checkpoint": checkpoint["root"], "decision": decision,
        "records": measured["records"], "entry": enter(site, "evaluation", body), "status": result["status"],
    }  # fmt: skip
