"""Several buyers with targets and pools of their own: one bank of trainings, own tables, prices, receipts and payouts."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from graph_buyers import BANKS, POOLS, ROADS, asked
from graph_commands import environment

from pipelines.results import Result, latest, store
from pipelines.site import Site, open_site
from pipelines.steps import audit_trail, buyers, corpus, pricing, valuation
from pipelines.steps.ledger import corpus_keys, open_ledger
from pipelines.storage.buyers import load_buyer_target
from pipelines.storage.config import parse
from pipelines.storage.errors import ConfigError, TargetError
from pipelines.storage.tokens import load_tokenizer
from provenance import keyed
from trainer.spec import load_run
from valuation.proxy import retrain


def opened(home: Path) -> Site:
    """A home of the tests, opened as the graph opens it."""
    return open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)


def made(home: Path, asset: str):
    """The newest result of an asset."""
    found = latest(home / "results", asset)
    assert found is not None
    return found


def test_a_home_without_buyers_knows_nothing_of_them(tiny_home: Path) -> None:
    """No result, table, receipt or ledger entry of the default home mentions a buyer."""
    for asset in ("target", "owner_values", "values", "prices", "receipts"):
        assert "buyers" not in made(tiny_home, asset).values
    assert not list((tiny_home / "tables").glob("buyer-*"))
    assert not list((tiny_home / "receipts").rglob("buyers"))
    assert not [e for e in open_ledger(opened(tiny_home)).entries() if "buyer" in e["body"]]
    extra = json.loads((tiny_home / "runs" / made(tiny_home, "owner_values")["run"] / "run.json").read_text())["config"]["extra"]  # fmt: skip
    assert "others" not in extra


def test_two_buyers_cost_one_bank_and_change_nothing_for_the_first(
    tiny_home: Path, market_home: Path
) -> None:
    """One run more, of proxies only; plan, model and the first buyer's values and prices are those of before."""
    before, after = made(tiny_home, "owner_values"), made(market_home, "owner_values")
    assert after["owners"] == before["owners"]
    assert after["groups"] == before["groups"]
    for table in ("values", "prices"):
        assert (market_home / f"tables/{table}.parquet").read_bytes() == (tiny_home / f"tables/{table}.parquet").read_bytes()  # fmt: skip
    for asset, name in (("evaluation_plan", "digest"), ("checkpoint", "run"), ("influence", "run")):
        assert made(market_home, asset)[name] == made(tiny_home, asset)[name]
    fresh = {path.name for path in (market_home / "runs").glob("proxy-*")} - {path.name for path in (tiny_home / "runs").glob("proxy-*")}  # fmt: skip
    assert fresh == {after["run"]}
    assert len(list((market_home / "runs" / after["run"] / "bank").glob("*.npz"))) == after["coalitions"] * len(after["seeds"])  # fmt: skip


def test_each_buyer_has_values_on_its_own_target_and_shares_its_own_pool(market_home: Path) -> None:
    """Values differ between targets, add up to what the coalition of all gains on each, and prices add up to each pool."""
    site, values, prices = (
        opened(market_home),
        made(market_home, "owner_values"),
        made(market_home, "prices"),
    )
    assert buyers.names_in(prices) == ("acme", "zeta")
    owned = []
    for buyer, pool in POOLS.items():
        found = buyers.seen_by(values, buyer)
        assert abs(sum(lot["value"] for lot in found["groups"]) - (found["loss_empty"] - found["loss_all"])) < 1e-9  # fmt: skip
        frame = pl.read_parquet(buyers.table_of(site, "prices", buyer))
        assert (frame["price_microunits"].sum(), set(frame["currency"])) == (pool, {"USD"})
        table = pl.read_parquet(buyers.table_of(site, "values", buyer))
        assert set(table["target"]) == {f"buyer:{buyer}"}
        assert set(table["subject_kind"]) == {"lot", "owner"}
        owned.append(table.filter(pl.col("subject_kind") == "owner").sort("subject_id")["value_nano"].to_list())  # fmt: skip
        body = open_ledger(site).entry(buyers.seen_by(prices, buyer)["entry"])["body"]
        assert body["buyer"] == buyers.marked(site, buyer)["buyer"]
        assert buyer not in str(body)
        assert buyers.seen_by(prices, buyer)["rule_before_values"]
    assert owned[0] != owned[1]
    with pytest.raises(LookupError, match="stranger"):
        buyers.seen_by(values, "stranger")


