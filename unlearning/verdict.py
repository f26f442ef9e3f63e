"""The verdict: a pure function of the rows and of the plan that was hashed before them.

Order of judgement, from the strongest objection to the weakest::

    INVALID        a control misbehaved, or there is no gold model: nothing was measured, whatever the numbers say
    FAIL           an endpoint, or a pre-registered subgroup of it, lies beyond its margin with the stated confidence, or an
                   attack of the plan's repertoire leaks after Holm's adjustment (`secondary`)
    INCONCLUSIVE   an endpoint is undecided, a tier has no power (the original itself hardly leaks under its attack), membership was not
                   tested, there is too little gold, or something about the models' lineage was not checked (`lineage`)
    PASS           every endpoint lies within its margin with the stated confidence

What the controls are and why stands in `controls`.

A verdict speaks about these attacks at this strength. No audit of weights can prove that a record was never used.
Source: Thudi et al., "On the necessity of auditable algorithmic definitions for machine unlearning", 2022.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning import endpoints
from unlearning.controls import Control, controls
from unlearning.description import describe
from unlearning.endpoints import TIERS, Endpoint, Status
from unlearning.errors import RowsError
from unlearning.memorisation import ATTACK as MEMORISED
from unlearning.memorisation import Memory, memorisation
from unlearning.plan import AuditPlan
from unlearning.rows import ROLES, Evidence
from unlearning.secondary import Secondary, secondary_endpoints

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pyarrow as pa

FORMAT = 3
"""2: a tier without power is open; three gold models before a PASS, each held against the others; margins of all scores in the plan.
3: no PASS while something about the models' lineage is unchecked."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one audit with everything it rests on."""

    status: Status
    """PASS, FAIL, INCONCLUSIVE or INVALID."""
    reasons: tuple[str, ...]
    """Why, one sentence each."""
    endpoints: tuple[Endpoint, ...]
    """Three leak rates, their subgroups, membership (if tested) and utility."""
    controls: tuple[Control, ...]
    """All controls, also those that held."""
    plan_digest: str
    """SHA-256 of the plan that was applied."""
    secondary: tuple[Secondary, ...] = ()
    """Attacks of the plan's repertoire, adjusted together."""

    def to_json(self) -> dict[str, Any]:
        """The verdict as JSON values; real numbers as decimal strings of six places, "none" where undefined."""
        values = {
            "format": FORMAT,
            "verdict": str(self.status),
            "reasons": list(self.reasons),
            "endpoints": [_plain(asdict(item)) for item in self.endpoints],
            "controls": [_plain(asdict(item)) for item in self.controls],
            "plan_digest": self.plan_digest,
        }
        # Audits without a repertoire read as they always did.
        if self.secondary:
            values["secondary"] = [_plain(asdict(item)) for item in self.secondary]
        return values


def verdict_from_rows(
    rows: pa.Table | Mapping[str, list],
    plan: AuditPlan | Mapping[str, Any],
    unchecked: Sequence[str] = (),
) -> Verdict:
    """Judge the rows of an audit; used by the audit itself and by whoever wants to check it.

    Args:
        rows: table with the columns of `rows.SCHEMA`.
        plan: the plan, or the JSON of one.
        unchecked: what could not be checked about where the models come from, as `audit.json` lists it; each sentence stands against a
            PASS. Rows can't tell it: whoever trained the models in the same process and knows their data leaves it empty.

    Returns:
        The verdict; the same arguments always give the same one.

    Raises:
        RowsError: if the rows are not those of the plan (other models, missing people, a model asked less).
        PlanError: if the plan is not understood.
    """
    plan = plan if isinstance(plan, AuditPlan) else AuditPlan.from_json(plan)
    evidence = Evidence(rows)
    models = (
        ("original", plan.original),
        ("unlearned", plan.unlearned),
        [("gold", digest) for digest in plan.gold],
    )
    _require_complete(evidence, plan, models)
    margin, alpha = float(plan.margin), float(plan.alpha)
    judged = endpoints.primary(evidence, plan, models, 0)
    subgroups = [
        endpoints.leak_rate(evidence, tier, models, margin, alpha, subgroup)
        for tier in TIERS
        for subgroup in plan.subgroups
    ]
    held = controls(evidence, plan, models, judged, np.random.default_rng([plan.seed, 2]))
    secondary = secondary_endpoints(evidence, plan, models)
    status, reasons = _decide(plan, judged, subgroups, held, secondary, unchecked)
    remembered = memorisation(evidence, plan)
    if remembered is not None and remembered.memory is Memory.NOTHING:
        # The control 'original leaks' has made it INVALID; this is what it means.
        reasons = [remembered.statement, *reasons]
    return Verdict(
        status,
        tuple(reasons),
        (*judged, *subgroups),
        tuple(held),
        plan.digest,
        tuple(secondary),
    )


