"""The erasure audit as a report shows it: requests, tiers, membership, bounds and the verdict.

A verdict is a result, not an error (PASS, FAIL, INCONCLUSIVE or INVALID). This module refuses one
thing only: a PASS above rows that did not pass, because the headline is what people act on.
"""

from dataclasses import dataclass
from typing import Literal

from pipelines.reports.errors import ReportError
from pipelines.reports.memory import Memory
from pipelines.reports.parts import LEVEL, Estimate, NotAvailable

MIN_GOLD_SEEDS = 3
"""Gold models without which an audit never says PASS."""
VerdictName = Literal["PASS", "FAIL", "INCONCLUSIVE", "INVALID"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One of the four verdicts with its reason in one sentence."""

    verdict: VerdictName
    reason: str
    """Why; for INCONCLUSIVE also the n that would decide. Never the text of a record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An erasure request, named by its id only."""

    request: str
    state: str
    """received, suspended, unlearned, audited, shredded or refused."""
    num_people: int
    num_records: int
    received: str = ""
    """ISO 8601 time; empty when unknown."""
    deadline: str = ""
    """ISO 8601 time; empty when unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """How many of n secrets an attack recovered."""

    hits: int
    n: int

    def __post_init__(self) -> None:
        if not 0 <= self.hits <= self.n:
            raise ReportError(f"a rate needs 0 <= hits <= n; got {self.hits} of {self.n}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRow:
    """One attack, run with the same budget on the original, the unlearned and the gold model."""

    tier: str
    """Short id, such as "1" or "2b"."""
    name: str
    """What the attacker does, such as "direct question"."""
    original: Rate | NotAvailable
    unlearned: Rate | NotAvailable
    gold: Rate | NotAvailable
    """The gold model that is hardest to match, when there are several."""
    bound: float | None
    """One-sided upper 95 % Newcombe bound of (unlearned rate - gold rate), as a share."""
    margin: float
    """The largest bound that still passes, as a share; fixed before the audit."""
    verdict: VerdictName
    reason: str
    low: float | None = None
    """One-sided lower 95 % bound of the same difference, as a share; above the margin means FAIL."""
    budget: str = ""
    """What the attacker needs: access, samples, steps, tries."""
    has_power: bool | None = None
    """Whether the original leaks under the same attack; if not, the row says little and never passes. None before it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """Area under the curve of a loss-based membership test; 0.5 is a coin toss, 1 is certainty."""

    original: Estimate | NotAvailable
    unlearned: Estimate | NotAvailable
    gold: Estimate | NotAvailable
    difference: Estimate | None
    """unlearned - gold, paired bootstrap over people."""
    margin: float
    """Largest absolute difference from gold that still passes."""
    verdict: VerdictName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Utility:
    """What the erasure cost: loss on the records that stay, nats per token; lower is better."""

    original: Estimate | NotAvailable
    unlearned: Estimate | NotAvailable
    gold: Estimate | NotAvailable
    bound: float | None
    """One-sided upper 95 % bound of (unlearned - gold), nats per token."""
    margin: float
    """The largest bound that still passes, nats per token."""
    verdict: VerdictName
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """Something that must hold for the audit to mean anything."""

    name: str
    holds: bool
    detail: str
    """What was expected and what was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroBound:
    """Nothing was found in n tries: the largest true rate this still allows."""

    what: str
    n: int
    bound: float
    """Upper bound of the true rate, as a share."""
    level: float = LEVEL


@dataclass(frozen=True, slots=True, kw_only=True)
class SideAttack:
    """One attack beside the tiers: it can only make a verdict worse."""

    name: str
    original: float
    unlearned: float
    gold: float
    """Of the gold model that gives most."""
    bound: float | None
    """One-sided upper 95 % bound of unlearned - gold."""
    margin: float
    leaks: bool
    """Whether it is beyond the margin after Holm's adjustment over all of them."""
    best: str
    """The budget at which the adversary did best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """The robustness audit of an unlearned checkpoint against the retrained gold model."""

    method: str
    """How the records were removed, one phrase: "NPO with a retain term", "exact retrain"."""
    num_people: int
    """Forgotten people: the n of the direct tiers."""
    num_gold_seeds: int
    """Independent gold models; fewer than three are never enough for PASS."""
    plan_digest: str
    """Digest of the audit plan, hashed into the ledger before the result; hex."""
    tiers: tuple[TierRow, ...]
    membership: Membership | NotAvailable
    utility: Utility | NotAvailable
    zero_bounds: tuple[ZeroBound, ...]
    verdict: VerdictName
    reason: str
    controls: tuple[Control, ...] = ()
    """Positive and negative controls, also those that held."""
    side: tuple[SideAttack, ...] = ()
    """Secondary attacks of the plan; none at sizes that don't carry them."""
    not_tested: tuple[str, ...] = ()
    """Attacks and copies that this audit did not look at."""
    memory: Memory | None = None
    """What the original had memorised; None for audits of before it was asked."""

    def __post_init__(self) -> None:
        if self.verdict != "PASS":
            return
        failed = []
        for row in self.tiers:
            if row.verdict != "PASS":
                failed.append(f"tier {row.tier} is {row.verdict}")
            elif row.has_power is False:
                failed.append(f"tier {row.tier} has no power, the original hardly leaks under it")
            elif row.bound is None or row.bound > row.margin:
                failed.append(f"tier {row.tier} has bound {row.bound} for margin {row.margin}")
        for name, part in (("membership", self.membership), ("utility", self.utility)):
            if isinstance(part, NotAvailable) or part.verdict != "PASS":
                got = "not available" if isinstance(part, NotAvailable) else part.verdict
                failed.append(f"{name} is {got}")
        failed += [f"control {item.name} does not hold" for item in self.controls if not item.holds]
        if self.num_gold_seeds < MIN_GOLD_SEEDS:
            failed.append(f"{self.num_gold_seeds} gold model(s), and {MIN_GOLD_SEEDS} are needed")
        failed += [f"{item.name} leaks" for item in self.side if item.leaks]
        if failed or not self.tiers:
            found = "; ".join(failed) or "no tier at all"
            raise ReportError(f"audit verdict PASS needs every part to be PASS; got {found}")
