"""What was in force when values and prices were made: read from what the ledger names, not from the `dataworth.toml` of today.

    ledger, entry of the values   settings = HMAC(K_owner, file) ──▶ plans/settings-DIGEST.json: terms, owners' entities and consent, base, licences, size
    ledger, entry of the prices   rule = digest ──▶ the rule's own entry, which has all of it

The digest is keyed as the owners' pseudonyms are: who belongs to which legal entity is easily guessed. Owners' names are not kept.
Values of an earlier version name no settings. Then today's are taken where nothing committed speaks against them, and that is said.
"""

import dataclasses
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.results import latest
from pipelines.sizes import size_named
from pipelines.steps.buyers import marked
from pipelines.steps.ledger import corpus_keys, open_ledger
from pipelines.steps.pricing import entity_inputs
from pipelines.storage.terms import BuyerConfig, OwnerConfig, PricingConfig, ValuesConfig
from provenance import jcs, keyed, parse_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.results import Result
    from pipelines.site import Site
    from valuation import PriceRule

TERMS = ("pool_microunits", "currency", "reserve_microunits", "rate_microunits", "floor_microunits", "negative", "basis")  # fmt: skip
"""Keys of a buyer's section that a rule has under the same name."""


class SettingsError(ValueError):
    """The settings of then are not to be had."""


def settings_of(site: "Site") -> dict[str, Any]:
    """The part of the configuration that values and prices depend on, to be hashed; owners without their names."""
    whole = site.config.document()
    owners = {
        owner: {key: entry[key] for key in ("licence", "entity", "resell") if entry[key]}
        for owner, entry in whole["owners"].items()
    }
    return {
        "format": 1, "size": site.size.name, "values": whole["values"], "buyers": whole["buyers"], "owners": owners,
        "pricing": {key: value for key, value in whole["pricing"].items() if key != "transfer"},
        "intake": {"licences": sorted(site.config.intake.licences), "text_licence": site.config.intake.text_licence},
    }  # fmt: skip


def keep(site: "Site") -> str:
    """Keep today's settings, for the day when what is made by them is disputed.

    Returns:
        The digest for the entry of the values, lower-case hex.
    """
    data = jcs(settings_of(site))
    digest = _digest(site, data)
    path = _path(site, digest)
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, data)
    return digest


def site_of(
    site: "Site",
    body: Mapping[str, Any],
    rule: "PriceRule | None",
    valued: "Result | None",
    size: str,
) -> "tuple[Site, str]":
    """The home as it was configured when values were made, and what to say of that.

    Args:
        site: The open home, as it is configured today.
        body: The ledger's entry of the values.
        rule: The committed rule of the prices; None where there are none.
        valued: The owners' values; None where they are gone.
        size: The size that the committed plan names.

    Returns:
        The home, with the rule's terms in place of its buyer's; and one line, which names every setting that is another today.

    Raises:
        SettingsError: They are not kept and today's are others; says which digest was expected and what today's file gives.
    """
    wanted = body.get("settings")
    if wanted is None:
        return _of_before(dataclasses.replace(site, size=size_named(size)), rule, valued)
    today = settings_of(site)
    given, path = _digest(site, jcs(today)), _path(site, wanted)
    data = path.read_bytes() if path.exists() else jcs(today)
    if (got := _digest(site, data)) != wanted:
        found = f"digest {got[:16]} there" if path.exists() else "no such file"
        raise SettingsError(
            f"expected the settings of these values in plans/{path.name}, digest {wanted[:16]}, got {found}, and the dataworth.toml of today gives {given[:16]}: "
            "put the file back from a backup, or dataworth.toml as it was"
        )
    then = dict(parse_json(data))
    return _configured(site, then), f"those of these values, digest {wanted[:16]}" + _changed(then, today, rule, _section(site, body))  # fmt: skip


def of_prices(site: "Site", prices: "Result", buyer: str = "") -> "tuple[Site, PriceRule]":
    """The home as it was configured, and the rule, when a buyer's prices were made.

    Args:
        site: The open home.
        prices: As that buyer sees them; not skipped.
        buyer: Whose.

    Raises:
        SettingsError: The ledger has no such rule, or see `site_of`.
    """
    log, mark = open_ledger(site), marked(site, buyer).get("buyer")
    body = log.entry(prices["entry"])["body"]
    rule, _ = rule_named(site, body["rule"], buyer)
    if rule is None:
        raise SettingsError(f"expected the rule {body['rule'][:16]} of entry {prices['entry']} in the ledger, got none of that digest")  # fmt: skip
    made = (entry["body"] for entry in log.entries() if entry["kind"] == "values")
    values: dict[str, Any] = next((one for one in made if (one["table"], one.get("buyer")) == (body["values"], mark)), {})  # fmt: skip
    valued = latest(site.home.results, "owner_values")
    return site_of(site, values, rule, valued, site.size.name)[0], rule


