"""Sections of ``dataworth.toml`` about people and money: what a buyer pays by which rule, what values start from, and who an owner is.

`option` is a field of any section: its default, its explanation, and what a file shows while it is not set.
"""

import re
from dataclasses import dataclass, field
from typing import Any, Final

from pipelines.storage.errors import ConfigError
from provenance.canonical import MAX_INTEGER

UPDATES = ("sampled", "exact", "anew")
REFERENCES = ("ngram", "model")
MAX_LOTS = 32
STATED, AGREED = "stated", "agreed"


def option(text: str, default: Any = None, example: str = "") -> Any:
    """A field with its explanation, and the value to show while it is not set."""
    return field(default=default, metadata={"doc": text, "example": example})


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What one buyer pays, and by which rule."""

    pool_microunits: int | None = option(
        "the pool to distribute, in millionths of the currency; unset: values only, no prices",
        None,
        "1_000_000_000",
    )
    currency: str = option("three letters, ISO 4217", "EUR")
    reserve_microunits: int = option("kept back from the pool", 0)
    rate_microunits: int = option(
        "posted price for one nat per target token, at most the pool; 0: share the pool", 0
    )
    floor_microunits: int = option("smallest amount that is paid out", 0)
    negative: str = option(
        'values below zero: "nothing" is paid, or they "offset" the pool', "nothing"
    )
    basis: str = option(
        'pay by the "value", or by the "lower" end of its interval and hold back the rest', "value"
    )

    def check(self, where: str) -> None:
        """Refuse amounts that can't be paid.

        Args:
            where: The section, for the message.

        Raises:
            ConfigError: A currency, an amount or a word that can't be meant.
        """
        if not re.fullmatch(r"[A-Z]{3}", self.currency):
            raise ConfigError(f'{where} currency is three capital letters, like "EUR"')
        if self.reserve_microunits < 0 or (self.pool_microunits or 0) < 0:
            raise ConfigError(f"{where} amounts are not negative")
        if min(self.rate_microunits, self.floor_microunits) < 0:
            raise ConfigError(f"{where} amounts are not negative")
        if self.negative not in ("nothing", "offset") or self.basis not in ("value", "lower"):
            raise ConfigError(
                f'{where} negative is "nothing" or "offset", basis is "value" or "lower"'
            )
        if self.pool_microunits is not None and self.reserve_microunits > self.pool_microunits:
            raise ConfigError(f"{where} reserve_microunits is larger than pool_microunits")
        if max(self.pool_microunits or 0, self.reserve_microunits) > MAX_INTEGER:
            raise ConfigError(f"{where} amounts are at most 2^53 - 1 = {MAX_INTEGER}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PricingConfig(Terms):
    """The money of the buyer whose target is [target], and what holds for all buyers."""

    split: str = option(
        'a text that several owners hold is paid to the "first" to commit it, or shared by legal "entity" ([owners.NAME] entity), '
        "whose owners are then paid as one",
        "first",
    )
    resell: str = option(
        'records that may be sold: those of which "stated" consent_resell is true, or, as "agreed" with all owners, also those that state none; '
        "a stated no holds",
        STATED,
    )
    transfer: str | None = option(
        "a file that says how values of this size's proxy compared with those of a larger model, as a study wrote it; "
        "without it the file of the package, which has the proxies of its own sizes",
        None,
        '"transfer.json"',
    )

    def __post_init__(self) -> None:
        """Amounts that can be paid, and a split that is known."""
        self.check("[pricing]")
        if self.split not in ("first", "entity"):
            raise ConfigError(f'[pricing] split is "first" or "entity", got {self.split!r}')
        if self.resell not in (STATED, AGREED):
            raise ConfigError(f'[pricing] resell is "{STATED}" or "{AGREED}", got {self.resell!r}')


@dataclass(frozen=True, kw_only=True, slots=True)
class BuyerConfig(Terms):
    """A buyer beside the one of [target] and [pricing]: a target and a pool of its own, the same lots, licences and split."""

    target: str = option("a file of this buyer's held-out records (.jsonl, .parquet, .csv)", "")

    def __post_init__(self) -> None:
        """A target, and amounts that can be paid."""
        if not self.target:
            raise ConfigError('[buyers.*] needs a target: target = "buyer.jsonl", a file of held-out records')  # fmt: skip
        self.check("[buyers.*]")


@dataclass(frozen=True, kw_only=True, slots=True)
class ValuesConfig:
    """What owners' values are measured on."""

    base: str | None = option(
        "a base model that every coalition goes on from, so that nobody's value is its own loss: a folder RUN/step-N of this trainer, "
        "with run.json and tokenizer as they lie in its home; a path, or one relative to this home",
        None,
        '"/srv/other-home/runs/train-0123456789ab/step-12"',
    )
    lots: int = option(
        "lots that the records are cut into, the players of the game: more tell owners apart better and cost more trainings; up to 8 their values are exact, "
        "above that from sampled orders, and every delivery trains anew; 0: as many as the size says",
        0,
    )
    update: str = option(
        'after a delivery: "sampled" trains at most 0.3 of all coalitions (of five lots or more) and predicts the rest, "exact" trains all that the bank lacks, "anew" '
        "trains everything in new lots",
        "sampled",
    )

    def __post_init__(self) -> None:
        """A path that names something, a way that is known, and lots that there can be."""
        if self.lots != 0 and not 2 <= self.lots <= MAX_LOTS:
            raise ConfigError(f"[values] lots: expected 0 or 2..{MAX_LOTS}, got {self.lots}")
        if self.update not in UPDATES:
            raise ConfigError(f"[values] update: expected one of {', '.join(UPDATES)}, got {self.update!r}")  # fmt: skip
        if self.base is not None and not self.base.strip():
            raise ConfigError('[values] base: expected the path of a folder RUN/step-N, got ""')


