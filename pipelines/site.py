"""Opens a home for work: made on first use, with `dataworth.toml`, Dagster's settings, and the size resolved."""

import dataclasses
from importlib import resources as package_files
from pathlib import Path

from pipelines.resources import Site
from pipelines.sizes import size_named
from pipelines.storage.config import load, render
from pipelines.storage.demo import demo_config
from pipelines.storage.errors import ConfigError
from pipelines.storage.home import Home
from provenance import write_atomic


def make_home(path: Path) -> bool:
    """Make the home's folders, `dataworth.toml` and Dagster's folder; what exists stays.

    Args:
        path: Where.

    Returns:
        Whether `dataworth.toml` was written now.
    """
    home = Home(path).create()
    dagster = path / "dagster"
    dagster.mkdir(exist_ok=True)
    settings = dagster / "dagster.yaml"
    if not settings.exists():
        shipped = package_files.files("pipelines").joinpath("deploy/dagster.yaml")
        write_atomic(settings, shipped.read_bytes())
    if home.config_path.exists():
        return False
    write_atomic(home.config_path, render(demo_config("default")).encode())
    return True


def open_site(path: Path, inbox: Path | str | None, size: str | None, world: int | None) -> Site:
    """Open a home with its configuration.

    Args:
        path: The home.
        inbox: The user's inbox, or None for the home's own.
        size: Name of a size that overrides the configured one.
        world: Trainer processes that override the size's.

    Raises:
        ConfigError: `dataworth.toml` or an override is not valid; says what to change.
        HomeError: The home was written by a newer version.
    """
    make_home(path)
    home = Home(path)
    home.check()
    config = load(home.config_path)
    try:
        chosen = size_named(size or config.size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    demo = inbox is None and (not any(home.inbox.iterdir()) or (home.inbox / ".demo").exists())
    if world:
        chosen = dataclasses.replace(chosen, world=world)
    return Site(
        home=home, config=config, size=chosen, inbox=Path(inbox) if inbox else home.inbox, demo=demo, world=chosen.world
    )  # fmt: skip
