"""Samplers: unbiased draws of the semivalues of all players.

A semivalue φ_i = Σ_{S∌i} w(|S|) [V(S+i) - V(S)] is a mean over random coalitions; a *draw* is one
unbiased guess at all n values at once, and a sampler is a way to draw. With r(s) = n C(n-1,s) w(s),
the weight of a size against Shapley's (r = 1 for Shapley),

permutation  an order; player at place s gets r(s) [V(first s + i) - V(first s)]         n + 1 utilities
antithetic   an order and its reverse, averaged                                            2n
stratified   the n rotations of an order, averaged: every player at every place once       n(n-1) + 2
truncated    an order, cut where |V(all) - V(prefix)| < tolerance; the rest gets 0         fewer; *biased* by it
regression   a coalition z and its complement (Shapley only), with g a guess made before   2 + 2
             φ̂ = g + (Δ - Σ g)/n + ω(s)/(2a) (z - s/n) [V(z) - V(N-z) - g·(2z - 1)],   Δ = V(N) - V(∅)
reuse        a coalition and its complement, each used for every player (any semivalue)    2 + 2
             φ̂_i = [V(S) - c] (w(s-1) if i ∈ S else -w(s)) / P(S),  c = (V(N) + V(∅)) / 2

*regression* is kernel SHAP with its matrix in closed form, so that no system is solved and nothing is
biased: a = 1/2 - Σ_s π(s) s(s-1)/(n(n-1)), π(s) ∝ 1/(s(n-s)), ω = π/q. Sizes are drawn uniformly (q = 1/(n-1)),
which is sampling by leverage scores. g, an additive guess from a pilot, takes out what is additive in V.
*reuse* for Banzhaf is maximum sample reuse; for other semivalues its general form.

Weights are handled as logarithms: C(100, 50) is no problem for them. Draws of *regression*,
*permutation*, *antithetic* and *stratified* each sum to Δ exactly when the semivalue is Shapley's.

Shapes: n players, D draws. A coalition is a bitmask, a Python integer of any size.

Source: Castro et al. 2009 and 2017 (strata); Mitchell et al. 2104.12199 (antithetic); Ghorbani and Zou
1904.02868 (truncation); Covert and Lee 2012.01536 (unbiased kernel SHAP, pairs); Musco and Witter 2410.01917
(leverage); Witter et al. 2506.11849 (regression adjustment); Wang and Jia 2205.15466 (reuse);
Li and Yu 2410.15750 (one sample for all semivalues).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

import numpy as np

from valuation.errors import UtilityError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Values = Callable[[list[int]], Floats]

Name = Literal["permutation", "antithetic", "stratified", "truncated", "regression", "reuse"]
PAIRED = ("regression", "reuse")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Which draws are made."""

    name: Name = "antithetic"
    """See the table of the module."""
    tolerance: float | None = None
    """Of ``truncated``: gap to V(all) below which an order is cut, such as the sd over training seeds."""

    def __post_init__(self) -> None:
        """Refuse what isn't a sampler.

        Raises:
            UtilityError: an unknown name, or a tolerance that is missing or not wanted.
        """
        if self.name not in _DRAWS and self.name not in PAIRED:
            raise UtilityError(f"sampler: expected one of {(*_DRAWS, *PAIRED)}, got {self.name!r}")
        given = self.tolerance is not None and self.tolerance > 0
        if given != (self.name == "truncated"):
            raise UtilityError(
                f"tolerance: expected above 0 for truncated and None otherwise, got {self.tolerance}"
            )


@dataclass(frozen=True, slots=True)
class Draws:
    """Independent unbiased guesses."""

    rows_Dn: Floats
    """One guess at all values per draw."""
    orders: int = 0
    """Orders walked."""
    truncated: int = field(default=0)
    """Of these, cut before their end."""


def draw(
    sampler: Sampler,
    values: Values,
    count: int,
    log_weights_n: Floats,
    generator: np.random.Generator,
    guess_n: Floats | None = None,
) -> Draws:
    """Draw from a game.

    Args:
        sampler: how.
        values: V of a list of bitmasks.
        count: D, number of draws.
        log_weights_n: logarithm of w(s) for s = 0 .. n - 1.
        generator: source of randomness.
        guess_n: g of ``regression``, made before and independently of these draws; None = Δ/n each.

    Returns:
        D guesses.

    Raises:
        UtilityError: ``regression`` of another semivalue than Shapley's.
    """
    num_players = len(log_weights_n)
    if sampler.name == "regression" and num_players > 1:
        return _regression(values, count, log_weights_n, generator, guess_n)
    if sampler.name == "reuse" and num_players > 1:
        return _reuse(values, count, log_weights_n, generator)
    turn = _DRAWS.get(sampler.name, _one_order)
    orders_DRn = np.stack([turn(generator.permutation(num_players)) for _ in range(count)])
    ratio_n = np.exp(log_weights_n - log_shapley(num_players))
    flat_On = orders_DRn.reshape(-1, num_players)
    gains_On, truncated = _walk(flat_On, values, sampler.tolerance)
    by_player_On = np.empty_like(gains_On)
    np.put_along_axis(by_player_On, flat_On, gains_On * ratio_n, axis=1)
    return Draws(by_player_On.reshape(orders_DRn.shape).mean(axis=1), len(flat_On), truncated)


def log_shapley(num_players: int) -> Floats:
    """Logarithm of Shapley's weight of one coalition of each size, 1 / (n C(n-1, s)).

    Args:
        num_players: n, at least 1.

    Returns:
        n logarithms for sizes 0 .. n - 1.
    """
    return np.asarray(-np.log(num_players) - _log_choose(num_players - 1, np.arange(num_players)))


