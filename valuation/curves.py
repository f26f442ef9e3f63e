"""What happens to the buyer's loss when valued records are taken away or added, by real retraining.

    removal    start from all records, take away the most valued (or least valued) share after share
    addition   start from nobody, add the most valued (or least valued) share after share
    groups     retrain without each group of records; the truth for values of groups
    top        loss without a query's own top records, against as many random ones

A value that knows something makes the loss rise when the top goes and fall (or rise less than at random) when the
bottom goes. Every subset goes through `valuation.subsets`' bank, so a curve that was drawn once is free.

The *random* arm is not decoration: taking away any records at all moves the loss, because fewer records
are fewer steps. Differences against it, seed by seed, are what counts.

Legend: N records, F shares, R seeds, Q queries, G groups.

Source: brittleness and top-k removal, TRAK, arXiv 2303.14186 section 4; removal and addition curves, Data
Shapley, arXiv 1904.02868 figure 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from valuation.errors import EvaluationError
from valuation.evaluation import LEVEL, Estimate
from valuation.subsets import retrain_subsets, spread

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from valuation.subsets import Setting

Arm = Literal["top", "bottom", "random"]


def ranked(
    value_N: NDArray[np.float64], arm: Arm, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Records in the order in which an arm takes them; ties in random order, so that position carries no information.

    Args:
        value_N: values, positive helps.
        arm: most valued first, least valued first, or any order.
        generator: source of randomness.

    Returns:
        A permutation of the records.
    """
    shuffled_N = generator.permutation(len(value_N))
    if arm == "random":
        return shuffled_N
    key_N = -value_N[shuffled_N] if arm == "top" else value_N[shuffled_N]
    return np.asarray(shuffled_N[np.argsort(key_N, kind="stable")])


def subsets_along(
    order_N: NDArray[np.int64], shares: Sequence[float], mode: Literal["remove", "add"]
) -> NDArray[np.bool_]:
    """The subset after each share of the records was removed from all, or added to nobody.

    Args:
        order_N: who goes (or comes) first.
        shares: in 0..1.
        mode: remove or add.

    Returns:
        member_FN.

    Raises:
        EvaluationError: a share outside of 0..1.
    """
    if not all(0 <= share <= 1 for share in shares):
        raise EvaluationError(f"shares: expected numbers in 0..1, got {list(shares)}")
    member_FN = np.full((len(shares), len(order_N)), mode == "remove")
    for row, share in enumerate(shares):
        member_FN[row, order_N[: round(share * len(order_N))]] = mode == "add"
    return member_FN


@dataclass(frozen=True, slots=True)
class Curve:
    """Loss along a curve."""

    share_F: NDArray[np.float64]
    """Share of the records that was removed or added."""
    loss_RF: NDArray[np.float64]
    """Mean nats per target token, per seed."""

    def difference(self, other: Curve, share: float, level: float = LEVEL) -> Estimate:
        """How much higher this curve's loss is than another's at one share, paired by seed.

        Args:
            other: a curve of the same seeds and shares, such as the random arm.
            share: one of the shares.
            level: of the Student interval over seeds.

        Returns:
            Mean difference in nats per token.
        """
        column = int(np.flatnonzero(np.isclose(self.share_F, share))[0])
        return paired(self.loss_RF[:, column], other.loss_RF[:, column], level)


def paired(
    one_R: NDArray[np.float64], two_R: NDArray[np.float64], level: float = LEVEL
) -> Estimate:
    """Mean of one - two over seeds with Student's interval.

    Args:
        one_R: a number per seed.
        two_R: another, same seeds.
        level: of the interval.

    Returns:
        Mean and interval; infinite with one seed, which shows nothing.
    """
    from scipy.stats import t as student

    gap_R = np.asarray(one_R) - np.asarray(two_R)
    if len(gap_R) < 2:
        return Estimate(float(gap_R.mean()), -np.inf, np.inf, level)
    half = float(
        student.ppf((1 + level) / 2, len(gap_R) - 1) * gap_R.std(ddof=1) / len(gap_R) ** 0.5
    )
    mean = float(gap_R.mean())
    return Estimate(mean, mean - half, mean + half, level)


def curve(  # noqa: PLR0913 - one retraining has that many parts
    setting: Setting,
    value_N: NDArray[np.float64],
    arm: Arm,
    shares: Sequence[float],
    seeds: Sequence[int],
    directory: Path,
    *,
    mode: Literal["remove", "add"] = "remove",
    index_N: NDArray[np.int64] | None = None,
    jobs: int = 1,
) -> Curve:
    """Retrain along a removal or addition curve.

    Args:
        setting: what all retrainings share.
        value_N: value of each record, positive helps.
        arm: who goes (or comes) first.
        shares: of the records, in 0..1.
        seeds: one curve each; the random arm draws another order per seed.
        directory: folder of the bank.
        mode: remove or add.
        index_N: places of the valued records in the store, which are then all there are; None = every record is valued.
        jobs: processes.

    Returns:
        Losses per seed and share.
    """
    subsets = [
        subsets_along(ranked(value_N, arm, np.random.default_rng(seed)), shares, mode)
        for seed in seeds
    ]
    seed_M = [seed for seed in seeds for _ in shares]
    member_MN = _in_store(setting, np.concatenate(subsets), index_N)
    losses = retrain_subsets(setting, member_MN, seed_M, directory, jobs)
    return Curve(
        np.asarray(shares, dtype=np.float64), losses.mean_M.reshape(len(seeds), len(shares))
    )


