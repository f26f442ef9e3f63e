"""Work on a corpus piece by piece: several threads, results in order, few pieces in memory.

numpy, polars and zstd let other threads run while they work, so threads of one process use all cores and share what is mapped or counted.
Pieces are chosen to keep their arrays in a processor's cache. Their memory is had again and again; an allocator that gives it back to the
system after every piece has it cleared for every piece, which costs a tenth of the time.

Shapes: none.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from valuation.errors import TokensError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future

    Item = TypeVar("Item")
    Done = TypeVar("Done")

KEPT_BYTES = (1 << 25) - (1 << 16)


def in_order(work: Callable[[Item], Done], items: Iterable[Item], threads: int) -> Iterator[Done]:
    """Results of all items, in their order.

    Args:
        work: what is done with an item; by any thread, so it must not depend on what other items have done.
        items: asked for as threads will soon have nothing to do, in the calling thread.
        threads: items that are worked on at the same time; 1 = in the calling thread.

    Yields:
        A result per item. No more than 2 · threads of them wait.

    Raises:
        TokensError: fewer threads than one.
    """
    if threads < 1:
        raise TokensError(f"threads: expected at least 1, got {threads}")
    # glibc keeps blocks up to the size of the largest that was freed, and up to twice as much in all.
    np.empty(KEPT_BYTES, np.uint8)
    if threads == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Done]] = deque()
        for item in items:
            waiting.append(pool.submit(work, item))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
