"""Commands that answer: `verify`, `sql`, `report`, `diff`, `explain`."""

import webbrowser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.results import Result, latest
from pipelines.settings import read_settings

if TYPE_CHECKING:
    from pipelines.site import Site

console = Console()


def this_site() -> "Site":
    """The home that the environment names, opened.

    Raises:
        HomeError: There is none.
    """
    from pipelines.site import open_site
    from pipelines.storage.home import Home

    settings = read_settings()
    Home(settings.home).check()
    return open_site(settings.home, settings.inbox, settings.size, settings.world)


def verify(
    receipt: Annotated[
        str,
        typer.Argument(
            help="OWNER, or the path of an OWNER.receipt.json or .tlog-proof; nothing for the whole home."
        ),
    ] = "",
    vkey: Annotated[
        str,
        typer.Option(
            "--key", "--vkey", help="Verifier key from a source you trust; default the home's own."
        ),
    ] = "",
    keys: Annotated[
        Path | None,
        typer.Option(
            help="After a rotation: the key list (the ledger's file `keys`); --key is then the root's."
        ),
    ] = None,
    buyer: Annotated[
        str, typer.Option(help="The owner's receipt about what this buyer of [buyers.NAME] pays.")
    ] = "",
) -> None:
    """Say yes or no, and why: the whole home, or one owner's receipt."""
    if receipt.endswith((".json", ".tlog-proof")):
        path = Path(
            receipt.removesuffix(".tlog-proof").removesuffix(".receipt.json") + ".receipt.json"
        )
        _answer(receipt, lambda: _receipt_facts(path, vkey, keys))
        return
    site = this_site()
    if receipt:
        from pipelines.steps.provenance import receipts_of

        folder = receipts_of(site, required(site, "receipts")["version"], buyer)
        _answer(receipt, lambda: _receipt_facts(folder / f"{receipt}.receipt.json", vkey, keys))
        return
    good = True
    for name, problems in _everything(site):
        good &= not problems
        console.print(
            f"{'[green]yes[/]' if not problems else '[red]no[/] '} {name}",
            *(escape(problem) for problem in problems),
            sep="\n      ",
            highlight=False,
        )
    if not good:
        raise typer.Exit(1)


def _everything(site: "Site") -> Iterator[tuple[str, list[str]]]:
    """Every claim of the home with the problems found, recomputed from disk."""
    from pipelines.steps import audit_report, foundation, judgement
    from pipelines.steps import audit_trail as trail

    claims: list[tuple[str, Callable[..., list[str]], tuple[str, ...]]] = [
        ("corpus: every row, tombstone and salt gives the manifest's roots", trail.version, ("corpus",)),
        ("intake: the counts are those of the tables", trail.counts, ("corpus",)),
        ("clusters: one for every live record", trail.clusters, ("clusters", "corpus")),
        ("token shards: decode to the records", trail.tokens, ("tokens", "corpus")),
        ("target: nothing of it is in the corpus", trail.target, ("target", "corpus")),
        ("ledger: signature, every entry, root", trail.ledger, ("commitment",)),
        ("base model of the values: its files and weights are those of the plan, or there is none", foundation.problems, ("evaluation_plan",)),
        ("plan: in the ledger before training, and its rule was followed", trail.plan, ("evaluation", "evaluation_plan", "checkpoint")),
        ("checkpoint: files, manifest and root are those in the ledger", trail.checkpoint, ("checkpoint",)),
        (f"values' judgement: its scores and verdict follow from its rows{judgement.earlier(site)}", judgement.contradicted, ("value_judgement",)),
        ("prices: the rule applied to the committed values, sum to the pool", trail.prices, ("prices",)),
        ("receipts: every owner's verifies offline", trail.receipts, ("receipts",)),
        ("erasure: no suspended record is in HEAD, nothing sealed is left of a shredded one", trail.erasure, ("erasure_request",)),
        ("phases: every phase of the training answers every question, and its check passed", trail.phases, ("checkpoint",)),
        ("runs: the files of each finished run are those that it left", trail.outputs, ()),
        ("gold model: files, manifest and root are those in the ledger", trail.model, ("gold_checkpoint",)),
        ("unlearned model: files, manifest and root are those in the ledger", trail.model, ("unlearned_checkpoint",)),
        ("audit: the verdict follows from its rows", trail.verdict, ("robustness_audit",)),
        ("audit reports: verdict and digests are the ledger's, each page is that of its facts", audit_report.contradicted, ("robustness_audit",)),
    ]  # fmt: skip
    for claim, check, assets in claims:
        results = [
            result for result in (latest(site.home.results, asset) for asset in assets) if result
        ]
        if len(results) < len(assets):
            yield claim, ["not made yet: run `dataworth run`"]
        elif _of_one_version(dict(zip(assets, results, strict=True))):
            yield claim, _caught(check, site, *results)
        else:
            yield (
                f"{claim} (skipped: the last run stopped between the two, the next one goes on)",
                [],
            )


