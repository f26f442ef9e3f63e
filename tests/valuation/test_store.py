"""A store is whole or it is not there, and a pass that was killed goes on to the same bits."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from valuation.errors import GradientError
from valuation.store import Layout, Stored, StoreWriter, prepare


def layout(**changes):
    """Ten records in four blocks, three numbers each."""
    whole = Layout(
        identity={"weights": "w", "data": "d"},
        index=tuple(range(10, 20)),
        ids=tuple(bytes([i]) * 32 for i in range(10)),
        width=3,
        dtype="float64",
        blocks=((0, 4), (4, 5), (5, 9), (9, 10)),
    )
    return dataclasses.replace(whole, **changes)


def rows(number):
    first, last = layout().blocks[number]
    return np.arange(first * 3, last * 3, dtype=np.float64).reshape(-1, 3) + 0.5


def test_blocks_of_two_processes_make_one_store(tmp_path):
    """Values, ids and indices come back; the digest is that of one process."""
    digests = []
    for world in (1, 2, 3):
        folder = tmp_path / f"scores{world}"
        prepare(folder, layout())
        writers = [StoreWriter.open(folder, layout(), rank) for rank in range(world)]
        assert sorted(n for w in writers for n in w.missing(world)) == [0, 1, 2, 3]
        for writer in writers:
            for number in writer.missing(world):
                writer.write(number, rows(number))
        digests.append(writers[0].finish())
        stored = Stored.open(folder, layout().identity)
        np.testing.assert_array_equal(stored.values, np.concatenate([rows(n) for n in range(4)]))
        assert stored.index.tolist() == list(range(10, 20))
        assert stored.ids[3] == bytes([3]) * 32
        assert not folder.with_name(folder.name + ".part").exists()
    assert len(set(digests)) == 1


@settings(max_examples=20, deadline=None)
@given(done=st.sets(st.integers(0, 3)), torn=st.sets(st.integers(0, 3)), cut=st.integers(0, 40))
def test_torn_rows_and_lines_are_computed_again(tmp_path_factory, done, torn, cut):
    """Whatever of rows and journal survives a crash, the end has the bits of an unbroken pass."""
    folder = tmp_path_factory.mktemp("store") / "scores"
    prepare(folder, layout())
    writer = StoreWriter.open(folder, layout(), 0)
    for number in sorted(done):
        writer.write(number, rows(number))
    journal = folder.with_name("scores.part") / "done-0"
    if journal.exists():
        journal.write_bytes(journal.read_bytes()[: -cut or None])
    for number in torn:  # rows that never reached the disk
        writer._rows(number)[:] = -1
    writer.values.flush()
    assert prepare(folder, layout())
    again = StoreWriter.open(folder, layout(), 0)
    assert set(again.missing(1)) >= torn
    for number in again.missing(1):
        again.write(number, rows(number))
    again.finish()
    np.testing.assert_array_equal(
        Stored.open(folder).values, np.concatenate([rows(n) for n in range(4)])
    )


def test_another_identity_is_never_continued(tmp_path):
    """Other weights start anew, and a whole store of other data is refused by name."""
    folder = tmp_path / "scores"
    prepare(folder, layout())
    StoreWriter.open(folder, layout(), 0).write(0, rows(0))
    other = layout(identity={"weights": "x", "data": "d"})
    assert not prepare(folder, other)
    writer = StoreWriter.open(folder, other, 0)
    assert writer.missing(1) == [0, 1, 2, 3]
    for number in range(4):
        writer.write(number, rows(number))
    writer.finish()
    with pytest.raises(GradientError, match="weights: expected 'w', got 'x'"):
        Stored.open(folder, layout().identity)


def test_a_half_written_store_is_not_a_result(tmp_path):
    """Unfinished, missing and altered stores are errors, and finishing early names the missing blocks."""
    folder = tmp_path / "scores"
    with pytest.raises(GradientError, match="got none"):
        Stored.open(folder)
    prepare(folder, layout())
    writer = StoreWriter.open(folder, layout(), 0)
    for number in (0, 1, 3):
        writer.write(number, rows(number))
    for path in (folder, folder.with_name("scores.part")):
        with pytest.raises(GradientError, match="unfinished"):
            Stored.open(path)
    with pytest.raises(GradientError, match=r"none of \[2\]"):
        writer.finish()
    writer.write(2, rows(2))
    writer.finish()
    data = bytearray((folder / "values.npy").read_bytes())
    data[-1] ^= 1
    (folder / "values.npy").write_bytes(data)
    with pytest.raises(GradientError, match="altered"):
        Stored.open(folder)
    with pytest.raises(GradientError, match="all 10 rows"):
        prepare(folder, layout(blocks=((0, 4),)))
    with pytest.raises(GradientError, match="float16"):
        prepare(folder, layout(dtype="float16"))
