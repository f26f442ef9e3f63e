"""A report refuses what contradicts itself, keeps what it is given, and writes numbers one way."""

import json
import math
import re
from dataclasses import is_dataclass, replace
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.reports import (
    Audit,
    Control,
    Estimate,
    EvaluationPlan,
    Membership,
    NotAvailable,
    OwnerRow,
    Rate,
    ReportData,
    ReportError,
    Utility,
    Verdict,
    numbers,
    render,
)
from tests.pipelines.report_sample import Page, audit, sample


def _passing() -> Audit:
    passed = audit()
    assert isinstance(passed.membership, Membership)
    assert isinstance(passed.utility, Utility)
    return replace(
        passed,
        tiers=tuple(replace(row, verdict="PASS", bound=0.0406) for row in passed.tiers),
        membership=replace(passed.membership, verdict="PASS"),
        utility=replace(passed.utility, verdict="PASS"),
        side=(),
        verdict="PASS",
    )


def test_pass_is_refused_above_anything_that_did_not_pass() -> None:
    """The headline cannot be better than its rows: bound, membership, control, gold, gate."""
    good = _passing()
    passed = replace(sample(), verdict=Verdict(verdict="PASS", reason="all hold"), audit=good)
    assert "count as forgotten" in Page(render(passed)).text
    assert isinstance(good.membership, Membership)
    assert isinstance(good.utility, Utility)
    broken: list[dict[str, Any]] = [
        {"tiers": (replace(good.tiers[0], verdict="INCONCLUSIVE"),)},
        {"tiers": ()},
        {"tiers": (replace(good.tiers[0], bound=None),)},
        {"tiers": (replace(good.tiers[0], bound=0.0501),)},
        {"membership": NotAvailable(reason="not tested")},
        {"utility": NotAvailable(reason="not tested")},
        {"num_gold_seeds": 1},
        {"membership": replace(good.membership, verdict="FAIL")},
        {"utility": replace(good.utility, verdict="INVALID")},
        {"controls": (Control(name="c", holds=False, detail="d"),)},
        {"side": audit().side},
    ]
    for change in broken:
        with pytest.raises(ReportError, match="PASS needs every part"):
            replace(good, **change)
    assert isinstance(passed.evaluation, EvaluationPlan)
    for change in (
        {"audit": audit()},
        {"audit": NotAvailable(reason="none")},
        {"evaluation": replace(passed.evaluation, holds=False)},
    ):
        with pytest.raises(ReportError, match="overall verdict PASS"):
            replace(passed, **change)


@pytest.mark.parametrize("name", ["FAIL", "INCONCLUSIVE", "INVALID"])
def test_no_verdict_but_pass_calls_anything_forgotten(name: Any) -> None:
    """Whatever did not pass is told to be treated as still in the model, or not released."""
    for part in (audit(verdict=name), NotAvailable(reason="none")):
        data = replace(sample(), verdict=Verdict(verdict=name, reason="r"), audit=part)
        text = Page(render(data)).text
        assert "count as forgotten" not in text
        assert re.search("still in the model|not forgotten|not released", text)


def test_json_round_trip_is_the_identity() -> None:
    """What is written is read back equal, full or empty, and writes the same text again."""
    for data in (sample(), ReportData.empty("t", "r"), replace(sample(), limits=("é\u2028\\",))):
        again = ReportData.from_json(data.to_json())
        assert again == data
        assert again.to_json() == data.to_json()


finite = st.floats(allow_nan=False, allow_infinity=False)


@given(
    value=finite,
    se=st.none() | finite.map(abs),
    ends=st.none() | st.tuples(finite, finite).map(sorted),
)
@settings(max_examples=60, deadline=None)
def test_json_keeps_every_float_exactly(value: float, se: float | None, ends: Any) -> None:
    """Floats survive the JSON form bit for bit, whatever their size."""
    low, high = ends or (None, None)
    made = Estimate(value=value, se=se, low=low, high=high)
    row = OwnerRow(owner="o", records=1, tokens=1, bits_per_token=made, bits_per_byte=None)
    data = replace(ReportData.empty("t", "r"), owners=(row,))
    assert ReportData.from_json(data.to_json()) == data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["corpus"].update(text="secret"), "report.corpus: unknown field text"),
        (lambda p: p["corpus"].pop("live"), "report.corpus: missing field live"),
        (lambda p: p["corpus"].update(live="many"), "report.corpus.live: expected int, got str"),
        (lambda p: p["corpus"].update(live=True), "report.corpus.live: expected int, got bool"),
        (lambda p: p["corpus"].update(live=99999), "0 <= live <= size"),
        (lambda p: p.update(format=2), "report.format: expected one of"),
        (lambda p: p["audit"].update(verdict="MAYBE"), "report.audit.verdict: expected one of"),
        (lambda p: p.update(owners=None), "report.owners: expected"),
        (lambda p: p.update(corpus=[]), "report.corpus: expected"),
        (lambda p: p.update(limits=[]), "report.limits is empty"),
        (lambda p: p["seeds"][0].update(seed=3), r"report.seeds\[0\].seed: expected str, got int"),
        (lambda p: p["requests"][0].update(state="\ud800"), "lone surrogate"),
        (lambda p: p.update(intake={"not_available": " "}), "NotAvailable.reason is empty"),
        (lambda p: p["training"][0]["steps"].pop(), "one loss per step"),
    ],
)
def test_malformed_json_is_refused_with_the_path(change: Any, message: str) -> None:
    """Unknown, missing, mistyped or impossible: the message names the field and what was expected."""
    plain = json.loads(sample().to_json())
    change(plain)
    with pytest.raises(ReportError, match=message):
        ReportData.from_json(json.dumps(plain))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"title": 1, "title": 2}', '{"title": NaN}', "3"])
