"""How fast the intervals of owners close as coalitions are trained, replayed from the bank.

The bank holds every utility that was paid for. Taking its orders of arrival one pair after another gives, for each number of
orders m, what a run that had stopped there would have published: values, intervals, and the distinct coalitions it would have
trained. Where all 2^n coalitions are known, orders are drawn for the replay (without their reverses, which would know all of
a small game at once) and the exact value ends the curve.

    half(m)² = t² (Var over target records and seeds + Var over orders / m)

so the curve falls to what the target's records and the seeds leave, which no further coalition can narrow (another seed
can). Every seed has trained every coalition, so a point's calls are coalitions, not trainings.

Shapes: K lots, O owners, Q target records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.lots import lot_gains, owner_intervals
from valuation.orders import Orders, coalitions_needed, sample_orders

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

MAX_POINTS = 10
REPLAYED_ORDERS = 16


@dataclass(frozen=True, slots=True)
class Convergence:
    """Interval widths by number of trained coalitions, in nats per target token."""

    calls: tuple[int, ...]
    """Distinct coalitions trained, ascending."""
    mean_width: tuple[float, ...]
    """Mean over owners of upper minus lower end."""
    worst_width: tuple[float, ...]
    """Of the owner with the widest interval."""


def convergence(
    nll: Mapping[int, ArrayLike],
    num_lots: int,
    tokens_OK: NDArray[np.int64],
    tokens_Q: ArrayLike,
    orders: Orders | None,
    generator: np.random.Generator,
) -> Convergence:
    """Replay a valuation.

    Args:
        nll: bitmask → summed nats per target record, [Q] or of several seeds [S, Q], all that were trained.
        num_lots: K.
        tokens_OK: tokens of each owner in each lot.
        tokens_Q: scored tokens of each target record.
        orders: the orders that were sampled, or None where all coalitions are known.
        generator: draws the orders of a replay where all coalitions are known.

    Returns:
        At most `MAX_POINTS` + 1 points; the last is what was published.

    Raises:
        UtilityError: a coalition is missing or not finite.
    """
    drawn = orders or sample_orders(num_lots, REPLAYED_ORDERS, generator, antithetic=False)
    step = 2 if drawn.antithetic else 1
    counts = np.unique(
        np.geomspace(2 * step, len(drawn.orders_Mn), MAX_POINTS).astype(int) // step * step
    )
    found: dict[int, tuple[float, float]] = {}
    for count in counts.tolist():
        if count > len(drawn.orders_Mn):
            continue
        prefix = Orders(drawn.orders_Mn[:count], drawn.antithetic)
        calls = len(coalitions_needed(num_lots, prefix))
        found[calls] = _widths(nll, num_lots, tokens_OK, tokens_Q, prefix)
    if orders is None:
        found[1 << num_lots] = _widths(nll, num_lots, tokens_OK, tokens_Q, None)
    ordered = sorted(found)
    return Convergence(
        tuple(ordered), tuple(found[c][0] for c in ordered), tuple(found[c][1] for c in ordered)
    )


def _widths(
    nll: Mapping[int, ArrayLike], num_lots: int, tokens_OK: NDArray[np.int64], tokens_Q: ArrayLike, orders: Orders | None
) -> tuple[float, float]:  # fmt: skip
    gains_KQ, variance_K = lot_gains(nll, num_lots, orders, tokens_Q)
    found = owner_intervals(gains_KQ, tokens_OK, tokens_Q, order_variance_K=variance_K)
    width_O = found.ci_high_n - found.ci_low_n
    return float(width_O.mean()), float(width_O.max())
