"""The influence section of a report: who moved whose loss, in one training and at its last checkpoint.

Signs as everywhere in a report: positive lowers the buyer's loss. Records appear by id and owner; there is no field
for their text, whatever its licence says.
"""

from dataclasses import dataclass

from pipelines.reports.errors import ReportError
from pipelines.reports.parts import Estimate, NotAvailable


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    """Mean influence of a record of one owner on the held-out records of another."""

    owner: str
    target_owner: str
    value: float
    """Nats per token of these held-out records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordInfluence:
    """One record at an end of the list."""

    record: str
    """Record id, hex."""
    owner: str
    value: Estimate
    """Nats per held-out token."""

    distinguishable: bool
    """Whether it differs from 0 after correction for the number of records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodScore:
    """How well one method foretold the retrainings."""

    method: str
    score: Estimate
    """Linear datamodeling score, a rank correlation from -1 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Loss of retrainings along a curve, at one share of the scored records."""

    removed: bool
    """Taken away from all; otherwise given alone."""
    percent: int
    """Share of the scored records that was removed or added."""
    top: float
    """Most valued first: mean nats per token over seeds, on held-out records that no score has seen."""
    bottom: float
    """Least valued first."""
    random: float
    """In any order."""
    top_gap: Estimate
    """Top less random, paired by seed."""
    bottom_gap: Estimate
    """Bottom less random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The values held against retraining."""

    verdict: str
    """PASS, FAIL, INCONCLUSIVE or INVALID."""
    words: str
    """The verdict in one sentence."""
    subsets: int
    """Retrainings on halves of the scored records."""
    scores: tuple[MethodScore, ...]
    """The method that is judged first; the random draw last. Empty where so few subsets were retrained that a rank tells nothing."""
    above_bm25: Estimate
    """Score less BM25's, on the same retrainings."""
    records: int
    """Records whose scores are judged."""
    distinct: int
    """Of these, distinct from 0 after correction for their number."""
    top: Estimate | None
    """What a query loses without its top records, less what it loses without random ones, in nats; None where it was off."""
    whole: tuple[MethodScore, ...] = ()
    """The same of the target as a whole, in-run credit among them; empty as `scores`."""
    again: int = 0
    """Subsets that were retrained under a second seed, for the ceilings."""
    ceiling: Estimate | None = None
    """Upper bound of what scores reach on average; None where too few subsets were retrained twice."""
    ceiling_whole: Estimate | None = None
    """The same of the target as a whole."""
    curve: tuple[CurvePoint, ...] = ()
    """Removal and addition curves; none where they were off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """In-run credit of one training, and influence of records at the weights it ended with."""

    method: str
    """Such as influence.ekfac."""
    form: str
    """Form of the in-run credit, such as trapezoid."""
    checkpoint_root: str
    """Root of the weights that the influence is of; hex."""
    num_records: int
    num_queries: int
    num_distinguishable: int
    """Records that differ from 0 after correction for their number."""
    heat: tuple[HeatCell, ...]
    helpful: tuple[RecordInfluence, ...]
    """Largest values first."""
    harmful: tuple[RecordInfluence, ...]
    """Smallest values first."""
    steps: tuple[int, ...]
    drops: tuple[float, ...]
    """True fall of the target's loss in each step, nats per token."""
    credits: tuple[float, ...]
    """Sum of the records' in-run credits of each step."""
    judged: Judged | NotAvailable
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.steps) == len(self.drops) == len(self.credits):
            raise ReportError(
                f"influence: expected one drop and one credit per step, got {len(self.steps)}, {len(self.drops)}, {len(self.credits)}"
            )

    @property
    def residuals(self) -> tuple[float, ...]:
        """What the credits leave unexplained in each step."""
        return tuple(drop - credit for drop, credit in zip(self.drops, self.credits, strict=True))


def limited(
    cells: tuple[HeatCell, ...], most: int
) -> tuple[list[str], list[str], list[list[float]]]:
    """Owners, target owners and the matrix of a heat map, at most `most` of each: those of the largest sums of sizes.

    Args:
        cells: one per pair.
        most: rows and columns to keep.

    Returns:
        Row names, column names, values by row.
    """
    weight_of_row: dict[str, float] = {}
    weight_of_column: dict[str, float] = {}
    for cell in cells:
        weight_of_row[cell.owner] = weight_of_row.get(cell.owner, 0) + abs(cell.value)
        weight_of_column[cell.target_owner] = weight_of_column.get(cell.target_owner, 0) + abs(
            cell.value
        )
    rows, columns = (
        sorted(sorted(weights, key=lambda name: (-weights[name], name))[:most])
        for weights in (weight_of_row, weight_of_column)
    )
    found = {(cell.owner, cell.target_owner): cell.value for cell in cells}
    return rows, columns, [[found.get((row, column), 0.0) for column in columns] for row in rows]
