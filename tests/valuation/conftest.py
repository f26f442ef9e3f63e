"""Makes this folder's `valuation_*` modules and the trainer's `trainer_processes` importable, also for child processes."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trainer")]
