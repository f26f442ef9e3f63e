"""The code location: everything under `pipelines/defs/`, loaded once."""

import warnings
from pathlib import Path

import dagster as dg

# Dagster flags `--select '*'` as beta and its own Pipes client as preview; its notices are not our users' business.
for notice in (dg.BetaWarning, dg.PreviewWarning):
    warnings.filterwarnings("ignore", category=notice)


@dg.definitions
def defs() -> dg.Definitions:
    """Assets, checks, schedules, sensors, resources and the executor."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
