"""Lots: names, shells, mergers and copies change nothing; the order is blind to owners; sums are exact."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation import (
    GroupError,
    NanoRow,
    PriceRule,
    PricingError,
    content_axis,
    cut_lots,
    exact_shapley,
    first_in_cluster,
    lot_gains,
    lot_shares,
    owner_intervals,
    price,
    purity,
    sample_orders,
    shapley_with_interval,
    to_nano,
    value_rows,
    values_of_lots,
)


def corpus(seed, num_records=16, num_topics=3):
    """Records of token ids with topics, owners a, b, c by topic, dates for two thirds of them."""
    rng = np.random.default_rng(seed)
    topic_N = rng.integers(0, num_topics, num_records)
    texts = [rng.integers(30 * t, 30 * t + 30, rng.integers(3, 20)) for t in topic_N]
    prints = [hashlib.sha256(t.tobytes() + bytes([i])).digest() for i, t in enumerate(texts)]
    dates = [
        None if rng.random() < 1 / 3 else f"{1900 + int(y)}-01-01"
        for y in rng.integers(0, 9, num_records)
    ]
    return {"text": texts, "print": prints, "date": dates, "owner": ["abc"[t] for t in topic_N],
            "personal": [False] * num_records}  # fmt: skip


def pay(rows, cluster_N=None, max_lots=4, target=8):
    """The whole way from records to owners' values in nano; the utility sees contents only, never owners or order."""
    order = sorted(
        range(len(rows["text"])), key=lambda i: (rows["owner"][i], i)
    )  # leaves stand by owner
    lengths = np.array([len(rows["text"][i]) for i in order])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.concatenate([rows["text"][i] for i in order])
    prints = [rows["print"][i] for i in order]
    cluster = np.arange(len(order)) if cluster_N is None else np.asarray(cluster_N)[order]
    # Commits are dated by arrival, here the position in `rows`; copies arrive last.
    valued = first_in_cluster(cluster, np.array(order))
    lots = cut_lots(
        prints, lengths, [rows["date"][i] for i in order], [rows["personal"][i] for i in order], valued,
        content_axis(tokens, offsets, prints, valued), max_lots,
    )  # fmt: skip
    owners, tokens_OK = lot_shares(lots, [rows["owner"][i] for i in order], lengths)
    num = len(lots.ids)
    held = [
        sorted(p for p, lot in zip(prints, lots.lot_N.tolist(), strict=True) if lot == k)
        for k in range(num)
    ]
    worth = {p: len(t) for p, t in zip(rows["print"], rows["text"], strict=True)}
    tokens_Q = np.arange(1, target + 1) * 10
    nll = {}
    for mask in range(2**num):
        inside = sorted(p for k in range(num) if mask >> k & 1 for p in held[k])
        seen = sum(np.log1p(worth[p] * (1 + p[0] / 50)) for p in inside)
        nll[mask] = (
            tokens_Q
            * (6 - 2 * np.log1p(seen) / 5)
            * (1 + 0.1 * np.sin(np.arange(target) + len(inside)))
        )
    found = shapley_with_interval(np.stack([nll[m] for m in range(2**num)]), tokens_Q)
    gains_KQ, variance_K = lot_gains(nll, num, None, tokens_Q)
    each = owner_intervals(gains_KQ, tokens_OK, tokens_Q, order_variance_K=variance_K)
    lot_rows = to_nano(value_rows(found, lots.ids, target="target_value"))
    values = values_of_lots(
        lot_rows, owners, tokens_OK, records_O=np.ones(len(owners), int), errors=each
    )
    return values, found, each


