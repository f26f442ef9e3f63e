"""What the report and the asset's page tell about influence: the owners' map, both ends of the list, the residual."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pipelines.reports.influence import (
    CurvePoint,
    HeatCell,
    Influence,
    Judged,
    MethodScore,
    RecordInfluence,
)
from pipelines.reports.parts import Estimate, NotAvailable
from pipelines.steps.judgement import CONTROL, FEW_SUBSETS, FORMAT, told

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site

ENDS = 8
"""Records shown at each end of the list."""

NOTES = (
    "Records are named by id; no text is shown.",
    "Order and sign of the influence are what the method is good for; its scale presumes a training that converged.",
    "The interval is over held-out records: neither the seed of the training nor the error of the method is in it.",
    "Distinguishable from 0 is what survives Holm's correction over all scored records.",
)


def influence_part(site: "Site", result: "Result", judgement: "Result | None" = None) -> Influence:
    """The influence section from the tables that the asset left.

    Args:
        site: The open home.
        result: What the influence asset made.
        judgement: What the judge of these values made; None before it has run.
    """
    import polars as pl

    _, records, owners = (site.home.path / file for file in result["files"])
    table = pl.read_parquet(records).sort(["value", "index"], descending=[True, False])
    books = [
        json.loads(line)
        for line in (site.home.runs / result["run"] / "residuals.jsonl").read_text().splitlines()
    ]
    ends = min(ENDS, len(table) // 2)
    return Influence(
        method=result["method"], form=result["form"], checkpoint_root=result["checkpoint_root"], num_records=len(table),
        num_queries=result["queries"], num_distinguishable=result["distinguishable"],
        heat=tuple(
            HeatCell(owner=row["owner"], target_owner=row["target_owner"], value=row["value"])
            for row in pl.read_parquet(owners).iter_rows(named=True)
        ),
        helpful=tuple(_row(row, result) for row in table.head(ends).iter_rows(named=True)),
        harmful=tuple(_row(row, result) for row in table.tail(ends).reverse().iter_rows(named=True)),
        steps=tuple(line["step"] for line in books), drops=tuple(float(line["drop"]) for line in books),
        credits=tuple(float(line["credit"]) for line in books), notes=NOTES,
        judged=_judged_part(judgement),
    )  # fmt: skip


def _judged_part(judgement: "Result | None") -> Judged | NotAvailable:
    if judgement is None:
        return NotAvailable(reason="not judged yet")
    if judgement["document"]["format"] != FORMAT:
        return NotAvailable(reason="judged by an earlier version; dataworth run judges anew")
    return judged(judgement["document"])


def judged(document: dict[str, Any]) -> Judged:
    """The judge's part of the section.

    Args:
        document: judgement.json.
    """

    def estimate(text: dict[str, str]) -> Estimate:
        value, low, high, level = (
            float(text[name]) for name in ("estimate", "low", "high", "level")
        )
        return Estimate(value=value, low=low, high=high, level=level)

    def points(one: dict[str, Any]) -> Iterator[CurvePoint]:
        for place, percent in enumerate(one["percents"]):
            loss = {
                arm: sum(float(row[place]) for row in rows) / len(rows)
                for arm, rows in one["loss"].items()
            }
            gaps = one["against_random"]
            yield CurvePoint(
                removed=one["mode"] == "remove", percent=percent, **loss,
                top_gap=estimate(gaps["top"][place]), bottom_gap=estimate(gaps["bottom"][place]),
            )  # fmt: skip

    def scores(methods: dict[str, Any]) -> tuple[MethodScore, ...]:
        if document["subsets"] < FEW_SUBSETS:
            return ()
        ordered = sorted(methods, key=lambda name: name == CONTROL)  # stable: the control goes last
        return tuple(MethodScore(method=name, score=estimate(methods[name])) for name in ordered)

    ceiling = document["ceiling"] if document["again"] >= FEW_SUBSETS else None
    return Judged(
        verdict=document["verdict"], words=told(document), subsets=document["subsets"],
        scores=scores({document["method"]: document["lds"], **document["beside"]}),
        whole=scores({document["method"]: document["whole"][document["method"]], **document["whole"]}), again=document["again"],
        ceiling=estimate(ceiling["each"]) if ceiling else None, ceiling_whole=estimate(ceiling["whole"]) if ceiling else None,
        above_bm25=estimate(document["above_bm25"]), records=document["records"], distinct=document["distinct_from_zero"],
        top=None if document["top"] == "none" else estimate(document["top"]),
        curve=tuple(point for one in document["curves"] for point in points(one)),
    )  # fmt: skip


def _row(row: dict[str, Any], result: "Result") -> RecordInfluence:
    value = Estimate(
        value=row["value"],
        se=row["se"],
        low=row["ci_low"],
        high=row["ci_high"],
        n=result["queries"],
    )
    return RecordInfluence(
        record=row["record_id"].hex(),
        owner=row["owner"],
        value=value,
        distinguishable=row["distinguishable"],
    )
