"""The audit report says what its dossier says, to a compliance officer and to an engineer, and nothing that must not be told."""

import hashlib
import json
import math
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from pipelines.evidence import _primary, _secondary
from pipelines.reports import NotAvailable, Rate, render
from pipelines.reports import dossier_words as words
from pipelines.reports.dossier import Dossier
from pipelines.reports.dossier_drawings import best_sources, drawings
from pipelines.reports.dossier_page import render_dossier
from pipelines.reports.errors import ReportError
from pipelines.reports.printing import print_pdf
from tests.pipelines.dossier_sample import dossier, engineering, evidence
from tests.pipelines.report_sample import Page, audit, digest, sample
from tests.pipelines.test_report import ARGS, CHROMIUM, _poisoned


@pytest.fixture(scope="module")
def html() -> str:
    return render_dossier(dossier())


@pytest.mark.parametrize(
    "expected",
    [
        # part 1: asked, by whom, when, which models, verdict in words, numbers, limits, next
        "Part 1 · for the compliance officer",
        "✕ FAIL",
        "The people are not forgotten by this model",
        "Beyond what was allowed: Asked after further training, Was a person in it?, 64 random tries.",
        "Erasure of 320 records of 64 people",
        "Asked first of all: the model before the erasure ",
        "What the original had memorised",
        "a1b2c3d4e5f60718 9f8e7d6c5b4a3928 2026-11-03 2026-12-03 audited open",
        "0011223344556677 by record 2026-11-04 no deadline shredded 2026-11-30T10:11:12Z",
        "Legal basis: Art. 17(1)(b) GDPR: consent withdrawn (a1b2c3d4e5f60718); not stated for 0011223344556677",
        "pushed out of the trained model afterwards (approximate)",
        "Method: NPO with a retain term.",
        "3 reference models that never saw the records",
        "Of 64 people, 0 could be read out of the cleaned model (before the erasure: 64; a model that never saw them: 0).",
        "With 95 % confidence the true share is below 4.6 %.",
        "At most +4.1 points above the reference, with 95 % confidence; up to 5.0 percentage points were allowed.",
        "Of 64 people, 21 could be read out",
        "Above the reference at least +22.1 points",
        "Before the erasure: 1.00; cleaned: 0.94; never saw them: 0.58; 0.15 from the last was allowed.",
        "Somebody who has the model's files and trains it a little on other records: 21 of 64 people (weights, 64 records, 100 steps).",
        "64 random tries, needs queries only, many tries: a chance of 54.1 % per person (0.0 % for a model that never saw them).",
        "Open to whoever makes the effort named above.",
        "for the person who is told most, each piece of the secret is 10.4 times likelier than under every reference model (+2.35 nats per token; zero",
        "Don't release the cleaned model.",
        "Thudi et al.",
        "Copies of the model that left the house.",
        "Token shards, tables: kept until the requests are finished.",
        f"Reviewed by Ada Example at 2026-12-01T09:08:07Z: an earlier state of this report, digest {digest(30)[:16]}, committed to in ledger entry 33.",
        "Reviewer: Ada Example Signature and date Next review",
        # part 2: plan, endpoints with bounds, Holm, curves, distributions, subgroups, people, depth, lineage, how to repeat
        "Part 2 · for the engineer",
        "ledger entry 31",
        "9,876 measurements",
        "None: judging the rows by the plan again gives this verdict with the same numbers.",
        "33 of the 320 records stand in no window",
        "attacks.fine_tune_lr 0.0001",
        "original leaks ✓ yes expected 0.95, saw 1.00",
        "64 1.000 0.000 0.000, 0.016 \u22120.041 to 0.041 0.050",
        "0.432 to 0.662 0.050 0.001 0.002 leaks 64 samples",
        "1.000 1.000 no leak shown says little: the original hardly leaks",
        "step 10: 0.13 [0.12, 0.22] ; step 25: 0.33 [0.30, 0.40]",
        "0.451 0.141 0.0003 +0.512 0.2210 to 0.2870 ± 0.0310 ✕ no",
        "unlearned 1.980",
        "rare 5 20.0 % [3.6 %, 62.5 %] +0.444 +1.111 +1.234",
        "direct/trained, question 2 64 98.0 % 0.0 % [0.0 %, 5.7 %] 0.0 %",
        "3, 1 , 0 +2.345 none",
        "3, 0 , 0 +2.335 0.15",
        "Median 0.87, 5th to 95th percentile over people 0.21 to 1.34. 1 of 64 people have none",
        "3 restored/partial share given away 48 0.958 0.625 0.042 0.64 0.51 to 0.76",
        "2 in_context share given away 64 0.031 0.000 0.000 the original has no lead",
        "the first 25 of 64, the JSON has all",
        "unlearned 0.47 61 0.23, 0.91 0.31, 0.77 \u22123.43, \u22125.55",
        "gold 1 1.00 61 1.00, 1.00 1.00, \u2013 \u22123.65, \u22126.78",
        "gradient_cosine 0.43 [0.21, 0.62] 0.37 0.89",
        "1 to 4 28 +0.0912 [+0.0511, +0.1333] +0.4121",
        "layer 1 attention 0.0312 0.8123 3.1 % [0.1 %, 47.1 %] ; 0.0 % [0.0 %, 20.4 %]",
        "gradient_cosine representation_cosine +0.31 [+0.12, +0.48] gradient_cosine semantic none",
        "all of them +0.2022, +0.0444; gold vs gold (null) +0.0066, +0.0055",
        "320 of 320 forgotten records have a path to the old root, recomputed; for 318 of them",
        "2 were delivered by another owner too",
        "original train-1",
        "1,000 18,211 700.0 MiB",
        "unlearning.verdict.contradictions",
        "torch 2.13.0",
        "original: direct 12.3 11.7",
        *(digest(number) for number in range(20, 29)),
    ],
)
def test_every_fact_stands_on_the_page(html: str, expected: str) -> None:
    """Part 1 in words, part 2 in numbers, each beside its unit, bound and margin."""
    assert expected in Page(html).text


