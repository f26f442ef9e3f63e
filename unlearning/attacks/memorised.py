"""Before any attack: what does the original know, and of whom? Asked of people to be forgotten, people who stay, and strangers alike.

Every person is asked about in the phrasings of training, and the number of each is ranked among other numbers of as many digits, drawn
before a model is opened. People who stay show how memory grows with repetition, look-alikes what a guess is worth. How
often the model was shown each person's fact comes with the material; it was counted from the original's order (`presentations`).

Cost: a forward pass per question and one per candidate's digits after a shared prompt, for at most `MAX_PEOPLE` people who stay and as
many look-alikes. What the rows say: `memorisation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from unlearning.decoding import Prefix
from unlearning.extraction import exposure
from unlearning.memorisation import ATTACK, CANDIDATES, EXACT, EXPOSURE, TIMES
from unlearning.people import by_subject
from unlearning.probes import cut, secret_in, trained_probes
from unlearning.questions import candidates_of, other_numbers
from unlearning.rows import Measurement
from unlearning.scoring import score_probes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.people import Record
    from unlearning.probes import Probe, Tokenizer

MAX_PEOPLE = 64
OTHERS = 31  # with the true number 32: five bits
_STREAM = 6


@dataclass(frozen=True, slots=True, repr=False)
class Known:
    """What one population is asked; without a `repr`, so that no log can show it."""

    population: str
    probes: tuple[Probe, ...] = ()
    candidates: Mapping[str, tuple[Probe, tuple[tuple[int, ...], ...]]] = field(
        default_factory=dict
    )
    """Person → a question about the number, and other numbers that fit it."""
    times: Mapping[str, int] = field(default_factory=dict)
    """Person → how often the original was shown the fact that it saw most; empty where that can't be told."""


def known_people(
    records: Mapping[str, Sequence[Record]],
    times: Mapping[str, int] | None,
    tokenizer: Tokenizer,
    longest: int,
    seed: int,
) -> tuple[Known, ...]:
    """Make the questions.

    Args:
        records: forgotten, retained and lookalike → records; all forgotten people are asked, of the others a drawn sample.
        times: record id → how often the original was shown the text; None where that can't be told.
        tokenizer: the run's tokenizer.
        longest: most tokens of a question.
        seed: seed of every draw.

    Returns:
        One entry per population that has anyone who can be asked.
    """
    made = []
    for number, (population, own) in enumerate(records.items()):
        generator = np.random.default_rng([seed, _STREAM, number])
        people = _askable(own, tokenizer, longest)
        if population != "forgotten":
            drawn = generator.permutation(sorted(people))[:MAX_PEOPLE]
            people = {subject: people[subject] for subject in sorted(drawn.tolist())}
        if not people:
            continue
        others = other_numbers(people, OTHERS, generator)
        probes = trained_probes([r for own in people.values() for r in own], tokenizer, longest)
        most = {} if times is None else {s: _most(own, times) for s, own in people.items()}
        made.append(
            Known(population, tuple(probes), candidates_of(people, others, tokenizer), most)
        )
    return tuple(made)


def memorised(model: Transformer, material: Material) -> list[Measurement]:
    """Ask the original.

    Args:
        model: the original, not changed.
        material: questions.

    Returns:
        Per question `exact_match`; per person `times_shown` where it is known, and, with a number, `exposure` (bits) and
        `candidates` (numbers that it was ranked among, itself included).
    """
    measured = []
    for known in material.known:

        def note(
            subject: str, probe: int, score: str, value: float, population: str = known.population
        ) -> Measurement:
            return Measurement(subject, population, probe, ATTACK, score, value)

        exact_N = score_probes(model, known.probes).exact_N
        asked: dict[str, int] = {}
        for probe, exact in zip(known.probes, exact_N.tolist(), strict=True):
            number = asked[probe.subject_id] = asked.get(probe.subject_id, -1) + 1
            measured.append(note(probe.subject_id, number, EXACT, exact))
        for subject, (probe, others) in known.candidates.items():
            bits = bits_of(model, probe, others)
            measured.append(note(subject, 0, EXPOSURE, bits))
            measured.append(note(subject, 0, CANDIDATES, float(len(others) + 1)))
        measured += [note(s, 0, TIMES, float(count)) for s, count in known.times.items()]
    return measured


def bits_of(model: Transformer, probe: Probe, others: Sequence[tuple[int, ...]]) -> float:
    """Exposure of a question's secret among other secrets.

    Args:
        model: a model in evaluation mode; it is not changed.
        probe: the question.
        others: tokens of the other secrets.

    Returns:
        Bits, see `extraction.exposure`.
    """
    asked = [(secret, 0) for secret in (probe.secret_tokens, *others)]
    losses_R = Prefix(model, probe.prompt_tokens).scores(asked).loss_N
    sums_R = -losses_R * np.array([len(secret) for secret, _ in asked])
    return exposure(float(sums_R[0]), sums_R[1:])


def _askable(
    records: Sequence[Record], tokenizer: Tokenizer, longest: int
) -> dict[str, list[Record]]:
    """Records that have a prompt and a secret, by person."""
    kept = [r for r in records if cut(r.text, tokenizer, longest) is not None]
    return by_subject(kept)


def _most(own: Sequence[Record], times: Mapping[str, int]) -> int:
    """How often the most shown fact of a person was shown: a number in all its phrasings, any other text by itself."""
    facts: dict[str, int] = {}
    for record in own:
        number = secret_in(record.text)
        fact = number.group() if number else record.record_id
        facts[fact] = facts.get(fact, 0) + times[record.record_id]
    return max(facts.values())
