"""The closed forms of the games agree with the definition of the Shapley value."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tests.oracles.shapley_dividends import banzhaf_by_dividends, shapley_by_dividends
from tests.oracles.shapley_permutations import shapley_by_permutations
from valuation import UtilityError, additive, airport, shoes, unanimity, voting

GAMES = [
    airport([1.0]),
    airport([3.0, 1.0, 2.0, 2.0, 7.0]),
    airport([0.0, 0.0, 5.0]),
    voting(1),
    voting(4),
    voting(5),
    shoes(1, 1),
    shoes(1, 4),
    shoes(3, 2),
    shoes(0, 3),
    unanimity(5, [1, 3]),
    unanimity(4, [0, 1, 2, 3]),
    additive([0.5, -2.0, 0.0, 3.25]),
]


@pytest.mark.parametrize("game", GAMES, ids=lambda game: f"{game.name}-{game.num_players}")
def test_the_closed_form_is_the_mean_over_all_orders(game):
    """The oracle of the oracles: the definition itself, over every permutation."""
    by_definition = shapley_by_permutations(game.utilities_C, game.num_players)
    np.testing.assert_allclose(game.shapley_n, by_definition, atol=1e-12)


@pytest.mark.parametrize("game", GAMES, ids=lambda game: f"{game.name}-{game.num_players}")
def test_the_closed_forms_are_what_dividends_give(game):
    """A second definition, in exact fractions, gives the same Shapley and Banzhaf values."""
    table = [Fraction(float(value)) for value in game.utilities_C]
    shapley = [float(value) for value in shapley_by_dividends(table, game.num_players)]
    np.testing.assert_allclose(game.shapley_n, shapley, atol=1e-12)
    if game.banzhaf_n is not None:
        banzhaf = [float(value) for value in banzhaf_by_dividends(table, game.num_players)]
        np.testing.assert_allclose(game.banzhaf_n, banzhaf, atol=1e-12)


def test_the_runway_of_the_text_book():
    """Golden values: costs 8, 11, 13, 18 are shared as 2, 3, 4, 9 (Littlechild and Owen's rule)."""
    np.testing.assert_allclose(airport([8, 11, 13, 18]).shapley_n, [2, 3, 4, 9])


def test_one_left_shoe_against_two_right_ones_earns_two_thirds():
    """Golden values of the glove market: 2/3, 1/6, 1/6 (Shapley and Shubik 1969)."""
    np.testing.assert_allclose(shoes(1, 2).shapley_n, [2 / 3, 1 / 6, 1 / 6])


def test_a_game_with_too_many_players_is_refused():
    """2^21 utilities are not filled by accident."""
    with pytest.raises(UtilityError, match=r"expected 1 \.\. 20, got 21"):
        voting(21)