def test_what_is_not_a_report_is_refused(text: str) -> None:
    """Broken JSON, duplicate fields and NaN end in the one error of this package."""
    with pytest.raises(ReportError):
        ReportData.from_json(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, np.float64(1.0), np.int64(1), "1", None])
def test_a_number_that_json_cannot_carry_is_refused_where_it_is_made(value: Any) -> None:
    """NaN, infinities and numpy scalars are caught before anything is rendered or written."""
    row = OwnerRow(
        owner="o", records=1, tokens=1, bits_per_token=Estimate(value=value), bits_per_byte=None
    )
    with pytest.raises(ReportError, match=r"report.owners\[0\].bits_per_token.value"):
        replace(sample(), owners=(row,))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Estimate(value=1, low=0),
        lambda: Estimate(value=1, low=2, high=0),
        lambda: Estimate(value=1, se=-1),
        lambda: Estimate(value=1, level=95),
        lambda: Rate(hits=3, n=2),
        lambda: Rate(hits=-1, n=2),
    ],
)
def test_impossible_estimates_and_rates_are_refused(make: Any) -> None:
    """Half an interval, a reversed one, a negative error, a level in per cent, 3 hits of 2."""
    with pytest.raises(ReportError):
        make()


def test_no_field_of_a_report_can_carry_the_text_of_a_record() -> None:
    """Walks the whole schema: no field is named after a text, prompt, answer, name or address."""
    seen: set[Any] = set()
    names: set[str] = set()

    def walk(kind: Any) -> None:
        if is_dataclass(kind) and kind not in seen:
            seen.add(kind)
            for name, hint in get_type_hints(kind).items():
                names.add(name)
                walk(hint)
        for part in get_args(kind):
            walk(part)

    walk(ReportData)
    assert ReportData in seen
    assert len(seen) > 20
    assert not names & {
        "text",
        "texts",
        "prompt",
        "secret",
        "answer",
        "completion",
        "person",
        "email",
    }


@pytest.mark.parametrize(
    ("got", "expected"),
    [
        (numbers.integer(1234567), "1,234,567"),
        (numbers.fixed(-0.00001, 2), "0.00"),
        (numbers.signed(0.5, 1), "+0.5"),
        (numbers.signed(-0.5, 1), "\u22120.5"),
        (numbers.signed(-0.001, 1), "0.0"),
        (numbers.percent(0.0457), "4.6\u00a0%"),
        (numbers.percent(0), "0.0\u00a0%"),
        (numbers.percent(1e-9), "<\u00a00.1\u00a0%"),
        (numbers.money(-1, "EUR"), "\u22120.000001\u00a0EUR"),
        (numbers.money(2**63 - 1, "EUR"), "9,223,372,036,854.775807\u00a0EUR"),
        (numbers.money(10**15, "USD"), "1,000,000,000.000000\u00a0USD"),
        (numbers.short_money(10**10, "EUR"), "10,000.00\u00a0EUR"),
        (numbers.short_money(1_234_500, "EUR"), "1.2345\u00a0EUR"),
        (numbers.binary(1023), "1023\u00a0B".replace("1023", "1,023")),
        (numbers.binary(700 * 2**20), "700.0\u00a0MiB"),
        (numbers.places([0.0131, None, 0.2]), 3),
        (numbers.places([12.0]), 2),
        (numbers.places([1e-30]), 8),
        (numbers.places([None, 0.0], default=5), 5),
        (numbers.printable("a\u202eb\x00c\ud800"), "a\ufffdb\ufffdc\ufffd"),
    ],
)
def test_numbers_are_written_one_way(got: Any, expected: Any) -> None:
    """Exact cases of every format: sign, zero, thousands, tiny shares, micro-units, decimals."""
    assert got == expected


@given(st.integers(-(2**63), 2**63 - 1))
@settings(deadline=None)
def test_money_reads_back_to_the_same_micro_units(microunits: int) -> None:
    """No amount is changed by writing it, in the long or the short form."""
    for form in (numbers.money, numbers.short_money):
        text = form(microunits, "X").removesuffix("\u00a0X").replace(",", "").replace("\u2212", "-")
        whole, _, part = text.partition(".")
        sign = -1 if text.startswith("-") else 1
        assert abs(int(whole)) * 10**6 + int(part.ljust(6, "0")) == sign * microunits
