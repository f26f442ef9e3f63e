"""TRAK: ridge regression on projected gradients, averaged over models.

    tau(q, n) = mean_models phi_q^T (Phi^T Phi + lam I)^-1 phi_n          phi = P grad(summed loss)

For a language model the loss's gradient takes the place of the model output's, and the paper's factor
(1 - p_n) is 1. The ridge is not optional: with k above the number of records the inverse doesn't exist,
and a peer whose default is lam = 0 scored .02 in agreement with retraining where a ridge gives .27.

What it costs in accuracy: projections blur; EK-FAC keeps every coordinate. It is cheap per model, so the
paper averages tens of them.

Source: TRAK arXiv 2303.14186, eq. 17; language models: section 5.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GradientError
from valuation.influence.features import features, ridge_products
from valuation.influence.pairing import PASS, finish, query_check
from valuation.projection import OneSided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from valuation.influence.pairing import Pass
    from valuation.influence.scores import Scores, TokenSet


def scores(
    models: Sequence[nn.Module],
    train: TokenSet,
    queries: TokenSet,
    *,
    projection: OneSided | None = None,
    ridge: float = 0.1,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """TRAK influence of every record on every query.

    Args:
        models: one or more models trained on the records (other seeds or subsets).
        train: records.
        queries: queries, each of 2 or more tokens.
        projection: None = sparse, seed 0, 1024 numbers per record.
        ridge: lam as a share of the mean diagonal of Phi^T Phi.
        per_token: losses are means over predicted tokens instead of sums.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores without unit.

    Raises:
        GradientError: no model, k > N without ridge, or see `valuation.influence.pairing`.
    """
    query_check(queries)
    if not models:
        raise GradientError("models: expected at least one, got none")
    given = projection or OneSided(seed=0, size=1024)
    total_QN = np.zeros((len(queries.records), len(train.records)))
    for model in models:
        phi_Nk = features(model, train, given, how)["all"]
        total_QN += ridge_products(features(model, queries, given, how)["all"], phi_Nk, ridge)
    method = f"trak(models={len(models)}, k={given.size}, kind={given.kind}, seed={given.seed}, ridge={ridge:g})"
    return finish(total_QN / len(models), method, list(models), train, queries, per_token=per_token)
