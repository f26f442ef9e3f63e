r"""One tree hashed by several processes, each its own run of the leaves.

::

    leaves   0 ............ 499,712 ............ 1,000,000
             this process          a forked one              both at the same time
    nodes    its own levels   ++   levels in shared memory   then about 1,000 nodes above the border

A worker is *forked*: it sees what this process holds in memory, so nothing is sent to it, and it
writes its hashes into memory that both share, so nothing but an error is sent back. The result is
bit for bit the tree of one process: the borders are multiples of 1024 leaves, below which no node
crosses a border.

Cost: 64 bytes of shared memory per leaf; a fork takes milliseconds, more with more memory in use.
From about 100,000 leaves on it pays.

When not to use it: in a process whose other threads hold locks that ``leaves`` needs (reading a file or
a list takes none). A ``leaves`` that takes objects out of a list makes the kernel copy the pages they
lie on, because a reference count changes; slices of one buffer or file do not.

Source: RFC 9162, section 2.1.1; fork(2), mmap(2).
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
from typing import TYPE_CHECKING, Final, Self, cast

from provenance.errors import FormatError, WorkerError
from provenance.hashing import HASH_SIZE
from provenance.merkle import MerkleTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_BORDER: Final = 1024
"""Borders between parts are multiples of so many leaves."""

_JOIN: Final = 0.04
"""Time to copy the nodes over a leaf that a worker hashed, as a share of the time to hash them."""

_MESSAGE: Final = 4096
"""Longest report of a worker in bytes; a pipe holds it without a reader."""

_DONE: Final = b"done"


def build_tree(
    leaves: Callable[[int, int], Iterable[bytes]], size: int, processes: int
) -> MerkleTree:
    """Build an RFC 9162 tree in several processes, this one among them.

    Args:
        leaves: gives the data of the leaves ``[first, end)``; each process calls it once, for its own.
        size: number of leaves, 0 <= size.
        processes: how many at most, 1 <= processes; a small tree takes fewer.

    Returns:
        The tree, equal to ``MerkleTree.from_data(leaves(0, size))``.

    Raises:
        FormatError: ``size`` or ``processes`` is out of range, or ``leaves`` gave another number.
        WorkerError: a worker failed or was killed; no process is left behind.
    """
    if size < 0 or processes < 1:
        raise FormatError(f"expected size >= 0 and processes >= 1, got {size} and {processes}")
    shared = mmap.mmap(-1, max(1, 2 * HASH_SIZE * size))
    workers: list[_Worker] = []
    try:
        (begin, border), *rest = _runs(size, processes)
        for first, end in rest:
            workers.append(_Worker(leaves, first, end, shared))
        tree = _hashed(MerkleTree(), leaves, begin, border)
        with memoryview(shared) as memory:
            for worker in workers:
                worker.join()
                tree.adopt([memory[at:end] for at, end in _places(worker.first, worker.end)])
    finally:
        for worker in workers:
            worker.stop()
    return tree


def _runs(size: int, processes: int) -> list[tuple[int, int]]:
    """The leaves of each process; this one, the first, joins the parts and so gets a smaller one."""
    share = size / (processes - _JOIN * (processes - 1))
    ends = [max(0, int(size - share * number)) for number in range(1, processes)]
    begins = sorted({0, *(end // _BORDER * _BORDER for end in ends)})
    return list(zip(begins, [*begins[1:], size], strict=True))


class _Worker:
    """A forked process that hashes the leaves ``[first, end)`` into shared memory."""

    def __init__(
        self,
        leaves: Callable[[int, int], Iterable[bytes]],
        first: int,
        end: int,
        shared: mmap.mmap,
    ) -> None:
        self.first, self.end = first, end
        self._reports, report = os.pipe()
        self._done = False
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._reports)
            os.close(report)
            raise
        if not self._pid:
            # Nothing of the parent may run in the child: no exception handler, no exit hook, no
            # collector that touches (and so copies) the parent's memory.
            status = 1
            try:
                gc.disable()
                levels = [_Window(shared, *place) for place in _places(first, end)]
                _hashed(MerkleTree.over(cast("list[bytearray]", levels)), leaves, first, end)
                os.write(report, _DONE)  # before the end, which takes a while in a large process
                status = 0
            except BaseException as error:  # noqa: BLE001 - reported to the parent, which raises
                message = f"{type(error).__name__}: {error}"
                os.write(report, message.encode("utf-8", "replace")[:_MESSAGE])
            finally:
                os._exit(status)
        os.close(report)

    def join(self) -> None:
        """Wait until the hashes are there; WorkerError if the process failed."""
        told = os.read(self._reports, _MESSAGE)
        if told != _DONE:
            code = os.waitstatus_to_exitcode(self._reaped())
            how = f"killed by signal {-code}" if code < 0 else told.decode("utf-8", "replace")
            raise WorkerError(
                f"the process that hashes leaves {self.first} to {self.end - 1} failed: {how}"
            )
        self._done = True

    def stop(self) -> None:
        """Leave no process and no pipe behind."""
        if self._pid:
            if not self._done:
                os.kill(self._pid, signal.SIGKILL)
            self._reaped()
        os.close(self._reports)

    def _reaped(self) -> int:
        _, status = os.waitpid(self._pid, 0)
        self._pid = 0
        return status


class _Window:
    """A level of a tree as a growing part of shared memory, in place of a bytearray."""

    __slots__ = ("_begin", "_end", "_memory", "_stop")

    def __init__(self, memory: mmap.mmap, begin: int, stop: int) -> None:
        self._memory, self._begin, self._end, self._stop = memory, begin, begin, stop

    def __len__(self) -> int:
        return self._end - self._begin

    def __iadd__(self, data: bytes) -> Self:
        end = self._end + len(data)
        if end > self._stop:
            raise FormatError(
                f"expected {(self._stop - self._begin) // HASH_SIZE} leaves, `leaves` gave more"
            )
        self._memory[self._end : end] = data
        self._end = end
        return self

    def __getitem__(self, part: slice) -> bytes:
        return self._memory[self._begin + part.start : self._begin + part.stop]


def _hashed(
    tree: MerkleTree, leaves: Callable[[int, int], Iterable[bytes]], first: int, end: int
) -> MerkleTree:
    if end > first:
        tree.extend(leaves(first, end))
    if tree.size != end - first:
        raise FormatError(
            f"expected {end - first} leaves from {first} on, `leaves` gave {tree.size}"
        )
    return tree


def _places(first: int, end: int) -> list[tuple[int, int]]:
    """Where the levels over the leaves ``[first, end)`` stand in the shared memory."""
    count, place, places = end - first, 2 * HASH_SIZE * first, []
    for level in range(count.bit_length()):
        length = (count >> level) * HASH_SIZE
        places.append((place, place + length))
        place += length
    return places
