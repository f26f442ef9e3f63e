"""In-run credit of one step: the forms, the books, and the ledger that adds them up over a run.

A step moved the weights by Delta = w_t - w_{t+1} = own + momentum + decay (`valuation.displacement`), and the target
loss L fell by ``drop``. A *form* is the direction V that the movement is measured along:

    first       V = grad L(w_t)                                  <V, Delta> = drop + O(|Delta|^2)
    trapezoid   V = (grad L(w_t) + grad L(w_{t+1})) / 2          <V, Delta> = drop + O(|Delta|^3)
    second      V = grad L(w_t) - H(w_t) Delta / 2               <V, Delta> = drop + O(|Delta|^3)
    sgd         V = grad L(w_t),                     own movement taken as  lr c g
    sgd_second  V = grad L(w_t) - lr c H(w_t) g / 2,   own movement taken as  lr c g

with g the batch's mean gradient and c the clip factor. Then, with A the map from g to its own movement,

    credit_r = <A V, c G_r / n>          G_r gradient of record r's summed loss, n the labels of the batch

*Why these are Shapley values.* Let the players be the records, the older gradients (momentum) and the decay, each of
which moves the weights by its part, and let U(S) be the fall of the loss when only S moves. For a linear loss every
player is worth <grad L, own part>: `first`. For a quadratic loss the Shapley value halves every interaction:
<grad L - H Delta / 2, own part>, which is `second`; and since the gradient of a quadratic loss changes by H Delta,
`trapezoid` is the same number, without a second derivative and at no cost, as grad L(w_{t+1}) is what step t + 1 needs
anyhow. `sgd` and `sgd_second` are the published forms (plain gradient descent, no momentum); under another optimiser
they are heuristics.

The *rescaled* credit closes the books: ``rescaled_r = credit_r + residual |credit_r| / sum |credit|``. When all credits
of a step have one sign this is multiplication by drop / own, and unlike that it stays bounded when own is near zero.

Legend: N records of the corpus, S segments of a batch.

Source: In-Run Data Shapley, arXiv 2406.11011, eq. 4 (first) and eq. 7 (second order); the forms of the actual
update, the trapezoid, the split of the residual and the rescaling are ours.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from trainer.data import BatchPlan
    from trainer.step import StepReport
    from valuation.gradients import Segments

Form = Literal["first", "trapezoid", "second", "sgd", "sgd_second"]
FORMS: tuple[Form, ...] = ("first", "trapezoid", "second", "sgd", "sgd_second")
DEFAULT_FORMS: tuple[Form, ...] = ("trapezoid",)
SUMMED = ("drop", "credit", "residual", "momentum", "decay", "curvature", "curvature_first")
"""Fields of `Residual` that are added up over a run."""


def check_forms(forms: Sequence[str]) -> tuple[Form, ...]:
    """The forms asked for, or an error.

    Args:
        forms: names of `FORMS`, each once; the first is the main one.

    Raises:
        GradientError: none, an unknown or a repeated name.
    """
    if not forms or len(set(forms)) != len(forms) or not set(forms) <= set(FORMS):
        raise GradientError(f"forms: expected some of {', '.join(FORMS)}, got {list(forms)}")
    return tuple(form for form in forms if form in FORMS)


@dataclass(frozen=True, slots=True)
class Residual:
    """The books of one step in the main form, in nats per target token; positive = the target loss fell."""

    step: int
    """Counted from 1."""
    drop: float
    """True fall of the target loss: L(w_t) - L(w_{t+1})."""
    credit: float
    """Sum of the records' credits (own)."""
    residual: float
    """drop - credit = momentum + decay + curvature."""
    momentum: float
    """Effect of older gradients in the optimiser's momentum."""
    decay: float
    """Effect of weight decay."""
    curvature: float
    """drop minus the effect of the whole step along V: what the form misses."""
    curvature_first: float
    """The same for the first order."""
    target_loss: float
    """L(w_t)."""
    lr: float
    """Step size."""
    clip_factor: float
    """Factor on the gradient, 1 when it was not clipped."""
    updated: bool = True
    """False if the loss-spike guard left the update out: every number of the step is then 0."""


