"""The judge in the graph: what it says at a size that can tell nothing, and that its word is held against its rows."""

import json
from collections.abc import Callable
from pathlib import Path

from graph_commands import flat, values

from pipelines.steps.judgement import told

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
