"""What the tests of the graph share: finished homes at `tiny`, and the command line inside this process.

The modules `graph_*` beside this file are importable by name, also for the programs that tests start.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from graph_based import LATER, base_of, deliver, run, valued
from graph_buyers import asked
from graph_commands import (
    FORGET,
    LETTER,
    LETTER_FILE,
    dataworth,
    environment,
    flat,
    materialize,
)


class Answer(NamedTuple):
    """What our command line said, each stream on one line."""

    code: int
    out: str
    err: str


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> Path:
    """A home made once for all workers of pytest-xdist, and what was said meanwhile in `HOME.log` beside it."""
    base = factory.getbasetemp()
    folder = (base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base) / f"shared-{name}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "home.log").exists():
            said = make(folder / "home")
            (folder / "home.log").write_text(said)
    return folder / "home"


@pytest.fixture(scope="session")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished run of the default corpus, by the required command; never to be changed."""

    def make(home: Path) -> str:
        assert dataworth(home, "init").returncode == 0
        done = materialize(home)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout + done.stderr

    return shared(tmp_path_factory, "tiny", make)


@pytest.fixture(scope="session")
def grown_home(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_home` after one more delivery, a request of eight more people and a second run; never to be changed."""

    def make(home: Path) -> str:
        shutil.copytree(tiny_home, home)
        (home / LETTER_FILE).write_text(LETTER)
        assert dataworth(home, *FORGET).returncode == 0
        done = dataworth(home, "run")
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return shared(tmp_path_factory, "grown", make)


@pytest.fixture(scope="session")
def market_home(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_home` after two more buyers and a second run; never to be changed."""

    def make(home: Path) -> str:
        shutil.copytree(tiny_home, home)
        asked(home)
        done = dataworth(home, "run")
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    return shared(tmp_path_factory, "market", make)


@pytest.fixture(scope="session")
def based_home(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home whose values start from the released model of `tiny_home`, run up to the receipts; never to be changed."""
    settings = f'[values]\nbase = "{base_of(tiny_home)}"\n'
    return shared(tmp_path_factory, "based", lambda home: valued(home, settings))


@pytest.fixture(scope="session")
def delivered_home(based_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`based_home` after one more delivery and a second run up to the receipts; never to be changed."""

    def make(home: Path) -> str:
        shutil.copytree(based_home, home)
        shutil.copytree(based_home.parent / "inbox", home.parent / "inbox")
        deliver(home.parent / "inbox", LATER)
        return run(home)

    return shared(tmp_path_factory, "delivered", make)


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a home to where it may be changed."""

    def copy(home: Path) -> Path:
        shutil.copytree(home, tmp_path / "home")
        return tmp_path / "home"

    return copy


@pytest.fixture
def ask(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Our command line, run inside this process."""
    from pipelines.cli import app, asking, auditing, paying, rights, running

    for module in (asking, auditing, paying, rights, running):
        monkeypatch.setattr(module.console, "width", 400)

    def run(home: Path, *arguments: str, **extra: str) -> Answer:
        for name in ("DATAWORTH_INBOX", "DATAWORTH_WORLD", "DATAWORTH_EXECUTOR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment(home, **extra).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["dataworth", *arguments])
        with pytest.raises(SystemExit) as stop:
            app.main()
        said = capsys.readouterr()
        return Answer(int(stop.value.code or 0), flat(said.out), flat(said.err))

    return run