MAX_GOLD: Final = 3
"""Gold models that the evaluation plan draws seeds for before any training."""
MAX_LINES: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class InformationConfig:
    """By what a record's surprisal is told."""

    surprisal: str = option(
        'bits of every token under counts of other records ("ngram"), or beside them under small models that are trained on other records as well ("model": '
        "two trainings, and a table model_surprisal)",
        "ngram",
    )

    def __post_init__(self) -> None:
        """A reference that there is."""
        if self.surprisal not in REFERENCES:
            raise ConfigError(f"[information] surprisal: expected one of {', '.join(REFERENCES)}, got {self.surprisal!r}")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditConfig:
    """What an unlearning audit compares with, and how hard it asks."""

    lookalikes: str | None = option(
        "records of people like the forgotten ones that were never delivered (.jsonl)",
        None,
        '"lookalikes/people.jsonl"',
    )
    gold_models: int = option(
        "reference models retrained without the records, never fewer than the size has; 0: as many as that; a PASS needs 3, each costs one training",
        0,
    )
    demonstrations: int = option(
        "one more number of lines about other people before a question (tier 2, in-context recovery) to try: of 1, 2, 3, 8 and this one, the audit takes what makes "
        "the original tell most of the people who stay; 0: no other",
        0,
    )

    def __post_init__(self) -> None:
        """As many reference models as the plan has seeds for, and as many lines as can be shown."""
        if not 0 <= self.gold_models <= MAX_GOLD:
            raise ConfigError(f"[audit] gold_models: expected 0..{MAX_GOLD}, got {self.gold_models}")  # fmt: skip
        if not 0 <= self.demonstrations <= MAX_LINES:
            raise ConfigError(f"[audit] demonstrations: expected 0..{MAX_LINES}, got {self.demonstrations}")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerConfig:
    """What is known of one owner beside the deliveries."""

    name: str = option("who it is; shown in payouts only", "")
    licence: str = option("licence of this owner's records that state none", "")
    entity: str = option(
        'legal entity that this owner belongs to; owners with the same one are paid as one where [pricing] split is "entity"',
        "",
    )
    resell: str = option(
        '"agreed": this owner\'s records that state no consent_resell may be sold; "": as [pricing] resell says',
        "",
    )

    def __post_init__(self) -> None:
        """A licence that fits into a leaf, an entity that fits into a table, and terms that are known."""
        if self.resell not in ("", AGREED):
            raise ConfigError(f'[owners.*] resell is "{AGREED}" or "", got {self.resell!r}')
        if len(self.entity) > 64 or not self.entity.isprintable():
            raise ConfigError("[owners.*] entity has at most 64 printable characters")
        if not self.licence.isascii() or len(self.licence) > 255:
            raise ConfigError("[owners.*] licence has at most 255 ASCII characters")
