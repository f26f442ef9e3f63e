"""The `dataworth` program: wires the commands together and turns errors into one clear paragraph."""

import errno
import sys

import typer
from click import ClickException
from rich.console import Console

from pipelines.cli import asking, auditing, keeping, paying, rights, running, tracing
from provenance.errors import ProvenanceError

app = typer.Typer(
    name="dataworth",
    help="What training records are worth, who is paid, which checkpoint used them, and whether they are forgotten.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    suggest_commands=False,  # click's own message names the nearest one already
)
for module in (running, asking, tracing, paying, rights, auditing, keeping):
    for command in module.COMMANDS:
        app.command()(command)
app.add_typer(keeping.keys_app, name="keys")


def main() -> None:
    """Run the program; the exit code is 0, 1 (the answer is no, or provenance refuses what it finds) or 2 (another error)."""
    debug = "--debug" in sys.argv
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, standalone_mode=False)  # a typer.Exit comes back as its exit code
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        text = error.format_message() if isinstance(error, ClickException) else str(error)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            text = f"{text}: free some space and run the same command again"
        if (
            isinstance(error, ClickException) and not text
        ):  # no command was given: the help was shown
            sys.exit(2)
        Console(stderr=True).print(
            f"[bold red]dataworth:[/] {_plain(text or type(error).__name__)}",
            highlight=False,
            soft_wrap=True,
        )
        sys.exit(1 if isinstance(error, ProvenanceError) else 2)
    sys.exit(code if isinstance(code, int) else 0)


def _plain(text: str) -> str:
    """Text without markup of its own."""
    return text.replace("[", r"\[")
