"""TracIn: gradient dot products summed over the checkpoints of a training.

    score(q, n) = sum_c lr_c <g_q(w_c), g_n(w_c)>

Each term is what a step of plain gradient descent on n at checkpoint c would have taken off q's loss. A
trajectory sees records that mattered early; Adam's preconditioner, momentum and curvature are ignored.

Source: arXiv 2002.08484, eq. 3 (TracInCP).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GradientError
from valuation.influence.pairing import PASS, as_cosines, finish, gradient_blocks, pair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from valuation.influence.pairing import Pass
    from valuation.influence.scores import Scores, TokenSet


def scores(
    checkpoints: Sequence[nn.Module],
    train: TokenSet,
    queries: TokenSet,
    *,
    weights: Sequence[float],
    cosine: bool = False,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """Influence along a trajectory.

    Args:
        checkpoints: models, in the order of training.
        train: records.
        queries: queries, each of 2 or more tokens.
        weights: one number per checkpoint, its learning rate (times the steps that it stands for).
        cosine: divide each dot product by both norms.
        per_token: losses are means over predicted tokens instead of sums; without effect on cosines.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores, in nats for learning rates of plain gradient descent.

    Raises:
        GradientError: no checkpoint, or another number of weights.
    """
    if not checkpoints or len(checkpoints) != len(weights):
        raise GradientError(
            f"checkpoints: expected at least one and a weight for each, got {len(checkpoints)} and {len(weights)}"
        )
    total_QN = np.zeros((len(queries.records), len(train.records)))
    for model, weight in zip(checkpoints, weights, strict=True):
        for places, left in gradient_blocks(model, queries, how):
            dots_QN, squares_N = pair(model, train, left, how, norms=cosine)
            total_QN[places] += weight * (
                as_cosines(dots_QN, left, squares_N) if cosine else dots_QN
            )
    method = f"tracin(checkpoints={len(checkpoints)}{', cosine' if cosine else ''})"
    return finish(
        total_QN, method, list(checkpoints), train, queries, per_token=per_token and not cosine
    )
