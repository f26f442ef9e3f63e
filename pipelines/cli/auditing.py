"""The command `audit`: what became of an erasure request, as a report for people, as JSON for programs and as PDF for files."""

from typing import Annotated

import typer
from rich.console import Console

from pipelines.cli.asking import this_site
from pipelines.requests import RequestError

console = Console()


def audit(
    request: Annotated[
        str,
        typer.Argument(
            help="The request's id or its reference in a report, or the beginning of one; the newest audit when empty."
        ),
    ] = "",
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also print it to PDF by a Chromium of this machine.")
    ] = False,
    reviewed_by: Annotated[
        str,
        typer.Option(
            help="Your name, once you have read the report: the ledger commits to it and to the report's digest."
        ),
    ] = "",
    run: Annotated[
        bool,
        typer.Option(
            "--run",
            help="Audit what is not audited yet: suspend, unlearn, retrain, attack. Finishes nothing.",
        ),
    ] = False,
) -> None:
    """The audit of an erasure request: verdict, report in two parts, JSON and PDF. 1 if there is none, and says why."""
    from pipelines.reports.errors import ReportError
    from pipelines.reports.printing import print_pdf
    from pipelines.steps.audit_report import find, review, waits

    try:
        if run and waits(this_site(), request):
            _run_the_graph()
        made = find(this_site(), request)
        if reviewed_by:
            made = review(this_site(), made, reviewed_by)
        audited = made.dossier.audit
        console.print(
            f"{audited.verdict}: {audited.num_people} people, {audited.num_gold_seeds} gold model(s), method {audited.method}; "
            f"{audited.reason}",
            highlight=False,
            markup=False,
        )
        if reviewed_by:
            last = made.dossier.reviews[-1]
            console.print(
                f"review by {last.by} of report {last.report[:16]} is ledger entry {last.entry}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        for path in (made.html, made.json):
            console.print(str(path), highlight=False, markup=False, soft_wrap=True)
        if pdf:
            target = made.html.with_suffix(".pdf")
            print_pdf(made.html, target)
            console.print(str(target), highlight=False, markup=False, soft_wrap=True)
    except (RequestError, ReportError) as error:
        Console(stderr=True).print(
            f"dataworth: {error}", highlight=False, markup=False, soft_wrap=True
        )
        raise typer.Exit(1) from None


def _run_the_graph() -> None:
    """Everything that an audit needs, and nothing that comes after it."""
    from pipelines.cli.running import run

    run(select="*robustness_audit", size="", inbox="")


COMMANDS = [audit]
