"""How much of a value is the luck of one training: its spread over seeds, beside that over target records.

A seed is the initial weights and the order of the records, common to all coalitions that are trained under it. Under S seeds a lot k
gains g_ksq nats on target record q. Seeds and records are *crossed*, so, per target token,

    g_ksq / t_q = φ_k + A_ks + B_kq + E_ksq,      v_k = mean over s and q,      Var v = Var A / S + Var B / Q + Var E / SQ

The ratio variance of the gains' means over seeds (`valuation.intervals`) is an estimate of the last two terms; the variance of
the seeds' values v_ks, divided by S, one of the first and the last. Their sum has the last term twice, so it is taken off once:

    Var v = T + (M - N) / S      T over records;  M = Var_s v_ks;  N = Q/(Q-1) Σ_sq r_ksq² / (S-1) / (Σ t)²,  r = (g_ksq - v_ks t_q) - (g_k.q - v_k t_q)

With two seeds one lot's M has a single degree of freedom, and t = 12.7. So it is *pooled* over the K lots, in two parts, because what
lots share (the luck of V(all) - V(nobody), which all values add up to) has S - 1 degrees of freedom however many lots there are:

    M_own = Σ_sk (d_ks - d_.s)² / ((K-1)(S-1))     M_all = Σ_s (Σ_k d_ks)² / (S-1)        d_ks = v_ks - v_k,  d_.s its mean over lots
    Var_s of Σ_k a_k φ_k = (Σ a)² / K² · (M_all - N_all)⁺ + Σ_k (a_k - mean a)² · (M_own - N_own)⁺

for any weights a, such as an owner's shares of lots. An estimate of M_all with one degree of freedom is often far too small, so it is used where it is the larger one only:
below K (M_own - N_own), what independent lots would give, the variance is Σ_k a_k² (M_own - N_own). An interval adds the squares of its parts, each with Student's
quantile of its own degrees of freedom f, and takes all of M_all, because by luck M_all - N_all is zero:

    half² = t²(Q-1) T + t²(S-1) (Σ a)² / K² · M_all / S + t²((K-1)(S-1)) Σ_k (a_k - mean a)² · (M_own - N_own)⁺ / S

One t with Satterthwaite's degrees of freedom of the whole is narrower where seeds are few, and too narrow where lots share their luck: 0.86 of the true values at 95 %.

When it is wrong: lots are taken to be alike in luck (equal variances, equal correlations). A lot whose trainings are luckier than the
others' has an interval that is too narrow, a steady one (few tokens) one too wide; and a sum of lots that offset each other has one too wide. S = 1 says nothing of seeds at all: the
interval is then over records only, and whatever shows it must say so (`spread_words`).

Shapes: S seeds, K lots, Q target records, O weighted sums of lots (owners), C coalitions.

Source: crossed random effects, Searle, Casella, McCulloch, "Variance Components", 1992, chapter 4; the same T + M - N as "two-way
clustering", Cameron, Gelbach, Miller, "Robust inference with multiway clustering", 2011, equation 2.5; intervals by
adding squares of the parts' own: Graybill, Wang, "Confidence intervals on nonnegative linear combinations of variances", 1980.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

ONE_SEED = "over target records only: one seed, so no spread over seeds is known"


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """Variance of one seed's values, pooled over lots; in squared nats per target token."""

    num_seeds: int
    """S, at least 2."""
    num_lots: int
    """K."""
    own: float
    """(M_own - N_own)⁺: of one lot's value about what all lots share."""
    shared: float
    """(M_all - N_all)⁺: of the sum of all lots' values."""
    own_square: float
    """M_own."""
    shared_square: float
    """M_all."""

    def variance(self, share_OK: ArrayLike) -> Floats:
        """Variance over seeds of weighted sums of the lots' mean values.

        Args:
            share_OK: weight of each lot in each sum.

        Returns:
            O variances, of means over the S seeds.
        """
        all_O, own_O = self._weights(share_OK)
        return (all_O * self.shared + own_O * self.own) / self.num_seeds

    def half_width(
        self, share_OK: ArrayLike, target_O: Floats, num_records: int, level: float
    ) -> Floats:
        """Half of an interval over seeds and target records: each part with the quantile of its own degrees of freedom, squares added.

        Args:
            share_OK: weight of each lot in each sum.
            target_O: variance over target records of each sum.
            num_records: Q, whose variance has Q - 1 degrees of freedom.
            level: coverage, in (0, 1).

        Returns:
            O half-widths, in nats.
        """
        from scipy.stats import t as student

        share_OK, lots, free = np.asarray(share_OK, np.float64), self.num_lots, self.num_seeds - 1
        all_O = (share_OK.sum(axis=1) / lots) ** 2
        own_O = np.maximum(0.0, (share_OK**2).sum(axis=1) - lots * all_O)
        parts = (
            (target_O, num_records - 1),
            (all_O * self.shared_square / self.num_seeds, free),
            (own_O * self.own / self.num_seeds, max(1, free * (lots - 1))),
        )
        quantile = [student.ppf((1 + level) / 2, count) for _, count in parts]
        return np.sqrt(sum(t**2 * part_O for t, (part_O, _) in zip(quantile, parts, strict=True)))

    def _weights(self, share_OK: ArrayLike) -> tuple[Floats, Floats]:
        """Of `shared` and of `own` in each sum's variance; where lots vary more than their sum does, all of it is `own`'s."""
        share_OK = np.asarray(share_OK, np.float64)
        if share_OK.ndim != 2 or share_OK.shape[1] != self.num_lots:
            raise UtilityError(f"share_OK: expected [O, {self.num_lots}], got {list(share_OK.shape)}")  # fmt: skip
        squares_O, all_O = (share_OK**2).sum(axis=1), (share_OK.sum(axis=1) / self.num_lots) ** 2
        if self.shared < self.num_lots * self.own:
            return np.zeros_like(all_O), squares_O
        return all_O, squares_O - self.num_lots * all_O


