"""Values of lots held against their own bank, at no training: each lot left out, lots added by value, seeds against each other.

The bank holds the loss L(S) of every coalition S of K lots under every seed. So these are measured, not foretold:

    left out_k = L(all without k) - L(all)                    what the buyer would lose without that lot, the others there
    path of an order: L(nobody), L(first), L(first two), ...   by value, the most valued first or last
    mean over all orders at size s: the mean of L over the coalitions of s lots, because each stands at that place equally often

A path by value that doesn't fall faster than the mean of all orders says that the values order nothing. Removal by value is the same path, read from
its other end: without the s least valued is the path of the most valued at K - s.

What it isn't: left out is not what a lot is worth to be paid (copies leave each other nothing), and lots are few, so that a rank correlation over them is
coarse: over six lots the least step is 0.06, and by chance alone one of 0.83 or more comes in 3 % of all orders.

Shapes: S seeds, K lots, Q target records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.evaluation import Stability, spearman_rows, stability
from valuation.intervals import checked_tokens
from valuation.lots import owner_intervals
from valuation.seeds import by_seed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from valuation.intervals import GroupValues

    Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LotChecks:
    """What a whole bank says of the values that were taken from it."""

    left_out: GroupValues
    """Loss without each lot less the loss of all, with its interval over target records and seeds."""
    rank_correlation: float
    """Spearman of values and `left_out` over lots."""
    best_first: tuple[float, ...]
    """Loss with the 0, 1, ... K most valued lots, nats per target token."""
    worst_first: tuple[float, ...]
    """The same of the least valued."""
    mean_order: tuple[float, ...]
    """Mean over all orders."""
    over_seeds: Stability | None
    """Agreement of the seeds' own values; None of one seed."""


def lot_checks(
    nll: Mapping[int, ArrayLike], values_SK: ArrayLike, tokens_Q: ArrayLike
) -> LotChecks:
    """Hold values against the bank that they come from.

    Args:
        nll: bitmask → summed nats per target record, [Q] of one seed or [S, Q] of several; all 2^K coalitions.
        values_SK: value of each lot under each seed, [S, K], K at least 2.
        tokens_Q: scored tokens of each target record, Q at least 2.

    Returns:
        The checks.

    Raises:
        UtilityError: a coalition is missing, fewer than two lots, or shapes that don't fit.
    """
    values_SK = np.atleast_2d(np.asarray(values_SK, np.float64))
    seeds, num = by_seed(nll), values_SK.shape[1]
    everybody = (1 << num) - 1
    if num < 2 or set(nll) != set(range(1 << num)) or len(seeds) != len(values_SK):
        raise UtilityError(
            f"expected all coalitions of 2 or more lots under each of {len(values_SK)} seeds, got {len(nll)} coalitions of {num} lots under {len(seeds)}"
        )
    tokens_Q = checked_tokens(tokens_Q, len(seeds[0][0]))
    gains_SKQ = np.array(
        [[loss[everybody ^ 1 << lot] - loss[everybody] for lot in range(num)] for loss in seeds]
    )
    left_out = owner_intervals(
        gains_SKQ if len(seeds) > 1 else gains_SKQ[0], np.eye(num, dtype=np.int64), tokens_Q, method="left out"
    )  # fmt: skip
    loss = {mask: float(np.mean([one[mask].sum() for one in seeds]) / tokens_Q.sum()) for mask in nll}  # fmt: skip
    value_K = values_SK.mean(axis=0)
    order = np.argsort(-value_K, kind="stable").tolist()
    of_size = [[loss[mask] for mask in loss if mask.bit_count() == size] for size in range(num + 1)]
    return LotChecks(
        left_out=left_out,
        rank_correlation=float(spearman_rows(value_K[None], left_out.values_n[None])[0]),
        best_first=_path(loss, order),
        worst_first=_path(loss, order[::-1]),
        mean_order=tuple(float(np.mean(losses)) for losses in of_size),
        over_seeds=stability(values_SK) if len(seeds) > 1 else None,
    )


def _path(loss: Mapping[int, float], order: Sequence[int]) -> tuple[float, ...]:
    """Losses as lots are added in an order."""
    mask, found = 0, [loss[0]]
    for lot in order:
        mask |= 1 << lot
        found.append(loss[mask])
    return tuple(found)
