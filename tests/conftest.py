"""Property tests run without a time limit per example and with fixed examples.

The limit would measure how busy the machine is, and a run that fails must fail again.
"""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("dataworth", deadline=None, derandomize=True)
settings.load_profile("dataworth")
