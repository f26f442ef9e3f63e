"""The lock of the one writer: ``flock`` on a file, released by the kernel when its holder dies.

A lock file that is left over means nothing: what counts is whether a living process holds it. That is
why no age, no process id and no timeout of others is ever looked at, and a ``kill -9`` needs no
cleaning up. When it is wrong: some network file systems do not pass ``flock`` on to other machines,
so a ledger has its writers on one machine.

Source: flock(2).
"""

from __future__ import annotations

import fcntl
import os
import time as clock
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from provenance.errors import LedgerError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_POLL_S: Final = 0.01


@contextmanager
def writers_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock inside a ``with`` block.

    Args:
        path: the lock file, made when it is missing.
        timeout_s: how long to wait for another writer, in seconds.

    Yields:
        Nothing; the lock is held until the block is left or the process dies.

    Raises:
        LedgerError: another process held it for too long.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = clock.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.monotonic() >= deadline:
                    raise LedgerError(
                        f"another process has been writing for {timeout_s:g} s: "
                        "wait for it or stop it"
                    ) from None
                clock.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
