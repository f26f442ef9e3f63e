"""Commands that keep what must not be lost: `keys init|show|rotate|export|import`, `backup`, `restore`, `witness`, `publish`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipelines.cli.asking import this_site
from pipelines.settings import passphrase, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipelines.storage.keys import CorpusKeys
    from provenance import KeyList

console = Console()
keys_app = typer.Typer(
    help="The secret keys of this home, and what is lost with each of them.",
    no_args_is_help=True,
)


@keys_app.command("init")
def keys_init() -> None:
    """Make this home's keys, once, and say what is lost with each; what exists stays."""
    from pipelines.steps.ledger import corpus_keys

    site = this_site()
    had = site.home.keys_path.exists()
    _table(corpus_keys(site), "kept, they were made before" if had else "made")
    console.print(
        "keep a copy elsewhere: dataworth keys export FILE; nobody can make these keys again",
        highlight=False,
    )


@keys_app.command("show")
def keys_show() -> None:
    """Every key's purpose, a fingerprint to compare copies by, and what is lost with it; never a key."""
    from pipelines.steps.ledger import key_list, verifier_key
    from pipelines.storage.keys import load

    site = this_site()
    keys = load(site.home.keys_path)
    _table(keys, "demo, known to everybody" if keys.is_demo else "this home's own")
    console.print(
        f"the ledger's verifier key, to give away: {verifier_key(site)}",
        highlight=False,
        soft_wrap=True,
    )
    listed = key_list(site.home.ledger)
    if listed is not None:
        root = (site.home.ledger / "root.vkey").read_text().strip()
        console.print(f"key list {listed.serial} signed by {root}", highlight=False, soft_wrap=True)


