"""Sealed records: two owners are two subgroups under names that only the key can link, one owner is none."""

import json

import polars as pl

from pipelines.steps.sealing import seal_records
from provenance import unseal
from unlearning.rows import opaque_id


def sealed(folder, owners):
    """What lies sealed in the folder, and its key."""
    rows = {
        "owner": owners, "source": [f"person-{n}" for n in range(len(owners))], "record_id": [bytes([n]) * 32 for n in range(len(owners))],
        "text": ["A line about someone."] * len(owners),
    }  # fmt: skip
    folder.mkdir()
    seal_records(folder, pl.DataFrame(rows), pl.DataFrame(schema=dict.fromkeys(rows, pl.String)))
    key = (folder / "key").read_bytes()
    lines = unseal(key, (folder / "sealed").read_bytes(), b"").splitlines()
    return [json.loads(line) for line in lines], key


def test_owners_are_subgroups_where_there_are_several(tmp_path):
    """Each record says its owner's keyed name; the owner's own stands in no group."""
    lines, key = sealed(tmp_path / "two", ["north", "south", "north"])
    names = [f"owner/{opaque_id(key, owner)[:8]}" for owner in ("north", "south", "north")]
    assert [line["group"] for line in lines] == names
    assert len(set(names)) == 2
    assert not any("north" in name or "south" in name for name in names)
    alone, _ = sealed(tmp_path / "one", ["north", "north"])
    assert all("group" not in line for line in alone)


def test_a_batch_is_sealed_once(tmp_path):
    """A second sealing leaves key and seal as they are: a crash between two steps loses nothing."""
    _, key = sealed(tmp_path / "once", ["north"])
    before = (tmp_path / "once" / "sealed").read_bytes()
    frame = pl.DataFrame({"owner": ["south"], "source": ["x"], "record_id": [b"\x01" * 32], "text": ["Another."]})  # fmt: skip
    seal_records(tmp_path / "once", frame, frame.clear())
    assert (tmp_path / "once" / "sealed").read_bytes() == before
    assert (tmp_path / "once" / "key").read_bytes() == key
