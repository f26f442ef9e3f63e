"""Makes this folder's `valuation_*` modules importable, also for the children of multi-process tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
