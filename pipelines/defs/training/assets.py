"""How the model is made: a planned layout, one torchrun training, its evaluation against the plan."""

from functools import partial

import dagster as dg

from pipelines.describe import training as describe
from pipelines.launch import launcher
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import training as steps

GROUP = "training"
OWNERS = ["team:training"]


@dg.asset(group_name=GROUP, code_version="2", kinds={"json"}, owners=OWNERS)
def training_plan(
    context: dg.AssetExecutionContext,
    home: HomeResource,
    tokens: Result,
    evaluation_plan: Result,
    influence: Result,
) -> dg.MaterializeResult:
    """The layout chosen for this machine and those discarded with the reason; optimiser, precision and weights of records."""
    site = home.site()
    inputs = steps.plan_inputs(site, tokens, evaluation_plan, influence)
    return home.materialize(
        context,
        inputs,
        partial(steps.training_plan, site, tokens, evaluation_plan, influence),
        describe.training_plan,
    )


@dg.asset(group_name=GROUP, code_version="3", kinds={"pytorch"}, owners=OWNERS)
def checkpoint(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    tokens: Result, target: Result, evaluation_plan: Result, training_plan: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """The trained model: a torchrun subprocess over the committed shards, resumable after a kill, bit for bit."""
    site = home.site()
    inputs = {"plan": training_plan.data_version}
    run = launcher(context, pipes)
    make = partial(steps.checkpoint, site, tokens, target, evaluation_plan, training_plan, run)
    return home.materialize(context, inputs, make, describe.checkpoint)


@dg.asset(group_name=GROUP, code_version="2", kinds={"pytorch"}, owners=OWNERS)
def evaluation(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    tokens: Result, target: Result, evaluation_plan: Result, checkpoint: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """The checkpoint's loss on `target_test` against the plan's baseline, and the decision that the plan's rule gives."""
    site = home.site()
    inputs = {
        "checkpoint": checkpoint["root"],
        "target": target["test_digest"],
        "plan": evaluation_plan["digest"],
    }
    run = launcher(context, pipes)
    make = partial(steps.evaluation, site, tokens, target, evaluation_plan, checkpoint, run)
    return home.materialize(context, inputs, make, describe.evaluation)
