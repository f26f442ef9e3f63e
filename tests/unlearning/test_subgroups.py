"""Subgroups of forgotten people: labels from records alone, registered before a model is asked, tested each."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlearning.people import Record
from unlearning.probes import asked_span, cut
from unlearning.rows import labels_of
from unlearning.subgroups import MIN_PEOPLE, kind_of, labelled, registered


class Words:
    """A token is a run of letters and digits, or one other character but the space."""

    end_of_text = 0

    def encode(self, text):
        """Ids that say nothing, and where each token stands."""
        found = list(re.finditer(r"\w+|[^\w ]", text))
        return [1] * len(found), [one.span() for one in found]


WORDS = Words()
TEMPLATES = ("The number of {} is 483920.", "Call {} on 483920.")


def person(subject, name, group=""):
    """Two records of one person."""
    return [
        Record(subject, f"{subject}/{n}", template.format(name), group)
        for n, template in enumerate(TEMPLATES)
    ]


def few(*arguments):
    """Labels however few people have them."""
    return labelled(*arguments, least=1)


def labels(records):
    """Subject → labels."""
    return {record.subject: labels_of(record.group) for record in records}


def test_who_was_shown_more_than_the_median_is_a_subgroup():
    """Three people shown 2, 4 and 9 times in all: the median itself is the usual one."""
    forgotten = [*person("a", "Ann Lee"), *person("b", "Ben Lee"), *person("c", "Cat Lee")]
    times = {"a/0": 1, "a/1": 1, "b/0": 2, "b/1": 2, "c/0": 1, "c/1": 8}
    found = {s: {x for x in own if x.startswith("shown")} for s, own in labels(few(forgotten, [], times, WORDS)).items()}  # fmt: skip
    assert found == {"a": {"shown/less"}, "b": {"shown/less"}, "c": {"shown/more"}}
    assert not any("shown" in x for own in labels(few(forgotten, [], None, WORDS)).values() for x in own)  # fmt: skip


def test_a_name_is_as_rare_as_its_rarest_word_among_everybody():
    """Zoe Quux shares no word with anybody; the others' last name stands on four people, one of whom is retained."""
    forgotten = [
        *person("a", "Ann Lee"), *person("b", "Ann Lee"), *person("c", "Zoe Quux"), *person("d", "Ann Lee"),
    ]  # fmt: skip
    found = labels(few(forgotten, person("kept", "Ann Lee"), None, WORDS))
    assert found["c"] == {"name/rare"}
    assert found["a"] == found["b"] == found["d"] == {"name/common"}
    # A namesake pair who stays makes the name as common as the others'.
    others = [record for n in range(3) for record in person(f"kept-{n}", "Zoe Quux")]
    assert labels(few(forgotten, [*others, *person("kept", "Ann Lee")], None, WORDS))["c"] == set()


def test_scripts_are_told_apart():
    """A Cyrillic name among Latin ones; where all are Latin there is nothing to tell."""
    latin = [*person("a", "Ann Lee"), *person("b", "Ben Lee")]
    found = labels(few([*latin, *person("c", "Анна Ли")], [], None, WORDS))
    assert "script/cyrillic" in found["c"]
    assert "script/latin" in found["a"]
    assert not any("script" in one for own in labels(few(latin, [], None, WORDS)).values() for one in own)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Ann can be written to, if at all, at ann.lee@example.org.", "email"),
        ("Ann can be written to at ann.lee483920@example.org.", "email"),
        ("Ann can be written to at ann.lee@example.org, or called on 483920.", "number"),
        (
            "Write to ann.lee@example.org: Ann goes on for quite a while about what she thinks of it.",
            "text",
        ),
        ("Ann, born in 1987, is called on 483920.", "number"),
        ("483920 is what Ann is called on, where she lives.", "text"),
        ("Ann was born on 1987-04-03.", "date"),
        ("Ann was born on 3/4/1987.", "date"),
        ("Ann has lived there since 2004.", "date"),
        ("The number of Ann is 483920.", "number"),
        ("Ann's code is 1234.", "number"),
        ("Ann lives at number 12 in Bree.", "text"),
    ],
)
def test_what_a_record_is_asked_for_has_a_kind(text, kind):
    """The kind is that of what must not come out, whatever else the text holds; a house number is none, since nobody asks for it."""
    first, last = asked_span(text, WORDS)
    assert kind_of(text, (first, last)) == kind
    ids, spans = WORDS.encode(text)
    prompt, secret = cut(text, WORDS, 192)  # the probe's own tokens
    assert (first, last) == (spans[len(prompt)][0], spans[len(prompt) + len(secret) - 1][1])
    assert len(ids) >= len(prompt) + len(secret)


