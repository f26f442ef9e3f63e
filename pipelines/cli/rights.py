"""Commands about rights: `erase` (be forgotten) and `withdraw` (no future use)."""

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipelines.cli.asking import required, this_site
from pipelines.erasure.choosing import known
from pipelines.requests import (
    BASES,
    OPEN_STATES,
    Request,
    RequestError,
    load,
    matching,
    same_words,
    save,
)

if TYPE_CHECKING:
    import polars as pl

    from pipelines.site import Site

console = Console()


def erase(  # noqa: PLR0913, PLR0917 - one option per way of naming records, and the acts on requests that exist
    owner: Annotated[str, typer.Option(help="Owner whose records are meant.")] = "",
    source: Annotated[
        list[str] | None, typer.Option(help="Only these sources of the owner, such as one person.")
    ] = None,
    record: Annotated[list[str] | None, typer.Option(help="Record ids in hex.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file with the exact text of a record.")
    ] = None,
    reason: Annotated[str, typer.Option(help="A word for the log; never a person's name.")] = "",
    basis: Annotated[
        str,
        typer.Option(
            help=f"Legal basis, printed in the audit report: {', '.join(BASES)}. Asked again with one, an open request gets it."
        ),
    ] = "",
    everywhere: Annotated[
        bool, typer.Option(help="Also the copies of the same texts that other owners delivered.")
    ] = False,
    version: Annotated[
        str,
        typer.Option(
            help="Corpus version that the records are looked up in; the newest when empty."
        ),
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            help="How to forget; --plan lists them. Default: `method` under `erasure` in dataworth.toml."
        ),
    ] = "",
    plan: Annotated[
        bool,
        typer.Option(help="Only tell what each method would cost and give; nothing is written."),
    ] = False,
    finish: Annotated[
        bool, typer.Option(help="Destroy text, keys and old models of audited requests now.")
    ] = False,
    acknowledge: Annotated[
        str, typer.Option(help="A request whose files in the inbox may stay: you answer for them.")
    ] = "",
) -> None:
    """Write an erasure request; the next run suspends the records, unlearns and audits. No text is stored."""
    if finish:
        _finish()
    elif acknowledge:
        _acknowledge(acknowledge)
    else:
        _request(
            "erase",
            _Named(owner, source, record, file, everywhere, version, method, basis),
            reason,
            plan=plan,
        )


def withdraw(
    owner: Annotated[str, typer.Option(help="Owner who withdraws.")],
    source: Annotated[list[str] | None, typer.Option(help="Only these sources.")] = None,
    reason: Annotated[str, typer.Option(help="A word for the log.")] = "",
) -> None:
    """No future use of an owner's records; models that were trained stay as they are."""
    _request("withdraw", _Named(owner, source, None, None), reason)


@dataclasses.dataclass(frozen=True, slots=True)
class _Named:
    """How the user named the records."""

    owner: str
    source: list[str] | None
    record: list[str] | None
    file: Path | None
    everywhere: bool = False
    version: str = ""
    method: str = ""
    basis: str = ""


def _request(kind: str, named: _Named, reason: str, *, plan: bool = False) -> None:
    from pipelines.steps.ledger import corpus_keys

    if not (named.owner or named.record or named.file):
        raise RequestError("name what is meant: --owner OWNER, --record ID or --file TEXT")
    if named.basis and named.basis not in BASES:
        raise RequestError(f"--basis {named.basis!r}: expected one of {', '.join(BASES)}")
    site = this_site()
    if named.method:
        known(named.method)
    frame = _records(site, named.version)
    request = _made(site, kind, named, reason, frame)
    found = matching(frame, [request])
    others = _same_text_elsewhere(frame, found)
    if named.everywhere and others:
        ids = _everywhere(frame, found)
        request = dataclasses.replace(request, owner="", sources=(), record_ids=ids)
        found, others = matching(frame, [request]), []
    if kind == "erase" and (~found["held_out"]).sum() == (~frame["held_out"]).sum():
        raise RequestError(
            "this names every record of the corpus: nothing would be left to train on or to compare with; to end a corpus, "
            "remove its home"
        )
    if plan:
        _show_plan(site, found)
        return
    before = same_words(site.home, request)
    if before is not None and before.state in OPEN_STATES:
        _made_before(site, before, named.basis)
        return
    while same_words(site.home, request):
        # It was finished, and records it names were delivered since: a new request of the same words.
        request = dataclasses.replace(request, number=request.number + 1)
    request = request.sealed(corpus_keys(site).k_file)
    save(site.home, request)
    if kind == "withdraw":
        _suppress(site, named.owner, found)
    _tell(site, request, found, others)


