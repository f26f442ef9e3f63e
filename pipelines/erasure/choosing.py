"""Choosing a method: what each would cost, and what past audits of this home say about it.

Cost is estimated from the last training: an approximate method takes its steps, exact retraining the training's, a sharded one
those of the slices that the people's records stand in and of the slices after them (`steps.sharded`); without shards the row says
what 4 of them would give at most. Forgetting and utility are not predicted from papers: they are the share of PASS, and the means of the worst
tier's leak rate and of the loss on retained records, both above gold's, over this home's own audits of the method.
Exact is recommended wherever it fits into the time that is left, because it needs no proof of forgetting.
"""

import json
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.requests import Request, RequestError

if TYPE_CHECKING:
    from pipelines.site import Site

SHARDS = 4
EXACT, SHARDED = "exact", "sharded"
CORE_SET = "coreset"
"""Pushes a part of the records by NPO, chosen by gradients. One at random (`core_choice`) is a study's control, not a way to erase."""
CORE_SHARE = "0.3"
"""That part."""
AFFORDABLE_S = 3600.0
"""Exact retraining is recommended up to an hour."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One method as it would be here."""

    method: str
    kind: str
    """exact, approximate, or why it can't be taken."""
    steps: int
    seconds: float | None
    """None before the first training."""
    share: float
    """Of an exact retraining."""
    audits: int
    passed: int
    leak: float | None = None
    """Mean over past audits: the worst tier's rate of people given away, above gold's; None before the first audit."""
    damage: float | None = None
    """Mean over past audits: loss on retained records above gold's, nats per token."""

    def cells(self) -> tuple[str, ...]:
        """A row of the table."""
        seconds = (
            "not known before the first training" if self.seconds is None else f"{self.seconds:.0f}"
        )
        return (
            self.method, self.kind, str(self.steps), seconds, f"{self.share:.2f}",
            str(self.audits), f"{self.passed}/{self.audits}" if self.audits else "never audited here",
            "-" if self.leak is None else f"{self.leak:+.2f}", "-" if self.damage is None else f"{self.damage:+.2f}",
        )  # fmt: skip


def methods() -> tuple[str, ...]:
    """Names of what the graph can run: every loss, the edits, NPO on a core-set, and exact retraining."""
    from unlearning.methods import EDITS, METHODS

    return (EXACT, SHARDED, *sorted((*METHODS, *EDITS, CORE_SET)))


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


def choices(site: "Site", num_records: int, people: Collection[bytes] = ()) -> list[Choice]:
    """Every method with its cost and record.

    Args:
        site: The open home.
        num_records: Records to forget; 0 gives no rows.
        people: Whose they are (`steps.sharded.person_of`); of use where the model was trained in shards.
    """
    if not num_records:
        return []
    second = _seconds_per_step(site)
    whole, some = site.size.steps, site.size.unlearn_steps
    past = _past(site)

    def one(method: str, kind: str, steps: int) -> Choice:
        cost = None if second is None else steps * second
        return Choice(method, kind, steps, cost, steps / whole, *past.get(method, (0, 0, None, None)))  # fmt: skip

    rows = [one(EXACT, "exact", whole), _sharded(site, people, one)]
    kind = "approximate" if site.config.training.shards == 1 else "not on shards"
    return rows + [one(name, kind, some) for name in methods() if name not in (EXACT, SHARDED)]


def _sharded(
    site: "Site", people: Collection[bytes], one: Callable[[str, str, int], Choice]
) -> Choice:
    """Retraining of what saw the records; without shards, what it could cost at most with some."""
    whole = site.size.steps
    if site.config.training.shards == 1:
        return one(SHARDED, f"needs [training] shards, here {SHARDS}", -(-whole // SHARDS))
    from pipelines.steps.sharded import touched_share

    share, shards = touched_share(site, dict.fromkeys(people, 0))
    return one(
        SHARDED,
        f"exact, {shards} of {site.config.training.shards} shards",
        math.ceil(share * whole),
    )


def recommendation(rows: list[Choice], site: "Site") -> str:
    """One sentence that says what to do and why.

    Args:
        rows: From `choices`.
        site: The open home.
    """
    if not rows:
        return "nothing to forget: no record is named"
    exact, sharded = rows[0], rows[1]
    if site.config.training.shards > 1:
        return (
            f"recommended: sharded; as exact as retraining, for {sharded.share:.2f} of a training "
            f"({1 - sharded.share:.2f} saved)"
        )
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


def _past(site: "Site") -> dict[str, tuple[int, int, float | None, float | None]]:
    """Method → (audits, passed, mean leak above gold, mean loss above gold), from the ledger and the audits that it names."""
    from pipelines.steps.ledger import open_ledger

    found: dict[str, list[tuple[bool, float | None, float | None]]] = {}
    for entry in open_ledger(site).entries():
        if entry["kind"] == "audit" and "method" in entry["body"]:  # older entries don't say which
            body = entry["body"]
            path = site.home.runs / body["run"] / "audit.json"
            leak, damage = measured(path, body["audit"])
            found.setdefault(body["method"], []).append((body["verdict"] == "PASS", leak, damage))
    return {
        method: (len(all_of), sum(one[0] for one in all_of), _mean(one[1] for one in all_of), _mean(one[2] for one in all_of))
        for method, all_of in found.items()
    }  # fmt: skip


def measured(path: Path, digest: str) -> tuple[float | None, float | None]:
    """Forgetting and utility of one audit.

    Args:
        path: Its `audit.json`.
        digest: SHA-256 that the ledger names; another file tells nothing.

    Returns:
        The worst tier's rate above the mildest gold model's, and the loss on retained records above gold's; None where the audit
        is gone or was INVALID, since nothing was measured then.
    """
    if not path.exists() or sha256(data := path.read_bytes()).hexdigest() != digest:
        return None, None
    body = json.loads(data)
    rows = {row["name"]: row for row in body["endpoints"] if not row["subgroup"]}
    if body["verdict"] == "INVALID":
        return None, None
    tiers = [rows[name] for name in ("direct", "in_context", "fine_tune") if name in rows]
    leaks = [_above(row) for row in tiers]
    return max(leaks, default=None), _above(rows["utility"]) if "utility" in rows else None


def _above(row: dict[str, Any]) -> float:
    return float(row["unlearned"]) - min(float(value) for value in row["gold"])


def _mean(values: Iterable[float | None]) -> float | None:
    known_ones = [value for value in values if value is not None]
    return sum(known_ones) / len(known_ones) if known_ones else None
