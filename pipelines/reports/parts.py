"""The two small parts every section of a report is made of: an estimate, and a reason for its absence."""

from dataclasses import dataclass

from pipelines.reports.errors import ReportError

LEVEL = 0.95
"""The level of every interval in a report, unless an estimate says otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAvailable:
    """A fact that this report does not have. The page prints ``not available: <reason>``."""

    reason: str
    """Why, in words a reader outside the team understands; never empty."""

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise ReportError("NotAvailable.reason is empty; say why the fact is missing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A measured number with what is known of its error."""

    value: float
    """The point estimate, in the unit that the field holding it names."""
    se: float | None = None
    """Standard error, same unit; None when it was not estimated."""
    low: float | None = None
    """Lower end of the interval, same unit."""
    high: float | None = None
    """Upper end of the interval, same unit."""
    n: int | None = None
    """How many independent observations stand behind the number."""
    level: float = LEVEL
    """Level of the interval, 0 < level < 1."""

    @property
    def unclear(self) -> str:
        """``not distinguishable from 0 at 95 %`` where the interval holds 0; empty where it doesn't, or without one."""
        if self.low is None or self.high is None or not self.low <= 0 <= self.high:
            return ""
        return f"not distinguishable from 0 at {100 * self.level:g} %"

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ReportError(f"an interval has two ends; got low={self.low}, high={self.high}")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ReportError(f"an interval needs low <= high; got {self.low} > {self.high}")
        if self.se is not None and self.se < 0:
            raise ReportError(f"a standard error is >= 0; got {self.se}")
        if not 0 < self.level < 1:
            raise ReportError(f"a level lies between 0 and 1; got {self.level}")
