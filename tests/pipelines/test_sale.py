"""The gate of a sale: nothing is valued for a buyer and paid for without an accepted licence and consent to resale."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
from graph_based import MESSAGES, RECORDS, SETTINGS, deliver
from graph_commands import dataworth, values
from hypothesis import given
from hypothesis import strategies as st

from pipelines.steps.sale import gate, is_sale, sale_inputs
from pipelines.storage.config import parse
from valuation.errors import PricingError

POOL = "[pricing]\npool_microunits = 1\n"
AGREED = '[owners.ada]\nresell = "agreed"\n'
OWNERS = ("ada", "bob")


def site(text: str) -> SimpleNamespace:
    """As much of an open home as the gate looks at."""
    return SimpleNamespace(config=parse(text))


def frame(rows: list[tuple[str, str, bool | None]]) -> pl.DataFrame:
    """Live records by owner, licence and what they state about resale."""
    schema = {"owner": pl.String, "licence": pl.String, "consent_resell": pl.Boolean}
    return pl.DataFrame(rows, schema, orient="row").with_columns(consent_train=True)


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(OWNERS),
            st.sampled_from(["CC0-1.0", "GPL-3.0-only"]),
            st.sampled_from([True, False, None]),
        ),
        min_size=1,
        max_size=12,
    ),
    pool=st.booleans(),
    all_agreed=st.booleans(),
    one_agreed=st.booleans(),
)
def test_what_may_be_sold_is_licensed_and_agreed_to(rows, pool, all_agreed, one_agreed):
    """Each record against the rule in words; a stated no holds whatever was agreed, and without a pool nothing is sold."""
    text = POOL if pool else "[pricing]\n"
    text += 'resell = "agreed"\n' * all_agreed + AGREED * one_agreed
    expected = [
        licence == "CC0-1.0"
        and (not pool or stated is True or (stated is None and (all_agreed or (one_agreed and owner == "ada"))))
        for owner, licence, stated in rows
    ]  # fmt: skip
    if not any(expected):
        with pytest.raises(PricingError, match=rf"nothing may be sold.* got {len(rows)} records"):
            gate(site(text), frame(rows), np.ones(len(rows)))
        return
    flags, held_back = gate(site(text), frame(rows), np.ones(len(rows)))
    assert flags.tolist() == expected
    assert sum(held_back.values()) == len(rows) - sum(expected)


def test_a_buyers_pool_is_a_sale_too():
    """Of several buyers one with a pool is enough; the terms then count among what the values depend on, and only then."""
    buyer = '[buyers.acme]\ntarget = "acme.jsonl"\n'
    assert not is_sale(site(buyer))
    assert is_sale(site(buyer + "pool_microunits = 5\n"))
    assert set(sale_inputs(site(AGREED))) == {"licences"}
    assert sale_inputs(site(POOL + AGREED))["agreed"] == ["ada"]
    assert sale_inputs(site(POOL))["resell"] == "stated"


def test_records_without_a_token_are_nothing_to_sell():
    """An empty lot can't be valued: that is said here, not by a training."""
    with pytest.raises(PricingError, match='resell = "agreed" under'):
        gate(site(POOL), frame([("ada", "CC0-1.0", True)]), np.zeros(1))


def test_a_home_without_consent_sells_nothing_until_it_is_agreed(tmp_path: Path) -> None:
    """The graph stops at the values with the remedy; the line it names is enough, with no new delivery, and pays the owner who agreed alone."""
    home, inbox = tmp_path / "home", tmp_path / "inbox"
    deliver(inbox, MESSAGES)
    for path in inbox.glob("*/message.jsonl"):
        path.write_text(path.read_text().replace(', "consent_resell": true', ""))
    environment = {"DATAWORTH_INBOX": str(inbox)}
    assert dataworth(home, "init", **environment).returncode == 0
    (home / "dataworth.toml").write_text(SETTINGS)
    refused = dataworth(home, "run", "--select", "*prices", **environment)
    assert refused.returncode != 0
    said = " ".join((refused.stdout + refused.stderr).split())
    assert "nothing may be sold" in said
    assert 'resell = "agreed" under [owners.NAME]' in said
    version = values(home, "corpus")["version"]
    (home / "dataworth.toml").write_text(SETTINGS + '[owners.lincoln]\nresell = "agreed"\n')
    done = dataworth(home, "run", "--select", "*prices", **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert values(home, "corpus")["version"] == version
    valued = values(home, "owner_values")
    records = {owner["id"]: owner["records"] for owner in valued["owners"]}
    assert records.pop("lincoln") == RECORDS
    assert not any(records.values())
    assert valued["held_back"] == {"no consent": values(home, "corpus")["live"] - RECORDS}
    paid = pl.read_parquet(home / "tables/prices.parquet")
    amounts = dict(paid.select("subject", "price_microunits").iter_rows())
    assert not any(amounts.get(owner, 0) for owner in records)
