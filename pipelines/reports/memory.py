"""What the original had memorised, as a report shows it: without that an audit says nothing."""

from dataclasses import dataclass

from pipelines.reports.errors import ReportError
from pipelines.reports.parts import Estimate, NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow:
    """People whose fact the original was shown about as often."""

    shown: str
    """How often, such as "never" or "4 to 7 times"."""
    people: int
    given_away: int
    """Of whom at least one secret is the model's first choice."""
    low: float
    """Wilson 95 % interval of the share given away."""
    high: float
    exposure: Estimate | NotAvailable
    """Mean over people with a number, bits."""

    def __post_init__(self) -> None:
        if not 0 <= self.given_away <= self.people:
            raise ReportError(
                f"expected at most all {self.people} people given away; got {self.given_away}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The report on the original's memory, made before the audit."""

    memory: str
    """nothing, too little or enough."""
    statement: str
    rows: tuple[MemoryRow, ...]
    chance_exposure: Estimate | NotAvailable
    """Mean exposure of a model without memory, bits."""
    hardest: int
    """Forgotten people whose number ranks first of all candidates."""
    ranked: int
    """Forgotten people with a number."""
