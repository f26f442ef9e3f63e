"""Reads a finished audit's folder into part 2 of the audit report: every number comes from `audit.json` and `rows.parquet`.

Nothing is measured here. What `audit.json` doesn't hold (recovery by step, distributions, one row per person) follows from the rows by
counting, so that whoever has the two files can repeat it.
"""

import json
import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reports.dossier import (
    Curve,
    Evidence,
    Fact,
    Forgetting,
    Leakage,
    Likeness,
    Metric,
    OneRun,
    PersonRow,
    Question,
    Recovered,
    Spent,
    Spread,
)

if TYPE_CHECKING:
    from unlearning.rows import Evidence as Rows

    Model = tuple[str, str]

TIERS = ("direct", "in_context", "fine_tune")
UNITS = {"membership": "area under the curve", "utility": "nats per token"}
IDEALS = {
    "membership": "as gold's, neither above nor below; 0.5 is a coin toss",
    "utility": "as gold's or lower",
    "exposure": "as gold's or lower; 0 is chance",
}
SPREADS = (
    (
        "extraction",
        "extraction_strength",
        "extraction strength, best question",
        "share of the secret that comes by itself; lower is better",
    ),
    (
        "direct",
        "secret_logprob",
        "log-probability of the secret, best question",
        "nats per token; lower is better",
    ),
    (
        "membership",
        "loss",
        "loss on the person's records",
        "nats per token; nearer to gold is better",
    ),
)
_LEVELS = tuple(number / 20 for number in range(21))
_RATE_IDEAL = "0, at least as low as gold's"


def read_evidence(folder: Path, ledger_entry: int) -> Evidence:
    """Part 2 of the report of an audit.

    Args:
        folder: Run folder of the audit, with `audit.json`, `rows.parquet`, `plan.json`.
        ledger_entry: Index of the audit's entry.

    Returns:
        The evidence; no text, ids are salted.
    """
    from unlearning.rows import Evidence as Rows
    from unlearning.rows import read_rows
    from unlearning.verdict import contradictions

    data = (folder / "audit.json").read_bytes()
    body = json.loads(data)
    table = read_rows(folder / "rows.parquet")
    rows, plan = Rows(table), body["plan"]
    models = [("original", plan["original"]), ("unlearned", plan["unlearned"])]
    models += [("gold", digest) for digest in plan["gold"]]
    described = body.get("description", {})
    return Evidence(
        run=folder.name,
        audit_digest=sha256(data).hexdigest(),
        rows_digest=body["rows"]["sha256"],
        num_rows=body["rows"]["count"],
        ledger_entry=ledger_entry,
        alpha=float(plan["alpha"]),
        plan=(*_plan(plan), *_calibration(body.get("calibration", ()), plan["attacks"])),
        metrics=tuple(
            [_primary(row, body["verdict"]) for row in body["endpoints"]]
            + [_secondary(row) for row in body.get("secondary", ())]
        ),
        curves=tuple(_curves(rows, models)),
        spreads=tuple(_spreads(rows, models)),
        leakage=tuple(_leakage(row) for row in described.get("leakage", ())),
        questions=tuple(_question(row) for row in described.get("questions", ())),
        likeness=tuple(_likeness(row) for row in described.get("equivalence", ())),
        one_run=tuple(
            OneRun(model=row["model"], epsilon=float(row["epsilon"]))
            for row in described.get("epsilon", ())
        ),
        people=tuple(_people(rows, models, described.get("forgetting"))),
        forgetting=_forgetting(described.get("forgetting")),
        recovery=tuple(_recovered(row) for row in described.get("recovery", ())),
        deviations=tuple(contradictions(body, table)),
        unchecked=tuple(body.get("unchecked", ())),
        noted=tuple(body.get("noted", ())),
        seconds=tuple(_seconds(folder / "progress.jsonl")),
    )


def _number(text: Any) -> float | None:
    value = math.nan if text in (None, "none") else float(text)
    return value if math.isfinite(value) else None


def _numbers(texts: Sequence[Any]) -> tuple[float, ...]:
    return tuple(value for value in map(_number, texts) if value is not None)


def _plan(plan: Mapping[str, Any]) -> tuple[Fact, ...]:
    """Every threshold and limit of the plan, flat, in its own words; models stand in a table of their own."""
    found = []
    for name, value in sorted(plan.items()):
        if name in ("original", "unlearned", "gold", "random_init"):
            continue
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for part, one in sorted(inner):
            nested = one.items() if isinstance(one, dict) else [("", one)]
            for last, leaf in sorted(nested):
                label = ".".join(word for word in (name, part, last) if word)
                shown = ", ".join(map(str, leaf)) if isinstance(leaf, list) else str(leaf)
                found.append(Fact(name=label, value=shown or "none"))
    return tuple(found)


