"""Evidence as one table: what each model gave away about each person under each attack.

One row is one measurement::

    subject_id    salted, opaque id of the person (HMAC under the request's key: gone when the key is shredded)
    population    forgotten | retained | lookalike
    subgroup      subgroups of a forgotten person, joined by "|", or ""
    probe         ordinal of the question among the person's questions, 0-based
    model         original | unlearned | gold | random (untrained weights, a control of utility)
    model_digest  which checkpoint that was; several gold seeds differ here only
    attack        direct/trained, direct/unseen, in_context, fine_tune/step-N, membership, utility; secondary: `repertoire`;
                  memorised: asked of the original only (`memorisation`)
    score         exact_match (0 or 1), secret_logprob or loss (nats per token); others: `extraction`, `memberships`
    value         float64

The table never holds a prompt, a secret, a text or a name, and its order says nothing: rows are sorted by opaque id. All
statistics of an audit are computed from it (`verdict.verdict_from_rows`), so that a reader can repeat every number.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from unlearning.errors import RowsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

JOINT = "|"
"""Between the subgroups of one person."""
POPULATIONS = ("forgotten", "retained", "lookalike")
ROLES = ("original", "unlearned", "gold", "random")
SCHEMA = pa.schema(
    [
        ("subject_id", pa.string()),
        ("population", pa.string()),
        ("subgroup", pa.string()),
        ("probe", pa.int32()),
        ("model", pa.string()),
        ("model_digest", pa.string()),
        ("attack", pa.string()),
        ("score", pa.string()),
        ("value", pa.float64()),
    ]
)


@dataclass(frozen=True, slots=True, repr=False)
class Measurement:
    """What an attack returns: one number about one person, still under the person's own id (no `repr`: not for logs)."""

    subject: str
    population: str
    probe: int
    attack: str
    score: str
    value: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement of one model; the fields are the columns of the table."""

    subject_id: str
    population: str
    subgroup: str
    probe: int
    model: str
    model_digest: str
    attack: str
    score: str
    value: float


def labels_of(subgroup: str) -> frozenset[str]:
    """The subgroups that stand together in one field.

    Args:
        subgroup: names joined by `JOINT`, or "".

    Returns:
        The names; none for "".
    """
    return frozenset(subgroup.split(JOINT)) - {""}


def opaque_id(key: bytes, subject: str) -> str:
    """A name for a person that only the holder of the key can link.

    Args:
        key: secret of the erasure request, at least 16 bytes. An unsalted hash of a name is no secret: names can be
            tried one by one.
        subject: the person's id in the records.

    Returns:
        32 lower-case hex digits.

    Raises:
        RowsError: for a key too short to hide anything.
    """
    if len(key) < 16:
        raise RowsError(f"expected a key of at least 16 bytes, got {len(key)}")
    return hmac.new(
        key, b"dataworth/audit-subject/" + subject.encode(), hashlib.sha256
    ).hexdigest()[:32]


def to_table(rows: Iterable[Row]) -> pa.Table:
    """Rows as a table in an order that tells nothing.

    Args:
        rows: measurements.

    Returns:
        Table with `SCHEMA`, sorted by every column but the value.
    """
    rows = list(rows)
    columns = {name: [getattr(row, name) for row in rows] for name in SCHEMA.names}
    order = [(name, "ascending") for name in SCHEMA.names if name != "value"]
    return pa.table(columns, schema=SCHEMA).sort_by(order)


def write_rows(path: Path, table: pa.Table) -> None:
    """Write the table atomically.

    Args:
        path: target; a temporary file of the same folder is renamed over it.
        table: table with `SCHEMA`.
    """
    temporary = path.with_name(path.name + ".tmp")
    pq.write_table(table, temporary)
    with temporary.open("rb+") as stream:
        os.fsync(stream.fileno())
    temporary.replace(path)


def read_rows(path: Path) -> pa.Table:
    """Read a table of rows and check its columns.

    Args:
        path: `rows.parquet` of an audit.

    Returns:
        Table with `SCHEMA`.

    Raises:
        RowsError: if the columns differ.
    """
    table = pq.read_table(path)
    if table.schema.names != SCHEMA.names:
        raise RowsError(f"expected columns {SCHEMA.names}, got {table.schema.names}")
    return table.cast(SCHEMA)


class Evidence:
    """The table indexed by model, population, attack and score.

    A person counts once per attack: the highest value over that person's questions. One question that gives the secret
    away is a leak, whatever the other phrasings did.
    """

    def __init__(self, table: pa.Table | Mapping[str, list]) -> None:
        if not isinstance(table, pa.Table):
            table = pa.table(dict(table))
        if set(table.schema.names) != set(SCHEMA.names):
            raise RowsError(f"expected columns {SCHEMA.names}, got {table.schema.names}")
        self.models: set[tuple[str, str]] = set()
        self.subgroups: dict[str, frozenset[str]] = {}
        self._cells: dict[tuple[str, str, str, str, str], dict[tuple[str, int], float]] = (
            defaultdict(dict)
        )
        for row in table.select(SCHEMA.names).cast(SCHEMA).to_pylist():
            self._add(Row(**row))

    def _add(self, row: Row) -> None:
        if row.model not in ROLES or row.population not in POPULATIONS:
            raise RowsError(
                f"unknown model {row.model!r} or population {row.population!r} in a row"
            )
        if not np.isfinite(row.value):
            raise RowsError(f"expected finite values, got {row.value} for attack {row.attack}")
        if row.score == "exact_match" and row.value not in {0.0, 1.0}:
            raise RowsError(f"expected exact_match 0 or 1, got {row.value} for attack {row.attack}")
        self.models.add((row.model, row.model_digest))
        if row.population == "forgotten":
            self.subgroups[row.subject_id] = labels_of(row.subgroup)
        cell = self._cells[row.model, row.model_digest, row.population, row.attack, row.score]
        if (row.subject_id, row.probe) in cell:
            raise RowsError(f"two rows for one question of attack {row.attack} on {row.model}")
        cell[row.subject_id, row.probe] = row.value

    def attacks(self, prefix: str = "") -> list[str]:
        """Names of attacks seen that equal the prefix or begin with it and a slash, sorted; without a prefix, all."""
        names = {key[3] for key in self._cells}
        if not prefix:
            return sorted(names)
        return sorted(n for n in names if n == prefix or n.startswith(prefix + "/"))

    def questions(self, model: tuple[str, str], attack: str) -> set[tuple[str, str, str, int]]:
        """Which (population, score, person, question) a model was asked under an attack."""
        return {
            (population, score, subject, probe)
            for (role, digest, population, name, score), cell in self._cells.items()
            if (role, digest) == model and name == attack
            for subject, probe in cell
        }

    def per_person(
        self,
        model: tuple[str, str],
        attacks: Iterable[str],
        score: str,
        population: str = "forgotten",
    ) -> tuple[list[str], NDArray[np.float64]]:
        """One value per person: the highest over questions and over the named attacks.

        Args:
            model: (role, digest).
            attacks: names of attacks that count together.
            score: which score.
            population: whose rows.

        Returns:
            Opaque ids, sorted, and their values.
        """
        best: dict[str, float] = {}
        for attack in attacks:
            for (subject, _), value in self._cells.get(
                (*model, population, attack, score), {}
            ).items():
                best[subject] = max(value, best.get(subject, -np.inf))
        subjects = sorted(best)
        return subjects, np.array([best[subject] for subject in subjects], dtype=np.float64)

    def person_means(
        self, model: tuple[str, str], attack: str, score: str, population: str
    ) -> tuple[list[str], NDArray[np.float64]]:
        """One value per person: the mean over that person's questions (for losses).

        Args:
            model: (role, digest).
            attack: name of the attack.
            score: which score.
            population: whose rows.

        Returns:
            Opaque ids, sorted, and their values.
        """
        values = self.by_person(model, attack, score, population)
        subjects = sorted(values)
        return subjects, np.array([np.mean(values[s]) for s in subjects], dtype=np.float64)

    def by_person(
        self, model: tuple[str, str], attack: str, score: str, population: str
    ) -> dict[str, list[float]]:
        """Values of each person, over questions.

        Args:
            model: (role, digest).
            attack: name of the attack.
            score: which score.
            population: whose rows.

        Returns:
            Opaque id → one value per question.
        """
        values: dict[str, list[float]] = defaultdict(list)
        for (subject, _), value in self._cells.get((*model, population, attack, score), {}).items():
            values[subject].append(value)
        return dict(values)

    def by_question(
        self, model: tuple[str, str], attack: str, score: str, population: str = "forgotten"
    ) -> dict[int, list[float]]:
        """Values of each question, over people.

        Args:
            model: (role, digest).
            attack: name of the attack.
            score: which score.
            population: whose rows.

        Returns:
            Ordinal of the question → one value per person who was asked it, people in order of their opaque ids.
        """
        found: dict[int, list[float]] = defaultdict(list)
        cell = self._cells.get((*model, population, attack, score), {})
        for (_, probe), value in sorted(cell.items()):
            found[probe].append(value)
        return dict(found)
