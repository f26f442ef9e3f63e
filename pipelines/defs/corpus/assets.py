"""From deliveries to token shards: what came in, what was kept, which texts are the same."""

from functools import partial

import dagster as dg

from pipelines.describe import corpus as describe
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import buyers
from pipelines.steps import corpus as steps

GROUP = "corpus"
OWNERS = ["team:data"]


@dg.asset(group_name=GROUP, code_version="1", kinds={"file"}, owners=OWNERS)
def deliveries(context: dg.AssetExecutionContext, home: HomeResource) -> dg.MaterializeResult:
    """Files that owners put in the inbox, observed by keyed content digest; the default corpus is delivered here first."""
    site = home.site()
    seen = steps.observe(site)
    return home.materialize(
        context, seen.inputs, partial(steps.deliveries, seen), describe.deliveries
    )


@dg.asset(group_name=GROUP, code_version="1", kinds={"polars", "parquet"}, owners=OWNERS)
def corpus(
    context: dg.AssetExecutionContext, home: HomeResource, deliveries: Result
) -> dg.MaterializeResult:
    """The corpus version: accepted records in content-addressed blocks under one manifest, published by moving HEAD."""
    site = home.site()
    inputs = {"deliveries": deliveries.data_version, **steps.corpus_inputs(site)}
    return home.materialize(
        context, inputs, partial(steps.corpus, site, deliveries), describe.corpus
    )


@dg.asset(group_name=GROUP, code_version="1", kinds={"parquet"}, owners=OWNERS)
def quarantine(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result
) -> dg.MaterializeResult:
    """Every rejected record and file with its reason; never its text."""
    site = home.site()
    inputs = {"quarantine": corpus["quarantine_digest"]}
    return home.materialize(
        context,
        inputs,
        partial(steps.quarantine, corpus),
        partial(describe.quarantine, site),
    )


@dg.asset(group_name=GROUP, code_version="1", kinds={"polars"}, owners=OWNERS)
def clusters(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result
) -> dg.MaterializeResult:
    """Records that are the same or nearly the same text: valued once, paid once."""
    site = home.site()
    inputs = {"corpus": corpus["version"]}
    return home.materialize(
        context,
        inputs,
        partial(steps.clusters, site, corpus),
        partial(describe.clusters, site),
    )


@dg.asset(group_name=GROUP, code_version="2", kinds={"arrow"}, owners=OWNERS)
def tokens(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result
) -> dg.MaterializeResult:
    """Token shards: aligned runs of leaves in memory-mapped Arrow files, from a tokenizer frozen per corpus lineage."""
    site = home.site()
    inputs = {"corpus": corpus["version"], "vocab_size": site.size.vocab_size}
    return home.materialize(context, inputs, partial(steps.tokens, site, corpus), describe.tokens)


@dg.asset(group_name=GROUP, code_version="1", kinds={"arrow"}, owners=OWNERS)
def target(
    context: dg.AssetExecutionContext, home: HomeResource, corpus: Result, tokens: Result
) -> dg.MaterializeResult:
    """The buyer's held-out target, split once by digest: values, evaluation, and a sealed confirmation set."""
    site = home.site()
    inputs = {
        "target": corpus["target_digest"],
        "tokenizer": tokens["tokenizer_digest"],
        "corpus": corpus["version"],
        **buyers.target_inputs(site),
    }
    return home.materialize(
        context, inputs, partial(steps.target, site, corpus, tokens), describe.target
    )
