"""Several buyers: each has a target, a value table, prices and receipts of its own; coalitions are trained once for all of them.

"" is the buyer whose target and pool are those of [target] and [pricing]; the others stand under [buyers.NAME]. What the
graph's results say of them lies under `buyers`, by name, and only where there are any, so that a home without other buyers
has the results it always had.
"""

import dataclasses
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.results import Result
from pipelines.steps.ledger import corpus_keys
from pipelines.steps.tables import records
from provenance import keyed

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.site import Site
    from pipelines.storage.terms import Terms


def terms_of(site: "Site", buyer: str) -> "Terms":
    """What a buyer pays and by which rule.

    Raises:
        KeyError: No such buyer is configured any more.
    """
    return site.config.buyers[buyer] if buyer else site.config.pricing


def table_of(site: "Site", what: str, buyer: str) -> "Path":
    """The file of a buyer's `values` or `prices`."""
    return site.home.table(f"buyer-{buyer}-{what}" if buyer else what)


def marked(site: "Site", buyer: str) -> dict[str, str]:
    """What a ledger entry about another buyer carries: its pseudonym, as owners have one."""
    if not buyer:
        return {}
    return {"buyer": keyed(corpus_keys(site).k_owner, f"buyer:{buyer}".encode()).hex()}


def seen_by(result: Result, buyer: str) -> Result:
    """A result as it is for one buyer.

    Raises:
        LookupError: It was made without that buyer.
    """
    if not buyer:
        return result
    own = result.values.get("buyers", {}).get(buyer)
    if own is None:
        raise LookupError(
            f"buyer {buyer!r} has no {result.asset} yet: name it under [buyers.{buyer}] in dataworth.toml, then dataworth run"
        )
    return dataclasses.replace(result, values={**result.values, **own, "buyers": {}})


def names_in(result: Result) -> tuple[str, ...]:
    """Buyers beside the first that a result was made for, in the order of their targets in the bank."""
    return tuple(sorted(result.values.get("buyers", {})))


def target_inputs(site: "Site") -> dict[str, Any]:
    """What the targets of buyers depend on; nothing without buyers."""
    found = {}
    for name, buyer in site.config.buyers.items():
        path = site.home.path / buyer.target
        found[name] = sha256(path.read_bytes()).hexdigest() if path.is_file() else "none"
    erased = site.home.suppression_path
    suppressed = sha256(erased.read_bytes()).hexdigest() if erased.exists() else "none"
    return {"buyers": found, "suppressed": suppressed} if found else {}


def price_inputs(site: "Site") -> dict[str, Any]:
    """What the prices of buyers depend on beside their values; nothing without buyers."""
    found = {}
    for name, buyer in site.config.buyers.items():
        terms = dataclasses.asdict(buyer)
        found[name] = {key: value for key, value in terms.items() if value is not None and key != "target"}  # fmt: skip
    return {"buyers": found} if found else {}


def targets(site: "Site", corpus: Result, tokenizer: Any) -> dict[str, Any]:
    """Write every buyer's target; folder, digest and records by name.

    Raises:
        TargetError: A file is missing or can't be used, or holds what is trained on; names the buyer.
    """
    from pipelines.storage.buyers import write_buyer_target
    from pipelines.storage.errors import TargetError
    from pipelines.storage.intake import read_target

    if not site.config.buyers:
        return {}
    keys = corpus_keys(site)
    inside = records(site, corpus["version"], "fingerprint")["fingerprint"].to_list()
    found = {}
    for name, buyer in sorted(site.config.buyers.items()):
        path = site.home.path / buyer.target
        if not path.is_file():
            raise TargetError(f"the target file {path.name!r} of buyer {name!r} does not exist: check target under [buyers.{name}]")  # fmt: skip
        held = read_target(path, config=site.config, keys=keys, scratch=site.home.staging)
        made = write_buyer_target(site.home, keys, name, held, tokenizer, inside)
        folder = f"target/buyers/{name}"
        found[name] = {"folder": folder, "digest": made.tokens_digest, "records": made.num_records}
    return {"buyers": found}
