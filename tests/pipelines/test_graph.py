"""The whole graph, materialised: what the required command leaves, what a second run does, what a failed check stops."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import dagster as dg
import polars as pl
import pytest
from graph_commands import (
    command,
    contents,
    data_versions,
    dataworth,
    flip,
    head,
    ledger,
    log_of,
    made,
    materialize,
    results,
    reused,
    rows,
    stored,
    text_of,
    values,
)

from pipelines.definitions import defs
from pipelines.defs import ASSETS
from pipelines.gate import failed_checks
from provenance import jcs, parse_json
from trainer.phases import check_phases, failures

VERSIONS = {
    "source_data", "preprocessing", "tokenizer", "initial_weights", "configuration", "prompts", "retrieval_index",
    "evaluation_set", "hardware", "code", "lock",
}  # fmt: skip


def gate(home: Path):
    """`python -m pipelines.gate` in a home."""
    return command(home, sys.executable, "-m", "pipelines.gate")


def runs(home: Path, *kinds: str) -> list[Path]:
    """Folders of finished runs of some kinds."""
    return [
        path.parent
        for path in sorted(home.glob("runs/*/run.json"))
        if json.loads(path.read_text())["kind"] in kinds
    ]


# --- the required command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_log(tiny_home: Path) -> str:
    """What the required command said on a fresh home; the fixture `tiny_home` checks that it exits 0."""
    return tiny_home.with_suffix(".log").read_text()


def test_the_required_command_makes_everything_on_a_fresh_home(first_log: str) -> None:
    """`dagster asset materialize --select '*' -m pipelines.definitions` exits 0 and makes every asset once."""
    assert made(first_log) == set(ASSETS)
    assert reused(first_log) == set()


def test_the_required_command_warns_of_nothing_but_its_successor(first_log: str) -> None:
    """The one warning is Dagster's own, that `dg` supersedes the command."""
    warned = [
        line for line in first_log.splitlines() if re.search(r"\bWARNING\b|\w*Warning\b", line)
    ]
    assert [line for line in warned if "SupersessionWarning" not in line] == []
    assert len(warned) == 1


