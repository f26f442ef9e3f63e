"""The front door of the package: what it names, what it loads, what it may cost."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import valuation

ROOT = Path(valuation.__file__).parents[1]
PUBLIC = [
    "ClusterError", "Clusters", "Datamodel", "EmpiricalEntropy", "EvaluationError", "Game", "GradientError", "GroupError",
    "GroupValues", "HeldOutError", "Information", "KnnValues", "Lots", "Memo", "NanoRow", "Orders", "OwnerGroup", "OwnerValues",
    "PriceList", "PriceRow", "PriceRule", "PricingError", "ProxyError", "Quality", "ResultError", "SampledValues",
    "Sampler", "Stopping", "Tally", "TokensError", "UtilityError", "ValuationError", "ValueRow", "additive",
    "airport", "apportion", "banzhaf_weights", "beta_weights", "bigram_surprisal", "cluster", "coalitions_needed",
    "content_axis", "corrections", "cut_lots", "datamodel", "empirical_entropy", "exact_banzhaf",
    "exact_semivalue", "exact_shapley", "first_in_cluster", "folds", "for_sale", "knn_shapley", "log_banzhaf",
    "log_beta", "log_shapley", "lot_gains", "lot_shares", "measure_information", "minhash", "owner_groups",
    "owner_intervals", "owner_values", "packed_bytes", "price", "price_buyers", "prices_frame", "purity", "rule_digest",
    "rule_document", "rule_sentence", "sample_orders", "sample_values", "sampled_shapley", "sampled_with_interval",
    "selection_weights", "shapley_weights", "shapley_with_interval", "shingle_hashes", "shoes", "text_quality",
    "to_nano", "token_hashes", "unanimity", "value_rows", "values_frame", "values_of_lots", "voting", "why_price",
]  # fmt: skip


def test_the_public_names_are_exactly_these_and_sorted():
    """A name can't appear or vanish by accident."""
    assert valuation.__all__ == PUBLIC
    assert dir(valuation) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_loads_and_explains_itself(name):
    """The lazy table points at real things, and each of them has a docstring of its own."""
    thing = getattr(valuation, name)
    assert inspect.getdoc(thing)
    assert thing.__name__ == name
    assert getattr(importlib.import_module(thing.__module__), name) is thing


def test_an_unknown_name_is_an_attribute_error():
    """A typo fails like in any module, and is not swallowed by the lazy table."""
    with pytest.raises(AttributeError, match="no attribute 'shapely'"):
        _ = valuation.shapely


def test_every_error_is_a_valuation_error_and_a_value_error():
    """One except clause catches them all, and they are bad input by type."""
    errors = [getattr(valuation, name) for name in PUBLIC if name.endswith("Error")]
    assert all(issubclass(error, valuation.ValuationError) for error in errors)
    assert issubclass(valuation.ValuationError, ValueError)


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        (
            "import valuation",
            ["numpy", "torch", "polars", "scipy", "rensa", "trainer", "provenance"],
        ),
        (
            "import valuation; valuation.price; valuation.exact_shapley; valuation.cluster; valuation.text_quality",
            ["torch", "polars", "scipy", "rensa", "trainer", "duckdb"],
        ),
    ],
)
def test_importing_is_free(code, absent):
    """Importing the package loads nothing heavy; importing prices or values never loads torch."""
    check = f"{code}; import sys; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