def test_every_claim_about_buyers_is_checked_and_recomputed(
    ask, market_home: Path, copied: Callable[[Path], Path]
) -> None:
    """`verify`, `dispute` and receipts say yes for each buyer; a changed price and another target turn them to no."""
    assert ask(market_home, "verify").code == 0
    for buyer, pool in POOLS.items():
        said = ask(market_home, "dispute", "--buyer", buyer)
        assert said.code == 0, said.out + said.err
        receipt = ask(market_home, "verify", "wilson", "--buyer", buyer)
        assert receipt.code == 0, receipt.out
        assert f"on buyer:{buyer}" in receipt.out
        assert f"of {pool} micro-units USD" in receipt.out
        assert "the price follows from the value" in receipt.out
    assert "on target_value" in ask(market_home, "verify", "wilson").out
    home = copied(market_home)
    site, path = opened(home), home / "tables/buyer-zeta-prices.parquet"
    frame = pl.read_parquet(path)
    frame.with_columns(price_microunits=pl.col("price_microunits").reverse()).write_parquet(path)
    assert audit_trail.prices(site, made(home, "prices")) == ["buyer zeta: prices.parquet is not the table that the ledger names"]  # fmt: skip
    assert ask(home, "dispute", "--buyer", "zeta").code == 1
    assert ask(home, "dispute", "--buyer", "acme").code == 0
    (home / "target/buyers/zeta.json").unlink()
    assert audit_trail.target(site, made(home, "target"), made(home, "corpus")) == ["the target of buyer zeta is not the one that was measured on"]  # fmt: skip


def test_payouts_and_explain_are_by_buyer(ask, market_home: Path) -> None:
    """`payouts --buyer` ends in that buyer's pool; `explain` has a line per buyer; a buyer that is not there is said."""
    assert "total 7,000,001 7.00" in ask(market_home, "payouts", "--buyer", "acme").out
    assert "total 1,000,000,000" in ask(market_home, "payouts").out
    asked_sql = ask(market_home, "sql", 'select sum(price_microunits) from "buyer-acme-prices"')
    assert "7000001" in asked_sql.out
    said = ask(market_home, "explain", "wilson").out
    assert "for buyer acme" in said
    assert "for buyer zeta" in said
    page = (market_home / "reports/latest.html").read_text()
    assert "Other buyers have tables of their own: acme, zeta." in page
    stranger = ask(market_home, "payouts", "--buyer", "stranger")
    assert stranger.code == 2
    assert "[buyers.stranger]" in stranger.err
    assert ask(market_home, "dispute", "--buyer", "stranger").code == 2


