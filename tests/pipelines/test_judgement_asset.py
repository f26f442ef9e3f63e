"""The judge in the graph: what it says at a size that can tell nothing, and that its word is held against its rows."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from graph_commands import flat, values

from pipelines.describe.valuation import value_judgement
from pipelines.results import Result, latest
from pipelines.site import open_site
from pipelines.steps.judgement import contradicted, told

VERDICTS = ("PASS", "FAIL", "INCONCLUSIVE", "INVALID")


def test_the_graph_judges_the_scores_it_publishes_and_says_when_it_cannot_tell(
    tiny_home: Path,
) -> None:
    """Same method, records and queries as the influence asset; three subsets are called too few, in words."""
    found, influence = values(tiny_home, "value_judgement"), values(tiny_home, "influence")
    document = found["document"]
    scored = json.loads((tiny_home / "runs" / influence["scores_run"] / "result.json").read_bytes())
    assert document["method"].startswith(scored["method"].rpartition(".")[2])
    assert (document["records"], document["queries"]) == (influence["records"], influence["queries"])  # fmt: skip
    assert (document["subsets"], document["verdict"]) == (3, "INCONCLUSIVE")
    assert told(document) == "3 subsets are too few to tell whether the values are right"
    sure, unsure = ({"lds": document["lds"] | {"low": low}} for low in ("0.200000", "-0.100000"))
    said = [
        told(document | {"subsets": 20, "verdict": "INCONCLUSIVE"} | one) for one in (sure, unsure)
    ]
    assert "foretell retraining, and retraining doesn't tell them from BM25's" in said[0]
    assert said[1].endswith("or from none")
    assert len({told(document | {"subsets": 20, "verdict": verdict}) for verdict in VERDICTS}) == 4
    assert len(list((tiny_home / "runs" / found["run"] / "bank").glob("*.npz"))) == 3
    assert (document["again"], document["ceiling"], document["planted"]) == (0, "none", "none")
    assert "inrun.trapezoid" not in document["whole"], (
        "three subsets rank nothing: nothing was trained for it"
    )
    page = flat((tiny_home / "reports/latest.html").read_text())
    assert "3 subsets are too few to tell" in page


def test_a_judgement_that_its_rows_contradict_is_not_believed(
    tiny_home: Path, copied: Callable[[Path], Path], ask: Callable[..., tuple[int, str, str]]
) -> None:
    """Somebody makes the verdict a PASS in the file and in the result: `verify` says no, by the rows."""
    home = copied(tiny_home)
    path = home / values(home, "value_judgement")["files"][0]
    better = json.loads(path.read_bytes()) | {"verdict": "PASS"}
    path.write_text(json.dumps(better))
    result = home / "results/value_judgement/latest.json"
    body = json.loads(result.read_text())
    body["values"]["document"] = better
    result.write_text(json.dumps(body))
    code, out, _ = ask(home, "verify")
    assert code == 1
    assert "verdict: expected INCONCLUSIVE by the numbers, got PASS" in out


def test_a_judgement_of_an_earlier_version_is_told_so_and_is_no_contradiction(
    tiny_home: Path, copied: Callable[[Path], Path], ask: Callable[..., tuple[int, str, str]]
) -> None:
    """In format 3 nothing was kept of planted records: `verify` says by which it was judged and what to do, and stays a yes; rows that were changed are a no."""
    home = copied(tiny_home)
    files = [home / file for file in values(home, "value_judgement")["files"]]
    result = home / "results/value_judgement/latest.json"
    whole, body = result.read_text(), json.loads(result.read_text())
    old = json.loads(files[0].read_bytes()) | {"format": 3}
    files[0].write_text(json.dumps(old))
    body["values"]["document"] = old
    result.write_text(json.dumps(body))
    out = ask(home, "verify")[1]
    assert "yes values' judgement: its scores and verdict follow from its rows (skipped: judged by an earlier version, in format 3; dataworth run judges again)" in out  # fmt: skip
    # Rows that were written anew, and a run that planted records of which nothing is told.
    files[0].write_bytes((tiny_home / values(home, "value_judgement")["files"][0]).read_bytes())
    result.write_text(whole)
    site = open_site(home, None, "tiny", None)
    found = latest(home / "results", "value_judgement")
    assert contradicted(site, found) == []
    pq.write_table(pq.read_table(files[1]), files[1], compression="none")
    assert contradicted(site, found) == ["the files are not those that the judgement's version was made from"]  # fmt: skip
    run = json.loads((files[0].parent / "run.json").read_bytes())
    run["config"]["extra"]["planted"] = 4
    (files[0].parent / "run.json").write_text(json.dumps(run))
    assert contradicted(site, found)[-1] == "planted records: expected 4 of each kind, as the run names, got 0"  # fmt: skip


def test_the_judges_page_has_every_method_beside_its_ceiling(tiny_home: Path) -> None:
    """Where enough was retrained: both tables with the ceiling in every row, pictures, what was planted; where not, words in their place."""
    few = values(tiny_home, "value_judgement")
    page = value_judgement(Result(asset="value_judgement", key="", data_version="", values=few))
    assert page["linear datamodeling score"] == "too few subsets to rank"
    assert page["planted records and attacks"] == "not tried at this size"
    assert "Score of each method" not in page
    document = few["document"]
    some = {"estimate": "0.5", "low": "0.25", "high": "0.75", "level": "0.95"}
    full = document | {
        "subsets": 20, "again": 10, "ceiling": {"each": some, "whole": some, "subsets": 10, "seeds": 2},
        "whole": document["whole"] | {"inrun.trapezoid": some},
        "planted": {"records": 7, "share": "0.25", "auc": {"noise": some}, "gains": {"noise": "0.0125"}},
    }  # fmt: skip
    page = value_judgement(
        Result(asset="value_judgement", key="", data_version="", values=few | {"document": full})
    )
    for name, rows in (("", 3), (", target as a whole", 4)):
        text = page[f"linear datamodeling score{name}"].value
        assert text.count("0.50 (0.25 to 0.75)") == rows
        assert text.rstrip().splitlines()[-1].startswith("| random |"), "the control stands last"
    assert "inrun.trapezoid" in page["linear datamodeling score, target as a whole"].value
    assert page["Score of each method"].value.startswith("![Horizontal bars")
    assert "| noise | 7 | 0.5000 |" in page["planted records"].value
    assert "| noise | 1.2500 |" in page["attacks"].value
