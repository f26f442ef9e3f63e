"""The dossier of one erasure: every fact of the two-part audit report, for a compliance officer and for an engineer.

Part 1 says in words what was asked, by whom, when, which models it concerned, what was found and what that cannot prove; part 2
says with what numbers, by which plan, under which roots, and how to get them again. Both stand in one file, and the same facts
stand beside it as JSON (`Dossier.to_json`, strict both ways).

*What no field may hold:* the text of a record, a prompt, a secret, a name, or a hash that somebody could confirm by trying names
or numbers. A request is named by its reference, a keyed digest; whoever asked by a keyed pseudonym; people by the salted ids of the
audit's rows, which mean nothing once the request's key is destroyed. One name may stand here: a reviewer's, who gave it for that.
"""

import json
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, Literal, Self

from pipelines.reports.audit import Audit
from pipelines.reports.codec import check, from_json, to_json
from pipelines.reports.engineering import Engineering, OfEnsemble
from pipelines.reports.errors import ReportError
from pipelines.reports.parts import NotAvailable

CANNOT_PROVE = (
    (
        "No audit of weights can prove that a record was never used: another data set can lead to the same weights (Thudi et al., "
        '"On the necessity of auditable algorithmic definitions for machine unlearning", USENIX Security 2022). Only evidence on the '
        "computation itself, the committed shards and the ledger's windows, speaks about use; this audit speaks about what comes out."
    ),
    "A PASS covers the attacks listed in part 2 at the strength listed there. Somebody who tries harder, or something else, may find more.",
    "Bounds hold for people like those who were asked about. They are averages over people: see the worst person in part 2.",
    "Copies of the model or of the records outside of this home were not looked at.",
)
"""What no audit of this kind shows; the first part always prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One erasure request."""

    reference: str
    """Keyed digest of the request's id, 16 hex digits: its id is made of who asked for what, which could be guessed."""
    by: str
    """Keyed pseudonym of the owner whose records are meant, 16 hex digits; empty where it names records only."""
    state: str
    """received, suspended, unlearned, audited, shredded or refused."""
    received: str
    """ISO 8601 day; empty when unknown."""
    deadline: str
    """ISO 8601 day; empty without one."""
    closed: str
    """ISO 8601 time of the ledger entry that closed it; empty while it is open."""
    basis: str
    """Legal basis as stated with the request, in words; empty when none was stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the requests concern."""

    people: int
    records: int
    attributes: str
    """What the questions are about, in words."""
    version_before: str
    """Corpus version that held the records; hex."""
    root_before: str
    """Its Merkle root; hex."""
    version_after: str
    """Corpus version in force without them; hex."""
    root_after: str
    """Its Merkle root; hex."""
    included: int
    """Records whose path leads to the old root, recomputed."""
    absent: int
    """Records whose text is proven absent from the new version, in the receipts."""
    kept_by_others: int
    """Records whose text another owner delivered too, who did not ask: no absence to prove."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One of the models of the audit."""

    role: str
    """original, unlearned, gold or random."""
    root: str
    """Merkle root over its tensors; hex."""
    run: str
    """Run that made it; empty for random weights."""
    seed: str
    steps: int | None = None
    tokens_per_s: float | None = None
    peak_rss_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy or derivative of the records, and what became of it."""

    what: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One line of the protocol."""

    name: str
    value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One endpoint with everything that is needed to read it."""

    name: str
    subgroup: str
    unit: str
    ideal: str
    """Direction and ideal value, in words."""
    people: int
    original: float | None
    unlearned: float | None
    gold: tuple[float, ...]
    low: float | None
    """Lower one-sided 95 % bound of unlearned - gold."""
    high: float | None
    """Upper one-sided 95 % bound of unlearned - gold."""
    margin: float
    verdict: str
    p_value: float | None = None
    p_holm: float | None = None
    """Adjusted over all secondary endpoints; None for a primary one."""
    best: str = ""
    """Budget at which the adversary did best."""
    has_power: bool | None = None
    """Whether the same attack is shown to tell the original from gold; None where it isn't asked (utility) or wasn't (older audits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What fine-tuning brings back, by step."""

    model: str
    source: str
    """What it was fine-tuned on, and at which rate."""
    steps: tuple[int, ...]
    rates: tuple[float, ...]
    lows: tuple[float, ...]
    """Lower ends of the 95 % Wilson intervals."""
    highs: tuple[float, ...]
    people: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Distribution of one score over people, for one model."""

    score: str
    unit: str
    model: str
    people: int
    quantiles: tuple[float, ...]
    """21 quantiles, from 0 to 1 in steps of 0.05."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leakage:
    """How one subgroup fares, and its worst person."""

    subgroup: str
    people: int
    given_away: float
    """Share of people given away under direct questions."""
    low: float | None
    """Lower end of its 95 % Wilson interval; None in reports of before."""
    high: float | None
    excess_mean: float
    """Nats per token by which a person's secret is likelier than under every gold model."""
    excess_95: float
    excess_worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Share given away by one question: one attribute in one phrasing."""

    attack: str
    question: int
    people: int
    original: float
    unlearned: float
    gold: tuple[float, ...]
    low: float | None
    """Lower end of the 95 % Wilson interval of the unlearned model's share; None in reports of before."""
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgetting:
    """How far people are forgotten: 1 is gold, 0 the original, above 1 over-forgotten; likelihood of the secret, direct questions."""

    people: int
    usable: int
    """People whose original knows more than gold by more than the plan's margin: the others have no score."""
    median: float | None
    low_5: float | None
    """5th percentile over people."""
    high_95: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """How much of the original's lead over gold one source of one tier brings out of the unlearned model: 0 as gold, 1 as the original."""

    tier: int
    source: str
    score: str
    people: int
    original: float
    unlearned: float
    gold: float
    """Mean over the gold models."""
    recovery: float | None
    """None where the original is not shown to lead by more than the margin."""
    low: float | None
    """Lower one-sided 95 % bound, bootstrap over people."""
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Likeness:
    """How like gold's the scores are."""

    score: str
    people: int
    d: float
    """Kolmogorov-Smirnov distance from the farthest gold model."""
    p_value: float
    cliff: float
    """Cliff's delta, an effect size in [-1, 1]."""
    band: float | None
    """Largest distance between two gold models; None with fewer than three."""
    margin: float
    low: float | None
    """Lower end of the 90 % interval of the mean difference, on which the equivalence test rests."""
    high: float | None
    equivalent: bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OneRun:
    """One-run lower bound of epsilon, indicative."""

    model: str
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PersonRow:
    """One person, under a salted id."""

    person: str
    subgroup: str
    original: int
    """Tiers, of three, in which the original gives this person away."""
    unlearned: int
    gold: int
    excess: float | None
    """Nats per token by which the secret is likelier than under every gold model."""
    forgetting: float | None
    """Forgetting score; None without a denominator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What the measurements of one attack on the models of one role took."""

    name: str
    wall_s: float
    cpu_s: float | None
    """CPU seconds of the process; None where it wasn't counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Part 2: what the verdict rests on, all of it recomputable from `rows.parquet` and `plan.json`."""

    run: str
    audit_digest: str
    rows_digest: str
    num_rows: int
    ledger_entry: int
    alpha: float
    plan: tuple[Fact, ...]
    metrics: tuple[Metric, ...]
    curves: tuple[Curve, ...]
    spreads: tuple[Spread, ...]
    leakage: tuple[Leakage, ...]
    questions: tuple[Question, ...]
    likeness: tuple[Likeness, ...]
    one_run: tuple[OneRun, ...]
    people: tuple[PersonRow, ...]
    deviations: tuple[str, ...]
    """Where what was done differs from what was planned; empty when the rows give the verdict again."""
    unchecked: tuple[str, ...]
    """What could not be checked about where the models come from; with any of it there is no PASS."""
    noted: tuple[str, ...]
    """What was checked about it and is worth saying."""
    forgetting: Forgetting | None
    """None without gold, or without likelihoods."""
    recovery: tuple[Recovered, ...]
    seconds: tuple[Spent, ...]
    """Time by model and attack; beside the models' speed and memory the only facts that a repetition changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Somebody read a report and answers for that; `pipelines.steps.audit_review` has the formulas."""

    by: str
    """The name that was given."""
    at: str
    """ISO 8601 time of the ledger entry."""
    report: str
    """Digest of the report that was read (`Dossier.reviewable`); hex."""
    audit: str
    """Digest of its `audit.json`; hex."""
    nonce: str
    """Opens the ledger entry, which commits to the name without holding it; 64 hex digits."""
    entry: int
    """Index of the ledger entry."""

    def __post_init__(self) -> None:
        if len(self.nonce) != 64 or not set(self.nonce) <= set("0123456789abcdef"):
            raise ReportError("review.nonce is not 64 hex digits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dossier:
    """Everything that the audit report shows."""

    demo: bool
    profile: str
    batch: str
    requests: tuple[Asked, ...]
    scope: Scope
    kind: Literal["exact retrain", "shard retrain", "approximate"]
    """Class of the method."""
    audit: Audit
    models: tuple[Model, ...]
    release: str
    """Which model is released instead of the original, in words."""
    copies: tuple[Copy, ...]
    evidence: Evidence
    engineering: Engineering | OfEnsemble | NotAvailable
    versions: tuple[Fact, ...]
    reviews: tuple[Review, ...] = ()
    """Who has read this report or an earlier state of it, the newest last."""
    limits: tuple[str, ...] = CANNOT_PROVE
    schema: Literal["dataworth.audit-report"] = "dataworth.audit-report"
    format: Literal[5] = 5

    def __post_init__(self) -> None:
        check(type(self), self, "dossier")
        if not self.limits:
            raise ReportError("dossier.limits is empty; an audit always says what it cannot prove")
        if not self.requests:
            raise ReportError("dossier.requests is empty; an audit answers a request")

    @property
    def reviewable(self) -> str:
        """Digest of what a reviewer reads: the JSON without reviews; hex."""
        return sha256(replace(self, reviews=()).to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """The machine-readable form: sorted keys, two spaces of indent, a final newline."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; reports of formats 1 to 4 are read as ones that don't know what was added since.

        Args:
            text: JSON text.

        Returns:
            The dossier.

        Raises:
            ReportError: Not JSON, an unknown or missing field, a wrong type or another format.
        """
        return from_json(cls, _upgraded(text))


def _upgraded(text: str) -> str:
    """A report of formats 1 to 5 with what was added later, as not known; any other text as it is."""
    try:
        plain = json.loads(text)
    except json.JSONDecodeError:
        return text  # `from_json` says what is wrong with it
    if not isinstance(plain, dict):
        return text
    if plain.get("format") == 1:
        asked = [{**one, "basis": ""} for one in plain.get("requests", [])]
        plain |= {"format": 2, "reviews": [], "requests": asked}
    if plain.get("format") == 2:
        plain = _third(plain)
    if plain.get("format") == 3:
        plain = _fourth(plain)
    if plain.get("format") == 4:
        plain = _fifth(plain)
    part = plain.get("engineering")
    if isinstance(part, dict) and "modules" in part:
        part.setdefault("numbered", [])  # the first reports of format 5 don't say it
    return json.dumps(plain)


def _third(plain: dict[str, Any]) -> dict[str, Any]:
    """Format 3 asked whether attacks have power, scored forgetting and recovery, gave shares their intervals and ties their differences."""
    audit, evidence = plain.get("audit", {}), plain.get("evidence", {})

    def more(part: dict[str, Any], name: str, *added: str) -> list[dict[str, Any]]:
        return [one | dict.fromkeys(added) for one in part.get(name, [])]

    spent = [{"name": one["name"], "wall_s": float(one["value"]), "cpu_s": None} for one in evidence.get("seconds", [])]  # fmt: skip
    evidence |= {
        "metrics": more(evidence, "metrics", "has_power"), "leakage": more(evidence, "leakage", "low", "high"),
        "questions": more(evidence, "questions", "low", "high"), "people": more(evidence, "people", "forgetting"),
        "forgetting": None, "recovery": [], "seconds": spent,
    }  # fmt: skip
    audit |= {"tiers": more(audit, "tiers", "has_power")}
    part = plain.get("engineering", {})
    if "modules" in part:
        modules = [one | {"facts_low": [], "facts_high": []} for one in part["modules"]]
        part |= {"gaps": [], "modules": modules}
    return plain | {"format": 3, "audit": audit, "evidence": evidence}


def _fourth(plain: dict[str, Any]) -> dict[str, Any]:
    """Format 4 told unchecked from noted, which stood in one list; it looks at people who stay in every layer, and has a null of their facts."""
    evidence, part = plain.get("evidence", {}) | {"noted": []}, plain.get("engineering", {})
    part |= {"null_facts": [], "kept": []} if "modules" in part else {}
    return plain | {"format": 4, "evidence": evidence, "engineering": part}


def _fifth(plain: dict[str, Any]) -> dict[str, Any]:
    """Format 5 has the whole change in the map of facts, and a map of numbers that are no longer the likeliest."""
    part = plain.get("engineering", {})
    if "modules" in part:
        modules = [one | {"outranked": []} for one in part["modules"]]
        part |= {"whole_facts": [], "whole_outranked": [], "null_outranked": [], "modules": modules}
    return plain | {"format": 5, "engineering": part}