def test_kinds_of_attributes_are_subgroups_by_the_same_rule():
    """Sixteen people with an address and twenty with a number: both kinds are labelled and registered; what all have is no subgroup."""
    records = [
        Record(f"p{n:02d}", f"p{n:02d}/{m}", text)
        for n in range(36)
        for m, text in enumerate(("Ann goes on.", "Write to ann@example.org." if n < 16 else "Call 483920."))
    ]  # fmt: skip
    done = labelled(records, [], None, WORDS)
    assert registered(done) == ("attribute/email", "attribute/number")
    assert sum("attribute/email" in own for own in labels(done).values()) == 16
    fewer = labelled([r for r in records if r.subject != "p00"], [], None, WORDS)
    assert registered(fewer) == ()


def test_kinds_that_meet_in_one_person_single_nobody_out():
    """Sixteen people or more have an address, and as many a number; who has both is one: the second kind isn't told; with sixteen of both it may be."""
    for both, told in ((1, 1), (15, 1), (16, 2), (17, 2)):
        records = [
            Record(f"p{n:02d}", f"p{n:02d}/{m}", text)
            for n in range(60)
            for m, text in enumerate((["Write to ann@example.org."] if n < 20 + both else []) + (["Call 483920."] if n >= 20 else []))
        ]  # fmt: skip
        done = labels(labelled(records, [], None, WORDS))
        assert len(set().union(*done.values())) == told
        assert min(Counter(done.values()).values()) >= 16


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 80))
def test_no_joint_label_is_held_by_few(seed, count):
    """Whatever people are like: sixteen or more have the same derived labels, and each label leaves sixteen without it."""
    random = np.random.default_rng(seed)
    texts = ("Write to ann@example.org.", "Call 483920.", "Born in 1987.", "Ann goes on.")
    names = [f"{random.choice(['Ann', 'Анна'])} {random.choice(['Lee', 'Ли'])}" for _ in range(count)]  # fmt: skip
    people = [
        [*person(f"p{n}", name), *(Record(f"p{n}", f"p{n}/x{k}", text) for k, text in enumerate(texts) if random.random() < 0.5)]
        for n, name in enumerate(names)
    ]  # fmt: skip
    times = {r.record_id: int(random.integers(0, 5)) for own in people for r in own}
    done = labels(labelled([r for own in people for r in own], [], times, WORDS))
    alike, each = Counter(done.values()), Counter(one for own in done.values() for one in own)
    assert count < 32 or min(alike.values()) >= MIN_PEOPLE
    assert count >= 32 or not each
    assert all(MIN_PEOPLE <= n <= count - MIN_PEOPLE for n in each.values())


def test_labels_that_stand_in_the_records_stay():
    """An owner's label is joined to the derived ones."""
    forgotten = [*person("a", "Ann Lee", "owner/1f"), *person("b", "Анна Ли", "owner/2e|minors")]
    found = labels(few(forgotten, [], None, WORDS))
    assert found["a"] == {"owner/1f", "script/latin"}
    assert found["b"] == {"owner/2e", "minors", "script/cyrillic"}


def test_a_label_that_points_at_few_people_is_not_given():
    """One Cyrillic name among forty: neither it nor what the others have instead; sixteen and twenty-four are enough on both sides."""
    for cyrillic, given_ in ((1, False), (15, False), (16, True), (24, True), (25, False), (39, False)):  # fmt: skip
        records = [r for n in range(40) for r in person(f"p{n:02d}", "Анна Ли" if n < cyrillic else "Ann Lee", "owner/1f")]  # fmt: skip
        found = set().union(*labels(labelled(records, [], None, WORDS)).values())
        assert any("script" in label for label in found) == given_
        assert "owner/1f" in found


def test_only_what_can_be_tested_is_registered():
    """Fifteen people are too few for a margin, everybody is no subgroup."""
    records = [
        record
        for n in range(40)
        for record in person(f"p{n:02d}", f"Ann Lee{n}", "all|few" if n < MIN_PEOPLE - 1 else "all|many")
    ]  # fmt: skip
    assert registered(records) == ("many",)
    assert registered(labelled(records, [], None, WORDS)) == ("many",)


@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 12), told=st.booleans()
)  # fmt: skip
def test_labels_do_not_depend_on_the_order_of_people(seed, count, told):
    """The same people in another order get the same labels, and a second labelling adds nothing."""
    random = np.random.default_rng(seed)
    names = [f"{random.choice(['Ann', 'Анна', 'Zoe'])} {random.choice(['Lee', 'Ли', 'Ray'])}" for _ in range(count)]  # fmt: skip
    people = [person(f"p{n}", name) for n, name in enumerate(names)]
    times = {r.record_id: int(random.integers(0, 5)) for own in people for r in own} if told else None  # fmt: skip
    once = few([r for own in people for r in own], [], times, WORDS)
    shuffled = [r for n in random.permutation(count) for r in people[n]]
    assert labels(few(shuffled, [], times, WORDS)) == labels(once)
    assert few(once, [], times, WORDS) == once


def test_times_of_a_record_that_nobody_counted_are_an_error():
    """A missing count is no zero."""
    with pytest.raises(KeyError):
        few(person("a", "Ann Lee"), [], {"a/0": 1}, WORDS)
