"""What an owner could do to be paid more, done on purpose: copies, shells, noise.

    duplicate   hand in every record c times more
    copy        hand in the records of somebody else
    shell       pose as k owners
    noise       hand in records of random tokens
    shuffled    hand in one's own texts again, in disorder

An attack maps holdings (who brought which tokens) to other holdings; a *payment rule* maps holdings to a share per owner.
The gain of an attack is what attacker and shells get after it, less what the attacker got before. A rule withstands an attack
if the gain is not positive.

`record_shares` is the rule that withstands the first three whatever the values are: a text is paid once, to whoever
brought it first, and values are cut at zero *per record*. Cutting per owner is not shell-proof: an owner with harmful records
puts these into a shell, whose loss the floor then swallows (shown by a test). Noise has no such proof: it is
withstood as far as the values see that it is worthless.

Legend: N records.

Source: replication and shell attacks on data values, Faithful Group Shapley, arXiv 2505.19013.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.detection import noise_tokens, shuffled_tokens
from valuation.errors import EvaluationError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

SHELL = "#"
"""Between an owner's name and the number of a shell."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who brought which records, in the order of commitment."""

    owners: tuple[str, ...]
    """Owner of each record."""
    tokens: tuple[tuple[int, ...], ...]
    """Its token ids, end-of-text included."""

    def __post_init__(self) -> None:
        """Refuse records without owner.

        Raises:
            EvaluationError: lengths that differ.
        """
        if len(self.owners) != len(self.tokens):
            raise EvaluationError(
                f"holdings: expected one owner per record, got {len(self.owners)} for {len(self.tokens)}"
            )

    def first(self) -> NDArray[np.bool_]:
        """Whether each record is the first with its tokens."""
        first_of = {text: i for i, text in reversed(list(enumerate(self.tokens)))}
        return np.array([first_of[text] == i for i, text in enumerate(self.tokens)], dtype=np.bool_)

    def _of(self, owner: str) -> list[tuple[int, ...]]:
        found = [text for name, text in zip(self.owners, self.tokens, strict=True) if name == owner]
        if not found:
            raise EvaluationError(f"owner: expected one with records, got {owner!r}")
        return found

    def _and(self, owner: str, texts: list[tuple[int, ...]]) -> Holdings:
        return Holdings((*self.owners, *[owner] * len(texts)), (*self.tokens, *texts))


def duplicate(holdings: Holdings, attacker: str, copies: int) -> Holdings:
    """The attacker hands in all its records `copies` times more, last."""
    return holdings._and(attacker, holdings._of(attacker) * copies)  # noqa: SLF001 - same module


def copy_from(holdings: Holdings, attacker: str, victim: str) -> Holdings:
    """The attacker hands in the victim's records as its own, last."""
    return holdings._and(attacker, holdings._of(victim))  # noqa: SLF001 - same module


def pose_as(holdings: Holdings, owner_of_record: Mapping[int, int], attacker: str) -> Holdings:
    """The attacker deals its records to shells.

    Args:
        holdings: before.
        owner_of_record: position among the attacker's records -> number of the shell; one that is not named stays.
        attacker: who does it.

    Returns:
        Holdings in which record i of the attacker may belong to `attacker#k`.
    """
    holdings._of(attacker)  # noqa: SLF001 - same module
    owners, position = list(holdings.owners), 0
    for i, owner in enumerate(holdings.owners):
        if owner == attacker:
            if position in owner_of_record:
                owners[i] = f"{attacker}{SHELL}{owner_of_record[position]}"
            position += 1
    return Holdings(tuple(owners), holdings.tokens)


def add_noise(
    holdings: Holdings,
    attacker: str,
    records: int,
    vocab_size: int,
    end_of_text: int,
    generator: np.random.Generator,
) -> Holdings:
    """The attacker hands in records of random tokens, as long as its own."""
    lengths = [len(text) for text in holdings._of(attacker)]  # noqa: SLF001 - same module
    texts = [
        tuple(noise_tokens(lengths[i % len(lengths)], vocab_size, end_of_text, generator).tolist())
        for i in range(records)
    ]
    return holdings._and(attacker, texts)  # noqa: SLF001 - same module


def add_shuffled(
    holdings: Holdings, attacker: str, records: int, generator: np.random.Generator
) -> Holdings:
    """The attacker hands in its own records again, their tokens in random order."""
    own = holdings._of(attacker)  # noqa: SLF001 - same module
    texts = [tuple(shuffled_tokens(own[i % len(own)], generator).tolist()) for i in range(records)]
    return holdings._and(attacker, texts)  # noqa: SLF001 - same module


def record_shares(holdings: Holdings, value_N: NDArray[np.float64]) -> dict[str, float]:
    """Each owner's share: positive values of its first-committed records over all such values.

    Args:
        holdings: who brought what.
        value_N: value of each record.

    Returns:
        owner -> share; all 0 if no record is worth anything.
    """
    paid_N = np.where(holdings.first(), np.maximum(value_N, 0.0), 0.0)
    total = float(paid_N.sum()) or 1.0
    shares = dict.fromkeys(holdings.owners, 0.0)
    for owner, paid in zip(holdings.owners, paid_N, strict=True):
        shares[owner] += float(paid) / total
    return shares


def gain(
    before: Holdings,
    after: Holdings,
    attacker: str,
    rule: Callable[[Holdings], Mapping[str, float]],
) -> float:
    """What an attack brings: the share of attacker and shells after it, less the attacker's before.

    Args:
        before: honest holdings.
        after: attacked holdings.
        attacker: who did it.
        rule: holdings -> share per owner; values are computed anew inside it.

    Returns:
        The gain as a share of all that is paid; positive = the attack pays.
    """
    mine = [
        share
        for owner, share in rule(after).items()
        if owner == attacker or owner.startswith(attacker + SHELL)
    ]
    return float(sum(mine) - rule(before)[attacker])
