"""`dataworth`: what each command answers, that a flipped bit turns yes into no, and that errors are one paragraph."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from graph_commands import contents, data_of, dataworth, flip, head, results, stored, values

from pipelines.defs import ASSETS

HELD = (
    "corpus", "intake", "clusters", "token shards", "target", "ledger", "plan", "checkpoint", "prices", "receipts",
    "erasure", "gold model", "unlearned model", "audit", "audit reports",
)  # fmt: skip
"""What `dataworth verify` answers for, in its order."""


@pytest.fixture
def home(tiny_home: Path, copied: Callable[[Path], Path]) -> Path:
    """A finished home of this test's own."""
    return copied(tiny_home)


def one(folder: Path, pattern: str) -> Path:
    """The first file of a pattern."""
    return min(folder.glob(pattern))


# --- init, status ---------------------------------------------------------------------------------------------------


def test_init_makes_a_home_once(ask, tmp_path: Path) -> None:
    """The first call writes the commented configuration, the second changes nothing."""
    made = ask(tmp_path / "home", "init")
    assert made.code == 0
    assert made.out.startswith("made ")
    config = tmp_path / "home/dataworth.toml"
    assert "# the pool to distribute" in config.read_text()
    assert (tmp_path / "home/dagster/dagster.yaml").exists()
    config.write_text(config.read_text() + "\n# mine\n")
    before = contents(tmp_path / "home")
    kept = ask(tmp_path / "home", "init")
    assert kept.out.startswith("kept ")
    assert contents(tmp_path / "home") == before


def test_status_lists_every_asset(ask, tiny_home: Path, tmp_path: Path) -> None:
    """A finished home shows each data version; a fresh one says that nothing was made."""
    said = ask(tiny_home, "status")
    assert said.code == 0
    for asset in ASSETS:
        assert f"{asset} {results(tiny_home)[asset]['data_version'][:12]}" in said.out
    ask(tmp_path / "home", "init")
    assert ask(tmp_path / "home", "status").out.count("never made") == len(ASSETS)


# --- verify ---------------------------------------------------------------------------------------------------------


def test_verify_says_yes_to_a_finished_home(ask, tiny_home: Path) -> None:
    """Every claim is recomputed from disk and holds."""
    said = ask(tiny_home, "verify")
    assert said.code == 0, said
    assert answers(said.out) == [("yes", claim) for claim in HELD]


def answers(text: str) -> list[tuple[str, str]]:
    """Yes or no for every claim of `dataworth verify`."""
    return re.findall(rf"\b(yes|no) ({'|'.join(HELD)}): ", text)


def block(home: Path) -> Path:
    """The block file of the version that values rest on."""
    return stored(home, values(home, "corpus")["version"])[0]


def weights(home: Path) -> Path:
    """The tensors of the released checkpoint."""
    return one(home / values(home, "checkpoint")["checkpoint"], "*.distcp")


