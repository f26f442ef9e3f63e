"""What a run tells while it goes: progress.jsonl, one line per step, and what its phases cost.

Progress is for people and early warning, not for proof: it holds floats, is flushed but not synced, and a resumed run
cuts it back to its checkpoint so that no step stands twice.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import TYPE_CHECKING, Any, Self

from provenance.canonical import write_atomic

if TYPE_CHECKING:
    from pathlib import Path

PROGRESS_FILE = "progress.jsonl"


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


class ProgressWriter:
    """Appends to progress.jsonl; a context manager."""

    def __init__(self, path: Path, done: int) -> None:
        """Cut the file back to the steps that are done, and go on from there.

        Args:
            path: progress.jsonl.
            done: steps of the checkpoint that the run goes on from; 0 starts anew.
        """
        kept = [line for line in read_lines(path) if line["step"] <= done]
        write_atomic(path, b"".join(json.dumps(line).encode() + b"\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._before = time.perf_counter()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()

    def write(self, step: int, loss: float, tokens: int, **more: float) -> None:
        """One line.

        Args:
            step: steps done, counted from 1.
            loss: loss of this step in nats per token.
            tokens: tokens of this step; the rate is over the time since the last line.
            more: further numbers, such as lr and grad_norm.
        """
        now = time.perf_counter()
        line = {
            "step": step,
            "loss": loss,
            "tokens_per_s": tokens / max(now - self._before, 1e-9),
            "rss_bytes": peak_rss_bytes(),
            "time": time.time(),
            **more,
        }
        self._before = now
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