def total(values, names):
    """Summed nano of some owners."""
    return sum(row.value_nano for row in values.rows if row.subject_id in names)


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_one_owner_as_k_shells_earns_what_it_earned(seed, k):
    """Owner a poses as k = 1..8 names in any split: its total moves by less than a nano per name and lot, nobody else's by more."""
    rows = corpus(seed)
    before, found, _ = pay(rows)
    rng = np.random.default_rng(seed)
    split = rows | {"owner": [f"z{rng.integers(k)}" if o == "a" else o for o in rows["owner"]]}
    after, found_again, _ = pay(split)
    np.testing.assert_array_equal(
        found.values_n, found_again.values_n
    )  # the lots are the same bits
    names = {o for o in split["owner"] if o.startswith("z")}
    assert abs(total(after, names) - total(before, {"a"})) <= 4 * k
    for other in ("b", "c"):
        assert abs(total(after, {other}) - total(before, {other})) <= 4


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10_000))
def test_merging_and_renaming_change_nothing(seed):
    """Two owners under one name earn the sum of both, and a new name earns what the old one did."""
    rows = corpus(seed)
    before, _, _ = pay(rows)
    merged, _, _ = pay(rows | {"owner": ["m" if o in "ab" else o for o in rows["owner"]]})
    assert abs(total(merged, {"m"}) - total(before, {"a", "b"})) <= 8
    renamed, _, _ = pay(rows | {"owner": [{"a": "zz", "c": "0"}.get(o, o) for o in rows["owner"]]})
    assert abs(total(renamed, {"zz"}) - total(before, {"a"})) <= 4
    assert abs(total(renamed, {"0"}) - total(before, {"c"})) <= 4


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10_000), st.integers(1, 8))
def test_copies_by_any_number_of_copiers_change_nothing_and_earn_nothing(seed, k):
    """The copiers, k of them, deliver all of a's records again: the cluster is valued once, its first owner is paid, copiers get 0."""
    rows = corpus(seed)
    before, _, _ = pay(rows)
    mine = [i for i, owner in enumerate(rows["owner"]) if owner == "a"]
    cluster = list(range(len(rows["text"]))) + mine * k
    copied = {name: list(column) + [column[i] for i in mine] * k for name, column in rows.items()}
    copied["owner"] = rows["owner"] + [f"0copy{j}" for j in range(k) for _ in mine]
    after, _, _ = pay(copied, cluster)
    for row in after.rows:
        assert row.value_nano == (
            0 if row.subject_id.startswith("0copy") else total(before, {row.subject_id})
        )


def test_owners_as_players_are_not_split_proof():
    """Negative control: in the game of owners the same seller earns more as eight shells; the laws above are not empty."""

    def sellers(count):
        tokens = np.array([100 / count] * count + [100, 100])
        table = [
            np.log1p(sum(tokens[i] for i in range(len(tokens)) if m >> i & 1) / 100)
            for m in range(2 ** len(tokens))
        ]
        return exact_shapley(np.array(table), len(tokens))[:count].sum()

    assert sellers(1) == pytest.approx(np.log(4) / 3)
    assert sellers(8) > 1.05 * sellers(1)


def test_sums_are_exact_and_each_owner_has_its_interval():
    """Owners sum to V(all) - V(nobody) to 1e-9 in floats and exactly in nano; intervals hold the values."""
    values, found, each = pay(corpus(3))
    assert each.values_n.sum() == pytest.approx(found.total, abs=1e-9)
    assert sum(row.value_nano for row in values.rows) == round(found.total * 1e9)
    for row, value in zip(values.rows, each.values_n, strict=True):
        assert row.ci_low_nano <= row.value_nano <= row.ci_high_nano
        assert abs(row.value_nano - value * 1e9) <= 5
        assert row.method == "shapley.exact.lots"
    assert (
        sum(
            row.price_microunits
            for row in price(values, PriceRule(pool_microunits=10**6, currency="EUR")).rows
        )
        == 10**6
    )


def test_one_owner_of_a_lot_has_the_interval_of_the_lot():
    """With one owner per lot, values and errors are those of the lots: `owner_intervals` adds nothing of its own."""
    rng = np.random.default_rng(0)
    nll_CQ, tokens_Q = rng.normal(50, 3, size=(4, 6)), np.full(6, 10)
    found = shapley_with_interval(nll_CQ, tokens_Q)
    gains_KQ, none_K = lot_gains(dict(enumerate(nll_CQ)), 2, None, tokens_Q)
    each = owner_intervals(gains_KQ, np.array([[7, 0], [0, 9]]), tokens_Q, order_variance_K=none_K)
    np.testing.assert_allclose(each.values_n, found.values_n)
    np.testing.assert_allclose(each.se_n, found.se_n)
    orders = sample_orders(2, 4, rng)
    sampled_KQ, variance_K = lot_gains(dict(enumerate(nll_CQ)), 2, orders, tokens_Q)
    np.testing.assert_allclose(sampled_KQ.sum(axis=0), gains_KQ.sum(axis=0))
    assert variance_K.shape == (2,)


