"""What was used, provably: commitments, the plan hashed before training, receipts an owner verifies offline."""

from functools import partial

import dagster as dg

from pipelines.describe import provenance as describe
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import provenance as steps

GROUP = "provenance"
OWNERS = ["team:provenance"]


@dg.asset(group_name=GROUP, code_version="2", kinds={"json"}, owners=OWNERS)
def commitment(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result, tokens: Result
) -> dg.MaterializeResult:
    """The version's RFC 9162 root over hiding commitments and its sparse root, entered in the signed ledger."""
    site = home.site()
    inputs = {"corpus": corpus["version"], "tokens": tokens["digest"]}
    return home.materialize(
        context, inputs, partial(steps.commitment, site, corpus, tokens), describe.commitment
    )


@dg.asset(group_name=GROUP, code_version="2", kinds={"json"}, owners=OWNERS)
def evaluation_plan(
    context: dg.AssetExecutionContext, home: HomeResource, commitment: Result, target: Result
) -> dg.MaterializeResult:
    """Decision, baseline, metric, thresholds, refutation and abort rule, with the seeds: in the ledger before any training."""
    site = home.site()
    inputs = steps.plan_inputs(site, commitment, target)
    return home.materialize(
        context,
        inputs,
        partial(steps.evaluation_plan, site, commitment, target),
        describe.evaluation_plan,
    )


@dg.asset(group_name=GROUP, code_version="3", kinds={"json"}, owners=OWNERS)
def receipts(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result, tokens: Result, commitment: Result,
    values: Result, prices: Result, checkpoint: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """One file per owner that verifies offline: membership, value, price and the training steps that used its shards."""
    site = home.site()
    inputs = {
        "commitment": commitment.data_version, "values": values.data_version,
        "prices": prices.data_version, "checkpoint": checkpoint.data_version, "values_entry": values["entry"],
    }  # fmt: skip
    make = partial(steps.receipts, site, corpus, tokens, values, prices, checkpoint)
    return home.materialize(context, inputs, make, describe.receipts)
