"""What the valuation group shows in the web UI."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipelines.describe.corpus import parquet_schema
from pipelines.display import (
    bars_png,
    facts_md,
    heat_png,
    loss_png,
    plot_md,
    table_md,
    table_metadata,
)

if TYPE_CHECKING:
    from pipelines.reports.drawings import Drawing
    from pipelines.reports.influence import MethodScore
    from pipelines.reports.parts import Estimate
    from pipelines.results import Result
    from pipelines.site import Site
    from pipelines.steps.owners import Bank


def entropy(site: "Site", result: "Result") -> Mapping[str, Any]:
    """Mean bits, the owners with their own, and how they are spread over each owner's records."""
    import polars as pl

    from pipelines.reports.drawings import entropy_boxes
    from pipelines.steps.owners import entropy_spreads

    owners = pl.read_parquet(site.home.table("owner_entropy")).sort(
        "surprisal_bits_per_byte", descending=True
    )
    rows = [
        [
            row["owner"],
            row["tokens"],
            row["entropy_bits_per_token"],
            row["surprisal_bits_per_token"],
            row["surprisal_bits_per_byte"],
            row["exact_mass"],
            row["near_mass"],
        ]
        for row in owners.iter_rows(named=True)
    ]
    columns = [
        "owner",
        "tokens",
        "entropy, bits/token",
        "surprisal, bits/token",
        "surprisal, bits/byte",
        "in exact copies",
        "in near copies",
    ]
    path = site.home.table("entropy")
    return {
        **table_metadata(result["records"], parquet_schema(path, unique=("record_id",)), "tables/entropy.parquet"),
        **plots(entropy_boxes(entropy_spreads(site))),
        **({"bits per token, by a model that never saw the record": result["mean_model_bits_per_token"]} if "mean_model_bits_per_token" in result.values else {}),
        "bits per token": result["mean_bits_per_token"], "bits per byte": result["mean_bits_per_byte"],
        "share of tokens in exact copies": result["exact_mass"], "share of tokens in near copies": result["near_mass"], "owners": table_md(columns, rows),
    }  # fmt: skip


def quality(result: "Result") -> Mapping[str, Any]:
    """Mean quality score."""
    return {"dagster/row_count": result["records"], "mean score": result["mean_score"]}


def influence(site: "Site", result: "Result") -> Mapping[str, Any]:
    """In-run credit against the true fall of the loss; who influenced whose loss at the end."""
    from pipelines.steps.influence import influence_part

    path = site.home.path / result["files"][0]
    facts = {name: value for name, value in result.values.items() if isinstance(value, int | float)}
    part = influence_part(site, result)
    curves = {
        "true drop": (part.steps, part.drops),
        "credit": (part.steps, part.credits),
        "residual": (part.steps, part.residuals),
    }
    ends = [
        [row.record[:16], row.owner, row.value.value, row.value.low, row.value.high, "yes" if row.distinguishable else "not distinguishable from 0"]
        for row in (*part.helpful, *reversed(part.harmful))
    ]  # fmt: skip
    return {
        **table_metadata(_rows(path), parquet_schema(path, unique=("record_id",)), result["files"][0]),
        "run": result["run"], "facts": facts_md(facts), **{name: float(value) for name, value in facts.items()},
        "in-run residual": plot_md(loss_png(curves, "nats per target token"), "true drop, credit and residual by step"),
        "influence map": plot_md(heat_png(part), "mean influence of each owner's records on each owner's held-out records"),
        "most helpful and harmful": table_md(["record", "owner", "influence, nats", "low", "high", "distinguishable from 0"], ends),
        "weights": part.checkpoint_root,
    }  # fmt: skip


