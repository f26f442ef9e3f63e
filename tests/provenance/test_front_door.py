"""The package's public names, and that importing it costs nothing."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import provenance
from provenance import errors

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(path.stem for path in (ROOT / "provenance").glob("*.py") if path.stem[0] != "_")


def test_every_public_name_is_there_sorted_and_documented():
    """``__all__`` is sorted, complete, loads from its module, and each name has a docstring."""
    assert provenance.__all__ == sorted(provenance.__all__)
    assert sorted(provenance._HOME_OF) == sorted(provenance.__all__) == dir(provenance)
    for name in provenance.__all__:
        value = getattr(provenance, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__ == f"provenance.{provenance._HOME_OF[name]}"
            assert inspect.getdoc(value)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = provenance.nonsense


def test_importing_loads_nothing():
    """``import provenance`` alone pulls in neither cryptography nor any module of the package."""
    code = (
        "import sys, provenance; print(sorted(name for name in sys.modules"
        " if name.split('.')[0] in ('cryptography', 'rfc8785', 'json')"
        " or name.startswith('provenance.')))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_documents_its_arguments(module):
    """Public functions and methods with arguments have ``Args:``; the module teaches on top."""
    loaded = importlib.import_module(f"provenance.{module}")
    assert len(loaded.__doc__.split()) > 30
    for name, value in vars(loaded).items():
        if name[0] == "_" or getattr(value, "__module__", "") != loaded.__name__:
            continue
        if inspect.isfunction(value) and inspect.signature(value).parameters and name != "main":
            assert "Args:" in value.__doc__ or name == "verify_text", f"{module}.{name}"


def test_all_errors_are_value_errors_of_one_tree():
    """A caller can catch one class; verification errors are told apart from damage."""
    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    assert all(issubclass(value, errors.ProvenanceError) for value in classes)
    assert issubclass(errors.ProvenanceError, ValueError)
    assert not issubclass(errors.LedgerError, errors.VerificationError)
