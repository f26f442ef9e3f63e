"""Audit reports: a tier without power on the page, older formats of the JSON, which score leads."""

import json
from dataclasses import replace

import pytest

from pipelines.audits import _tier
from pipelines.evidence import _primary, _spreads
from pipelines.reports import attack_words
from pipelines.reports import dossier_words as words
from pipelines.reports.dossier import Dossier
from pipelines.reports.dossier_page import render_dossier
from pipelines.reports.errors import ReportError
from tests.pipelines.dossier_sample import as_fourth, as_third, dossier, evidence
from tests.pipelines.report_sample import Page, audit
from unlearning.repertoire import FULL
from unlearning.rows import Evidence, Row, to_table
from unlearning.subgroups import KINDS


def test_a_tier_under_which_the_original_hardly_leaks_is_no_pass_on_the_page() -> None:
    """No green badge: the first page, the tier's row and the next steps say that it says little and what would decide; PASS above it is refused."""
    row = {
        "name": "in_context", "people": 64, "original": "0.031250", "unlearned": "0.000000", "gold": ["0.000000"], "low": "-0.04", "high": "0.0406",
        "margin": "0.05", "status": "INCONCLUSIVE", "people_needed": "none", "has_power": False, "subgroup": "",
    }  # fmt: skip
    tier = _tier("in_context", row)
    metric = _primary(row, "INCONCLUSIVE")
    made = dossier(audit=audit(tiers=(tier,), verdict="INCONCLUSIVE", side=()), evidence=evidence(metrics=(metric,)))  # fmt: skip
    text = Page(render_dossier(made)).text
    assert (
        "Says little: the original hardly leaks under it; more people would not decide; no other way to demonstrate was tried: a new audit tries "
        "eight, if two people or more stay. What came out here decides nothing." in text
    )
    assert "In-context recovery: says little" in text
    assert "? INCONCLUSIVE says little: the original hardly leaks" in text
    assert "\u2713 PASS" not in text
    (line,) = [one for one in words.lines(made) if one.title == "Asked after examples"]
    assert line.verdict == "INCONCLUSIVE"
    kept = replace(audit().tiers[0], tier="2", has_power=False)
    member, use = (replace(one, verdict="PASS") for one in (audit().membership, audit().utility))
    with pytest.raises(ReportError, match="tier 2 has no power"):
        audit(tiers=(kept,), verdict="PASS", side=(), membership=member, utility=use)
    counted = _tier("in_context", row | {"people_needed": 91})
    assert (
        "91 people would decide (requests that wait together are audited together)"
        in counted.reason
    )
    ways = [{"demonstrations": 3, "between": "newline", "given_away": 0, "people": 50}, {"demonstrations": 1, "between": "space", "given_away": 2, "people": 50}]  # fmt: skip
    searched = _tier("in_context", row, ways)
    assert (
        "2 ways to demonstrate were tried on 50 people who stay, and the best brought out 2 of them"
        in searched.reason
    )
    assert _tier("in_context", row | {"status": "PASS", "has_power": True}, ways).reason == ""


def as_second(plain: dict) -> dict:
    """The JSON of a report as format 2 wrote it."""
    plain = as_third(plain)
    evidence = plain["evidence"]
    for rows, names in (
        (plain["audit"]["tiers"], ["has_power"]), (evidence["metrics"], ["has_power"]), (evidence["leakage"], ["low", "high"]),
        (evidence["questions"], ["low", "high"]), (evidence["people"], ["forgetting"]), ([evidence], ["forgetting", "recovery"]),
    ):  # fmt: skip
        for one in rows:
            for name in names:
                del one[name]
    del plain["engineering"]["gaps"]
    for one in plain["engineering"]["modules"]:
        del one["facts_low"], one["facts_high"]
    evidence["seconds"] = [{"name": one["name"], "value": f"{one['wall_s']:.1f}"} for one in evidence["seconds"]]  # fmt: skip
    return plain | {"format": 2}


def test_every_attack_and_every_derived_subgroup_has_words() -> None:
    """No code of a shipped repertoire stands on the first page; a label of the records' own has no words made up for it."""
    codes = [
        *FULL.attacks,
        "sampled/k-64",
        "exposure",
        *(f"membership:{one}" for one in FULL.memberships),
    ]
    assert not [code for code in codes if attack_words.title(code) == code]
    labels = ["shown/more", "shown/less", "name/rare", "name/common", "script/cyrillic", *(f"attribute/{kind}" for kind in KINDS)]  # fmt: skip
    assert all(attack_words.subgroup(label) for label in labels)
    assert attack_words.subgroup("minors") == ""
    assert attack_words.amounts("quantised/int-4", 0.25, 0.0) == "the secrets of 25.0\N{NO-BREAK SPACE}% of the people (0.0\N{NO-BREAK SPACE}% for a model that never saw them)"  # fmt: skip
    assert attack_words.times_likelier(-0.7) == "2.0 times"