def test_lots_are_equal_dated_first_and_alike():
    """Parts differ by at most a record; personal records stand apart; content puts two topics into different lots."""
    rows = corpus(1, num_records=60, num_topics=2)
    lengths = np.array([len(t) for t in rows["text"]])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    axis = content_axis(np.concatenate(rows["text"]), offsets, rows["print"], [True] * 60)
    personal = [i % 10 == 0 for i in range(60)]
    lots = cut_lots(rows["print"], lengths, [None] * 60, personal, [True] * 60, axis, 3)
    assert lots.personal_K.tolist() == [False, False, True]
    assert {int(k) for k, p in zip(lots.lot_N, personal, strict=True) if p} == {2}
    assert abs(int(lots.tokens_K[0]) - int(lots.tokens_K[1])) <= 2 * lengths.max()
    _, tokens_OK = lot_shares(lots, rows["owner"], lengths)
    assert (purity(tokens_OK)[:2] > 0.8).all()
    dated = cut_lots(
        rows["print"],
        lengths,
        [f"{1900 + i}" for i in range(60)],
        [False] * 60,
        [True] * 60,
        axis,
        5,
    )
    assert (np.diff(dated.lot_N) >= 0).all()


def test_personal_records_alone_and_one_lot_alone():
    """Only personal records use all lots; a single lot holds everything."""
    prints = [bytes([i]) * 8 for i in range(6)]
    only = cut_lots(prints, [5] * 6, [None] * 6, [True] * 6, [True] * 6, np.arange(6.0), 3)
    assert only.tokens_K.tolist() == [10, 10, 10]
    one = cut_lots(
        prints, [5] * 6, [None] * 6, [False] * 6, [True] * 5 + [False], np.arange(6.0), 1
    )
    assert one.lot_N.tolist() == [0] * 5 + [-1]
    three = cut_lots(prints, [5] * 6, [None] * 6, [False] * 6, [True] * 6, np.arange(6.0), 3)
    assert three.tokens_K.tolist() == [10, 10, 10]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_N": [1, 2]}, "lengths"),
        ({"valued_N": [False] * 3}, "at least one valued"),
        ({"fingerprints": [b"a", b"a", b"b"]}, "once"),
        ({"personal_N": [True, False, False], "max_lots": 1}, "at least 2"),
        ({"max_lots": 0}, "at least 1"),
        ({"tokens_N": [1, -1, 2]}, "none negative"),
    ],
)
def test_what_cannot_be_cut_is_refused(change, message):
    """Columns that don't fit, nothing to value, copies among the valued and too few lots are named."""
    given = {"fingerprints": [b"a", b"b", b"c"], "tokens_N": [1, 2, 3], "dates": [None] * 3, "personal_N": [False] * 3,
             "valued_N": [True] * 3, "content_N": [0.0] * 3, "max_lots": 2} | change  # fmt: skip
    with pytest.raises(GroupError, match=message):
        cut_lots(**given)


def test_shares_and_rows_that_do_not_fit_are_refused():
    """Tokens that the lots weren't cut from, and rows of another number, never give a silent share."""
    lots = cut_lots([b"a", b"b"], [1, 2], [None] * 2, [False] * 2, [True] * 2, [0.0, 1.0], 2)
    with pytest.raises(GroupError, match="cut from"):
        lot_shares(lots, ["x", "y"], [1, 3])
    with pytest.raises(GroupError, match="expected 2 owners"):
        lot_shares(lots, ["x"], [1])
    rows = [
        NanoRow(
            subject_kind="lot",
            subject_id="lot-00",
            method="m",
            target="t",
            unit="nat",
            value_nano=5,
            n=1,
        )
    ]
    with pytest.raises(PricingError, match="tokens_OK"):
        values_of_lots(rows, ["x"], np.ones((2, 1), int), records_O=np.ones(1, int))
    with pytest.raises(PricingError, match="expected each once"):
        values_of_lots(rows, ["(reserve)"], np.ones((1, 1), int), records_O=np.ones(1, int))
