"""The shape of the house: file sizes, names, import costs, public doors."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipelines", "valuation", "trainer", "provenance", "unlearning")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))
EVERY = SOURCES + sorted((ROOT / "tests").rglob("*.py"))
BANNED = {"util", "utils", "help", "helper", "helpers", "common", "misc", "base", "core", "manager"}


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.mark.parametrize("file", EVERY, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_file_is_too_long_or_badly_named(file: Path) -> None:
    """At most 400 non-blank lines, under 300 in the trainer, and a name that says what is inside."""
    longest = 299 if file.parent == ROOT / "trainer" else 400
    assert sum(1 for line in file.read_text().splitlines() if line.strip()) <= longest
    assert file.stem not in BANNED


def test_top_level_is_what_the_readme_promises() -> None:
    """Only packages, tests and what tools need lie at the top."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    allowed = {
        *PACKAGES, "tests", "pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md", "constraints.txt",
        ".gitignore", ".ci", ".github",
    }  # fmt: skip
    assert {name.split("/")[0] for name in tracked} <= allowed


@pytest.mark.parametrize("package", ["provenance", "valuation", "trainer", "unlearning"])
def test_public_door_is_sorted_documented_and_lazy(package: str) -> None:
    """`__all__` is sorted, every public name exists and has a docstring, and importing the package alone loads no torch."""
    module = importlib.import_module(package)
    assert list(module.__all__) == sorted(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if callable(value):
            assert value.__doc__, f"{package}.{name} has no docstring"
    loaded = run_python(f"import sys, {package}; print(*sys.modules)").split()
    assert not {"torch", "polars", "duckdb", "dagster"} & set(loaded)


def test_our_trainer_is_the_one_that_is_imported() -> None:
    """`trainer` is a common name; ours must win."""
    assert Path(importlib.import_module("trainer").__file__).parent == ROOT / "trainer"


def test_definitions_are_cheap_to_import() -> None:
    """Each step and each sensor tick imports the definitions: at most 1.5 CPU seconds above Dagster, and no torch."""
    code = (
        "import time, sys; import dagster; a = time.process_time(); import pipelines.definitions as d; d.defs();"
        "print(time.process_time() - a, 'torch' in sys.modules, 'polars' in sys.modules, 'duckdb' in sys.modules)"
    )
    seconds, *heavy = run_python(code.replace("-W", "")).split()
    assert heavy == ["False", "False", "False"]
    assert float(seconds) < 1.5


def test_naming_the_methods_needs_no_pytorch() -> None:
    """The graph asks which methods there are in its own process, which trains nothing: PyTorch would cost it two seconds a run."""
    code = "import sys; from pipelines.erasure.choosing import methods; methods(); print('torch' in sys.modules)"
    assert run_python(code).split() == ["False"]


def test_dagster_packages_are_pinned_to_one_release() -> None:
    """Two patch releases of Dagster in one environment refuse each other."""
    pins = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if re.match(r"^dagster[\w-]*==1\.", line)
    )
    assert len(set(pins.values())) == 1
    assert {"dagster", "dagster-webserver", "dagster-pipes", "dagster-dg-cli"} <= set(pins)


def test_location_name_is_one_everywhere() -> None:
    """The code location's name is part of sensor state; it must not drift."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert (
        tool["dagster"]["code_location_name"]
        == tool["dg"]["project"]["code_location_name"]
        == "pipelines.definitions"
    )


def test_environment_is_read_in_three_places_only() -> None:
    """Settings for everything, the trainer's mesh for rank variables, and whether torchrun is there before torch is."""
    readers = {
        str(file.relative_to(ROOT))
        for file in SOURCES
        if re.search(r"os\.environ|os\.getenv", file.read_text())
    }
    assert readers <= {"pipelines/settings.py", "trainer/mesh.py", "trainer/parent.py"}


def test_pipes_stays_in_pipelines() -> None:
    """The packages never learn that Dagster exists."""
    guilty = [
        file
        for file in SOURCES
        if "dagster" in file.read_text() and file.relative_to(ROOT).parts[0] != "pipelines"
    ]
    assert not [
        file
        for file in guilty
        if re.search(r"^\s*(import|from) dagster", file.read_text(), re.MULTILINE)
    ]