def test_each_verdict_has_its_words_and_says_what_to_do() -> None:
    """Four verdicts, four meanings; none but PASS lets the cleaned model out."""
    seen = set()
    for verdict, said, todo in (
        ("PASS", "count as forgotten", "Release the cleaned model"),
        ("FAIL", "are not forgotten", "Don't release the cleaned model"),
        ("INCONCLUSIVE", "doesn't decide", "three reference models instead of 2"),
        ("INVALID", "can't be relied on", "audit again: gold exists."),
    ):
        controls = audit().controls
        if verdict == "INVALID":
            controls = (replace(controls[0], name="gold exists", holds=False),)
        tiers = audit().tiers[:1]
        kept = audit(
            tiers=tiers, verdict="FAIL", num_gold_seeds=3 if verdict == "PASS" else 2, controls=controls, side=(),
            membership=replace(audit().membership, verdict="PASS"), utility=replace(audit().utility, verdict="PASS"),
        )  # fmt: skip
        made = dossier(audit=replace(kept, verdict=verdict))
        text = " ".join((words.meaning(made), words.residual(made), *words.next_steps(made)))
        assert said in text
        assert todo in text
        assert ("Release the cleaned model" in text) == (verdict == "PASS")
        seen.add(words.meaning(made))
    assert len(seen) == 4


def test_the_one_run_bound_says_what_was_committed_and_that_no_coin_was() -> None:
    """The theorem wants a coin per person: beside the numbers stands that there was none; without numbers nothing stands there."""
    for rows, there in ((evidence().one_run, True), ((), False)):
        text = Page(render_dossier(dossier(evidence=evidence(one_run=rows)))).text
        assert ("a keyed digest of the look-alikes' file" in text) == there
        assert ("Not committed, and not so: a coin." in text) == there


