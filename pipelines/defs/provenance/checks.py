"""Blocking checks of the provenance group: signatures, roots and receipts, verified as an outsider would."""

import dagster as dg

from pipelines.checking import outcome
from pipelines.resources import HomeResource
from pipelines.results import Result
from pipelines.steps import audit_trail as trail


@dg.asset_check(asset="commitment", blocking=True)
def ledger_verifies(home: HomeResource, commitment: Result) -> dg.AssetCheckResult:
    """Signature, every entry and the root of the ledger, recomputed from disk."""
    return outcome(trail.ledger(home.site(), commitment))


@dg.asset_check(asset="receipts", blocking=True)
def receipts_verify(home: HomeResource, receipts: Result) -> dg.AssetCheckResult:
    """The stand-alone verifier says yes to every owner"s receipt, and the strict one to every Chainpoint proof."""
    return outcome(trail.receipts(home.site(), receipts), receipts=receipts["receipts"])