def contradictions(audit: Mapping[str, Any], rows: pa.Table) -> list[str]:
    """What in a published audit its own rows do not support.

    Args:
        audit: content of `audit.json`.
        rows: table of `rows.parquet`.

    Returns:
        One sentence per field that differs from the recomputed one; empty when everything agrees. An audit of another format was judged by
        another rule, which this version doesn't know: one sentence that says so, since neither "agrees" nor "differs" would be true.

    Raises:
        RowsError: if the rows do not belong to the audit's plan.
        PlanError: if the plan is not understood.
    """
    if audit.get("format") != FORMAT:
        told = f"audit.json was judged by the rule of format {audit.get('format')!r}, this version judges by {FORMAT}"
        return [
            f"format: {told} and can't repeat it: audit again (dataworth run), or check it with the version that made it"
        ]
    plan = AuditPlan.from_json(audit.get("plan", {}))
    recomputed = verdict_from_rows(rows, plan, audit.get("unchecked", ())).to_json()
    if "description" in audit:  # a verdict may be published alone
        recomputed["description"] = describe(Evidence(rows), plan)
    differing = [
        f"{name}: audit.json says {audit.get(name)!r}, its rows say {value!r}"
        for name, value in recomputed.items()
        if audit.get(name) != value
    ]
    return differing + _miscalibrated(audit.get("calibration", ()), plan)


def _miscalibrated(tried: Any, plan: AuditPlan) -> list[str]:
    """What in a published calibration is no count, or speaks against the plan; audits of before have none."""
    try:
        wrong = any(not 0 <= one["given_away"] <= one["people"] for one in tried)
        best = max(tried, key=lambda one: one["given_away"], default=None)
        way = (best["demonstrations"], best["between"]) if best else None
    except (TypeError, LookupError):
        wrong, way = True, None
    if wrong:
        return ["calibration: expected counts of people given away, of those asked about"]
    planned = (plan.attacks.demonstrations, plan.attacks.between)
    if way not in (None, planned):
        return [f"calibration: most people are given away by {way}, the plan asks by {planned}"]
    return []


def _require_complete(
    evidence: Evidence, plan: AuditPlan, models: tuple[Any, Any, Sequence[Any]]
) -> None:
    """Every model of the plan, no other, each asked the same questions about the planned number of people."""
    expected = {models[0], models[1], *models[2]}
    everything = expected | ({("random", plan.random_init)} if plan.random_init else set())
    if evidence.models != everything:
        names = sorted(role for role, _ in evidence.models ^ everything)
        raise RowsError(
            f"expected rows of exactly the plan's models, differing: {', '.join(names)}"
        )
    if len(evidence.subgroups) != plan.num_forgotten:
        raise RowsError(
            f"expected rows of {plan.num_forgotten} forgotten people, got {len(evidence.subgroups)}"
        )
    for attack in evidence.attacks():
        asked = evidence.questions(models[0], attack)
        if attack == MEMORISED:
            if not asked or any(evidence.questions(m, attack) for m in everything - {models[0]}):
                raise RowsError(
                    f"expected rows of {attack} for the original and for no other model"
                )
            continue
        for model in expected if attack != "utility" else everything:
            if evidence.questions(model, attack) != asked and not _no_constituent(
                evidence, (model, models[0]), attack
            ):
                raise RowsError(
                    f"expected the same questions for every model under {attack}, "
                    f"{model[0]} differs from {ROLES[0]}"
                )
    _require_people(evidence, plan, models[1])


def _no_constituent(evidence: Evidence, pair: Sequence[Any], attack: str) -> bool:
    """Whether one of two ensembles has fewer constituents (a shard may have lost its last record), so that this one's layers aren't read."""
    constituent = attack.rpartition("/")[0]
    return constituent.startswith("lens/constituent-") and any(
        not any(evidence.questions(model, layer) for layer in evidence.attacks(constituent))
        for model in pair
    )