def log_banzhaf(num_players: int) -> Floats:
    """Logarithm of Banzhaf's weight of one coalition, 2^(1-n).

    Args:
        num_players: n, at least 1.

    Returns:
        n logarithms for sizes 0 .. n - 1.
    """
    return np.full(num_players, (1 - num_players) * np.log(2.0))


def _one_order(order_n: NDArray[np.int64]) -> NDArray[np.int64]:
    return order_n[None]


def _and_its_reverse(order_n: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([order_n, order_n[::-1]])


def _rotations(order_n: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.stack([np.roll(order_n, shift) for shift in range(len(order_n))])


_DRAWS = {
    "permutation": _one_order,
    "antithetic": _and_its_reverse,
    "stratified": _rotations,
    "truncated": _one_order,
}


def _walk(
    orders_On: NDArray[np.int64], values: Values, tolerance: float | None
) -> tuple[Floats, int]:
    """Gain at each place of each order; with a tolerance all orders go one place at a time."""
    num_orders, num_players = orders_On.shape
    prefixes = [
        list(accumulate((1 << i for i in order), int.__or__)) for order in orders_On.tolist()
    ]
    if tolerance is None:
        masks = [mask for row in prefixes for mask in [0, *row]]
        return np.diff(values(masks).reshape(num_orders, num_players + 1), axis=1), 0
    nobody, everybody = values([0, (1 << num_players) - 1])
    gains_On = np.zeros((num_orders, num_players))
    before_O = np.full(num_orders, nobody)
    active_O = np.abs(everybody - before_O) >= tolerance
    cut = int((~active_O).sum())
    for place in range(num_players):
        walking = np.flatnonzero(active_O)
        if not len(walking):
            break
        after = values([prefixes[order][place] for order in walking])
        gains_On[walking, place] = after - before_O[walking]
        before_O[walking] = after
        if place < num_players - 1:
            stays = np.abs(everybody - after) >= tolerance
            active_O[walking] = stays
            cut += int((~stays).sum())
    return gains_On, cut


def _coalitions(
    count: int, num_players: int, share_s: Floats, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[int], list[int]]:
    """Coalitions with sizes 0 .. n drawn by their shares: sizes, members, masks and complements."""
    size_D = generator.choice(num_players + 1, count, p=share_s)
    rank_Dn = np.argsort(generator.random((count, num_players)), axis=1).argsort(axis=1)
    member_Dn = rank_Dn < size_D[:, None]
    everybody = (1 << num_players) - 1
    masks = [sum(1 << i for i in np.flatnonzero(row).tolist()) for row in member_Dn]
    return size_D, member_Dn, masks, [everybody ^ mask for mask in masks]


def _regression(
    values: Values, count: int, log_weights_n: Floats, generator: np.random.Generator,
    guess_n: Floats | None,
) -> Draws:  # fmt: skip
    n = len(log_weights_n)
    if not np.allclose(log_weights_n, log_shapley(n)):
        raise UtilityError(
            "regression: expected Shapley's weights; use antithetic or reuse for others"
        )
    size = np.arange(1, n)
    kernel_s = 1 / (size * (n - size))
    kernel_s = kernel_s / kernel_s.sum()
    alpha = 0.5 - float(kernel_s @ (size * (size - 1))) / (n * (n - 1))
    share_s = np.zeros(n + 1)
    share_s[1:n] = 1 / (n - 1)
    size_D, member_Dn, masks, others = _coalitions(count, n, share_s, generator)
    nobody, everybody = values([0, (1 << n) - 1])
    found_2D = values([*masks, *others]).reshape(2, count)
    guess_n = np.full(n, (everybody - nobody) / n) if guess_n is None else guess_n
    guess_n = guess_n + (everybody - nobody - guess_n.sum()) / n
    gap_D = found_2D[0] - found_2D[1] - np.where(member_Dn, guess_n, -guess_n).sum(axis=1)
    weight_D = kernel_s[size_D - 1] * (n - 1) / (2 * alpha)
    return Draws(guess_n + (weight_D * gap_D)[:, None] * (member_Dn - size_D[:, None] / n))


def _reuse(
    values: Values, count: int, log_weights_n: Floats, generator: np.random.Generator
) -> Draws:
    n = len(log_weights_n)
    size = np.arange(n + 1)
    log_choose_s = _log_choose(n, size)
    with_s = np.concatenate([[-np.inf], log_weights_n])  # i is a member: w(s-1)
    without_s = np.append(log_weights_n, -np.inf)  # i is not: w(s)
    # Sizes by the weight that their coalitions carry in all, so that no draw is far larger than others.
    log_share_s = log_choose_s + np.logaddexp(with_s, without_s)
    share_s = np.exp(log_share_s - np.logaddexp.reduce(log_share_s))
    share_s = (share_s + share_s[::-1]) / 2  # the complement is a draw as well
    log_chance_s = np.log(share_s) - log_choose_s
    size_D, member_Dn, masks, others = _coalitions(count, n, share_s, generator)
    ends = values([0, (1 << n) - 1])
    found_2D = values([*masks, *others]).reshape(2, count) - ends.mean()

    def guesses(size_D: NDArray[np.int64], inside_Dn: NDArray[np.bool_], value_D: Floats) -> Floats:
        plus_D = np.exp(with_s[size_D] - log_chance_s[size_D])
        minus_D = np.exp(without_s[size_D] - log_chance_s[size_D])
        return np.where(inside_Dn, plus_D[:, None], -minus_D[:, None]) * value_D[:, None]

    rows_Dn = guesses(size_D, member_Dn, found_2D[0]) + guesses(n - size_D, ~member_Dn, found_2D[1])
    return Draws(rows_Dn / 2)


def _log_choose(n: int, k: NDArray[np.int64]) -> Floats:
    from scipy.special import gammaln

    return np.asarray(gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1), dtype=np.float64)
