"""Classes of records: rates add up, the worst owner is found, and the labels are what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation.errors import GroupError
from valuation.fairness import class_table, eras, length_classes, owner_sizes
from valuation.language import languages_of


def test_a_case_by_hand():
    """Two lots, three owners: a lot's value by tokens, an owner's price by its positive value, the lowest rate named."""
    gains_KQ = np.array(
        [[4.0, 6.0], [-1.0, -1.0]]
    )  # 10 and -2 nats over 20 target tokens: 0.5 and -0.1
    rows = class_table(
        "era", ["old", "old", "new", "new"], ["ann", "bob", "bob", "cid"], [30, 10, 20, 5], [0, 0, 1, -1],
        gains_KQ, [10, 10], {"ann": 900, "bob": 300},
    )  # fmt: skip
    new, old = rows
    assert (old.records, old.owners, old.tokens) == (2, 2, 40)
    assert old.value == pytest.approx(0.5)
    assert old.value_rate == pytest.approx(12.5)  # both owners of one lot are paid alike per token
    assert old.worst_value_rate == pytest.approx(12.5)
    assert old.price_rate == pytest.approx(1000 * 1200 / 40)
    assert (old.worst_price_owner, old.worst_price_rate) == ("ann", pytest.approx(30_000))
    # Bob's price is for what is positive of him, which is old; cid's record stands in no lot.
    assert (new.records, new.owners, new.price_rate, new.worst_price_owner) == (1, 1, 0.0, "bob")
    assert new.value == pytest.approx(-0.1)
    assert old.low < old.value < old.high


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_classes_of_one_kind_add_up_to_everything(data):
    """Value and price of the classes sum to the lots' values and to what owners with a positive record are paid."""
    num = data.draw(st.integers(2, 30))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lot_N = generator.integers(-1, 3, num)
    lot_N[:3] = np.arange(3)[: min(3, num)]
    lots = int(lot_N.max()) + 1
    owner_N = [f"o{k}" for k in generator.integers(0, 4, num)]
    class_N = [f"c{k}" for k in generator.integers(0, 3, num)]
    tokens_N = generator.integers(1, 50, num)
    gains_KQ, tokens_Q = generator.normal(size=(lots, 5)), generator.integers(1, 9, 5)
    prices = {owner: int(generator.integers(0, 10**6)) for owner in set(owner_N)}
    rows = class_table("k", class_N, owner_N, tokens_N, lot_N, gains_KQ, tokens_Q, prices)
    used = set(lot_N[lot_N >= 0].tolist())
    value_K = gains_KQ.sum(axis=1) / tokens_Q.sum()
    assert sum(row.value for row in rows) == pytest.approx(sum(value_K[k] for k in used), abs=1e-12)
    earning = {o for o, k in zip(owner_N, lot_N.tolist(), strict=True) if k >= 0 and value_K[k] > 0}
    paid = sum(row.price_rate * row.tokens / 1000 for row in rows)
    assert paid == pytest.approx(sum(prices[o] for o in earning), rel=1e-9, abs=1e-6)
    for row in rows:
        assert row.worst_value_rate <= row.value_rate + 1e-12
        assert row.worst_price_rate <= row.price_rate + 1e-9


def test_what_cannot_be_is_refused():
    """Columns of different lengths, and no valued record at all."""
    with pytest.raises(GroupError, match="per record"):
        class_table("k", ["a"], ["o", "p"], [1, 1], [0, 0], [[1.0, 1.0]], [1, 1], {})
    with pytest.raises(GroupError, match="at least one valued"):
        class_table("k", ["a"], ["o"], [1], [-1], [[1.0, 1.0]], [1, 1], {})


def test_eras_are_as_fine_as_eight_classes_allow():
    """Years, decades, half centuries; a record without a date says so."""
    assert eras(["1999-01-01", "2001-05-05", None]) == ["1999", "2001", "undated"]
    many = eras([f"{year}-01-01" for year in range(1900, 1960)])
    assert set(many) == {f"{d}-{d + 9}" for d in range(1900, 1960, 10)}
    assert eras([f"{year}-01-01" for year in range(1789, 2020)])[0] == "1750-1799"


def test_lengths_and_sizes_have_their_bounds_on_the_right_side():
    """64 tokens are short, 65 are not; an owner of exactly 2 % is no small one."""
    assert length_classes([64, 65, 512, 513]) == [
        "0 to 64 tokens", "65 to 128 tokens", "257 to 512 tokens", "over 512 tokens",
    ]  # fmt: skip
    found = owner_sizes(["a", "b", "c"], [1, 2, 97])
    assert [name.split(":")[0] for name in found] == ["small", "middle", "large"]


def test_languages_of_plain_cases():
    """Seven languages by their words, others by script, and code is not a language."""
    texts = {
        "The cat sat on the mat and it was not amused by the rain of the day.": "English",
        "Der Hund und die Katze sind nicht auf dem Dach, und es ist ein Haus.": "German",
        "Le chat est sur la table et il ne veut pas de pain pour le moment.": "French",
        "El gato está en la mesa y no quiere pan porque es de los niños.": "Spanish",
        "Il gatto è sulla tavola e non vuole il pane che è per i bambini della casa.": "Italian",
        "O gato está na mesa e não quer pão porque é do menino que mora em uma casa.": "Portuguese",
        "De kat zit op de tafel en hij wil niet het brood van de kinderen.": "Dutch",
        "Кошка сидит на столе и не хочет хлеба.": "Cyrillic",
        "東京都は日本の首都であり、人口は約千四百万人である。": "Japanese",
        "北京是中华人民共和国的首都。": "Han",
        "대한민국의 수도는 서울이다.": "Hangul",
        "Kissa istuu pöydällä eikä halua leipää.": "other (Latin)",
        "x = {1: 2, 3: [4, 5]}; y += x[3] * 7 - 8 ** 2": "few letters",
        "": "few letters",
    }
    assert languages_of(list(texts)) == list(texts.values())