def _of_one_version(found: dict[str, Result]) -> bool:
    """Whether results that are checked against each other were made from each other."""
    corpus, clusters, tokens = (found.get(name) for name in ("corpus", "clusters", "tokens"))
    if corpus and clusters:
        return clusters["version"] == corpus["version"]
    if corpus and tokens:
        return tokens["corpus_version"] == corpus["version"]
    if evaluation := found.get("evaluation"):
        return (
            evaluation["plan"] == found["evaluation_plan"]["digest"]
            and evaluation["checkpoint"] == found["checkpoint"]["root"]
        )
    return True


def _caught(check: Callable[..., list[str]], *arguments: Any) -> list[str]:
    """A check's problems; a damaged file is a problem, not an end."""
    try:
        return check(*arguments)
    except (OSError, ValueError, LookupError) as error:
        return [str(error)]


def _answer(name: str, prove: Callable[[], list[str]]) -> None:
    try:
        facts = prove()
    except (OSError, ValueError) as error:
        console.print(f"[red]no[/]  {name}: {error}", highlight=False)
        raise typer.Exit(1) from None
    console.print(f"[green]yes[/] {name}", highlight=False)
    for fact in facts:  # one line per claim, however narrow the terminal is
        console.print(f"      {fact}", highlight=False, markup=False, soft_wrap=True)


def _receipt_facts(path: Path, vkey: str, keys: Path | None) -> list[str]:
    from provenance import jcs, parse_json
    from provenance.verify_standalone import verify_receipt

    if not path.exists():
        raise FileNotFoundError(
            f"no receipt {path.name}; owners with one: dataworth status, or give the file's path"
        )
    proof = path.with_name(path.name.replace(".receipt.json", ".tlog-proof"))
    data = path.read_bytes()
    receipt = parse_json(data)  # strict: no duplicate keys, no second reading
    if jcs(receipt) != data:
        raise ValueError(
            "expected the receipt in its one canonical spelling, got other white space or extra bytes"
        )
    text = proof.read_bytes().decode()
    if keys is not None:
        if not vkey:
            raise ValueError(
                "a key list is checked with the root's key: give --key NAME/root+ID+KEY"
            )
        return verify_receipt(receipt, text, vkey, keys.read_bytes().decode())
    return verify_receipt(receipt, text, vkey or _key_beside(path, text))


def _key_beside(path: Path, proof: str) -> str:
    """The home's published key for a receipt that still lies in its home."""
    from pipelines.steps.ledger import key_of

    for folder in path.resolve().parents:
        if (folder / "ledger" / "vkey").exists():
            return key_of(folder / "ledger", proof)
    raise ValueError(
        "give the ledger's verifier key, from a source you trust: --key NAME+ID+KEY (or --vkey)"
    )


def sql(
    query: Annotated[
        str,
        typer.Argument(
            help="One reading statement over records, quarantine, clusters, values, prices, ..."
        ),
    ],
    personal: Annotated[bool, typer.Option(help="Show the text of personal records too.")] = False,
) -> None:
    """Ask DuckDB about the corpus and its tables; nothing can be changed."""
    from pipelines.storage.query import sql as run_query

    table = run_query(this_site().home, query, show_personal=personal).to_arrow_table()
    shown = Table(*table.column_names, title=f"{table.num_rows} rows")
    for row in table.slice(0, 100).to_pylist():
        shown.add_row(
            *(value.hex() if isinstance(value, bytes) else str(value) for value in row.values())
        )
    console.print(shown)