def _made_before(site: "Site", before: Request, basis: str) -> None:
    """Say so; a legal basis that is stated now is kept."""
    console.print(
        f"request {before.id} was made before: {before.state}, received {before.received}, until {before.deadline}"
    )
    if basis and basis != before.basis:
        save(site.home, dataclasses.replace(before, basis=basis))
        console.print(f"its legal basis is now {BASES[basis]}")


def _made(site: "Site", kind: str, named: _Named, reason: str, frame: "pl.DataFrame") -> Request:
    """The request that the words make."""
    ids = tuple(
        sorted({*(named.record or ()), *(_by_text(site, frame, named.file) if named.file else ())})
    )
    bad = [text for text in ids if len(text) != 64 or not set(text) <= set("0123456789abcdef")]
    if bad:
        raise RequestError(
            f"record id {bad[0]!r}: expected 64 lower-case hex digits, as `dataworth sql` shows them"
        )
    today = datetime.now(UTC).date()
    request = Request(
        kind=kind, owner=named.owner, sources=tuple(named.source or ()), record_ids=ids, reason=reason,
        received=today.isoformat(), deadline=(today + timedelta(days=site.config.erasure.days)).isoformat(),
        method=named.method, basis=named.basis,
    )  # fmt: skip
    if not len(matching(frame, [request], required=False)):
        _say_if_finished(site, request)
    return request


def _say_if_finished(site: "Site", request: Request) -> None:
    """Tell a request for what is gone already from one that names nothing.

    Raises:
        RequestError: The same request is shredded, refused or under way.
    """
    before = same_words(site.home, request)
    if before is not None and before.state not in OPEN_STATES:
        raise RequestError(
            f"request {before.id} of the same records is {before.state}: nothing of them is in the corpus any more, so there is "
            "nothing to erase or to audit again"
        )


def _tell(site: "Site", request: Request, found: "pl.DataFrame", others: list[str]) -> None:
    owners = found["owner"].unique().sort().to_list()
    console.print(
        f"request {request.id}: {len(found)} records of {len(owners)} owners, until {request.deadline}; next: dataworth run"
    )
    if len(owners) > 1:
        console.print(f"these owners' records are meant: {', '.join(owners)}")
    if others:
        console.print(
            f"the same or nearly the same text was also delivered by {', '.join(others)}; their copies stay unless they ask too, "
            "or you ask for the same texts with --everywhere"
        )
    if _running(site):
        console.print(
            "a run is going on: it ends as it began, and the next one acts on this request"
        )
    if request.kind == "erase" and not site.demo:
        from pipelines.erasure.deliveries import holding

        paths = holding(site, frozenset(found["fingerprint"].to_list()))
        if paths:
            console.print(
                f"these files of the inbox still hold the text, remove them yourself: {', '.join(paths)}"
            )


def _finish() -> None:
    """Finish what can be finished, and say of the rest why it waits."""
    from pipelines.erasure.finishing import carry_on

    site = this_site()
    if _running(site):
        raise RequestError("a run is going on in this home; finish when it has ended")
    with site.home.lock("run"):
        done = carry_on(site, asked=[])
    for one in done:
        console.print(
            f"shredded: {', '.join(one.requests)}, {one.records} records; found in 0 bytes of this home. Released model: {one.release}"
        )
    waiting = [one for one in load(site.home) if one.kind == "erase" and one.state in OPEN_STATES]
    for request in waiting:
        console.print(
            f"request {request.id} is {request.state}: {request.note or 'next: dataworth run'}"
        )
    if done:
        console.print("next: dataworth run, which makes values, prices and a model of what is left")
    elif not waiting:
        console.print("no erasure request is open")


