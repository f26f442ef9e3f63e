"""KNN-Shapley: exact Shapley values of records for a nearest-neighbour vote, without training.

A query with label y asks the K nearest records of a set S; m_j is 1 where record j has label y (or
its probability for y). Two utilities are in use, and both have exact Shapley values from one sort:

    votes    v(S) = (1/K) Σ_{j among the min(K,|S|) nearest} m_j                 Jia et al. 2019
    soft     v(S) = mean of m_j among the min(K,|S|) nearest, v(∅) = 0           Wang and Jia 2023

With records ordered by distance, j = 1 .. n, both values follow from the farthest to the nearest,

    s_j = s_{j+1} + (m_j - m_{j+1}) c_j,                                        c_j, s_n:
    votes    c_j = 1 / max(K, j)                                    s_n = m_n / max(n, K)
    soft     c_j = [Σ_{l=1}^{min(K,n-1)} 1/l + 1[n > K]/K (min(j,K)(n-1)/j - K)] / (n-1)
             s_n = (H/n)(m_n - Σ_{j<n} m_j/(n-1)) + m_n/n,          H = Σ_{j=1}^{min(K,n)-1} 1/(j+1)

which is a reversed cumulative sum: no loop over records. The values of a query sum to v(all). For a
language model the features are embeddings or mean hidden states, and the label is a source, a
language or the next token's class.

Cost: O(T (n D + n log n)) for T queries; queries are taken in chunks, so that memory stays near
`memory_bytes` beyond the inputs. When it is wrong: a vote of neighbours is not a training, so this
is a baseline and a filter, never a basis for pay; a copy stands beside its original and takes half.
Records at equal distance are ordered by index.

Shapes: N records, T queries, D features, L labels, C queries in a chunk.

Source: Jia et al., "Efficient task-specific data valuation for nearest neighbor algorithms",
1908.08619, theorem 1; Wang and Jia, "A note on efficient KNN-Shapley", 2304.04258.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from valuation.errors import UtilityError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

MEMORY_BYTES = 256 << 20
# Per query and record: distance, order, matches, gains and their running sum, at 8 bytes each.
BYTES_PER_PAIR = 40


@dataclass(frozen=True, slots=True)
class KnnValues:
    """Values of records for a set of queries."""

    values_N: Floats
    """Mean over queries of each record's Shapley value; positive helps the vote."""
    se_N: Floats
    """Standard error of that mean over queries; NaN for a single query."""
    utility: float
    """Mean of v(all), which the values add up to."""
    num_queries: int
    """T."""


def knn_shapley(
    records_ND: ArrayLike,
    labels_N: ArrayLike,
    queries_TD: ArrayLike,
    labels_T: ArrayLike,
    num_neighbours: int,
    *,
    utility: Literal["votes", "soft"] = "votes",
    memory_bytes: int = MEMORY_BYTES,
) -> KnnValues:
    """Exact values of records for the vote of their nearest neighbours, by Euclidean distance.

    Args:
        records_ND: features, float32 or float64; distances are computed in this type.
        labels_N: label of each record, integers; or probabilities [N, L] of labels 0 .. L - 1.
        queries_TD: features of the queries.
        labels_T: label of each query, integers.
        num_neighbours: K, at least 1; may be larger than N.
        utility: ``votes`` divides by K, ``soft`` by the number of neighbours that there are.
        memory_bytes: working memory beyond the inputs, about; one query at a time at the least.

    Returns:
        Values that sum to the mean utility of all records.

    Raises:
        UtilityError: for shapes that don't fit, no records or queries, K < 1, or not finite features.
    """
    records_ND, queries_TD = (
        _features(records_ND, "records_ND"),
        _features(queries_TD, "queries_TD"),
    )
    labels_N, labels_T = np.asarray(labels_N), np.asarray(labels_T)
    num_records, num_queries = len(records_ND), len(queries_TD)
    if records_ND.shape[1] != queries_TD.shape[1] or labels_T.shape != (num_queries,):
        raise UtilityError(
            f"queries_TD: expected [T, {records_ND.shape[1]}] and one label each, got "
            f"{list(queries_TD.shape)} and labels {list(labels_T.shape)}"
        )
    if len(labels_N) != num_records or labels_N.ndim not in (1, 2):
        raise UtilityError(
            f"labels_N: expected [{num_records}] or [{num_records}, L], got {list(labels_N.shape)}"
        )
    if num_neighbours < 1 or utility not in ("votes", "soft"):
        raise UtilityError(
            f"expected num_neighbours >= 1 and utility votes or soft, got {num_neighbours}, {utility!r}"
        )
    step_n, last_n = _weights(num_records, num_neighbours, utility)
    total_N, squares_N, utilities = np.zeros(num_records), np.zeros(num_records), 0.0
    used = min(num_neighbours, num_records)
    for rows, order_CN in _orders(records_ND, queries_TD, memory_bytes):
        match_CN = _matches(labels_N, labels_T[rows], order_CN)
        utilities += float(match_CN[:, :used].sum()) / (
            num_neighbours if utility == "votes" else used
        )
        # s_j = Σ_k m_k · last_k + Σ_{l >= j} (m_l - m_{l+1}) c_l, the second sum from the far end.
        last_C = match_CN @ last_n
        match_CN[:, :-1] -= match_CN[:, 1:]
        match_CN[:, -1] = 0.0
        match_CN *= step_n
        values_CN = match_CN[:, ::-1]
        np.cumsum(values_CN, axis=1, out=values_CN)
        match_CN += last_C[:, None]
        for order_N, value_N in zip(order_CN, match_CN, strict=True):
            total_N[order_N] += value_N  # an order has no index twice
            np.square(value_N, out=value_N)
            squares_N[order_N] += value_N
    mean_N = total_N / num_queries
    if num_queries > 1:
        spread_N = np.maximum(squares_N / num_queries - mean_N**2, 0.0)
        se_N = np.sqrt(spread_N / (num_queries - 1))
    else:
        se_N = np.full(num_records, np.nan)
    return KnnValues(mean_N, se_N, utilities / num_queries, num_queries)


