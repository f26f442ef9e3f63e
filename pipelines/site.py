"""Opens a home for work: made on first use, with `dataworth.toml`, Dagster's settings, and the size resolved."""

import dataclasses
from importlib import resources as package_files
from pathlib import Path

from pipelines.sizes import Size, size_named
from pipelines.storage import keys
from pipelines.storage.config import Config, default_text, load, render
from pipelines.storage.demo import demo_config
from pipelines.storage.errors import ConfigError
from pipelines.storage.home import Home
from provenance import write_atomic


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An open home with its configuration: what every step works on."""

    home: Home
    config: Config
    size: Size
    inbox: Path
    """Where deliveries lie."""
    demo: bool
    """Whether the inbox is the home's own, seeded with the default corpus."""
    world: int
    """Trainer processes."""


def make_home(path: Path, *, own_inbox: bool = False) -> bool:
    """Make the home's folders, `dataworth.toml` and Dagster's folder; what exists stays.

    Args:
        path: Where.
        own_inbox: Whether the user brings deliveries: then target and pool are the user's to set, not the demo's.

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
    demo = render(demo_config("default")).encode()
    unused_demo = (
        own_inbox
        and not home.keys_path.exists()
        and home.config_path.exists()
        and home.config_path.read_bytes() == demo
    )
    if home.config_path.exists() and not unused_demo:
        return False
    text = default_text() if own_inbox else demo.decode()
    write_atomic(home.config_path, text.encode())
    return True


def open_site(path: Path, inbox: Path | str | None, size: str | None, world: str | None) -> Site:
    """Open a home with its configuration.

    Args:
        path: The home.
        inbox: The user's inbox, or None for the home's own.
        size: Name of a size that overrides the configured one.
        world: Trainer processes, as a number or as a layout, that override the configured ones.

    Raises:
        ConfigError: `dataworth.toml` or an override is not valid; says what to change.
        HomeError: The home was written by a newer version.
    """
    home = Home(path)
    remembered = home.path / "inbox-path"
    if inbox is None and remembered.exists():
        inbox = remembered.read_text()
    make_home(path, own_inbox=inbox is not None)
    home.check()
    config = load(home.config_path)
    try:
        chosen = size_named(size or config.size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if asked := config.audit.gold_models:
        if asked < chosen.gold_seeds:
            raise ConfigError(
                f"[audit] gold_models is {asked} and size {chosen.name} has {chosen.gold_seeds}: expected at least {chosen.gold_seeds}, or 0 for the size's number; "
                "for fewer take a smaller size"
            )
        chosen = dataclasses.replace(chosen, gold_seeds=asked)
    demo = _is_demo(home, own_inbox=inbox is not None)
    if inbox is not None:
        # Commands and schedules that come later look into the same inbox without being told again.
        write_atomic(remembered, str(Path(inbox).resolve()).encode())
    if spread := world or config.training.layout:
        chosen = _spread(chosen, spread, "DATAWORTH_WORLD" if world else "[training] layout")
    return Site(
        home=home, config=config, size=chosen, inbox=Path(inbox) if inbox else home.inbox, demo=demo, world=chosen.world
    )  # fmt: skip


def _spread(size: Size, text: str, where: str) -> Size:
    """The size with its released model on a layout.

    Raises:
        ConfigError: It can't be read, or is not possible for this size; with what is possible.
    """
    from trainer.errors import SpecError
    from trainer.layout import demand, parse_layout

    try:
        layout = parse_layout(text)
        model = dataclasses.replace(size.model, tied=layout.pp == 1)
        spread = dataclasses.replace(size, world=layout.world_size, layout=str(layout), model=model)
        demand(layout, *spread.trained(size.vocab_size))
    except SpecError as error:
        raise ConfigError(f"{where} is {text!r}: {error}") from None
    return spread


def _is_demo(home: Home, *, own_inbox: bool) -> bool:
    """Whether this home is the demonstration's: its keys decide, before there are any its inbox does.

    Raises:
        ConfigError: A user's deliveries would meet keys that everybody knows.
    """
    known = keys.load(home.keys_path).is_demo if home.keys_path.exists() else None
    if own_inbox:
        if known:
            raise ConfigError(
                "this home holds the default corpus, signed with published demonstration keys; give your deliveries a home "
                "of their own: DATAWORTH_HOME=.dataworth-own, with the same command"
            )
        return False
    if known is not None:
        return known
    return not any(home.inbox.iterdir()) or (home.inbox / ".demo").exists()
