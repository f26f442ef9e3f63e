"""The owners' section of a report: who is worth and paid what, how surely, from which retrainings, and who comes off worst.

Values are in nats of held-out loss per token, positive lowers the buyer's loss; prices are integers in micro-units, rates
per thousand valued tokens. Records appear by id and owner only; a strip shows how surprising a record's parts were and
none of its words, and only for records whose owner consents to display.
"""

from dataclasses import dataclass
from typing import Literal

from pipelines.reports.errors import ReportError
from pipelines.reports.parts import Estimate, NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerWorth:
    """One owner's value and price for one buyer."""

    owner: str
    tokens: int
    """Valued tokens: copies and what may not be sold left out."""
    value: Estimate
    price_microunits: int | None = None
    """None where nothing was priced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropySpread:
    """Quantiles over one owner's records of model surprisal, bits per token."""

    owner: str
    records: int
    low: float
    """5 % of the records lie below."""
    quarter: float
    median: float
    three_quarters: float
    high: float
    """95 % of the records lie below."""

    def __post_init__(self) -> None:
        if not self.low <= self.quarter <= self.median <= self.three_quarters <= self.high:
            raise ReportError(f"entropy of {self.owner}: quantiles must ascend")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How many coalitions of one size the bank holds."""

    size: int
    """Lots in the coalition."""
    trained: int
    possible: int

    def __post_init__(self) -> None:
        if not 0 <= self.trained <= self.possible:
            raise ReportError(f"coverage of size {self.size}: {self.trained} of {self.possible}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Narrowing:
    """Interval widths of owners by number of trained coalitions."""

    calls: tuple[int, ...]
    mean_width: tuple[float, ...]
    worst_width: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.calls) == len(self.mean_width) == len(self.worst_width):
            raise ReportError("convergence: expected two widths per number of calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Surprisal along one record, from its beginning to its end."""

    record: str
    owner: str
    bits: tuple[float, ...]
    """Mean bits per token of equal parts, at most 60."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FairRow:
    """Value and price of one class of records, with the worst owner in it."""

    by: Literal["language", "era", "length", "owner"]
    """By what records are told apart; owner is its size."""
    name: str
    records: int
    owners: int
    tokens: int
    value: Estimate
    value_rate: float
    worst_value_rate: float
    worst_value_owner: str
    price_rate: float
    worst_price_rate: float
    worst_price_owner: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The owners' section."""

    currency: str
    """Empty where nothing was priced."""
    owners: tuple[OwnerWorth, ...]
    """Largest value first."""
    entropy: tuple[EntropySpread, ...]
    coverage: tuple[Coverage, ...]
    narrowing: Narrowing | NotAvailable
    strips: tuple[Strip, ...] | NotAvailable
    fairness: tuple[FairRow, ...]
    notes: tuple[str, ...] = ()
