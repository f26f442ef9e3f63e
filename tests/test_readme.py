"""READMEs tell the truth: their Python runs, their commands exist, the first screen is what a user needs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PACKAGES = ("pipelines", "valuation", "trainer", "provenance", "unlearning")
BLOCKS = [
    pytest.param(block, id=f"{file.parent.name}-{number}")
    for file in [
        README,
        *(ROOT / package / "README.md" for package in (*PACKAGES, "pipelines/storage")),
    ]
    for number, block in enumerate(
        re.findall(r"```python\n(.*?)```", file.read_text(), flags=re.DOTALL)
    )
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path) -> None:
    """Every Python example runs in a fresh interpreter, warnings being errors."""
    script = tmp_path / "example.py"
    script.write_text(block)
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_first_screen_shows_both_commands() -> None:
    """The two commands a stranger needs stand in the first forty lines."""
    first = "\n".join(README.read_text().splitlines()[:40])
    assert "make run SIZE=small" in first
    assert "make test" in first


def test_make_targets_exist_and_test_runs_all_checks() -> None:
    """`make -n test` names formatter, linter, import contracts, type checker and pytest."""
    plan = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for tool in ("ruff format --check", "ruff check", "lint-imports", "mypy", "pytest"):
        assert tool in plan
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert {"install", "run", "test", "bench", "accept", "peers", "lint", "ui", "clean"} <= targets


def test_every_command_is_documented_and_every_documented_one_exists() -> None:
    """README's table and the program agree."""
    documented = set(re.findall(r"dataworth ([a-z]+)", README.read_text()))
    from pipelines.cli.app import app

    existing = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert existing == documented


def test_ci_calls_the_same_two_commands() -> None:
    """Continuous integration runs what the user runs, nothing else."""
    script = (ROOT / ".ci" / "run").read_text()
    assert "make run SIZE=small" in script
    assert re.search(r"^make test$", script, flags=re.MULTILINE)


def test_ui_command_of_the_readme_names_a_page_of_the_web_ui() -> None:
    """The address in README is the one `dataworth ui` prints."""
    assert "/asset-groups" in (ROOT / "pipelines" / "cli" / "running.py").read_text()
    assert "http://127.0.0.1:3000/asset-groups" in README.read_text()