@pytest.mark.slow
def test_the_required_command_needs_no_dagster_home(
    tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Without `DAGSTER_HOME` it works too, and leaves nothing in the working folder."""
    home = copied(tiny_home)
    before = set(Path.cwd().iterdir())
    done = command(
        home, "env", "--unset=DAGSTER_HOME", str(Path(sys.executable).parent / "dagster"), "asset", "materialize",
        "--select", "*", "-m", "pipelines.definitions",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert reused(done.stdout + done.stderr) == set(ASSETS)
    assert set(Path.cwd().iterdir()) == before


def test_the_gate_passes(tiny_home: Path) -> None:
    """Every check ran and passed, by the exit code that continuous integration reads."""
    done = gate(tiny_home)
    assert (done.returncode, done.stdout) == (0, "gate: every check passed\n")


def test_the_gate_stays_closed_for_checks_that_never_ran() -> None:
    """An empty instance has not passed: each check is named."""
    with dg.DagsterInstance.ephemeral() as instance:
        lines = failed_checks(instance, defs())
    assert len(lines) == len(defs().resolve_asset_graph().asset_check_keys)
    assert all(line.endswith(": never ran") for line in lines)


# --- what a run leaves ----------------------------------------------------------------------------------------------


def test_values_are_efficient(tiny_home: Path) -> None:
    """The groups' values add up to V(all) - V(nobody): to 1e-9 in floats, exactly in nano-nats."""
    found = values(tiny_home, "owner_values")
    whole = found["loss_empty"] - found["loss_all"]
    assert found["efficiency_error"] <= 1e-9
    assert abs(sum(group["value"] for group in found["groups"]) - whole) <= 1e-9
    table = pl.read_parquet(tiny_home / "tables/values.parquet")
    total = int(table.filter(pl.col("subject_kind") == "lot")["value_nano"].sum())
    assert total == round(whole * 1e9)
    owners = int(table.filter(pl.col("subject_kind") == "owner")["value_nano"].sum())
    assert owners + sum(values(tiny_home, "values")["unattributed_nano"].values()) == total


def test_the_value_table_has_the_published_columns(tiny_home: Path) -> None:
    """`values.parquet`: integers in nano-nats with errors, method, target, plan and corpus version."""
    table = pl.read_parquet(tiny_home / "tables/values.parquet")
    assert dict(table.schema) == {
        "subject_kind": pl.String, "subject_id": pl.String, "method": pl.String, "target": pl.String, "unit": pl.String,
        "value_nano": pl.Int64, "se_nano": pl.Int64, "ci_low_nano": pl.Int64, "ci_high_nano": pl.Int64, "n": pl.Int64,
        "plan_digest": pl.String, "corpus_version": pl.String, "checkpoint_root": pl.String,
    }  # fmt: skip
    assert set(table["subject_kind"]) == {"lot", "owner", "record"}
    assert set(table["unit"]) == {"nat"}
    assert set(table["target"]) == {"target_value"}
    assert set(table["corpus_version"]) == {values(tiny_home, "corpus")["version"]}
    assert set(table["plan_digest"]) == {values(tiny_home, "evaluation_plan")["digest"]}
    nullable = {"se_nano", "ci_low_nano", "ci_high_nano"}
    assert {
        name for name, nulls in table.null_count().row(0, named=True).items() if nulls
    } <= nullable
    groups = table.filter(pl.col("subject_kind") == "lot")
    assert groups["se_nano"].null_count() == 0
    assert (groups["ci_low_nano"] <= groups["value_nano"]).all()
    assert (groups["value_nano"] <= groups["ci_high_nano"]).all()


def test_prices_add_up_to_the_pool(tiny_home: Path) -> None:
    """Integer micro-units, nobody pays, and the last one is accounted for."""
    found = values(tiny_home, "prices")
    table = pl.read_parquet(tiny_home / "tables/prices.parquet")
    assert table.schema["price_microunits"] == pl.Int64
    assert set(table.columns) == {
        "subject",
        "price_microunits",
        "currency",
        "held_microunits",
        "rule_digest",
        "plan_digest",
    }
    assert (table["price_microunits"] >= 0).all()
    assert int(table["price_microunits"].sum()) == found["pool"] == 1_000_000_000
    assert set(table["subject"]) >= set(values(tiny_home, "corpus")["owners"])


def test_the_plan_stands_in_the_ledger_before_any_training(tiny_home: Path) -> None:
    """Its entry comes before that of every run, and its digest is the file's."""
    entries = ledger(tiny_home)
    kinds = [entry["kind"] for entry in entries]
    plan = kinds.index("plan")
    assert plan < min(
        kinds.index(kind) for kind in ("run", "windows", "values", "prices", "evaluation")
    )
    digest = entries[plan]["body"]["plan"]
    data = (tiny_home / f"plans/{digest}.json").read_bytes()
    assert sha256(data).hexdigest() == digest
    assert jcs(parse_json(data)) == data
    words = {
        "decision",
        "baseline",
        "primary_metric",
        "threshold_millinats",
        "refutes",
        "abort",
        "seeds",
    }
    assert words <= set(parse_json(data))
    assert [entry["time"] for entry in entries] == sorted(entry["time"] for entry in entries)


def test_every_run_says_what_it_was(tiny_home: Path) -> None:
    """`run.json` is canonical, complete, and names all eleven versions; `result.json` says it is done."""
    folders = sorted(path.parent for path in tiny_home.glob("runs/*/run.json"))
    assert {path.name.split("-")[0] for path in folders} == {
        "train", "gold", "proxy", "unlearn", "attack", "gradients",
    }  # fmt: skip
    for folder in folders:
        data = (folder / "run.json").read_bytes()
        run = parse_json(data)
        assert jcs(run) == data
        assert run["run"] == folder.name
        assert set(run["versions"]) == VERSIONS
        assert all(re.fullmatch(r"none|[0-9a-f]{64}", item) for item in run["versions"].values())
        assert json.loads((folder / "result.json").read_text())["status"] == "done"
        assert str(tiny_home) not in data.decode()  # a home can be moved


def test_every_training_leaves_its_record(tiny_home: Path) -> None:
    """Progress per step, five phases, windows that cover all steps, and a checkpoint named by its root."""
    folders = runs(tiny_home, "train", "gold", "unlearn")
    assert len(folders) == 3
    for folder in folders:
        steps = json.loads((folder / "run.json").read_text())["steps"]
        progress = rows(folder / "progress.jsonl")
        assert [row["step"] for row in progress] == list(range(1, steps + 1))
        assert all({"loss", "tokens_per_s", "rss_bytes", "time"} <= set(row) for row in progress)
        phases = json.loads((folder / "phases.json").read_text())["phases"]
        assert len(phases) == 5
        record = json.loads((folder / "phases.json").read_text())
        assert check_phases(record) == []
        assert failures(record) == {}
        windows = rows(folder / "windows.jsonl")
        covered = [
            step
            for window in windows
            for step in range(window["first_step"], window["last_step"] + 1)
        ]
        assert covered == list(range(1, steps + 1))
        result = json.loads((folder / "result.json").read_text())
        manifest = json.loads((folder / result["checkpoint"] / "manifest.json").read_text())
        assert manifest["root"] == result["checkpoint_root"] == windows[-1]["state_digest_after"]


def test_the_ledger_says_from_which_state_to_which_each_window_went(tiny_home: Path) -> None:
    """Every model's windows: steps, shards, records, seed of all draws, state before and after, and the optimiser's."""
    entries = [entry["body"] for entry in ledger(tiny_home) if entry["kind"] == "windows"]
    for asset in ("checkpoint", "unlearned_checkpoint"):
        run = values(tiny_home, asset)["run"]
        (body,) = (body for body in entries if body["run"] == run)
        document = parse_json((tiny_home / "runs" / run / "run.json").read_bytes())
        assert body["seed"] == document["seed"]
        names = {
            "state_digest": "state_digest_after",
            "optimizer_digest": "optimizer_digest_after",
        }
        for row, written in zip(
            body["windows"], rows(tiny_home / "runs" / run / "windows.jsonl"), strict=True
        ):
            assert {k: written[names.get(k, k)] for k in row if k != "run"} | {"run": run} == row
            assert names.keys() <= row.keys()
        for before, after in pairwise(body["windows"]):
            assert before["state_digest"] == after["state_digest_before"]


def test_the_forgotten_records_left_head_and_the_gold_model(tiny_home: Path) -> None:
    """Sixteen people asked: HEAD holds none of their records, and the reference run excludes all of them."""
    request = values(tiny_home, "erasure_request")
    assert (request["people"], request["records"]) == (16, 80)
    gone = (tiny_home / request["excluded"]).read_text().split()
    assert len(gone) == 80
    listed = dataworth(tiny_home, "sql", "select count(*) from records where owner = 'registry'")
    assert "80" in text_of(listed)  # the other half of the people
    (gold,) = runs(tiny_home, "gold")
    assert (
        parse_json((gold / "run.json").read_bytes())["excluded"]["digest"]
        == request["excluded_digest"]
    )
    assert not list(tiny_home.glob("erasure/*/retained.jsonl"))


def test_no_verdict_of_tiny_is_a_pass(tiny_home: Path) -> None:
    """One gold seed and a model that memorised nothing: INVALID or INCONCLUSIVE, with reasons, in the report too."""
    found = values(tiny_home, "robustness_audit")
    audit = json.loads((tiny_home / "runs" / found["run"] / "audit.json").read_text())
    assert found["verdict"] == audit["verdict"]
    assert audit["verdict"] in {"INVALID", "INCONCLUSIVE"}
    assert audit["reasons"]
    assert audit["verdict"] in (tiny_home / "reports/latest.html").read_text()


# --- the second run -------------------------------------------------------------------------------------------------


def test_a_second_run_recomputes_nothing(tiny_home: Path, copied: Callable[[Path], Path]) -> None:
    """With nothing changed every asset is reused, and no file of the home is written again."""
    home = copied(tiny_home)
    before = contents(home)
    done = dataworth(home, "run")
    assert done.returncode == 0, done.stderr
    assert f"{len(ASSETS)} assets, {len(ASSETS)} unchanged" in text_of(done)
    after = contents(home)
    assert set(after) == set(before)
    assert [name for name in after if after[name] != before[name]] == []


def lineage(home: Path, version: str) -> list[str]:
    """A version and those that it was built on."""
    found = [version]
    while (path := home / f"versions/{found[-1]}/manifest.json").exists():
        found.append(json.loads(path.read_text())["parent"])
    return found


def places(home: Path, version: str) -> dict[bytes, int]:
    """Leaf index of every live record of a version."""
    table = pl.concat(
        pl.read_parquet(file, columns=["record_id", "index"]) for file in stored(home, version)
    )
    return dict(table.iter_rows())


def test_a_new_delivery_appends(tiny_home: Path, grown_home: Path) -> None:
    """One leaf more; every record that stayed has its old index; those who asked to be forgotten left a tombstone."""
    old, new = values(tiny_home, "corpus"), values(grown_home, "corpus")
    assert old["version"] in lineage(grown_home, new["version"])
    assert new["size"] == old["size"] + 1
    assert new["live"] == old["live"] + 1 - 80
    before, after = (
        places(home, body["version"]) for home, body in ((tiny_home, old), (grown_home, new))
    )
    stayed = before.keys() & after.keys()
    assert len(stayed) == old["live"] - 80
    assert all(after[record] == before[record] for record in stayed)
    assert [after[record] for record in after.keys() - before.keys()] == [old["size"]]
    leaves = [(home / f"storage/{body['version']}.leaves").read_bytes() for home, body in ((tiny_home, old), (grown_home, new))]  # fmt: skip
    changed = [
        index
        for index in range(old["size"])
        if leaves[0][32 * index :][:32] != leaves[1][32 * index :][:32]
    ]
    assert set(changed) == {before[record] for record in before.keys() - after.keys()}


def test_a_new_delivery_recomputes_what_changed_and_touches_nothing_old(
    tiny_home: Path, grown_home: Path
) -> None:
    """Tokenizer and target stay; runs, versions, receipts, plans and ledger entries of the first run are as they were."""
    tokens = [values(home, "tokens")["tokenizer_digest"] for home in (tiny_home, grown_home)]
    assert tokens[0] == tokens[1]
    log = log_of(grown_home)
    assert {"deliveries", "corpus", "clusters", "tokens", "values", "prices", "checkpoint"} <= made(
        log
    )
    assert "quarantine" in reused(log)
    versions = [data_versions(home) for home in (tiny_home, grown_home)]
    assert versions[0]["target"] == versions[1]["target"]
    before, after = contents(tiny_home), contents(grown_home)
    kept = [
        name for name in before if name.split("/")[0] in ("runs", "versions", "receipts", "plans")
    ]
    assert kept
    assert [name for name in kept if before[name][1] != after[name][1]] == []
    assert ledger(grown_home)[: len(ledger(tiny_home))] == ledger(tiny_home)


def test_the_old_version_is_still_readable(tiny_home: Path, grown_home: Path) -> None:
    """`dataworth diff` tells what came and went, and old receipts verify under the grown ledger's key."""
    old = values(tiny_home, "corpus")["version"]
    said = text_of(dataworth(grown_home, "diff", old[:12], values(grown_home, "corpus")["version"]))
    assert "1 records added, 80 removed" in said
    assert "washington 1 0" in said
    receipt = grown_home / f"receipts/{old}/wilson.receipt.json"
    done = dataworth(grown_home, "verify", str(receipt))
    assert done.returncode == 0, text_of(done)


def test_later_requests_are_a_batch_of_their_own(tiny_home: Path, grown_home: Path) -> None:
    """Eight more people: another gold model without them, an audit of their own, and none of the earlier ones is back."""
    old, new = (values(home, "erasure_request") for home in (tiny_home, grown_home))
    assert (new["people"], new["records"]) == (8, 40)
    assert new["batch"] != old["batch"]
    gone = [set((grown_home / request["excluded"]).read_text().split()) for request in (old, new)]
    assert not gone[0] & gone[1]
    live = {record.hex() for record in places(grown_home, head(grown_home))}
    assert not live & (gone[0] | gone[1])
    assert (
        values(grown_home, "gold_checkpoint")["run"] != values(tiny_home, "gold_checkpoint")["run"]
    )
    assert values(grown_home, "robustness_audit")["people"] == 8


def test_a_change_that_is_taken_back_leaves_a_working_home(
    grown_home: Path, copied: Callable[[Path], Path]
) -> None:
    """A delivery that is removed again takes nothing out: the corpus only grows, and everything below is reused."""
    home = copied(grown_home)
    (home / "inbox/washington/letter.txt").unlink()
    before = data_versions(home), head(home)
    done = dataworth(home, "run")
    assert done.returncode == 0, done.stderr
    assert {"deliveries", "corpus"} <= made(log_of(home)) <= {"deliveries", "corpus", "report"}
    after = data_versions(home)
    assert {name for name in after if after[name] != before[0][name]} <= {"deliveries", "report"}
    assert head(home) == before[1]


# --- failed checks --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory):
    """A home with one flipped bit in a block, and what the command over the corpus says of it."""
    home = tmp_path_factory.mktemp("broken") / "home"
    shutil.copytree(tiny_home, home)
    flip(stored(home, values(home, "corpus")["version"])[0])
    shutil.rmtree(home / "results/clusters")  # would have to be made again
    return home, materialize(home, "deliveries,corpus,clusters")


def test_a_gap_in_the_phase_record_fails_its_check(
    tiny_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The asset check `phases_are_complete` passes as it is; without a field, or after a failed phase, it says which."""
    from pipelines.results import latest
    from pipelines.site import open_site
    from pipelines.steps import audit_trail

    home = tmp_path_factory.mktemp("phases") / "home"
    shutil.copytree(tiny_home, home)
    site = open_site(home, None, "tiny", "1")
    found = latest(site.home.results, "checkpoint")
    path = home / "runs" / found["run"] / "phases.json"
    good = path.read_text()
    assert audit_trail.phases(site, found) == []
    record = json.loads(good)
    del record["phases"][3]["responsible"]
    path.write_text(json.dumps(record))
    assert audit_trail.phases(site, found) == ["update.responsible: missing"]
    path.write_text(good.replace("passed: clipped", "failed: clipped"))
    assert audit_trail.phases(site, found)[0].startswith("update: clipped")
    path.unlink()
    assert "cannot be read" in audit_trail.phases(site, found)[0]


def test_a_failed_blocking_check_fails_the_command(broken) -> None:
    """The exit code is 1 and what depends on the damaged asset is not made."""
    home, done = broken
    assert done.returncode == 1
    assert "Asset check 'version_verifies' on 'corpus' did not pass" in done.stdout + done.stderr
    assert "clusters" not in results(home)


def test_the_gate_names_the_failed_check(broken) -> None:
    """Continuous integration reads one line per check, with the reason, and exit code 1."""
    home, _ = broken
    done = gate(home)
    assert done.returncode == 1
    (line,) = [line for line in done.stdout.splitlines() if "version_verifies" in line]
    assert line.startswith("corpus:version_verifies: failed, ")
    assert "does not verify" in line
    assert done.stdout.endswith("gate: closed\n")


def test_our_own_command_says_which_check_failed(broken) -> None:
    """`dataworth run` gives the check's reason in one paragraph, without a traceback."""
    home, _ = broken
    done = dataworth(home, "run", "--select", "deliveries,corpus,clusters")
    assert done.returncode == 2
    assert "check version_verifies of corpus did not pass" in done.stderr
    assert "Traceback" not in done.stderr
