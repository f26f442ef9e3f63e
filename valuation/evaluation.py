"""How good are values? Against models that were really retrained.

*Linear datamodeling score* of scores tau_QN, with M subsets S_m and their measured losses:

    LDS_q = Spearman over m of ( sum_{i in S_m} tau_qi ,  - loss_qm )        LDS = mean over q of LDS_q

1 = the order of all retrainings is foretold; 0 = nothing is. Leaving out single records is no truth to
hold against: for a network one record's effect is less than the noise of a retraining.
*The target as a whole*: scores and losses are summed over queries before they are ranked, one correlation in place of Q.

*Interval*: queries and subsets are both drawn, so both are resampled (with replacement, independently),
and the LDS is computed anew from the drawn rows and columns. An interval over queries alone says nothing
about other subsets and is too short. Two methods are compared on the *same* draws (`lds_difference`).

*Ceiling*: a retraining with another seed has other losses. Let r be the split-half reliability: the
seeds are halved, losses averaged in each half, r_q = Spearman of the halves over subsets, and
Spearman and Brown's 2 r / (1 + r) carries it from half of the seeds to all. Scores that knew the expected loss exactly would
reach sqrt(r_q) on query q, so mean_q sqrt(r_q), for which sqrt(r) is an upper bound: met where queries are equally noisy, loose where
they differ (half of them pure noise: 0.71 against 0.50). The bound is taken because sqrt of a noisy r_q is biased and r isn't. It is one
of expectations: in a sample scores may pass it, and a score that follows one run's own path can on that run's losses. Where scores are held against the losses of *one* seed, the ceiling is sqrt(r_1) with
r_1 the mean rank correlation of two seeds and nothing carried anywhere (`ceiling_one`): lower, because one seed is noisier than a mean.

*Values with an interval* (`record_values`): the mean over queries of a record's score is its value to this
target, with a Student interval over queries. A value is *distinct* from zero only if it
survives Holm's correction over all records: of 1,000 worthless records, 50 would look helpful at 95 %.

Legend: Q queries, N records, M subsets, B draws, R seeds.

Source: LDS, TRAK, arXiv 2303.14186 section 2; two-way resampling: Owen, "The pigeonhole bootstrap", Ann. Appl.
Stat. 1 (2007), which proves it conservative; Holm, Scand. J. Stat. 6 (1979).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import EvaluationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its interval."""

    estimate: float
    """Point estimate."""
    low: float
    """Lower end."""
    high: float
    """Upper end."""
    level: float = LEVEL
    """Coverage that the interval is made for."""

    @property
    def distinct(self) -> bool:
        """Whether the interval excludes 0; if not, the number is not distinguishable from zero."""
        return not self.low <= 0 <= self.high


def spearman_rows(x_QM: NDArray[np.float64], y_QM: NDArray[np.float64]) -> NDArray[np.float64]:
    """Spearman correlation of each row, with mean ranks for ties.

    Args:
        x_QM: one number per query and subset.
        y_QM: the same shape.

    Returns:
        rho_Q; 0 where a row is constant, since it orders nothing.
    """
    from scipy.stats import rankdata

    def centred(values_QM: NDArray[np.float64]) -> NDArray[np.float64]:
        ranks_QM = rankdata(values_QM, axis=1)
        return np.asarray(ranks_QM - ranks_QM.mean(1, keepdims=True))

    a_QM, b_QM = centred(x_QM), centred(y_QM)
    norm_Q = np.sqrt((a_QM**2).sum(1) * (b_QM**2).sum(1))
    return np.asarray((a_QM * b_QM).sum(1) / np.where(norm_Q > 0, norm_Q, 1.0))


def agreement(
    x_QM: NDArray[np.float64], y_QM: NDArray[np.float64], *, whole: bool = False
) -> NDArray[np.float64]:
    """Spearman correlation over subsets, of each query or of the target as a whole.

    Args:
        x_QM: one number per query and subset.
        y_QM: the same shape.
        whole: add up queries first.

    Returns:
        rho_Q, or one number.
    """
    if whole:
        x_QM, y_QM = x_QM.sum(0, keepdims=True), y_QM.sum(0, keepdims=True)
    return spearman_rows(x_QM, y_QM)


