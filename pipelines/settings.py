"""Settings of one deployment: the only module that reads the environment.

Variables (all optional):

=====================  ======================================================================
`DATAWORTH_HOME`       folder of everything a run makes; default `.dataworth` in the working folder
`DATAWORTH_INBOX`      folder `OWNER/*` of deliveries; default: the home's own inbox, seeded with the demo corpus
`DATAWORTH_SIZE`       `tiny`, `small`, `default`, `pilot` or `report`; overrides `size` in `dataworth.toml`
`DATAWORTH_EXECUTOR`   `in_process` (default) or `multiprocess`
`DATAWORTH_WORLD`      trainer processes, as a number or as degrees (`dp_shard=2 tp=2`); overrides `[training] layout`
`DATAWORTH_KEY`        64 hex digits that seal the key file at rest; or `DATAWORTH_KEY_FILE`, the path of a file with them
`DATAWORTH_PASSPHRASE` passphrase of `dataworth keys export` and `import`; asked for when it is not set
`DATAWORTH_THREADS`    CPU threads of each trainer process; default 1, since models of a few million weights lose by more
=====================  ======================================================================
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

EXECUTORS = ("in_process", "multiprocess")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says; everything else is in `dataworth.toml`."""

    home: Path
    """Absolute path of the home folder."""
    inbox: Path | None
    """The user's own inbox, or None for the home's."""
    size: str | None
    """Name of the size, or None for the one in `dataworth.toml`."""
    executor: str
    """How Dagster runs the steps of one run."""
    world: str | None
    """Number or layout of trainer processes, or None for the one in `dataworth.toml`."""
    threads: int
    """CPU threads of each trainer process."""

    @property
    def dagster_home(self) -> Path:
        """Dagster's own folder, inside the home."""
        return self.home / "dagster"


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Settings from environment variables.

    Args:
        environ: The variables; default the process's own.

    Raises:
        ValueError: A variable has a value outside of its range.
    """
    env = os.environ if environ is None else environ
    executor = env.get("DATAWORTH_EXECUTOR") or "in_process"
    if executor not in EXECUTORS:
        msg = f"DATAWORTH_EXECUTOR is {executor!r}; expected one of {', '.join(EXECUTORS)}"
        raise ValueError(msg)
    threads = env.get("DATAWORTH_THREADS")
    if threads and not (threads.isdigit() and int(threads) > 0):
        msg = f"DATAWORTH_THREADS is {threads!r}; expected a positive number"
        raise ValueError(msg)
    inbox = env.get("DATAWORTH_INBOX")
    return Settings(
        home=Path(env.get("DATAWORTH_HOME") or ".dataworth").expanduser().resolve(),
        inbox=Path(inbox).expanduser().resolve() if inbox else None,
        size=env.get("DATAWORTH_SIZE") or None,
        executor=executor,
        world=env.get("DATAWORTH_WORLD") or None,
        threads=int(threads) if threads else 1,
    )


def home_key(environ: Mapping[str, str] | None = None) -> bytes | None:
    """The key that seals HOME/keys at rest, from the environment or from a key file; None when neither is set.

    Args:
        environ: The variables; default the process's own.

    Raises:
        ValueError: It is not 64 hex digits, or the file cannot be read.
    """
    env = os.environ if environ is None else environ
    text, path = env.get("DATAWORTH_KEY"), env.get("DATAWORTH_KEY_FILE")
    if not text and path:
        try:
            text = Path(path).read_text().strip()
        except OSError as error:
            msg = f"DATAWORTH_KEY_FILE: {error.strerror}: {path}"
            raise ValueError(msg) from None
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        msg = f"DATAWORTH_KEY: expected 64 hex digits, got {len(text)} characters"
        raise ValueError(msg)
    return key


def passphrase(environ: Mapping[str, str] | None = None) -> str:
    """The passphrase of exported keys; empty when it is not set."""
    return (os.environ if environ is None else environ).get("DATAWORTH_PASSPHRASE", "")


def child_environment(threads: int, **extra: str) -> dict[str, str]:
    """Environment of a trainer process: ours, with a thread count that fits its siblings.

    Args:
        threads: Intra-op threads of each process, at least 1.
        **extra: Further variables.
    """
    return {**os.environ, "OMP_NUM_THREADS": str(threads), **extra}


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