def _weights(num_records: int, num_neighbours: int, utility: str) -> tuple[Floats, Floats]:
    """c_j for j = 1 .. n, and what each match adds to s_n."""
    n, k = num_records, num_neighbours
    rank_n = np.arange(1, n + 1)
    last_n = np.zeros(n)
    if utility == "votes":
        last_n[-1] = 1 / max(n, k)
        return 1 / np.maximum(k, rank_n), last_n
    harmonic = float(np.sum(1 / np.arange(2, min(k, n) + 1)))
    last_n[-1] = (harmonic + 1) / n
    if n == 1:
        return np.zeros(1), last_n
    last_n[:-1] = -harmonic / (n * (n - 1))
    below_n = np.full(n, float(np.sum(1 / np.arange(1, min(k, n - 1) + 1))))
    if n > k:
        below_n += (np.minimum(rank_n, k) * (n - 1) / rank_n - k) / k
    return below_n / (n - 1), last_n


def _orders(
    records_ND: NDArray[np.floating], queries_TD: NDArray[np.floating], memory_bytes: int
) -> Iterator[tuple[slice, NDArray[np.int64]]]:
    """Chunks of queries with the records of each by distance, ties by index."""
    num_queries, num_records = len(queries_TD), len(records_ND)
    chunk = max(1, memory_bytes // (BYTES_PER_PAIR * num_records))
    norm_N = np.einsum("nd,nd->n", records_ND, records_ND)
    for start in range(0, num_queries, chunk):
        rows = slice(start, min(start + chunk, num_queries))
        # |x - q|² without |q|², which is the same for all records of a query.
        distance_CN = queries_TD[rows] @ records_ND.T
        distance_CN *= -2
        distance_CN += norm_N
        # The unstable sort is several times as fast; rows with equal distances, which are rare, are sorted again.
        order_CN = np.argsort(distance_CN, axis=1)
        sorted_CN = np.take_along_axis(distance_CN, order_CN, axis=1)
        tied_C = (sorted_CN[:, 1:] == sorted_CN[:, :-1]).any(axis=1)
        order_CN[tied_C] = np.argsort(distance_CN[tied_C], axis=1, kind="stable")
        yield rows, order_CN


def _matches(
    labels_N: NDArray[np.generic], labels_C: NDArray[np.generic], order_CN: NDArray[np.int64]
) -> Floats:
    """Match m of each record for each query, nearest first."""
    if labels_N.ndim == 1:
        return (labels_N[order_CN] == labels_C[:, None]).astype(np.float64)
    if len(labels_C) and not 0 <= labels_C.min() <= labels_C.max() < labels_N.shape[1]:
        raise UtilityError(
            f"labels_T: expected 0 .. {labels_N.shape[1] - 1}, the columns of labels_N"
        )
    return labels_N[order_CN, labels_C[:, None]].astype(np.float64)


def _features(array: ArrayLike, name: str) -> NDArray[np.floating]:
    found = np.asarray(array)
    if found.dtype not in (np.float32, np.float64):
        found = found.astype(np.float64)
    if found.ndim != 2 or not found.size:
        raise UtilityError(
            f"{name}: expected [rows, features], both at least 1, got {list(found.shape)}"
        )
    # Row by row sums: one pass, and no array of booleans as large as the features.
    if not np.isfinite(found.sum(axis=1)).all():
        raise UtilityError(f"{name}: expected finite features, got another in row "
                           f"{int(np.flatnonzero(~np.isfinite(found.sum(axis=1)))[0])}")  # fmt: skip
    return found
