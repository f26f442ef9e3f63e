"""Gradient dot product and cosine: H is the identity.

    dot(q, n)    = <g_q, g_n>                       one step on n lowers q's loss by lr times this
    cosine(q, n) = <g_q, g_n> / (|g_q| |g_n|)       the same, whatever the sizes of the gradients

What they don't show: that a direction along which the loss is steeply curved is soon used up. EK-FAC
does, and is much nearer to retraining.

Source: TracIn with one checkpoint, arXiv 2002.08484, eq. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.influence.pairing import PASS, as_cosines, finish, gradient_blocks, pair

if TYPE_CHECKING:
    from torch import nn

    from valuation.influence.pairing import Pass
    from valuation.influence.scores import Scores, TokenSet


def scores(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    *,
    cosine: bool = False,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """Dot products, or cosines, of every query's and every record's gradient.

    Args:
        model: the trained model.
        train: records.
        queries: queries, each of 2 or more tokens.
        cosine: divide by both norms; a record without gradient has cosine 0.
        per_token: losses are means over predicted tokens instead of sums; without effect on cosines.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores in nats^2 per squared weight, or cosines.

    Raises:
        GradientError: see `valuation.influence.pairing` and `valuation.capture`.
    """
    scores_QN = np.zeros((len(queries.records), len(train.records)))
    for places, left in gradient_blocks(model, queries, how):
        dots_QN, squares_N = pair(model, train, left, how, norms=cosine)
        if cosine:
            dots_QN = as_cosines(dots_QN, left, squares_N)
        scores_QN[places] = dots_QN
    method = "cosine" if cosine else "dot"
    return finish(scores_QN, method, model, train, queries, per_token=per_token and not cosine)
