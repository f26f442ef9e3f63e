"""Blocking checks of the corpus group; each recomputes from disk what the asset claims."""

import dagster as dg

from pipelines.checking import ins, outcome
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import audit_trail as trail


@dg.asset_check(asset="corpus", blocking=True)
def counts_add_up(home: HomeResource, corpus: Result) -> dg.AssetCheckResult:
    """Received = accepted + held out as target + quarantined + duplicates of the same owner."""
    return outcome(trail.counts(home.site(), corpus), **corpus["counts"])


@dg.asset_check(asset="corpus", blocking=True)
def version_verifies(home: HomeResource, corpus: Result) -> dg.AssetCheckResult:
    """Every block"s row root, recomputed from rows, tombstones and salts, is the manifest"s."""
    return outcome(trail.version(home.site(), corpus), live=corpus["live"])


@dg.asset_check(asset="clusters", blocking=True, additional_ins=ins("corpus"))
def clusters_cover_the_corpus(
    home: HomeResource, clusters: Result, corpus: Result
) -> dg.AssetCheckResult:
    """Every live record is in exactly one cluster, named by an earlier record or itself."""
    return outcome(trail.clusters(home.site(), clusters, corpus))


@dg.asset_check(asset="tokens", blocking=True, additional_ins=ins("corpus"))
def tokens_equal_text(home: HomeResource, tokens: Result, corpus: Result) -> dg.AssetCheckResult:
    """Decoding the shards gives back the bytes of every live record, and nothing else."""
    return outcome(trail.tokens(home.site(), tokens, corpus))


@dg.asset_check(asset="target", blocking=True, additional_ins=ins("corpus"))
def target_is_disjoint(home: HomeResource, target: Result, corpus: Result) -> dg.AssetCheckResult:
    """No record of the target is in the corpus, by fingerprint."""
    return outcome(trail.target(home.site(), target, corpus))