def predicted(scores_QN: NDArray[np.float64], member_MN: NDArray[np.bool_]) -> NDArray[np.float64]:
    """What scores foretell for subsets: the sum of the scores of a subset's records.

    Args:
        scores_QN: positive = training on the record lowers the query's loss.
        member_MN: which records each subset has.

    Returns:
        predicted_QM.

    Raises:
        EvaluationError: shapes that don't fit, or a score that is not finite.
    """
    if scores_QN.ndim != 2 or member_MN.ndim != 2 or scores_QN.shape[1] != member_MN.shape[1]:
        raise EvaluationError(
            f"scores and subsets: expected [Q, N] and [M, N], got {list(scores_QN.shape)} and {list(member_MN.shape)}"
        )
    if not np.isfinite(scores_QN).all():
        query, record = np.argwhere(~np.isfinite(scores_QN))[0]
        raise EvaluationError(
            f"scores: expected finite numbers, got {scores_QN[query, record]} for query {query} and record {record}; "
            "a score that could not be computed must be left out with its record, not guessed"
        )
    return np.asarray(scores_QN @ member_MN.T.astype(np.float64))


def _checked(
    scores_QN: NDArray[np.float64], member_MN: NDArray[np.bool_], loss_MQ: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    told_QM = predicted(scores_QN, member_MN)
    if loss_MQ.shape != told_QM.T.shape:
        raise EvaluationError(
            f"losses: expected [M, Q] = {list(told_QM.T.shape)}, got {list(loss_MQ.shape)}"
        )
    if min(told_QM.shape) < 2:
        raise EvaluationError(
            f"expected at least 2 queries and 2 subsets, got {told_QM.shape[0]} and {told_QM.shape[1]}"
        )
    if not np.isfinite(loss_MQ).all():
        raise EvaluationError(
            "losses: expected finite numbers; a retraining diverged, look at its run"
        )
    return told_QM, -loss_MQ.T


@dataclass(frozen=True, slots=True)
class DatamodelingScore:
    """LDS with its interval and its parts."""

    lds: Estimate
    """Mean over queries."""
    lds_Q: NDArray[np.float64]
    """Of each query."""
    num_subsets: int
    """M."""


def lds(
    scores_QN: NDArray[np.float64],
    member_MN: NDArray[np.bool_],
    loss_MQ: NDArray[np.float64],
    generator: np.random.Generator,
    draws: int = 1000,
    level: float = LEVEL,
    *,
    whole: bool = False,
) -> DatamodelingScore:
    """Linear datamodeling score with a bootstrap over queries and subsets.

    Args:
        scores_QN: positive = training on the record lowers the query's loss.
        member_MN: which records each subset has.
        loss_MQ: measured loss of each query after retraining on each subset.
        generator: source of randomness of the bootstrap.
        draws: number of bootstrap draws.
        level: of the interval.
        whole: rank the sums over queries, losses then in summed nats; `lds_Q` has one entry.

    Returns:
        The score, its interval and the score of each query.

    Raises:
        EvaluationError: shapes that don't fit, fewer than 2 queries or subsets, a number that is not finite.
    """
    told_QM, truth_QM = _checked(scores_QN, member_MN, loss_MQ)
    lds_Q = agreement(told_QM, truth_QM, whole=whole)
    drawn_B = np.array(
        [
            agreement(told_QM[rows][:, columns], truth_QM[rows][:, columns], whole=whole).mean()
            for rows, columns in _draws(told_QM, draws, generator)
        ]
    )
    return DatamodelingScore(
        lds=_percentile(float(lds_Q.mean()), drawn_B, level),
        lds_Q=lds_Q,
        num_subsets=len(member_MN),
    )


def lds_difference(
    scores_QN: NDArray[np.float64],
    other_QN: NDArray[np.float64],
    member_MN: NDArray[np.bool_],
    loss_MQ: NDArray[np.float64],
    generator: np.random.Generator,
    draws: int = 1000,
    level: float = LEVEL,
) -> Estimate:
    """How much higher the LDS of `scores_QN` is than that of `other_QN`, on the same draws.

    Args:
        scores_QN: the one method.
        other_QN: the other method.
        member_MN: which records each subset has.
        loss_MQ: measured losses.
        generator: source of randomness.
        draws: number of bootstrap draws.
        level: of the interval.

    Returns:
        The difference; two methods are called different only if it is `distinct`.

    Raises:
        EvaluationError: see `lds`.
    """
    one_QM, truth_QM = _checked(scores_QN, member_MN, loss_MQ)
    two_QM, _ = _checked(other_QN, member_MN, loss_MQ)

    def difference(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> float:
        truth = truth_QM[rows][:, columns]
        one, two = (spearman_rows(x[rows][:, columns], truth).mean() for x in (one_QM, two_QM))
        return float(one - two)

    everything = np.arange(len(one_QM)), np.arange(one_QM.shape[1])
    drawn_B = np.array([difference(*picked) for picked in _draws(one_QM, draws, generator)])
    return _percentile(difference(*everything), drawn_B, level)


def _draws(
    like_QM: NDArray[np.float64], draws: int, generator: np.random.Generator
) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    num_queries, num_subsets = like_QM.shape
    return [
        (
            generator.integers(0, num_queries, (num_queries,)),
            generator.integers(0, num_subsets, (num_subsets,)),
        )
        for _ in range(draws)
    ]


def _percentile(estimate: float, drawn_B: NDArray[np.float64], level: float) -> Estimate:
    low, high = np.quantile(drawn_B, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(estimate, float(low), float(high), level)


@dataclass(frozen=True, slots=True)
class Reliability:
    """How far losses of retrainings agree with themselves under other seeds."""

    split_half: Estimate
    """Mean over queries of the halves' rank correlation, carried to all seeds; interval over queries and subsets."""
    ceiling: Estimate
    """sqrt of it: an upper bound of the expected LDS, on the mean over all seeds, of scores that know the expected loss exactly."""
    ceiling_one: Estimate
    """The same on the losses of one seed: sqrt of the mean rank correlation over all pairs of seeds, >= 0."""


def reliability(
    loss_RMQ: NDArray[np.float64],
    generator: np.random.Generator,
    draws: int = 1000,
    level: float = LEVEL,
    *,
    whole: bool = False,
) -> Reliability:
    """Split-half reliability of the losses over seeds; see the module docstring.

    Args:
        loss_RMQ: the same subsets retrained with R >= 2 seeds; with R odd, the last seed is left out of the halves.
        generator: source of randomness of the bootstrap.
        draws: number of bootstrap draws.
        level: of the intervals.
        whole: of the losses summed over queries.

    Returns:
        Reliability of the mean over seeds, its ceiling, and that of one seed.

    Raises:
        EvaluationError: fewer than two seeds.
    """
    if loss_RMQ.ndim != 3 or len(loss_RMQ) < 2:
        raise EvaluationError(
            f"losses: expected [R, M, Q] with at least 2 seeds, got {list(loss_RMQ.shape)}"
        )
    loss_RQM = loss_RMQ.transpose(0, 2, 1)
    paired = loss_RQM[: 2 * (len(loss_RQM) // 2)]
    first, second = np.triu_indices(len(loss_RQM), 1)

    def found(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> tuple[float, float]:
        seeds = [loss[rows][:, columns] for loss in loss_RQM]
        one = [
            agreement(seeds[a], seeds[b], whole=whole).mean()
            for a, b in zip(first, second, strict=True)
        ]
        r = float(one[0])
        if len(seeds) > 2:
            half, other = (paired[start::2].mean(0)[rows][:, columns] for start in (0, 1))
            r = float(agreement(half, other, whole=whole).mean())
        return 2 * r / (1 + r) if r > -1 else -1.0, float(np.mean(one))

    everything = np.arange(loss_RQM.shape[1]), np.arange(loss_RQM.shape[2])
    drawn_B2 = np.array([found(*picked) for picked in _draws(loss_RQM[0], draws, generator)])
    halves, one = (
        _percentile(estimate, drawn_B2[:, place], level)
        for place, estimate in enumerate(found(*everything))
    )
    return Reliability(halves, ceiling=_root(halves), ceiling_one=_root(one))


def _root(share: Estimate) -> Estimate:
    """Square root of an estimate and its ends; below 0 it is 0."""
    value, low, high = (max(0.0, end) ** 0.5 for end in (share.estimate, share.low, share.high))
    return Estimate(value, low, high, share.level)


@dataclass(frozen=True, slots=True)
class RecordValues:
    """Values of records to one target, each with an interval over its queries."""

    value_N: NDArray[np.float64]
    """Weighted mean over queries of the record's score."""
    se_N: NDArray[np.float64]
    """Standard error over queries."""
    low_N: NDArray[np.float64]
    """Lower end of each record's own interval."""
    high_N: NDArray[np.float64]
    """Upper end."""
    distinct_N: NDArray[np.bool_]
    """False = not distinguishable from zero, after Holm's correction over all records."""


def record_values(
    scores_QN: NDArray[np.float64],
    weight_Q: NDArray[np.float64] | None = None,
    level: float = LEVEL,
) -> RecordValues:
    """Value of each record to the target: the mean over queries, and whether it is distinct from zero.

    Args:
        scores_QN: scores per query.
        weight_Q: positive weights of the queries, such as their tokens; None = all alike.
        level: of each interval, and 1 - level is the chance of any false "distinct" at all.

    Returns:
        Values, errors, intervals and flags.

    Raises:
        EvaluationError: fewer than two queries, or weights that are not positive.
    """
    from scipy.stats import t as student

    num_queries, num_records = scores_QN.shape
    weight_Q = np.ones(num_queries) if weight_Q is None else np.asarray(weight_Q, dtype=np.float64)
    if num_queries < 2 or weight_Q.shape != (num_queries,) or not (weight_Q > 0).all():
        raise EvaluationError(
            f"scores: expected at least 2 queries and a positive weight for each, got {num_queries} and "
            f"weights {list(weight_Q.shape)}"
        )
    share_Q = weight_Q / weight_Q.sum()
    value_N = share_Q @ scores_QN
    # The error of a ratio over queries: residuals count with their weight.
    squares_N = (share_Q**2) @ (scores_QN - value_N) ** 2
    se_N = np.sqrt(squares_N * num_queries / (num_queries - 1))
    half_N = student.ppf((1 + level) / 2, num_queries - 1) * se_N
    ratio_N = np.abs(value_N) / np.where(se_N > 0, se_N, np.inf)
    ratio_N = np.where((se_N == 0) & (value_N != 0), np.inf, ratio_N)
    chance_N = 2 * student.sf(ratio_N, num_queries - 1)
    order_N = np.argsort(chance_N, kind="stable")
    limits_N = (1 - level) / (num_records - np.arange(num_records))
    passes_N = np.logical_and.accumulate(chance_N[order_N] <= limits_N)
    distinct_N = np.zeros(num_records, dtype=bool)
    distinct_N[order_N] = passes_N
    return RecordValues(
        value_N=value_N,
        se_N=se_N,
        low_N=value_N - half_N,
        high_N=value_N + half_N,
        distinct_N=distinct_N,
    )


@dataclass(frozen=True, slots=True)
class Stability:
    """How far values agree over seeds."""

    mean_rank_correlation: float
    """Mean Spearman over all pairs of seeds."""
    worst_rank_correlation: float
    """The least of them."""
    top_overlap: float
    """Mean over pairs of |top a and top b| / |top|."""
    sign_agreement: float
    """Share of records whose value has the same sign in all seeds."""


def stability(values_RN: NDArray[np.float64], top_share: float = 0.1) -> Stability:
    """Agreement of values that were computed with several seeds.

    Args:
        values_RN: R >= 2 seeds, N records.
        top_share: which share of records counts as the top.

    Returns:
        Rank correlations, overlap of the tops, agreement of signs.

    Raises:
        EvaluationError: fewer than two seeds.
    """
    if values_RN.ndim != 2 or len(values_RN) < 2:
        raise EvaluationError(
            f"values: expected [R, N] with at least 2 seeds, got {list(values_RN.shape)}"
        )
    one, two = np.triu_indices(len(values_RN), 1)
    rho_P = spearman_rows(values_RN[one], values_RN[two])
    count = max(1, round(top_share * values_RN.shape[1]))
    tops = [set(np.argsort(-row, kind="stable")[:count].tolist()) for row in values_RN]
    overlap = np.mean([len(tops[i] & tops[j]) / count for i, j in zip(one, two, strict=True)])
    same_N = (np.sign(values_RN) == np.sign(values_RN[0])).all(0)
    return Stability(float(rho_P.mean()), float(rho_P.min()), float(overlap), float(same_N.mean()))
