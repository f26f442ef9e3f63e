"""`dataworth audit`: the report that the graph wrote, brought up to date; clear refusals; nothing in it that tells who asked."""

import hashlib
import hmac
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from custody_home import user_site
from graph_commands import FORGET

from pipelines import requests
from pipelines.erasure.batches import groups, sealed_lines
from pipelines.erasure.finishing import enter_state
from pipelines.reports.dossier import Dossier
from pipelines.requests import Request, RequestError
from pipelines.site import open_site
from pipelines.steps import audit_review
from pipelines.steps.audit_report import find, reference_of
from pipelines.steps.ledger import open_ledger
from tests.pipelines.dossier_sample import as_third

SECRET = re.compile(r"\d{4,}")


def needles_of(home: Path) -> dict[str, set[str]]:
    """What must not stand in a report, from the sealed records themselves: texts, numbers, subjects, ids, and their plain hashes."""
    site = open_site(home, None, "tiny", None)
    lines = [line for group in groups(site) for folder in group.folders for line in sealed_lines(folder)]  # fmt: skip
    assert len(lines) > 50
    texts = {line["text"] for line in lines}
    subjects = {line["subject"] for line in lines}
    numbers = {number for text in texts for number in SECRET.findall(text)}
    names = {source for subject in subjects for source in subject.split("/")} | {"registry"}
    plain = texts | subjects | numbers | names
    hashes = {hashlib.new(kind, one.encode()).hexdigest()[:16] for one in plain for kind in ("sha256", "md5", "sha1")}  # fmt: skip
    ids = {line["record_id"] for line in lines} | {one.id for one in requests.load(site.home)}
    assert min(len(numbers), len(subjects)) > 10
    return {"texts": texts | subjects | names, "numbers": numbers, "hashes": hashes | ids}


def found_in(text: str, needles: dict[str, set[str]]) -> set[str]:
    """Those of the needles that stand in a text; a number counts as a word of its own, not as a tail of a coordinate or digest."""
    words = set(re.findall(r"(?<![\w.])\d{4,}(?![\w.])", text))
    return {one for kind in ("texts", "hashes") for one in needles[kind] if one in text} | (needles["numbers"] & words)  # fmt: skip


def reports(home: Path) -> dict[str, bytes]:
    return {path.suffix: path.read_bytes() for path in (home / "reports").glob("audit-*")}


def test_the_command_finds_what_the_asset_wrote(tiny_home, copied, ask) -> None:
    """Same function, same bytes; verdict and paths on the screen; by id and by reference too."""
    home = copied(tiny_home)
    before = reports(home)
    assert set(before) == {".html", ".json"}
    answer = ask(home, "audit")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("INVALID: 16 people, 1 gold model(s), method NPO")
    assert ".html" in answer.out
    assert reports(home) == before
    site = open_site(home, None, "tiny", None)
    (request,) = requests.load(site.home)
    for name in (request.id, request.id[:6], reference_of(site, request.id)):
        assert ask(home, "audit", name).code == 0
    made = Dossier.from_json(before[".json"].decode())
    assert made.audit.verdict == "INVALID"
    assert (made.scope.included, made.scope.records) == (80, 80)
    assert made.evidence.deviations == ()
    latest = json.loads((home / "results/robustness_audit/latest.json").read_text())["values"]
    assert latest["report"] in latest["files"]
    for path in (home / "reports").glob("audit-*"):  # without them it is made from the evidence
        path.unlink()
    assert ask(home, "audit").code == 0
    assert reports(home) == before


def test_no_secret_no_prompt_and_no_unsalted_hash_is_in_it(tiny_home) -> None:
    """None of the sealed records' texts, numbers, subjects, ids or plain hashes; each planted one is seen (positive control)."""
    needles = needles_of(tiny_home)
    for data in reports(tiny_home).values():
        text = data.decode()
        assert found_in(text, needles) == set()
        for kind in needles:
            planted = min(needles[kind])
            assert planted in found_in(f"{text} {planted} ", needles)


def test_a_request_that_waits_is_refused_with_what_to_do(tiny_home, copied, ask) -> None:
    """A second request, not run yet: code 1, its state and the commands; unknown and ambiguous names list what there is."""
    home = copied(tiny_home)
    assert ask(home, *FORGET).code == 0
    site = open_site(home, None, "tiny", None)
    waiting = next(one for one in requests.load(site.home) if one.state == "received")
    answer = ask(home, "audit", waiting.id)
    assert answer.code == 1
    assert f"request {waiting.id} is received and not audited yet" in answer.err
    assert "dataworth audit REQUEST --run" in answer.err
    unknown = ask(home, "audit", "zzz")
    assert unknown.code == 1
    assert "'zzz' names 0 erasure requests" in unknown.err
    assert waiting.id in unknown.err
    assert ask(home, "audit").code == 0  # the newest audit is still the other one's


