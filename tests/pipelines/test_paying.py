"""What stands behind a payment: the proxy and its transfer in the ledger, on receipts and in words."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from graph_commands import environment

from pipelines.results import Result, latest, store
from pipelines.runs import started
from pipelines.site import Site, open_site
from pipelines.steps import audit_trail, pricing, valuation
from pipelines.steps import provenance as steps
from pipelines.steps.ledger import open_ledger
from provenance import jcs, parse_json
from valuation import shapley_with_interval
from valuation.bank import load_seeds
from valuation.errors import EvaluationError
from valuation.transfer import Transfer, proxy_digest, read_transfers, write_transfers


def opened(home: Path) -> Site:
    """A home of the tests, opened as the graph opens it."""
    return open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)


def made(site: Site, *assets: str) -> list[Result]:
    """The newest results of assets."""
    found = [latest(site.home.results, asset) for asset in assets]
    assert all(found)
    return [one for one in found if one]


def configured(home: Path, key: str, value: str) -> None:
    """Set a key of dataworth.toml that stands in it, set or as an example."""
    path = home / "dataworth.toml"
    text, count = re.subn(rf"(?m)^(# )?{key} = .*$", f'{key} = "{value}"', path.read_text(), count=1)  # fmt: skip
    assert count == 1
    path.write_text(text)


def valued_again(site: Site) -> Result:
    """The value table made anew, as the asset makes it."""
    digest, values = pricing.value_table(
        site, *made(site, "corpus", "tokens", "influence", "owner_values", "evaluation_plan")
    )
    result = Result("values", "test", digest, values)
    store(site.home.results, result)
    return result


def test_receipts_name_the_proxy_and_the_transfer_that_was_measured_of_it(
    ask, tiny_home: Path
) -> None:
    """Without any setting ledger, receipt, `explain` and report tell the package's record of the size's own proxy, with the digest of the run's settings."""
    site = opened(tiny_home)
    valued, values = made(site, "owner_values", "values")
    run = parse_json((site.home.runs / valued["run"] / "run.json").read_bytes())
    body = open_ledger(site).entry(values["entry"])["body"]
    assert body["proxy_digest"] == proxy_digest(run)
    record = read_transfers(pricing.STUDIED)[proxy_digest(run)]
    assert body["transfer"] == record.sentence
    assert body["transfer_record"] == dataclasses.asdict(record)
    for said in (ask(tiny_home, "verify", "wilson"), ask(tiny_home, "explain", "wilson")):
        assert said.code == 0
        assert f"settings {proxy_digest(run)}" in said.out
        assert record.sentence in said.out
        assert all(str(seed) in said.out for seed in valued["seeds"])
        assert "2 seeds (initial weights and order)" in re.sub(r"[\s│]+", " ", said.out)
    assert body["seeds"] == valued["seeds"]
    page = (tiny_home / "reports/latest.html").read_text()
    assert f"settings {proxy_digest(run)}; against a larger model: {record.sentence}" in page


