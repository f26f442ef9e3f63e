"""READMEs tell the truth: their Python runs, their commands exist, the first screen is what a user needs."""

import os
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


def test_first_screen_works_at_the_tiny_size(tmp_path: Path) -> None:
    """The commands of the first screen, run as they stand but for the size, the home and an owner that tiny has."""
    first = README.read_text().split("## Your own data")[0]
    lines = [
        line.split("#")[0].strip()
        for block in re.findall(r"```bash\n(.*?)```", first, re.DOTALL)
        for line in block.splitlines()
    ]
    commands = [
        line for line in lines if line and line != "make test" and not line.endswith("dataworth ui")
    ]
    assert commands[0] == "make run SIZE=small"
    environment = {**os.environ, "DATAWORTH_HOME": str(tmp_path / "home")}
    for command in commands:
        words = command.replace("SIZE=small", "SIZE=tiny").replace("lincoln", "jefferson").split()
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    assert (tmp_path / "home" / "reports" / "latest.html").exists()


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
    existing |= {group.name for group in app.registered_groups}
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
