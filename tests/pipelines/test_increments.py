"""A second delivery: old coalitions are found in the bank, few are trained, and values equal a full recomputation's within the interval."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from graph_based import LATER
from graph_commands import environment, ledger, values

from pipelines.reports.parts import NotAvailable
from pipelines.results import Result, latest, store
from pipelines.site import Site, open_site
from pipelines.steps import corpus, disputes, increments, pricing, valuation
from pipelines.steps.owners import Bank
from pipelines.storage.errors import ConfigError
from pipelines.storage.terms import ValuesConfig
from trainer.spec import load_run, save_run
from valuation import sampled_with_interval
from valuation.bank import load_utilities
from valuation.lots import Lots
from valuation.proxy import retrain

PARTS = ("corpus", "clusters", "tokens", "target", "evaluation_plan")


def opened(home: Path, groups: int = 3, update: str = "sampled") -> Site:
    """The home, with other lots or another way of updating."""
    site = open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)
    config = dataclasses.replace(site.config, values=dataclasses.replace(site.config.values, update=update))  # fmt: skip
    return dataclasses.replace(site, config=config, size=dataclasses.replace(site.size, groups=groups))  # fmt: skip


def trained(directory: Path, _world: int) -> dict[str, Any]:
    """The proxy run, in this process."""
    if not (directory / "result.json").exists():
        assert retrain(load_run(directory), directory) == 0
    return {}


def valued(site: Site, made_in: Path) -> Result:
    """Owner values of the version that a home was left at, kept as the newest."""
    parts = [latest(made_in / "results", name) for name in PARTS]
    assert parts[0] is not None
    corpus.clusters(site, parts[0])
    digest, found = valuation.owner_values(site, *parts, trained)  # type: ignore[arg-type]
    result = Result("owner_values", "0" * 64, digest, found)
    store(site.home.results, result)
    return result


def test_a_delivery_trains_only_coalitions_with_the_new_lot(
    ask, based_home: Path, delivered_home: Path
) -> None:
    """At tiny: 8 of 16 coalitions are those of before, bit for bit; the lots of before stay; one lot holds what came."""
    before, after = values(based_home, "owner_values"), values(delivered_home, "owner_values")
    assert (before["update"]["calls"], before["update"]["trainings"]) == (8, 16)  # under two seeds
    assert before["update"]["why"] == "there is no earlier computation to go on from"
    update = after["update"]
    assert {name: update[name] for name in ("calls", "reused", "predicted", "possible", "full")} == {
        "calls": 8, "reused": 8, "predicted": 0, "possible": 16, "full": before["run"]
    }  # fmt: skip
    assert after["method"] == "shapley.exact"
    assert [lot["tokens"] for lot in after["groups"]][:3] == [lot["tokens"] for lot in before["groups"]]  # fmt: skip
    assert after["groups"][3]["owners"] == list(LATER)
    old, new = (load_utilities(home / "runs" / found["run"]) for home, found in ((based_home, before), (delivered_home, after)))  # fmt: skip
    np.testing.assert_array_equal(new.nll_CQ[:8], old.nll_CQ)
    assert after["efficiency_error"] < 1e-9
    seeds = before["seeds"]
    assert after["seeds"] == seeds
    assert seeds[0] == load_run(delivered_home / "runs" / after["run"]).seed != values(delivered_home, "evaluation_plan")["seeds"]["proxy"]  # fmt: skip
    assert update["plan"] == values(based_home, "evaluation_plan")["digest"]
    (told,) = [entry["body"]["update"] for entry in ledger(delivered_home) if entry["kind"] == "values" and "update" in entry["body"]]  # fmt: skip
    assert told == {name: update[name] for name in ("full", "calls", "reused", "predicted", "possible")}  # fmt: skip
    assert not [entry for entry in ledger(based_home) if "update" in entry["body"]]
    found = latest(delivered_home / "results", "owner_values")
    assert found is not None
    assert "of 16 coalitions 8 trained now, 8 found in the bank, none predicted" in increments.sentence(found)  # fmt: skip
    assert increments.counts(found)["utility calls"] == 8
    explained = ask(delivered_home, "explain", "lincoln").out
    assert f"seed {seeds[0]}, {seeds[1]} " in explained
    assert "8 found in the bank" in explained
    again = ask(delivered_home, "dispute", "--retrain", "3")
    assert again.code == 0, again.out
    assert f"coalition 8, seed {seeds[1]} yes trained again" in again.out
    # Found in the bank, and trained here from the tokens of the new version.
    assert f"coalition 1, seed {seeds[1]} yes trained again" in again.out
    assert "yes receipts" in ask(delivered_home, "verify").out


@pytest.mark.parametrize("lots", [4, pytest.param(5, marks=pytest.mark.slow)])
def test_an_update_at_a_third_of_the_calls_holds_within_its_intervals(
    lots: int, based_home: Path, delivered_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Five or six lots: at most 0.3 trained, others predicted; every value within its interval of all coalitions trained; sums exact."""
    home, old, new = copied(delivered_home), 1 << lots, 2 << lots
    (home / "results/owner_values/latest.json").unlink()
    full = valued(opened(home, groups=lots), based_home)
    assert (full["update"]["calls"], full["update"]["possible"]) == (old, old)
    sampled = valued(opened(home, groups=lots), delivered_home)
    update, calls = sampled["update"], {4: 9, 5: 19}[lots]
    assert (update["calls"], update["reused"], update["predicted"], update["possible"]) == (calls, old, old - calls, new)  # fmt: skip
    assert calls <= 0.3 * new
    assert (sampled["method"], sampled["coalitions"]) == ("shapley.updated", old + calls)
    assert sampled["efficiency_error"] < 1e-9
    _disputed(opened(home, groups=lots), sampled)
    exact = valued(opened(home, groups=lots, update="exact"), delivered_home)
    assert (exact["update"]["calls"], exact["update"]["reused"], exact["update"]["predicted"]) == (old - calls, old + calls, 0)  # fmt: skip
    if lots == 5:  # all of them from nothing are those of the bank, bit for bit
        again = load_run(home / "runs" / exact["run"])
        save_run(again, home / "runs/again")
        assert retrain(again, home / "runs/again") == 0
        np.testing.assert_array_equal(load_utilities(home / "runs/again").nll_CQ, load_utilities(home / "runs" / exact["run"]).nll_CQ)  # fmt: skip
    for kind in ("groups", "owners"):
        for mine, truth in zip(sampled[kind], exact[kind], strict=True):
            assert mine["low"] <= truth["value"] <= mine["high"]
            assert mine["se"] >= truth["se"]
    plan = latest(home / "results", "evaluation_plan")
    assert plan is not None
    bank = Bank(opened(home, groups=lots), sampled, plan)
    assert sum(row.trained for row in bank.coverage()) == old + calls
    assert (bank.gains[1] > 0).all()
    assert bank.checks() == NotAvailable(reason="not every coalition was trained")
    nothing = valued(opened(home, groups=lots, update="exact"), delivered_home)
    assert nothing.data_version == exact.data_version
    counted = {name: nothing["update"][name] for name in ("calls", "trainings", "reused")}
    assert counted == {"calls": 0, "trainings": 0, "reused": exact["coalitions"]}


