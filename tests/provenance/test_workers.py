"""Trees that several processes hash are the tree of one, and a worker that fails is told, not lost."""

from __future__ import annotations

import os
import signal

import pytest

from provenance import FormatError, MerkleTree, WorkerError, build_tree

PARENT = os.getpid()


def leaves(first, end):
    """Leaf data that tells its place."""
    return (b"leaf %d" % index for index in range(first, end))


def children():
    """Processes of ours that have not been waited for."""
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None


@pytest.mark.parametrize("processes", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 4096, 9_999])
def test_the_tree_of_several_processes_is_the_tree_of_one(size, processes):
    """For sizes around the borders: every node on every level is equal, and it can be appended to."""
    tree, whole = build_tree(leaves, size, processes), MerkleTree.from_data(leaves(0, size))
    assert (tree.size, tree.root()) == (size, whole.root())
    assert [tree.level(level) for level in range(20)] == [whole.level(level) for level in range(20)]
    tree.append(bytes(32))
    whole.append(bytes(32))
    assert tree.root() == whole.root()
    assert children() is None


def test_the_parts_are_hashed_by_processes_of_their_own():
    """Each part is asked for once, in another process: otherwise nothing would run at the same time."""
    reader, writer = os.pipe()

    def told(first, end):
        os.write(writer, f"{os.getpid()} {first} {end}\n".encode())
        return leaves(first, end)

    build_tree(told, 10_000, 3)
    rows = [line.split() for line in os.read(reader, 4096).decode().splitlines()]
    os.close(reader)
    os.close(writer)
    assert len({pid for pid, _, _ in rows}) == 3
    runs = sorted((int(first), int(end)) for _, first, end in rows)
    assert [first for first, _ in runs] == [0, *(end for _, end in runs[:-1])]
    assert runs[-1][1] == 10_000
    assert all(2048 <= end - first <= 4096 for first, end in runs)


def test_an_error_in_a_worker_is_raised_here_with_its_words():
    """A source that fails in the second process stops the build, and names the leaves and the reason."""

    def broken(first, end):
        if os.getpid() != PARENT:
            raise OSError("block 7 is gone")
        return leaves(first, end)

    with pytest.raises(WorkerError, match=r"leaves 3072 to 8191 failed: OSError: block 7 is gone"):
        build_tree(broken, 8192, 2)
    assert children() is None


def test_a_worker_that_is_killed_is_told():
    """SIGKILL, as the kernel sends it when memory runs out: an error, never a tree with zeros in it."""

    def killed(first, end):
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return leaves(first, end)

    with pytest.raises(WorkerError, match="killed by signal 9"):
        build_tree(killed, 8192, 2)
    assert children() is None


def test_a_failure_here_leaves_no_process_behind():
    """The source fails in this process while a worker would run for ever: the worker is stopped."""

    def stuck(first, end):
        if os.getpid() == PARENT:
            raise OSError("disk")
        signal.pause()
        return leaves(first, end)

    with pytest.raises(OSError, match="disk"):
        build_tree(stuck, 8192, 2)
    assert children() is None


@pytest.mark.parametrize("off", [-1, 1])
def test_a_source_that_gives_another_number_of_leaves_is_refused(off):
    """Too few or too many leaves, here or in a worker: expected and got, never a tree of another size."""
    with pytest.raises(FormatError, match=r"expected 3072 leaves from 0 on, `leaves` gave 307[13]"):
        build_tree(lambda first, end: leaves(first, end + off), 8192, 2)
    with pytest.raises(WorkerError, match=r"FormatError: expected 5120 leaves.*`leaves` gave"):
        build_tree(lambda first, end: leaves(first, end + off * bool(first)), 8192, 2)


@pytest.mark.parametrize(("size", "processes"), [(-1, 1), (10, 0)])
def test_sizes_and_processes_out_of_range_are_refused(size, processes):
    """Expected and got."""
    with pytest.raises(FormatError, match=f"got {size} and {processes}"):
        build_tree(leaves, size, processes)


def test_levels_of_another_length_are_not_adopted():
    """A level that does not fit its leaves would put false nodes into every later proof."""
    part, tree = MerkleTree.from_data(leaves(0, 8)), MerkleTree.from_data(leaves(0, 4))
    before = tree.root()
    for levels in (
        [part.level(0), part.level(1)[:-32]],
        [part.level(0)[:-1]],
        [b"", part.level(1)],
    ):
        with pytest.raises(FormatError, match="bytes, got"):
            tree.adopt(levels)
        assert (tree.size, tree.root()) == (4, before)
