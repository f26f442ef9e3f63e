"""The code location: everything under `pipelines/defs/`, loaded once."""

import warnings
from functools import cache
from pathlib import Path

import dagster as dg

# Dagster flags `--select '*'` as beta and its own Pipes client as preview; its notices are not our users' business.
for notice in (dg.BetaWarning, dg.PreviewWarning):
    warnings.filterwarnings("ignore", category=notice)


@cache
def _loaded() -> dg.Definitions:
    """The folder, read once: Dagster asks for it several times in one process."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)


@dg.definitions
def defs() -> dg.Definitions:
    """Assets, checks, schedules, sensors, resources and the executor."""
    return _loaded()