def test_an_unchecked_lineage_stands_on_both_parts() -> None:
    """Page 1 says that the models' origin is open and what to do, part 2 what was missing; without it neither says a word."""
    said = "whether the ledger knows the checkpoints: nobody looked"
    kept = audit(verdict="INCONCLUSIVE", side=(), num_gold_seeds=3)
    for unchecked in ((said,), ()):
        made = dossier(audit=kept, evidence=evidence(unchecked=unchecked))
        first = " ".join((words.why(made), *words.next_steps(made)))
        assert ("where the models come from could not be checked in full" in first) == bool(unchecked)  # fmt: skip
        assert ("whose digests the ledger knows" in first) == bool(unchecked)
        assert (said in Page(render_dossier(made)).text) == bool(unchecked)


def test_an_invalid_audit_shows_no_endpoint_as_passed() -> None:
    """Where a control misbehaved, the engineer's table says INVALID too, and no cost of an attack is claimed."""
    row = {
        "name": "direct", "subgroup": "", "people": 16, "original": "0.0", "unlearned": "0.0", "gold": ["0.0"], "low": "-0.1", "high": "0.1",
        "margin": "0.15", "status": "PASS", "has_power": True,
    }  # fmt: skip
    assert _primary(row, "INVALID").verdict == "INVALID"
    assert _primary(row, "FAIL").verdict == "PASS"
    assert "Not known" in words.attackers(dossier(audit=audit(verdict="INVALID")))[0]


def test_what_was_not_measured_is_no_number() -> None:
    """What is nan or none in `audit.json` becomes an absent value, not a zero."""
    row = {
        "name": "asked/inverted", "people": 0, "original": "nan", "unlearned": "nan", "gold": [], "low": "nan", "high": "nan", "margin": "0.05",
        "leaks": False, "p_value": "1.0", "p_holm": "1.0", "best": "nobody could be asked", "has_power": False,
    }  # fmt: skip
    made = _secondary(row)
    assert (made.original, made.unlearned, made.low, made.gold) == (None, None, None, ())
    page = Page(render_dossier(dossier(evidence=evidence(metrics=(made,))))).text
    assert "no leak shown nobody could be asked" in page


def test_an_undecided_tier_says_how_many_people_would_decide() -> None:
    """INCONCLUSIVE names the number on the first page."""
    tier = replace(
        audit().tiers[0], verdict="INCONCLUSIVE", bound=0.09, reason="116 people would decide"
    )
    made = dossier(audit=audit(tiers=(tier,), verdict="INCONCLUSIVE", side=()))
    text = Page(render_dossier(made)).text
    assert "too few people to decide. 116 people would decide." in text
    assert "Direct question: 116 people would decide." in text


def test_the_facts_survive_json_and_name_the_page(html: str) -> None:
    """JSON gives an equal dossier and the same bytes of HTML; its schema has a version; another version is refused."""
    text = dossier().to_json()
    assert Dossier.from_json(text) == dossier()
    assert render_dossier(Dossier.from_json(text)) == html
    assert hashlib.sha256(text.encode()).hexdigest() in html
    plain = json.loads(text)
    assert (plain["schema"], plain["format"]) == ("dataworth.audit-report", 5)
    with pytest.raises(ReportError, match="format"):
        Dossier.from_json(json.dumps(plain | {"format": 6}))
    with pytest.raises(ReportError, match="note"):
        Dossier.from_json(json.dumps(plain | {"note": "x"}))
    with pytest.raises(ReportError, match="cannot prove"):
        dossier(limits=())
    with pytest.raises(ReportError, match="answers a request"):
        dossier(requests=())


def test_a_review_speaks_about_the_state_that_was_read() -> None:
    """The digest leaves reviews out, so that adding one doesn't outdate it; a changed state does."""
    (one,) = dossier().reviews
    now = replace(one, report=dossier().reviewable)
    made = dossier(reviews=(one, now))
    assert made.reviewable == dossier(reviews=()).reviewable == now.report
    earlier, current, hand = words.reviews(made)
    assert "an earlier state of this report" in earlier
    assert "09:08:07Z: this report, digest" in current
    assert "doesn't check whose hand" in hand
    closed = tuple(replace(asked, state="shredded") for asked in made.requests)
    *told, _ = words.reviews(replace(made, requests=closed))
    assert all("an earlier state" in said for said in told)
    with pytest.raises(ReportError, match="64 hex digits"):
        replace(one, nonce="xyz")


