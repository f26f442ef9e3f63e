"""Commands about money and space: `payouts`, `dispute`, `gc`."""

import csv
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.cli.asking import this_site
from pipelines.steps.buyers import table_of

console = Console()

Buyer = Annotated[
    str,
    typer.Option(help="A buyer of [buyers.NAME]; without it the one of [target] and [pricing]."),
]


def payouts(
    as_csv: Annotated[
        bool,
        typer.Option("--csv", help="Comma-separated on standard output, for a payment system."),
    ] = False,
    buyer: Buyer = "",
) -> None:
    """Who is paid what by the last run: integers that add up to the pool, with the committed rule's digest."""
    import polars as pl

    from valuation.pricing import HELD, RESERVE

    site = this_site()
    path = table_of(site, "prices", buyer)
    if not path.exists():
        what, where = (f"prices of buyer {buyer!r}", f"[buyers.{buyer}]") if buyer else ("prices", "[pricing]")  # fmt: skip
        raise FileNotFoundError(
            f"no {what} in this home: set pool_microunits under {where} in dataworth.toml, then dataworth run"
        )
    frame = pl.read_parquet(path).sort("price_microunits", descending=True)
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(frame.columns)
        writer.writerows(
            frame.filter(~pl.col("subject").is_in([RESERVE, HELD])).iter_rows()
        )  # nobody is paid the reserve, and what is held back isn't due
        return
    unclear = _unclear(table_of(site, "values", buyer))
    currency = frame["currency"][0]
    table = Table(
        "owner",
        "name",
        f"micro-units {currency}",
        currency,
        "value",
        title=f"rule {frame['rule_digest'][0][:16]}",
    )
    for row in frame.iter_rows(named=True):
        entry = site.config.owners.get(row["subject"])
        table.add_row(
            row["subject"],
            entry.name if entry else "",
            f"{row['price_microunits']:,}",
            f"{row['price_microunits'] / 1e6:,.2f}",
            unclear.get(row["subject"], ""),
        )
    table.add_section()
    total = int(frame["price_microunits"].sum())
    table.add_row("total", "", f"{total:,}", f"{total / 1e6:,.2f}")
    console.print(table)


def _unclear(path: Path) -> dict[str, str]:
    """Owner → that its value isn't distinguishable from zero, in words, of the owners this holds for."""
    import polars as pl

    from valuation.intervals import zero_words

    rows = pl.read_parquet(path).filter(pl.col("subject_kind") == "owner").iter_rows(named=True)
    said = {row["subject_id"]: zero_words(row["ci_low_nano"], row["ci_high_nano"]) for row in rows}
    return {owner: words for owner, words in said.items() if words}


def gc(
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--delete", help="Only list, or delete.")
    ] = True,
) -> None:
    """List runs that no current result, receipt or open request needs, with their size; `--delete` removes them."""
    import shutil

    from pipelines.collecting import unneeded_runs

    site = this_site()
    with site.home.lock("gc"):
        found = unneeded_runs(site.home)
        table = Table(
            "run",
            "MiB",
            title="nothing to remove" if not found else f"{len(found)} runs that nothing needs",
        )
        for folder, size in found:
            table.add_row(folder.name, f"{size / 2**20:.1f}")
            if not dry_run:
                shutil.rmtree(folder)
        console.print(table)
    if found and dry_run:
        console.print("nothing was removed; dataworth gc --delete removes them")


def dispute(
    retrain: Annotated[
        int, typer.Option(min=0, help="Train this many coalitions again, the smallest first.")
    ] = 0,
    buyer: Buyer = "",
) -> None:
    """Recompute values and prices from the committed plan and its bank; the exit code is 1 if anything differs or is gone."""
    from pipelines.steps.disputes import recompute

    findings = recompute(this_site(), retrain, buyer)
    table = Table("what", "as published", "how")
    for what, holds, how in findings:
        table.add_row(what, {True: "yes", False: "NO", None: "gone"}[holds], escape(how))
    console.print(table)
    if any(holds is None for _, holds, _ in findings):
        rest = ", ".join(what for what, holds, _ in findings if holds is not None)
        console.print(f"what is gone can't be recomputed; checked all the same: {rest or 'nothing'}")  # fmt: skip
    if not all(holds for _, holds, _ in findings):
        raise typer.Exit(1)


COMMANDS = [payouts, dispute, gc]
