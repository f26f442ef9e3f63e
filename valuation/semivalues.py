"""Semivalues by sampling: sampler x coefficient x stopping rule, over utilities that are kept.

    φ_i = Σ_{S∌i} w(|S|) [V(S+i) - V(S)],         values = mean of unbiased draws ± interval

The three parts are independent. The *coefficient* is a function from n to log w(s): `log_shapley`,
`log_banzhaf`, `log_beta(a, b)`. The *sampler* (`valuation.samplers`) makes unbiased draws. The *stopping
rule* (`valuation.stopping`) looks at their tally. A utility is a function of a list of bitmasks, so that a
round of draws can be retrained at once by several processes; every utility is computed once and kept.
For few players `valuation.shapley` enumerates instead: exact, and cheaper than any sampling up to about eight.

Results merge: `a + b` is the result of both samples, with counts, means and variances; so shards of a
cluster, or a run that goes on tomorrow, give what one run gives. Draw them with different generators.

When it is wrong: intervals cover the draws (and the seeds, if their variance is given), never whether a
small proxy speaks for a large model. ``truncated`` is biased by its tolerance, and says how often it cut.

Shapes: n players, D draws.

Source: Castro et al. 2009; Kwon and Zou, "Beta Shapley", 2110.14049; Wang and Jia, "Data Banzhaf", 2205.15466.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lgamma
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import UtilityError
from valuation.samplers import Sampler, draw, log_shapley
from valuation.stopping import Reason, Stopping, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]


# A draw of all rotations costs n (n - 1) + 2 utilities.
MAX_STRATIFIED = 64


class Memo:
    """A utility that computes each coalition once; `known` is what a bank already holds."""

    def __init__(
        self, utility: Callable[[list[int]], ArrayLike], known: Mapping[int, float] | None = None
    ) -> None:
        """Wrap a utility.

        Args:
            utility: V of a list of bitmasks, each once, as numbers in the same order.
            known: utilities that needn't be computed.

        Raises:
            UtilityError: a known utility that is not finite.
        """
        self._utility = utility
        self.known: dict[int, float] = {}
        self.calls = 0
        self._keep(list(known or ()), list((known or {}).values()))

    def __call__(self, masks: list[int]) -> Floats:
        """V of each bitmask.

        Raises:
            UtilityError: the utility gave another number of values, or one that is not finite.
        """
        missing = [mask for mask in dict.fromkeys(masks) if mask not in self.known]
        if missing:
            found = np.asarray(self._utility(missing), dtype=np.float64)
            if found.shape != (len(missing),):
                raise UtilityError(
                    f"utility: expected {len(missing)} numbers, one per coalition, got {list(found.shape)}"
                )
            self.calls += len(missing)
            self._keep(missing, found.tolist())
        return np.array([self.known[mask] for mask in masks])

    def _keep(self, masks: list[int], values: list[float]) -> None:
        for mask, value in zip(masks, values, strict=True):
            if not np.isfinite(value):
                raise UtilityError(
                    f"utility of coalition {mask}: expected a finite number, got {value}; "
                    "a training that diverged has no value, repeat it or leave it out of the plan"
                )
            self.known[mask] = float(value)


@dataclass(frozen=True, slots=True)
class SampledValues:
    """Semivalues with their uncertainty; `a + b` merges two samples of one game."""

    tally: Tally
    """Moments of the draws."""
    half_n: Floats | None
    """Half-widths of simultaneous intervals; None where no range of the draws was given or after a merge."""
    calls: int
    """Utilities computed (not those known before)."""
    reason: Reason | None
    """Why it stopped; None after a merge."""
    method: str
    """Sampler and semivalue; only equal ones merge."""
    orders: int = 0
    """Orders walked."""
    truncated: int = 0
    """Of these, cut early."""

    @property
    def values_n(self) -> Floats:
        """Estimated values."""
        return self.tally.mean_n

    @property
    def se_n(self) -> Floats:
        """Their standard errors over the draws."""
        return self.tally.se_n

    def __add__(self, other: SampledValues) -> SampledValues:
        """Both samples together.

        Raises:
            UtilityError: for different methods or numbers of players.
        """
        if self.method != other.method:
            raise UtilityError(f"merge: expected one method, got {self.method} and {other.method}")
        return SampledValues(
            self.tally + other.tally,
            None,
            self.calls + other.calls,
            None,
            self.method,
            self.orders + other.orders,
            self.truncated + other.truncated,
        )


def log_beta(alpha: float, beta: float) -> Callable[[int], Floats]:
    """Logarithm of the Beta(a, b) weight of one coalition of each size.

    Args:
        alpha: a > 0; larger than b puts weight on small coalitions, where noise is lowest.
        beta: b > 0.

    Returns:
        A coefficient: n → log w(s) for s = 0 .. n - 1; Beta(1, 1) is Shapley.

    Raises:
        UtilityError: if a parameter is not positive.

    Source: Kwon and Zou 2110.14049, equation 5, per coalition instead of per size.
    """
    if not (alpha > 0 and beta > 0):
        raise UtilityError(f"alpha, beta: expected both above 0, got {alpha}, {beta}")

    def log_b(a: float, b: float) -> float:
        return lgamma(a) + lgamma(b) - lgamma(a + b)

    def logs(num_players: int) -> Floats:
        return np.array(
            [
                log_b(s + beta, num_players - 1 - s + alpha) - log_b(alpha, beta)
                for s in range(num_players)
            ]
        )

    return logs


def sample_values(
    utility: Callable[[list[int]], ArrayLike] | Memo,
    num_players: int,
    stopping: Stopping,
    generator: np.random.Generator,
    *,
    sampler: Sampler | None = None,
    coefficient: Callable[[int], Floats] = log_shapley,
    round_draws: int = 2,
    start: SampledValues | None = None,
) -> SampledValues:
    """Sample until the rule says stop.

    Args:
        utility: V of a list of bitmasks; a `Memo` keeps what it computed for the next call.
        num_players: n, at least 1.
        stopping: when to stop; looked at after each round, and rounds double.
        generator: source of randomness.
        sampler: how to draw; default stratified up to 64 players, antithetic orders above, where n² utilities per draw are many.
        coefficient: which semivalue.
        round_draws: draws of the first round, at least 2.
        start: go on from this result of the same method.

    Returns:
        Values, intervals, and why it stopped.

    Raises:
        UtilityError: no players, a utility that is not finite, or a `start` of another method.
    """
    if num_players < 1 or round_draws < 2:
        raise UtilityError(
            f"expected num_players >= 1 and round_draws >= 2, got {num_players}, {round_draws}"
        )
    if sampler is None:
        sampler = Sampler(name="stratified" if num_players <= MAX_STRATIFIED else "antithetic")
    memo = utility if isinstance(utility, Memo) else Memo(utility)
    log_weights_n = coefficient(num_players)
    method = f"{sampler.name}:{np.round(log_weights_n, 9).tolist()}"
    if start is not None and (start.method != method or len(start.values_n) != num_players):
        raise UtilityError(f"start: expected a result of {method}, got {start.method}")
    tally = start.tally if start else Tally.empty(num_players)
    before, orders, truncated = (start.calls, start.orders, start.truncated) if start else (0, 0, 0)
    calls_at_start, guess_n = memo.calls, None
    if sampler.name == "regression" and num_players > 1:
        # The pilot's draws are not in the tally: its guess must be independent of the draws that use it.
        guess_n = draw(sampler, memo, max(round_draws, num_players), log_weights_n, generator).rows_Dn.mean(0)  # fmt: skip
    look, count, reason = 0, round_draws, None
    while reason is None:
        if stopping.max_draws is not None:
            count = min(count, max(1, stopping.max_draws - tally.count))
        made = draw(sampler, memo, count, log_weights_n, generator, guess_n)
        tally = tally + Tally.of(made.rows_Dn)
        orders, truncated = orders + made.orders, truncated + made.truncated
        look += 1
        calls = before + memo.calls - calls_at_start
        reason = stopping.reason(tally, calls, look)
        # Looks cost confidence, so there are few of them: the sample doubles. Near a limit of calls it doesn't.
        count = round_draws if stopping.max_calls is not None else tally.count
        # Once everything is known more draws are free, but a rule in calls alone would never end.
        if reason is None and len(memo.known) == 1 << num_players and stopping.max_draws is None:
            reason = "exact" if num_players <= 20 else None
    if reason == "exact":
        return _exact(
            memo, num_players, log_weights_n, before + memo.calls - calls_at_start, method
        )
    return SampledValues(
        tally, stopping.half_n(tally, look), before + memo.calls - calls_at_start, reason, method, orders,
        truncated,
    )  # fmt: skip


def _exact(
    memo: Memo, num_players: int, log_weights_n: Floats, calls: int, method: str
) -> SampledValues:
    """The exact values, once every utility is known: no error is left."""
    from valuation.shapley import exact_semivalue

    table = np.array([memo.known[mask] for mask in range(1 << num_players)])
    values_n = exact_semivalue(table, num_players, np.exp(log_weights_n))
    zeros_n = np.zeros(num_players)
    return SampledValues(Tally(1, values_n, zeros_n), zeros_n, calls, "exact", f"exact:{method}")
