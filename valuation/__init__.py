"""What records and owners are worth: information, training gain, and the prices that follow.

Public names load lazily (PEP 562): ``import valuation`` costs nothing, and ``valuation.pricing``
never loads torch. What meets the trainer is imported by its own name: `valuation.capture`,
`valuation.gradients`, `valuation.routes`, the package `valuation.influence`, and the entries of a run
(``valuation.inrun:train``, ``valuation.proxy:retrain``). README.md has the formulas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valuation.clusters import Clusters, cluster, minhash
    from valuation.datamodels import Datamodel, datamodel
    from valuation.entropy import (
        EmpiricalEntropy,
        bigram_surprisal,
        empirical_entropy,
        folds,
        packed_bytes,
    )
    from valuation.errors import (
        ClusterError,
        EvaluationError,
        GradientError,
        GroupError,
        HeldOutError,
        PricingError,
        ProxyError,
        ResultError,
        TokensError,
        UtilityError,
        ValuationError,
    )
    from valuation.games import Game, additive, airport, shoes, unanimity, voting
    from valuation.groups import OwnerGroup, owner_groups
    from valuation.information import Information, measure_information
    from valuation.intervals import GroupValues, value_rows
    from valuation.knn import KnnValues, knn_shapley
    from valuation.lots import (
        Lots,
        content_axis,
        cut_lots,
        lot_gains,
        lot_shares,
        owner_intervals,
        purity,
    )
    from valuation.orders import (
        Orders,
        coalitions_needed,
        sample_orders,
        sampled_shapley,
        sampled_with_interval,
    )
    from valuation.payouts import corrections, for_sale, price_buyers, prices_frame, why_price
    from valuation.pricing import (
        OwnerValues,
        PriceList,
        PriceRow,
        first_in_cluster,
        owner_values,
        price,
        values_of_lots,
    )
    from valuation.quality import Quality, text_quality
    from valuation.result import NanoRow, ValueRow, apportion, to_nano, values_frame
    from valuation.rules import PriceRule, rule_digest, rule_document, rule_sentence
    from valuation.samplers import Sampler, log_banzhaf, log_shapley
    from valuation.selection import selection_weights
    from valuation.semivalues import Memo, SampledValues, log_beta, sample_values
    from valuation.shapley import (
        banzhaf_weights,
        beta_weights,
        exact_banzhaf,
        exact_semivalue,
        exact_shapley,
        shapley_weights,
        shapley_with_interval,
    )
    from valuation.shingles import shingle_hashes, token_hashes
    from valuation.stopping import Stopping, Tally

_HOME = {
    "clusters": ("Clusters", "cluster", "minhash"),
    "datamodels": ("Datamodel", "datamodel"),
    "entropy": (
        "EmpiricalEntropy",
        "bigram_surprisal",
        "empirical_entropy",
        "folds",
        "packed_bytes",
    ),
    "errors": (
        "ClusterError",
        "EvaluationError",
        "GradientError",
        "GroupError",
        "HeldOutError",
        "PricingError",
        "ProxyError",
        "ResultError",
        "TokensError",
        "UtilityError",
        "ValuationError",
    ),
    "games": ("Game", "additive", "airport", "shoes", "unanimity", "voting"),
    "groups": ("OwnerGroup", "owner_groups"),
    "information": ("Information", "measure_information"),
    "intervals": ("GroupValues", "value_rows"),
    "knn": ("KnnValues", "knn_shapley"),
    "lots": (
        "Lots",
        "content_axis",
        "cut_lots",
        "lot_gains",
        "lot_shares",
        "owner_intervals",
        "purity",
    ),
    "orders": (
        "Orders",
        "coalitions_needed",
        "sample_orders",
        "sampled_shapley",
        "sampled_with_interval",
    ),
    "pricing": (
        "OwnerValues",
        "PriceList",
        "PriceRow",
        "first_in_cluster",
        "owner_values",
        "price",
        "values_of_lots",
    ),
    "payouts": ("corrections", "for_sale", "price_buyers", "prices_frame", "why_price"),
    "rules": ("PriceRule", "rule_digest", "rule_document", "rule_sentence"),
    "quality": ("Quality", "text_quality"),
    "result": ("NanoRow", "ValueRow", "apportion", "to_nano", "values_frame"),
    "samplers": ("Sampler", "log_banzhaf", "log_shapley"),
    "semivalues": ("Memo", "SampledValues", "log_beta", "sample_values"),
    "stopping": ("Stopping", "Tally"),
    "shingles": ("shingle_hashes", "token_hashes"),
    "selection": ("selection_weights",),
    "shapley": (
        "banzhaf_weights",
        "beta_weights",
        "exact_banzhaf",
        "exact_semivalue",
        "exact_shapley",
        "shapley_weights",
        "shapley_with_interval",
    ),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "ClusterError",
    "Clusters",
    "Datamodel",
    "EmpiricalEntropy",
    "EvaluationError",
    "Game",
    "GradientError",
    "GroupError",
    "GroupValues",
    "HeldOutError",
    "Information",
    "KnnValues",
    "Lots",
    "Memo",
    "NanoRow",
    "Orders",
    "OwnerGroup",
    "OwnerValues",
    "PriceList",
    "PriceRow",
    "PriceRule",
    "PricingError",
    "ProxyError",
    "Quality",
    "ResultError",
    "SampledValues",
    "Sampler",
    "Stopping",
    "Tally",
    "TokensError",
    "UtilityError",
    "ValuationError",
    "ValueRow",
    "additive",
    "airport",
    "apportion",
    "banzhaf_weights",
    "beta_weights",
    "bigram_surprisal",
    "cluster",
    "coalitions_needed",
    "content_axis",
    "corrections",
    "cut_lots",
    "datamodel",
    "empirical_entropy",
    "exact_banzhaf",
    "exact_semivalue",
    "exact_shapley",
    "first_in_cluster",
    "folds",
    "for_sale",
    "knn_shapley",
    "log_banzhaf",
    "log_beta",
    "log_shapley",
    "lot_gains",
    "lot_shares",
    "measure_information",
    "minhash",
    "owner_groups",
    "owner_intervals",
    "owner_values",
    "packed_bytes",
    "price",
    "price_buyers",
    "prices_frame",
    "purity",
    "rule_digest",
    "rule_document",
    "rule_sentence",
    "sample_orders",
    "sample_values",
    "sampled_shapley",
    "sampled_with_interval",
    "selection_weights",
    "shapley_weights",
    "shapley_with_interval",
    "shingle_hashes",
    "shoes",
    "text_quality",
    "to_nano",
    "token_hashes",
    "unanimity",
    "value_rows",
    "values_frame",
    "values_of_lots",
    "voting",
    "why_price",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _MODULE:
        raise AttributeError(f"module 'valuation' has no attribute {name!r}")
    value = getattr(import_module(f"valuation.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names."""
    return list(__all__)
