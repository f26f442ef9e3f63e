"""What report and asset pages tell about owners: collected from tables and the bank, computed nowhere else."""

import functools
from typing import TYPE_CHECKING, Any, cast

from pipelines.reports.owners import (
    Coverage,
    EntropySpread,
    FairRow,
    Narrowing,
    OwnerWorth,
    Strip,
    Worth,
)
from pipelines.reports.parts import Estimate, NotAvailable
from pipelines.steps.increments import sentence
from pipelines.steps.worth import lot_of_leaf

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from valuation.leaving import LotChecks

STRIPS = 8
"""Owners that a strip is drawn for."""
CELLS = 60

NOTES = (
    "A record is worth its token share of its lot; an owner's price is spread over its records by what is positive of that. Rates are per thousand valued tokens.",
    "The worst of a class is the owner with the lowest rate in it; inside one lot all tokens are paid alike, so kinds that share lots look alike.",
    "Languages are told by script and commonest words, coarsely.",
)


def worth_part(
    site: "Site", owner_values: "Result", prices: "Result", parts: "dict[str, Result] | Any"
) -> Worth:
    """The owners' section.

    Args:
        site: The open home.
        owner_values: What the owners' values asset made.
        prices: What the prices asset made.
        parts: `corpus`, `tokens` and `evaluation_plan`.
    """
    paid = paid_to(site, prices)
    bank = Bank(site, owner_values, parts["evaluation_plan"])
    return Worth(
        currency="" if prices["skipped"] else prices["currency"],
        owners=owners_worth(owner_values, paid),
        entropy=entropy_spreads(site),
        coverage=bank.coverage(),
        narrowing=bank.narrowing(),
        strips=_strips(site, parts["corpus"]),
        fairness=_fairness(site, bank, paid, parts["corpus"], parts["tokens"]),
        notes=(
            *NOTES,
            _measured_on(site, owner_values),
            f"These values were {sentence(owner_values)}.",
        ),
    )


def _measured_on(site: "Site", owner_values: "Result") -> str:
    """Which model the values were measured on, and what is known of a larger one; and whom else they were measured for."""
    from pipelines.steps.buyers import names_in
    from pipelines.steps.pricing import proxy_facts

    facts = proxy_facts(site, owner_values["run"])
    said = f"Values were measured on the proxy {facts['proxy']}; against a larger model: {facts['transfer']}."
    others = ", ".join(names_in(owner_values))
    return f"{said} Other buyers have tables of their own: {others}." if others else said


def owners_worth(owner_values: "Result", paid: dict[str, int]) -> tuple[OwnerWorth, ...]:
    """Value and price of every owner, largest value first."""
    rows = sorted(owner_values["owners"], key=lambda row: (-row["value"], row["id"]))
    return tuple(
        OwnerWorth(
            owner=row["id"], tokens=sum(row["tokens"]), price_microunits=paid.get(row["id"]),
            value=Estimate(value=row["value"], se=row["se"], low=row["low"], high=row["high"], n=owner_values["target_records"]),
        )
        for row in rows
    )  # fmt: skip


def entropy_spreads(site: "Site") -> tuple[EntropySpread, ...]:
    """Quantiles of surprisal over each owner's records, by owner."""
    import polars as pl

    bits = pl.col("surprisal_bits_per_token")
    frame = (
        pl.scan_parquet(site.home.table("entropy"))
        .filter(pl.col("tokens") > 0)
        .group_by("owner")
        .agg(
            pl.len().alias("records"),
            *(
                bits.quantile(share, "linear").alias(name)
                for name, share in (("low", 0.05), ("quarter", 0.25), ("median", 0.5), ("three_quarters", 0.75), ("high", 0.95))
            ),
        )
        .sort("owner")
        .collect()
    )  # fmt: skip
    return tuple(EntropySpread(**row) for row in frame.iter_rows(named=True))


def paid_to(site: "Site", prices: "Result") -> dict[str, int]:
    """Owner → micro-units that are due or held back; empty without prices."""
    import polars as pl

    from valuation.pricing import HELD, RESERVE

    if prices["skipped"]:
        return {}
    frame = pl.read_parquet(site.home.table("prices"))
    rows = zip(frame["subject"], frame["price_microunits"], frame["held_microunits"], strict=True)
    return {name: due + held for name, due, held in rows if name not in (RESERVE, HELD)}


