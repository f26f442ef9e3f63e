"""What stands behind a payment: the proxy and its transfer in the ledger, on receipts and in words."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from graph_commands import environment

from pipelines.results import Result, latest, store
from pipelines.site import Site, open_site
from pipelines.steps import pricing
from pipelines.steps import provenance as steps
from pipelines.steps.ledger import open_ledger
from provenance import parse_json
from valuation.errors import EvaluationError
from valuation.transfer import Transfer, proxy_digest, write_transfers


def opened(home: Path) -> Site:
    """A home of the tests, opened as the graph opens it."""
    return open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)


def made(site: Site, *assets: str) -> list[Result]:
    """The newest results of assets."""
    found = [latest(site.home.results, asset) for asset in assets]
    assert all(found)
    return [one for one in found if one]


def configured(home: Path, line: str, under: str = "[pricing]") -> None:
    """Add a line to a section of dataworth.toml."""
    path = home / "dataworth.toml"
    path.write_text(path.read_text().replace(f"{under}\n", f"{under}\n{line}\n", 1))


def valued_again(site: Site) -> Result:
    """The value table made anew, as the asset makes it."""
    digest, values = pricing.value_table(
        site, *made(site, "corpus", "tokens", "influence", "owner_values", "evaluation_plan")
    )
    result = Result("values", "test", digest, values)
    store(site.home.results, result)
    return result


def test_receipts_name_the_proxy_and_say_that_its_transfer_is_not_measured(
    ask, tiny_home: Path
) -> None:
    """Without a record the ledger, the owner's receipt and `explain` say so, with the digest of the run's settings."""
    site = opened(tiny_home)
    valued, values = made(site, "owner_values", "values")
    run = parse_json((site.home.runs / valued["run"] / "run.json").read_bytes())
    body = open_ledger(site).entry(values["entry"])["body"]
    assert body["proxy_digest"] == proxy_digest(run)
    assert body["transfer"] == "not measured"
    assert "transfer_record" not in body
    for said in (ask(tiny_home, "verify", "wilson"), ask(tiny_home, "explain", "wilson")):
        assert said.code == 0
        assert f"settings {proxy_digest(run)}" in said.out
        assert "not measured" in said.out


def test_a_measured_transfer_is_on_every_receipt(
    ask, tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """A record of this very proxy is told by `verify` and `explain` and hashed with the values; one of another proxy is not."""
    home = copied(tiny_home)
    configured(home, 'transfer = "transfer.json"')
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
    assert valued_again(site)["entry"] == before["entry"]  # nothing is known of this proxy
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
