"""What is known of a proxy: how its values compared with those of a larger model.

Owners are paid by values that a small model was retrained for, and a buyer trains a larger one. A study that retrains both
on the same coalitions of owners finds two numbers,

    rank    Spearman's correlation of the owners' values from the proxy with those from the larger model
    moved   ½ Σ_i | v⁺_i / Σ v⁺ - w⁺_i / Σ w⁺ |,    the share of the pool that other owners would get

both with intervals over owners and seeds. They belong to one proxy: its name is the digest of shape, optimiser, batch, steps and base model,
as a run's ``run.json`` states them, whatever the corpus, seed or target. A *transfer file* is JSON with one record per proxy; the
ledger's entry of values says what it says of the proxy that was used, or ``not measured``.

When it is wrong: it was measured on another corpus with other owners. `measured_on` says which; nothing here checks
that the two are alike.

Numbers are integers in millionths, because the record is hashed.

Source: acceptance study owners-transfer of this project.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, parse_json, write_atomic
from provenance.errors import FormatError
from valuation.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT = 1
NOT_MEASURED = "not measured"
_MILLION = 10**6
_INTEGERS = (
    "parameters",
    "owners",
    "seeds",
    "rank",
    "rank_low",
    "rank_high",
    "moved",
    "moved_low",
    "moved_high",
)
_SETTINGS = ("model", "optim", "batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """What one study found of one proxy."""

    proxy: str
    """`proxy_digest` of the proxy."""
    parameters: int
    """Parameters of the larger model, at least 1."""
    owners: int
    """Owners that were valued by both, at least 2."""
    seeds: int
    """Trainings of each coalition, at least 1."""
    rank: int
    """Rank correlation in millionths, -10^6 .. 10^6."""
    rank_low: int
    """Lower end of its 95 % interval."""
    rank_high: int
    """Upper end."""
    moved: int
    """Share of the pool that would change hands, in millionths, 0 .. 10^6."""
    moved_low: int
    """Lower end of its 95 % interval."""
    moved_high: int
    """Upper end."""
    measured_on: str
    """Corpus and target of the study, in 1 to 200 printable characters."""
    command: str
    """What recomputes it, in 1 to 200 printable characters."""

    def __post_init__(self) -> None:
        """Refuse what no study can have found.

        Raises:
            EvaluationError: not a digest, a count or number out of range, an interval without its estimate, or no words.
        """
        if len(self.proxy) != 64 or not set(self.proxy) <= set("0123456789abcdef"):
            raise EvaluationError(
                f"proxy: expected 64 lower-case hexadecimal digits, got {self.proxy!r}"
            )
        for name in _INTEGERS:
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool):
                raise EvaluationError(f"{name}: expected an integer, got {number!r}")
        for name, least in (("parameters", 1), ("owners", 2), ("seeds", 1)):
            if getattr(self, name) < least:
                raise EvaluationError(
                    f"{name}: expected at least {least}, got {getattr(self, name)}"
                )
        for name, least in (("rank", -_MILLION), ("moved", 0)):
            low, number, high = (getattr(self, f"{name}{end}") for end in ("_low", "", "_high"))
            if not least <= low <= number <= high <= _MILLION:
                raise EvaluationError(
                    f"{name}: expected {least} <= low <= estimate <= high <= {_MILLION} millionths, got {low}, {number}, {high}"
                )
        for name in ("measured_on", "command"):
            words = getattr(self, name)
            if not isinstance(words, str) or not 1 <= len(words) <= 200 or not words.isprintable():
                raise EvaluationError(f"{name}: expected 1 to 200 printable characters")

    @property
    def sentence(self) -> str:
        """The record in one plain sentence, the same for the same record."""
        rank, low, high = (f"{n / _MILLION:.2f}" for n in (self.rank, self.rank_low, self.rank_high))  # fmt: skip
        moved, least, most = (f"{n / _MILLION:.1%}" for n in (self.moved, self.moved_low, self.moved_high))  # fmt: skip
        return (
            f"rank correlation {rank} ({low} to {high}) with the values from a model of {self.parameters:,} parameters, "
            f"{moved} ({least} to {most}) of the pool would go to others; {self.owners} owners, seeds {self.seeds}, "
            f"on {self.measured_on}, by {self.command}"
        )


def proxy_digest(run: Mapping[str, Any]) -> str:
    """Name of the proxy that a run trains.

    Args:
        run: a ``run.json``, parsed; `config.model`, `config.optim`, `config.batch`, `steps` and, where coalitions went on from a base model,
            `init_root` are read.

    Returns:
        64 hex digits; corpus, seed, target and coalitions don't change them.

    Raises:
        EvaluationError: a part is missing.
    """
    try:
        body: dict[str, Any] = {name: run["config"][name] for name in _SETTINGS}
        body["steps"] = run["steps"]
        if (base := run.get("init_root", "none")) != "none":
            body["init_root"] = base
    except (KeyError, TypeError) as error:
        raise EvaluationError(f"run: expected config with {_SETTINGS} and steps, got {error!r}") from None  # fmt: skip
    return hashlib.sha256(jcs(body)).hexdigest()


def read_transfers(path: Path) -> dict[str, Transfer]:
    """Read a transfer file.

    Args:
        path: JSON ``{"format": 1, "transfers": [...]}`` as `write_transfers` wrote it.

    Returns:
        Proxy's digest → what was measured of it.

    Raises:
        EvaluationError: no such file, another format, an unknown or missing field, or two records of one proxy.
    """
    try:
        document = parse_json(path.read_bytes())
    except (OSError, FormatError) as error:
        raise EvaluationError(f"{path.name}: expected a transfer file, got {error}") from None
    if (
        not isinstance(document, dict)
        or set(document) != {"format", "transfers"}
        or document["format"] != FORMAT
    ):
        raise EvaluationError(f'{path.name}: expected {{"format": {FORMAT}, "transfers": [...]}}')
    found: dict[str, Transfer] = {}
    for row in document["transfers"]:
        try:
            record = Transfer(**row)
        except TypeError as error:
            raise EvaluationError(f"{path.name}: {error}") from None
        if record.proxy in found:
            raise EvaluationError(f"{path.name}: two records of proxy {record.proxy[:16]}; keep the one that holds")  # fmt: skip
        found[record.proxy] = record
    return found


def write_transfers(path: Path, records: Iterable[Transfer]) -> None:
    """Write a transfer file, atomically.

    Args:
        path: the file.
        records: one per proxy.
    """
    write_atomic(path, jcs({"format": FORMAT, "transfers": [asdict(record) for record in records]}))
