"""Everything in which two runs can differ: eleven items, each a digest or an explicit ``none``.

A result that cannot be repeated is a claim; one that says *incompletely* what made it is worse, since
nobody can see what is missing. So an entry about a run, a valuation or an audit carries this object,
and one with an item missing, unknown, empty or not a digest is refused before it is signed.
:meth:`Versions.differences` names the items in which two of them differ: why two numbers are not the same.

``none`` is a statement ("there was no retrieval index"), never a default: every item is written.

Source: the model card and reproducibility checklists (Mitchell et al. 2019; Pineau et al. 2021),
reduced to what a machine can compare.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from provenance.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

NONE: Final = "none"
"""What an item says where there is nothing of its kind."""

KINDS_WITH_VERSIONS: Final = frozenset({"run", "values", "audit"})
"""Kinds of ledger entries that carry the object: runs, valuations, audits."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """The eleven items, each 64 lower-case hex digits or ``none``."""

    source_data: str
    """ID of the corpus version."""
    preprocessing: str
    """Code that turned it into tokens."""
    tokenizer: str
    """The tokenizer's file."""
    initial_weights: str
    """Root of the checkpoint that training began from."""
    configuration: str
    """Settings of the run."""
    prompts: str
    """Prompts, policies and other texts read besides the corpus."""
    retrieval_index: str
    """Retrieval or cache index."""
    evaluation_set: str
    """Held-out records."""
    hardware: str
    """Hardware profile."""
    code: str
    """Source code of the computation."""
    lock: str
    """Lock file or container."""

    def __post_init__(self) -> None:
        """Refuse what is neither a digest nor an explicit ``none``.

        Raises:
            FormatError: with the name of the item.
        """
        for item in ITEMS:
            value = getattr(self, item)
            if not isinstance(value, str) or (value != NONE and not _DIGEST.fullmatch(value)):
                raise FormatError(
                    f"versions.{item}: expected 64 lower-case hex digits or {NONE!r}, got {str(value)[:80]!r}"
                )

    @classmethod
    def of(cls, document: Any) -> Self:
        """The object from JSON.

        Args:
            document: a mapping with exactly the eleven items.

        Returns:
            The object.

        Raises:
            FormatError: an item is missing, unknown or malformed; the message names it.
        """
        if not isinstance(document, dict):
            raise FormatError(f"versions: expected an object, got {type(document).__name__}")
        missing = [item for item in ITEMS if item not in document]
        unknown = sorted(set(document) - set(ITEMS))
        if missing:
            raise FormatError(
                f"versions: {missing[0]!r} is missing; expected {', '.join(ITEMS)}, "
                f"each a digest or an explicit {NONE!r}"
            )
        if unknown:
            raise FormatError(f"versions: unknown item {unknown[0]!r}, expected {', '.join(ITEMS)}")
        return cls(**document)

    def document(self) -> dict[str, str]:
        """The object as JSON.

        Returns:
            All eleven items.
        """
        return dataclasses.asdict(self)

    def differences(self, other: Versions) -> dict[str, tuple[str, str]]:
        """The items in which two runs differ.

        Args:
            other: the versions of the other run.

        Returns:
            Item to this run's and the other's value, in the order of the fields; empty if the runs
            should have given the same numbers.
        """
        pairs = {item: (getattr(self, item), getattr(other, item)) for item in ITEMS}
        return {item: pair for item, pair in pairs.items() if pair[0] != pair[1]}


ITEMS: Final = tuple(part.name for part in dataclasses.fields(Versions))
"""Names of the items."""


def check_versions(kind: str, body: Mapping[str, Any]) -> None:
    """Refuse an entry about a run, a valuation or an audit that does not say what made it.

    Args:
        kind: kind of the entry; others than :data:`KINDS_WITH_VERSIONS` pass.
        body: its body, with the object under ``versions``.

    Raises:
        FormatError: the object is missing or incomplete.
    """
    if kind in KINDS_WITH_VERSIONS:
        if "versions" not in body:
            raise FormatError(f"an entry of kind {kind!r} carries a complete `versions` object")
        Versions.of(body["versions"])
