"""The home's ledger as the steps use it: entered once, however often a step is repeated."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance import (
    KeyList,
    Ledger,
    SigningKey,
    note_text,
    open_key_list,
    parse_checkpoint,
    parse_tlog_proof,
    upgrade_ledger,
    vkey,
)

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


def key_list(folder: Path) -> KeyList | None:
    """Which key signed which sizes, after a rotation; None while there was one key only.

    Args:
        folder: A ledger folder, with `keys` (signed by the root key) and `root.vkey`.
    """
    if not (folder / "keys").exists():
        return None
    return open_key_list((folder / "keys").read_bytes(), (folder / "root.vkey").read_text().strip())


def key_of(folder: Path, proof: str) -> str:
    """The key that a ledger folder names for the checkpoint of a tlog-proof.

    Args:
        folder: A ledger folder.
        proof: Content of a `.tlog-proof`.
    """
    keys = key_list(folder)
    if keys is None:
        return (folder / "vkey").read_text().strip()
    return keys.vkey_at(parse_checkpoint(note_text(parse_tlog_proof(proof).checkpoint)).size)


def trusted(site: "Site") -> str | KeyList:
    """What this home's own ledger is checked with."""
    return key_list(site.home.ledger) or verifier_key(site)


def open_ledger(site: "Site") -> Ledger:
    """The ledger, opened for appending; created at the first call, taken over from the first layout.

    A torn tail that it sets aside is logged.
    """
    key = SigningKey.from_seed(corpus_keys(site).ledger_seed)
    if (taken := upgrade_ledger(site.home.ledger, origin(site), verifier_key(site))) is not None:
        logging.getLogger(__name__).warning(
            "the ledger's %s entries were taken over from the first layout, none of them changed",
            taken.size,
        )
    ledger = Ledger.open(site.home.ledger, origin(site), key, keys=key_list(site.home.ledger))
    for name in ledger.torn:
        logging.getLogger(__name__).warning(
            "the ledger had a torn tail of a writer that was killed; kept as ledger/torn/%s, nothing signed is lost",
            name,
        )
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
