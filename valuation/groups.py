"""Groups: the players of the Shapley game, cut from the owners by a rule and not by request.

Exact Shapley values need 2^n trainings, so the players are at most a handful of groups of owners:

1. Owners of personal data form one group of their own. Their records can be erased, and then no
   other group's value may hang on them.
2. The others are ordered by (median date, owner id), undated ones last, and cut into contiguous
   groups. Among all such cuts the one with the least Σ (tokens of a group)² is taken, that is,
   the most equal one; ties go to the cut with the earlier borders.

Everything is decided by the input alone: the order of the rows doesn't matter, nobody chooses a
group, and the rule is committed with the plan. Neighbours in time are alike in style, so what
groups blur is least where it matters least.

What it does not prevent: an owner who registers under two names may land in two groups and change
the game (Shapley values of groups are not split-proof). Count owners, not names, before grouping.

Cost: O(k · m²) for k groups of m owners; ten thousand owners take about a second.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import GroupError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import date

PERSONAL_GROUP = "personal"


@dataclass(frozen=True, slots=True)
class OwnerGroup:
    """One player: owners who are valued together."""

    id: str
    """``personal`` or ``group-00``, ``group-01``, ... in order of time."""
    owners: tuple[str, ...]
    """Owner ids, in order of (median date, id)."""
    tokens: int
    """Tokens of all their records."""


def owner_groups(
    owners: Sequence[str],
    tokens: Sequence[int],
    dates: Sequence[str | date | None],
    personal: Sequence[bool],
    max_groups: int,
) -> list[OwnerGroup]:
    """Cut owners into at most `max_groups` groups.

    Args:
        owners: owner of each row; a row is a record or a sum over records.
        tokens: tokens of each row, at least 0. Pass 0 for copies, so that nobody can fill a group.
        dates: ISO date of each row, or None.
        personal: whether each row is personal data; one such row makes its owner personal.
        max_groups: most groups that may be formed, at least 1.

    Returns:
        The groups in order of time, the personal one last. Each owner stands in exactly one.

    Raises:
        GroupError: for rows of different lengths, no rows, negative tokens, or too few groups.
    """
    if not len(owners) == len(tokens) == len(dates) == len(personal) or not len(owners):
        raise GroupError(
            f"expected at least one row and columns of one length, got {len(owners)} owners, "
            f"{len(tokens)} tokens, {len(dates)} dates, {len(personal)} personal flags"
        )
    tokens_of: dict[str, int] = defaultdict(int)
    dates_of: dict[str, list[str]] = defaultdict(list)
    personal_owners: set[str] = set()
    for owner, count, day, is_personal in zip(owners, tokens, dates, personal, strict=True):
        if count < 0:
            raise GroupError(f"tokens: expected at least 0, got {count} for owner {owner!r}")
        tokens_of[owner] += int(count)
        if day is not None:
            dates_of[owner].append(str(day))
        if is_personal:
            personal_owners.add(owner)

    def time_order(owner: str) -> tuple[bool, str, str]:
        days = sorted(dates_of[owner])
        # The lower median is one of the dates itself; the mean of two dates would not be.
        return (not days, days[(len(days) - 1) // 2] if days else "", owner)

    ordered = sorted(tokens_of, key=time_order)
    others = [owner for owner in ordered if owner not in personal_owners]
    num_cuts = max_groups - bool(personal_owners)
    if max_groups < 1 or (others and num_cuts < 1):
        raise GroupError(
            f"max_groups: expected at least {1 + bool(personal_owners and others)} "
            f"(personal owners need a group of their own), got {max_groups}"
        )
    parts = _equal_parts(others, [tokens_of[owner] for owner in others], num_cuts) if others else []
    named = [(f"group-{number:02d}", part) for number, part in enumerate(parts)]
    if personal_owners:
        named.append((PERSONAL_GROUP, [owner for owner in ordered if owner in personal_owners]))
    return [OwnerGroup(name, tuple(part), sum(tokens_of[o] for o in part)) for name, part in named]


def _equal_parts(owners: list[str], tokens: list[int], num_parts: int) -> list[list[str]]:
    """Contiguous cut with the least sum of squared part sizes, by dynamic programming."""
    num_owners, num_parts = len(owners), min(num_parts, len(owners))
    # Scaled to mean 1 per owner, so that squares stay far from the limits of float64.
    total = max(sum(tokens), 1)
    prefix = np.concatenate(
        [[0.0], np.cumsum(np.array(tokens, dtype=np.float64) * num_owners / total)]
    )
    best = np.full(num_owners + 1, np.inf)
    best[0] = 0.0
    borders = np.zeros((num_parts + 1, num_owners + 1), dtype=np.int64)
    for part in range(1, num_parts + 1):
        cost = np.full(num_owners + 1, np.inf)
        for end in range(part, num_owners + 1):
            # The part starts at `start`, and the owners before it fill part - 1 parts.
            options = best[part - 1 : end] + (prefix[end] - prefix[part - 1 : end]) ** 2
            start = int(np.argmin(options))
            borders[part, end] = start + part - 1
            cost[end] = options[start]
        best = cost
    parts: list[list[str]] = []
    end = num_owners
    for part in range(num_parts, 0, -1):
        start = int(borders[part, end])
        parts.append(owners[start:end])
        end = start
    return parts[::-1]
