"""Exact empirical-Fisher influence for few records, by a kernel in place of a matrix of the parameters' size.

    score(q, n) = <(J^T J / N + lam I)^-1 g_q, g_n> = [(K + lam I)^-1 J g_q]_n,       K = J J^T / N  [N, N]

J holds all gradients, [N, parameters]; it is never whole in memory. K costs N^2 products of parameters,
so this is for N up to about 10^4. No Kronecker form, no projection: the oracle of the other methods'
empirical Fisher. It treats all parameters alike with one lam, which EK-FAC's blocks do not.

Source: push-through identity (Woodbury).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GradientError
from valuation.influence.pairing import PASS, finish, gradient_blocks, pair

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

    from valuation.influence.pairing import Pass
    from valuation.influence.scores import Scores, TokenSet

MAX_RECORDS = 20_000
"""K then has 3.2 GB."""


def scores(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    *,
    damping: float = 1.0,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """Empirical-Fisher influence of every record on every query.

    Args:
        model: the trained model.
        train: at most `MAX_RECORDS` records.
        queries: queries, each of 2 or more tokens.
        damping: lam > 0 as a share of the mean diagonal of K (the mean squared norm over N).
        per_token: losses are means over predicted tokens instead of sums.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores, in nats.

    Raises:
        GradientError: damping <= 0, too many records, or see `valuation.influence.pairing`.
    """
    num = len(train.records)
    if not damping > 0:
        raise GradientError(f"damping: expected a number above 0, such as 1, got {damping}")
    if num > MAX_RECORDS:
        raise GradientError(
            f"records: expected at most {MAX_RECORDS}, got {num}; use ekfac or logra"
        )
    kernel_NN, cross_QN = np.zeros((num, num)), np.zeros((len(queries.records), num))
    live_N = np.flatnonzero(
        train.labels_N
    )  # the others have no gradient: rows and columns of zeros
    for places, left in gradient_blocks(model, train.take(live_N), how):
        kernel_NN[live_N[places]], _ = pair(model, train, left, how)
    for places, left in gradient_blocks(model, queries, how):
        cross_QN[places], _ = pair(model, train, left, how)
    scores_QN = solved(kernel_NN, cross_QN, damping)
    return finish(
        scores_QN, f"fisher(damping={damping:g})", model, train, queries, per_token=per_token
    )


def solved(
    products_NN: NDArray[np.float64], cross_QN: NDArray[np.float64], damping: float
) -> NDArray[np.float64]:
    """The scores of all inner products.

    Args:
        products_NN: <g_n, g_m>; symmetric but for rounding.
        cross_QN: <g_q, g_n>.
        damping: see `scores`.

    Returns:
        scores_QN.
    """
    num = len(products_NN)
    kernel_NN = (products_NN + products_NN.T) / (2 * num)
    lam = damping * float(np.trace(kernel_NN)) / num
    solved_NQ = np.linalg.solve(kernel_NN + lam * np.eye(num), cross_QN.T)
    return solved_NQ.T.astype(np.float64)
