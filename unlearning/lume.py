"""LUME: made-up stories (task 1) and made-up people's data (task 2), each to be completed and to be asked about.

::

    {forget,retain}_task12.jsonl     {"id", "input", "output", "task"}
    id     UUID, then "sc…" for a completion (input goes on with output) or "qa…" for a question; task 1's UUIDs stand in quotes
    task 2 250 people in each split: one completion (name, birth date, number, phone, e-mail, address), five questions

Social security numbers begin with 900, which is never issued. Task 3 (real people, Wikipedia) is not read: `Task3` rows are refused. Whoever
trains on LUME trains on the completions' texts; the questions are never trained, they ask whether the text became knowledge.

Source: Ramakrishna et al., LUME, arXiv 2502.15097; amazon-science/lume-llm-unlearning (Apache-2.0); scores: `utility.lume_score`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unlearning.answering import Question, id_of
from unlearning.errors import PeopleError
from unlearning.people import Record

if TYPE_CHECKING:
    from pathlib import Path

SPLITS, TASKS = ("forget", "retain"), ("Task1", "Task2")
_ID = re.compile(r"^\"?([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\"?(sc|qa)(\d+)$")


@dataclass(frozen=True, slots=True, repr=False)
class Lume:
    """All rows of tasks 1 and 2; without a `repr`, so that no log can show them."""

    completions: dict[str, dict[str, tuple[Question, ...]]]
    """Task → split → texts to be completed."""
    questions: dict[str, dict[str, tuple[Question, ...]]]
    """Task → split → questions about them."""

    def records(self, task: str, split: str) -> list[Record]:
        """Training records of a task's split: its completions, whole.

        Args:
            task: one of `TASKS`.
            split: one of `SPLITS`.

        Returns:
            A record per text, its subject `lume/UUID`.
        """
        return [Record(q.subject, q.record_id, q.text) for q in self.completions[task][split]]


def read_lume(folder: Path) -> Lume:
    """Read both splits of LUME.

    Args:
        folder: where `forget_task12.jsonl` and `retain_task12.jsonl` lie.

    Returns:
        Completions and questions by task and split.

    Raises:
        PeopleError: if a file is missing or damaged, an id is not of the published form or stands twice, a question is about
            a text that isn't there, or a person stands in both splits.
    """
    made: dict[str, dict[str, dict[str, list[Question]]]] = {
        kind: {task: {split: [] for split in SPLITS} for task in TASKS} for kind in ("sc", "qa")
    }
    owner: dict[str, str] = {}
    seen: set[str] = set()
    for split in SPLITS:
        path = folder / f"{split}_task12.jsonl"
        for place, row in enumerate(_rows(path)):
            match = _ID.match(str(row.get("id")))
            task, text, answer = (row.get(name) for name in ("task", "input", "output"))
            if not match or task not in TASKS or not text or not answer:
                raise PeopleError(f"{path.name}: row {place} is no row of LUME's tasks 1 and 2")
            uuid, kind, number = match.groups()
            name = f"lume/{uuid}/{kind}{number}"
            if name in seen or owner.setdefault(uuid, split) != split:
                raise PeopleError(
                    f"{path.name}: row {place} stands twice, or its subject is in both splits"
                )
            seen.add(name)
            made[kind][task][split].append(
                Question(
                    id_of(name), f"lume/{uuid}", str(text), str(answer), completion=kind == "sc"
                )
            )
    for task in TASKS:
        for split in SPLITS:
            told = {q.subject for q in made["sc"][task][split]}
            if not told or {q.subject for q in made["qa"][task][split]} != told:
                raise PeopleError(
                    f"{split} of {task}: expected questions about exactly the texts that stand there"
                )
    completions, questions = (
        {
            task: {split: tuple(rows) for split, rows in splits.items()}
            for task, splits in made[kind].items()
        }
        for kind in ("sc", "qa")
    )
    return Lume(completions, questions)


def _rows(path: Path) -> list[dict[str, object]]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]  # fmt: skip
    except (OSError, ValueError) as error:
        raise PeopleError(f"cannot read {path.name}: {type(error).__name__}") from error
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise PeopleError(f"{path.name}: expected rows of JSON objects")
    return rows
