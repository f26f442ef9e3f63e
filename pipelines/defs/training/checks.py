"""Blocking checks of the training group: the checkpoint is what the run says, the plan came first."""

import dagster as dg

from pipelines.checking import ins, outcome
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import audit_trail as trail


@dg.asset_check(asset="checkpoint", blocking=True)
def checkpoint_root_holds(home: HomeResource, checkpoint: Result) -> dg.AssetCheckResult:
    """Every file of the checkpoint is the one that its manifest names; manifest and root are those in the ledger."""
    return outcome(trail.checkpoint(home.site(), checkpoint))


@dg.asset_check(asset="checkpoint", blocking=True)
def phases_are_complete(home: HomeResource, checkpoint: Result) -> dg.AssetCheckResult:
    """The run's phase record answers every question for each of the five phases, and every phase's check passed."""
    return outcome(trail.phases(home.site(), checkpoint))


@dg.asset_check(
    asset="evaluation", blocking=True, additional_ins=ins("evaluation_plan", "checkpoint")
)
def plan_was_followed(
    home: HomeResource, evaluation: Result, evaluation_plan: Result, checkpoint: Result
) -> dg.AssetCheckResult:
    """The plan stands in the ledger before the training, and the decision is the one its rule gives."""
    return outcome(
        trail.plan(home.site(), evaluation, evaluation_plan, checkpoint), gain=evaluation["gain"]
    )
