"""What an audit asks with: the same questions, texts and seed for every model and every attack.

Everything that could differ between two models is decided here, once, before a model is opened. Attacks read this
object; they draw what they need from `seed`, never from a state that another attack or model has moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from unlearning.attacks.memorised import Known, known_people
from unlearning.plan import BETWEEN
from unlearning.probes import Probe, Tokenizer, trained_probes, unseen_probes
from unlearning.questions import Questions, questions_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from unlearning.people import Record
    from unlearning.plan import AttackPlan

MAX_RECORD_TOKENS = 512  # losses are taken over the beginning of longer records


@dataclass(frozen=True, slots=True, repr=False)
class Document:
    """Tokens of one record as the trainer sees it, with the end-of-text token."""

    subject: str
    tokens: tuple[int, ...]
    record_id: str = ""
    text: bytes = b""


@dataclass(frozen=True, slots=True, repr=False)
class Material:
    """Questions and texts of one audit; without a `repr`, so that no log can show them."""

    trained: tuple[Probe, ...]
    """Questions about forgotten people, in the phrasings of training."""
    unseen: tuple[Probe, ...]
    """The same in phrasings never trained."""
    demonstrations: tuple[Probe, ...]
    """Questions about retained people, whose lines serve as demonstrations."""
    forgotten: tuple[Document, ...]
    """Records of forgotten people."""
    retained: tuple[Document, ...]
    """Records of retained people."""
    lookalikes: tuple[Document, ...]
    """Records of people never trained."""
    newline: tuple[int, ...]
    """Tokens of a line break."""
    between: tuple[int, ...]
    """Tokens after each line of tier 2's demonstrations."""
    limits: AttackPlan
    """What the adversary may spend."""
    seed: int
    """Seed of every draw."""
    groups: dict[str, str] = field(default_factory=dict)
    """Subject → subgroups, joined; forgotten people only."""
    questions: Questions = field(default_factory=Questions)
    """What the plan's secondary attacks ask with."""
    known: tuple[Known, ...] = ()
    """What the original is asked first of all, per population."""


def prepare(
    forgotten: Sequence[Record],
    retained: Sequence[Record],
    lookalikes: Sequence[Record],
    tokenizer: Tokenizer,
    limits: AttackPlan,
    seed: int,
    times: Mapping[str, int] | None = None,
) -> Material:
    """Make the material of an audit.

    Args:
        forgotten: records that are to be forgotten.
        retained: records of people who stay; they were trained on.
        lookalikes: records of people never trained; may be empty.
        tokenizer: the run's tokenizer.
        limits: what the adversary may spend.
        seed: seed of every draw.
        times: record id → how often the original was shown the text; None where that can't be told.

    Returns:
        The material.

    Raises:
        ProbeError: if a forgotten or retained person cannot be asked about.
    """

    def sequences(records: Sequence[Record]) -> tuple[Document, ...]:
        cut = ((r, tokenizer.encode(r.text)[0][: MAX_RECORD_TOKENS - 1]) for r in records)
        return tuple(
            Document(r.subject, (*ids, tokenizer.end_of_text), r.record_id, r.text.encode())
            for r, ids in cut
            if ids
        )

    longest = limits.max_probe_tokens
    return Material(
        trained=tuple(trained_probes(forgotten, tokenizer, longest)),
        unseen=tuple(unseen_probes(forgotten, tokenizer, longest)),
        demonstrations=tuple(trained_probes(retained, tokenizer, longest)),
        forgotten=sequences(forgotten),
        retained=sequences(retained),
        lookalikes=sequences(lookalikes),
        newline=tuple(tokenizer.encode("\n")[0]),
        between=tuple(tokenizer.encode(BETWEEN[limits.between])[0]),
        limits=limits,
        seed=seed,
        groups={r.subject: r.group for r in forgotten},
        questions=questions_of(forgotten, retained, lookalikes, tokenizer, limits.repertoire, seed),
        known=known_people(
            {"forgotten": forgotten, "retained": retained, "lookalike": lookalikes},
            times,
            tokenizer,
            longest,
            seed,
        ),
    )