def test_more_lots_than_are_enumerated_are_valued_from_sampled_orders(
    based_home: Path, copied: Callable[[Path], Path]
) -> None:
    """`[values] lots = 9` at tiny: four orders in place of 512 coalitions, wider errors, sums exact, recomputed by a dispute, and no update behind it."""
    home = copied(based_home)
    (home / "results/owner_values/latest.json").unlink()
    site = opened(home)
    config = dataclasses.replace(site.config, values=dataclasses.replace(site.config.values, lots=9))  # fmt: skip
    site = dataclasses.replace(site, config=config)
    found = valued(site, based_home)
    assert (found["method"], len(found["groups"])) == ("shapley.sampled", 9)
    assert found["coalitions"] <= 4 * 8 + 2
    assert found["update"]["predicted"] == 0
    assert found["efficiency_error"] < 1e-9
    assert sum(owner["value"] for owner in found["owners"]) == pytest.approx(found["loss_empty"] - found["loss_all"])  # fmt: skip
    plan = latest(home / "results", "evaluation_plan")
    assert plan is not None
    bank = Bank(site, found, plan)
    assert (bank.gains[1] > 0).any()  # variance over orders
    again = sampled_with_interval(bank.nll, bank.tokens_Q, bank.orders)
    for name, column in (("value", again.values_n), ("se", again.se_n), ("low", again.ci_low_n), ("high", again.ci_high_n)):  # fmt: skip
        assert [lot[name] for lot in found["groups"]] == pytest.approx(column.tolist(), rel=1e-9)
    assert found["total_se"] == pytest.approx(again.total_se)
    assert bank.checks() == NotAvailable(reason="not every coalition was trained")
    _recomputed(site, found)
    again = valued(site, based_home)
    assert again["update"]["why"] == "9 lots are more than the 8 that are enumerated"
    assert again.data_version == found.data_version


def _recomputed(site: Site, found: Result) -> None:
    """A dispute finds the published values in the bank of sampled orders."""
    parts = [latest(site.home.results, name) for name in ("corpus", "tokens", "influence")]
    plan = latest(site.home.results, "evaluation_plan")
    pricing.value_table(site, *parts, found, plan)  # type: ignore[arg-type]
    assert disputes._values(site, found, _held(site, found), pl.read_parquet(site.home.table("values")), 0)[1]  # fmt: skip


