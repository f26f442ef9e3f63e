"""What the training group shows in the web UI."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.display import facts_md, loss_png, plot_md, table_md

if TYPE_CHECKING:
    from pipelines.results import Result


def training_plan(result: "Result") -> Mapping[str, Any]:
    """The chosen layout and the discarded ones."""
    rows = [
        [
            row["layout"],
            row["world"],
            row["predicted_bytes_per_process"],
            row["sent_bytes_per_step"],
            row["reason"],
        ]
        for row in result["layouts"]
    ]
    return {
        "layouts": table_md(["layout", "processes", "predicted bytes per process", "sent bytes per step", "reason"], rows), "parameters": result["parameters"],
        "training tokens": result["training_tokens"], "epochs": result["epochs"],
        "records selected": result["selection"]["rule"], "records left out": result["selection"]["left_out"],
    }  # fmt: skip


def checkpoint(result: "Result") -> Mapping[str, Any]:
    """Loss curve, speed and memory of a model run."""
    if result.values.get("skipped"):
        return {"skipped": result["skipped"]}
    curve = result["curve"]
    found: dict[str, Any] = {
        "steps": result["steps"], "final loss": result["final_loss"], "loss spikes refused": result.values.get("spikes", 0), "tokens per second": result["tokens_per_s"],
        "peak memory, bytes": result["peak_rss_bytes"], "checkpoint root": result["root"], "run": result["run"],
        "windows": table_md(
            ["first step", "last step", "shards", "records"],
            [[row["first_step"], row["last_step"], len(row["shards"]), row["records"]] for row in result["windows"]],
        ),
    }  # fmt: skip
    if parts := result.values.get("constituents"):
        found["share of a training spent"], found["share saved"] = result["share"], result["saved"]
        found["constituents"] = table_md(
            ["shard", "slice", "run", "digest"],
            [[one["shard"], one["slice"], one["run"], one["root"][:16]] for one in parts],
        )
    if len(curve) > 1:
        png = loss_png({result["run"]: ([step for step, _ in curve], [loss for _, loss in curve])})
        found["loss curve"] = plot_md(png, "training loss over steps")
    return found


def evaluation(result: "Result") -> Mapping[str, Any]:
    """Loss on the held-out test part against the baseline."""
    names = ("loss", "loss_se", "baseline", "gain", "threshold", "decision", "records")
    return {
        "evaluation": facts_md({name: result[name] for name in names}), "loss": result["loss"], "gain": result["gain"],
        "holds": result["holds"], "ledger entry": result["entry"],
    }  # fmt: skip