@dataclass(frozen=True, slots=True)
class StepCredit:
    """Credits of one step, per segment of its batch."""

    segments: Segments
    """Which record each segment is of."""
    credits_S: dict[Form, NDArray[np.float64]]
    """By form, the main one first."""
    rescaled_S: NDArray[np.float64]
    """Main form, rescaled: sums to `residual.drop`."""
    residual: Residual
    """The books of the step."""
    report: StepReport
    """Training loss, norm and tokens."""


def rescale(
    credit_S: NDArray[np.float64], drop: float, weight_S: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Credits that sum to the true drop, moved in proportion to their size.

    Args:
        credit_S: credits of one step.
        drop: what they must sum to.
        weight_S: shares to use when all credits are zero, such as tokens; not all zero.

    Returns:
        credit + (drop - sum credit) * |credit| / sum |credit|.
    """
    size_S = np.abs(credit_S)
    if not size_S.sum() > 0:
        size_S = weight_S
    # fsum: the promise is an exact sum, so no more rounding than the result itself needs.
    return credit_S + (drop - math.fsum(credit_S)) * (size_S / size_S.sum())


class Ledger:
    """Sums per record and over the run."""

    def __init__(self, plan: BatchPlan, forms: Sequence[Form] = DEFAULT_FORMS) -> None:
        """Empty books.

        Args:
            plan: what the run trains on.
            forms: the credits to keep; the first is the main one.
        """
        self.store, self.forms = plan.store, tuple(forms)
        self.planned_N = plan.order.index_N.astype(np.int64)
        names = (*self.columns_of_credit().values(), "credit_rescaled", "steps_seen", "tokens_seen")
        self.columns = {name: np.zeros(plan.store.size) for name in names}
        self.residuals: list[Residual] = []

    def columns_of_credit(self) -> dict[Form, str]:
        """Form -> column: `credit` for the main one, `credit_FORM` for the others."""
        return {
            form: "credit" if place == 0 else f"credit_{form}"
            for place, form in enumerate(self.forms)
        }

    def add(self, done: StepCredit) -> None:
        """Book one step."""
        index_S = done.segments.index_S
        for form, name in self.columns_of_credit().items():
            np.add.at(self.columns[name], index_S, done.credits_S[form])
        np.add.at(self.columns["credit_rescaled"], index_S, done.rescaled_S)
        np.add.at(self.columns["tokens_seen"], index_S, done.segments.count_S)
        self.columns["steps_seen"][np.unique(index_S)] += 1
        self.residuals.append(done.residual)

    def sums(self) -> dict[str, float]:
        """The books of the whole run: `sum_NAME` for each of `SUMMED`."""
        return {
            f"sum_{name}": math.fsum(getattr(line, name) for line in self.residuals)
            for name in SUMMED
        }

    def parquet(self) -> bytes:
        """influence.parquet: every record of the plan, also those that no step reached (steps_seen 0)."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        index_N = self.planned_N
        columns: dict[str, Any] = {
            "record_id": pa.array([self.store.record_id(int(i)) for i in index_N], pa.binary(32)),
            "index": pa.array(index_N, pa.uint64()),
        }
        for name, values in self.columns.items():
            whole = name in ("steps_seen", "tokens_seen")
            columns[name] = pa.array(values[index_N].astype(np.int64 if whole else np.float64))
        table = pa.table(columns).replace_schema_metadata({"forms": ",".join(self.forms)})
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink)
        return sink.getvalue().to_pybytes()


def residual_line(residual: Residual) -> dict[str, Any]:
    """The line of residuals.jsonl."""
    return asdict(residual)
