"""Live no longer than the process that started this one (Linux; elsewhere nothing happens).

torchrun and a supervisor end their children when they are stopped, but not when they are killed: without this an
orphan would train on, writing into a folder that the next start believes to be its own.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int, number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent dies; leave at once if it already has.

    Args:
        parent: process id of the parent, as known before it could have died.
        number: the signal.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died in between
            os._exit(1)
