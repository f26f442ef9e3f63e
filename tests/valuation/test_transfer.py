"""A proxy's measured transfer: one record per proxy, read as it was written, told in a sentence, refused when it can't be."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation.errors import EvaluationError
from valuation.transfer import Transfer, proxy_digest, read_transfers, write_transfers

RECORD = Transfer(
    proxy="ab" * 32, parameters=7_200_000, owners=5, seeds=2, rank=600_000, rank_low=-1_000_000, rank_high=1_000_000,
    moved=12_456, moved_low=1_534, moved_high=19_846, measured_on="speeches since 1994", command="make accept STUDY=owners-transfer",
)  # fmt: skip
RUN = {
    "run": "proxy-1", "seed": 7, "steps": 40, "tokens_digest": "cd" * 32,
    "config": {"model": {"dim": 48}, "optim": {"lr": "0.003"}, "batch": {"rows": 8}, "extra": {"target": "../a"}},
}  # fmt: skip


def test_the_sentence_says_both_numbers_with_their_intervals():
    """Correlation, share of the pool, the larger model, owners, seeds, corpus and command stand in it."""
    assert RECORD.sentence == (
        "rank correlation 0.60 (-1.00 to 1.00) with the values from a model of 7,200,000 parameters, 1.2% (0.2% to 2.0%) of the "
        "pool would go to others; 5 owners, seeds 2, on speeches since 1994, by make accept STUDY=owners-transfer"
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=3, max_size=3).map(sorted),
    st.lists(st.integers(0, 10**6), min_size=3, max_size=3).map(sorted),
)
def test_a_file_is_read_as_it_was_written(tmp_path_factory, rank, moved):
    """Writing and reading are inverse for every record that can exist."""
    path = tmp_path_factory.mktemp("transfer") / "transfer.json"
    low, mid, high = rank
    least, between, most = moved
    record = dataclasses.replace(
        RECORD, rank=mid, rank_low=low, rank_high=high, moved=between, moved_low=least, moved_high=most
    )  # fmt: skip
    other = dataclasses.replace(record, proxy="00" * 32)
    write_transfers(path, [record, other])
    assert read_transfers(path) == {record.proxy: record, other.proxy: other}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"proxy": "AB" * 32}, "64 lower-case"),
        ({"rank": 700_000, "rank_high": 600_000}, "low <= estimate <= high"),
        ({"rank_low": -1_000_001}, "low <= estimate <= high"),
        ({"moved": -1, "moved_low": -1}, "low <= estimate <= high"),
        ({"rank": 0.6}, "an integer"),
        ({"owners": 1}, "at least 2"),
        ({"parameters": 0}, "at least 1"),
        ({"measured_on": ""}, "printable"),
        ({"command": "a\nb"}, "printable"),
    ],
)
def test_what_no_study_can_have_found_is_refused(change, message):
    """Numbers out of range, intervals without their estimate, floats, and words that would break a line."""
    with pytest.raises(EvaluationError, match=message):
        dataclasses.replace(RECORD, **change)


def test_a_file_in_another_form_is_refused(tmp_path):
    """No file, no JSON, another format, an unknown field, and two records of one proxy."""
    path = tmp_path / "transfer.json"
    row = dataclasses.asdict(RECORD)
    cases = {
        "expected a transfer file": b"{",
        '"format": 1': json.dumps({"format": 2, "transfers": []}).encode(),
        "unexpected keyword": json.dumps({"format": 1, "transfers": [row | {"more": 1}]}).encode(),
        "missing": json.dumps({"format": 1, "transfers": [{"proxy": "ab" * 32}]}).encode(),
        "two records": json.dumps({"format": 1, "transfers": [row, row]}).encode(),
    }
    with pytest.raises(EvaluationError, match="expected a transfer file"):
        read_transfers(path)
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(EvaluationError, match=message):
            read_transfers(path)


def test_a_proxy_is_named_by_its_settings_and_nothing_else():
    """Corpus, seed and target leave the digest; shape, optimiser, batch and steps change it."""
    name = proxy_digest(RUN)
    same = RUN | {"seed": 8, "run": "proxy-2", "tokens_digest": "ee" * 32, "config": RUN["config"] | {"extra": {}}}  # fmt: skip
    assert proxy_digest(same) == name
    changed = [RUN | {"steps": 41}] + [
        RUN | {"config": RUN["config"] | {part: {"other": 1}}} for part in ("model", "optim", "batch")
    ]  # fmt: skip
    assert name not in {proxy_digest(run) for run in changed}
    with pytest.raises(EvaluationError, match="expected config"):
        proxy_digest({"steps": 1, "config": {}})