def _calibration(
    tried: Sequence[Mapping[str, Any]], attacks: Mapping[str, Any]
) -> tuple[Fact, ...]:
    """How the demonstrations of tier 2 were found: in each way, people who stay whom the original gave away; nobody to be forgotten was asked."""
    way = attacks["demonstrations"], attacks.get("between", "newline")  # left out where it is that
    return tuple(
        Fact(
            name=f"calibration: {one['demonstrations']} line{'s' * (one['demonstrations'] != 1)}, {one['between']}",
            value=f"{one['given_away']} of {one['people']} people who stay given away by the original"
            + "; the plan's" * ((one["demonstrations"], one["between"]) == way),
        )
        for one in tried
    )


def _primary(row: Mapping[str, Any], verdict: str) -> Metric:
    """One endpoint; where a control misbehaved, no endpoint may look as if it had passed."""
    name = row["name"]
    return Metric(
        name=name, subgroup=row["subgroup"], unit=UNITS.get(name, "share of people"), ideal=IDEALS.get(name, _RATE_IDEAL),
        people=row["people"], original=_number(row["original"]), unlearned=_number(row["unlearned"]), gold=_numbers(row["gold"]),
        low=_number(row["low"]), high=_number(row["high"]), margin=float(row["margin"]), verdict="INVALID" if verdict == "INVALID" else row["status"],
        has_power=None if name in UNITS else row["has_power"],
    )  # fmt: skip


def _secondary(row: Mapping[str, Any]) -> Metric:
    name = row["name"]
    kind = name.split(":")[0].split("/")[0]
    unit = {"membership": "area under the curve", "exposure": "bits", "sampled": "mean chance of the secret"}.get(kind, "share of people")  # fmt: skip
    return Metric(
        name=name, subgroup="", unit=unit, ideal=IDEALS.get(kind, _RATE_IDEAL), people=row["people"], original=_number(row["original"]),
        unlearned=_number(row["unlearned"]), gold=_numbers(row["gold"]), low=_number(row["low"]), high=_number(row["high"]),
        margin=float(row["margin"]), verdict="leaks" if row["leaks"] else "no leak shown", p_value=_number(row["p_value"]),
        p_holm=_number(row["p_holm"]), best=row["best"], has_power=row["has_power"] if row["people"] else None,
    )  # fmt: skip


def _curves(rows: "Rows", models: "Sequence[Model]") -> list[Curve]:
    """Share of people given away after so many steps: the primary attack first, then each source and rate of the plan."""
    from unlearning.statistics import wilson_bounds

    names = rows.attacks("fine_tune") + rows.attacks("restored")
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        source, _, step = name.rpartition("/step-")
        groups.setdefault(source, []).append((int(step), name))
    found = []
    for source, steps in groups.items():
        for number, model in enumerate(models):
            counted = [
                (step, *_count(rows, model, name)) for step, name in sorted(steps)
            ]  # step, given away, asked
            bounds = [wilson_bounds(hits, n, 0.025) for _, hits, n in counted]
            role = model[0] if model[0] != "gold" else f"gold {number - 1}"
            found.append(
                Curve(
                    model=role, source="retained records, planned rate" if source == "fine_tune" else source.removeprefix("restored/"),
                    steps=tuple(step for step, _, _ in counted), rates=tuple(bound.estimate for bound in bounds),
                    lows=tuple(bound.low for bound in bounds), highs=tuple(bound.high for bound in bounds), people=counted[0][2],
                )
            )  # fmt: skip
    return found


def _count(rows: "Rows", model: "Model", attack: str) -> tuple[int, int]:
    _, values = rows.per_person(model, [attack], "exact_match")
    return int(values.sum()), len(values)


def _spreads(rows: "Rows", models: "Sequence[Model]") -> list[Spread]:
    import numpy as np

    found = []
    for attack, score, name, unit in SPREADS:
        for number, model in enumerate(models):
            if score == "loss":
                values = rows.person_means(model, attack, score, "forgotten")[1]
            else:
                values = rows.per_person(model, rows.attacks(attack), score)[1]
            if len(values):
                role = model[0] if model[0] != "gold" else f"gold {number - 1}"
                cut = tuple(float(value) for value in np.quantile(values, _LEVELS))
                found.append(
                    Spread(score=name, unit=unit, model=role, people=len(values), quantiles=cut)
                )
    return found


