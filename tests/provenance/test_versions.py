"""The eleven items that make a run: incomplete ones are refused, each difference is named."""

from __future__ import annotations

import pytest

from provenance import FormatError, Ledger, SigningKey, Versions, sha256
from provenance.versions import ITEMS

COMPLETE = {item: sha256(item.encode()).hex() for item in ITEMS} | {"retrieval_index": "none"}
TIME = "2025-01-31T12:00:00Z"


def test_the_items_are_those_of_the_trainer():
    """A run's file and a ledger entry name the same eleven items."""
    assert set(ITEMS) == {
        "source_data", "preprocessing", "tokenizer", "initial_weights", "configuration", "prompts", "retrieval_index",
        "evaluation_set", "hardware", "code", "lock",
    }  # fmt: skip
    assert Versions.of(COMPLETE).document() == COMPLETE


@pytest.mark.parametrize("item", ITEMS)
def test_each_item_is_required_and_its_change_is_named(item):
    """Leaving one out, emptying it or another spelling is refused; changing it is named, alone."""
    without = {name: value for name, value in COMPLETE.items() if name != item}
    with pytest.raises(FormatError, match=f"'{item}' is missing"):
        Versions.of(without)
    for bad in ("", "None", "unknown", "AB" * 32, "ab" * 31, 5, None):
        with pytest.raises(FormatError, match=rf"versions\.{item}"):
            Versions.of(COMPLETE | {item: bad})
    other = COMPLETE | {item: "f" * 64}
    found = Versions.of(COMPLETE).differences(Versions.of(other))
    assert found == {item: (COMPLETE[item], "f" * 64)}
    assert Versions.of(COMPLETE).differences(Versions.of(COMPLETE)) == {}


@pytest.mark.parametrize("kind", ["run", "values", "audit"])
def test_the_ledger_refuses_an_entry_that_does_not_say_what_made_it(tmp_path, kind):
    """Runs, valuations and audits without complete versions are not signed, and nothing is written."""
    ledger = Ledger.open(tmp_path, "example.com/demo", SigningKey.demo())
    before = (tmp_path / "entries.jsonl").read_bytes()
    bad = [{}, {"versions": {}}, {"versions": "none"}, {"versions": COMPLETE | {"mood": "none"}}]
    bad += [
        {"versions": {name: COMPLETE[name] for name in ITEMS if name != item}} for item in ITEMS
    ]
    for body in bad:
        with pytest.raises(FormatError, match="versions"):
            ledger.append(kind, body, TIME)
    assert (tmp_path / "entries.jsonl").read_bytes() == before
    assert ledger.append(kind, {"versions": COMPLETE}, TIME) == 0
    assert ledger.append("windows", {}, TIME) == 1
