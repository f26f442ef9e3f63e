"""What the tests of the graph share: finished homes at `tiny`, and the command line inside this process.

The modules `graph_*` beside this file are importable by name, also for the programs that tests start.
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from graph_commands import (
    FORGET,
    LETTER,
    LETTER_FILE,
    FirstRun,
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


@pytest.fixture(scope="session")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> FirstRun:
    """`dataworth init`, then the required command over the whole graph."""
    home = tmp_path_factory.mktemp("tiny") / "home"
    assert dataworth(home, "init").returncode == 0
    return FirstRun(home, materialize(home))


@pytest.fixture(scope="session")
def tiny_home(first_run: FirstRun) -> Path:
    """One finished run of the default corpus; never to be changed."""
    assert first_run.done.returncode == 0, first_run.done.stderr[-4000:]
    return first_run.home


@pytest.fixture(scope="session")
def grown_home(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny_home` after one more delivery, a request of eight more people and a second run; never to be changed."""
    home = tmp_path_factory.mktemp("grown") / "home"
    shutil.copytree(tiny_home, home)
    (home / LETTER_FILE).write_text(LETTER)
    assert dataworth(home, *FORGET).returncode == 0
    done = dataworth(home, "run")
    assert done.returncode == 0, done.stderr
    return home


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
    from pipelines.cli import app, asking, paying, rights, running

    for module in (asking, paying, rights, running):
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
