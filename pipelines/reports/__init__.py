"""The report that people read: one HTML file for a compliance officer and an engineer.

`ReportData` (`model.py`) holds every fact of the page and nothing else; `render` (`page.py`) turns it
into one self-contained HTML file. The same data always gives the same bytes, so a report can be
named by its digest. A fact that is not known is a `NotAvailable` with its reason and stands on the
page as such: nothing is left out silently, and no field can carry the text of a record.

Importing this package loads neither matplotlib nor jinja2: both wait until a page is rendered.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelines.reports.audit import (
        Audit,
        Control,
        Membership,
        Rate,
        Request,
        SideAttack,
        TierRow,
        Utility,
        Verdict,
        ZeroBound,
    )
    from pipelines.reports.errors import ReportError
    from pipelines.reports.influence import (
        CurvePoint,
        HeatCell,
        Influence,
        Judged,
        MethodScore,
        RecordInfluence,
    )
    from pipelines.reports.memory import Memory, MemoryRow
    from pipelines.reports.model import (
        Corpus,
        EvaluationPlan,
        GroupValue,
        Intake,
        LossCurve,
        OwnerRow,
        PriceRow,
        Pricing,
        Provenance,
        Reason,
        ReceiptCheck,
        ReportData,
        RunRef,
        Seed,
        Valuation,
        Version,
    )
    from pipelines.reports.owners import (
        Coverage,
        EntropySpread,
        FairRow,
        Narrowing,
        OwnerWorth,
        Strip,
        Worth,
    )
    from pipelines.reports.page import render
    from pipelines.reports.parts import Estimate, NotAvailable

_MODULES = {
    "Audit": "audit",
    "SideAttack": "audit",
    "Control": "audit",
    "Corpus": "model",
    "Coverage": "owners",
    "EntropySpread": "owners",
    "Estimate": "parts",
    "CurvePoint": "influence",
    "EvaluationPlan": "model",
    "FairRow": "owners",
    "GroupValue": "model",
    "HeatCell": "influence",
    "Influence": "influence",
    "Judged": "influence",
    "MethodScore": "influence",
    "Intake": "model",
    "LossCurve": "model",
    "Membership": "audit",
    "Memory": "memory",
    "MemoryRow": "memory",
    "Narrowing": "owners",
    "NotAvailable": "parts",
    "OwnerRow": "model",
    "OwnerWorth": "owners",
    "PriceRow": "model",
    "Pricing": "model",
    "Provenance": "model",
    "Rate": "audit",
    "Reason": "model",
    "ReceiptCheck": "model",
    "RecordInfluence": "influence",
    "ReportData": "model",
    "ReportError": "errors",
    "Request": "audit",
    "RunRef": "model",
    "Seed": "model",
    "Strip": "owners",
    "TierRow": "audit",
    "Utility": "audit",
    "Valuation": "model",
    "Verdict": "audit",
    "Version": "model",
    "Worth": "owners",
    "ZeroBound": "audit",
    "render": "page",
}

__all__ = [
    "Audit",
    "Control",
    "Corpus",
    "Coverage",
    "CurvePoint",
    "EntropySpread",
    "Estimate",
    "EvaluationPlan",
    "FairRow",
    "GroupValue",
    "HeatCell",
    "Influence",
    "Intake",
    "Judged",
    "LossCurve",
    "Membership",
    "Memory",
    "MemoryRow",
    "MethodScore",
    "Narrowing",
    "NotAvailable",
    "OwnerRow",
    "OwnerWorth",
    "PriceRow",
    "Pricing",
    "Provenance",
    "Rate",
    "Reason",
    "ReceiptCheck",
    "RecordInfluence",
    "ReportData",
    "ReportError",
    "Request",
    "RunRef",
    "Seed",
    "SideAttack",
    "Strip",
    "TierRow",
    "Utility",
    "Valuation",
    "Verdict",
    "Version",
    "Worth",
    "ZeroBound",
    "render",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module when it is first asked for (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