def test_a_report_of_the_fourth_format_has_no_whole_change_in_the_map_of_facts() -> None:
    """Format 4 is read with everything it said; the row that it hadn't is left out of map and table."""
    old = as_fourth(json.loads(dossier().to_json()))
    read = Dossier.from_json(json.dumps(old))
    part = dossier().engineering
    modules = tuple(replace(one, outranked=()) for one in part.modules)
    bare = replace(
        part, whole_facts=(), whole_outranked=(), null_outranked=(), numbered=(), modules=modules
    )
    assert read == replace(dossier(), engineering=bare)
    assert (
        "all of them +0.3438, +0.0952; gold vs gold (null) +0.0469"
        in Page(render_dossier(dossier())).text
    )
    assert "Own numbers outranked" not in Page(render_dossier(read)).text
    assert "all of them 18.8 %; 5.3 %" in " ".join(Page(render_dossier(dossier())).text.split())
    assert "all of them 18.8 %" not in Page(render_dossier(read)).text


def test_the_first_reports_of_the_fifth_format_are_read() -> None:
    """They don't say how many people have a number; all else stays, and no count is shown."""
    old = json.loads(dossier().to_json())
    del old["engineering"]["numbered"]
    read = Dossier.from_json(json.dumps(old))
    assert read == replace(dossier(), engineering=replace(dossier().engineering, numbered=()))
    assert "all of them +0.3438, +0.0952" in Page(render_dossier(read)).text


def test_a_report_of_the_third_format_says_what_it_said() -> None:
    """Format 3 had one list for what was unchecked and what was noted: read, its sentences stay where they stood."""
    old = as_third(json.loads(dossier().to_json()))
    old["evidence"]["unchecked"] = ["nobody looked", "33 of the 320 records stand in no window"]
    read = Dossier.from_json(json.dumps(old))
    assert (read.format, read.evidence.noted) == (5, ())
    assert list(read.evidence.unchecked) == old["evidence"]["unchecked"]
    assert "33 of the 320 records stand in no window" in Page(render_dossier(read)).text


def test_reports_of_the_second_format_do_not_know_what_was_added() -> None:
    """Format 2 asked for no power, score or interval: read, they are not known, in place of made up."""
    read = Dossier.from_json(json.dumps(as_second(json.loads(dossier().to_json()))))
    assert {one.has_power for one in (*read.audit.tiers, *read.evidence.metrics)} == {None}
    assert {one.low for one in (*read.evidence.leakage, *read.evidence.questions)} == {None}
    assert (read.evidence.forgetting, read.evidence.recovery) == (None, ())
    assert (read.engineering.gaps, read.engineering.modules[0].facts_low) == ((), ())
    assert (read.engineering.kept, read.engineering.null_facts, read.engineering.whole_facts) == (
        (),
        (),
        (),
    )
    text = Page(render_dossier(read)).text
    assert "says little" not in text
    assert "Forgetting score: not available" in text
    assert "original: direct 12.3 none" in text


def test_a_report_of_the_first_format_is_read_without_basis_and_reviews() -> None:
    """Format 1 had neither: read, they are empty; anything else that is missing is still refused."""
    plain = json.loads(dossier().to_json())
    plain = as_second(plain)
    old = {name: value for name, value in plain.items() if name != "reviews"} | {"format": 1}
    old["requests"] = [{name: value for name, value in one.items() if name != "basis"} for one in plain["requests"]]  # fmt: skip
    read = Dossier.from_json(json.dumps(old))
    bare = tuple(replace(one, basis="") for one in dossier().requests)
    assert read.requests == bare
    assert (read.reviews, read.format) == ((), 5)
    text = Page(render_dossier(read)).text
    assert "Reviewer Signature and date Next review" in text
    assert "Reviewed by" not in text
    assert "Legal basis: not stated for a1b2c3d4e5f60718, 0011223344556677" in text
    with pytest.raises(ReportError, match="missing field batch"):
        Dossier.from_json(json.dumps({name: value for name, value in old.items() if name != "batch"}))  # fmt: skip


def test_extraction_strength_leads_the_distributions() -> None:
    """Where it was measured its chart comes first; an audit without a repertoire has the two others only."""

    def rows(*attacks: tuple[str, str]) -> Evidence:
        return Evidence(to_table([
            Row(f"p{person}", "forgotten", "", 0, "original", "o", attack, score, person / 4)
            for attack, score in attacks for person in range(4)
        ]))  # fmt: skip

    old = (("membership", "loss"), ("direct/trained", "secret_logprob"))
    found = _spreads(rows(("extraction", "extraction_strength"), *old), [("original", "o")])
    assert [one.score.split(",")[0] for one in found] == ["extraction strength", "log-probability of the secret", "loss on the person's records"]  # fmt: skip
    assert found[0].quantiles[-1] == 0.75
    assert len(_spreads(rows(*old), [("original", "o")])) == 2
