"""Blocking checks of the unlearning group; a verdict is a result, so none of them fails because of one."""

import dagster as dg

from pipelines.checking import ins, outcome
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import audit_trail as trail


@dg.asset_check(asset="erasure_request", blocking=True)
def suspended_records_left_head(home: HomeResource, erasure_request: Result) -> dg.AssetCheckResult:
    """No suspended record is in the version that HEAD names."""
    return outcome(
        trail.suspended(home.site(), erasure_request), records=erasure_request["records"]
    )


@dg.asset_check(asset="robustness_audit", blocking=True)
def verdict_follows_from_its_rows(
    home: HomeResource, robustness_audit: Result
) -> dg.AssetCheckResult:
    """Judging the stored rows again, under the plan that was hashed first, gives the published verdict."""
    return outcome(
        trail.verdict(home.site(), robustness_audit),
        verdict=robustness_audit.values.get("verdict", "none"),
    )


@dg.asset_check(asset="report", blocking=True, additional_ins=ins("erasure_request"))
def report_is_self_contained(
    home: HomeResource, report: Result, erasure_request: Result
) -> dg.AssetCheckResult:
    """The page asks for nothing from outside and holds no text of a suspended record."""
    return outcome(trail.report(home.site(), report, erasure_request), bytes=report["bytes"])


@dg.asset_check(asset="shredding", blocking=True)
def shredded_requests_left_nothing(home: HomeResource, shredding: Result) -> dg.AssetCheckResult:
    """Every shredded request has its inventory of derivatives in the ledger, and no sealed batch is left of it."""
    return outcome(trail.shredded(home.site()), finished=len(shredding["finished"]))
