"""A finished run's files are held against what it left: a changed bit is named, and the run is made again."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from graph_commands import dataworth, flat

from pipelines.outputs import NAME, damage, seal, set_aside

FILES = ("result.json", "rows.parquet", "scores/block-0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A sealed run with outputs, a log, a bank and a checkpoint."""
    for name in ("run.json", "trainer.log", "step-4/weights", "bank/3.npz", *FILES):
        path = tmp_path / "train-1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"content of " + name.encode())
    seal(tmp_path / "train-1")
    return tmp_path / "train-1"


def test_outputs_are_what_is_read_later_and_has_no_digest_of_its_own(run: Path) -> None:
    """Logs, checkpoints and banks are not in the list; a run of an older version, which has no list, is not damaged."""
    assert sorted(json.loads((run / NAME).read_bytes())["files"]) == sorted(FILES)
    for name in ("trainer.log", "step-4/weights", "bank/3.npz"):
        (run / name).write_bytes(b"other")
    assert damage(run) == []
    (run / NAME).unlink()
    assert damage(run) == []


@pytest.mark.parametrize("name", [*FILES, NAME])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_every_change_of_every_output_is_named(run: Path, name: str, how: str) -> None:
    """One bit, a cut file, a missing file: one sentence with the file, what was expected and what is there."""
    path = run / name
    data = bytearray(path.read_bytes())
    data[3] ^= 0x80
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how == "flipped" else data[:-3])
    problems = damage(run)
    if name == NAME:
        assert problems == ([] if how == "gone" else [f"train-1/{NAME} is not readable"])
    else:
        (problem,) = problems
        assert problem.startswith(f"train-1/{name}: expected ")
        assert problem.endswith("got no file") == (how == "gone")


def test_a_damaged_run_is_set_aside_whole(run: Path) -> None:
    """Nothing of it is lost, each time under another name; what is left is the run as it was before it began."""
    first = set_aside(run)
    assert (first.name, (first / "rows.parquet").read_bytes()) == (
        "train-1.damaged-1",
        b"content of rows.parquet",
    )
    assert [path.name for path in run.iterdir()] == ["run.json"]
    assert set_aside(run).name == "train-1.damaged-2"


def test_a_flipped_bit_in_a_run_is_found_by_verify_and_mended_by_the_next_run(
    tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Influence as it lies on disk: verify says no and names the file; the next run makes the same bytes again."""
    home = copied(tiny_home)
    (path,) = home.glob("runs/gradients-*/influence.parquet")
    before = path.read_bytes()
    path.write_bytes(before[:-200] + bytes([before[-200] ^ 1]) + before[-199:])
    said = dataworth(home, "verify")
    assert said.returncode == 1
    assert f"{path.parent.name}/influence.parquet: expected" in flat(said.stdout)
    done = dataworth(home, "run")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == before
    assert len(list(home.glob("runs/*.damaged-1/influence.parquet"))) == 1
    assert dataworth(home, "verify").returncode == 0
