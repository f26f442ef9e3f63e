"""When enough was sampled: running moments that merge, simultaneous intervals, and a rule that stops.

A *tally* keeps count, mean and sum of squared deviations of independent draws. Tallies add,

    n = a + b,   mean = mean_a + δ b/n,   M2 = M2_a + M2_b + δ² a b / n        with δ = mean_b - mean_a,

which is associative and commutative: samples drawn by several processes, or before and after a
kill, give the tally of one long run.

The interval is the empirical Bernstein bound. For m draws in an interval of width R with empirical
variance v, with probability at least 1 - δ

    |mean - truth| <= √(2 v ln(3/δ) / m) + 3 R ln(3/δ) / m,

for a single player at a single time. Here it must hold for all n players at once and at each time
we look, since we stop at a time that the data chose: the k-th look gets δ_k = (1 - level) / (n k (k+1)),
and Σ_k 1/(k(k+1)) = 1. Its second term shrinks with 1/m, so that games with little variance stop early;
without a bound R there is no such interval, and none is invented: give a range that is known.

*Seeds.* A utility by retraining has noise that more orders don't average away when every coalition
is trained once: Var = Var_draws / m + Var_seeds. When the draws' part of the half-width is below the
seeds' part, the rule stops and says so: more seeds would help, more orders wouldn't.

Shapes: n players, D draws.

Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
variances", 1979; Audibert, Munos and Szepesvári, "Tuning bandit algorithms in stochastic
environments", 2007, theorem 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from valuation.errors import UtilityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Reason = Literal["precise", "seeds", "draws", "calls", "exact"]


@dataclass(frozen=True, slots=True)
class Tally:
    """Moments of independent draws of n numbers; `a + b` is the tally of both samples."""

    count: int
    """D, draws seen."""
    mean_n: Floats
    """Mean of the draws; zeros before the first."""
    m2_n: Floats
    """Sum of squared deviations from the mean."""

    @classmethod
    def empty(cls, num_players: int) -> Tally:
        """The neutral element."""
        return cls(0, np.zeros(num_players), np.zeros(num_players))

    @classmethod
    def of(cls, rows_Dn: Floats) -> Tally:
        """The tally of one sample, [D, n]."""
        if not len(rows_Dn):
            return cls.empty(rows_Dn.shape[1])
        mean_n = rows_Dn.mean(axis=0)
        return cls(len(rows_Dn), mean_n, ((rows_Dn - mean_n) ** 2).sum(axis=0))

    def __add__(self, other: Tally) -> Tally:
        """Both samples together.

        Raises:
            UtilityError: for tallies of different numbers of players.
        """
        if len(self.mean_n) != len(other.mean_n):
            raise UtilityError(
                f"tallies: expected one number of players, got {len(self.mean_n)} and {len(other.mean_n)}"
            )
        count = self.count + other.count
        if not count:
            return self
        gap_n = other.mean_n - self.mean_n
        return Tally(
            count,
            self.mean_n + gap_n * (other.count / count),
            self.m2_n + other.m2_n + gap_n**2 * (self.count * other.count / count),
        )

    @property
    def se_n(self) -> Floats:
        """Standard error of each mean; infinite below two draws."""
        if self.count < 2:
            return np.full(len(self.mean_n), np.inf)
        return np.sqrt(self.m2_n / (self.count - 1) / self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When to stop sampling; at least one of the limits must be set."""

    half_width: float | None = None
    """Stop when every player's simultaneous interval is at most ± this, in units of utility."""
    value_range: float | None = None
    """R, width of an interval that holds every draw; needed for intervals, None = none are given."""
    level: float = 0.95
    """Joint coverage of all intervals at all looks, in (0, 1)."""
    max_draws: int | None = None
    """Most draws."""
    max_calls: int | None = None
    """Stop before a round of draws that starts at this many utilities or more."""
    seed_variance: float = 0.0
    """Variance of a value over training seeds, divided by the number of seeds averaged; 0 = none."""

    def __post_init__(self) -> None:
        """Refuse a rule that never stops or can't be kept.

        Raises:
            UtilityError: no limit, a width without a range, or numbers out of range.
        """
        if self.half_width is self.max_draws is self.max_calls is None:
            raise UtilityError("stopping: expected half_width, max_draws or max_calls, got none")
        if self.half_width is not None and self.value_range is None:
            raise UtilityError(
                "stopping: half_width needs value_range, the width that all draws stay in"
            )
        for name in ("half_width", "value_range", "max_draws", "max_calls"):
            value = getattr(self, name)
            if value is not None and not (np.isfinite(value) and value > 0):
                raise UtilityError(f"{name}: expected above 0, got {value}")
        if not 0 < self.level < 1 or not (
            np.isfinite(self.seed_variance) and self.seed_variance >= 0
        ):
            raise UtilityError(
                f"expected level within (0, 1) and seed_variance >= 0, got {self.level}, {self.seed_variance}"
            )

    def half_n(self, tally: Tally, look: int) -> Floats | None:
        """Half-widths of the simultaneous intervals at the k-th look, draws and seeds together.

        Args:
            tally: what was drawn.
            look: k, from 1.

        Returns:
            n half-widths, infinite below two draws; None without a range.
        """
        if self.value_range is None:
            return None
        return self._draws_n(tally, look) + self._seeds(len(tally.mean_n))

    def reason(self, tally: Tally, calls: int, look: int) -> Reason | None:
        """Why to stop now, or None to go on.

        Args:
            tally: what was drawn.
            calls: utilities computed.
            look: k, from 1; each look costs confidence, so look at the ends of rounds.

        Returns:
            ``precise``, ``seeds`` (more orders no longer help), ``draws`` or ``calls`` (a limit), or None.
        """
        if self.value_range is not None:
            draws_n, seeds = self._draws_n(tally, look), self._seeds(len(tally.mean_n))
            if self.half_width is not None and (draws_n + seeds <= self.half_width).all():
                return "precise"
            if seeds and (draws_n <= seeds).all():
                return "seeds"
        if self.max_draws is not None and tally.count >= self.max_draws:
            return "draws"
        if self.max_calls is not None and calls >= self.max_calls:
            return "calls"
        return None

    def _draws_n(self, tally: Tally, look: int) -> Floats:
        assert self.value_range is not None
        num_players = len(tally.mean_n)
        if tally.count < 2:
            return np.full(num_players, np.inf)
        log = np.log(3 * num_players * look * (look + 1) / (1 - self.level))
        variance_n = tally.m2_n / tally.count
        spread_n = np.sqrt(2 * variance_n * log / tally.count)
        return np.asarray(spread_n + 3 * self.value_range * log / tally.count)

    def _seeds(self, num_players: int) -> float:
        """Normal half-width of the seeds' part, for all players at once (Bonferroni)."""
        if not self.seed_variance:
            return 0.0
        from scipy.stats import norm

        quantile = norm.ppf(1 - (1 - self.level) / (2 * num_players))
        return float(quantile * np.sqrt(self.seed_variance))
