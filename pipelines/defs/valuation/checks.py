"""Blocking checks of the valuation group: the laws that values and prices must obey."""

import dagster as dg

from pipelines.checking import ins, outcome
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import audit_trail as trail
from pipelines.steps import judgement


@dg.asset_check(asset="entropy", blocking=True, additional_ins=ins("tokens"))
def entropy_is_bounded(home: HomeResource, tokens: Result) -> dg.AssetCheckResult:
    """No owner"s empirical entropy lies outside 0 .. log2(vocabulary) bits per token."""
    return outcome(trail.entropy(home.site(), tokens))


@dg.asset_check(asset="owner_values", blocking=True)
def values_are_efficient(owner_values: Result) -> dg.AssetCheckResult:
    """The values of the groups add up to V(all) - V(nobody), to 1e-9 nats."""
    return outcome(trail.efficiency(owner_values), error=owner_values["efficiency_error"])


@dg.asset_check(asset="value_judgement", blocking=True)
def judgement_follows_from_its_rows(
    home: HomeResource, value_judgement: Result
) -> dg.AssetCheckResult:
    """Scores, verdict and control are those of the rows; a bad verdict is a result and passes."""
    return outcome(judgement.contradicted(home.site(), value_judgement))


@dg.asset_check(asset="prices", blocking=True)
def prices_sum_to_the_pool(home: HomeResource, prices: Result) -> dg.AssetCheckResult:
    """Prices and reserve add up to the pool to the last micro-unit, and follow from the committed values."""
    return outcome(trail.prices(home.site(), prices))