def test_a_target_that_stands_in_the_corpus_is_refused(
    tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """A buyer's file with one text of the corpus, with one text only, or that is not there, stops the run and names the buyer."""
    home = copied(tiny_home)
    asked(home)
    site = opened(home)
    version, tokens = made(home, "corpus"), made(home, "tokens")
    tokenizer = load_tokenizer(site.home.tokenizer_path, tokens["tokenizer_digest"])
    assert set(buyers.targets(site, version, tokenizer)["buyers"]) == set(POOLS)
    before = buyers.target_inputs(site)
    known = audit_trail.records(site, version["version"], "text")["text"][0]
    rows = [json.dumps({"text": text, "licence": "CC0-1.0"}) for text in (known, *ROADS)]
    (home / "acme.jsonl").write_text("\n".join(rows))
    assert buyers.target_inputs(site) != before
    with pytest.raises(TargetError, match="1 contents of the target of buyer 'acme' are in the corpus"):  # fmt: skip
        buyers.targets(site, version, tokenizer)
    (home / "acme.jsonl").write_text(rows[1])
    with pytest.raises(TargetError, match="at least 2"):
        buyers.targets(site, version, tokenizer)
    (home / "acme.jsonl").unlink()
    with pytest.raises(TargetError, match="'acme' does not exist"):
        buyers.targets(site, version, tokenizer)
    assert load_buyer_target(site.home, "zeta") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[buyers.acme]\npool_microunits = 1", "needs a target"),
        ('[buyers.acme]\ntarget = "a"\ncurrency = "euro"', r"\[buyers\.\*\] currency"),
        ('[buyers."a b"]\ntarget = "a"', "buyer 'a b'"),
        ('[buyers.acme]\ntarget = "a"\nsplit = "entity"', "unknown key 'split'"),
        ("buyers = 1", "[buyers.NAME]"),
    ],
)
def test_a_buyer_that_cannot_be_meant_is_refused(text: str, message: str) -> None:
    """No target, a wrong currency, a name that is no folder, a key that holds for all buyers alike."""
    with pytest.raises(ConfigError, match=message):
        parse(text)


def retrained(directory: Path, _: int) -> dict:
    """In place of the launcher: the run's entry, in this process."""
    assert retrain(load_run(directory / "run.json"), directory) == 0
    return {}


def again(site: Site, asset: str, step, *parts: str, **more) -> None:
    """A step called as its asset calls it, and its result kept as the asset's newest."""
    version, values = step(site, *(made(site.home.path, part) for part in parts), **more)
    store(site.home.results, Result(asset, "test", version, values))


def test_a_target_that_changes_is_measured_anew_and_payouts_are_corrected_not_changed(
    market_home: Path, copied: Callable[[Path], Path]
) -> None:
    """After a new file of one buyer its earlier entry stays, a correction leads to the new prices, and nobody else's numbers move."""
    home = copied(market_home)
    site, k_owner = opened(home), corpus_keys(opened(home)).k_owner
    before = made(home, "prices")
    tables = {path.name: path.read_bytes() for path in (home / "tables").glob("*.parquet")}
    entries = len(list(open_ledger(site).entries()))
    rows = [json.dumps({"text": text, "licence": "CC0-1.0"}) for text in (*BANKS[2:], *ROADS[1:])]
    (home / "acme.jsonl").write_text("\n".join(rows))
    again(site, "target", corpus.target, "corpus", "tokens")
    parts = ("corpus", "clusters", "tokens", "target", "evaluation_plan")
    again(site, "owner_values", valuation.owner_values, *parts, run=retrained)
    parts = ("corpus", "tokens", "influence", "owner_values", "evaluation_plan")
    again(site, "values", pricing.value_table, *parts)
    again(site, "prices", pricing.prices, "values")
    changed = {path.name for path in (home / "tables").glob("*.parquet") if path.read_bytes() != tables[path.name]}  # fmt: skip
    assert changed == {"buyer-acme-values.parquet", "buyer-acme-prices.parquet"}
    log = list(open_ledger(site).entries())
    kinds = [entry["kind"] for entry in log[entries:]]
    assert kinds.count("price_correction") == 1
    (correction,) = (entry["body"] for entry in log if entry["kind"] == "price_correction")
    assert correction["buyer"] == buyers.marked(site, "acme")["buyer"]
    paid = pl.read_parquet(tables["buyer-acme-prices.parquet"])
    now = pl.read_parquet(home / "tables/buyer-acme-prices.parquet")
    for name, amount in now.select("subject", "price_microunits").iter_rows():
        gap = correction["microunits"].get(keyed(k_owner, name.encode()).hex(), 0)
        assert dict(paid.select("subject", "price_microunits").iter_rows())[name] + gap == amount
    assert now["price_microunits"].sum() == POOLS["acme"]
    old = buyers.seen_by(before, "acme")
    assert log[old["entry"]]["body"]["table"] == correction["before"]
    assert audit_trail.prices(site, made(home, "prices")) == []
