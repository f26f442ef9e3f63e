"""What records and owners are worth: information, training gain, and the integers that are paid."""

from functools import partial

import dagster as dg

from pipelines.describe import valuation as describe
from pipelines.launch import launcher
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import information, judgement, pricing
from pipelines.steps import valuation as steps

GROUP = "valuation"
OWNERS = ["team:valuation"]


@dg.asset(group_name=GROUP, code_version="3", kinds={"numpy"}, owners=OWNERS)
def entropy(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    corpus: Result, clusters: Result, tokens: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """Token entropy of every record and owner in bits per token and per byte; surprisal under a held-out reference."""
    site = home.site()
    inputs = {"tokens": tokens["digest"], "clusters": clusters.data_version, **information.inputs(site)}  # fmt: skip
    run = launcher(context, pipes)
    make = partial(information.entropy, site, corpus, tokens, run)
    return home.materialize(context, inputs, make, partial(describe.entropy, site))


@dg.asset(group_name=GROUP, code_version="2", kinds={"polars"}, owners=OWNERS)
def quality(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result
) -> dg.MaterializeResult:
    """Quality components of every record: repetition, compressibility, vocabulary; reported, never a hidden filter."""
    site = home.site()
    inputs = {"corpus": corpus["version"]}
    return home.materialize(
        context, inputs, partial(information.quality, site, corpus), describe.quality
    )


@dg.asset(group_name=GROUP, code_version="2", kinds={"pytorch"}, owners=OWNERS)
def influence(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    tokens: Result, target: Result, evaluation_plan: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """Per record: in-run credit for the fall of the target's loss in one training, and EK-FAC influence at its last weights."""
    site = home.site()
    inputs = steps.influence_inputs(site, tokens, target, evaluation_plan)
    run = launcher(context, pipes)
    make = partial(steps.influence, site, tokens, target, evaluation_plan, run)
    return home.materialize(context, inputs, make, partial(describe.influence, site))


@dg.asset(group_name=GROUP, code_version="6", kinds={"pytorch"}, owners=OWNERS)
def value_judgement(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    tokens: Result, target: Result, evaluation_plan: Result, influence: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """Influence values and in-run credits held against retraining: linear datamodeling scores beside BM25's, a random draw's and the ceiling, and a verdict."""
    site = home.site()
    inputs = judgement.judgement_inputs(site, target, influence)
    run = launcher(context, pipes)
    make = partial(judgement.value_judgement, site, tokens, target, evaluation_plan, influence, run)
    return home.materialize(context, inputs, make, describe.value_judgement)


@dg.asset(group_name=GROUP, code_version="7", kinds={"pytorch"}, owners=OWNERS)
def owner_values(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    corpus: Result, clusters: Result, tokens: Result, target: Result, evaluation_plan: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """Shapley value of every lot of records by retraining the proxy on coalitions, and the owners' shares, with errors over target and seeds."""
    site = home.site()
    inputs = steps.owner_values_inputs(site, clusters, tokens, target, evaluation_plan)
    run = launcher(context, pipes)
    make = partial(steps.owner_values, site, corpus, clusters, tokens, target, evaluation_plan, run)
    return home.materialize(
        context, inputs, make, partial(describe.owner_values, site, evaluation_plan)
    )


@dg.asset(group_name=GROUP, code_version="6", kinds={"parquet"}, owners=OWNERS, name="values")
def value_table(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result, clusters: Result, tokens: Result,
    influence: Result, owner_values: Result, evaluation_plan: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """All values in one table, in integer nano-nats with errors, counts, method and plan; hashed into the ledger."""
    site = home.site()
    inputs = {
        "clusters": clusters.data_version, "tokens": tokens.data_version, "influence": influence.data_version,
        "owner_values": owner_values.data_version, "plan": evaluation_plan["digest"], **pricing.transfer_inputs(site), **pricing.entity_inputs(site),
    }  # fmt: skip
    make = partial(
        pricing.value_table,
        site,
        corpus,
        tokens,
        influence,
        owner_values,
        evaluation_plan,
    )
    return home.materialize(context, inputs, make, partial(describe.value_table, site))


@dg.asset(group_name=GROUP, code_version="2", kinds={"parquet"}, owners=OWNERS)
def prices(
    context: dg.AssetExecutionContext, home: HomeResource, values: Result
) -> dg.MaterializeResult:
    """What each owner is paid in integer micro-units: a fixed function of committed values that adds up to the pool."""
    site = home.site()
    inputs = {"values": values.data_version, **pricing.pricing_inputs(site)}
    return home.materialize(
        context,
        inputs,
        partial(pricing.prices, site, values),
        partial(describe.prices, site),
    )
