"""Influence becomes value rows only when its scores are of the corpus, tokenizer and weights that the graph has now."""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest

from pipelines.results import Result
from pipelines.steps.influence import influence_part
from pipelines.steps.pricing import _influence_rows
from pipelines.storage.home import Home
from valuation.errors import GradientError
from valuation.influence import Binding, Scores

BINDING = Binding("a" * 64, "b" * 64, "c" * 64, "d" * 64, "e" * 64)
TOKENS = Result(
    "tokens", "", "", {"record_root": BINDING.data_root, "tokenizer_digest": BINDING.tokenizer_digest}
)  # fmt: skip


@pytest.fixture
def made(tmp_path):
    """A home with the scores of three records, and what the asset says of them."""
    home = Home(tmp_path).create()
    folder = home.runs / "scores-run"
    ids = tuple(bytes([n]) * 32 for n in range(3))
    Scores(
        scores_QN=np.array([[1.0, -2.0, 0.1], [1.1, -2.2, -0.1]]), query_index_Q=np.arange(2), train_index_N=np.arange(3),
        query_ids=ids[:2], record_ids=ids, method="ekfac", binding=BINDING,
    ).save(folder / "scores")  # fmt: skip
    table = {
        "owner": ["ann", "bob", "ann"], "record_id": list(ids), "index": [0, 1, 2], "value": [2e-3, -4e-3, 1e-5],
        "se": [1e-4, 2e-4, 1e-4], "ci_low": [1e-3, -5e-3, -1e-4], "ci_high": [3e-3, -3e-3, 1e-4], "distinguishable": [True, True, False],
    }  # fmt: skip
    pl.DataFrame(table).write_parquet(folder / "records.parquet")
    owners = {"owner": ["ann"], "target_owner": ["eve"], "value": [1e-3]}
    pl.DataFrame(owners).write_parquet(folder / "owners.parquet")
    (folder / "residuals.jsonl").write_text('{"step": 1, "drop": 0.5, "credit": 0.2}\n')
    binding = asdict(BINDING)
    values = {
        "files": ["none", "runs/scores-run/records.parquet", "runs/scores-run/owners.parquet"], "run": "scores-run", "scores_run": "scores-run",
        "form": "trapezoid", "method": "influence.ekfac", "binding": binding, "checkpoint_root": BINDING.checkpoint_root, "queries": 2,
        "distinguishable": 2,
    }  # fmt: skip
    return SimpleNamespace(home=home), values


def test_rows_carry_intervals(made):
    """Each scored record is a row in nats with error, interval and the number of queries."""
    site, values = made
    rows = _influence_rows(site, TOKENS, Result("influence", "", "", values))
    assert [row.value for row in rows] == [2e-3, -4e-3, 1e-5]
    assert {row.method for row in rows} == {"influence.ekfac"}
    assert rows[2].ci_low < 0 < rows[2].ci_high
    assert rows[0].n == 2


@pytest.mark.parametrize(
    ("where", "item"),
    [
        ("tokens", "record_root"),
        ("tokens", "tokenizer_digest"),
        ("influence", "checkpoint_root"),
        ("binding", "query_digest"),
    ],
)
def test_scores_of_anything_else_are_refused(made, where, item):
    """Another corpus, tokenizer, checkpoint or target: no row, but the name of what differs."""
    site, values = made
    tokens = dict(TOKENS.values)
    {"tokens": tokens, "influence": values, "binding": values["binding"]}[where][item] = "f" * 64
    named = "data_root" if item == "record_root" else item
    with pytest.raises(GradientError, match=f"{named}: expected f"):
        _influence_rows(site, Result("tokens", "", "", tokens), Result("influence", "", "", values))


def test_the_report_names_both_ends_and_the_residual(made):
    """Most helpful first, most harmful first, and per step what the credits leave unexplained."""
    site, values = made
    part = influence_part(site, Result("influence", "", "", values))
    assert [row.owner for row in part.helpful] == ["ann"]
    assert [(row.owner, row.distinguishable) for row in part.harmful] == [("bob", True)]
    assert part.residuals == (0.3,)