def test_run_audits_what_waits_and_nothing_else(tiny_home, copied, ask, monkeypatch) -> None:
    """With --run the graph runs up to the audit for a request that waits; not for one that is audited, unknown or not there."""
    home = copied(tiny_home)
    calls = []
    monkeypatch.setattr("pipelines.cli.running.run", lambda **options: calls.append(options))
    assert ask(home, "audit", "--run").code == 0
    assert ask(home, "audit", "zzz", "--run").code == 1
    assert calls == []
    assert ask(home, *FORGET).code == 0
    site = open_site(home, None, "tiny", None)
    waiting = next(one for one in requests.load(site.home) if one.state == "received")
    assert ask(home, "audit", waiting.id, "--run").code == 1  # this run did nothing
    assert calls == [{"select": "*robustness_audit", "size": "", "inbox": ""}]


def test_a_report_that_was_changed_by_hand_is_named(tiny_home, copied, ask) -> None:
    """A field that nobody knows, a torn file: code 1, and which file it is."""
    home = copied(tiny_home)
    (path,) = (home / "reports").glob("audit-*.json")
    whole = path.read_text()
    for broken in (whole.replace('"demo"', '"dema"'), whole[:-100]):
        path.write_text(broken)
        answer = ask(home, "audit")
        assert answer.code == 1
        assert f"reports/{path.name} is no audit report of this version" in answer.err


def test_verify_notices_a_verdict_that_was_made_nicer(tiny_home, copied, ask) -> None:
    """Facts and page rewritten together, consistently: the ledger says otherwise; a page of other facts is noticed too."""
    home = copied(tiny_home)
    (facts,) = (home / "reports").glob("audit-*.json")
    page, whole = facts.with_suffix(".html"), facts.read_bytes()
    assert ask(home, "verify").code == 0
    nicer = whole.replace(b'"verdict": "INVALID"', b'"verdict": "INCONCLUSIVE"')
    facts.write_bytes(nicer)
    digests = (hashlib.sha256(one).hexdigest().encode() for one in (whole, nicer))
    page.write_bytes(page.read_bytes().replace(*digests))
    said = ask(home, "verify")
    assert said.code == 1
    assert "no audit reports" in said.out
    assert "verdict is INCONCLUSIVE, the ledger's entry" in said.out
    facts.write_bytes(whole)
    said = ask(home, "verify")
    assert said.code == 1
    assert f"reports/{page.name} is not the page of reports/{facts.name}" in said.out
    assert ask(home, "audit").code == 0
    assert ask(home, "verify").code == 0


def test_verify_reads_a_report_of_the_former_format(tiny_home, copied, ask) -> None:
    """A home with a report that an earlier version wrote stays verifiable as it is, and `audit` brings it up to date."""
    home = copied(tiny_home)
    (facts,) = (home / "reports").glob("audit-*.json")
    page, whole = facts.with_suffix(".html"), facts.read_bytes()
    former = json.dumps(as_third(json.loads(whole))).encode()
    facts.write_bytes(former)
    digests = (hashlib.sha256(one).hexdigest().encode() for one in (whole, former))
    page.write_bytes(page.read_bytes().replace(*digests))
    assert ask(home, "verify").code == 0
    assert ask(home, "audit").code == 0
    assert json.loads(facts.read_bytes())["format"] == 5
    assert ask(home, "verify").code == 0


