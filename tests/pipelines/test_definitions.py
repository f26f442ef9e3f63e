"""The graph as it is declared: keys, groups, checks, automation, and that it loads without a word too many."""

import json
import re
import shutil
import tomllib
from pathlib import Path

import dagster as dg
import pytest
from graph_commands import BIN, ROOT, Done, command

from pipelines.definitions import defs
from pipelines.defs import ASSETS

GROUPS = {
    "corpus": {"deliveries", "corpus", "quarantine", "clusters", "tokens", "target"},
    "valuation": {"entropy", "quality", "influence", "value_judgement", "owner_values", "values", "prices"},
    "provenance": {"commitment", "evaluation_plan", "receipts"},
    "training": {"training_plan", "checkpoint", "evaluation"},
    "unlearning": {
        "erasure_request", "gold_checkpoint", "unlearned_checkpoint", "robustness_audit", "report", "shredding",
    },
}  # fmt: skip
CHECKS = {
    "corpus:counts_add_up", "corpus:version_verifies", "clusters:clusters_cover_the_corpus", "tokens:tokens_equal_text",
    "target:target_is_disjoint", "entropy:entropy_is_bounded", "owner_values:values_are_efficient", "value_judgement:judgement_follows_from_its_rows",
    "prices:prices_sum_to_the_pool", "commitment:ledger_verifies", "receipts:receipts_verify",
    "checkpoint:checkpoint_root_holds", "checkpoint:phases_are_complete", "evaluation:plan_was_followed",
    "erasure_request:suspended_records_left_head", "robustness_audit:verdict_follows_from_its_rows", "shredding:shredded_requests_left_nothing",
    "report:report_is_self_contained",
}  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> dg.Definitions:
    """The code location."""
    return defs()


@pytest.fixture(scope="module")
def graph(loaded: dg.Definitions):
    """Its asset graph."""
    return loaded.resolve_asset_graph()


def nodes(graph) -> dict:
    """Asset nodes by name."""
    return {key.to_user_string(): graph.get(key) for key in graph.get_all_asset_keys()}


def test_the_keys_are_the_pinned_ones(graph) -> None:
    """The graph has exactly the assets that `pipelines.defs.ASSETS` lists, each once."""
    assert sorted(nodes(graph)) == sorted(ASSETS)
    assert len(set(ASSETS)) == len(ASSETS)


def test_the_groups_are_the_five_of_the_design(graph) -> None:
    """A user's first picture: five groups, each with its own assets."""
    found: dict[str, set[str]] = {}
    for name, node in nodes(graph).items():
        found.setdefault(node.group_name, set()).add(name)
    assert found == GROUPS


def test_the_checks_are_the_pinned_ones_and_all_block(graph) -> None:
    """A failed check of any kind stops what is downstream: Dagster exits 0 after one that doesn't block."""
    keys = graph.asset_check_keys
    assert {f"{key.asset_key.to_user_string()}:{key.name}" for key in keys} == CHECKS
    assert all(graph.get(key).blocking for key in keys)
    assert all(graph.get(key).description for key in keys)


@pytest.mark.parametrize("name", ASSETS)
def test_every_asset_introduces_itself(graph, name: str) -> None:
    """Description, owners, kinds and code version: the page of an asset has no empty box."""
    node = nodes(graph)[name]
    assert node.description
    assert re.match(r"[A-Z]", node.description)
    assert node.owners
    assert all(owner.startswith("team:") for owner in node.owners)
    assert node.kinds
    assert node.code_version
    assert not node.is_partitioned  # the required command exits 1 on a partitioned asset


def test_schedule_and_sensor_run_by_default(loaded: dg.Definitions) -> None:
    """Dagster's own default is STOPPED: a fresh deployment would never look at its inbox."""
    repository = loaded.get_repository_def()
    assert [schedule.name for schedule in repository.schedule_defs] == ["nightly"]
    assert [sensor.name for sensor in repository.sensor_defs] == ["inbox"]
    assert repository.schedule_defs[0].default_status is dg.DefaultScheduleStatus.RUNNING
    assert repository.sensor_defs[0].default_status is dg.DefaultSensorStatus.RUNNING
    assert (
        repository.schedule_defs[0].job_name == repository.sensor_defs[0].job_name == "everything"
    )


