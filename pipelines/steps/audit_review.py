"""Who has reviewed an audit report, and exactly which one: an entry of the ledger, and the reviewer's name in the report.

::

    report    = SHA-256 of the report's JSON with `reviews` empty and a final newline
    reviewer  = HMAC-SHA256(nonce, "audit-review/" + name)
    ledger      {"kind": "review", "body": {"audit": ..., "report": ..., "reviewer": ...}}
    report      {"reviews": [{"by": name, "nonce": ..., "report": ..., "audit": ..., "entry": ..., "at": ...}]}

Whoever holds the report and the ledger recomputes all three. The name itself is in the report only: the ledger can't be changed any more,
and a reviewer may ask for erasure too; without name and nonce its entry names nobody. What a review does *not* show is who sat at the
keyboard: the program enters the name that it was given. A signature by hand has its line on the page for that.

A report is brought up to date when a request is finished. Its reviews stay, and the page says which of them speak about an earlier state.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.reports.dossier import Dossier, Review
from pipelines.reports.errors import ReportError
from pipelines.requests import RequestError
from pipelines.steps.ledger import corpus_keys, enter, open_ledger
from provenance import keyed

if TYPE_CHECKING:
    from pipelines.site import Site

KIND = "review"
MOST_LETTERS = 80


def reviewed(site: "Site", dossier: Dossier, name: str) -> Dossier:
    """Enter a review into the ledger and add it to the report's facts; the same name on the same report is entered once.

    Args:
        site: The open home.
        dossier: The report that was read.
        name: Who answers for the reading, 1 to 80 printable characters.

    Returns:
        The same facts with the review.

    Raises:
        RequestError: That is no name.
    """
    name = " ".join(name.split())
    if not 0 < len(name) <= MOST_LETTERS or not name.isprintable():
        raise RequestError(
            f"--reviewed-by: expected a name of 1 to {MOST_LETTERS} printable characters, got {name!r}"
        )
    report = dossier.reviewable
    # From the home's key, so that a repetition makes the same entry; nobody without the key can try names.
    nonce = keyed(corpus_keys(site).k_file, f"audit-review/{report}/{name}".encode())
    body = _body(name, nonce, report, dossier.evidence.audit_digest)
    entry = enter(site, KIND, body)
    at = list(open_ledger(site).entries())[entry]["time"]
    made = Review(
        by=name, at=at, report=report, audit=body["audit"], nonce=nonce.hex(), entry=entry
    )
    others = tuple(one for one in dossier.reviews if one.entry != entry)
    return dataclasses.replace(dossier, reviews=(*others, made))


def kept(path: Path) -> tuple[Review, ...]:
    """Reviews of a report that is about to be written again.

    Args:
        path: Its JSON, which may not be there yet.
    """
    if not path.exists():
        return ()
    try:
        return Dossier.from_json(path.read_text(encoding="utf-8")).reviews
    except (ReportError, ValueError) as error:
        logging.getLogger(__name__).warning(
            "reports/%s could not be read (%s): it is written anew, without the reviews it may have held; the ledger has their entries",
            path.name, error,
        )  # fmt: skip
        return ()


def contradicted(dossier: Dossier, entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Reviews that the ledger does not have in these words.

    Args:
        dossier: A report.
        entries: All entries of the ledger.

    Returns:
        One sentence per finding.
    """
    found = []
    for one in dossier.reviews:
        entry = entries[one.entry] if 0 <= one.entry < len(entries) else {}
        said = (entry.get("kind"), entry.get("body"), entry.get("time"))
        body = _body(one.by, bytes.fromhex(one.nonce), one.report, one.audit)
        if said != (KIND, body, one.at):
            found.append(
                f"reports/audit-{dossier.batch}.json: the ledger's entry {one.entry} is not the review by {one.by!r} that the report tells of"
            )
    return found


def _body(name: str, nonce: bytes, report: str, audit: str) -> dict[str, str]:
    reviewer = keyed(nonce, f"audit-review/{name}".encode()).hex()
    return {"audit": audit, "report": report, "reviewer": reviewer}