def _in_store(
    setting: Setting, member_MN: NDArray[np.bool_], index_N: NDArray[np.int64] | None
) -> NDArray[np.bool_]:
    return member_MN if index_N is None else spread(member_MN, index_N, setting.stores()[0].size)


@dataclass(frozen=True, slots=True)
class GroupRemoval:
    """Loss without each group."""

    groups: tuple[str, ...]
    """Names."""
    rise_RG: NDArray[np.float64]
    """Loss without the group minus loss with all, nats per target token, per seed: positive = the group helped."""

    def agreement(self, value_G: NDArray[np.float64]) -> float:
        """Spearman correlation of values of the groups with the mean rise."""
        from valuation.evaluation import spearman_rows

        return float(spearman_rows(value_G[None], self.rise_RG.mean(0)[None])[0])


def leave_groups_out(
    setting: Setting, group_N: Sequence[str], seeds: Sequence[int], directory: Path, jobs: int = 1
) -> GroupRemoval:
    """Retrain without each group of records.

    Args:
        setting: what all retrainings share.
        group_N: the group of each record of the store.
        seeds: repeated with each.
        directory: folder of the bank.
        jobs: processes.

    Returns:
        The rise of the loss per group and seed.
    """
    names = tuple(sorted(set(group_N)))
    of_N = np.asarray(group_N)
    member_MN = np.stack([np.ones(len(of_N), bool), *(of_N != name for name in names)])
    losses = retrain_subsets(
        setting,
        np.concatenate([member_MN] * len(seeds)),
        [s for s in seeds for _ in member_MN],
        directory,
        jobs,
    )
    loss_RM = losses.mean_M.reshape(len(seeds), len(member_MN))
    return GroupRemoval(names, loss_RM[:, 1:] - loss_RM[:, :1])


@dataclass(frozen=True, slots=True)
class TopRemoval:
    """What a query loses with its own top records (the "query loss difference")."""

    gap: Estimate
    """Mean over queries of (loss without the top) - (loss without as many random ones), nats per query token."""
    gap_Q: NDArray[np.float64]
    """Of each query."""
    removed: int
    """Records removed."""


def remove_top(  # noqa: PLR0913 - the same
    setting: Setting,
    scores_QN: NDArray[np.float64],
    share: float,
    seed: int,
    directory: Path,
    *,
    random_sets: int = 8,
    index_N: NDArray[np.int64] | None = None,
    query_index_Q: NDArray[np.int64] | None = None,
    jobs: int = 1,
) -> TopRemoval:
    """Retrain without each query's top records, and without random ones.

    Args:
        setting: what all retrainings share.
        scores_QN: row q belongs to live record q of the target, or to the one that `query_index_Q` names.
        share: of the records to remove, at least one record.
        seed: of the retrainings.
        directory: folder of the bank.
        random_sets: random removals that every query is compared with.
        index_N: places of the scored records in the store, which are then all there are; None = every record is scored.
        query_index_Q: index in the target of each row of scores; None = its live records in their order.
        jobs: processes.

    Returns:
        The gap with a Student interval over queries; it doesn't cover the seed.

    Raises:
        EvaluationError: not one row of scores per target record.
    """
    num_queries, num_records = scores_QN.shape
    removed = max(1, round(share * num_records))
    generator = np.random.default_rng(seed)
    tops = np.argsort(-scores_QN, axis=1, kind="stable")[:, :removed]
    drawn = np.stack([generator.permutation(num_records)[:removed] for _ in range(random_sets)])
    member_MN = np.ones((num_queries + random_sets, num_records), dtype=bool)
    np.put_along_axis(member_MN, np.concatenate([tops, drawn]), values=False, axis=1)
    losses = retrain_subsets(setting, _in_store(setting, member_MN, index_N), seed, directory, jobs)
    if query_index_Q is not None:
        losses = losses.of(query_index_Q)
    if len(losses.tokens_Q) != num_queries:
        raise EvaluationError(
            f"scores: expected one row per target record ({len(losses.tokens_Q)}), got {num_queries}"
        )
    loss_MQ = losses.nll_MQ / losses.tokens_Q
    gap_Q = np.diagonal(loss_MQ[:num_queries]) - loss_MQ[num_queries:].mean(0)
    return TopRemoval(paired(gap_Q, np.zeros(num_queries)), gap_Q, removed)
