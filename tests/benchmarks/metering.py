"""CPU seconds and memory of a piece of work in this process, measured alike for ours and for peers; standard library only."""

import time
from contextlib import contextmanager
from pathlib import Path

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def _bytes(field):
    """A field of /proc/self/status in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@contextmanager
def metered():
    """Yields a dict that holds `cpu_s` and `grown_bytes` (peak above what the process held before) afterwards.

    Imports and loading stand outside, so that a library with a slow import or a fat one is not punished for it here.
    """
    RESET.write_text("5")  # forget the peak of the imports
    held, start, meter = _bytes("VmRSS"), time.process_time(), {}
    yield meter
    meter["cpu_s"] = time.process_time() - start
    meter["grown_bytes"] = max(0, _bytes("VmHWM") - held)
