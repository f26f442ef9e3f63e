"""Being told to stop: SIGTERM and SIGINT set a flag, which the processes then agree on after one and the same step."""

from __future__ import annotations

import signal
import threading
from typing import Any, Self


class StopFlag:
    """SIGTERM and SIGINT ask the loop to stop after the current step; a context manager."""

    def __init__(self) -> None:
        self.raised = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        """Catch the signals; only a main thread may."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._raise)
        return self

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _raise(self, *_: object) -> None:
        self.raised = True