def seed_spread(gains_SKQ: ArrayLike, tokens_Q: ArrayLike) -> SeedSpread | None:
    """Pool the variance over seeds of the lots' values.

    Args:
        gains_SKQ: gain of each lot on each target record under each seed, in nats.
        tokens_Q: scored tokens of each target record, Q at least 2.

    Returns:
        The spread; None of one seed, which has none.

    Raises:
        UtilityError: shapes that don't fit.
    """
    gains_SKQ, tokens_Q = np.asarray(gains_SKQ, np.float64), np.asarray(tokens_Q, np.float64)
    if gains_SKQ.ndim != 3 or gains_SKQ.shape[2] != len(tokens_Q) or not len(gains_SKQ):
        raise UtilityError(f"gains_SKQ: expected [S, K, {len(tokens_Q)}], got {list(gains_SKQ.shape)}")  # fmt: skip
    seeds, lots, records = gains_SKQ.shape
    if seeds < 2:
        return None
    total = tokens_Q.sum()
    value_SK = gains_SKQ.sum(axis=2) / total
    rest_SKQ = gains_SKQ - value_SK[:, :, None] * tokens_Q
    rest_SKQ = rest_SKQ - rest_SKQ.mean(axis=0)
    off_SK = value_SK - value_SK.mean(axis=0)
    scale = records / (records - 1) / total**2

    def squares(off_SK: Floats, rest_SKQ: Floats, count: int) -> tuple[float, float]:
        """M and N of deviations that have `count` degrees of freedom per record."""
        found = float((off_SK**2).sum() / count)
        return found, max(0.0, found - scale * float((rest_SKQ**2).sum() / count))

    shared_square, shared = squares(off_SK.sum(1), rest_SKQ.sum(1), seeds - 1)
    own_square = own = 0.0
    if lots > 1:
        own_square, own = squares(
            off_SK - off_SK.mean(axis=1, keepdims=True), rest_SKQ - rest_SKQ.mean(axis=1, keepdims=True), (seeds - 1) * (lots - 1)
        )  # fmt: skip
    return SeedSpread(seeds, lots, own, shared, own_square, shared_square)


def by_seed(nll: Mapping[int, ArrayLike]) -> list[dict[int, Floats]]:
    """Losses of coalitions, seed by seed.

    Args:
        nll: bitmask → summed nats per target record, [Q] of one seed or [S, Q] of several.

    Returns:
        S mappings from bitmask to [Q].

    Raises:
        UtilityError: other shapes, or coalitions of different numbers of seeds.
    """
    table = {mask: np.asarray(loss, np.float64) for mask, loss in nll.items()}
    shapes = {loss.shape for loss in table.values()}
    if len(shapes) != 1 or len(shape := next(iter(shapes))) not in (1, 2):
        raise UtilityError(
            f"nll: expected a vector [Q] or [S, Q] of nats per target record for each coalition, all alike, got {sorted(map(str, shapes))}"
        )
    if len(shape) == 1:
        return [table]
    return [{mask: loss[seed] for mask, loss in table.items()} for seed in range(shape[0])]


def over_seeds(gains: ArrayLike) -> Floats:
    """Mean gains [K, Q] of [S, K, Q]; gains of one seed, [K, Q], as they are."""
    found = np.asarray(gains, np.float64)
    return np.asarray(found.mean(axis=0) if found.ndim == 3 else found, np.float64)


def spread_words(num_seeds: int, *, base: bool = False) -> str:
    """What standard errors and intervals cover, in words.

    Args:
        num_seeds: S.
        base: whether every training went on from the weights of one base model, so that seeds change the order only.

    Returns:
        A clause for reports, receipts and tables.
    """
    if num_seeds < 2:
        return ONE_SEED
    return f"over target records and {num_seeds} seeds ({'order only, the initial weights are the base' if base else 'initial weights and order'}), the seeds' spread pooled over lots"