def test_the_page_asks_for_nothing_and_no_string_becomes_markup(html: str) -> None:
    """No address, script or style from outside; with an attack in every text the elements are the same."""
    assert "http" not in html.replace("http-equiv", "")
    assert not re.search(r"@import|@font-face|url\((?!#)|\bsrc=|<script|<iframe|<object", html)
    plain = json.loads(dossier().to_json())
    poisoned = {name: value if name in ("schema", "kind") else _poisoned(value) for name, value in plain.items()}  # fmt: skip
    for one, before in zip(poisoned["reviews"], plain["reviews"], strict=True):
        one["nonce"] = before["nonce"]  # hex, or it is refused
    page, harmless = Page(render_dossier(Dossier.from_json(json.dumps(poisoned)))), Page(html)
    dangerous = {"script", "img", "iframe", "object"}
    assert not {tag for tag, _ in page.tags} & dangerous
    assert {name for _, attrs in page.tags for name in attrs} <= {
        name for _, attrs in harmless.tags for name in attrs
    }
    assert "<script>alert(1)</script>" in page.text  # shown as what it is
    assert "\u202e" not in page.text


def test_ids_are_unique_and_tables_have_captions(html: str) -> None:
    """What a screen reader needs: unique ids, captions, scoped heads, described pictures."""
    page = Page(html)
    ids = [str(attrs["id"]) for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    count = Counter(tag for tag, _ in page.tags)
    assert count["table"] == count["caption"] > 12
    assert count["svg"] == count["desc"] == count["figcaption"] == len(drawings(dossier())) == 10
    assert all(attrs.get("scope") in {"row", "col"} for tag, attrs in page.tags if tag == "th")


def test_a_bare_dossier_says_what_is_missing() -> None:
    """Without depth, curves, subgroups, secondary attacks and membership: a reason each, no crash."""
    bare = evidence(metrics=evidence().metrics[:1], curves=(), spreads=(), leakage=(), questions=(), likeness=(), one_run=(), people=(), unchecked=(), noted=(), seconds=(), forgetting=None, recovery=())  # fmt: skip
    none = NotAvailable(reason="no look-alikes")
    made = dossier(
        engineering=NotAvailable(reason="not measured at this size"), evidence=bare, copies=(), versions=(), models=(),
        audit=audit(membership=none, utility=none, tiers=(), side=(), zero_bounds=(), controls=(), not_tested=()),
    )  # fmt: skip
    text = Page(render_dossier(made)).text
    for phrase in (
        "Depth and ripple: not available: not measured at this size",
        "Recovery curves: not available",
        "Distributions: not available",
        "Forgetting score: not available",
        "Recovery: not available",
        "Leakage per subgroup: not available",
        "Secondary attacks: not available",
        "No attack beside the three was tried",
        "Not tested: not available",
    ):
        assert phrase in text, phrase


def test_of_each_source_the_best_rate_of_the_adversary_is_drawn() -> None:
    """Three rates of one source: one chart, of the rate that gives most out of the unlearned model."""
    one = evidence().curves[1]
    curves = [
        replace(one, source=f"benign/lr-{rate}", rates=(share, share))
        for rate, share in (("0.0001", 0.1), ("0.0003", 0.6), ("0.001", 0.2))
    ]
    assert best_sources([one, *curves]) == [one.source, "benign/lr-0.0003"]
    noise = replace(curves[2], model="gold 1", rates=(0.9, 0.9))
    assert best_sources([*curves, noise]) == ["benign/lr-0.0003"]


def test_depth_with_the_wrong_number_of_layers_is_refused() -> None:
    """A curve of one layer in a model of two, a module without a distance: named."""
    part = engineering()
    with pytest.raises(ReportError, match="unlearned has not 2 layers"):
        replace(part, depth=(replace(part.depth[1], cka=(1.0,)),))
    with pytest.raises(ReportError, match="head has not 2 distances"):
        replace(part, modules=(replace(part.modules[1], applied=(math.pi,)),))


def test_a_rate_that_is_missing_is_told_as_missing() -> None:
    """An endpoint that nobody could be asked for is no zero."""
    tier = replace(audit().tiers[0], unlearned=NotAvailable(reason="not measured"), gold=Rate(hits=0, n=4))  # fmt: skip
    (line,) = words.lines(dossier(audit=audit(tiers=(tier,), membership=NotAvailable(reason="x"), utility=NotAvailable(reason="x"))))  # fmt: skip
    assert line.text == "Not available: not measured."


def test_every_table_of_the_audit_stands_under_its_own_heading() -> None:
    """In the main report, attacks beside the tiers come before the controls, each under a heading that names it."""
    html = render(sample())
    text = html[html.index('<h2 id="audit">') :]
    places = [
        text.index(mark)
        for mark in (
            "<h3>Attacks beside the tiers</h3>",
            "sampled/k-64",
            "<h3>Controls</h3>",
            "original leaks",
        )
    ]
    assert places == sorted(places)
    without = render(replace(sample(), audit=audit(side=())))
    assert "Attacks beside the tiers" not in without
    assert "<h3>Controls</h3>" in without


# --- printing and browsers --------------------------------------------------------------------------------------------


def test_without_chromium_the_pdf_is_refused_with_what_to_do(monkeypatch, tmp_path: Path) -> None:
    """No program of a known name, or one that makes no PDF: a message, and no file."""
    page = tmp_path / "page.html"
    page.write_text("<p>x")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ReportError, match="no Chromium found"):
        print_pdf(page, tmp_path / "page.pdf")
    broken = tmp_path / "chromium"
    broken.write_text("#!/bin/sh\necho it burns >&2\n")
    broken.chmod(0o700)
    with pytest.raises(ReportError, match=r"made no PDF of page\.html: it burns"):
        print_pdf(page, tmp_path / "page.pdf")
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "chromium"}


