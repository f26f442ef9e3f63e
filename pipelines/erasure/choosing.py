"""Choosing a method: what each would cost, and what past audits of this home say about it.

Cost is estimated from the last training: an approximate method takes its steps, exact retraining the training's, a sharded one
1/S of it. Forgetting is not predicted from papers: it is the share of PASS among this home's own audits of the method.
Exact is recommended wherever it fits into the time that is left, because it needs no proof of forgetting.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.requests import Request, RequestError

if TYPE_CHECKING:
    from pipelines.site import Site

SHARDS = 4
EXACT, CORE_SET = "exact", "coreset"
CORE_SHARE = "0.3"
"""Share of the forgotten records that `coreset` pushes, by NPO."""
AFFORDABLE_S = 3600.0
"""Exact retraining is recommended up to an hour."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One method as it would be here."""

    method: str
    kind: str
    """exact, library only, or approximate."""
    steps: int
    seconds: float | None
    """None before the first training."""
    share: float
    """Of an exact retraining."""
    audits: int
    passed: int

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        seconds = (
            "not known before the first training" if self.seconds is None else f"{self.seconds:.0f}"
        )
        return (
            self.method, self.kind, str(self.steps), seconds, f"{self.share:.2f}",
            str(self.audits), f"{self.passed}/{self.audits}" if self.audits else "never audited here",
        )  # fmt: skip


def methods() -> tuple[str, ...]:
    """Names of what the graph can run: every loss, the edits, NPO on a core-set, and exact retraining."""
    from unlearning.methods import METHODS
    from unlearning.methods.edits import EDITS

    return (EXACT, *sorted((*METHODS, *EDITS, CORE_SET)))


def asked_method(batch: Sequence[Request]) -> str:
    """The method that the requests of a batch name; empty where none does.

    Args:
        batch: Requests; those that are audited already were answered by a method, and leave the choice to the others.

    Raises:
        RequestError: Two of them name different ones.
    """
    waiting = [one for one in batch if one.state != "audited"]
    asked = {one.method for one in waiting or batch if one.method}
    if len(asked) > 1:
        raise RequestError(
            f"pending requests ask for {' and for '.join(sorted(asked))}: all requests of a corpus version are one batch with one method; "
            "remove the file of one in requests/ and write it again with the other's --method, or finish what is audited (dataworth erase --finish)"
        )
    return known(asked.pop()) if asked else ""


def known(method: str) -> str:
    """The name of a method.

    Raises:
        RequestError: There is none of this name.
    """
    if method not in methods():
        raise RequestError(
            f"[erasure] method: expected one of {', '.join(methods())}, got {method!r}"
        )
    return method


def choices(site: "Site", num_records: int) -> list[Choice]:
    """Every method with its cost and record.

    Args:
        site: The open home.
        num_records: Records to forget; 0 gives no rows.
    """
    if not num_records:
        return []
    second = _seconds_per_step(site)
    whole, some = site.size.steps, site.size.unlearn_steps
    past = _past(site)

    def one(method: str, kind: str, steps: int) -> Choice:
        cost = None if second is None else steps * second
        return Choice(method, kind, steps, cost, steps / whole, *past.get(method, (0, 0)))

    rows = [one(EXACT, "exact", whole), one("sisa", "library only", -(-whole // SHARDS))]
    return rows + [one(name, "approximate", some) for name in methods() if name != EXACT]


def recommendation(rows: list[Choice], site: "Site") -> str:
    """One sentence that says what to do and why.

    Args:
        rows: From `choices`.
        site: The open home.
    """
    if not rows:
        return "nothing to forget: no record is named"
    exact = rows[0]
    if exact.seconds is None or exact.seconds <= AFFORDABLE_S:
        return (
            "recommended: exact; retraining is affordable here, and needs no proof that it forgot"
        )
    proven = [row for row in rows[2:] if row.passed]
    if proven:
        best = max(proven, key=lambda row: row.passed / row.audits)
        return f"recommended: {best.method}; it passed {best.passed} of {best.audits} audits of this home"
    return (
        f"recommended: {site.config.erasure.method} with an audit; no approximate method has "
        "passed an audit of this home yet, and a failed audit costs an exact retraining"
    )


def _seconds_per_step(site: "Site") -> float | None:
    from pipelines.results import latest

    trained = latest(site.home.results, "checkpoint")
    if trained is None or not trained["tokens_per_s"]:
        return None
    return site.size.rows * site.size.length / float(trained["tokens_per_s"])


def _past(site: "Site") -> dict[str, tuple[int, int]]:
    """Method → (audits, passed), from the ledger."""
    from pipelines.steps.ledger import open_ledger

    found: dict[str, tuple[int, int]] = {}
    for entry in open_ledger(site).entries():
        if entry["kind"] == "audit" and "method" in entry["body"]:  # older entries don't say which
            method = entry["body"]["method"]
            audits, passed = found.get(method, (0, 0))
            found[method] = (audits + 1, passed + (entry["body"]["verdict"] == "PASS"))
    return found
