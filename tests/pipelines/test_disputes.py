"""What a dispute takes for committed, what it says of settings that changed since, and of files that are gone."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import polars as pl
import pytest
from graph_commands import environment, ledger

from pipelines.results import Result, latest, store
from pipelines.runs import started
from pipelines.site import Site, open_site
from pipelines.steps import committed, pricing
from pipelines.steps.ledger import enter


@pytest.fixture
def home(tiny_home: Path, copied: Callable[[Path], Path]) -> Path:
    """A finished home of this test's own."""
    return copied(tiny_home)


def opened(home: Path) -> Site:
    """A home of the tests, opened as the graph opens it."""
    return open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)


def newest(home: Path, asset: str) -> Result:
    """The newest result of an asset."""
    found = latest(home / "results", asset)
    assert found is not None
    return found


def with_run(home: Path, name: str) -> Path:
    """The run behind the owners' values, copied under another name that the result then tells; its folder."""
    found = newest(home, "owner_values")
    folder = home / "runs" / name
    shutil.copytree(home / "runs" / found["run"], folder)
    store(home / "results", dataclasses.replace(found, values={**found.values, "run": name}))
    return folder


# --- what counts as committed ----------------------------------------------------------------------------------------


def test_a_run_that_was_entered_after_its_values_counts_for_nothing(ask, home: Path) -> None:
    """Same bank, same lots, same losses under another name: the ledger names that run, but behind the values that it would stand for."""
    folder = with_run(home, "proxy-ffffffffffff")
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(r"run NO proxy-f+, digest .*the ledger names none", said.out)
    late = started(opened(home), folder, newest(home, "evaluation_plan"))
    said = ask(home, "dispute")
    assert said.code == 1
    own = newest(home, "values")["entry"]
    assert f"entered in entry {late}, expected before its values were, in entry {own}" in said.out
    # A second entry of the same values behind it is not their own: the first one is.
    body = dict(ledger(home)[own]["body"])
    later = enter(opened(home), "values", body | {"transfer": "another word"})
    found = newest(home, "values")
    store(home / "results", dataclasses.replace(found, values={**found.values, "entry": later}))
    said = ask(home, "dispute")
    assert said.code == 1
    assert f"expected before its values were, in entry {own}" in said.out


def test_a_run_with_two_digests_in_the_ledger_is_refused_by_both(ask, home: Path) -> None:
    """A run.json that was changed and entered anew: neither entry counts, and both are named."""
    run = newest(home, "owner_values")["run"]
    first = next(e["body"]["run_digest"] for e in ledger(home) if e["body"].get("run") == run)
    path = home / "runs" / run / "run.json"
    path.write_bytes(path.read_bytes() + b"\n")
    late = started(opened(home), path.parent, newest(home, "evaluation_plan"))
    second = ledger(home)[late]["body"]["run_digest"]
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(rf"run NO .*none of them counts: {first[:16]} in entry \d+, {second[:16]} in entry {late}", said.out)  # fmt: skip
    # The file as it was doesn't help: who entered the second one has to say why.
    path.write_bytes(path.read_bytes()[:-1])
    assert ask(home, "dispute").code == 1


def test_a_value_table_that_the_ledger_does_not_name_is_said(ask, home: Path) -> None:
    """Other bytes with the same numbers are not what was entered; those that an erasure entered later are."""
    path = home / "tables/values.parquet"
    pl.read_parquet(path).write_parquet(path, compression="uncompressed")
    said = ask(home, "dispute")
    assert said.code == 1
    table = sha256(path.read_bytes()).hexdigest()
    assert re.search(rf"ledger NO the value table is {table[:16]}; .*the ledger names [0-9a-f]{{16}} in entry \d+", said.out)  # fmt: skip
    body = ledger(home)[newest(home, "values")["entry"]]["body"]
    late = enter(opened(home), "values", {**body, "table": table, "erasure": True})
    said = ask(home, "dispute")
    assert said.code == 0, said.out
    assert f"entry {late} names the table {table[:16]}" in said.out