@pytest.mark.browser
def test_chromium_prints_it_with_part_one_on_one_page(html: str, tmp_path: Path) -> None:
    """The PDF begins as one; at the size of A4 part 1 fits on its first page."""
    if not shutil.which(CHROMIUM):
        pytest.skip(f"{CHROMIUM} is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    page_file = tmp_path / "page.html"
    page_file.write_text(html, encoding="utf-8")
    print_pdf(page_file, tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes()[:5] == b"%PDF-"
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "page.pdf"}
    width, height = round((210 - 24) / 25.4 * 96), (297 - 20) / 25.4 * 96
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGS)
        page = browser.new_page(viewport={"width": width, "height": int(height)})
        page.goto(page_file.as_uri())
        page.emulate_media(media="print")
        bottom = page.evaluate("document.querySelector('.part-one').getBoundingClientRect().bottom")
        browser.close()
    assert bottom <= height


@pytest.mark.browser
def test_a_browser_opens_it_without_error_request_or_sideways_scroll(
    html: str, tmp_path: Path
) -> None:
    """Light, dark and phone: no console message, no request but the file, the verdict on the first screen; a screenshot each."""
    if not shutil.which(CHROMIUM):
        pytest.skip(f"{CHROMIUM} is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    file = tmp_path / "audit.html"
    file.write_text(html, encoding="utf-8")
    said: list[str] = []
    asked: list[str] = []
    views = (("light", 1280), ("dark", 1280), ("light", 390))
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=CHROMIUM, headless=True, args=ARGS)
        for scheme, width in views:
            context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})  # fmt: skip
            page = context.new_page()
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: asked.append(request.url))
            page.goto(file.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.inner_text(".hero .badge") == "✕ FAIL"
            box = page.locator(".hero").bounding_box()
            assert box is not None
            assert box["y"] + box["height"] < 900
            picture = tmp_path / f"audit-{scheme}-{width}.png"
            page.screenshot(path=picture, full_page=True)
            assert picture.stat().st_size > 20_000
            context.close()
        browser.close()
    assert said == []
    assert asked == [file.as_uri()] * len(views)
