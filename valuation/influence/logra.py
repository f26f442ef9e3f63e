"""LoGra: influence in a two-sided random low-rank space, one block per parameter.

    Phi_l = P_o G_l P_i^T [k_o, k_i],   F_l = (1/N) sum_n vec(Phi_l) vec(Phi_l)^T
    tau(q, n) = sum_l phi_q,l^T (F_l + c mean diag(F_l) I)^-1 phi_n,l

Gradients are never formed, and a record keeps k_o k_i numbers per layer, so features can be kept for
millions of records and any later query. Accuracy is between gradient dot and EK-FAC.

Source: arXiv 2405.13954, section 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GradientError
from valuation.influence.features import features, ridge_products
from valuation.influence.pairing import PASS, finish, query_check
from valuation.projection import TwoSided

if TYPE_CHECKING:
    from torch import nn

    from valuation.influence.pairing import Pass
    from valuation.influence.scores import Scores, TokenSet


def scores(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    *,
    projection: TwoSided | None = None,
    damping: float = 0.1,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """Low-rank influence of every record on every query.

    Args:
        model: the trained model.
        train: records.
        queries: queries, each of 2 or more tokens.
        projection: None = seed 0, 16 by 16.
        damping: c > 0, as a share of each block's mean diagonal.
        per_token: losses are means over predicted tokens instead of sums.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores, in nats.

    Raises:
        GradientError: damping <= 0, or see `valuation.influence.pairing`.
    """
    query_check(queries)
    if not damping > 0:
        raise GradientError(f"damping: expected a number above 0, such as 0.1, got {damping}")
    given = projection or TwoSided(seed=0)
    phi_N, phi_Q = features(model, train, given, how), features(model, queries, given, how)
    total_QN = np.zeros((len(queries.records), len(train.records)))
    for name in sorted(phi_N):
        if phi_N[name].any():  # an expert that no record visits has no curvature and no influence
            total_QN += len(train.records) * ridge_products(phi_Q[name], phi_N[name], damping)
    method = f"logra(k={given.rows}x{given.columns}, seed={given.seed}, damping={damping:g})"
    return finish(total_QN, method, model, train, queries, per_token=per_token)
