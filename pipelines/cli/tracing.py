"""Commands that trace and confirm: `why` (in what two runs differ), `confirm` (the model on what nobody looked at)."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pipelines.cli.asking import required, this_site

if TYPE_CHECKING:
    from pipelines.site import Site
    from provenance import Versions

console = Console()

_RUN = "a run's name or its beginning, the path of a run.json, or #N for a ledger entry"
_BESIDE = (
    "kind",
    "entry",
    "recipe",
    "layout",
    "seed",
    "steps",
    "tokens_digest",
    "excluded",
    "init_root",
)


def why(
    first: Annotated[str, typer.Argument(help=f"One of the two: {_RUN}.")],
    second: Annotated[str, typer.Argument(help="The other one, in the same way.")],
) -> None:
    """Name the items in which two runs differ: data, code, configuration, seed and the others."""
    site = this_site()
    (versions, run), (other_versions, other) = _found(site, first), _found(site, second)
    rows = [(item, *pair) for item, pair in versions.differences(other_versions).items()]
    if run and other:
        rows += _settings(run, other)
    if not rows:
        console.print(
            f"{first} and {second} do not differ in any item: the same numbers are expected, bit for bit on the same hardware",
            highlight=False,
        )
        return
    table = Table("item", first, second, title=f"{len(rows)} items differ")
    for item, one, two in rows:
        table.add_row(item, one, two)
    console.print(table)


def confirm() -> None:
    """Open the sealed part of the target, once for a plan, and measure the released model on it; 1 if the plan's threshold fails."""
    from pipelines.steps.confirmation import confirm as opened

    site = this_site()
    parts = [required(site, name) for name in ("evaluation_plan", "tokens", "checkpoint")]
    found = opened(site, *parts)
    console.print(
        f"target_confirm, {found.records} records: loss {found.loss:.4f} ± {found.se:.4f} nats per token, gain over unigrams "
        f"{found.gain:.4f} ± {found.gain_se:.4f}, threshold {found.threshold:.3f}: {'holds' if found.holds else 'does not hold'} "
        f"(ledger entry {found.entry})",
        highlight=False,
    )
    if not found.holds:
        raise typer.Exit(1)


def _settings(run: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The fields beside the versions, and inside the configuration, in which two run.json differ."""
    flat, flat_other = _flat(run, ""), _flat(other, "")
    names = sorted(flat.keys() | flat_other.keys())
    return [
        (name, flat.get(name, "-"), flat_other.get(name, "-"))
        for name in names
        if flat.get(name) != flat_other.get(name)
    ]


def _flat(document: Any, name: str) -> dict[str, str]:
    """Every leaf of the compared fields by its dotted name."""
    if not name:
        document = {field: document[field] for field in (*_BESIDE, "config") if field in document}
    if not isinstance(document, dict):
        return {name: json.dumps(document)}
    found: dict[str, str] = {}
    for field, value in document.items():
        found |= _flat(value, f"{name}.{field}" if name else field)
    return found


def _found(site: "Site", name: str) -> tuple["Versions", dict[str, Any] | None]:
    """The versions that something in this home carries, and its run.json where it has one.

    Raises:
        LookupError: Nothing of that name, or more than one.
        FormatError: It states its versions incompletely.
    """
    from provenance import Versions

    if name.startswith("#"):
        from pipelines.steps.ledger import open_ledger

        if not name[1:].isdigit():
            raise LookupError(
                f"{name!r} is no ledger entry; expected # and its number, such as #12"
            )
        body = open_ledger(site).entry(int(name[1:]))["body"]
        path = site.home.runs / str(body.get("run", "")) / "run.json"
        document = json.loads(path.read_bytes()) if body.get("run") and path.exists() else None
        return Versions.of(body.get("versions")), document
    path = Path(name)
    if path.suffix != ".json":
        folders = sorted(
            path.name for path in site.home.runs.glob("*") if (path / "run.json").exists()
        )
        matches = [folder for folder in folders if folder == name] or [
            folder for folder in folders if folder.startswith(name)
        ]
        if len(matches) != 1:
            raise LookupError(
                f"{name!r} names {len(matches)} runs, expected {_RUN}; runs here: {', '.join(folders) or 'none'}"
            )
        path = site.home.runs / matches[0] / "run.json"
    run = json.loads(path.read_bytes())
    return Versions.of(run.get("versions")), run


COMMANDS = [why, confirm]
