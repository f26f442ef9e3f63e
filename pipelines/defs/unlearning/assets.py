"""How it is taken back: the request, the retrained reference, the approximate method, the audit, the report."""

from functools import partial

import dagster as dg

from pipelines.describe import unlearning as describe
from pipelines.launch import launcher
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import report as report_steps
from pipelines.steps import unlearning as steps

GROUP = "unlearning"
OWNERS = ["team:privacy"]


@dg.asset(group_name=GROUP, code_version="3", kinds={"json"}, owners=OWNERS)
def erasure_request(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result, target: Result
) -> dg.MaterializeResult:
    """All pending requests of this corpus version as one batch: suspended from HEAD, their text sealed."""
    del target  # held-out records can be named too, so the split comes first
    site = home.site()
    inputs = {"corpus": corpus["version"], "requests": steps.pending_digest(site)}
    return home.materialize(
        context, inputs, partial(steps.erasure_request, site, corpus), describe.erasure_request
    )


@dg.asset(group_name=GROUP, code_version="2", kinds={"pytorch"}, owners=OWNERS)
def gold_checkpoint(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    tokens: Result, target: Result, evaluation_plan: Result, training_plan: Result, erasure_request: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """The same recipe retrained from scratch without the forgotten records: the reference of every audit."""
    site = home.site()
    inputs = {
        "plan": training_plan.data_version, "excluded": erasure_request["excluded_digest"], "models": site.size.gold_seeds
    }  # fmt: skip
    run = launcher(context, pipes)
    make = partial(
        steps.gold_checkpoint,
        site,
        tokens,
        target,
        evaluation_plan,
        training_plan,
        erasure_request,
        run,
    )
    return home.materialize(context, inputs, make, describe.gold_checkpoint)


@dg.asset(group_name=GROUP, code_version="6", kinds={"pytorch"}, owners=OWNERS)
def unlearned_checkpoint(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    tokens: Result, target: Result, evaluation_plan: Result, training_plan: Result, erasure_request: Result, checkpoint: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """The released model after the chosen method (by default NPO with a retain term), or an exact retraining."""
    site = home.site()
    inputs = {
        "checkpoint": checkpoint["root"],
        "excluded": erasure_request["excluded_digest"],
        **steps.method_inputs(site, erasure_request),
    }
    run = launcher(context, pipes)
    make = partial(
        steps.unlearned_checkpoint,
        site,
        tokens,
        target,
        evaluation_plan,
        training_plan,
        erasure_request,
        checkpoint,
        run,
    )
    return home.materialize(context, inputs, make, describe.unlearned_checkpoint)


@dg.asset(group_name=GROUP, code_version="9", kinds={"pytorch"}, owners=OWNERS)
def robustness_audit(
    context: dg.AssetExecutionContext, home: HomeResource, pipes: dg.PipesSubprocessClient,
    corpus: Result, tokens: Result, target: Result, evaluation_plan: Result, erasure_request: Result,
    checkpoint: Result, gold_checkpoint: Result, unlearned_checkpoint: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """Three attack tiers on original, unlearned and gold alike; a verdict with bounds, never without a gold model."""
    site = home.site()
    models = {"original": checkpoint, "gold": gold_checkpoint, "unlearned": unlearned_checkpoint}
    inputs = steps.audit_inputs(site, erasure_request, models)
    run = launcher(context, pipes)
    make = partial(
        steps.robustness_audit,
        site,
        corpus,
        tokens,
        target,
        evaluation_plan,
        erasure_request,
        models,
        run,
    )
    return home.materialize(context, inputs, make, partial(describe.robustness_audit, site))


@dg.asset(group_name=GROUP, code_version="7", kinds={"html"}, owners=OWNERS)
def report(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result, tokens: Result, entropy: Result, influence: Result,
    value_judgement: Result, owner_values: Result,
    prices: Result, checkpoint: Result, evaluation: Result, evaluation_plan: Result, commitment: Result, receipts: Result,
    erasure_request: Result, robustness_audit: Result,
) -> dg.MaterializeResult:  # fmt: skip
    """One self-contained HTML page: values with errors, prices, loss curve, audit table, provenance summary."""
    site = home.site()
    parts = {
        "corpus": corpus, "tokens": tokens, "entropy": entropy, "influence": influence, "value_judgement": value_judgement, "owner_values": owner_values, "prices": prices, "checkpoint": checkpoint,
        "evaluation": evaluation, "evaluation_plan": evaluation_plan, "commitment": commitment, "receipts": receipts,
        "audit": robustness_audit, "erasure_request": erasure_request,
    }  # fmt: skip
    inputs = {name: part.data_version for name, part in parts.items()} | {
        "intake": corpus["quarantine_digest"],
        "counts": corpus["counts"],
    }
    return home.materialize(
        context, inputs, partial(report_steps.report, site, parts), describe.report
    )


@dg.asset(
    group_name=GROUP, code_version="1", kinds={"json"}, owners=OWNERS,
    deps=["quarantine", "clusters", "quality", "values", "report"],
)  # fmt: skip
def shredding(
    context: dg.AssetExecutionContext,
    home: HomeResource,
    erasure_request: Result,
    robustness_audit: Result,
) -> dg.MaterializeResult:
    """Last of all: audited requests whose time has come lose text, key, salts, the original model and every derivative."""
    site = home.site()
    inputs = steps.shredding_inputs(site, erasure_request, robustness_audit)
    return home.materialize(context, inputs, partial(steps.shredding, site), describe.shredding)
