"""Price rules: what turns committed values into money, written down before the values are known.

A rule is a document of integers and words; its digest (SHA-256 of its JCS bytes) goes into the ledger first, so
that nobody can choose the rule that suits the result. With v the value, v⁺ = max(0, v), P the pool and R the reserve:

scheme    ``pool``     price = (P - R) v⁺ / Σ v⁺
          ``posted``   price = v⁺ · rate; if that adds up to more than P - R, the pool is shared as above
negative  ``nothing``  an owner who harms is paid nothing, and the others share all
          ``offset``   as above, but of the pool only (Σ v) / (Σ v⁺) is paid: the buyer doesn't pay for what was undone
basis     ``value``    all of the price is due
          ``lower``    due is price · max(0, lower end of the interval) / v; the rest is held back until the value is surer
floor     amounts below it are not paid out
split     ``first``    a text that several hold is paid to who committed it first
          ``entity``   to every legal entity that may sell it, in equal parts; owners of one entity are priced as one

Prices, what is held back and the reserve add up to P to the last micro-unit, whatever the rule.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from valuation.errors import PricingError

if TYPE_CHECKING:
    from collections.abc import Mapping

RULE_VERSION = 2
ENTITY_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRule:
    """What turns values into prices; its digest is committed before the values are known."""

    pool_microunits: int
    """What is shared out, in millionths of `currency`, at least 0."""
    currency: str
    """ISO 4217 code or another name of 1 to 16 characters."""
    reserve_microunits: int = 0
    """What is kept from the pool, between 0 and the pool."""
    scheme: Literal["pool", "posted"] = "pool"
    """Share the pool, or pay a rate per nat and at most the pool."""
    rate_microunits: int = 0
    """Of ``posted``: micro-units for one nat per target token, above 0."""
    floor_microunits: int = 0
    """Smallest amount that is paid out."""
    negative: Literal["nothing", "offset"] = "nothing"
    """What values below zero do to the others' prices."""
    basis: Literal["value", "lower"] = "value"
    """Pay by the value, or by the lower end of its interval and hold back the rest."""
    split: Literal["first", "entity"] = "first"
    """How a text is split that several hold (see `valuation.entities`)."""
    entities: str = ""
    """Of ``entity``: digest of which owner belongs to which legal entity, 64 hex digits."""

    def __post_init__(self) -> None:
        """Refuse a rule that can't be paid.

        Raises:
            PricingError: for amounts that aren't integers in range, no currency, or words that don't fit.
        """
        for name in (
            "pool_microunits",
            "reserve_microunits",
            "rate_microunits",
            "floor_microunits",
        ):
            amount = getattr(self, name)
            if not isinstance(amount, int) or isinstance(amount, bool) or not 0 <= amount < 2**63:
                raise PricingError(f"{name}: expected an integer in 0 .. 2^63 - 1, got {amount!r}")
        if self.reserve_microunits > self.pool_microunits:
            raise PricingError(
                f"reserve_microunits: expected at most the pool of {self.pool_microunits}, got "
                f"{self.reserve_microunits}"
            )
        if not 1 <= len(self.currency) <= 16:
            raise PricingError(f"currency: expected 1 to 16 characters, got {self.currency!r}")
        for name, words in (
            ("scheme", ("pool", "posted")), ("negative", ("nothing", "offset")), ("basis", ("value", "lower")),
            ("split", ("first", "entity")),
        ):  # fmt: skip
            if getattr(self, name) not in words:
                raise PricingError(f"{name}: expected one of {words}, got {getattr(self, name)!r}")
        if (len(self.entities) == 64) != (self.split == "entity") or len(self.entities) not in (
            0,
            64,
        ):
            raise PricingError(
                f"entities: expected a digest of 64 digits for a split by entity and none otherwise, got {self.entities!r}"
            )
        if (self.rate_microunits > 0) != (self.scheme == "posted"):
            raise PricingError(
                f"rate_microunits: expected above 0 for a posted price and 0 for a pool, got {self.rate_microunits}"
            )

    @property
    def is_plain(self) -> bool:
        """Whether a price follows from its value by one proportion, as receipts check it."""
        return (self.scheme, self.negative, self.basis, self.floor_microunits, self.split) == ("pool", "nothing", "value", 0, "first")  # fmt: skip


def rule_document(rule: PriceRule) -> dict[str, Any]:
    """The rule as the document that is committed: integers and strings only.

    Args:
        rule: the rule.

    Returns:
        A dict that JCS can encode.
    """
    document = {
        "format": 1,
        "version": RULE_VERSION,
        "kind": "price_rule",
        "pool_microunits": rule.pool_microunits,
        "currency": rule.currency,
        "reserve_microunits": rule.reserve_microunits,
        "scheme": rule.scheme,
        "rate_microunits": rule.rate_microunits,
        "floor_microunits": rule.floor_microunits,
        "negative": rule.negative,
        "basis": rule.basis,
        "lot_to_owner": "share of first-committed tokens in each lot, summed over lots",
        "inside_a_cluster": "the record with the lowest commit order is paid, copies are not",
        "negative_values": "paid nothing",
        "rounding": "largest remainder, ties to the smaller subject id",
        "unpaid": "kept in the reserve",
    }
    if rule.split == "first":  # the document of version 2, whose digest stands in older ledgers
        return document
    return document | {
        "version": ENTITY_VERSION,
        "split": rule.split,
        "entities": rule.entities,
        "inside_a_cluster": "equal parts to every legal entity that may sell a copy, inside an entity to the record it committed first",
        "inside_an_entity": "priced as one by the sum of its owners' values, shared by what is positive of them",
    }


def rule_from(document: Mapping[str, Any]) -> PriceRule:
    """The rule that a committed document states.

    Args:
        document: from `rule_document`; a ledger's mark of its buyer is passed over.

    Returns:
        The rule.

    Raises:
        PricingError: another document than this version would write for that rule, so that it can't be applied as it was meant.
    """
    plain = {name: value for name, value in document.items() if name != "buyer"}
    rule = PriceRule(**{one.name: plain[one.name] for one in fields(PriceRule) if one.name in plain})  # fmt: skip
    if rule_document(rule) != plain:
        raise PricingError(
            f"price rule: expected a document of version {rule_document(rule)['version']}, got one of version {plain.get('version')} with other words; "
            "apply it with the version that committed it"
        )
    return rule


def rule_digest(rule: PriceRule) -> str:
    """SHA-256 of the JCS bytes of the rule document.

    Args:
        rule: the rule.

    Returns:
        64 hex digits.
    """
    from provenance import jcs

    return hashlib.sha256(jcs(rule_document(rule))).hexdigest()


def rule_sentence(rule: PriceRule) -> str:
    """The rule in one sentence, for a report.

    Args:
        rule: the rule.

    Returns:
        A sentence.
    """
    start = (
        "(pool - reserve) shared by positive owner value, largest remainder"
        if rule.scheme == "pool"
        else f"{rule.rate_microunits} micro-units per nat of owner value, at most the pool"
    )
    parts = [start]
    if rule.negative == "offset":
        parts.append("lowered by what owners of negative value undo")
    if rule.basis == "lower":
        parts.append("due by the lower end of the interval, the rest held back")
    if rule.split == "entity":
        parts.append("a text that several hold shared by legal entity, an entity priced as one")
    if rule.floor_microunits:
        parts.append(f"amounts below {rule.floor_microunits} micro-units are not paid")
    return "; ".join([*parts, "what nobody earns stays in the reserve"])
