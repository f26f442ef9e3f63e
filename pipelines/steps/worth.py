"""From the bank of retrained coalitions to the values of lots and owners, with errors over target records and seeds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.spec import load_run

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.site import Site
    from valuation import GroupValues, Lots
    from valuation.bank import Utilities
    from valuation.entities import Holdings


def told(banks: "Sequence[Utilities]") -> list[str]:
    """Mean loss of every coalition under every seed, in words that can be hashed."""
    return [
        f"{mask}:{float(nll_Q.sum() / bank.tokens_Q.sum())!r}"
        for bank in banks
        for mask, nll_Q in zip(bank.coalitions_C.tolist(), bank.nll_CQ, strict=True)
    ]


def entity_names(site: "Site", held: "Holdings") -> dict[str, str]:
    """Owner → legal entity, of the owners that there are."""
    declared = site.config.entity_of
    return {owner: declared[owner] for owner in held.owners if owner in declared}


def holdings_of(
    site: "Site",
    lots: "Lots",
    owner_N: Sequence[str],
    tokens_N: Any,
    copies: "tuple[Any, Any, Any]",
) -> "Holdings":
    """Who holds how much of each lot, and of how many records.

    Args:
        site: The open home, whose split decides who shares a text that several hold.
        lots: The cut of N live records.
        owner_N: Owner of each.
        tokens_N: Tokens of each.
        copies: Of each its cluster, its leaf index (smaller is earlier), and whether it may be sold; read where the split is by entity.
    """
    import numpy as np

    from valuation import lot_shares
    from valuation.entities import Holdings, entity_holdings

    if site.config.pricing.split == "entity":
        cluster_N, order_N, sold_N = copies
        return entity_holdings(
            lots, owner_N, tokens_N, cluster_N=cluster_N, order_N=order_N, sold_N=sold_N, entity_of=site.config.entity_of
        )  # fmt: skip
    owners, tokens_OK = lot_shares(lots, owner_N, tokens_N)
    held = Counter(owner for owner, lot in zip(owner_N, lots.lot_N, strict=True) if lot >= 0)
    return Holdings(owners, tokens_OK, np.array([held[owner] for owner in owners]))


def lot_of_leaf(directory: "Path") -> Any:
    """Lot of every leaf, -1 for none, as a run of coalitions was given it.

    Raises:
        ProxyError: The file isn't the one that run.json names.
        OSError: It is gone.
    """
    from valuation.bank import ORDER, read_lots, read_plan

    # In which order it was trained is all the same to what its lots hold.
    plan = read_plan({**load_run(directory / "run.json").config.extra, "order": ORDER}, directory)
    assert plan.lots is not None, "owners are paid by lots"
    return read_lots(plan, plan.lots[0].stat().st_size // 8)


def lot_values(banks: "Sequence[Utilities]", orders: Any) -> "tuple[GroupValues, Any, Any]":
    """Values of the lots with their intervals; their gains on every target record, and what of their variance isn't over records or seeds.

    Args:
        banks: Of one target, one per seed.
        orders: The sampled orders, or None where all coalitions are there, trained or predicted.
    """
    import numpy as np

    from valuation import lot_gains, owner_intervals
    from valuation.bank import losses_by_seed
    from valuation.completion import added_variance

    num, tokens_Q = len(banks[0].groups), banks[0].tokens_Q
    gains_KQ, variance_K = lot_gains(losses_by_seed(banks), num, orders, tokens_Q)
    method = "shapley.exact" if orders is None else "shapley.sampled"
    if (added_K := added_variance(banks)) is not None:
        variance_K, method = variance_K + added_K, "shapley.updated"
    # Each lot is an owner of itself: one enumeration serves lots and owners.
    found = owner_intervals(gains_KQ, np.eye(num, dtype=np.int64), tokens_Q, order_variance_K=variance_K, method=method)  # fmt: skip
    return found, gains_KQ, variance_K


def worth(
    site: "Site", banks: "Sequence[Utilities]", cut: Mapping[str, Any], orders: Any
) -> dict[str, Any]:
    """Values of lots and owners on one target: means over the seeds' banks."""
    from valuation import owner_intervals, purity
    from valuation.bank import losses_by_seed
    from valuation.entities import merged

    lots, held, num = cut["lots"], cut["holdings"], len(banks[0].groups)
    tokens_OK, tokens_Q = held.tokens_OK, banks[0].tokens_Q
    nll = losses_by_seed(banks)
    found, gains_KQ, order_variance_K = lot_values(banks, orders)
    intervals = partial(
        owner_intervals, gains_KQ, tokens_Q=tokens_Q, order_variance_K=order_variance_K
    )
    pure_K = purity(tokens_OK)
    nobody, everybody = (
        float(nll[mask].mean(axis=0).sum() / tokens_Q.sum()) for mask in (0, (1 << num) - 1)
    )
    values = {
        "method": found.method,
        "groups": [
            {
                "id": lot, "owners": [owner for row, owner in enumerate(held.owners) if tokens_OK[row, place]], "tokens": int(lots.tokens_K[place]),
                "value": float(found.values_n[place]), "se": float(found.se_n[place]), "seed_se": _seed_part(found, place), "low": float(found.ci_low_n[place]),
                "high": float(found.ci_high_n[place]), "purity": float(pure_K[place]), "personal": bool(lots.personal_K[place]),
            }
            for place, lot in enumerate(lots.ids)
        ],
        "owners": holders(held, intervals(tokens_OK)),
        "target_records": int(found.num_target_records), "total_se": found.total_se, "loss_empty": nobody, "loss_all": everybody,
        "efficiency_error": float(abs(found.values_n.sum() - (nobody - everybody))),
    }  # fmt: skip
    if site.config.pricing.split == "entity":
        whole = merged(held, entity_names(site, held))
        values["entities"] = holders(whole, intervals(whole.tokens_OK))
    return values


def _seed_part(found: "GroupValues", place: int) -> float:
    """What of a standard error is the seeds' spread; 0 of one seed, which has none (`seeds` says how many there were)."""
    return 0.0 if found.seed_se_n is None else float(found.seed_se_n[place])


def holders(held: "Holdings", each: "GroupValues") -> list[dict[str, Any]]:
    """What a result tells of every owner or entity."""
    return [
        {
            "id": owner, "tokens": held.tokens_OK[row].tolist(), "records": int(held.records_O[row]), "value": float(each.values_n[row]),
            "se": float(each.se_n[row]), "seed_se": _seed_part(each, row), "low": float(each.ci_low_n[row]), "high": float(each.ci_high_n[row]),
        }
        for row, owner in enumerate(held.owners)
    ]  # fmt: skip
