"""The report page says exactly what its data says, to people and to browsers, and nothing else."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import reports
from pipelines.reports import (
    Estimate,
    GroupValue,
    LossCurve,
    NotAvailable,
    OwnerRow,
    Pricing,
    Provenance,
    Rate,
    ReportData,
    Valuation,
    charts,
    numbers,
    render,
)
from tests.pipelines.report_sample import Page, audit, digest, sample

REPORTS = Path(reports.__file__).parent
CHROMIUM = "/usr/bin/chromium"
# Everything that could leave a string: tags, attributes, templates, mathtext, bidi, NUL, SVG ends.
ATTACK = (
    "<script>alert(1)</script><img src=x onerror=alert(1)>\"'{{7*7}}{% if %}$\\frac$]]>\u202e\x00_"
)


@pytest.fixture(scope="module")
def html() -> str:
    return render(sample())


@pytest.mark.parametrize(
    "expected",
    [
        "Erasure 17",
        "Demonstration.",
        "✕ FAIL",
        "are not forgotten",
        "the exact retrain takes its place",
        "Request REQ-17 asked to erase 320 records of 64 people; its state is audited",
        "2026-12-03",
        "Secrets read out before erasure: 64 of 64; after: 21 of 64; reference: 0 of 64.",
        "with 95 % confidence the true rate is below 4.6 % (direct question)",
        "12,025 records",
        "320 erased or withdrawn of 12,345",
        "Received 14,002 Accepted 12,346 Held out as the buyer's target 1,203 Quarantined 309",
        "unknown licence 221",
        "washington 121 30,211 8.612 ± 0.013 [8.587, 8.638] 2.1531 ± 0.0041",
        "adams 9 801 not available not available",
        "early washington , adams +0.8124 0.0121 [+0.7887, +0.8361] 512",
        "registry registry \u22120.0312 0.0094 [\u22120.0496, \u22120.0128] 511",
        "Sum of the values +0.7812",
        "+0.7812 ✓ equals the sum",
        "Positive lowers the buyer's loss; higher is better.",
        "washington +0.032900 412.345678 EUR 412,345,678 4.12 %",
        "adams not available 9,587.654323 EUR 9,587,654,323 95.88 %",
        "10,000.000001 EUR 10,000,000,001",
        "✓ sum equals pool",
        "train-1 train 1,998 7.0000 3.0271 18,211 700.0 MiB done",
        "gold-1 gold no steps not available not available not available not available resume me",
        "at most 4.200",
        "4.091 ± 0.013 [4.065, 4.117]",
        "100.0 % 64 of 64 32.8 % 21 of 64 0.0 % 0 of 64 +44.0 lower +22.1 5.0 ✕ FAIL",
        "0.940 [0.890, 0.980]",
        "+0.359 [+0.250, +0.470]",
        "3.298 ± 0.012",
        "not available: gold was not evaluated",
        "direct question 0 of 64 4.6 % 95 %",
        "original leaks ✓ yes expected 0.95, saw 1.00",
        "Copies of the model that left the house.",
        "signed, 42 entries",
        "1 of 2",
        "adams ✕ no expected aa, got bb",
        "torch 2.13.0",
        "order 1789 fixed by the recipe",
        "This report is evidence for a decision",
        *(digest(number) for number in range(1, 10)),
    ],
)
def test_every_fact_is_on_the_page_with_its_unit_and_interval(html: str, expected: str) -> None:
    """Each number of the data stands on the page, rounded by its error, beside its neighbours."""
    assert expected in Page(html).text


def test_the_page_names_the_digest_of_its_data(html: str) -> None:
    """The SHA-256 in the footer is that of the JSON form, so page and JSON can be matched."""
    assert hashlib.sha256(sample().to_json().encode()).hexdigest() in html


def test_every_table_says_which_direction_is_better(html: str) -> None:
    """A reader never has to guess whether a larger number is good news."""
    text = Page(html).text
    for phrase in ("lower is better", "higher is better", "nearer to gold is better"):
        assert phrase in text


def test_equal_data_gives_equal_bytes_in_another_process(html: str, tmp_path: Path) -> None:
    """Neither the hash seed nor the user's matplotlibrc nor the clock changes a byte."""
    assert render(ReportData.from_json(sample().to_json())) == html
    (tmp_path / "matplotlibrc").write_text(
        "font.size: 20\naxes.grid: True\nsvg.fonttype: path\nlines.linewidth: 9\nfigure.dpi: 30\n"
    )
    (tmp_path / "data.json").write_text(sample().to_json(), encoding="utf-8")
    code = (
        "import sys, hashlib, pathlib; from pipelines.reports import ReportData, render;"
        "data = ReportData.from_json(pathlib.Path(sys.argv[1]).read_text(encoding='utf-8'));"
        "print(hashlib.sha256(render(data).encode()).hexdigest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "MPLCONFIGDIR": str(tmp_path), "TZ": "Asia/Tokyo"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "data.json")],
        env=env,
        cwd=REPORTS.parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == hashlib.sha256(html.encode()).hexdigest()


def test_the_page_asks_for_nothing_from_anywhere(html: str) -> None:
    """No address, no script, no style sheet, font or picture from outside; a CSP that says so."""
    assert "http" not in html.replace("http-equiv", "")
    assert not re.search(
        r"@import|@font-face|url\((?!#)|\bsrc=|srcset=|<script|<iframe|<object", html
    )
    targets = {attrs[key] for _, attrs in Page(html).tags for key in attrs if key.endswith("href")}
    assert all(target and (target.startswith("#") or target == "data:,") for target in targets)
    assert "default-src 'none'" in html


def _poisoned(plain: Any) -> Any:
    if isinstance(plain, dict):
        keep = {"verdict", "better", "by"}
        return {
            key: value if key in keep and isinstance(value, str) else _poisoned(value)
            for key, value in plain.items()
        }
    if isinstance(plain, list):
        return [_poisoned(item) for item in plain]
    return ATTACK if isinstance(plain, str) else plain


def test_no_string_of_the_data_can_become_markup(html: str) -> None:
    """With an attack in every text field the page has the same elements and attributes as before."""
    data = ReportData.from_json(json.dumps(_poisoned(json.loads(sample().to_json()))))
    page, harmless = Page(render(data)), Page(html)
    assert Counter(tag for tag, _ in page.tags) == Counter(tag for tag, _ in harmless.tags)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "iframe"}
    names = {name for _, attrs in page.tags for name in attrs}
    assert names == {name for _, attrs in harmless.tags for name in attrs}
    assert not {name for name in names if name.startswith("on")}
    assert "<script>alert(1)</script>" in page.text  # shown as what it is
    assert "{{7*7}}" in page.text
    assert "\u202e" not in page.text
    assert "\x00" not in page.text


