"""What the engineer's part of an audit report draws: recovery curves, distributions with the gold band, depth per layer, ripples.

Each function gives a `Drawing` (a chart with its words); `drawings` gathers those that a dossier has data for. As everywhere in the
reports, nothing differs by colour alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.reports import charts
from pipelines.reports.charts import short_label
from pipelines.reports.dossier import Curve, Dossier, Spread
from pipelines.reports.drawings import Drawing
from pipelines.reports.engineering import DepthCurve, Engineering, RipplePoint
from pipelines.reports.numbers import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 5
MAX_POINTS = 1500
MAX_TICKS = 12
_STYLES = {
    "original": ("-", "s"),
    "unlearned": ("--", "o"),
    "gold": (":", "D"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ribbon:
    """A line with what surrounds it."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def ribbons(
    series: Sequence[Ribbon], x_label: str, y_label: str, *, shares: bool = False
) -> charts.Draw:
    """Lines with bands, at most five; each has a dash and a marker of its own.

    Args:
        series: in the order of the legend; a label that begins with a model's name gets that model's style.
        x_label: name and unit.
        y_label: name, unit and direction.
        shares: whether y is per cent of a whole: the axis then shows all of it.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: charts.Palette) -> None:
        for number, one in enumerate(series[:MAX_LINES]):
            dash, marker = _STYLES.get(one.label.partition(" ")[0], ("-.", "^"))
            colour = palette.series[number % len(palette.series)]
            axes.plot(
                list(one.x), list(one.y), color=colour, linestyle=dash, linewidth=1.6, marker=marker, markersize=4,
                markerfacecolor="none", markevery=max(1, len(one.x) // 8), label=short_label(one.label),
            )  # fmt: skip
            if one.low is not None and one.high is not None:
                axes.fill_between(
                    list(one.x), list(one.low), list(one.high), color=colour, alpha=0.18, linewidth=0
                )  # fmt: skip
        if shares:
            axes.set_ylim(-3, 103)
        places = sorted({place for one in series for place in one.x})
        if len(places) <= MAX_TICKS and all(isinstance(place, int) for place in places):
            axes.set_xticks(places)  # steps and layers that were measured, nothing between them
        axes.set_xlabel(x_label)
        axes.set_ylabel(printable(y_label))  # a unit comes from a file
        axes.grid(visible=True, color=palette.grid, linewidth=0.7)
        axes.legend(frameon=False, labelcolor=palette.ink)

    return draw


def cloud(points: Sequence[RipplePoint], x_label: str, y_label: str) -> charts.Draw:
    """Many small points, unnamed.

    Args:
        points: any order; an even stride of them is drawn where there are many.
        x_label: name.
        y_label: name and unit.

    Returns:
        The chart.
    """

    def draw(axes: "Axes", palette: charts.Palette) -> None:
        shown = points[:: max(1, -(-len(points) // MAX_POINTS))]
        axes.plot(
            [point.tie for point in shown], [point.damage for point in shown], linestyle="none", marker="o", markersize=2.5,
            color=palette.good, alpha=0.45,
        )  # fmt: skip
        axes.axhline(0, color=palette.muted, linewidth=0.9)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.grid(visible=True, color=palette.grid, linewidth=0.7)

    return draw


def recovery(curves: Sequence[Curve]) -> Drawing:
    """What fine-tuning brings back, step by step, for each model of one source."""
    source = curves[0].source
    series = [
        Ribbon(label=one.model, x=one.steps, y=[100 * rate for rate in one.rates], low=[100 * rate for rate in one.lows], high=[100 * rate for rate in one.highs])
        for one in curves
    ]  # fmt: skip
    told = "; ".join(
        f"{one.model}: " + ", ".join(f"{100 * rate:.0f} % at step {step}" for step, rate in zip(one.steps, one.rates, strict=True))
        for one in curves
    )  # fmt: skip
    return Drawing(
        draw=ribbons(
            series, "fine-tuning steps of the attacker", "people given away, %", shares=True
        ),
        title=f"Recovery by fine-tuning: {source}",
        told=f"Line chart: {told}.",
        caption=f"People given away after so many steps of fine-tuning on {source}, with 95 % Wilson intervals. An unlearned model (dashed) that climbs away from gold (dotted) has hidden, not forgotten.",
        height=2.7,
    )


def distribution(spreads: Sequence[Spread]) -> Drawing:
    """Score distributions of original and unlearned beside the band of the gold models."""
    levels = [100 * number / (len(spreads[0].quantiles) - 1) for number in range(len(spreads[0].quantiles))]  # fmt: skip
    golds = [one for one in spreads if one.model.startswith("gold")]
    series = [
        Ribbon(label=one.model, x=levels, y=one.quantiles)
        for one in spreads
        if not one.model.startswith("gold")
    ]
    if golds:
        columns = list(zip(*(one.quantiles for one in golds), strict=True))
        middle = [sum(column) / len(column) for column in columns]
        name = f"gold ({len(golds)} seed{'s' * (len(golds) != 1)})"
        series.append(Ribbon(label=name, x=levels, y=middle, low=[min(c) for c in columns], high=[max(c) for c in columns]))  # fmt: skip
    told = "; ".join(f"{one.model} median {one.quantiles[len(one.quantiles) // 2]:.3f}, from {one.quantiles[0]:.3f} to {one.quantiles[-1]:.3f}" for one in spreads)  # fmt: skip
    band = (
        "The band spans the gold models."
        if len(golds) > 1
        else "One gold model has no band: how much gold models differ among themselves is not known here."
    )
    return Drawing(
        draw=ribbons(series, "people, % (sorted by their score)", spreads[0].unit.split(";")[0]),
        title=f"Distribution: {spreads[0].score}",
        told=f"Line chart of quantiles over {spreads[0].people} people: {told}.",
        caption=f"{spreads[0].score.capitalize()}, {spreads[0].unit}, over people. Forgotten means: the unlearned model (dashed) runs along gold (dotted), at both ends too. {band}",
        height=2.7,
    )


def depth(curves: Sequence[DepthCurve], layers: int) -> Drawing:
    """Erasure ratio layer by layer."""
    series = []
    for one in curves:
        known = [(layer + 1, ratio) for layer, ratio in enumerate(one.ratio) if ratio is not None]
        if known:
            series.append(
                Ribbon(label=one.model, x=[layer for layer, _ in known], y=[r for _, r in known])
            )
    told = "; ".join(
        f"{one.model} "
        + ", ".join("unknown" if ratio is None else f"{ratio:.2f}" for ratio in one.ratio)
        for one in curves
    )
    return Drawing(
        draw=ribbons(series, f"layer, 1 to {layers}", "median erasure ratio (1: as gold)"),
        title="Depth of forgetting, layer by layer",
        told=f"Line chart, first layer to last: {told}.",
        caption="How much of gold's effect a layer's states have when they are put into the original: 0, the layer still carries the secret; 1, as little as gold's. A line that rises from the first layer to the last is shallow forgetting.",
        height=2.6,
    )


def cka(curves: Sequence[DepthCurve], layers: int) -> Drawing:
    """CKA-erasure layer by layer, of the models between original and gold."""
    series = []
    for one in curves:
        known = [(layer + 1, value) for layer, value in enumerate(one.cka) if value is not None]
        if known:
            series.append(Ribbon(label=one.model, x=[layer for layer, _ in known], y=[v for _, v in known]))  # fmt: skip
    told = "; ".join(
        f"{one.model} " + ", ".join("unknown" if value is None else f"{value:.2f}" for value in one.cka)
        for one in curves
    )  # fmt: skip
    return Drawing(
        draw=ribbons(series, f"layer, 1 to {layers}", "CKA-erasure (1: as gold)"),
        title="CKA-erasure, layer by layer",
        told=f"Line chart, first layer to last: {told}.",
        caption=(
            "How far a layer's representation of the questions has moved from the original's towards the first gold model's: 0, no nearer to it than "
            "the original was; 1, gold's own. The first gold model is 1 and the original 0 by definition; the other gold models show what two "
            "retrainings reach, which is the most that can be asked of the unlearned one."
        ),
        height=2.6,
    )


def ripple(part: Engineering) -> Drawing:
    """Damage against gradient tie, one point per pair."""
    gradients = next((tie for tie in part.ties if tie.tie == "gradient_cosine"), None)
    r = (
        f"r = {gradients.r:.2f} ({gradients.low:.2f} to {gradients.high:.2f})"
        if gradients and gradients.r is not None
        else "r is not defined"
    )
    return Drawing(
        draw=cloud(
            part.points,
            "cosine of gradients of the two people",
            "rise of the other's loss, nats per token",
        ),
        title="Ripple: whom forgetting one person hurts",
        told=f"Scatter chart of {len(part.points)} pairs of {part.targets} targets and {part.others} others; {r}.",
        caption=f"One point per pair of a target, pushed out alone, and another person; {r}, interval over targets. Caveat: {part.caveat}.",
        height=3.0,
    )


def module_map(part: Engineering, *, reverted: bool = False) -> Drawing:
    """Part of the model x neighbour distance; the whole change and the null between gold models stand below."""
    what = "taken back alone" if reverted else "applied alone"
    names = [row.module for row in part.modules] + ["all of them"]
    table = [row.reverted if reverted else row.applied for row in part.modules] + [part.whole]
    null = " There is one gold model only, so that it is not known what chance gives."
    if part.null:
        names.append("gold vs gold (null)")
        table.append(part.null)
        null = " The last row is the largest distance between two gold models, which is what chance gives."
    told = "; ".join(
        f"{name} " + ", ".join(f"{value:+.4f}" for value in one)
        for name, one in zip(names, table, strict=True)
    )
    return Drawing(
        draw=charts.heat(
            names,
            part.distances,
            table,
            "nats per token, by neighbour distance (nearest first)",
            harm=True,
        ),
        title=f"Ripple by part of the model, change {what}",
        told=f"Map of {len(part.modules)} parts by {len(part.distances)} distances: {told}.",
        caption=f"Rise of the loss of people who stay (rows: parts of the model; columns: nearest neighbours by gradient first) when that part's change is {what}.{null}",
        height=charts.row_height(len(names)) + 0.5,
    )


def facts_map(part: Engineering, *, ranked: bool = False) -> Drawing:
    """Part of the model x neighbour distance: what is no longer known of people who stay, with the whole change and the null between gold models.

    Args:
        part: the measurements.
        ranked: numbers that are no longer the likeliest, in place of facts that are no longer said.
    """
    names, table = (
        [row.module for row in part.modules],
        [row.outranked if ranked else row.facts for row in part.modules],
    )
    whole, chance = (
        (part.whole_outranked, part.null_outranked)
        if ranked
        else (part.whole_facts, part.null_facts)
    )
    if whole:
        names.append("all of them")
        table.append(whole)
    null = " There is one gold model only, so that it is not known what chance gives."
    if chance:
        names.append("gold vs gold (null)")
        table.append(chance)
        null = " The last row is the largest distance between two gold models, which is what chance gives."
    told = "; ".join(
        f"{name} " + ", ".join("nobody" if value is None else f"{value:+.4f}" for value in one)
        for name, one in zip(names, table, strict=True)
    )
    count = ""
    if ranked and part.numbered:
        having = ", ".join(str(number) for number in part.numbered)
        count = (
            f" Of the {part.others} people only those with a number count: {having} by distance."
        )
    lost = (
        "Share of people who stay and have a number whose own is no longer the likeliest of 32: it is forgotten, and not only no longer said"
        if ranked
        else "Share of the own facts of people who stay that are no longer answered"
    )
    unit = "share of people" if ranked else "share of facts"
    return Drawing(
        draw=charts.heat(names, part.distances, table, f"{unit}, by neighbour distance (nearest first)", harm=True),
        title="Own numbers outranked by part of the model, change applied alone" if ranked else "Own facts lost by part of the model, change applied alone",
        told=f"Map of {len(part.modules)} parts by {len(part.distances)} distances: {told}.",
        caption=f"{lost} (rows: parts of the model; columns: nearest neighbours by gradient first).{count}{null}",
        height=charts.row_height(len(names)) + 0.5,
    )  # fmt: skip


def best_sources(curves: Sequence[Curve]) -> list[str]:
    """Of each source the rate at which the adversary gets most out of the unlearned model; the primary attack stays first.

    Args:
        curves: of one audit.

    Returns:
        Names of sources with their rate, in the order of the audit.
    """
    best: dict[str, tuple[float, str]] = {}
    for curve in curves:
        kind = curve.source.split("/")[0]
        if curve.model == "unlearned" and (kind not in best or max(curve.rates) > best[kind][0]):
            best[kind] = (max(curve.rates), curve.source)
    return [source for _, source in best.values()]


def drawings(dossier: Dossier) -> dict[str, Drawing]:
    """Every chart that a dossier has data for, by its name on the page.

    Args:
        dossier: the dossier.

    Returns:
        Name → drawing, in the order of the page.
    """
    found: dict[str, Drawing] = {}
    evidence = dossier.evidence
    for number, source in enumerate(best_sources(evidence.curves)):
        found[f"recovery-{number}"] = recovery([c for c in evidence.curves if c.source == source])
    for number, score in enumerate(dict.fromkeys(spread.score for spread in evidence.spreads)):
        found[f"spread-{number}"] = distribution([s for s in evidence.spreads if s.score == score])
    part = dossier.engineering
    if isinstance(part, Engineering):
        if part.depth:
            found["depth"] = depth(part.depth, part.layers)
        if any(value is not None for one in part.depth for value in one.cka):
            found["cka"] = cka(part.depth, part.layers)
        if part.points:
            found["ripple"] = ripple(part)
        if part.modules:
            found["modules-applied"] = module_map(part)
            found["modules-reverted"] = module_map(part, reverted=True)
            found["modules-facts"] = facts_map(part)
        if any(row.outranked for row in part.modules):
            found["modules-ranked"] = facts_map(part, ranked=True)
    return found
