"""Live no longer than the process that started this one (Linux; elsewhere nothing happens).

torchrun and a supervisor end their children when they are stopped, but not when they are killed: without this an
orphan would train on, writing into a folder that the next start believes to be its own.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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


def die_with_launcher() -> None:
    """End this process when torchrun dies; without torchrun nothing happens.

    To be called before anything slow is imported: a launcher that died before the call is not noticed, since nothing
    says who it was.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid(), signal.SIGKILL)