def test_a_review_is_in_report_and_ledger_and_its_name_in_the_report_only(
    tiny_home, copied, ask
) -> None:
    """From report and ledger alone an auditor gets who read which digest; the ledger commits to the name and doesn't hold it."""
    home = copied(tiny_home)
    (facts,) = (home / "reports").glob("audit-*.json")
    unread = facts.read_bytes()
    said = ask(home, "audit", "--reviewed-by", "  Ada  Example ")
    assert said.code == 0
    assert "review by Ada Example of report " in said.out
    plain = json.loads(facts.read_text())
    (one,) = plain["reviews"]
    # As somebody without this program would check it.
    bare = json.dumps(plain | {"reviews": []}, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    assert bare.encode() == unread
    assert hashlib.sha256(unread).hexdigest() == one["report"]
    entries = list(open_ledger(open_site(home, None, "tiny", None)).entries())
    entry = entries[one["entry"]]
    named = hmac.new(bytes.fromhex(one["nonce"]), b"audit-review/Ada Example", "sha256").hexdigest()
    assert (entry["kind"], entry["time"]) == ("review", one["at"])
    assert entry["body"] == {
        "audit": plain["evidence"]["audit_digest"], "report": one["report"], "reviewer": named,
    }  # fmt: skip
    assert not [path for path in (home / "ledger").rglob("*") if path.is_file() and b"Ada" in path.read_bytes()]  # fmt: skip
    page = facts.with_suffix(".html").read_text()
    assert "Reviewer: Ada Example" in page
    assert "Z: this report, digest" in page
    assert ask(home, "verify").code == 0
    kept = reports(home)  # the same name on the same report is one review, and a look is none
    assert ask(home, "audit", "--reviewed-by", "Ada Example").code == 0
    assert ask(home, "audit").code == 0
    assert reports(home) == kept
    for name in (" ", "x" * 81, "A\x1b[31m"):
        refused = ask(home, "audit", "--reviewed-by", name)
        assert refused.code == 1
        assert "1 to 80 printable characters" in refused.err
    assert len(list(open_ledger(open_site(home, None, "tiny", None)).entries())) == len(entries)


def test_verify_notices_a_review_by_another_name_or_of_another_report(
    tiny_home, copied, ask
) -> None:
    """Name, digest, time and entry of a review: each one that is changed by hand is named, though the page was written anew."""
    home = copied(tiny_home)
    assert ask(home, "audit", "--reviewed-by", "Ada Example").code == 0
    (facts,) = (home / "reports").glob("audit-*.json")
    whole = facts.read_text()
    made = Dossier.from_json(whole)
    (one,) = made.reviews
    entries = list(open_ledger(open_site(home, None, "tiny", None)).entries())
    assert audit_review.contradicted(made, entries) == []
    for change in (
        {"by": "Bob"},
        {"report": "0" * 64},
        {"at": "2020-01-01T00:00:00Z"},
        {"entry": 0},
        {"entry": 10**6},
    ):
        forged = replace(made, reviews=(replace(one, **change),))
        (told,) = audit_review.contradicted(forged, entries)
        assert "is not the review by" in told
    facts.write_text(whole.replace("Ada Example", "Bob Example"))
    said = ask(home, "verify")
    assert said.code == 1
    assert "is not the review by 'Bob Example'" in said.out


def test_a_review_outlives_the_erasure_and_says_what_it_was_of(tiny_home, copied, ask) -> None:
    """Finishing changes states and copies: the review stays and speaks about an earlier state; a new one speaks about this one."""
    home = copied(tiny_home)
    assert ask(home, "audit", "--reviewed-by", "Ada Example").code == 0
    assert ask(home, "erase", "--finish").code == 0
    assert ask(home, "audit").code == 0
    page = reports(home)[".html"].decode()
    assert "an earlier state of this report" in page
    assert "Z: this report, digest" not in page
    assert ask(home, "audit", "--reviewed-by", "Ada Example").code == 0
    page = reports(home)[".html"].decode()
    assert "an earlier state of this report" in page
    assert "Z: this report, digest" in page
    # What the next run makes again is missing until then; the report is none of it.
    assert "yes audit reports" in " ".join(ask(home, "verify").out.split())


def test_without_chromium_the_report_is_there_and_the_pdf_is_refused(
    tiny_home, copied, ask
) -> None:
    """Code 1 with a message about Chromium, after HTML and JSON were written."""
    home = copied(tiny_home)
    answer = ask(home, "audit", "--pdf", PATH="/nowhere")
    assert answer.code == 1
    assert "no Chromium found for the PDF" in answer.err
    assert set(reports(home)) == {".html", ".json"}


def test_after_the_erasure_the_report_is_the_evidence(tiny_home, copied, ask) -> None:
    """Shredded: the report stays, tells when and what became of every store; without its facts the audit is refused with the reason."""
    home = copied(tiny_home)
    needles = needles_of(home)
    assert ask(home, "erase", "--finish").code == 0
    assert ask(home, "audit").code == 0
    made = Dossier.from_json(reports(home)[".json"].decode())
    (asked,) = made.requests
    assert (asked.state, asked.closed[:2]) == ("shredded", "20")
    assert made.release.endswith("has taken the original's place")
    states = {one.what: one.state for one in made.copies}
    assert states["sealed text and its key"].startswith("overwritten and removed")
    assert "searched: nothing left" in states["salts"]
    for data in reports(home).values():
        assert found_in(data.decode(), needles) == set()
    for path in (home / "reports").glob("audit-*"):
        path.unlink()
    (request,) = requests.load(open_site(home, None, "tiny", None).home)
    answer = ask(home, "audit", request.id)
    assert answer.code == 1
    assert "is shredded: its text and its key are destroyed" in answer.err


@pytest.mark.parametrize(
    ("state", "by", "said"),
    [
        ("received", "", "is received and not audited yet"),
        ("suspended", "", "is suspended and not audited yet"),
        ("refused", "", "was refused, so that nothing was forgotten: nothing would be left"),
        ("audited", "never trained on", "they were held out, so that there is nothing to audit"),
        ("shredded", "deadline", "was finished by its deadline before it was audited"),
        ("shredded", "", "is shredded: its text and its key are destroyed"),
        ("audited", "", "is not in this home any more"),
    ],
)
def test_every_request_without_an_audit_says_why(tmp_path: Path, state, by, said) -> None:
    """One sentence per reason, and never a traceback."""
    site = user_site(tmp_path)
    with pytest.raises(RequestError, match="no erasure was asked for in this home"):
        find(site)
    request = Request(kind="erase", owner="bob", state=state, note="nothing would be left")
    requests.save(site.home, request)
    if by:
        enter_state(site, request, state, by=by)
    with pytest.raises(RequestError, match=said):
        find(site, request.id)
    with pytest.raises(RequestError, match="no request of this home has an audit"):
        find(site)
