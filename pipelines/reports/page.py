"""One HTML file from one `ReportData`: `render`.

The file stands alone: style sheet and pictures are inside it, its content security policy forbids
every request, and no script runs. Everything that comes from data is escaped by Jinja2's autoescape;
the only markup trusted is what `charts.svg` writes, and that escapes its labels itself. The output
depends on the data and the versions of matplotlib and Jinja2 alone: no clock, no host name.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

from pipelines.reports import charts, drawings, headline, numbers
from pipelines.reports.audit import Audit, Rate, TierRow
from pipelines.reports.engineering import OfEnsemble
from pipelines.reports.influence import Influence, Judged, limited
from pipelines.reports.judgement_drawings import judgement_drawings
from pipelines.reports.model import LossCurve, ReportData, Valuation
from pipelines.reports.owners import Worth
from pipelines.reports.parts import NotAvailable

_FOLDER = Path(__file__).parent
_MAX_BARS = 30
_MAX_CURVES = 5
_MAX_HEAT = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A chart ready for the page."""

    svg: Any
    """Markup that must not be escaped again."""
    caption: str


def render(data: ReportData) -> str:
    """Write a report as one self-contained HTML page.

    Args:
        data: Every fact of the page.

    Returns:
        HTML text, UTF-8 when written; equal data gives equal text.
    """
    template = environment().get_template("report.html")
    text = data.to_json()
    return template.render(
        data=data,
        headline=headline,
        pictures=_pictures(data),
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


@cache
def environment() -> "Environment":
    """The template environment; cached, since it compiles templates and holds no data."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        integer=numbers.integer,
        fixed=numbers.fixed,
        signed=numbers.signed,
        percent=numbers.percent,
        money=numbers.money,
        binary=numbers.binary,
    )
    environment.tests["missing"] = lambda value: isinstance(value, NotAvailable)
    environment.tests["of_ensemble"] = lambda value: isinstance(value, OfEnsemble)
    environment.globals["places"] = headline.estimate_places
    return environment


def _finalize(value: Any) -> Any:
    """Applied to every value before it is escaped; Markup (a subclass of str) passes untouched."""
    return numbers.printable(value) if type(value) is str else value


def _pictures(data: ReportData) -> dict[str, Picture]:
    """The charts that this report has data for, by the name of their section."""
    found: dict[str, Picture] = {}
    if isinstance(data.valuation, Valuation) and data.valuation.groups:
        found["worth"] = _values(data.valuation)
    if isinstance(data.worth, Worth):
        found |= _drawn(drawings.drawings(data.worth))
    if isinstance(data.influence, Influence):
        if data.influence.steps:
            found["residual"] = _residual(data.influence)
        if data.influence.heat:
            found["heat"] = _heat(data.influence)
        if isinstance(data.influence.judged, Judged):
            found |= _drawn(judgement_drawings(data.influence.judged))
    if isinstance(data.training, tuple):
        curves = [curve for curve in data.training if curve.steps]
        if curves:
            found["loss"] = _loss(curves)
    if isinstance(data.audit, Audit) and data.audit.tiers:
        found["tiers"] = _tiers(data.audit.tiers)
    return found


def _drawn(made: Mapping[str, drawings.Drawing]) -> dict[str, Picture]:
    return {
        name: picture(one.draw, f"chart-{name}", one.title, (one.told, one.caption), one.height)
        for name, one in made.items()
    }


def picture(
    draw: charts.Draw, name: str, title: str, texts: tuple[str, str], height: float
) -> Picture:
    """A chart as markup for a page, with its words.

    Args:
        draw: The chart.
        name: Unique on the page; prefixes ids.
        title: Short accessible name.
        texts: What a reader who cannot see it needs to know, and the caption.
        height: Height in inches.

    Returns:
        The picture.
    """
    from markupsafe import Markup

    description, caption = texts
    # Safe: charts.svg escapes title, description and labels, and writes no script or address.
    words = numbers.printable(title), numbers.printable(description)
    markup = Markup(charts.svg(draw, name, *words, height))  # noqa: S704
    return Picture(svg=markup, caption=caption)


def _values(part: Valuation) -> Picture:
    rows = sorted(part.groups, key=lambda row: (-row.value.value, row.group))
    shown = rows if len(rows) <= _MAX_BARS else rows[: _MAX_BARS // 2] + rows[-_MAX_BARS // 2 :]
    decimals = headline.estimate_places([row.value for row in rows])
    told = "; ".join(f"{row.group} {numbers.signed(row.value.value, decimals)}" for row in shown)
    left_out = ""
    if len(shown) < len(rows):
        left_out = (
            f" The {len(shown)} groups at the ends of {len(rows)} are drawn; the table has all."
        )
    draw = charts.bars(
        [
            charts.Bar(
                label=row.group, value=row.value.value, low=row.value.low, high=row.value.high
            )
            for row in shown
        ],
        "value, nats of held-out loss per token (right: lowers the loss)",
    )
    description = f"Horizontal bars, best group first, nats of held-out loss per token: {told}."
    caption = (
        "Value of each lot with its interval. Right of zero (filled) lowers the buyer's "
        f"loss, left of zero (hatched) raises it.{left_out}"
    )
    height = charts.row_height(len(shown))
    return picture(draw, "chart-values", "Value per lot", (description, caption), height)


def _residual(part: Influence) -> Picture:
    lines = [
        charts.Line(label=name, x=part.steps, y=y)
        for name, y in (
            ("true drop", part.drops),
            ("credit of the records", part.credits),
            ("residual", part.residuals),
        )
    ]
    last = f"step {part.steps[-1]}: drop {part.drops[-1]:.2e}, credit {part.credits[-1]:.2e}, residual {part.residuals[-1]:.2e}"
    caption = (
        "In-run credit against the true drop of the held-out loss, step by step. The residual is what earlier "
        "gradients, weight decay and curvature moved: credits that were not rescaled are no shares of the loss."
    )
    draw = charts.lines(lines, "step", "nats per target token (up: better)")
    return picture(
        draw, "chart-residual", "In-run residual by step", (f"Line chart; {last}.", caption), 2.6
    )


def _heat(part: Influence) -> Picture:
    rows, columns, values = limited(part.heat, _MAX_HEAT)
    told = "; ".join(
        f"{row} on {column} {value:+.2e}"
        for row, numbers_of in zip(rows, values, strict=True)
        for column, value in zip(columns, numbers_of, strict=True)
    )
    draw = charts.heat(
        rows, columns, values, "nats per held-out token, by owner of the held-out records"
    )
    caption = (
        "Mean influence of a record of each owner (rows) on the held-out records of each owner (columns); positive (blue) "
        f"lowers the loss. At most {_MAX_HEAT} of each are drawn, those with the largest numbers."
    )
    height = charts.row_height(len(rows)) + 0.5
    return picture(draw, "chart-heat", "Influence of owners on targets", (told, caption), height)


def _loss(curves: list[LossCurve]) -> Picture:
    shown = curves[:_MAX_CURVES]
    told = "; ".join(
        f"{c.run} from {numbers.fixed(c.losses[0], 3)} at step {c.steps[0]} to "
        f"{numbers.fixed(c.losses[-1], 3)} at step {c.steps[-1]}"
        for c in shown
    )
    draw = charts.lines(
        [charts.Line(label=f"{c.kind}: {c.run}", x=c.steps, y=c.losses) for c in shown],
        "step",
        "training loss, nats per token",
    )
    left_out = (
        f" The first {len(shown)} of {len(curves)} runs are drawn." if curves[_MAX_CURVES:] else ""
    )
    caption = f"Training loss by step, nats per token; lower is better.{left_out}"
    return picture(
        draw, "chart-loss", "Training loss by step", (f"Line chart: {told}.", caption), 2.6
    )


def _tiers(tiers: tuple[TierRow, ...]) -> Picture:
    names = ("original", "unlearned", "gold (never saw them)")
    rows = [
        charts.Dots(
            label=f"{row.tier} {row.name}",
            shares=(_share(row.original), _share(row.unlearned), _share(row.gold)),
        )
        for row in tiers
    ]
    told = "; ".join(
        f"{row.label}: "
        + ", ".join(
            f"{name} {'not available' if share is None else numbers.percent(share)}"
            for name, share in zip(names, row.shares, strict=True)
        )
        for row in rows
    )
    draw = charts.dots(rows, names, "secrets recovered, % (lower is better for unlearned)")
    caption = (
        "Share of secrets recovered by each attack. Forgotten means: the unlearned model (circle) "
        "stands where the gold model (open diamond) stands, and the original (square) far right."
    )
    height = charts.row_height(len(rows)) + 0.25
    return picture(draw, "chart-tiers", "Secrets recovered per attack", (told, caption), height)


def _share(rate: Rate | NotAvailable) -> float | None:
    return rate.hits / rate.n if isinstance(rate, Rate) and rate.n else None