def _require_people(evidence: Evidence, plan: AuditPlan, model: Any) -> None:
    """Every person of the plan stands in every tier, and every planned step of tier 3 was asked at."""
    steps = [f"fine_tune/step-{step}" for step in plan.attacks.fine_tune_steps]
    for attacks in (
        evidence.attacks("direct"),
        evidence.attacks("in_context"),
        *([s] for s in steps),
    ):
        subjects, _ = evidence.per_person(model, attacks, "exact_match")
        if len(subjects) != plan.num_forgotten:
            raise RowsError(
                f"expected {plan.num_forgotten} people under {attacks}, got {len(subjects)}"
            )
    if sorted(steps) != evidence.attacks("fine_tune"):
        raise RowsError(f"expected the planned steps {steps}, got {evidence.attacks('fine_tune')}")
    populations = (
        ("utility", "retained", plan.num_retained),
        ("membership", "lookalike", plan.num_lookalikes),
    )
    for attack, population, people in populations:
        subjects, _ = evidence.person_means(model, attack, "loss", population)
        if len(subjects) != people:
            raise RowsError(f"expected losses of {people} {population} people, got {len(subjects)}")


def _decide(
    plan: AuditPlan,
    judged: Sequence[Endpoint],
    subgroups: Sequence[Endpoint],
    held: Sequence[Control],
    secondary: Sequence[Secondary],
    unchecked: Sequence[str],
) -> tuple[Status, list[str]]:
    broken = [f"control '{c.name}' failed: {c.detail}" for c in held if not c.holds]
    if broken:
        return Status.INVALID, broken
    failed = [_sentence(e) for e in (*judged, *subgroups) if e.status is Status.FAIL]
    failed += [_leak(one, len(secondary)) for one in secondary if one.leaks]
    if failed:
        return Status.FAIL, failed
    open_ = [_sentence(e) for e in judged if e.status is Status.INCONCLUSIVE]
    if not plan.num_lookalikes:
        open_.append("membership was not tested: there are no look-alikes")
    if len(plan.gold) < plan.min_gold_seeds:
        open_.append(
            f"{len(plan.gold)} gold model{'s' * (len(plan.gold) != 1)} seen, {plan.min_gold_seeds} distinct ones needed for PASS: "
            "fewer do not show how much gold models differ among themselves"
        )
    open_ += [f"lineage not checked: {text}" for text in unchecked]
    if open_:
        return Status.INCONCLUSIVE, open_
    return Status.PASS, [_sentence(e) for e in judged]


def _leak(one: Secondary, tests: int) -> str:
    gold = ", ".join(f"{value:.3f}" for value in one.gold)
    return (
        f"{one.name}: unlearned {one.unlearned:.3f}, gold {gold}; above the margin {one.margin:g} with p = {one.p_holm:.2g} after "
        f"Holm's adjustment for {tests} secondary endpoints (best: {one.best})"
    )


def _sentence(endpoint: Endpoint) -> str:
    """What one endpoint says, with its interval, its margin and what zero leaks still allow."""
    gold = ", ".join(f"{value:.3f}" for value in endpoint.gold)
    text = (
        f"{endpoint.label}: unlearned {endpoint.unlearned:.3f}, gold {gold}; difference between "
        f"{endpoint.low:.3f} and {endpoint.high:.3f}, margin {endpoint.margin:g} ({endpoint.status})"
    )
    if endpoint.name in TIERS:
        count = round(endpoint.unlearned * endpoint.people)
        text += f"; {count} of {endpoint.people} people, true rate below {endpoint.zero_upper:.3f}"
    needed = endpoint.people_needed
    decided = f"{needed} people would decide" if needed else "no number of people would decide"
    if endpoint.has_power or endpoint.name not in TIERS:
        return f"{text}; {decided}" if endpoint.status is Status.INCONCLUSIVE else text
    text += (
        f"; no power: the original shows {endpoint.original:.3f} here, so this tier proves nothing"
    )
    if endpoint.status is Status.INCONCLUSIVE:
        text += f"; {_deciding(endpoint)}"
    return text


def _deciding(endpoint: Endpoint) -> str:
    """What would decide a tier without power."""
    stronger = "an attack of this tier under which the original leaks would decide"
    if endpoint.people_needed:
        return f"{endpoint.people_needed} people would decide, or {stronger}"
    return stronger


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, bool | int) and not isinstance(value, Status):
        return value
    if isinstance(value, float):
        return "none" if math.isnan(value) else f"{value:.6f}"
    return "none" if value is None else str(value)