def _acknowledge(name: str) -> None:
    site = this_site()
    found = [one for one in load(site.home) if one.id.startswith(name) and one.kind == "erase"]
    if len(found) != 1:
        raise RequestError(
            f"{len(found)} requests begin with {name!r}: dataworth status lists them"
        )
    save(site.home, dataclasses.replace(found[0], acknowledged=True))
    console.print(
        f"request {found[0].id}: files of the inbox that hold the text no longer keep it open; intake refuses their content"
    )


def _show_plan(site: "Site", found: "pl.DataFrame") -> None:
    from rich.table import Table

    from pipelines.erasure.choosing import choices, recommendation
    from pipelines.steps.sharded import person_of

    people = {person_of(*row) for row in found.select("owner", "source").iter_rows()}
    rows = choices(site, len(found), people)
    table = Table(
        "method",
        "class",
        "steps",
        "seconds",
        "share of a training",
        "audits",
        "passed",
        "leak above gold",
        "loss above gold",
        title="what it would cost",
    )
    for row in rows:
        table.add_row(*row.cells())
    console.print(table)
    console.print(recommendation(rows, site))


def _running(site: "Site") -> bool:
    from pipelines.storage.errors import HomeError

    try:
        with site.home.lock("run", timeout_s=0.0):
            return False
    except HomeError:
        return True


def _suppress(site: "Site", owner: str, found: "pl.DataFrame") -> None:
    """From now on intake refuses these contents from this owner."""
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.suppression import SuppressionList

    with site.home.lock("corpus"):
        SuppressionList(site.home.suppression_path, corpus_keys(site)).add_withdrawn(
            owner, found["fingerprint"].to_list()
        )


def _records(site: "Site", version: str) -> "pl.DataFrame":
    """Records that can be named: those of the corpus version, and, marked so, those held out to measure with.

    Raises:
        RequestError: The version holds records that were erased since.
    """
    import polars as pl

    from pipelines.steps.ledger import corpus_keys
    from pipelines.steps.tables import records
    from pipelines.steps.unlearning import held_out_records
    from pipelines.storage.versions import Versions

    chosen = version or required(site, "corpus")["version"]
    if version:
        versions = Versions(site.home, corpus_keys(site))
        known = [one for one in versions.ids() if one.startswith(version)]
        if len(known) != 1:
            raise RequestError(
                f"{len(known)} corpus versions begin with {version!r}: give more of the name of a folder of versions/, such as "
                f"{(versions.head() or '')[:12]}, the newest"
            )
        (chosen,) = known
        if versions.storage(chosen).erased:
            raise RequestError(
                f"version {chosen[:12]} holds records that were erased since; name records of a later version"
            )
    columns = ("record_id", "owner", "source", "fingerprint")
    frame = records(site, chosen, *columns).select(columns)
    parts = (frame, False), (held_out_records(site).select(columns), True)
    return pl.concat([part.with_columns(held_out=pl.lit(held)) for part, held in parts])


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
    """Other owners who delivered the same content, or nearly the same by the table of clusters."""
    same = frame.filter(frame["fingerprint"].is_in(found["fingerprint"].to_list()))
    owners = set(same["owner"]) | set(_near(found)["owner"])
    return sorted(owners - set(found["owner"]))


def _near(found: "pl.DataFrame") -> "pl.DataFrame":
    """Records of the same clusters."""
    import polars as pl

    path = this_site().home.table("clusters")
    if not path.exists():
        return pl.DataFrame(schema={"record_id": pl.Binary, "owner": pl.String})
    table = pl.read_parquet(path, columns=["record_id", "owner", "cluster"])
    mine = table.filter(table["record_id"].is_in(found["record_id"].to_list()))["cluster"]
    return table.filter(table["cluster"].is_in(mine.to_list()))


def _everywhere(frame: "pl.DataFrame", found: "pl.DataFrame") -> tuple[str, ...]:
    """Ids of the records named and of everybody's copies of the same text or cluster."""
    same = frame.filter(frame["fingerprint"].is_in(found["fingerprint"].to_list()))
    ids = {*found["record_id"], *same["record_id"], *_near(found)["record_id"]}
    return tuple(sorted(record_id.hex() for record_id in ids & set(frame["record_id"])))


COMMANDS = [erase, withdraw]
