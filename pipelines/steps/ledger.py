"""The home's ledger as the steps use it: entered once, however often a step is repeated."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from provenance import Ledger, SigningKey, vkey

if TYPE_CHECKING:
    from pipelines.site import Site
    from pipelines.storage.keys import CorpusKeys


def corpus_keys(site: "Site") -> "CorpusKeys":
    """The home's keys, made at the first call: fixed demo keys for the default corpus, random ones for a user's inbox."""
    from pipelines.storage.keys import load_or_create

    return load_or_create(site.home.keys_path, demo=site.demo)


def origin(site: "Site") -> str:
    """Name of the log; whatever is signed with the demo keys says so."""
    return "dataworth.demo/ledger" if corpus_keys(site).is_demo else "dataworth/ledger"


def verifier_key(site: "Site") -> str:
    """The line of text with which anyone checks this ledger's signatures."""
    key = SigningKey.from_seed(corpus_keys(site).ledger_seed)
    return vkey(origin(site), key.public)


def open_ledger(site: "Site") -> Ledger:
    """The ledger, opened for appending; created at the first call."""
    key = SigningKey.from_seed(corpus_keys(site).ledger_seed)
    ledger = Ledger.open(site.home.ledger, origin(site), key)
    published = site.home.ledger / "vkey"
    if not published.exists():
        from provenance import write_atomic

        write_atomic(published, (verifier_key(site) + "\n").encode())
    return ledger


def now() -> str:
    """The time for an entry, ISO 8601 in UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def find(ledger: Ledger, kind: str, body: Mapping[str, Any]) -> int | None:
    """Index of the entry of this kind and body, or None."""
    for index, entry in enumerate(ledger.entries()):
        if entry["kind"] == kind and entry["body"] == body:
            return index
    return None


def enter(site: "Site", kind: str, body: Mapping[str, Any]) -> int:
    """Index of the entry of this kind and body; appended now unless it is there.

    Args:
        site: The open home.
        kind: Lower-case word.
        body: Integers, strings, booleans, lists and objects; digests, never texts.
    """
    with site.home.lock("ledger-enter"):  # looking and appending are one act, for two runs at once
        ledger = open_ledger(site)
        found = find(ledger, kind, body)
        return ledger.append(kind, body, now()) if found is None else found