def value_judgement(result: "Result") -> Mapping[str, Any]:
    """Whether the values foretell retraining, beside what costs nothing."""
    from pipelines.reports.judgement_drawings import judgement_drawings
    from pipelines.steps.influence import judged
    from pipelines.steps.judgement import told

    document = result["document"]
    part = judged(document)
    top = document["top"]
    return {
        "verdict": document["verdict"], "in words": told(document), "run": result["run"],
        "linear datamodeling score": _scores_md(part.scores, part.ceiling),
        "linear datamodeling score, target as a whole": _scores_md(part.whole, part.ceiling_whole),
        **plots(*judgement_drawings(part).values()), **_planted(document["planted"]),
        "subsets": document["subsets"], "subsets trained twice": document["again"], "records": document["records"], "queries": document["queries"],
        "records distinct from 0": document["distinct_from_zero"],
        "top removal, nats": "off" if top == "none" else f"{top['estimate']} ({top['low']} to {top['high']})",
    }  # fmt: skip


def _planted(found: "dict[str, Any] | str") -> dict[str, Any]:
    """What values make of planted records and of attacks, where the size tries them."""
    if isinstance(found, str):
        return {"planted records and attacks": "not tried at this size"}
    ends = [
        [kind, found["records"], *(float(text[name]) for name in ("estimate", "low", "high"))]
        for kind, text in found["auc"].items()
    ]
    gains = [[name, 100 * float(gain)] for name, gain in found["gains"].items()]
    words = "gain of the owner of most judged records, % of all that is paid by these values"
    return {
        "planted records": table_md(["kind", "records", "AUC of low values (0.5: not found)", "low", "high"], ends),
        "attacks": table_md(["attack", words], [*gains, ["its share without", 100 * float(found["share"])]]),
    }  # fmt: skip


def _scores_md(scores: Sequence["MethodScore"], ceiling: "Estimate | None") -> Any:
    """Scores of all methods, each beside what it could be at most."""
    if not scores:
        return "too few subsets to rank"
    most = "not measured"
    if ceiling is not None:
        most = f"{ceiling.value:.2f} ({ceiling.low:.2f} to {ceiling.high:.2f})"
    rows = [[row.method, row.score.value, row.score.low, row.score.high, row.score.level, most] for row in scores]  # fmt: skip
    return table_md(["method", "score", "low", "high", "level", "of at most"], rows)


def plots(*drawings: "Drawing") -> dict[str, Any]:
    """Drawings of the report as pictures of an asset's page, by their titles."""
    from pipelines.reports.drawings import png

    return {made.title: plot_md(png(made), made.told) for made in drawings}


def _rows(path: Any) -> int:
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows


def owner_values(site: "Site", plan: "Result", result: "Result") -> Mapping[str, Any]:
    """Values of lots and owners with their intervals, which coalitions they rest on, and how fast the intervals closed."""
    from pipelines.reports.drawings import coverage_bars, narrowing_lines, owner_bars
    from pipelines.reports.owners import Narrowing
    from pipelines.steps import increments
    from pipelines.steps.owners import Bank, owners_worth
    from valuation.intervals import zero_words
    from valuation.seeds import spread_words

    bank = Bank(site, result, plan)
    narrowing = bank.narrowing()
    groups = result["groups"]
    chart = bars_png(
        {group["id"]: group["value"] for group in groups},
        {group["id"]: (group["low"], group["high"]) for group in groups},
    )
    rows = [
        [
            group["id"],
            len(group["owners"]),
            group["value"],
            group["se"],
            group["seed_se"],
            group["low"],
            group["high"],
            zero_words(group["low"], group["high"]),
        ]
        for group in groups
    ]
    owners = sorted(result["owners"], key=lambda owner: -owner["value"])
    own = [
        [row["id"], sum(row["tokens"]), row["value"], row["low"], row["high"], zero_words(row["low"], row["high"])]
        for row in owners
    ]  # fmt: skip
    return {
        "owners": table_md(["owner", "tokens", "value, nats", "low", "high", "against zero"], own),
        "values": table_md(["lot", "owners", "value, nats", "standard error", "of it by seeds", "low", "high", "against zero"], rows),
        **plots(owner_bars(owners_worth(result, {})), coverage_bars(bank.coverage())),
        **(plots(narrowing_lines(narrowing)) if isinstance(narrowing, Narrowing) else {}),
        **_lot_checks(bank, [group["id"] for group in groups]),
        "chart": plot_md(chart, "value of each lot with its interval"),
        "errors": spread_words(len(result["seeds"]), base="base" in plan.values), "seeds": ", ".join(map(str, result["seeds"])),
        "method": result["method"], "coalitions": result["coalitions"], "loss, nobody": result["loss_empty"],
        "loss, all": result["loss_all"], "efficiency error": result["efficiency_error"], "run": result["run"],
        "records held back": ", ".join(f"{count} by {reason}" for reason, count in result["held_back"].items()) or "none",
        "what was trained": increments.sentence(result), **increments.counts(result),
        **({"base model": plan["base"]["root"]} if "base" in plan.values else {}),
        **({"bank": result["remade"]} if "remade" in result.values else {}),
    }  # fmt: skip


