"""Claims about the front door: its names are what is there, documented, and free until used."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import trainer

ROOT = Path(__file__).parents[2]


def test_public_names_are_sorted_real_and_documented():
    """__all__ is sorted, without doubles; each name loads from its module, and functions and classes have docstrings."""
    assert list(trainer.__all__) == sorted(set(trainer.__all__))
    for name in trainer.__all__:
        value = getattr(trainer, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name
    assert set(dir(trainer)) == set(trainer.__all__)
    with pytest.raises(AttributeError, match="no attribute"):
        _ = trainer.nothing


def test_type_checkers_and_the_loader_know_the_same_names():
    """The TYPE_CHECKING block imports each public name from the module that the loader uses."""
    source = Path(trainer.__file__).read_text()
    block = source.split("if TYPE_CHECKING:", 1)[1].split("_HOME", 1)[0]
    for name, module in trainer._MODULE.items():
        imported = block.split(f"from trainer.{module} import", 1)[1].split("from trainer.", 1)[0]
        assert name in imported.replace("(", " ").replace(")", " ").replace(",", " ").split()
    assert set(trainer._MODULE) == set(trainer.__all__)


def test_importing_the_package_is_free():
    """`import trainer` and its specification load neither torch nor numpy nor pyarrow."""
    code = (
        "import sys, trainer; trainer.RunSpec, trainer.EXIT_DONE\n"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'dagster', 'polars') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_this_is_our_trainer():
    """`trainer` is a common name; the tests test this repository's."""
    assert Path(trainer.__file__).parent == ROOT / "trainer"
    assert importlib.import_module("trainer.generate").generate is not None
