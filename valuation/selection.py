"""Values become sampling weights: how often a record should stand in an epoch, given what it is worth.

    drop-negative    w_i = 0 if v_i < 0, else 1
    by-value         w_i = min(CAP, v_i+ / mean of v+),  v+ = max(v, 0), the mean over records with a value

A record without a value (no batch of the valuing run held it) has weight 1: not knowing is no verdict. Weights are
integer millionths from integer nano-values, rounded down, so the same values give the same weights on any machine.

When it is wrong: values are of one target and one small model, and in-run credit is first order. Sampling by them
follows their noise too; the cap bounds how far. Whether it helps is for an evaluation on other held-out records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from valuation.errors import ResultError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rule = Literal["drop-negative", "by-value"]

MICRO: Final = 1_000_000
"""Weight of a record that stands once per epoch."""
CAP: Final = 4
"""Most times that by-value has a record stand in an epoch: what is seen more often is memorised, not learned."""


def selection_weights(
    value_nano_N: NDArray[np.int64], known_N: NDArray[np.bool_], rule: Rule
) -> NDArray[np.int64]:
    """Weights of records from their values.

    Args:
        value_nano_N: value of each record in nano-units; positive helps. Ignored where not known.
        known_N: whether a record has a value.
        rule: drop-negative or by-value.

    Returns:
        int64 [N] weights in millionths, 0..CAP * MICRO.

    Raises:
        ResultError: an unknown rule, or no record is worth anything.
    """
    if rule not in ("drop-negative", "by-value"):
        raise ResultError(f"selection: expected drop-negative or by-value, got {rule!r}")
    value_N = np.where(known_N, value_nano_N, 0)
    if rule == "drop-negative":
        weight_N = np.where(value_N < 0, 0, MICRO)
    else:
        positive_N = np.maximum(value_N, 0)
        total, count = int(positive_N.sum()), int(known_N.sum())
        # Python integers: value * count * MICRO doesn't fit into 64 bits.
        shares = [min(CAP * MICRO, int(v) * count * MICRO // max(total, 1)) for v in positive_N]
        weight_N = np.where(known_N, np.array(shares, dtype=np.int64), MICRO)
    if not weight_N.any():
        raise ResultError(
            f"selection: no record would be left by {rule!r}: all {len(value_N)} values are negative or 0; "
            "train on all records instead"
        )
    return weight_N.astype(np.int64)
