"""The cache of the graph: what is returned, what is made again, and that a half-written result never counts."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from pipelines.results import Result, input_key, latest, reuse_or_make, store

KEY = input_key("prices", "1", {"pool": 7})


class Maker:
    """Makes a result with these values and counts how often it was asked to."""

    def __init__(self, home: Path, **values: Any) -> None:
        """Remember the values; the files they name are written when asked."""
        self.home, self.values, self.times = home, values, 0

    def __call__(self) -> tuple[str, Mapping[str, Any]]:
        """Write the files and hand out the values."""
        self.times += 1
        for file in self.values.get("files", []):
            (self.home / file).parent.mkdir(exist_ok=True)
            (self.home / file).write_text("content")
        return "v" * 64, self.values


def ask(home: Path, make: Maker, key: str = KEY) -> Result:
    """The result of the asset `prices` in a home."""
    return reuse_or_make(home / "results", home, "prices", key, make)


def test_the_key_is_of_everything_and_of_no_order() -> None:
    """Name, code version and inputs name a result; the order of inputs does not, and floats are refused."""
    same = input_key("prices", "1", {"a": 1, "b": "x"})
    assert same == input_key("prices", "1", {"b": "x", "a": 1})
    others = (("price", "1", {"a": 1, "b": "x"}), ("prices", "2", {"a": 1, "b": "x"}), ("prices", "1", {"a": 2, "b": "x"}))  # fmt: skip
    assert len({same, *(input_key(*other) for other in others)}) == 4
    body = {"asset": "prices", "code_version": "1", "inputs": {"pool": 7}}
    assert sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest() == KEY
    with pytest.raises(ValueError, match="float"):
        input_key("prices", "1", {"a": 0.5})


def test_equal_inputs_are_made_once(tmp_path: Path) -> None:
    """The second call returns what the first stored, says so, and writes nothing."""
    make = Maker(tmp_path, rows=3)
    first = ask(tmp_path, make)
    before = (tmp_path / "results/prices/latest.json").stat().st_mtime_ns
    second = ask(tmp_path, make)
    assert make.times == 1
    assert (first.reused, second.reused) == (False, True)
    assert (second.key, second.data_version, second["rows"]) == (KEY, "v" * 64, 3)
    assert (tmp_path / "results/prices/latest.json").stat().st_mtime_ns == before


def test_a_change_that_is_taken_back_is_made_again(tmp_path: Path) -> None:
    """Only the newest result is returned: the tables on disk are those of the newest."""
    make = Maker(tmp_path)
    for key in (KEY, "other", KEY):
        ask(tmp_path, make, key)
    assert make.times == 3


def test_a_lost_file_is_made_again(tmp_path: Path) -> None:
    """A result counts while everything that it names is there."""
    make = Maker(tmp_path, files=["runs/a.json"])
    ask(tmp_path, make)
    (tmp_path / "runs/a.json").unlink()
    assert not ask(tmp_path, make).reused
    assert ask(tmp_path, make).reused
    assert make.times == 2


def test_a_changed_table_is_made_again(tmp_path: Path) -> None:
    """A table or a file of a run is not taken for the result's own once it changed; other files are their checks' business."""
    make = Maker(tmp_path, files=["tables/prices.parquet", "runs/a.json", "ledger/checkpoint"])
    ask(tmp_path, make)
    (tmp_path / "ledger/checkpoint").write_text("other")
    assert ask(tmp_path, make).reused
    for name in ("tables/prices.parquet", "runs/a.json"):
        (tmp_path / name).write_text("other")
        assert not ask(tmp_path, make).reused
        assert (tmp_path / name).read_text() == "content"


def test_what_was_made_from_moving_inputs_is_used_once(tmp_path: Path) -> None:
    """`settled` false: the next run looks again."""
    make = Maker(tmp_path, settled=False)
    assert ask(tmp_path, make).values["settled"] is False
    assert not ask(tmp_path, make).reused
    make.values = {"settled": True}
    ask(tmp_path, make)
    assert ask(tmp_path, make).reused


def test_a_failure_leaves_the_last_result(tmp_path: Path) -> None:
    """An asset that raises has the result that it had before."""
    ask(tmp_path, Maker(tmp_path, rows=3))

    def fail() -> tuple[str, Mapping[str, Any]]:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        reuse_or_make(tmp_path / "results", tmp_path, "prices", "other", fail)
    assert latest(tmp_path / "results", "prices")["rows"] == 3


def test_nothing_was_made_yet(tmp_path: Path) -> None:
    """An asset without a result has none; so has one whose writer was killed before the last write."""
    assert latest(tmp_path, "prices") is None
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices/.latest.json.1.tmp").write_text('{"for')
    assert latest(tmp_path, "prices") is None


def test_another_format_is_refused(tmp_path: Path) -> None:
    """A result of a newer version is never guessed at."""
    store(tmp_path, Result("prices", KEY, "v" * 64))
    path = tmp_path / "prices/latest.json"
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="has format 2; this version reads 1"):
        latest(tmp_path, "prices")