# --- settings of then ------------------------------------------------------------------------------------------------


def configured(home: Path, **changed: str) -> None:
    """Set keys of dataworth.toml that stand in it, set or as an example."""
    path = home / "dataworth.toml"
    text = path.read_text()
    for key, value in changed.items():
        text, count = re.subn(rf"(?m)^(# )?{key} = .*$", f"{key} = {value}", text, count=1)
        assert count == 1, key
    path.write_text(text)


def test_a_dispute_recomputes_under_the_settings_of_its_time(ask, home: Path) -> None:
    """Another pool, floor, split, size and a buyer's licence in today's file change no finding; each is said in one line."""
    before = ask(home, "dispute")
    assert before.code == 0, before.out
    assert "settings yes those of these values, digest" in before.out
    assert "changed since" not in before.out
    configured(home, pool_microunits="5", floor_microunits="3", split='"entity"')
    with (home / "dataworth.toml").open("a") as file:
        file.write('\n[owners.wilson]\nname = "Jane Doe"\nentity = "Acme"\n')
    after = ask(home, "dispute", DATAWORTH_SIZE="small")
    assert after.code == 0, after.out + after.err
    (said,) = re.findall(r"settings changed since: (.*?) bank yes", after.out)
    for one in (
        "[pricing] pool_microunits 1000000000 → 5", "[pricing] floor_microunits 0 → 3", "[pricing] split first → entity",
        "[owners.wilson] entity not set → Acme", "size tiny → small",
    ):  # fmt: skip
        assert one in said
    kept = [path.read_text() for path in (home / "plans").glob("settings-*.json")]
    assert kept
    assert "Jane Doe" not in said + "".join(kept)
    # No pool at all: the payout of then is disputed all the same.
    configured(home, pool_microunits="0", split='"first"')
    path = home / "dataworth.toml"
    path.write_text(path.read_text().replace("pool_microunits = 0\n", ""))
    said = ask(home, "dispute")
    assert said.code == 0, said.out + said.err
    assert "pool_microunits 1000000000 → not set" in said.out
    assert "prices yes" in said.out
    # `explain` and `verify` speak of the rule that was paid by, too.
    assert "why this price" in ask(home, "explain", "wilson").out


def test_settings_that_are_not_to_be_had_are_refused_by_digest(ask, home: Path) -> None:
    """Gone or altered, they are today's where the digest says so; else the refusal has both digests, and nothing is recomputed by others."""
    (path,) = (home / "plans").glob("settings-*.json")
    data = path.read_bytes()
    wanted = ledger(home)[newest(home, "values")["entry"]]["body"]["settings"]
    path.unlink()
    assert ask(home, "dispute").code == 0  # dataworth.toml is what it was
    configured(home, pool_microunits="5")
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(rf"settings NO expected the settings .* digest {wanted[:16]}, got no such file, and the dataworth.toml of today gives [0-9a-f]{{16}}:", said.out)  # fmt: skip
    assert "prices yes" not in said.out
    path.write_bytes(data.replace(b'"floor_microunits":0', b'"floor_microunits":7'))
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(r"got digest [0-9a-f]{16} there", said.out)


def test_a_pool_that_was_set_after_the_values_is_the_ledgers_rule(ask, home: Path) -> None:
    """Prices made again by another rule are recomputed by that rule, not by the settings kept with the values; and it came late."""
    configured(home, pool_microunits="7_000_000")
    site = opened(home)
    version, told = pricing.prices(site, newest(home, "values"))
    store(site.home.results, Result("prices", "test", version, told))
    configured(home, pool_microunits="8")
    said = ask(home, "dispute")
    assert "prices yes" in said.out
    assert "rule NO" in said.out
    assert "pool_microunits 7000000 → 8" in said.out


