"""Every fact of a report, as frozen dataclasses.

One rule of signs: a value is in nats of held-out loss, and positive means that the data *lowers* the
buyer's loss. One rule of money: prices are integers in micro-units of the currency. A missing section
is a `NotAvailable` with a reason. There is no field for the text of a record, a prompt or a secret;
people appear as owner ids, requests and counts.

The JSON form (`ReportData.to_json`) is strict both ways (`codec.py`): an unknown or missing field, a
wrong type or a number that is not finite is refused with the path of the field.
"""

from dataclasses import dataclass
from typing import Literal, Self

from pipelines.reports.audit import Audit, Request, Verdict
from pipelines.reports.codec import check, from_json, to_json
from pipelines.reports.errors import ReportError
from pipelines.reports.influence import Influence
from pipelines.reports.owners import Worth
from pipelines.reports.parts import Estimate, NotAvailable

LIMITS = (
    (
        "The ledger proves what was claimed and that it never changed; replaying a window of steps, not "
        "the ledger, shows that a training happened as claimed."
    ),
    (
        "A value is measured with one model family on one held-out target; another buyer's target would "
        "give another value."
    ),
    "An audit covers the attacks listed, with the effort listed; a stronger attacker may find more.",
    "This report is evidence for a decision; it is no legal advice and no certificate.",
)
"""What no report of this kind shows; the page always prints it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """One content-addressed state of the corpus."""

    version: str
    """Version id: hex SHA-256 of the manifest."""
    size: int
    """Leaves, tombstones included."""
    live: int
    """Leaves that still stand for a record."""
    num_owners: int

    def __post_init__(self) -> None:
        if not 0 <= self.live <= self.size:
            raise ReportError(f"a corpus needs 0 <= live <= size; got {self.live} of {self.size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """How many records were put aside for one reason."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What became of the records that were delivered; all are counts of records."""

    received: int
    accepted: int
    held_out: int
    """Kept back as the buyer's target, never trained on."""
    quarantined: int
    duplicates: int
    """Same owner and same content; counted, not stored again."""
    reasons: tuple[Reason, ...] = ()
    """Reasons of the quarantine, largest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerRow:
    """How much information an owner's records hold, before any training."""

    owner: str
    records: int
    tokens: int
    bits_per_token: Estimate | None
    bits_per_byte: Estimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """The value of one group of owners, in nats of held-out loss; positive lowers the loss."""

    group: str
    owners: tuple[str, ...]
    value: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Valuation:
    """Owner group values: what the groups together and each alone do to the buyer's loss."""

    method: str
    """Such as "exact Shapley" or "stratified permutation sampling"."""
    target: str
    """Which held-out records the loss is measured on, such as "target_value"."""
    num_coalitions: int
    """Trainings of the proxy model behind the values."""
    groups: tuple[GroupValue, ...]
    loss_without: Estimate | None
    """Held-out loss of the model that saw no lot, untrained or the base, nats per token."""
    loss_with: Estimate | None
    """Held-out loss after training on all groups, nats per token."""
    plan_digest: str
    """Digest of the valuation plan, in the ledger before the result; hex."""
    notes: tuple[str, ...] = ()
    """What a reader must know, such as the stopping rule; one sentence each."""

    @property
    def gain(self) -> float | None:
        """Drop of the held-out loss from all groups together, nats per token."""
        if self.loss_without is None or self.loss_with is None:
            return None
        return self.loss_without.value - self.loss_with.value

    @property
    def total(self) -> float:
        """Sum of the group values, nats per token; equals `gain` when the method is efficient."""
        return sum(row.value.value for row in self.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """What one subject is paid."""

    subject: str
    price_microunits: int
    value: float | None = None
    """The subject's token share of its lots' values, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices: a fixed integer function of committed values."""

    currency: str
    pool_microunits: int
    rows: tuple[PriceRow, ...]
    rule_digest: str
    """Digest of the pricing rule; hex."""
    rule: str = ""
    """The rule in one sentence."""

    @property
    def sum_microunits(self) -> int:
        """Sum of all prices, exact."""
        return sum(row.price_microunits for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """Training loss of one run."""

    run: str
    kind: str
    """train, gold, proxy, unlearn or attack."""
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    """Nats per token, one per entry of `steps`."""
    tokens_per_s: float | None = None
    peak_rss_bytes: int | None = None
    status: str = "done"

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.losses):
            raise ReportError(
                f"run {self.run}: one loss per step; got {len(self.steps)} steps, "
                f"{len(self.losses)} losses"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPlan:
    """The gate that was written down before training, and what came out."""

    digest: str
    """Digest of the plan file, in the ledger before training; hex."""
    decision: str
    """What is decided, in one sentence."""
    metric: str
    unit: str
    better: Literal["lower", "higher"]
    threshold: float
    observed: Estimate | NotAvailable
    holds: bool | None
    """Whether the gate holds; None while there is no result."""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptCheck:
    """Whether an owner's receipt verified with the stand-alone verifier."""

    owner: str
    verified: bool
    detail: str
    """Facts proven, or what was expected and got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The roots that the whole report hangs on; every one is lower-case hex."""

    record_root: str
    sparse_root: str
    ledger_size: int
    ledger_root: str
    checkpoint_root: str | NotAvailable
    """Merkle root over the logical tensors of the model."""
    receipts: tuple[ReceiptCheck, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A piece of software, or an input pinned by its digest."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """A source of randomness and how it was chosen."""

    what: str
    seed: str
    chosen: str
    """Such as "fixed by the recipe" or "H(ledger checkpoint, nonce)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRef:
    """A run that this report draws on."""

    run: str
    kind: str
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything the page shows."""

    title: str
    profile: str
    """Size of the run: tiny, small, default, pilot or report."""
    demo: bool
    """Signed with the fixed demonstration keys, so worthless as evidence."""
    verdict: Verdict | NotAvailable
    """The overall verdict; PASS only over an audit that is PASS and a gate that holds."""
    requests: tuple[Request, ...] | NotAvailable
    corpus: Corpus | NotAvailable
    intake: Intake | NotAvailable
    owners: tuple[OwnerRow, ...] | NotAvailable
    valuation: Valuation | NotAvailable
    influence: Influence | NotAvailable
    pricing: Pricing | NotAvailable
    worth: Worth | NotAvailable
    training: tuple[LossCurve, ...] | NotAvailable
    evaluation: EvaluationPlan | NotAvailable
    audit: Audit | NotAvailable
    provenance: Provenance | NotAvailable
    versions: tuple[Version, ...] | NotAvailable
    seeds: tuple[Seed, ...] | NotAvailable
    runs: tuple[RunRef, ...] | NotAvailable
    limits: tuple[str, ...] = LIMITS
    """What the report does not show; never empty."""
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        check(type(self), self, "report")
        if not self.limits:
            raise ReportError("report.limits is empty; a report always says what it does not show")
        if not isinstance(self.verdict, Verdict) or self.verdict.verdict != "PASS":
            return
        if not isinstance(self.audit, Audit) or self.audit.verdict != "PASS":
            got = self.audit.verdict if isinstance(self.audit, Audit) else self.audit.reason
            raise ReportError(f"overall verdict PASS needs an audit that is PASS; got {got}")
        if isinstance(self.evaluation, EvaluationPlan) and self.evaluation.holds is False:
            raise ReportError("overall verdict PASS needs the evaluation gate to hold; it does not")

    @classmethod
    def empty(cls, title: str, reason: str) -> Self:
        """A report that knows nothing yet; fill it with `dataclasses.replace`.

        Args:
            title: Heading of the page.
            reason: Why the sections are missing; printed in each.

        Returns:
            A report whose every section is not available.
        """
        none = NotAvailable(reason=reason)
        return cls(
            title=title,
            profile="",
            demo=False,
            verdict=none,
            requests=none,
            corpus=none,
            intake=none,
            owners=none,
            valuation=none,
            influence=none,
            pricing=none,
            worth=none,
            training=none,
            evaluation=none,
            audit=none,
            provenance=none,
            versions=none,
            seeds=none,
            runs=none,
        )

    def to_json(self) -> str:
        """The machine-readable form: sorted keys, two spaces of indent, a final newline.

        Returns:
            JSON text; `from_json` gives an equal report back.
        """
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote.

        Args:
            text: JSON text.

        Returns:
            The report.

        Raises:
            ReportError: Not JSON, an unknown or missing field, a wrong type or format.
        """
        return from_json(cls, text)
