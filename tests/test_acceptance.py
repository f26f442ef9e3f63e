"""Every published figure was announced, with its bar, before it was measured, and is published once."""

import json
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "benchmarks"
BARS = tomllib.loads((HERE / "acceptance.toml").read_text())
LINES = {
    name: [json.loads(line) for line in (HERE / f"{name}.jsonl").read_text().splitlines()]
    for name in ("accept", "bench")
}


def test_every_figure_of_a_study_has_the_bar_that_was_announced():
    """Name, bar, kind and seeds of each line are those of acceptance.toml, and its command names the study."""
    for line in LINES["accept"]:
        announced = BARS[line["name"]]
        assert line["bar"] == announced["bar"], line["name"]
        assert line["kind"] == announced["kind"], line["name"]
        assert line["command"] == f"make accept STUDY={announced['study']}", line["name"]
        if line["estimate"] is not None and "seeds" in announced and "pays" in line["name"]:
            assert line["seeds"] == announced["seeds"], line["name"]


def test_a_missing_number_says_why_and_a_requirement_is_decided():
    """No estimate: a reason and no verdict. A requirement with a number holds or doesn't."""
    for line in LINES["accept"]:
        if line["estimate"] is None:
            assert line["note"], line["name"]
            assert line["holds"] is None, line["name"]
        elif line["kind"] == "requirement":
            assert line["holds"] in (True, False), line["name"]


@pytest.mark.parametrize("name", sorted(LINES))
def test_a_figure_is_published_once(name):
    """A newer measurement replaces the older one, whose bar it may not hold any more."""
    names = [line["name"] for line in LINES[name]]
    assert sorted(names) == sorted(set(names))