def test_entities_of_before_settings_were_kept_are_found_by_digest_or_refused(home: Path) -> None:
    """An entry without settings: today's are taken where they give the rule's digest, then those of the result; else both digests are said."""
    configured(home, split='"entity"')
    with (home / "dataworth.toml").open("a") as file:
        file.write('\n[owners.wilson]\nentity = "Acme"\n[owners.lincoln]\nentity = "Acme"\n')
    site = opened(home)
    rule = pricing.rule_of(site)
    valued = newest(home, "owner_values")
    told = Result("owner_values", "", "", {**valued.values, "entity_of": {"wilson": "Acme", "lincoln": "Acme"}})  # fmt: skip
    then, said = committed.site_of(site, {}, rule, valued, "tiny")
    assert then.config == site.config
    assert "made before settings were kept" in said
    path = home / "dataworth.toml"
    path.write_text(path.read_text().replace('[owners.lincoln]\nentity = "Acme"\n', ""))
    site = opened(home)
    with pytest.raises(committed.SettingsError, match=rf"{rule.entities[:16]}, which the rule .* got [0-9a-f]{{16}} by"):  # fmt: skip
        committed.site_of(site, {}, rule, valued, "tiny")
    then, _ = committed.site_of(site, {}, rule, told, "tiny")
    assert then.config.entity_of == {"wilson": "Acme", "lincoln": "Acme"}
    plain, _ = committed.site_of(site, {}, dataclasses.replace(rule, split="first", entities=""), valued, "small")  # fmt: skip
    assert (plain.config.pricing.split, plain.size.name) == ("first", "small")


# --- what is gone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "gone", "still"),
    [
        ("lots", "holdings", ("run", "ledger", "settings", "bank", "prices", "rule")),
        ("bank", "bank", ("run", "ledger", "settings", "holdings", "prices", "rule")),
        ("tokens", "holdings", ("run", "ledger", "settings", "bank", "prices", "rule")),
        ("run", "run", ("ledger", "settings", "prices", "rule")),
        ("results", "values", ("prices", "settings", "rule")),
        ("prices", "prices", ("run", "ledger", "settings", "bank", "holdings", "values", "rule")),
    ],
)
def test_what_is_gone_is_said_and_the_rest_is_checked(
    ask, home: Path, what: str, gone: str, still: tuple[str, ...]
) -> None:
    """Lots file, bank, tokens, the whole run, or the results that an erasure takes: a word, exit code 1, and what can be checked is."""
    valued = newest(home, "owner_values")
    run = home / "runs" / valued["run"]
    if what == "lots":
        for path in (home / "runs/inputs").iterdir():
            path.unlink()
    elif what == "results":
        for name in ("owner_values", "values"):
            shutil.rmtree(home / "results" / name)
    elif what == "prices":
        (home / "tables/prices.parquet").unlink()
    else:
        shutil.rmtree({"bank": run / "bank", "tokens": home / "tokens", "run": run}[what])
    said = ask(home, "dispute")
    assert said.code == 1, said.out + said.err
    assert re.search(rf"\b{gone} gone .*is not there any more", said.out), said.out
    for one in still:
        assert f" {one} yes" in said.out, said.out
    assert f"checked all the same: {', '.join(still)}" in said.out


def test_a_dispute_ends_in_words_whatever_is_damaged(ask, home: Path) -> None:
    """Nothing to be sold under the terms of then, a corpus version that is gone, a run.json that is none: findings, no tracebacks."""
    run = home / "runs" / newest(home, "owner_values")["run"] / "run.json"
    data = run.read_bytes()
    run.write_bytes(b"{}")
    said = ask(home, "dispute")
    assert (said.code, said.err) == (1, "")
    assert re.search(r"run NO .*holdings NO", said.out)
    run.write_bytes(data)
    shutil.rmtree(home / "versions")
    said = ask(home, "dispute")
    assert (said.code, said.err) == (1, "")
    assert re.search(r"holdings (NO|gone)", said.out)
    path = home / "results/prices/latest.json"
    body = path.read_text()
    path.write_text(re.sub(r'"entry": \d+', '"entry": 9999', body))
    said = ask(home, "dispute")
    assert (said.code, said.err) == (1, "")