def test_an_owner_named_script_is_inert_in_the_chart_and_in_the_tables() -> None:
    """The plain case of the law above, on one id: four places, none of them an element."""
    data = sample()
    assert isinstance(data.valuation, Valuation)
    group = replace(data.valuation.groups[0], group="<script>", owners=("<script>",))
    text = render(replace(data, valuation=replace(data.valuation, groups=(group,))))
    assert "<script" not in text
    assert text.count("&lt;script&gt;") >= 4


@pytest.mark.parametrize(
    "label", ["a $x^2", "_hidden", "漢字", "\u202eabc", "x" * 500, " ", "#010101", 'id="q"']
)
def test_charts_take_any_label(label: str) -> None:
    """Mathtext, missing glyphs, hidden legends and look-alikes of attributes are only text."""
    line = charts.Line(label=label, x=[0, 1], y=[1.0, 2.0])
    svg = charts.svg(charts.lines([line, line], "step", "loss"), "c", "t", label)
    shown = numbers.printable(label)[:20].strip()
    assert shown in Page(svg).text
    assert "font-family" not in svg


def test_ids_are_unique_and_every_reference_has_a_target(html: str) -> None:
    """Several charts on one page do not share ids, and no link or label points into the void."""
    attributes = [attrs for _, attrs in Page(html).tags]
    ids = [attrs["id"] for attrs in attributes if "id" in attrs]
    assert len(ids) == len(set(ids))
    wanted = {
        str(a[k])[1:] for a in attributes for k in ("href", "xlink:href") if str(a.get(k))[0] == "#"
    }
    wanted |= {part for a in attributes for part in (a.get("aria-labelledby") or "").split()}
    wanted |= set(re.findall(r"url\(#([^)]+)\)", html))
    assert wanted <= set(ids)