def _held(site: Site, found: Result) -> Any:
    """The holdings that a dispute counts by itself."""
    (_, holds, said), held = disputes.holdings(site, found)
    assert holds, said
    return held


def _disputed(site: Site, sampled: Result) -> None:
    """The published values, and their errors with what prediction adds, are recomputed from what was trained; a changed one is found."""
    parts = [latest(site.home.results, name) for name in ("corpus", "tokens", "influence")]
    plan = latest(site.home.results, "evaluation_plan")
    pricing.value_table(site, *parts, sampled, plan)  # type: ignore[arg-type]
    table, held = pl.read_parquet(site.home.table("values")), _held(site, sampled)
    assert disputes._values(site, sampled, held, table, 0)[1]
    for kind in ("lot", "owner"):
        lower = pl.when(subject_kind=kind).then(pl.col("ci_low_nano") + 1000).otherwise("ci_low_nano")  # fmt: skip
        assert not disputes._values(site, sampled, held, table.with_columns(ci_low_nano=lower), 0)[
            1
        ]
    low = sampled["owners"][0]["low"]
    sampled["owners"][0]["low"] += 1e-3  # what the table's rows of owners were made from
    pricing.value_table(site, *parts, sampled, plan)  # type: ignore[arg-type]
    assert not disputes._values(site, sampled, held, pl.read_parquet(site.home.table("values")), 0)[
        1
    ]
    sampled["owners"][0]["low"] = low
    pricing.value_table(site, *parts, sampled, plan)  # type: ignore[arg-type]
    _, holds, said = disputes._bank(site, sampled, 0)
    assert holds
    assert f"{sampled['update']['predicted']} of them predicted" in said


def test_what_makes_all_be_computed_anew_is_said(
    based_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Each rule of a full computation, beside an update that is none of them."""
    home = copied(based_home)
    target = latest(home / "results", "target")
    found = latest(home / "results", "owner_values")
    assert target is not None
    assert found is not None
    leaves = np.frombuffer((home / found["update"]["file"]).read_bytes(), "<i8")
    count = int((leaves >= 0).sum())
    asked: list[int] = []

    def grown(site: Site, extra: int, tokens: int, *, lost: int = 0, personal: int = 0) -> increments.Grown:  # fmt: skip
        """The lots when so many records of so many tokens came, and so many of the old ones are not valued any more."""
        index_N = np.arange(len(leaves) + extra)
        valued_N = np.append(leaves >= 0, np.ones(extra, bool))
        valued_N[np.flatnonzero(valued_N)[:lost]] = False
        tokens_N = np.append(np.full(len(leaves), 100), np.full(extra, tokens))
        personal_N = np.append(np.zeros(len(leaves) + extra - personal, bool), np.ones(personal, bool))  # fmt: skip

        def cut(which_N: Any, most: int) -> Lots:
            asked.append(most)
            lot_N = np.where(which_N, np.arange(len(which_N)) % most, -1)
            lot_N[which_N & (np.arange(len(which_N)) == np.flatnonzero(which_N)[0])] = 0
            return Lots(lot_N, np.bincount(lot_N[which_N], weights=tokens_N[which_N], minlength=most).astype(np.int64), np.zeros(most, bool))  # fmt: skip

        return increments.grown(site, target, (index_N, valued_N, tokens_N, personal_N), cut)

    site = opened(home)
    update = grown(site, 4, 10)
    assert (update.full, update.first, len(update.lots.ids), asked) == (found["run"], 3, 4, [1])
    assert len(grown(site, 4, 10, personal=2).lots.ids) == 5
    unchanged = grown(site, 0, 0)
    assert (unchanged.first, unchanged.full, len(unchanged.lots.ids), unchanged.before) == (None, "", 3, (found["run"],))  # fmt: skip
    assert unchanged.seeds == tuple(found["seeds"])
    for why, made in (
        ("1 records of the earlier lots are gone", grown(site, 4, 10, lost=1)),
        ("more than half", grown(site, 2, count * 100)),
        ('update is "anew"', grown(opened(home, update="anew"), 4, 10)),
        ("size, base model, code", grown(opened(home, groups=4), 4, 10)),
    ):
        assert why in made.why
        assert made.full == ""
    (home / found["update"]["file"]).write_bytes(leaves[::-1].tobytes())
    assert "not those that their run names" in grown(site, 4, 10).why
    (home / found["update"]["file"]).unlink()
    assert "not there any more" in grown(site, 4, 10).why
    (home / "results/owner_values/latest.json").unlink()
    assert "no earlier computation" in grown(site, 4, 10).why


def test_an_unknown_way_of_updating_is_refused() -> None:
    """Expected and got."""
    with pytest.raises(ConfigError, match="update: expected one of sampled, exact, anew, got 'never'"):  # fmt: skip
        ValuesConfig(update="never")
