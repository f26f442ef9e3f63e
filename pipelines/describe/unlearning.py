"""What the unlearning group shows in the web UI; people appear as counts only."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.describe.training import checkpoint
from pipelines.display import table_md

if TYPE_CHECKING:
    from pipelines.reports.memory import Memory
    from pipelines.results import Result
    from pipelines.site import Site


def erasure_request(result: "Result") -> Mapping[str, Any]:
    """The batch of pending requests."""
    return {
        "requests": len(result["requests"]), "people": result["people"], "records": result["records"], "head": result["head"],
        "reason": result["reason"] or "pending requests suspended",
    }  # fmt: skip


def gold_checkpoint(result: "Result") -> Mapping[str, Any]:
    """The retrained reference."""
    return {**checkpoint(result), "gold models": len(result.values.get("golds", []))}


def unlearned_checkpoint(result: "Result") -> Mapping[str, Any]:
    """The unlearned model."""
    return {**checkpoint(result), "method": result.values.get("method", "none")}


def robustness_audit(site: "Site", result: "Result") -> Mapping[str, Any]:
    """Verdict and tiers."""
    if result["skipped"]:
        return {"skipped": result["skipped"]}
    import dagster as dg

    from pipelines.audits import read_audit

    page = site.home.path / result["report"]
    audit = read_audit(site.home.path, result)
    rows = [
        [
            tier.name,
            _rate(tier.original),
            _rate(tier.unlearned),
            _rate(tier.gold),
            tier.bound,
            tier.margin,
            tier.verdict,
        ]
        for tier in audit.tiers
    ]
    columns = ["attack", "original", "unlearned", "gold", "upper bound", "margin", "verdict"]
    known = audit.memory
    memory = (
        {}
        if known is None
        else {"memorised by the original": known.statement, "memory by times shown": _memory(known)}
    )
    return memory | {
        "verdict": result["verdict"], "why": audit.reason, "audit report": dg.MetadataValue.url(page.as_uri()), "tiers": table_md(columns, rows), "people": result["people"],
        "gold models": result["gold_seeds"], "plan": result["plan_digest"], "ledger entry": result["entry"],
    }  # fmt: skip


def _memory(known: "Memory") -> Any:
    """How much of whom, by how often the original was shown them."""
    rows = [
        [row.shown, f"{row.given_away}/{row.people}", f"{row.low:.2f} to {row.high:.2f}", f"{row.exposure.value:.1f}" if hasattr(row.exposure, "value") else "n/a"]
        for row in known.rows
    ]  # fmt: skip
    return table_md(["shown", "given away", "95 %", "exposure, bits"], rows)


def _rate(rate: Any) -> str:
    return f"{rate.hits}/{rate.n}" if hasattr(rate, "hits") else "n/a"


def shredding(result: "Result") -> Mapping[str, Any]:
    """Which requests are finished, which wait and why."""
    return {
        "shredded": sum(len(one["requests"]) for one in result["finished"]),
        "records": sum(one["records"] for one in result["finished"]),
        "released model": ", ".join(one["release"] for one in result["finished"]) or "unchanged",
        "open": table_md(["request", "state", "waits for"], result["open"]),
    }


def report(result: "Result") -> Mapping[str, Any]:
    """Where the page lies."""
    import dagster as dg

    return {
        "report": dg.MetadataValue.url(result["url"]),
        "file": result["path"],
        "bytes": result["bytes"],
    }
