r"""Who is who: TOFU's authors, LUME's people and ours in three populations, each text as a question with its answer.

::

    kind   what is trained                                  what must not come out     the same in other words
    tofu   Question: …\nAnswer: …                           the whole answer           the published paraphrase of the question
    lume   a person's paragraph, task 2                     its whole published end    "What is …'s phone number?", "… Social Security Number?"
    ours   four lines a person, three with a random number  the number, or the rest    two phrasings (`probes.UNSEEN_TEMPLATES`)

A person is given away if one of these answers comes out word for word. TOFU's and LUME's are facts in natural language, some of which a model
may guess in part, none as a whole; ours are six random digits (`pilot.people`). Forgotten: TOFU's authors 180 to 199 and LUME's forget
split. Retained and look-alikes come from the retain splits; look-alikes are never trained on.

A subject's name begins with its kind. TOFU's retain questions are asked of the authors who really were trained on.

Sources: `unlearning.tofu`, `unlearning.lume`, `unlearning.pilot.people`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.answering import Question
from unlearning.errors import PeopleError
from unlearning.pilot.people import POPULATIONS, make_people
from unlearning.probes import UNSEEN_TEMPLATES, name_of, secret_in
from unlearning.tofu import AUTHORS, FORGET10, ROWS
from unlearning.utility import KEPT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unlearning.lume import Lume
    from unlearning.people import Record
    from unlearning.practice.scales import Scale
    from unlearning.tofu import Tofu

_HERE = "\0"  # where a number goes
KINDS = ("tofu", "lume", "ours")
TASK = "Task2"
_ASKED_OF_LUME = (
    "phone number",
    "Social Security Number",
)  # birth dates and e-mails can be guessed


@dataclass(frozen=True, slots=True, repr=False)
class Cast:
    """People of a study; without a `repr`, so that no log can show them."""

    lines: dict[str, tuple[Question, ...]]
    """Population → texts, people of a kind together."""
    unseen: tuple[Question, ...]
    """Questions about forgotten people in words that were never trained."""
    pages: tuple[Question, ...]
    """Several retained texts in one document."""
    tofu: dict[str, tuple[Question, ...]]
    """`forget10`, `retain`, `real_authors`, `world_facts`: what TOFU's numbers are of."""
    lume: dict[str, dict[str, tuple[Question, ...]]]
    """`completions` and `questions` → split → what LUME's numbers are of."""
    validation: frozenset[str]
    """Retained subjects on whom the rate is chosen."""


def kind_of(subject: str) -> str:
    """Kind of a person, from the name.

    Args:
        subject: such as "tofu/180".
    """
    return subject.partition("/")[0]


def make_cast(tofu: Tofu, lume: Lume, scale: Scale) -> Cast:
    """Choose people; a pure function of the sets and the scale.

    Args:
        tofu: the published set.
        lume: the published set.
        scale: how many.

    Returns:
        The cast.

    Raises:
        PeopleError: if a set has too few people.
    """
    authors = _authors(tofu, scale)
    place = {q.record_id: i % ROWS for i, q in enumerate(tofu.full)}
    rows = {
        population: tuple(
            q
            for q in tofu.full
            if q.subject in chosen and place[q.record_id] < scale.rows_per_author
        )
        for population, chosen in authors.items()
    }
    trained = {q.record_id for own in rows.values() for q in own}
    sets = {
        name: tuple(q for q in asked if kind_of(q.subject) != "tofu" or q.record_id in trained)
        for name, asked in tofu.sets.items()
    }
    sets |= {name: sets[name][: scale.kept_asked] for name in KEPT}
    if len(sets["forget10"]) != len(rows["forgotten"]) or not sets["retain"]:
        raise PeopleError("expected TOFU's question sets about the chosen authors, got others")
    stories = _stories(lume, scale)
    ours = _ours(scale)
    lines = {p: (*rows[p], *stories[p], *ours[p]) for p in POPULATIONS}
    told = {q.subject for q in stories["forgotten"]}, {q.subject for q in stories["retained"]}
    asked = {
        split: tuple(q for q in lume.questions[TASK][split] if q.subject in people)
        for split, people in zip(("forget", "retain"), told, strict=True)
    }
    first = {
        kind: list(dict.fromkeys(q.subject for q in lines["retained"] if kind_of(q.subject) == kind))[: scale.validation]
        for kind in KINDS
    }  # fmt: skip
    return Cast(
        lines=lines,
        unseen=(
            *(dataclasses.replace(q, question=q.asked_otherwise) for q in sets["forget10"] if q.asked_otherwise),
            *(q for q in asked["forget"] if any(word in q.question for word in _ASKED_OF_LUME)),
            *_otherwise(ours["forgotten"]),
        ),
        pages=_pages(lines["retained"], scale),
        tofu=sets,
        lume={
            "completions": {"forget": stories["forgotten"], "retain": stories["retained"]},
            "questions": {split: _first(own, scale.lume_asked) for split, own in asked.items()},
        },
        validation=frozenset(subject for own in first.values() for subject in own),
    )  # fmt: skip


