"""Do values find what was planted? Area under the curve, with an interval that also holds at 1.

    AUC = P( score of a planted record < score of a clean one ) + P( equal ) / 2

over n planted and m clean records: 1 = every planted record ranks below every clean one, 0.5 = nothing found.
The interval is the set of areas theta that the estimate doesn't contradict,

    (estimate - theta)^2 <= z^2 V(theta),    V = theta (1-theta) [1 + (h-1) ((1-theta)/(2-theta) + theta/(1+theta))] / (m n),   h = (m+n)/2

which unlike estimate +- z se has a width when all planted records are found, and never leaves 0..1.

The planting itself stands here too, so that a study and a test plant alike: *noise* (tokens
drawn uniformly), *shuffled* (a record's own tokens in random order: same unigrams, no sentence) and *duplicated* records.

Source: Hanley and McNeil, Radiology 143 (1982), for V; Newcombe, Stat. Med. 25 (2006), method 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import EvaluationError
from valuation.evaluation import LEVEL, Estimate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def detection_auc(
    score_N: NDArray[np.float64], planted_N: NDArray[np.bool_], level: float = LEVEL
) -> Estimate:
    """How well low scores find planted records.

    Args:
        score_N: value of each record; planted ones should be low. Give the negated score where they should be high.
        planted_N: which were planted.
        level: of the interval.

    Returns:
        The area and its interval.

    Raises:
        EvaluationError: no planted or no clean record, shapes that don't fit, a score that is not finite.
    """
    from scipy.optimize import brentq
    from scipy.stats import norm, rankdata

    planted, clean = int(planted_N.sum()), int((~planted_N).sum())
    if score_N.shape != planted_N.shape or not planted or not clean:
        raise EvaluationError(
            f"expected planted and clean records with one score each, got {planted}, {clean} and {list(score_N.shape)}"
        )
    if not np.isfinite(score_N).all():
        raise EvaluationError("scores: expected finite numbers; leave out records without a score")
    ranks = rankdata(-score_N)
    area = float((ranks[planted_N].sum() - planted * (planted + 1) / 2) / (planted * clean))
    z = float(norm.ppf((1 + level) / 2))
    half = (planted + clean) / 2

    def excess(theta: float) -> float:
        spread = 1 + (half - 1) * ((1 - theta) / (2 - theta) + theta / (1 + theta))
        return (area - theta) ** 2 - z**2 * theta * (1 - theta) * spread / (planted * clean)

    # excess is negative at the estimate and not negative at 0 and 1, where the variance vanishes.
    low = 0.0 if area == 0 else float(brentq(excess, 0.0, min(area, 1 - 1e-12)))
    high = 1.0 if area == 1 else float(brentq(excess, max(area, 1e-12), 1.0))
    return Estimate(area, low, high, level)


def noise_tokens(
    length: int, vocab_size: int, end_of_text: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """A record of uniformly drawn tokens.

    Args:
        length: tokens including the end-of-text.
        vocab_size: ids are drawn from 0..vocab_size-1 without end_of_text.
        end_of_text: the id that ends the record.
        generator: source of randomness.

    Returns:
        Token ids.
    """
    drawn = generator.integers(0, vocab_size - 1, max(0, length - 1))
    drawn += drawn >= end_of_text
    return np.append(drawn, end_of_text)


def shuffled_tokens(
    tokens: Sequence[int] | NDArray[np.int64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """A record's own tokens in random order; the end-of-text stays last."""
    tokens = np.asarray(tokens, dtype=np.int64)
    return np.append(generator.permutation(tokens[:-1]), tokens[-1])