def report(
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Where the newest report lies."""
    from pipelines.steps.report import report_path

    path = report_path(this_site().home.path)
    console.print(path.as_uri(), highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(path.as_uri())


def diff(
    first: Annotated[str, typer.Argument(help="Version id, or its beginning.")],
    second: Annotated[
        str, typer.Argument(help="Version id, or its beginning; HEAD for the one in force.")
    ] = "HEAD",
) -> None:
    """What the second corpus version has and the first has not, and the other way round."""
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.versions import Versions

    site = this_site()
    versions = Versions(site.home, corpus_keys(site))
    found = versions.diff(_version(versions, first), _version(versions, second))
    table = Table(
        "owner",
        "added",
        "removed",
        title=f"{len(found.added)} records added, {len(found.removed)} removed",
    )
    for owner, (added, removed) in sorted(found.per_owner.items()):
        table.add_row(owner, str(added), str(removed))
    console.print(table)


def _version(versions: Any, beginning: str) -> str:
    if beginning == "HEAD":
        head = versions.head()
        if head is None:
            raise ValueError("nothing is published yet: run `dataworth run`")
        return head
    matches = [version for version in versions.ids() if version.startswith(beginning)]
    if len(matches) != 1:
        known = ", ".join(version[:12] for version in versions.ids())
        raise ValueError(f"{beginning!r} names {len(matches)} versions, expected one of: {known}")
    return matches[0]


def explain(
    subject: Annotated[
        str, typer.Argument(help="An owner, a group, or a record id; or a run, or its folder.")
    ],
    step: Annotated[
        int, typer.Option(help="Of a run: look at this step, however usual it is.")
    ] = 0,
) -> None:
    """Walk back from a value or a price to what made it, or from a run's bad loss or slow step to its cause."""
    run = Path(subject) if Path(subject).is_dir() else read_settings().home / "runs" / subject
    if (run / "run.json").exists():
        _explain_run(run, step or None)
        return
    import polars as pl

    from pipelines.steps import increments

    site = this_site()
    values = pl.read_parquet(_table(site, "values")).filter(pl.col("subject_id") == subject)
    if not len(values):
        raise ValueError(
            f"{subject!r} has no value; the table `values` names every owner and group: dataworth sql"
        )
    owner_values, plan = required(site, "owner_values"), required(site, "evaluation_plan")
    from valuation.intervals import zero_words
    from valuation.seeds import spread_words

    seeds = owner_values.values.get("seeds", [plan["seeds"]["proxy"]])
    table = Table("fact", "value", title=subject, show_header=False)
    _add_strip(site, subject, table)
    for row in values.iter_rows(named=True):
        table.add_row(
            f"value by {row['method']}",
            f"{row['value_nano'] / 1e9:.9f} {row['unit']} on {row['target']}, n = {row['n']}",
        )
        if row["se_nano"] is not None:
            table.add_row(
                "standard error, interval",
                f"{row['se_nano'] / 1e9:.6f}, [{row['ci_low_nano'] / 1e9:.6f}, {row['ci_high_nano'] / 1e9:.6f}]",
            )
        if unclear := zero_words(row["ci_low_nano"], row["ci_high_nano"]):
            table.add_row("against zero", unclear)
    found = next((owner for owner in owner_values["owners"] if owner["id"] == subject), None)
    for place, lot in enumerate(owner_values["groups"]):
        own = found["tokens"][place] if found else lot["tokens"] * (lot["id"] == subject)
        if own:
            table.add_row(
                lot["id"],
                f"{lot['value']:.6f} ± {lot['se']:.6f} nats; {own:,} of its {lot['tokens']:,} tokens, copies left out",
            )
    if found or subject in [lot["id"] for lot in owner_values["groups"]]:
        said = increments.sentence(owner_values)
        table.add_row("coalitions", f"{owner_values['coalitions']} retrained, {owner_values['method']}; {said}")  # fmt: skip
        table.add_row("run", f"{owner_values['run']}, seed {', '.join(map(str, seeds))} ({plan['seed_rule']})")  # fmt: skip
        table.add_row("errors", spread_words(len(seeds), base="base" in plan.values))
        _add_proxy(site, table)
    _add_price(site, subject, table)
    _add_buyers(site, subject, table)
    table.add_row("plan", f"{plan['digest']}, ledger entry {plan['entry']}, before any training")
    console.print(table)


def _add_proxy(site: "Site", table: Table) -> None:
    """What the values were measured on, as the ledger's entry of them states it; entries of older versions state nothing."""
    from pipelines.steps.ledger import open_ledger

    body = open_ledger(site).entry(required(site, "values")["entry"])["body"]
    if "proxy" in body:
        table.add_row("proxy", body["proxy"])
        table.add_row("against a larger model", body["transfer"])


def _add_strip(site: "Site", subject: str, table: Table) -> None:
    """A record's surprisal from its beginning to its end, where its owner consents to display and its licence is accepted."""
    import polars as pl

    from pipelines.steps.sale import accepted_licences
    from pipelines.steps.tables import records
    from valuation.surprisal import heat_strip

    path = site.home.table("surprisal")
    if len(subject) != 64 or not path.exists():
        return
    frame = records(site, required(site, "corpus")["version"], "record_id", "licence", "consent_display")  # fmt: skip
    shown = frame.filter(
        pl.col("record_id").bin.encode("hex") == subject,
        pl.col("consent_display"),
        pl.col("licence").is_in(list(accepted_licences(site))),
    )
    bits = pl.read_parquet(path).filter(pl.col("record_id").bin.encode("hex") == subject)["bits"]
    if len(shown) and len(bits):
        tokens = bits[0].to_numpy()
        said = f"{tokens.sum():.1f} bits in {len(tokens)} tokens, from beginning to end"
        table.add_row("surprisal", f"{heat_strip(tokens)}\n{said}")


def _add_price(site: "Site", subject: str, table: Table) -> None:
    """The rows about the price of a subject, if it has one."""
    import polars as pl

    prices = latest(site.home.results, "prices")
    if prices and not prices["skipped"]:
        paid = pl.read_parquet(_table(site, "prices")).filter(pl.col("subject") == subject)
        if len(paid):
            table.add_row(
                "price",
                f"{paid['price_microunits'][0]:,} of {prices['pool']:,} micro-units {prices['currency']}, ledger entry {prices['entry']}",
            )
            why = _why(site, subject, prices["unattributed_nano"])
            if why:
                table.add_row("why this price", why)


def _add_buyers(site: "Site", subject: str, table: Table) -> None:
    """What the subject is worth and paid for every other buyer."""
    import polars as pl

    from pipelines.steps.buyers import names_in, table_of

    for buyer in names_in(required(site, "values")):
        values = pl.read_parquet(table_of(site, "values", buyer))
        for row in values.filter(pl.col("subject_id") == subject).iter_rows(named=True):
            said = f"{row['value_nano'] / 1e9:.9f} {row['unit']}, n = {row['n']}"
            path = table_of(site, "prices", buyer)
            if path.exists():
                paid = pl.read_parquet(path).filter(pl.col("subject") == subject)
                said += "".join(
                    f"; {one['price_microunits']:,} micro-units {one['currency']}"
                    for one in paid.iter_rows(named=True)
                )
            table.add_row(f"for buyer {buyer}", said)


def _why(site: "Site", owner: str, unattributed_nano: dict[str, int]) -> str:
    """Why an owner is paid what it is paid; empty for a row that isn't an owner's."""
    from pipelines.steps.committed import of_prices
    from pipelines.steps.pricing import price_list, stored_values
    from valuation import why_price
    from valuation.pricing import HELD, RESERVE
    from valuation.seeds import spread_words

    if owner in (RESERVE, HELD):
        return ""
    then, rule = of_prices(site, required(site, "prices"))
    found = price_list(then, unattributed_nano, rule=rule)
    assert found is not None, "there is a rule"
    errors = spread_words(
        len(required(site, "owner_values").values.get("seeds", [0])),
        base="base" in required(site, "evaluation_plan").values,
    )
    return why_price(owner, stored_values(then, unattributed_nano), found, rule, errors)


def _explain_run(directory: Path, step: int | None) -> None:
    """Findings of `trainer.explain`, in the order of their steps."""
    from trainer.explain import explain as explain_run

    findings = explain_run(directory, step)
    if not findings:
        console.print(
            f"{directory.name}: no loss, time or check is unusual; one step: --step N",
            highlight=False,
        )
    for found in findings:
        process = "" if found.rank is None else f", rank {found.rank}"
        table = Table(
            "fact", "value", title=f"step {found.step}: {found.symptom}", show_header=False
        )
        table.add_row("phase", f"{found.phase}{process}")
        table.add_row("cause", found.cause)
        for evidence in found.evidence:
            table.add_row("evidence", evidence)
        for record in found.records[:10]:
            table.add_row("record", record)
        if len(found.records) > 10:
            table.add_row("record", f"... and {len(found.records) - 10} more")
        console.print(table)


def _table(site: "Site", name: str) -> Path:
    path = site.home.table(name)
    if not path.exists():
        raise FileNotFoundError(f"no {name} in this home yet: run `dataworth run`")
    return path


def required(site: "Site", asset: str) -> Result:
    """The newest result of an asset.

    Raises:
        LookupError: It was never made.
    """
    result = latest(site.home.results, asset)
    if result is None:
        raise LookupError(f"asset {asset} was not made in this home yet: run `dataworth run`")
    return result


COMMANDS = [verify, sql, report, diff, explain]
