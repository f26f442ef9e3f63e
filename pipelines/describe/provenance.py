"""What the provenance group shows in the web UI."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.display import facts_md, table_md

if TYPE_CHECKING:
    from pipelines.results import Result


def commitment(result: "Result") -> Mapping[str, Any]:
    """Roots and where the ledger names them."""
    return {
        "record root": result["record_root"], "sparse root": result["sparse_root"], "ledger entry": result["entry"],
        "ledger size": result["ledger_size"], "verifier key": result["vkey"], "demo keys": result["demo"],
    }  # fmt: skip


def evaluation_plan(result: "Result") -> Mapping[str, Any]:
    """The plan in short."""
    names = ("digest", "metric", "baseline", "decision", "threshold_millinats", "seed_rule")
    return {
        "plan": facts_md({name: result[name] for name in names}),
        **({"base model": facts_md(result["base"])} if "base" in result.values else {}),
        "ledger entry": result["entry"],
    }


def receipts(result: "Result") -> Mapping[str, Any]:
    """How many receipts and how to check one."""
    first = result["owners"][0] if result["owners"] else "OWNER"
    return {
        "receipts": result["receipts"], "ledger size": result["ledger_size"], "check one": f"dataworth verify {first}",
        "owners": table_md(["owner"], [[owner] for owner in result["owners"]]),
    }  # fmt: skip
