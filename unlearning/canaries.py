"""Lower bounds from guesses: how much privacy was certainly lost, from one run and from shadow models.

**One run** (Steinke et al.). Each of m canaries is in or out of the training set by a fair coin of its own. The auditor makes r guesses and
has v right. Under (eps, 0)-differential privacy v is at most as large as a binomial with success chance e^eps / (1 + e^eps)::

    eps_lb = largest eps with P[Bin(r, e^eps / (1 + e^eps)) >= v] <= alpha

All right at alpha = 0.05: r = 32 gives 2.3, 64 gives 3.03, 128 gives 3.74; no run can show more. Choosing r by looking needs a
Bonferroni factor (`epsilon_from_scores` has it). Coins that were committed to before the training are thrown by `coins`; a fixed
forgotten/look-alike cut is no set of coins: the bound is then indicative, and says so where it is printed.

**U-LiRA** (Hayes et al.). With S shadow models that trained on a record and unlearned it, and S that never saw it, the confidence
phi = log(p / (1 - p)) of the record is normal in both worlds; the evidence that it was in is the log likelihood ratio

    Lambda = log N(phi; mu_unlearned, sigma_unlearned) - log N(phi; mu_gold, sigma_gold)

per record: attacks on the whole population overstate protection.

Sources: Steinke, Nasr, Jagielski, NeurIPS 2023, arXiv 2305.08846, theorem 5.2 with delta = 0; Hayes et al., arXiv 2403.01218, section 4.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from unlearning.statistics import ALPHA

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

MAX_EPSILON = 50.0  # above this no number of guesses in this project could tell


@lru_cache(maxsize=4096)  # an audit asks for the same few counts again and again
def one_run_epsilon(right: int, guesses: int, alpha: float = ALPHA) -> float:
    """Largest epsilon that so many right guesses refute.

    Args:
        right: right guesses v, 0 ≤ v ≤ r.
        guesses: guesses r ≥ 1.
        alpha: chance of saying too much.

    Returns:
        Lower bound on epsilon, ≥ 0; 0 = nothing was shown.

    Raises:
        ValueError: for impossible counts.

    Source: arXiv 2305.08846, theorem 5.2 with delta = 0.
    """
    if not 0 <= right <= guesses or guesses < 1:
        raise ValueError(f"expected 0 <= right <= guesses and guesses >= 1, got {right}, {guesses}")

    def refuted(epsilon: float) -> bool:
        return bool(stats.binom.sf(right - 1, guesses, 1.0 / (1.0 + math.exp(-epsilon))) <= alpha)

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, MAX_EPSILON
    for _ in range(60):  # the chance rises with epsilon, so that bisection finds the border
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def epsilon_from_scores(
    in_N: NDArray[np.float64],
    out_M: NDArray[np.float64],
    budgets: Sequence[int],
    alpha: float = ALPHA,
) -> float:
    """Best bound over several numbers of guesses, with their Bonferroni factor.

    Args:
        in_N: scores of canaries that were in; higher = more like a member.
        out_M: scores of canaries that were out.
        budgets: even numbers r of guesses: the r/2 highest scores are guessed in, the r/2 lowest out.
        alpha: chance of saying too much, over all budgets together.

    Returns:
        Lower bound on epsilon, ≥ 0.

    Raises:
        ValueError: for a budget that is odd, or larger than the number of canaries.
    """
    score = np.concatenate([in_N, out_M])
    is_in = np.arange(len(score)) < len(in_N)
    # Ties are broken against the auditor: an out canary first among the highest, an in canary first among the lowest.
    highest = np.lexsort((is_in, -score))
    lowest = np.lexsort((~is_in, score))
    best = 0.0
    for guesses in budgets:
        if guesses % 2 or not 2 <= guesses <= len(score):
            raise ValueError(f"expected even budgets of 2 to {len(score)}, got {guesses}")
        half = guesses // 2
        right = int(is_in[highest[:half]].sum() + (~is_in[lowest[:half]]).sum())
        best = max(best, one_run_epsilon(right, guesses, alpha / len(budgets)))
    return best


def shadow_evidence(
    observed_N: NDArray[np.float64],
    unlearned_SN: NDArray[np.float64],
    gold_SN: NDArray[np.float64],
) -> NDArray[np.float64]:
    """U-LiRA's evidence that each record was trained on and unlearned.

    Args:
        observed_N: chance p in (0, 1) of each record under the model at hand.
        unlearned_SN: the same under shadow models that trained on the record and unlearned it, S ≥ 2.
        gold_SN: under shadow models that never saw it, S ≥ 2.

    Returns:
        Log likelihood ratio per record, nats; above 0 = more like unlearned than like never seen.

    Raises:
        ValueError: for fewer than two shadow models of a kind, or other shapes.

    Source: arXiv 2403.01218, algorithm 1.
    """
    shapes = {unlearned_SN.shape[1:], gold_SN.shape[1:], observed_N.shape}
    if min(len(unlearned_SN), len(gold_SN)) < 2 or len(shapes) != 1:
        raise ValueError("expected at least two shadow models of each kind, over the same records")
    phi_N, in_SN, out_SN = (_logit(values) for values in (observed_N, unlearned_SN, gold_SN))
    likelihoods = []
    for shadow_SN in (in_SN, out_SN):
        # Two shadow models that agree by chance would make a spike; the floor is a hundredth of a nat.
        spread_N = np.maximum(shadow_SN.std(0, ddof=1), 0.01)
        likelihoods.append(stats.norm.logpdf(phi_N, shadow_SN.mean(0), spread_N))
    return likelihoods[0] - likelihoods[1]


def rate_at(
    in_N: NDArray[np.float64], out_M: NDArray[np.float64], false_rate: float = 0.01
) -> float:
    """True positive rate at a small false positive rate.

    Args:
        in_N: evidence on records that were in; higher = more like in.
        out_M: evidence on records that were out.
        false_rate: largest share of out records above the threshold.

    Returns:
        Share of in records above that threshold, in [0, 1].
    """
    allowed = int(false_rate * len(out_M))
    threshold = np.sort(out_M)[::-1][allowed]
    return float((in_N > threshold).mean())


def _logit(chance: NDArray[np.float64]) -> NDArray[np.float64]:
    kept = np.clip(chance, 1e-12, 1.0 - 1e-12)
    return np.log(kept) - np.log1p(-kept)