def test_an_owner_that_isnt_told_from_zero_is_told_so(
    ask, tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Exactly the owners whose published interval holds zero are told so by `explain` and `payouts`; a wider interval makes one more."""
    home, words = copied(tiny_home), "not distinguishable from zero at the 95 % level"
    path = home / "tables/values.parquet"
    table = pl.read_parquet(path)
    is_owner = pl.col("subject_kind") == "owner"
    first, counts = table.filter(is_owner)["subject_id"][0], []
    for low in (1, -1):
        ends = {"ci_low_nano": low, "ci_high_nano": 10**9}
        here = is_owner & (pl.col("subject_id") == first)
        table = table.with_columns(pl.when(here).then(end).otherwise(name).alias(name) for name, end in ends.items())  # fmt: skip
        table.write_parquet(path)
        counts.append(squeezed(ask(home, "explain", first).out).count(words))
    assert counts == [0, 2]  # the row, and why it is paid
    unclear = is_owner & (pl.col("ci_low_nano") <= 0) & (pl.col("ci_high_nano") >= 0)
    assert squeezed(ask(home, "payouts").out).count("not distinguishable") == len(table.filter(unclear))  # fmt: skip


def squeezed(text: str) -> str:
    """A table's text on one line, without its boxes."""
    return re.sub(r"[\s│]+", " ", text)


def test_values_are_means_over_the_plans_seeds_and_their_errors_contain_the_spread(
    tiny_home: Path,
) -> None:
    """Every coalition stands in the bank under each committed seed; each lot's error is that of the seeds and the target together, and wider than the target's."""
    found, plan = made(opened(tiny_home), "owner_values", "evaluation_plan")
    assert found["seeds"] == [plan["seeds"]["proxy"], plan["seeds"]["proxy-2"]]
    banks = load_seeds(tiny_home / "runs" / found["run"])
    assert len(banks) == 2
    nll_SCQ = np.stack([bank.nll_CQ for bank in banks])
    again, narrow = (
        shapley_with_interval(nll, banks[0].tokens_Q) for nll in (nll_SCQ, nll_SCQ.mean(axis=0))
    )
    assert (found["method"], found["total_se"]) == (again.method, pytest.approx(again.total_se))
    for row, lot in enumerate(found["groups"]):
        assert lot["value"] == pytest.approx(again.values_n[row], abs=1e-12)
        assert lot["se"] == pytest.approx(again.se_n[row])
        assert lot["low"] == pytest.approx(again.ci_low_n[row])
        assert lot["high"] == pytest.approx(again.ci_high_n[row])
        assert lot["se"] > narrow.se_n[row]
        assert lot["se"] ** 2 == pytest.approx(narrow.se_n[row] ** 2 + lot["seed_se"] ** 2)


def test_the_studys_file_has_a_record_of_the_sizes_own_proxy(tiny_home: Path) -> None:
    """What `make accept STUDY=owners-transfer-sizes` measured is found by the digest of the run that this very graph made; there are records of three more sizes."""
    found = read_transfers(pricing.STUDIED)
    (valued,) = made(opened(tiny_home), "owner_values")
    run = parse_json((tiny_home / "runs" / valued["run"] / "run.json").read_bytes())
    assert found[proxy_digest(run)].owners == 5
    assert len(found) == 4
    assert proxy_digest({**run, "steps": run["steps"] + 1}) not in found


def test_a_measured_transfer_is_on_every_receipt(
    ask, tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """The file that is set goes before the package's: a record of this very proxy is told by `verify` and `explain` and hashed with the values, one of another proxy is not."""
    home = copied(tiny_home)
    configured(home, "transfer", "transfer.json")
    site = opened(home)
    with pytest.raises(EvaluationError, match="expected a transfer file"):
        pricing.transfer_inputs(site)
    (before,) = made(site, "values")
    digest = open_ledger(site).entry(before["entry"])["body"]["proxy_digest"]
    other = Transfer(
        proxy="ab" * 32, parameters=7_200_000, owners=5, seeds=2, rank=600_000, rank_low=-1_000_000, rank_high=1_000_000,
        moved=12_456, moved_low=1_534, moved_high=19_846, measured_on="speeches", command="make accept",
    )  # fmt: skip
    write_transfers(home / "transfer.json", [other])
    entry = valued_again(site)["entry"]
    unknown = open_ledger(site).entry(entry)["body"]
    assert unknown["transfer"] == "not measured"  # the file that is set has no record of this proxy
    assert "transfer_record" not in unknown
    assert "not measured" in ask(home, "explain", "wilson").out
    record = dataclasses.replace(other, proxy=digest)
    write_transfers(home / "transfer.json", [other, record])
    assert record.sentence in pricing.transfer_inputs(site)["transfer"].values()
    values = valued_again(site)
    body = open_ledger(site).entry(values["entry"])["body"]
    assert body["transfer_record"] == dataclasses.asdict(record)
    corpus, tokens, prices, checkpoint = made(site, "corpus", "tokens", "prices", "checkpoint")
    steps.receipts(site, corpus, tokens, values, prices, checkpoint)
    assert record.sentence in ask(home, "verify", "wilson").out
    assert record.sentence in ask(home, "explain", "wilson").out


def untrained(_: Path, __: int) -> dict:
    """In place of the launcher where the coalitions are trained already: `owner_values` must find the run that is there."""
    return {}


def test_shells_of_one_legal_entity_are_paid_as_one_and_nothing_is_trained_again(
    ask, tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Two owners declared one entity: its value is their sum, receipts and `explain` tell it, the rule's digest changes, the bank stays."""
    home = copied(tiny_home)
    pair = ("wilson", "registry")
    configured(home, "split", "entity")
    with (home / "dataworth.toml").open("a") as file:
        file.writelines(f'\n[owners.{owner}]\nentity = "Acme"\n' for owner in pair)
    site = opened(home)
    before, old_prices = made(site, "owner_values", "prices")
    parts = made(site, "corpus", "clusters", "tokens", "target", "evaluation_plan")
    digest, found = valuation.owner_values(site, *parts, untrained)
    assert (digest, found["run"]) == (before.data_version, before["run"])
    store(site.home.results, Result("owner_values", "test", digest, found))
    values = valued_again(site)
    table = pl.read_parquet(home / "tables/values.parquet")
    nano = {row["subject_id"]: row["value_nano"] for row in table.iter_rows(named=True) if row["subject_kind"] in ("owner", "entity")}  # fmt: skip
    assert nano["entity:Acme"] == sum(nano[owner] for owner in pair)
    version, told = pricing.prices(site, values)
    store(site.home.results, Result("prices", "test", version, told))
    assert told["rule_digest"] != old_prices["rule_digest"]
    assert told["sum"] == told["pool"]
    assert "value_total" not in open_ledger(site).entry(told["entry"])["body"]
    rule = open_ledger(site).entry(told["rule_entry"])["body"]
    assert (rule["version"], rule["split"]) == (3, "entity")
    assert "Acme" not in str(rule)
    assert "wilson" not in str(rule)
    corpus, tokens, prices, checkpoint = made(site, "corpus", "tokens", "prices", "checkpoint")
    steps.receipts(site, corpus, tokens, values, prices, checkpoint)
    said = ask(home, "verify", "wilson").out
    assert "value of entity entity:Acme" in said
    assert "dataworth dispute recomputes it" in said
    assert "priced as one with the other owners of entity:Acme" in ask(home, "explain", "wilson").out  # fmt: skip
    disputed = ask(home, "dispute")
    assert disputed.code == 0, disputed.out
    assert audit_trail.prices(site, prices) == []
    (held,) = made(site, "owner_values")
    held["entities"][0]["records"] += 1
    store(site.home.results, held)
    disputed = ask(home, "dispute")
    assert disputed.code == 1
    assert f"{held['entities'][0]['id']}'s differ" in disputed.out


def test_a_home_whose_bank_was_trained_in_another_order_is_told_so(
    ask, tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Its values are recomputed and called remade by the next run, and its coalitions are not trained again as if they were of this order."""
    home = copied(tiny_home)
    site = opened(home)
    (valued,) = made(site, "owner_values")
    assert "remade" not in valued.values
    assert valuation.remade_bank(site) == ""
    path = site.home.runs / valued["run"] / "run.json"
    document = parse_json(path.read_bytes())
    assert document["config"]["extra"].pop("order") == 2
    document["versions"]["configuration"] = "0" * 64
    path.write_bytes(jcs(document))
    folder = path.parent.rename(site.home.runs / "proxy-000000000000")
    started(site, folder, made(site, "evaluation_plan")[0])  # as it was entered then
    store(site.home.results, dataclasses.replace(valued, values={**valued.values, "run": folder.name}))  # fmt: skip
    valued_again(site)
    assert "ordered in the order of leaf indices, these by content (2)" in valuation.remade_bank(site)  # fmt: skip
    said = ask(home, "dispute")
    assert said.code == 0, said.out
    said = ask(home, "dispute", "--retrain", "1")
    assert said.code != 0
    assert "not trained in the order by content (2)" in said.err + said.out
    assert not list((home / "runs").glob("dispute-*"))
