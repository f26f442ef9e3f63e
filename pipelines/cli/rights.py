"""Commands about rights: `erase` (be forgotten) and `withdraw` (no future use)."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipelines.cli.asking import _required, this_site
from pipelines.requests import Request, RequestError, load, matching, save

if TYPE_CHECKING:
    import polars as pl

    from pipelines.site import Site

console = Console()
DEADLINE_DAYS = 30  # GDPR Art. 12(3): one month


def erase(
    owner: Annotated[str, typer.Option(help="Owner whose records are meant.")] = "",
    source: Annotated[
        list[str] | None, typer.Option(help="Only these sources of the owner, such as one person.")
    ] = None,
    record: Annotated[list[str] | None, typer.Option(help="Record ids in hex.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file with the exact text of a record.")
    ] = None,
    reason: Annotated[str, typer.Option(help="A word for the log; never a person's name.")] = "",
) -> None:
    """Write an erasure request; the next run suspends the records, unlearns and audits. No text is stored."""
    _request("erase", owner, source, record, file, reason)


def withdraw(
    owner: Annotated[str, typer.Option(help="Owner who withdraws.")],
    source: Annotated[list[str] | None, typer.Option(help="Only these sources.")] = None,
    reason: Annotated[str, typer.Option(help="A word for the log.")] = "",
) -> None:
    """No future use of an owner's records; models that were trained stay as they are."""
    _request("withdraw", owner, source, None, None, reason)


def _request(
    kind: str,
    owner: str,
    source: list[str] | None,
    record: list[str] | None,
    file: Path | None,
    reason: str,
) -> None:
    if not (owner or record or file):
        raise RequestError("name what is meant: --owner OWNER, --record ID or --file TEXT")
    site = this_site()
    frame = _records(site)
    ids = tuple(sorted({*(record or ()), *(_by_text(site, frame, file) if file else ())}))
    bad = [text for text in ids if len(text) != 64 or not set(text) <= set("0123456789abcdef")]
    if bad:
        raise RequestError(
            f"record id {bad[0]!r}: expected 64 lower-case hex digits, as `dataworth sql` shows them"
        )
    today = datetime.now(UTC).date()
    request = Request(
        kind=kind, owner=owner, sources=tuple(source or ()), record_ids=ids, reason=reason, received=today.isoformat(),
        deadline=(today + timedelta(days=DEADLINE_DAYS)).isoformat(),
    )  # fmt: skip
    found = matching(frame, [request])
    others = _same_text_elsewhere(frame, found)
    before = next((other for other in load(site.home) if other.id == request.id), None)
    if before is not None:
        console.print(
            f"request {before.id} was made before: {before.state}, received {before.received}, until {before.deadline}"
        )
        return
    save(site.home, request)
    if kind == "withdraw":
        _suppress(site, owner, found)
    console.print(
        f"request {request.id}: {len(found)} records of {found['owner'].n_unique()} owners, until {request.deadline}; next: dataworth run"
    )
    if others:
        console.print(
            f"the same text was also delivered by {', '.join(others)}; their copies stay unless they ask too"
        )
    paths = _still_delivered(site, found)
    if kind == "erase" and paths:
        console.print(
            f"these files of the inbox still hold the text, remove them yourself: {', '.join(paths)}"
        )


def _suppress(site: "Site", owner: str, found: "pl.DataFrame") -> None:
    """From now on intake refuses these contents from this owner."""
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.suppression import SuppressionList

    with site.home.lock("corpus"):
        SuppressionList(site.home.suppression_path, corpus_keys(site)).add_withdrawn(
            owner, found["fingerprint"].to_list()
        )


def _records(site: "Site") -> "pl.DataFrame":
    from pipelines.steps.tables import records

    return records(
        site, _required(site, "corpus")["version"], "record_id", "owner", "source", "fingerprint"
    )


def _by_text(site: "Site", frame: "pl.DataFrame", file: Path) -> list[str]:
    """Record ids of the records with exactly this text."""
    import polars as pl

    from pipelines.steps.ledger import corpus_keys
    from provenance import canonical_bytes, fingerprint

    wanted = fingerprint(
        corpus_keys(site).k_fp, canonical_bytes(file.read_text().removesuffix("\n"))
    )
    found = frame.filter(pl.col("fingerprint") == wanted)["record_id"].to_list()
    if not found:
        raise RequestError(
            f"no record has exactly the text of {file.name}; a record of a .txt file is a run of whole paragraphs"
        )
    return [record_id.hex() for record_id in found]


def _same_text_elsewhere(frame: "pl.DataFrame", found: "pl.DataFrame") -> list[str]:
    """Other owners who delivered the same content."""
    import polars as pl

    same = frame.filter(pl.col("fingerprint").is_in(found["fingerprint"].to_list()))
    return sorted(set(same["owner"]) - set(found["owner"]))


def _still_delivered(site: "Site", found: "pl.DataFrame") -> list[str]:
    """Inbox folders outside of the home that still hold the owners' files."""
    if site.demo:
        return []
    return [
        str(site.inbox / owner)
        for owner in sorted(set(found["owner"]))
        if (site.inbox / owner).exists()
    ]


COMMANDS = [erase, withdraw]