class Bank:
    """The retrainings behind the owners' values, read once."""

    def __init__(self, site: "Site", owner_values: "Result", plan: "Result") -> None:
        import numpy as np

        from valuation import sample_orders
        from valuation.bank import load_seeds, losses_by_seed
        from valuation.completion import added_variance

        self.folder = site.home.runs / owner_values["run"]
        found = load_seeds(self.folder)
        self.num = len(found[0].groups)
        self.tokens_Q = found[0].tokens_Q
        self.nll = losses_by_seed(found)
        self.tokens_OK = np.array([row["tokens"] for row in owner_values["owners"]], np.int64)
        self.generator = np.random.default_rng(plan["seeds"]["orders"])
        self.orders = None
        self.predicted_C, self.variance_K = found[0].predicted_C, added_variance(found)
        if owner_values["method"] not in ("shapley.exact", "shapley.updated"):
            self.orders = sample_orders(self.num, site.size.permutations, self.generator)

    def coverage(self) -> tuple[Coverage, ...]:
        """Trained coalitions by size."""
        from math import comb

        trained = [mask.bit_count() for mask in self.nll if self.predicted_C is None or not self.predicted_C[mask]]  # fmt: skip
        return tuple(
            Coverage(size=size, trained=trained.count(size), possible=comb(self.num, size))
            for size in range(self.num + 1)
        )

    def narrowing(self) -> Narrowing | NotAvailable:
        """How the owners' intervals closed."""
        from valuation.convergence import convergence

        if self.predicted_C is not None:
            return NotAvailable(
                reason="the values go on from an earlier computation: its asset's page shows how its intervals closed"
            )
        if self.num < 2:
            return NotAvailable(reason="one lot has one value, by two trainings; nothing converges")
        found = convergence(
            self.nll, self.num, self.tokens_OK, self.tokens_Q, self.orders, self.generator
        )
        if len(found.calls) < 2:
            return NotAvailable(
                reason="so few coalitions were trained that there is one point only"
            )
        return Narrowing(
            calls=found.calls, mean_width=found.mean_width, worst_width=found.worst_width
        )

    @functools.cached_property
    def gains(self) -> tuple[Any, Any]:
        """Gain of each lot on each target record under each seed, and its variance over orders."""
        from valuation import lot_gains

        gains_KQ, variance_K = lot_gains(self.nll, self.num, self.orders, self.tokens_Q)
        return gains_KQ, variance_K if self.variance_K is None else variance_K + self.variance_K

    def checks(self) -> "LotChecks | NotAvailable":
        """The values of lots held against the bank itself."""
        from valuation.leaving import lot_checks

        if self.predicted_C is not None or self.orders is not None:
            return NotAvailable(reason="not every coalition was trained")
        if self.num < 2:
            return NotAvailable(reason="one lot can't be held against another")
        gains, _ = self.gains
        by_seed = gains if gains.ndim == 3 else gains[None]
        return lot_checks(self.nll, by_seed.sum(axis=2) / self.tokens_Q.sum(), self.tokens_Q)


def _strips(site: "Site", corpus: "Result") -> tuple[Strip, ...] | NotAvailable:
    """One record per owner, the one of median surprisal among those that may be displayed."""
    import numpy as np
    import polars as pl

    from pipelines.steps.sale import accepted_licences
    from pipelines.steps.tables import records

    frame = records(site, corpus["version"], "record_id", "licence", "consent_display")
    shown = frame.filter(
        pl.col("consent_display") & pl.col("licence").is_in(list(accepted_licences(site)))
    )
    if not len(shown):
        return NotAvailable(
            reason="no record has its owner's consent to display under an accepted licence"
        )
    mean = pl.col("surprisal_bits_per_token")
    # Lexicographic order breaks ties, so that the same corpus shows the same records.
    chosen = (
        pl.read_parquet(site.home.table("entropy"))
        .filter(pl.col("record_id").is_in(shown["record_id"].to_list()), pl.col("tokens") > 0)
        .sort("owner", mean, "record_id")
        .group_by("owner", maintain_order=True)
        .agg(pl.col("record_id").get(pl.len() // 2))
        .head(STRIPS)
    )
    bits = (
        pl.scan_parquet(site.home.table("surprisal"))
        .filter(pl.col("record_id").is_in(chosen["record_id"].to_list()))
        .collect()
    )
    of = dict(zip(bits["record_id"], bits["bits"], strict=True))

    def cells(record: bytes) -> tuple[float, ...]:
        each = of[record].to_numpy()
        return tuple(float(part.mean()) for part in np.array_split(each, min(CELLS, len(each))))

    return tuple(
        Strip(record=record.hex(), owner=owner, bits=cells(record))
        for owner, record in chosen.iter_rows()
    )


def _fairness(
    site: "Site", bank: Bank, paid: dict[str, int], corpus: "Result", tokens: "Result"
) -> tuple[FairRow, ...]:
    """Value and price by language, era, length and size of the owner."""
    import numpy as np

    from pipelines.steps.tables import records, token_store
    from valuation.fairness import class_table, eras, length_classes, owner_sizes
    from valuation.language import languages_of

    frame = records(site, corpus["version"], "owner", "date", "text")
    index_N = frame["index"].to_numpy().astype(np.int64)
    lengths_N = token_store(site, tokens).lengths_N[index_N]
    lot_N = lot_of_leaf(bank.folder)[index_N]
    owners = frame["owner"].to_list()
    valued_N = np.where(lot_N >= 0, lengths_N, 0)
    kinds = {
        "language": languages_of(frame["text"].to_list()), "era": eras(frame["date"].to_list()),
        "length": length_classes(lengths_N), "owner": owner_sizes(owners, valued_N),
    }  # fmt: skip
    gains_KQ, variance_K = bank.gains
    rows = [
        row
        for kind, class_N in kinds.items()
        for row in class_table(
            kind, class_N, owners, lengths_N, lot_N, gains_KQ, bank.tokens_Q, paid, order_variance_K=variance_K
        )
    ]  # fmt: skip
    return tuple(
        FairRow(
            by=cast("Any", row.kind), name=row.name, records=row.records, owners=row.owners, tokens=row.tokens,
            value=Estimate(value=row.value, low=row.low, high=row.high), value_rate=row.value_rate,
            worst_value_rate=row.worst_value_rate, worst_value_owner=row.worst_value_owner, price_rate=row.price_rate,
            worst_price_rate=row.worst_price_rate, worst_price_owner=row.worst_price_owner,
        )
        for row in rows
    )  # fmt: skip
