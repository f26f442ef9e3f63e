"""Subgroups of forgotten people: whom a mean could hide.

An average over people passes although a few are given away, and those few are seldom drawn at random: who was shown more often, whose name is
rare, whose script the tokenizer hardly knows. Labels are derived from the records alone, before any model is asked, so that they can be
registered in the plan::

    shown/more, shown/less      how often the training presented the person's records, above the median of the forgotten or not
    name/rare, name/common      on how few people (of everybody at hand) the rarest word of the name stands, below the median or not
    script/NAME                 script of most letters of the name, or of the text where no name is found
    attribute/KIND              what some record of the person is asked for: an e-mail address, a date (a year too), a number of four digits or
                                more, or how a text goes on, by what the probe asks and not by what else the text holds; whoever has several
                                kinds has several labels

A label is given only where `MIN_PEOPLE` have it and as many have not: rows and reports stay when the people are forgotten, and a label of few, or of all but a few,
says something of single persons. A person's labels lie together, joined by `rows.JOINT`, in `Record.group` and in the column `subgroup`, and the joint one
says more than each: so a label is given only where every joint one of derived labels still has `MIN_PEOPLE`. They are tried in the order above, of one kind the rarest
first. Further ones (an owner, say) may stand in the records and stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from unlearning.people import by_subject
from unlearning.probes import asked_span, name_of, secret_in
from unlearning.rows import JOINT, labels_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from unlearning.people import Record
    from unlearning.probes import Tokenizer

KINDS = ("email", "date", "number", "text")
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.\w+)+")
_DATE = re.compile(
    r"\b(?:\d{1,2}[./-]\d{1,2}[./-]\d{4}|(?:1[6-9]|20)\d\d(?:[./-]\d{1,2}[./-]\d{1,2})?)\b"
)
MIN_PEOPLE = 16
"""Fewest people of a subgroup that is named or registered: the smallest number that has a margin at all (table in `plan`)."""


def labelled(
    forgotten: Sequence[Record],
    others: Sequence[Record],
    times: Mapping[str, int] | None,
    tokenizer: Tokenizer,
    *,
    least: int | None = None,
) -> list[Record]:
    """The forgotten records with every label of their person.

    Args:
        forgotten: records that are to be forgotten; labels that stand in them stay.
        others: records of retained people and look-alikes, among whom a name is rare or not.
        times: record id → how often the training presented it; None where that can't be told: no such label.
        tokenizer: the run's tokenizer, which decides what a record is asked for.
        least: fewest people who have the same derived labels, and fewest who have a label not; `MIN_PEOPLE` if not given.

    Returns:
        The same records in the same order, `group` completed.
    """
    people = by_subject(list(forgotten))
    least = MIN_PEOPLE if least is None else least
    found = [_shown(people, times), _names(people, by_subject(list(others))), _scripts(people)]
    found += _attributes(people, tokenizer)
    own = _joint(found, least, list(people))
    joined = {
        subject: JOINT.join(sorted(labels_of(records[0].group) | own[subject]))
        for subject, records in people.items()
    }
    return [dataclasses.replace(record, group=joined[record.subject]) for record in forgotten]


def registered(forgotten: Sequence[Record]) -> tuple[str, ...]:
    """The labels that are worth a test of their own.

    Args:
        forgotten: labelled records.

    Returns:
        Labels of at least `MIN_PEOPLE` people, but not of everybody, sorted.
    """
    people = by_subject(list(forgotten))
    count = Counter(label for own in people.values() for label in labels_of(own[0].group))
    return tuple(sorted(label for label, n in count.items() if MIN_PEOPLE <= n < len(people)))


def _joint(
    found: Sequence[Mapping[str, str]], least: int, people: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Each person's labels: those that enough people have and enough have not, as long as enough have the same ones altogether."""
    held: dict[str, frozenset[str]] = dict.fromkeys(people, frozenset())
    for labels in found:
        count = Counter(labels.values())
        for label in sorted(count, key=lambda one: (count[one], one)):
            more = {s: own | {label} if labels.get(s) == label else own for s, own in held.items()}
            if count[label] <= len(people) - least and min(Counter(more.values()).values()) >= least:  # fmt: skip
                held = more
    return held


def _shown(people: Mapping[str, list[Record]], times: Mapping[str, int] | None) -> dict[str, str]:
    if times is None:
        return {}
    shown = {subject: sum(times[r.record_id] for r in own) for subject, own in people.items()}
    return _halves(shown, "shown/less", "shown/more")


def _names(
    people: Mapping[str, list[Record]], others: Mapping[str, list[Record]]
) -> dict[str, str]:
    names = {subject: set(name_of(own).split()) for subject, own in people.items()}
    bearers = Counter(word for words in names.values() for word in words)
    bearers.update(word for own in others.values() for word in set(name_of(own).split()))
    rarest = {
        subject: min(bearers[word] for word in words) for subject, words in names.items() if words
    }
    # The other way round than `shown`: what lies strictly below the median is the exception.
    return _halves({s: -n for s, n in rarest.items()}, "name/common", "name/rare")


def _halves(values: Mapping[str, int], usual: str, above: str) -> dict[str, str]:
    """`above` for whoever lies above the median; the median itself is usual."""
    if not values:
        return {}
    median = float(np.median(list(values.values())))
    return {subject: above if value > median else usual for subject, value in values.items()}


def _attributes(people: Mapping[str, list[Record]], tokenizer: Tokenizer) -> list[dict[str, str]]:
    """For each kind of attribute the label of those who have it."""
    held: dict[str, set[str]] = {subject: set() for subject in people}
    for subject, own in people.items():
        spans = ((record.text, asked_span(record.text, tokenizer)) for record in own)
        held[subject] = {kind_of(text, span) for text, span in spans if span is not None}
    return [{s: f"attribute/{kind}" for s, kinds in held.items() if kind in kinds} for kind in KINDS]  # fmt: skip


def kind_of(text: str, asked: tuple[int, int]) -> str:
    """The kind of attribute that a record is asked for.

    Args:
        text: the record's.
        asked: first and last+1 character of what its probe asks for (`probes.asked_span`).

    Returns:
        One of `KINDS`.
    """

    def within(pattern: re.Pattern[str]) -> bool:
        return any(m.start() < asked[1] and m.end() > asked[0] for m in pattern.finditer(text))

    if within(_EMAIL):
        return "email"
    if within(_DATE):
        return "date"
    return "number" if secret_in(text[slice(*asked)]) else "text"


def _scripts(people: Mapping[str, list[Record]]) -> dict[str, str]:
    found = {}
    for subject, own in people.items():
        letters = name_of(own) or " ".join(record.text for record in own)
        # A letter's script is the first word of its name in Unicode: LATIN, CYRILLIC, HIRAGANA, CJK.
        count = Counter(
            unicodedata.name(one, "unknown").split(" ")[0].lower()
            for one in letters
            if one.isalpha()
        )
        if count:
            found[subject] = f"script/{min(count, key=lambda name: (-count[name], name))}"
    return found