def rule_named(site: "Site", digest: str, buyer: str) -> "tuple[PriceRule | None, int | None]":
    """The price rule of a digest and the first entry that commits it, from the ledger alone.

    Args:
        site: The open home.
        digest: As an entry of prices names it.
        buyer: Whose.

    Returns:
        Rule and entry; None twice where the ledger has no such rule.

    Raises:
        PricingError: It is of a version that this one can't apply.
    """
    from valuation.rules import rule_digest, rule_from

    mark = marked(site, buyer).get("buyer")
    for index, entry in enumerate(open_ledger(site).entries()):
        body = entry["body"]
        if entry["kind"] == "price_rule" and body.get("buyer") == mark and _plain_digest(body) == digest:  # fmt: skip
            rule = rule_from(body)
            assert rule_digest(rule) == digest, "rule_from refuses what it can't write again"
            return rule, index
    return None, None


def _plain_digest(body: Mapping[str, Any]) -> str:
    return sha256(jcs({key: value for key, value in body.items() if key != "buyer"})).hexdigest()


def _of_before(
    site: "Site", rule: "PriceRule | None", valued: "Result | None"
) -> "tuple[Site, str]":
    """Today's settings with what is committed of the values' own, where those were not kept."""
    pricing, owners = site.config.pricing, dict(site.config.owners)
    told = valued.values if valued else {}
    split = rule.split if rule else "entity" if "entities" in told else "first"
    config = dataclasses.replace(site.config, pricing=dataclasses.replace(pricing, split=split))
    today = dataclasses.replace(site, config=config)
    said = "made before settings were kept: the rule is the ledger's, all else as dataworth.toml has it today"
    if rule is None or rule.split == "first":
        return today, said
    members = told.get("entity_of", {})
    declared = {owner: dataclasses.replace(owners.get(owner, OwnerConfig()), entity=members.get(owner, "")) for owner in {*owners, *members}}  # fmt: skip
    tried = [today, dataclasses.replace(today, config=dataclasses.replace(config, owners=declared))]
    digests = [entity_inputs(one)["entities"] for one in tried]
    if rule.entities not in digests:
        raise SettingsError(
            f"expected owners' legal entities with digest {rule.entities[:16]}, which the rule in the ledger names, got {digests[0][:16]} by the dataworth.toml of today: "
            "put [owners.NAME] entity back as it was then"
        )
    return tried[digests.index(rule.entities)], said


def _configured(site: "Site", then: Mapping[str, Any]) -> "Site":
    config = dataclasses.replace(
        site.config, pricing=PricingConfig(**then["pricing"]), values=ValuesConfig(**then["values"]),
        owners={owner: OwnerConfig(**entry) for owner, entry in then["owners"].items()},
        buyers={buyer: BuyerConfig(**entry) for buyer, entry in then["buyers"].items()},
        intake=dataclasses.replace(site.config.intake, licences=tuple(then["intake"]["licences"]), text_licence=then["intake"]["text_licence"]),
    )  # fmt: skip
    return dataclasses.replace(site, config=config, size=size_named(then["size"]))


def _section(site: "Site", body: Mapping[str, Any]) -> tuple[str, ...]:
    """Where the terms stand of the buyer that an entry is about."""
    for buyer in site.config.buyers:
        if marked(site, buyer).get("buyer") == body.get("buyer"):
            return ("buyers", buyer)
    return ("pricing",)


def _changed(
    then: Mapping[str, Any], today: Mapping[str, Any], rule: "PriceRule | None", where: tuple[str, ...]
) -> str:  # fmt: skip
    """Every setting that is another today, those of money by the rule that was paid by."""
    old, new = _flat(then), _flat(today)
    if rule is not None:
        old |= {(*where, name): getattr(rule, name) for name in TERMS}
    gone = "not set"
    told = [
        f"{_place(key)} {old.get(key, gone)} → {new.get(key, gone)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, gone) != new.get(key, gone)
    ]
    return f"; settings changed since: {', '.join(told)}" if told else ""


def _flat(settings: Mapping[str, Any], above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    found: dict[tuple[str, ...], Any] = {}
    for name, value in settings.items():
        found |= _flat(value, (*above, name)) if isinstance(value, Mapping) else {(*above, name): value}  # fmt: skip
    return found


def _place(key: tuple[str, ...]) -> str:
    return f"[{'.'.join(key[:-1])}] {key[-1]}" if len(key) > 1 else key[0]


def _digest(site: "Site", data: bytes) -> str:
    return keyed(corpus_keys(site).k_owner, data).hex()


def _path(site: "Site", digest: str) -> "Path":
    return site.home.path / f"plans/settings-{digest[:16]}.json"