FLIPS = {
    "block": (block, "corpus", "was changed|damaged|differs|digest"),
    "salts": (lambda home: home / "salts", "corpus", "salt"),
    "leaves": (lambda home: home / f"storage/{values(home, 'corpus')['version']}.leaves", "corpus", "leaves"),
    "receipt": (lambda home: one(home, "receipts/*/wilson.receipt.json"), "receipts", "wilson"),
    "tlog proof": (lambda home: one(home, "receipts/*/wilson.tlog-proof"), "receipts", "wilson"),
    "chainpoint proof": (lambda home: one(home, "receipts/*/wilson.chainpoint.json"), "receipts", "wilson"),
    "ledger entries": (lambda home: home / "ledger/entries.jsonl", "ledger", "ledger|entry|root"),
    "ledger checkpoint": (lambda home: home / "ledger/checkpoint", "ledger", "checkpoint|signature|root|note"),
    "token shard": (lambda home: one(home / values(home, "tokens")["folder"], "*.arrow"), "token shards", "shard|digest|token"),
    "checkpoint": (weights, "checkpoint", "expected|digest|changed"),
    "values": (lambda home: home / "tables/values.parquet", "prices", "values.parquet"),
    "prices": (lambda home: home / "tables/prices.parquet", "prices", "prices.parquet"),
    "audit": (lambda home: home / "runs" / values(home, "robustness_audit")["run"] / "rows.parquet", "audit", "rows"),
    "verdict": (lambda home: home / "runs" / values(home, "robustness_audit")["run"] / "audit.json", "audit", "audit.json"),
    "audit report": (lambda home: one(home, "reports/audit-*.json"), "audit reports", "audit report of this version|is not the page"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLIPS)
def test_one_flipped_bit_turns_yes_into_no(ask, home: Path, name: str) -> None:
    """The claim that rests on the file says no and why, by exit code 1; the others are still answered."""
    find, claim, why = FLIPS[name]
    file = find(home)
    good = file.read_bytes()
    for place in (0.02, 0.3, 0.6, 0.98):
        flip(file, place)
        said = ask(home, "verify")
        assert said.code == 1, (place, said)
        _, found, reason = said.out.partition(f"no {claim}")
        assert found, (place, said)
        assert re.search(why, reason), (place, said)
        assert [name for _, name in answers(said.out)] == list(HELD)
        assert said.err == ""
        file.write_bytes(good)
    assert ask(home, "verify").code == 0


def test_verify_answers_for_one_owner(ask, tiny_home: Path) -> None:
    """An owner's name or the receipt's path gives the facts that are proven."""
    by_name = ask(tiny_home, "verify", "wilson")
    by_path = ask(tiny_home, "verify", str(one(tiny_home, "receipts/*/wilson.receipt.json")))
    assert by_name.code == by_path.code == 0
    for said in (by_name, by_path):
        assert "the log dataworth.demo/ledger signed" in said.out
        assert "commits to this receipt" in said.out


def test_a_copied_out_receipt_needs_a_key_from_elsewhere(
    ask, tiny_home: Path, tmp_path: Path
) -> None:
    """Away from its home a receipt verifies with the published key, with no other, and not without one."""
    for kind in ("receipt.json", "tlog-proof"):
        (tmp_path / f"wilson.{kind}").write_bytes(
            one(tiny_home, f"receipts/*/wilson.{kind}").read_bytes()
        )
    receipt = str(tmp_path / "wilson.receipt.json")
    key = (tiny_home / "ledger/vkey").read_text().strip()
    assert ask(tmp_path, "verify", receipt, "--vkey", key).code == 0
    stranger = ask(tmp_path, "verify", receipt, "--vkey", key.replace(key[-6:-1], "AAAAA"))
    assert (stranger.code, stranger.out[:3]) == (1, "no ")
    missing = ask(tmp_path, "verify", receipt)
    assert missing.code == 1
    assert "--vkey" in missing.out


def test_a_receipt_that_is_not_there_is_said(ask, tiny_home: Path, tmp_path: Path) -> None:
    """An unknown owner or path is a no that names what was looked for."""
    for name in ("nobody", str(tmp_path / "nobody.receipt.json")):
        said = ask(tiny_home, "verify", name)
        assert said.code == 1
        assert "no receipt nobody.receipt.json" in said.out


# --- questions ------------------------------------------------------------------------------------------------------


def test_sql_answers_over_the_version_in_force(ask, tiny_home: Path) -> None:
    """Counts agree with the manifest less the suspended records; personal text is shown only on demand."""
    said = ask(tiny_home, "sql", "select count(*) as n from records where owner <> 'registry'")
    assert said.code == 0
    owners = values(tiny_home, "corpus")["owners"]
    assert f"n {sum(owners.values()) - owners['registry']}" in said.out
    hidden = ask(tiny_home, "sql", "select text from records where owner = 'registry' limit 1")
    assert "None" in hidden.out
    shown = ask(
        tiny_home, "sql", "--personal", "select text from records where owner = 'registry' limit 1"
    )
    assert "None" not in shown.out


def test_sql_changes_nothing(ask, tiny_home: Path) -> None:
    """A statement that would write, or a column that isn't there, is refused in one paragraph."""
    for query in ("drop table records", "copy records to 'x.csv'", "select 1; select 2"):
        said = ask(tiny_home, "sql", query)
        assert said.code == 2
        assert "one reading statement" in said.err
    wrong = ask(tiny_home, "sql", "select colour from records")
    assert wrong.code == 2
    assert "colour" in wrong.err
    assert "tables here: records" in wrong.err


def test_report_names_the_page(ask, tiny_home: Path) -> None:
    """The newest report exists, is one file, and shows every priced owner."""
    said = ask(tiny_home, "report")
    assert said.code == 0
    page = tiny_home / "reports/latest.html"
    assert said.out == page.as_uri()
    assert all(owner in page.read_text() for owner in values(tiny_home, "corpus")["owners"])


def test_diff_tells_what_was_suspended(ask, tiny_home: Path) -> None:
    """From the version that was valued to HEAD only the forgotten records are missing."""
    said = ask(tiny_home, "diff", values(tiny_home, "corpus")["version"][:10])
    assert said.code == 0
    assert "0 records added, 80 removed" in said.out
    assert "registry 0 80" in said.out


def test_diff_of_an_unknown_version_lists_the_known(ask, tiny_home: Path) -> None:
    """A beginning that names no version, or all of them, is refused with the ids there are."""
    for name in ("zzzz", ""):
        said = ask(tiny_home, "diff", name)
        assert said.code == 2
        assert head(tiny_home)[:12] in said.err


def test_explain_walks_back_from_a_price(ask, tiny_home: Path) -> None:
    """An owner's page holds value, group, run with seed, price with ledger entry, and the plan."""
    said = ask(tiny_home, "explain", "washington")
    assert said.code == 0
    paid = values(tiny_home, "prices")
    for fact in (
        "value by shapley.exact", "target_value", values(tiny_home, "owner_values")["run"], "seed ", "and 2 seeds (initial weights",
        f"ledger entry {paid['entry']}", values(tiny_home, "evaluation_plan")["digest"],
    ):  # fmt: skip
        assert fact in said.out
    group = values(tiny_home, "owner_values")["groups"][0]["id"]
    assert "standard error, interval" in ask(tiny_home, "explain", group).out
    stranger = ask(tiny_home, "explain", "nobody")
    assert stranger.code == 2
    assert "'nobody' has no value" in stranger.err


def test_explain_walks_back_from_a_step_of_a_run(ask, tiny_home: Path) -> None:
    """A run's name or folder, and a step: phase, cause, the numbers, and record ids, never a text."""
    run = values(tiny_home, "checkpoint")["run"]
    for subject in (run, str(tiny_home / "runs" / run)):
        said = ask(tiny_home, "explain", subject, "--step", "3")
        assert said.code == 0, said.err
        assert "step 3: loss spike" in said.out
        assert "step 3: slow step" in said.out
        assert "phase" in said.out
        assert re.search(r"[0-9a-f]{64}", said.out)
    beyond = ask(tiny_home, "explain", run, "--step", "100000")
    assert beyond.code == 2
    assert "has no step 100000" in beyond.err
    assert ask(tiny_home, "explain", run).code == 0


def test_explain_shows_where_a_record_surprises_and_why_an_owner_is_paid(
    ask, tiny_home: Path
) -> None:
    """A strip of blocks for a record whose owner consents, and the reason of a price in words."""
    record = pl.read_parquet(tiny_home / "tables/surprisal.parquet")["record_id"][0].hex()
    said = ask(tiny_home, "explain", record)
    assert said.code == 0, said.err
    assert re.search("[▁▂▃▄▅▆▇█]{3}", said.out)
    assert "bits in" in said.out
    owner = pl.read_parquet(tiny_home / "tables/prices.parquet")["subject"][0]
    said = ask(tiny_home, "explain", owner)
    assert "why this price" in said.out
    assert "lot-0" in said.out


def test_payouts_add_up(ask, tiny_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table ends in the pool, and the file for a payment system has the same integers."""
    said = ask(tiny_home, "payouts")
    assert said.code == 0
    assert "total 1,000,000,000 1,000.00" in said.out
    done = dataworth(tiny_home, "payouts", "--csv")
    table = list(csv.DictReader(io.StringIO(done.stdout)))
    assert sum(int(row["price_microunits"]) for row in table) == 1_000_000_000
    assert f"{table[0]['subject']} {int(table[0]['price_microunits']):,}" in said.out


def test_a_dispute_counts_what_owners_hold_by_itself(ask, home: Path) -> None:
    """Tokens, records or a lot's size changed in the stored result, another lots file, or a run that the ledger doesn't name: each is found and named."""
    path = home / "results/owner_values/latest.json"
    whole = path.read_text()
    said = ask(home, "dispute")
    assert said.code == 0, said.out
    assert re.search(r"run\W+yes.*bank\W+yes.*holdings\W+yes", said.out, re.DOTALL)
    for kind, name, change in (
        ("owners", "tokens", lambda tokens: [tokens[0] + 10, *tokens[1:]]),
        ("owners", "records", lambda records: records + 1),
        ("groups", "tokens", lambda tokens: tokens + 1),
    ):
        body = json.loads(whole)
        row = body["values"][kind][-1]
        row[name] = change(row[name])
        path.write_text(json.dumps(body))
        said = ask(home, "dispute")
        assert said.code == 1
        assert re.search(rf"holdings\W+NO.*{row['id']}'s differ", said.out, re.DOTALL), said.out
        # What is paid by is counted anew, not taken from there.
        assert re.search(r"values\W+yes", said.out)
    path.write_text(whole)
    values = json.loads(whole)["values"]
    (lots,) = [home / file for file in values["files"] if file.endswith(".bin")]
    data = lots.read_bytes()
    lots.write_bytes(data[8:] + data[:8])
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(r"holdings\W+NO.*expected SHA-256", said.out, re.DOTALL)
    lots.write_bytes(data)
    run = home / "runs" / values["run"] / "run.json"
    run.write_bytes(run.read_bytes() + b"\n")
    assert re.search(r"run\W+NO.*the ledger names", ask(home, "dispute").out, re.DOTALL)


def test_a_dispute_recomputes_and_finds_a_changed_number(ask, home: Path) -> None:
    """Bank, values, ledger, prices and a coalition trained again under each seed are as published; a changed error or price is found, exit code 1."""
    said = ask(home, "dispute", "--retrain", "2")
    assert said.code == 0, said.out + said.err
    for what in ("bank", "values", "ledger", "prices", "rule", "coalition 0"):
        assert what in said.out
    assert "NO" not in said.out
    seeds = values(home, "owner_values")["seeds"]
    assert len(seeds) == 2
    # The table may wrap a line between the two.
    again = re.findall(r"coalition (\d+),\W+seed\W+(\d+)", said.out)
    assert len(again) == 4
    assert {("0", str(seed)) for seed in seeds} < set(again)
    path = home / "tables/values.parquet"
    table = path.read_bytes()
    lot = pl.col("subject_kind") == "lot"
    pl.read_parquet(path).with_columns(ci_low_nano=pl.col("ci_low_nano") + 1000 * lot.cast(pl.Int64)).write_parquet(path)  # fmt: skip
    assert re.search(r"values\W+NO.*standard error or interval", ask(home, "dispute").out, re.DOTALL)  # fmt: skip
    path.write_bytes(table)
    path = home / "tables/prices.parquet"
    frame = pl.read_parquet(path)
    frame.with_columns(price_microunits=pl.col("price_microunits").reverse()).write_parquet(path)
    said = ask(home, "dispute")
    assert said.code == 1
    assert re.search(r"prices\W+NO", said.out)


# --- space -----------------------------------------------------------------------------------------------------------


def test_gc_lists_only_what_nothing_needs(ask, home: Path) -> None:
    """A finished home has nothing to remove; a run without a result is listed, kept by --dry-run, removed by --delete."""
    assert "nothing to remove" in ask(home, "gc").out
    lost = home / "runs/proxy-000000000000"
    lost.mkdir()
    (lost / "result.json").write_text("{}")
    needed = data_of(home, "runs").keys() - {"runs/proxy-000000000000/result.json"}
    listed = ask(home, "gc", "--dry-run")
    assert "1 runs that nothing needs" in listed.out
    assert "nothing was removed" in listed.out
    assert lost.exists()
    assert ask(home, "gc", "--delete").code == 0
    assert not lost.exists()
    assert data_of(home, "runs").keys() == needed


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify"], "no home here: run `dataworth init`"),
        (["payouts"], "no home here"),
        (["dispute"], "no home here"),
        (["sql", "select 1"], "no home here"),
        (["diff"], "Missing argument 'FIRST'"),
        (["verfy"], "No such command 'verfy'"),
        (["run", "--sise", "tiny"], "No such option"),
        (["run", "--size", "huge"], "size 'huge' is unknown; expected one of tiny, small, default"),
    ],
)
def test_errors_are_one_paragraph(ask, tmp_path: Path, arguments: list[str], message: str) -> None:
    """Whatever is wrong, the answer is exit code 2 and one paragraph that says what to do."""
    said = ask(tmp_path / "nowhere", *arguments)
    assert said.code == 2
    assert said.err.startswith("dataworth: ")
    assert message in said.err
    assert "Traceback" not in said.out + said.err


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    """`--debug` lets the exception through; without it the same call shows none."""
    plain = dataworth(tmp_path / "nowhere", "verify")
    debug = dataworth(tmp_path / "nowhere", "verify", "--debug")
    assert (plain.returncode, debug.returncode) == (2, 1)
    assert "Traceback" not in plain.stderr
    assert "Traceback (most recent call last)" in debug.stderr
    assert "HomeError" in debug.stderr


BAD_SETTINGS = {
    "not TOML": ("size = ", "dataworth.toml is not TOML"),
    "unknown key": ("[pricing]\nresreve_microunits = 1\n", "did you mean 'reserve_microunits'?"),
    "unknown section": ("[targets]\n", "unknown key 'targets' in dataworth.toml: did you mean 'target'?"),
    "wrong kind": ('[pricing]\npool_microunits = "much"\n', "expected an integer"),
    "unknown size": ('size = "hugest"\n', "size is one of tiny, small"),
    "two targets": ('[target]\nsince = "2020-01-01"\npath = "a.jsonl"\n', "has both since and path"),
    "no such day": ('[target]\nsince = "2020-02-30"\n', "a day written"),
    "newer format": ("format = 99\n", "has format 99, this program knows 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_a_bad_configuration_stops_before_dagster_starts(ask, tmp_path: Path, name: str) -> None:
    """The message names the key and the remedy, and no run was started."""
    text, message = BAD_SETTINGS[name]
    home = tmp_path / "home"
    ask(home, "init")
    (home / "dataworth.toml").write_text(text)
    said = ask(home, "run")
    assert said.code == 2
    assert message in said.err
    assert list((home / "logs").iterdir()) == []


def test_a_home_of_a_newer_version_is_refused(ask, tmp_path: Path) -> None:
    """A format that this program doesn't know is never guessed at."""
    ask(tmp_path / "home", "init")
    (tmp_path / "home/format").write_text('{"format":2}')
    for arguments in (["verify"], ["run"], ["status"], ["init"]):
        said = ask(tmp_path / "home", *arguments)
        assert said.code == 2
        assert "has format 2, this program knows 1" in said.err


def test_no_command_shows_the_help(ask, tmp_path: Path) -> None:
    """`dataworth` alone lists the commands."""
    said = ask(tmp_path, *[])
    assert said.code == 2
    assert said.err == ""
    for name in ("init", "run", "ui", "status", "verify", "sql", "report", "diff", "explain", "erase", "withdraw", "payouts", "dispute", "gc"):  # fmt: skip
        assert f" {name} " in said.out


def test_a_home_below_a_file_is_refused(ask, tmp_path: Path) -> None:
    """A path that is a file already is named, not overwritten."""
    (tmp_path / "home").write_text("a letter")
    said = ask(tmp_path / "home", "init")
    assert said.code == 2
    assert "is a file: name a folder" in said.err
    assert (tmp_path / "home").read_text() == "a letter"
