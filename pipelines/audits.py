"""Reads `audit.json` of an audit run into the report's form: rates as counts, bounds, margins, verdicts."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reports.audit import (
    Audit,
    Control,
    Membership,
    Rate,
    SideAttack,
    TierRow,
    Utility,
    ZeroBound,
)
from pipelines.reports.memory import Memory, MemoryRow
from pipelines.reports.parts import Estimate, NotAvailable

if TYPE_CHECKING:
    from pipelines.results import Result

TIERS = {
    "direct": (
        "1",
        "direct question",
        "queries only: trained and unseen phrasings, greedy decoding",
    ),
    "in_context": (
        "2",
        "in-context recovery",
        "queries only: other people's lines as demonstrations",
    ),
    "fine_tune": (
        "3",
        "fine-tuning restoration",
        "weights: a few steps on retained records, best step counts",
    ),
}
SECONDARY = {
    "bits": "quantised builds of the model",
    "sources": "fine-tuning on a part of the forgotten records, on their public lines or on look-alikes",
    "lens": "answers read off inner layers of the model (logit lens)",
    "samples": "sampled decoding with many tries",
    "asked": "paraphrased, inverted, one-hop, forced and obliging questions",
    "shots": "other numbers of demonstrations than the plan's, and demonstrations of related people",
    "candidates": "the rank of a secret among candidates",
    "memberships": "membership by other scores than the loss",
}
NEVER_TESTED = (
    "prompts optimised against the model",
    "backups, and copies of the model outside of this home",
)


def read_audit(home: Path, result: "Result") -> Audit:
    """The audit behind a `robustness_audit` result.

    Args:
        home: The home folder.
        result: Result of the asset.
    """
    body = json.loads((home / result["files"][0]).read_text())
    endpoints = {row["name"]: row for row in body["endpoints"] if not row["subgroup"]}
    if body["verdict"] == "INVALID":
        # A control misbehaved, so no part of the audit may look as if it had passed.
        endpoints = {name: row | {"status": "INVALID"} for name, row in endpoints.items()}
    tried = body.get("calibration", ())
    tiers = tuple(_tier(name, endpoints[name], tried) for name in TIERS if name in endpoints)
    return Audit(
        method=result["method"],
        num_people=result["people"],
        num_gold_seeds=result["gold_seeds"],
        plan_digest=body["plan_digest"],
        tiers=tiers,
        membership=_membership(endpoints.get("membership")),
        zero_bounds=tuple(
            ZeroBound(
                what=f"{tier.name}, unlearned model",
                n=tier.unlearned.n,
                bound=float(endpoints[name]["zero_upper"]),
            )
            for name, tier in zip(TIERS, tiers, strict=False)
            if isinstance(tier.unlearned, Rate) and tier.unlearned.hits == 0
        ),
        verdict=body["verdict"],
        reason=" ".join(_sentence(reason) for reason in body["reasons"]),
        utility=_utility(endpoints.get("utility")),
        controls=tuple(
            Control(name=row["name"], holds=row["holds"], detail=row["detail"])
            for row in body["controls"]
        ),
        side=tuple(_side(row) for row in body.get("secondary", ())),
        not_tested=not_tested(body["plan"]),
        memory=memory_of(body),
    )


def memory_of(body: Mapping[str, Any]) -> Memory | None:
    """What the original had memorised.

    Args:
        body: Content of `audit.json`.

    Returns:
        None for audits of before it was asked.
    """
    found = body.get("description", {}).get("memorisation")
    if found is None:
        return None
    ranked = [one for one in found["people"] if one["candidates"] > 1]
    no_number = NotAvailable(reason="nobody has a number")
    chance = _number(found["chance_exposure"])
    return Memory(
        memory=found["memory"],
        statement=found["statement"],
        rows=tuple(
            MemoryRow(
                shown=_shown(row["first"], row["last"]), people=row["people"], given_away=row["given_away"],
                low=float(row["low"]), high=float(row["high"]),
                exposure=Estimate(value=float(row["exposure"]), n=row["ranked"]) if row["ranked"] else no_number,
            )
            for row in found["groups"]
        ),
        chance_exposure=no_number if chance is None else Estimate(value=chance, n=len(ranked)),
        hardest=sum(2 ** float(one["exposure"]) > one["candidates"] - 0.25 for one in ranked),
        ranked=len(ranked),
    )  # fmt: skip


def _shown(first: int, last: int) -> str:
    """How often, in words."""
    if first < 0:
        return "how often can't be told"
    words = {0: "never", 1: "once"}
    return words.get(first, f"{first} to {last} times")


def not_tested(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """What the plan's adversary did not try, so that nobody takes silence for safety.

    Args:
        plan: The plan that the audit was judged by.
    """
    tried = plan["attacks"].get("repertoire", {})
    return (*(what for name, what in SECONDARY.items() if not tried.get(name)), *NEVER_TESTED)


def _side(row: Mapping[str, Any]) -> SideAttack:
    return SideAttack(
        name=row["name"], original=float(row["original"]), unlearned=float(row["unlearned"]),
        gold=max(float(value) for value in row["gold"]) if row["gold"] else math.nan, bound=_number(row["high"]),
        margin=float(row["margin"]), leaks=row["leaks"], best=row["best"],
    )  # fmt: skip


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."


def _number(text: str) -> float | None:
    return None if text in {"none", "nan"} else float(text)


def _rate(share: str, people: int) -> Rate | NotAvailable:
    value = _number(share)
    return (
        NotAvailable(reason="not measured")
        if value is None
        else Rate(hits=round(value * people), n=people)
    )


def _tier(name: str, row: Mapping[str, Any], tried: Sequence[Mapping[str, Any]] = ()) -> TierRow:
    number, what, budget = TIERS[name]
    gold = [_number(value) for value in row["gold"]]
    worst = max((value for value in gold if value is not None), default=None)
    return TierRow(
        tier=number,
        name=what,
        original=_rate(row["original"], row["people"]),
        unlearned=_rate(row["unlearned"], row["people"]),
        gold=NotAvailable(reason="no gold model")
        if worst is None
        else Rate(hits=round(worst * row["people"]), n=row["people"]),
        bound=_number(row["high"]),
        margin=float(row["margin"]),
        verdict=row["status"],
        reason=_open(row, tried),
        budget=budget,
        has_power=row["has_power"],
    )


def _open(row: Mapping[str, Any], tried: Sequence[Mapping[str, Any]]) -> str:
    """Why a tier is open and which setting would decide it; nothing where it is decided."""
    people = _more_people(row)
    if row["status"] != "INCONCLUSIVE" or row["has_power"]:
        return people
    told = f"says little: the original hardly leaks under it; {people or 'more people would not decide'}"
    if row["name"] == "direct":
        return f"{told}; a size that trains longer would ([training] and size in dataworth.toml)"
    if row["name"] == "fine_tune":
        return f"{told}; a size whose attack has more steps would (size in dataworth.toml)"
    if not tried:
        return f"{told}; no other way to demonstrate was tried: a new audit tries eight, if two people or more stay"
    most = max(tried, key=lambda one: one["given_away"])
    return (
        f"{told}; {len(tried)} ways to demonstrate were tried on {most['people']} people who stay, and the best brought out {most['given_away']} "
        "of them; texts in the deliveries in which several people stand together would let the original leak here"
    )


def _more_people(row: Mapping[str, Any]) -> str:
    """How many people would decide an open endpoint, and how one comes to audit so many; nothing where that is not the question."""
    if row["people_needed"] in (None, "none"):
        return ""
    return f"{row['people_needed']} people would decide (requests that wait together are audited together)"


def _estimate(row: Mapping[str, Any], text: str) -> Estimate | NotAvailable:
    value = _number(text)
    return (
        NotAvailable(reason="not measured")
        if value is None
        else Estimate(value=value, n=row["people"])
    )


def _gold(row: Mapping[str, Any]) -> Estimate | NotAvailable:
    return _estimate(row, row["gold"][0]) if row["gold"] else NotAvailable(reason="no gold model")


def _utility(row: Mapping[str, Any] | None) -> Utility | NotAvailable:
    if row is None:
        return NotAvailable(reason="not measured")
    return Utility(
        original=_estimate(row, row["original"]),
        unlearned=_estimate(row, row["unlearned"]),
        gold=_gold(row),
        bound=_number(row["high"]),
        margin=float(row["margin"]),
        verdict=row["status"],
        # It is measured on those who stay: more requests leave fewer of them.
        reason="" if row["people_needed"] in (None, "none") else f"{row['people_needed']} people who stay would decide",
    )  # fmt: skip


def _membership(row: Mapping[str, Any] | None) -> Membership | NotAvailable:
    if row is None:
        return NotAvailable(
            reason="no look-alike records that were never trained, see [audit] in dataworth.toml"
        )
    low, high, unlearned = (_number(row[name]) for name in ("low", "high", "unlearned"))
    gold = [value for value in map(_number, row["gold"]) if value is not None]
    difference = None
    if unlearned is not None and gold and low is not None and high is not None:
        # Two one-sided 95 % bounds are one two-sided 90 % interval.
        difference = Estimate(
            value=unlearned - sum(gold) / len(gold), low=low, high=high, n=row["people"], level=0.9
        )
    return Membership(
        original=_estimate(row, row["original"]),
        unlearned=_estimate(row, row["unlearned"]),
        gold=_gold(row),
        difference=difference,
        margin=float(row["margin"]),
        verdict=row["status"],
        reason=_more_people(row),
    )