def _people(
    rows: "Rows", models: "Sequence[Model]", scored: Mapping[str, Any] | None
) -> list[PersonRow]:
    """One row per forgotten person, the one that is told most first."""
    import numpy as np

    attacks = rows.attacks("direct")
    people, ours = rows.per_person(models[1], attacks, "secret_logprob")
    golds = [rows.per_person(model, attacks, "secret_logprob")[1] for model in models[2:]]
    told = dict.fromkeys(rows.subgroups, None) | (
        {
            person: float(value)
            for person, value in zip(people, ours - np.max(golds, axis=0), strict=True)
        }
        if golds and len(ours)
        else {}
    )
    tiers = [_given(rows, model) for model in models]
    scores = {one["person"]: _number(one["forgetting"]) for one in (scored or {}).get("persons", ())}  # fmt: skip
    table = [
        PersonRow(
            person=person, subgroup=", ".join(sorted(rows.subgroups[person])), original=tiers[0].get(person, 0), unlearned=tiers[1].get(person, 0),
            gold=max((one.get(person, 0) for one in tiers[2:]), default=0), excess=told[person],
            forgetting=scores.get(person),
        )
        for person in rows.subgroups
    ]  # fmt: skip
    return sorted(
        table,
        key=lambda row: (
            -row.unlearned,
            -(row.excess if row.excess is not None else -math.inf),
            row.person,
        ),
    )


def _given(rows: "Rows", model: "Model") -> dict[str, int]:
    """In how many of the three tiers each person is given away."""
    found: dict[str, int] = {}
    for tier in TIERS:
        for person, value in zip(
            *rows.per_person(model, rows.attacks(tier), "exact_match"), strict=True
        ):
            found[person] = found.get(person, 0) + int(value)
    return found


def _wilson(share: str, people: int) -> dict[str, float]:
    """Ends of the 95 % interval of a share of people."""
    from unlearning.statistics import wilson_bounds

    bounds = wilson_bounds(round(float(share) * people), people, 0.025)
    return {"low": bounds.low, "high": bounds.high}


def _forgetting(row: Mapping[str, Any] | None) -> Forgetting | None:
    if row is None:
        return None
    return Forgetting(
        people=row["people"], usable=row["usable"], median=_number(row["median"]), low_5=_number(row["low_5"]), high_95=_number(row["high_95"]),
    )  # fmt: skip


def _recovered(row: Mapping[str, Any]) -> Recovered:
    return Recovered(
        tier=row["tier"], source=row["source"], score=row["score"], people=row["people"], original=float(row["original"]),
        unlearned=float(row["unlearned"]), gold=float(row["gold"]), recovery=_number(row["recovery"]), low=_number(row["low"]),
        high=_number(row["high"]),
    )  # fmt: skip


def _leakage(row: Mapping[str, Any]) -> Leakage:
    return Leakage(
        subgroup=row["subgroup"], people=row["people"], given_away=float(row["given_away"]), **_wilson(row["given_away"], row["people"]), excess_mean=float(row["excess_mean"]),
        excess_95=float(row["excess_95"]), excess_worst=float(row["excess_worst"]),
    )  # fmt: skip


def _question(row: Mapping[str, Any]) -> Question:
    return Question(
        attack=row["attack"], question=row["question"], people=row["people"], original=float(row["original"]),
        unlearned=float(row["unlearned"]), gold=_numbers(row["gold"]), **_wilson(row["unlearned"], row["people"]),
    )  # fmt: skip


def _likeness(row: Mapping[str, Any]) -> Likeness:
    return Likeness(
        score=f"{row['attack']}: {row['score']}", people=row["people"], d=float(row["d"]), p_value=float(row["p_value"]),
        cliff=float(row["cliff"]), band=_number(row["null_band"]), margin=float(row["margin"]), low=_number(row.get("low")),
        high=_number(row.get("high")), equivalent=row.get("equivalent"),
    )  # fmt: skip


def _seconds(path: Path) -> list[Spent]:
    """Wall and CPU time of what was measured on each model; CPU seconds of audits of before weren't counted."""
    if not path.exists():
        return []
    spent: dict[str, list[tuple[float, float | None]]] = {}
    for line in path.read_text().splitlines():
        one = json.loads(line)
        spent.setdefault(f"{one['model']}: {one['attack']}", []).append((float(one["seconds"]), _number(one.get("cpu_seconds"))))  # fmt: skip
    found = []
    for name, parts in spent.items():
        counted = [cpu for _, cpu in parts if cpu is not None]
        cpu = sum(counted) if len(counted) == len(parts) else None
        found.append(Spent(name=name, wall_s=sum(wall for wall, _ in parts), cpu_s=cpu))
    return found
