"""The layout of the released model is chosen in the configuration, and an impossible one is refused before anything starts."""

import json
from pathlib import Path

import pytest
from graph_commands import dataworth, text_of, values

from pipelines.runs import Job
from pipelines.settings import read_settings
from pipelines.site import open_site
from pipelines.steps.training import model_job
from pipelines.storage.config import ConfigError, TrainingConfig, parse
from trainer.layout import Layout

LAYOUT = "dp_shard=2 tp=2"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home whose `dataworth.toml` asks for a layout."""
    (tmp_path / "dataworth.toml").write_text(f'size = "tiny"\n[training]\nlayout = "{LAYOUT}"\n')
    return tmp_path


def test_the_configuration_names_a_layout(home: Path) -> None:
    """`[training] layout` decides; DATAWORTH_WORLD, a number or degrees, overrides it; without both the size decides."""
    site = open_site(home, None, None, None)
    assert (site.size.layout, site.world) == (LAYOUT, 4)
    site = open_site(home, None, None, "3")
    assert (site.size.layout, site.world) == ("dp_replicate=3", 3)
    site = open_site(home, None, None, "pp=2")
    assert (site.size.layout, site.world) == ("pp=2 schedule=1f1b microbatches=2", 2)
    assert not site.size.model.tied
    (home / "dataworth.toml").write_text('size = "small"\n')
    site = open_site(home, None, None, None)
    assert (site.size.layout, site.world) == ("", 2)
    assert site.size.model.tied


def test_the_environment_is_passed_on_as_it_is() -> None:
    """Settings keep the words, whose meaning needs the size."""
    assert read_settings({"DATAWORTH_WORLD": "sp=2"}).world == "sp=2"
    assert read_settings({}).world is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tp=3",
            r"num_heads 2 is not a multiple of tp \* sp = 3 \* 1.*Nearest possible: dp_replicate=3",
        ),
        ("dp_shard=16", "less than one row for each"),
        ("pp=2 microbatches=3", "batch.rows 8 is not a multiple"),
        ("tp", "layout.tp: expected a positive number, got ''"),
        ("fsdp=2", "expected dp_replicate, dp_shard"),
        ("0", "expected degrees of at least 1"),
    ],
)
def test_an_impossible_layout_is_one_error(home: Path, text: str, message: str) -> None:
    """What can't be read or divided is refused with where it stands and what is possible."""
    with pytest.raises(ConfigError, match=message) as refused:
        open_site(home, None, None, text)
    assert str(refused.value).startswith(f"DATAWORTH_WORLD is {text!r}: ")


def test_a_misspelt_layout_in_the_file_is_refused() -> None:
    """The file is checked when it is read."""
    with pytest.raises(ConfigError, match=r"\[training\] layout: expected .* got 'gpus=2'"):
        parse('[training]\nlayout = "gpus=2"\n')
    assert parse('[training]\nlayout = "dp_shard=2"\n').training == TrainingConfig(
        layout="dp_shard=2"
    )


def test_an_objective_of_its_own_runs_on_the_layout_of_the_model(home: Path) -> None:
    """Unlearning shares the work as the training did, tensors included."""
    site = open_site(home, None, None, "dp_replicate=2 dp_shard=2 tp=2")
    result = {"chosen": site.size.layout, "world": 8, "repeated": [], "selection": {"file": ""}}
    plan = {"seeds": {"train": 1}}

    def job(**changes: object) -> Job:
        return model_job(site, plan, result, **changes)

    assert (job().layout, job().world) == (Layout(dp_replicate=2, dp_shard=2, tp=2), 8)
    other = job(entry="unlearning.methods.npo:run", kind="unlearn")
    assert (other.layout, other.world) == (Layout(dp_replicate=2, dp_shard=2, tp=2), 8)


def test_the_command_refuses_before_it_starts(tmp_path: Path) -> None:
    """`dataworth run` with an impossible layout says so in one sentence, and no run, log or Dagster event exists."""
    done = dataworth(tmp_path, "run", DATAWORTH_WORLD="tp=3")
    assert done.returncode != 0
    assert "Traceback" not in text_of(done)
    assert "num_heads 2 is not a multiple of tp * sp = 3 * 1" in text_of(done)
    assert not list((tmp_path / "logs").glob("*"))
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["sp=2", "dp_shard=2 tp=2", "pp=2 microbatches=4"])
def test_the_graph_trains_through_a_layout(tmp_path: Path, layout: str) -> None:
    """`dataworth run` on the demonstration's corpus: the released model and its gold model train on the layout."""
    done = dataworth(tmp_path, "run", DATAWORTH_WORLD=layout)
    assert done.returncode == 0, text_of(done)
    plan = values(tmp_path, "training_plan")
    assert plan["chosen"].startswith(layout.split(maxsplit=1)[0])
    reasons = {row["layout"]: row["reason"] for row in plan["layouts"]}
    assert reasons.pop(plan["chosen"]) == "chosen"
    assert all(reasons.values())
    for kind in ("train", "gold"):
        (directory,) = (tmp_path / "runs").glob(f"{kind}-*")
        run = json.loads((directory / "run.json").read_bytes())
        assert run["layout"]["dp_replicate"] == 1
        assert json.loads((directory / "result.json").read_bytes())["status"] == "done"