def _lot_checks(bank: "Bank", lots: Sequence[str]) -> dict[str, Any]:
    """What the bank says of its own values: lots left out, paths by value, agreement of seeds."""
    from pipelines.reports.drawings import adding_lines
    from pipelines.reports.parts import NotAvailable
    from valuation.intervals import zero_words

    found = bank.checks()
    if isinstance(found, NotAvailable):
        return {"checks from the bank": f"not available: {found.reason}"}
    out = found.left_out
    columns = zip(lots, out.values_n, out.ci_low_n, out.ci_high_n, strict=True)
    rows = [[lot, float(value), float(low), float(high), zero_words(float(low), float(high))] for lot, value, low, high in columns]  # fmt: skip
    agreed = found.over_seeds
    return {
        **plots(adding_lines(found.best_first, found.worst_first, found.mean_order)),
        "loss without each lot, less the loss of all": table_md(["lot", "nats", "low", "high", "against zero"], rows),
        "rank correlation of values and left out": found.rank_correlation,
        "rank correlation of values between seeds": f"mean {agreed.mean_rank_correlation:.2f}, least {agreed.worst_rank_correlation:.2f}" if agreed else "one seed",
    }  # fmt: skip


def value_table(site: "Site", result: "Result") -> Mapping[str, Any]:
    """The table of all values."""
    path = site.home.table("values")
    return {
        **table_metadata(result["rows"], parquet_schema(path), "tables/values.parquet"),
        "ledger entry": result["entry"], "sum of lots, nats": result["group_sum_nano"] / 1e9,
    }  # fmt: skip


def prices(site: "Site", result: "Result") -> Mapping[str, Any]:
    """Who is paid what, or why nobody."""
    if result["skipped"]:
        return {"skipped": result["skipped"]}
    import polars as pl

    from pipelines.reports.drawings import value_price
    from pipelines.results import latest
    from pipelines.steps.owners import owners_worth, paid_to
    from valuation.intervals import zero_words

    valued = latest(site.home.results, "owner_values")
    assert valued is not None, "prices follow from values"
    frame = pl.read_parquet(site.home.table("prices")).sort("price_microunits", descending=True)
    zero = {row["id"]: zero_words(row["low"], row["high"]) for row in valued["owners"]}
    rows = [
        [row["subject"], row["price_microunits"], zero.get(row["subject"], "")]
        for row in frame.iter_rows(named=True)
    ]
    return {
        **table_metadata(len(frame), parquet_schema(site.home.table("prices")), "tables/prices.parquet"),
        "prices": table_md(["subject", f"micro-units of {result['currency']}", "value against zero"], rows), **plots(value_price(owners_worth(valued, paid_to(site, result)), result["currency"])), "pool": result["pool"], "sum": result["sum"],
        "reserve": result["reserve"], "ledger entry": result["entry"],
    }  # fmt: skip
