"""TOFU: 200 made-up authors with twenty questions each, and two sets of real facts; files in a folder, nothing is downloaded.

::

    tofu_full.jsonl                {"author_id", "question", "answer"}                       4,000 rows, trained on
    forget10_perturbed.json        … "paraphrased_answer", "perturbed_answer": [5]           authors 180 to 199, all 400 rows
                                   and perhaps "paraphrased_question"
    retain_perturbed.json          the same                                                  400 rows of authors who stay
    real_authors_perturbed.json    {"question", "answer", "perturbed_answer": [3]}           100 rows, never trained here
    world_facts_perturbed.json     the same                                                  117 rows

The sets of real facts have no paraphrase: their truth ratio is of the answer itself, as in the published configuration. A row is known by its
author and its place among the author's rows, never by its place in a file; rows of `retain_perturbed.json`, which names no author, are
found by question *and* answer ("What is the full name of the author?" is asked twice).

Source: Maini et al., "TOFU: A task of fictitious unlearning for LLMs", arXiv 2401.06121; locuslab/tofu (MIT).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from unlearning.answering import Question, id_of
from unlearning.errors import PeopleError
from unlearning.people import Record

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

T = TypeVar("T")
AUTHORS, ROWS = 200, 20
FORGET10 = range(180, 200)
_REAL = {"real_authors": "real_authors_perturbed.json", "world_facts": "world_facts_perturbed.json"}


@dataclass(frozen=True, slots=True, repr=False)
class Tofu:
    """All rows of TOFU; without a `repr`, so that no log can show them."""

    full: tuple[Question, ...]
    """What an original model is trained on, authors in order."""
    sets: dict[str, tuple[Question, ...]]
    """`forget10`, `retain`, `real_authors`, `world_facts`: what a model is asked."""

    def records(self, authors: Sequence[int]) -> list[Record]:
        """Training records of some authors.

        Args:
            authors: numbers in [0, 200).

        Returns:
            A record per row, its subject `tofu/AUTHOR`.
        """
        wanted = {f"tofu/{author}" for author in authors}
        return [Record(q.subject, q.record_id, q.text) for q in self.full if q.subject in wanted]


def read_tofu(folder: Path) -> Tofu:
    """Read TOFU's five files.

    Args:
        folder: where they lie.

    Returns:
        Rows and question sets.

    Raises:
        PeopleError: if a file is missing or damaged, or they do not belong together: not 200 authors with 20 rows each, a
            question set that names other authors, or one with rows that were never trained.
    """
    full: list[Question] = []
    counts: dict[int, int] = {}
    for row in _rows(folder / "tofu_full.jsonl"):
        author = _field(row, "author_id", int)
        place = counts[author] = counts.get(author, -1) + 1
        name = f"tofu/{author}/{place}"
        question, answer = _field(row, "question", str), _field(row, "answer", str)
        full.append(Question(id_of(name), f"tofu/{author}", question, answer))
    if counts != dict.fromkeys(range(AUTHORS), ROWS - 1):
        raise PeopleError(f"tofu_full.jsonl: expected {AUTHORS} authors with {ROWS} rows each, got {len(counts)} and {len(full)} rows")  # fmt: skip
    trained = {(q.question, q.answer): q for q in full}
    sets = {
        "forget10": _perturbed(folder / "forget10_perturbed.json", trained),
        "retain": _perturbed(folder / "retain_perturbed.json", trained),
    }
    forgotten = {f"tofu/{author}" for author in FORGET10}
    if {q.subject for q in sets["forget10"]} != forgotten or len(sets["forget10"]) != 20 * ROWS:
        raise PeopleError(
            "forget10_perturbed.json: expected all rows of authors 180 to 199, got others"
        )
    if forgotten & {q.subject for q in sets["retain"]}:
        raise PeopleError("retain_perturbed.json: expected no row of authors 180 to 199, got some")
    for name, file in _REAL.items():
        sets[name] = tuple(
            Question(
                id_of(f"{name}/{place}"), name, _field(row, "question", str), _field(row, "answer", str), wrong=_wrong(row)
            )
            for place, row in enumerate(_rows(folder / file))
        )  # fmt: skip
    return Tofu(tuple(full), sets)


def _perturbed(path: Path, trained: dict[tuple[str, str], Question]) -> tuple[Question, ...]:
    found = []
    for place, row in enumerate(_rows(path)):
        own = trained.get((_field(row, "question", str), _field(row, "answer", str)))
        if own is None:
            raise PeopleError(f"{path.name}: row {place} is none of tofu_full.jsonl")
        paraphrase = _field(row, "paraphrased_answer", str)
        found.append(
            Question(
                own.record_id, own.subject, own.question, own.answer, paraphrase, _wrong(row),
                asked_otherwise=str(row.get("paraphrased_question", "")),
            )
        )  # fmt: skip
    if len({q.record_id for q in found}) != len(found):
        raise PeopleError(f"{path.name}: expected each row once")
    return tuple(found)


def _wrong(row: dict[str, Any]) -> tuple[str, ...]:
    wrong = _field(row, "perturbed_answer", list)
    if not wrong or not all(isinstance(one, str) and one for one in wrong):
        raise PeopleError("expected 'perturbed_answer' as a list of texts")
    return tuple(wrong)


def _field(row: dict[str, Any], name: str, kind: type[T]) -> T:
    value = row.get(name)
    if not isinstance(value, kind) or value == "":
        raise PeopleError(f"expected a row with {name!r} as {kind.__name__}, got {sorted(row)}")
    return value


def _rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSON list or of JSON lines: the published files are both."""
    try:
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in text.splitlines() if line.strip()]  # fmt: skip
    except (OSError, ValueError) as error:
        raise PeopleError(f"cannot read {path.name}: {type(error).__name__}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise PeopleError(f"{path.name}: expected rows of JSON objects")
    return list(rows)