def test_every_part_of_the_graph_is_bound(loaded: dg.Definitions) -> None:
    """Every asset and check finds its resources."""
    dg.Definitions.validate_loadable(loaded)


def test_the_sensor_starts_one_run_for_one_content(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home whose inbox was taken in starts nothing; a new file starts one run, and its cursor none again."""
    home = tmp_path / "home"
    shutil.copytree(tiny_home, home)
    from pipelines.resources import HomeResource

    monkeypatch.setenv("DAGSTER_HOME", str(home / "dagster"))
    sensor = defs().get_repository_def().get_sensor_def("inbox")

    def tick(cursor: str | None):
        with dg.DagsterInstance.ephemeral() as instance:
            context = dg.build_sensor_context(
                instance=instance, cursor=cursor, resources={"home": HomeResource(path=str(home), size="tiny")}
            )  # fmt: skip
            return sensor.evaluate_tick(context)

    quiet = tick(None)
    assert quiet.run_requests in (None, [])
    (home / "inbox/wilson/more.txt").write_text("One more message.\n")
    loud = tick(quiet.cursor)
    assert len(loud.run_requests) == 1
    assert loud.run_requests[0].run_key
    assert tick(loud.cursor).run_requests in (None, [])


def notices(done: Done) -> list[str]:
    """Warnings in a program's output, but Dagster's own word on its successor command."""
    lines = (done.stdout + done.stderr).splitlines()
    return [line for line in lines if "Warning" in line and "SupersessionWarning" not in line]


def test_the_definitions_validate_from_the_repository_root(tmp_path: Path) -> None:
    """`dagster definitions validate` finds one location, by its pinned name, and warns of nothing but itself."""
    (tmp_path / "dagster").mkdir()
    shutil.copy(ROOT / "pipelines/deploy/dagster.yaml", tmp_path / "dagster")
    done = command(
        tmp_path, str(BIN / "dagster"), "definitions", "validate", "-m", "pipelines.definitions"
    )
    assert done.returncode == 0, done.stderr
    assert (
        "Validation successful for code location pipelines.definitions."
        in done.stdout + done.stderr
    )
    assert notices(done) == []


@pytest.mark.slow
def test_the_newer_command_checks_the_same_location(tmp_path: Path) -> None:
    """`dg check defs` reads `[tool.dg]` and is as quiet: the state of sensors hangs on the location's name."""
    (tmp_path / "dagster").mkdir()
    shutil.copy(ROOT / "pipelines/deploy/dagster.yaml", tmp_path / "dagster")
    done = command(tmp_path, str(BIN / "dg"), "check", "defs")
    assert done.returncode == 0, done.stderr
    assert notices(done) == []


def test_the_location_has_one_name() -> None:
    """`dagster dev`, `dg dev` and `-m` give the location the same name, so that cursors stay."""
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tool["dagster"] == {
        "module_name": "pipelines.definitions",
        "code_location_name": "pipelines.definitions",
    }
    assert tool["dg"]["project"]["code_location_name"] == "pipelines.definitions"
    assert tool["dg"]["project"]["code_location_target_module"] == "pipelines.definitions"


def test_the_shipped_settings_are_quiet_and_private(tmp_path: Path) -> None:
    """`dagster.yaml` is read by this release, with telemetry and the welcome dialog off."""
    import yaml

    settings = yaml.safe_load((ROOT / "pipelines/deploy/dagster.yaml").read_text())
    assert settings["telemetry"] == settings["nux"] == {"enabled": False}
    (tmp_path / "dagster.yaml").write_text(json.dumps(settings))
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        assert not instance.telemetry_enabled
        assert not instance.nux_enabled


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("DATAWORTH_EXECUTOR", "threads", "expected one of in_process, multiprocess"),
        ("DATAWORTH_WORLD", "none", "expected dp_replicate, dp_shard"),
        ("DATAWORTH_SIZE", "huge", "expected one of tiny, small"),
    ],
)
def test_a_wrong_setting_is_named(ask, tmp_path: Path, name: str, value: str, message: str) -> None:
    """A variable out of range stops every command with one line that says what is expected."""
    ask(tmp_path / "home", "init")
    said = ask(tmp_path / "home", "status", **{name: value})
    assert said.code == 2
    assert f"{value!r}" in said.err
    assert message in said.err