def test_a_screen_reader_finds_captions_headers_and_descriptions(html: str) -> None:
    """Tables have a caption and scoped headers, charts a title and a description with numbers."""
    page = Page(html)
    count = Counter(tag for tag, _ in page.tags)
    assert count["table"] == count["caption"] > 10
    assert all(attrs.get("scope") in {"row", "col"} for tag, attrs in page.tags if tag == "th")
    pictures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(pictures) == count["desc"] == count["figcaption"] == 15
    assert all(attrs["role"] == "img" and "aria-labelledby" in attrs for attrs in pictures)
    assert "Horizontal bars, best group first" in page.text
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert count["h1"] == count["main"] == 1


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_enough_contrast_in_both_schemes(scheme: int) -> None:
    """WCAG 2.2 AA: text on its background reaches 4.5 : 1, chart marks on the card 3 : 1."""
    css = (REPORTS / "report.css").read_text()
    block = re.findall(r":root \{(.*?)\}", css, flags=re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))

    def contrast(one: str, other: str) -> float:
        high, low = sorted((_luminance(colours[one]), _luminance(colours[other])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    pairs = [(ink, back) for ink in ("ink", "muted", "accent") for back in ("page", "card")]
    pairs += [(tone, f"{tone}-tint") for tone in ("pass", "fail", "doubt", "invalid", "none")]
    assert (
        min(contrast(*pair) for pair in [*pairs, ("ink", "doubt-tint"), ("muted", "none-tint")])
        >= 4.5
    )
    assert min(contrast(m, "card") for m in ("good", "bad", "series-3", "series-4")) >= 3


def test_an_empty_report_says_for_every_section_why_it_is_missing() -> None:
    """Nothing is left out silently: each section carries the reason, and there is no verdict."""
    text = Page(render(ReportData.empty("Early", "the run stopped at the intake"))).text
    sections = [f.name for f in fields(ReportData) if NotAvailable in get_args(f.type)]
    assert len(sections) == 16
    assert text.count("not available: the run stopped at the intake") >= len(sections)
    assert "\u2013 NO VERDICT" in text
    assert "Nothing here says that anything was forgotten" in text
    assert "This report is evidence for a decision" in text


@pytest.mark.parametrize(
    "name", [f.name for f in fields(ReportData) if NotAvailable in get_args(f.type)]
)
def test_any_single_section_may_be_missing(name: str) -> None:
    """A report without one section renders, with the reason in its place."""
    page = Page(render(replace(sample(), **{name: NotAvailable(reason=f"no {name} today")})))
    assert f"not available: no {name} today" in page.text


def test_empty_tables_and_absent_numbers_render() -> None:
    """No groups, no rows, no tiers, no receipts, no tries: words, not a crash and not a zero."""
    data = sample()
    assert isinstance(data.valuation, Valuation)
    assert isinstance(data.pricing, Pricing)
    assert isinstance(data.provenance, Provenance)
    none = NotAvailable(reason="no such model")
    tier = replace(
        audit().tiers[0], original=none, unlearned=Rate(hits=0, n=0), gold=none, bound=None
    )
    text = Page(
        render(
            replace(
                data,
                requests=(),
                owners=(),
                valuation=replace(data.valuation, groups=(), loss_with=None),
                pricing=replace(data.pricing, rows=(), pool_microunits=0),
                training=(),
                audit=audit(
                    tiers=(tier,), zero_bounds=(), controls=(), membership=none, utility=none
                ),
                provenance=replace(data.provenance, receipts=(), checkpoint_root=none),
            )
        )
    ).text
    for phrase in (
        "No erasure was asked for.",
        "no run was recorded",
        "no tries",
        "no receipt was written",
    ):
        assert phrase in text
    assert text.count("not available: no such model") >= 5


def test_a_pool_that_is_not_paid_out_exactly_is_called_out() -> None:
    """One micro-unit too few shows on the first screen and in the table."""
    data = sample()
    assert isinstance(data.pricing, Pricing)
    text = Page(render(replace(data, pricing=replace(data.pricing, pool_microunits=10**10)))).text
    assert "NOT equal" in text
    assert "✕ sum differs from pool" in text


def test_values_that_do_not_add_up_are_called_out() -> None:
    """Efficiency is shown as checked, not assumed."""
    data = sample()
    assert isinstance(data.valuation, Valuation)
    off = replace(data.valuation, loss_with=Estimate(value=6.0))
    assert "✕ differs from the sum" in Page(render(replace(data, valuation=off))).text


def test_an_interval_of_another_level_says_so() -> None:
    """Column heads promise 95 %; anything else is printed with its level."""
    row = OwnerRow(
        owner="a",
        records=1,
        tokens=2,
        bits_per_token=Estimate(value=1.0, low=0.5, high=1.5, level=0.9),
        bits_per_byte=None,
    )
    assert "[0.50, 1.50] at 90.0 %" in Page(render(replace(sample(), owners=(row,)))).text


@given(st.integers(0, 5000))
@settings(deadline=None)
def test_thinning_keeps_the_ends_and_a_bounded_count(size: int) -> None:
    """At most 401 points, in order, the first and the last always among them."""
    keep = charts.thinned(size)
    assert len(keep) <= 401
    assert keep == sorted(set(keep))
    assert size == 0 or (keep[0] == 0 and keep[-1] == size - 1)


def test_a_large_report_stays_small_and_says_what_its_charts_leave_out() -> None:
    """Hundreds of groups and a long curve: charts are cut with a note, tables are complete."""
    data = sample()
    assert isinstance(data.valuation, Valuation)
    groups = tuple(
        GroupValue(group=f"g{i:03d}", owners=(f"o{i}",), value=Estimate(value=i / 1000))
        for i in range(200)
    )
    curve = LossCurve(
        run="r", kind="k", steps=tuple(range(50_000)), losses=tuple(1.0 for _ in range(50_000))
    )
    text = render(
        replace(data, valuation=replace(data.valuation, groups=groups), training=(curve,) * 7)
    )
    assert "The 30 groups at the ends of 200 are drawn" in text
    assert "The first 5 of 7 runs are drawn" in text
    assert all(f"o{i}</bdi>" in text for i in range(200))
    assert len(text) < 400_000


def test_importing_the_package_is_cheap() -> None:
    """Neither the reports nor their data load torch, matplotlib, polars, jinja2 or dagster."""
    code = (
        "import sys, pipelines.reports as r; r.ReportData; r.render;"
        "heavy = {'torch','matplotlib','polars','jinja2','dagster','numpy','pyarrow'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPORTS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_public_names_are_sorted_documented_and_real() -> None:
    """`__all__` is sorted, equals what can be loaded, and each name has a docstring."""
    assert sorted(reports.__all__) == reports.__all__ == sorted(reports._MODULES)
    assert all(getattr(reports, name).__doc__ for name in reports.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        reports.nonsense  # noqa: B018  the access is the test


ARGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.mark.browser
def test_a_browser_opens_the_page_without_error_request_or_sideways_scroll(
    html: str, tmp_path: Path
) -> None:
    """Light, dark, phone and print: no console message, no request but the file, nothing cut off."""
    if not shutil.which(CHROMIUM):
        pytest.skip(f"{CHROMIUM} is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    file = tmp_path / "report.html"
    file.write_text(html, encoding="utf-8")
    shown: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGS)
        views = [
            ("light", 1280, "screen"),
            ("dark", 1280, "screen"),
            ("light", 390, "screen"),
            ("dark", 794, "print"),
        ]
        for scheme, width, media in views:
            context = browser.new_context(
                color_scheme=scheme, viewport={"width": width, "height": 900}
            )
            page = context.new_page()
            page.on("console", lambda message: shown.append(message.text))
            page.on("pageerror", lambda error: shown.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(file.as_uri())
            page.emulate_media(media=media)
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.inner_text(".hero .badge") == "✕ FAIL"
            box = page.locator(".hero").bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < 900, "the verdict is on the first screen"
            ink = page.evaluate("getComputedStyle(document.querySelector('svg text')).fill")
            assert ink not in {"", "none"}
            picture = tmp_path / f"{scheme}-{width}-{media}.png"
            page.screenshot(path=picture, full_page=True)
            assert picture.stat().st_size > 20_000
            context.close()
        browser.close()
    assert shown == []
    assert asked == [file.as_uri()] * len(views)
