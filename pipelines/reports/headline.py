"""The first screen in words: what the verdict means, what the data is worth, who is paid.

Written for a reader who knows neither nats nor Newcombe. Each sentence is made from the facts of the
report alone, so the headline cannot say more than the tables below it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.reports.audit import Audit, Membership, Rate, Utility, Verdict, VerdictName
from pipelines.reports.model import EvaluationPlan, ReportData
from pipelines.reports.numbers import (
    NBSP,
    fixed,
    integer,
    money,
    percent,
    places,
    short_money,
    signed,
)
from pipelines.reports.parts import Estimate, NotAvailable

_FORGETTING = {
    "PASS": "The records that were asked to be erased count as forgotten: no attack that was tried "
    "got more out of the cleaned model than out of a model that never saw them, within the margin fixed beforehand.",
    "FAIL": "The records that were asked to be erased are not forgotten: at least one attack got "
    "more out of the cleaned model than the margin fixed beforehand allows.",
    "INCONCLUSIVE": "The evidence does not decide. Treat the records that were asked to be erased as "
    "still in the model until a larger audit decides.",
    "INVALID": "The audit cannot be relied on, so it says nothing about forgetting either way. "
    "Treat the records that were asked to be erased as still in the model.",
}
_OTHER = {
    "FAIL": "A check that was fixed beforehand did not hold, so the model is not released.",
    "INCONCLUSIVE": "The evidence does not decide, so the model is not released.",
    "INVALID": "The checks cannot be relied on, so the model is not released.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result of the audit in plain words."""

    verdict: VerdictName
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One of the headline numbers."""

    label: str
    value: str
    note: str
    missing: bool = False


def meaning(data: ReportData) -> str:
    """What the overall verdict means, in plain words.

    Args:
        data: The report.

    Returns:
        One or two sentences.
    """
    if isinstance(data.verdict, NotAvailable):
        return (
            "No verdict was reached in this run. Nothing here says that anything was forgotten, "
            "or that a model may be released."
        )
    name = data.verdict.verdict
    same = isinstance(data.audit, Audit) and data.audit.verdict == name
    return (_FORGETTING if same else _OTHER)[name]


def findings(data: ReportData) -> tuple[Finding, ...]:
    """The audit, one sentence per attack.

    Args:
        data: The report.

    Returns:
        Findings in the order of the audit; empty when there is none.
    """
    if not isinstance(data.audit, Audit):
        return ()
    found = [
        Finding(
            verdict=row.verdict,
            text=f"{row.name[:1].upper()}{row.name[1:]}. Secrets read out before erasure: "
            f"{_of(row.original)}; after: {_of(row.unlearned)}; reference: {_of(row.gold)}.",
        )
        for row in data.audit.tiers
    ]
    if isinstance(data.audit.membership, Membership):
        found.append(_membership(data.audit.membership))
    if isinstance(data.audit.utility, Utility):
        found.append(_utility(data.audit.utility))
    return tuple(found)


def zeros(data: ReportData) -> tuple[str, ...]:
    """What "nothing found" still allows, one sentence per attack with the same n and bound.

    Args:
        data: The report.

    Returns:
        Sentences; empty when nothing was searched in vain.
    """
    if not isinstance(data.audit, Audit):
        return ()
    names: dict[tuple[int, float, float], list[str]] = {}
    for zero in data.audit.zero_bounds:
        names.setdefault((zero.n, zero.bound, zero.level), []).append(zero.what)
    return tuple(
        f"Nothing found in {integer(n)} tries does not mean nothing is there: with "
        f"{percent(level, 0)} confidence the true rate is below {percent(bound)} "
        f"({', '.join(what)})."
        for (n, bound, level), what in names.items()
    )


def figures(data: ReportData) -> tuple[Figure, ...]:
    """The headline numbers: value, prices, corpus, receipts.

    Args:
        data: The report.

    Returns:
        Four figures in this order; a missing one carries its reason.
    """
    return (_value(data), _prices(data), _corpus(data), _receipts(data))


def gate(data: ReportData) -> str:
    """The evaluation gate in one sentence; empty when there is no plan."""
    plan = data.evaluation
    if not isinstance(plan, EvaluationPlan):
        return ""
    state = {True: "holds", False: "does not hold", None: "is undecided"}[plan.holds]
    bound = "at most" if plan.better == "lower" else "at least"
    decimals = estimate_places([plan.observed])
    return (
        f"Release gate, written down before training: {plan.metric} {bound} "
        f"{fixed(plan.threshold, decimals)} {plan.unit}. It {state}."
    )


def estimate_places(estimates: Sequence[Estimate | NotAvailable | None], default: int = 4) -> int:
    """Decimals for a column of estimates, from their standard errors or half-widths.

    Args:
        estimates: The column.
        default: Decimals when no error is known.

    Returns:
        Decimals as `numbers.places` counts them.
    """
    errors: list[float | None] = []
    for estimate in estimates:
        if isinstance(estimate, Estimate):
            half = None
            if estimate.low is not None and estimate.high is not None:
                half = (estimate.high - estimate.low) / 4  # close to a standard error at 95 %
            errors.append(estimate.se or half)
    return places(errors, default)


def _of(rate: Rate | NotAvailable) -> str:
    if isinstance(rate, NotAvailable):
        return "not available"
    return f"{integer(rate.hits)} of {integer(rate.n)}"


def _membership(part: Membership) -> Finding:
    told = three(part, 2)
    text = (
        "Telling from the model whether a person was in its training data; score from 0.5, a coin "
        f"toss, to 1, certainty. {told}."
    )
    return Finding(verdict=part.verdict, text=text)


def _utility(part: Utility) -> Finding:
    decimals = estimate_places([part.original, part.unlearned, part.gold], 3)
    told = three(part, decimals)
    text = f"What the erasure cost: loss on the records that stay, nat per token, lower is better. {told}."
    return Finding(verdict=part.verdict, text=text)


def three(
    part: Membership | Utility, decimals: int, names: tuple[str, str, str] = ("Before erasure", "after", "reference")
) -> str:  # fmt: skip
    """One number of three models, in words.

    Args:
        part: Holds the number of the original, the unlearned and the gold model.
        decimals: After the point.
        names: What the page calls them.
    """
    parts = (part.original, part.unlearned, part.gold)
    return "; ".join(
        f"{name}: {fixed(part.value, decimals) if isinstance(part, Estimate) else 'not available'}"
        for name, part in zip(names, parts, strict=True)
    )


def _value(data: ReportData) -> Figure:
    label = "Value of the data"
    part = data.valuation
    if isinstance(part, NotAvailable):
        return Figure(label=label, value="not available", note=part.reason, missing=True)
    decimals = estimate_places([row.value for row in part.groups])
    gain = part.total if part.gain is None else part.gain
    note = "of held-out loss per token, all lots together; positive lowers the buyer's loss."
    if part.groups:
        best = max(part.groups, key=lambda row: row.value.value)
        note += f" Most from {best.group}: {signed(best.value.value, decimals)}"
        if best.value.low is not None and best.value.high is not None:
            low, high = signed(best.value.low, decimals), signed(best.value.high, decimals)
            note += f" [{low}, {high}], {percent(best.value.level, 0)} interval"
        note += "."
    return Figure(label=label, value=f"{signed(gain, decimals)} nat", note=note)


def _prices(data: ReportData) -> Figure:
    label = "Paid to owners"
    part = data.pricing
    if isinstance(part, NotAvailable):
        return Figure(label=label, value="not available", note=part.reason, missing=True)
    paid = sum(1 for row in part.rows if row.price_microunits > 0)
    exact = part.sum_microunits == part.pool_microunits
    note = f"to {integer(paid)} of {integer(len(part.rows))} subjects; " + (
        "equals the pool exactly."
        if exact
        else f"the pool is {money(part.pool_microunits, part.currency)}: NOT equal."
    )
    amount = short_money(part.sum_microunits, part.currency).replace(
        NBSP, " "
    )  # may break: it is large
    return Figure(label=label, value=amount, note=note)


def _corpus(data: ReportData) -> Figure:
    label = "Corpus"
    part = data.corpus
    if isinstance(part, NotAvailable):
        return Figure(label=label, value="not available", note=part.reason, missing=True)
    note = (
        f"live, from {integer(part.num_owners)} owners; {integer(part.size - part.live)} erased or "
        f"withdrawn of {integer(part.size)} ever published."
    )
    return Figure(label=label, value=f"{integer(part.live)} records", note=note)


def _receipts(data: ReportData) -> Figure:
    label = "Receipts verified"
    part = data.provenance
    if isinstance(part, NotAvailable):
        return Figure(label=label, value="not available", note=part.reason, missing=True)
    good = sum(1 for row in part.receipts if row.verified)
    note = f"by the stand-alone verifier, against a signed ledger of {integer(part.ledger_size)} entries."
    return Figure(label=label, value=f"{integer(good)} of {integer(len(part.receipts))}", note=note)


def verdict_name(data: ReportData) -> str:
    """PASS, FAIL, INCONCLUSIVE, INVALID, or NONE when no verdict was reached."""
    return data.verdict.verdict if isinstance(data.verdict, Verdict) else "NONE"