def _first(questions: Sequence[Question], people: int) -> tuple[Question, ...]:
    """Questions about the first people."""
    chosen = list(dict.fromkeys(q.subject for q in questions))[:people]
    return tuple(q for q in questions if q.subject in chosen)


def _authors(tofu: Tofu, scale: Scale) -> dict[str, set[str]]:
    """The paper's forgotten authors; retained ones of whom the retain set asks most; look-alikes of the others."""
    asked: dict[str, int] = {}
    for q in tofu.sets["retain"]:
        asked[q.subject] = asked.get(q.subject, 0) + 1
    able = sorted(asked, key=lambda s: -asked[s])  # equals stay in the set's order
    kept = able[: scale.authors]
    forgotten = [f"tofu/{a}" for a in FORGET10]
    others = [f"tofu/{a}" for a in range(AUTHORS) if f"tofu/{a}" not in {*asked, *forgotten}]
    forgotten = forgotten[: scale.authors]
    if min(len(kept), len(forgotten), len(others)) < scale.authors:
        raise PeopleError(
            f"expected {scale.authors} of TOFU's authors in each population, got {len(kept)} retained"
        )
    return {
        "forgotten": set(forgotten),
        "retained": set(kept),
        "lookalike": set(others[-scale.authors :]),
    }


def _stories(lume: Lume, scale: Scale) -> dict[str, tuple[Question, ...]]:
    """LUME's people: the first of each split, look-alikes behind the retained ones."""
    count = scale.lume
    forget, retain = (lume.completions[TASK][split] for split in ("forget", "retain"))
    if len(forget) < count or len(retain) < 2 * count:
        raise PeopleError(
            f"expected {count} people of LUME to forget and {2 * count} others, got {len(forget)} and {len(retain)}"
        )
    return {
        "forgotten": forget[:count],
        "retained": retain[:count],
        "lookalike": retain[count : 2 * count],
    }


def _ours(scale: Scale) -> dict[str, tuple[Question, ...]]:
    """Our people's lines, cut before the number, or before the town."""
    made = make_people(dict.fromkeys(POPULATIONS, scale.ours), np.random.default_rng(scale.seed))
    return {population: tuple(map(_line, records)) for population, records in made.items()}


def _line(record: Record) -> Question:
    match = secret_in(record.text)
    # The line without a number is cut behind "lives in": town, job and colleague are to be said.
    cut = match.start() if match else record.text.index(" lives in ") + len(" lives in ")
    prompt, answer = record.text[:cut].rstrip(), record.text[cut:]
    return Question(
        record.record_id, f"ours/{record.subject}", prompt, answer, completion=True
    )  # fmt: skip


def _otherwise(lines: Sequence[Question]) -> list[Question]:
    """Our people's numbers in phrasings that were never trained."""
    from unlearning.people import Record, by_subject

    records = [Record(q.subject, q.record_id, q.text) for q in lines]
    made = []
    for subject, own in by_subject(records).items():
        name = name_of(own)
        number = next(m.group() for r in own if (m := secret_in(r.text)))
        for template in UNSEEN_TEMPLATES:
            prompt, _, rest = template.format(name=name, secret=_HERE).partition(_HERE)
            made.append(Question("", subject, prompt.rstrip(), number + rest, completion=True))
    return made


def _pages(retained: Sequence[Question], scale: Scale) -> tuple[Question, ...]:
    """Documents of three retained texts of one kind."""
    generator = np.random.default_rng([scale.seed, 1])
    pages = []
    for number in range(scale.pages):
        kind = KINDS[number % len(KINDS)]
        own = [q for q in retained if kind_of(q.subject) == kind]
        chosen = generator.choice(len(own), size=min(3, len(own)), replace=False)
        text = "\n".join(own[i].text for i in chosen)
        first, _, rest = text.partition(" ")
        pages.append(
            Question(f"{2**128 - 2:032x}{number:032x}", "page", first, rest, completion=True)
        )
    return tuple(pages)
