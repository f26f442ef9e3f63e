"""How to take records back out of a model, and how to know: methods, attacks, audit statistics, verdicts.

Public names load lazily (PEP 562), so that judging rows does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from unlearning.endpoints import Endpoint, Status
    from unlearning.errors import PeopleError, PlanError, ProbeError, RowsError, UnlearningError
    from unlearning.people import Record, read_records, read_sealed
    from unlearning.plan import AttackPlan, AuditPlan
    from unlearning.probes import FileTokenizer, Probe, trained_probes, unseen_probes
    from unlearning.rows import Row, opaque_id, read_rows
    from unlearning.statistics import (
        Bounds,
        auc,
        auc_difference,
        exact_upper,
        newcombe_bounds,
        people_to_decide,
        wilson_bounds,
    )
    from unlearning.verdict import Control, Verdict, contradictions, verdict_from_rows

_HOMES = {
    "AttackPlan": "plan",
    "AuditPlan": "plan",
    "Bounds": "statistics",
    "Control": "verdict",
    "Endpoint": "endpoints",
    "FileTokenizer": "probes",
    "PeopleError": "errors",
    "PlanError": "errors",
    "Probe": "probes",
    "ProbeError": "errors",
    "Record": "people",
    "Row": "rows",
    "RowsError": "errors",
    "Status": "endpoints",
    "UnlearningError": "errors",
    "Verdict": "verdict",
    "auc": "statistics",
    "auc_difference": "statistics",
    "contradictions": "verdict",
    "exact_upper": "statistics",
    "newcombe_bounds": "statistics",
    "opaque_id": "rows",
    "people_to_decide": "statistics",
    "read_records": "people",
    "read_rows": "rows",
    "read_sealed": "people",
    "trained_probes": "probes",
    "unseen_probes": "probes",
    "verdict_from_rows": "verdict",
    "wilson_bounds": "statistics",
}

__all__ = [
    "AttackPlan",
    "AuditPlan",
    "Bounds",
    "Control",
    "Endpoint",
    "FileTokenizer",
    "PeopleError",
    "PlanError",
    "Probe",
    "ProbeError",
    "Record",
    "Row",
    "RowsError",
    "Status",
    "UnlearningError",
    "Verdict",
    "auc",
    "auc_difference",
    "contradictions",
    "exact_upper",
    "newcombe_bounds",
    "opaque_id",
    "people_to_decide",
    "read_records",
    "read_rows",
    "read_sealed",
    "trained_probes",
    "unseen_probes",
    "verdict_from_rows",
    "wilson_bounds",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"unlearning.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