@keys_app.command("rotate")
def keys_rotate(
    what: Annotated[
        str, typer.Argument(help="`ledger` (the signature) or `salts` (what seals them).")
    ],
    root: Annotated[
        Path | None,
        typer.Option(
            help="Root key file for `ledger`; made at the first rotation, keep it offline."
        ),
    ] = None,
) -> None:
    """Put a new key in the place of an old one; receipts and proofs of before stay valid."""
    from pipelines.custody import finish_salts, rotate_ledger, rotate_salts

    site = this_site()
    if what == "salts":
        if not finish_salts(site):
            rotate_salts(site)
        console.print(
            "the salts are sealed under a new key; with the old one nothing here opens any more, and with a lost new one "
            "every commitment is lost: dataworth keys export again",
            highlight=False,
        )
    elif what == "ledger":
        if root is None:
            raise ValueError("name the root key's file: dataworth keys rotate ledger --root FILE")
        new = rotate_ledger(site, root)
        console.print(
            f"from the next entry on the ledger is signed by {new}; the root key in {root.name} belongs offline: whoever "
            "has it decides which key is the ledger's, and without it the next rotation is not possible",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    else:
        raise ValueError(
            f"cannot rotate {what!r}: expected `ledger` or `salts`; the other keys name records, new ones are a new lineage"
        )


@keys_app.command("export")
def keys_export(
    file: Annotated[Path, typer.Argument(help="A file that isn't there yet, on another disk.")],
) -> None:
    """Write a copy of the keys that only a passphrase opens (DATAWORTH_PASSPHRASE, or asked for)."""
    from pipelines.custody import export_keys
    from pipelines.storage.keys import load

    export_keys(load(this_site().home.keys_path), file, _passphrase(confirm=True))
    console.print(
        f"{file.name} holds the keys; without the passphrase it is lost, and with it whoever has it can sign as this ledger "
        "and open every salt",
        highlight=False,
    )


@keys_app.command("import")
def keys_import(
    file: Annotated[Path, typer.Argument(help="A copy made by `dataworth keys export`.")],
) -> None:
    """Put a copy of the keys into this home, after trying it on the salts that are there."""
    from pipelines.custody import import_keys, read_export

    site = this_site()
    import_keys(site, read_export(file, _passphrase(confirm=False)))
    console.print("the keys are in place, and they open this home's salts", highlight=False)


def _table(keys: "CorpusKeys", title: str) -> None:
    from pipelines.storage.keys import LOST, shown

    table = Table("key", "fingerprint", "used for", "lost with it", title=f"keys: {title}")
    for name, (purpose, lost) in LOST.items():
        table.add_row(name, shown(getattr(keys, name)), purpose, lost)
    console.print(table)


def _passphrase(*, confirm: bool) -> str:
    text: str = passphrase() or typer.prompt(
        "passphrase", hide_input=True, confirmation_prompt=confirm
    )
    return text


def backup(
    file: Annotated[Path, typer.Argument(help="A file that isn't there yet, outside of the home.")],
) -> None:
    """Write the whole home into one file: texts, salts, keys, ledger, receipts. Keep it like the home itself."""
    from pipelines import backups

    count = backups.backup(this_site().home, file)
    console.print(
        f"{count} files in {file.name}; it holds every text and key, and erasures after today are not in it: keep a copy of "
        "requests/ as well, which has no texts",
        highlight=False,
    )


def restore(
    file: Annotated[Path, typer.Argument(help="A backup.")],
    requests: Annotated[
        Path | None,
        typer.Option(help="A newer copy of `requests/`, where the home itself is lost."),
    ] = None,
) -> None:
    """Put a backup in the place of this home; whatever was erased since is erased again."""
    from pipelines import backups
    from pipelines.storage.home import Home

    done = backups.restore(file, Home(read_settings().home), requests=requests)
    console.print(
        f"{done.files} files restored and checked; next: dataworth verify", highlight=False
    )
    if done.kept_ledger:
        console.print(
            "the ledger that was here goes on from the backup's and was kept", highlight=False
        )
    if done.applied:
        console.print(
            f"erased again: {done.records} records of {len(done.applied)} requests ({', '.join(done.applied)})",
            highlight=False,
        )
    if done.replaced is not None:
        console.print(
            f"what was here lies in {done.replaced}: remove it when nothing of it is needed",
            highlight=False,
        )
    elif requests is None:
        console.print(
            "no home was here to tell of erasures after the backup: give --requests if you have a copy",
            highlight=False,
        )


def witness(
    log: Annotated[
        str,
        typer.Argument(
            help="A ledger folder, a folder of tiles, or the address where they are served."
        ),
    ],
    state: Annotated[Path, typer.Option(help="This witness's own folder.")],
    key: Annotated[str, typer.Option(help="The log's verifier key, from a source you trust.")],
    name: Annotated[str, typer.Option(help="This witness's name, such as a domain.")] = "witness",
) -> None:
    """Keep the largest consistent state of a log and cosign it; refuse truncation, rollback and split view."""
    from provenance import SigningKey, Witness, write_atomic

    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = state / "key"
    if not secret.exists():
        write_atomic(secret, SigningKey.generate().seed, 0o600)
    observer = Witness(state, name, SigningKey.from_seed(secret.read_bytes()))
    try:
        note, trusted, consistency = _log(log, key)
        observer.observe(note, trusted, consistency, int(time.time()))
    except (OSError, ValueError) as error:
        console.print(f"[red]no[/]  {log}: {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(
        f"[green]yes[/] {log}: kept and cosigned in {state / 'checkpoint'}",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"      this witness is {observer.vkey}", highlight=False, soft_wrap=True)


def _log(
    log: str, key: str
) -> "tuple[bytes, str | KeyList, Callable[[int, int], Sequence[bytes]]]":
    """The newest checkpoint of a log, what it is checked with, and where its consistency paths come from."""
    from provenance import (
        Ledger,
        note_text,
        open_checkpoint,
        open_key_list,
        parse_checkpoint,
        read_tiles,
    )

    def fetch(path: str) -> bytes:
        if log.startswith(("http://", "https://")):
            from urllib.request import urlopen

            with urlopen(f"{log.rstrip('/')}/{path}", timeout=60) as answer:  # noqa: S310 - the scheme was checked
                data: bytes = answer.read()
                return data
        return (Path(log) / path).read_bytes()

    note = fetch("checkpoint")
    said = parse_checkpoint(note_text(note))
    # A root key's name tells that the log's own key comes from a list that the root signed.
    root = key.split("+", 1)[0].endswith("/root")
    trusted = open_key_list(fetch("keys"), key) if root else key
    open_checkpoint(note, trusted if isinstance(trusted, str) else trusted.vkey_at(said.size))
    if (Path(log) / "entries.jsonl").exists():
        reader = Ledger.open(Path(log), said.origin)
        return reader.checkpoint, trusted, lambda old, _: reader.consistency_path(old)
    tree = read_tiles(fetch, said)
    return note, trusted, tree.consistency_path


def publish(
    folder: Annotated[Path, typer.Argument(help="The folder that a web server serves.")],
) -> None:
    """Write the ledger as static files (C2SP tlog-tiles) that any web server can serve; a second call adds what is new."""
    import shutil

    from pipelines.steps.ledger import open_ledger
    from provenance import publish as write_tiles

    site = this_site()
    written = write_tiles(open_ledger(site), folder)
    for name in ("vkey", "keys", "root.vkey"):
        if (site.home.ledger / name).exists():
            shutil.copyfile(site.home.ledger / name, folder / name)
    console.print(
        f"{written} files written to {folder}; they hold digests and counts, no texts",
        highlight=False,
    )


COMMANDS = [backup, restore, witness, publish]
