"""The code location: everything under `pipelines/defs/`, loaded once."""

import warnings
from pathlib import Path

import dagster as dg

# `--select '*'` itself is flagged beta by Dagster; its own notices are not our users' business.
warnings.filterwarnings("ignore", category=dg.BetaWarning)


@dg.definitions
def defs() -> dg.Definitions:
    """Assets, checks, schedules, sensors, resources and the executor."""
    return dg.load_from_defs_folder(path_within_project=Path(__file__).parent)
