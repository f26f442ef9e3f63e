"""A base model as V(nobody): efficiency, its digest wherever values are claimed, and what is refused."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from graph_based import base_of
from graph_commands import environment, flip, ledger, values

from pipelines.results import latest
from pipelines.site import Site, open_site
from pipelines.steps import buyers, disputes, foundation
from pipelines.steps.tables import records
from pipelines.storage.errors import ConfigError
from pipelines.storage.tokens import load_tokenizer, train_tokenizer
from provenance import parse_json
from trainer.checkpoint import load_model
from trainer.data import TokenStore
from trainer.generate import evaluate
from trainer.manifest import ancestry, verify
from trainer.spec import load_run


def opened(home: Path, base: Path | str | None = None) -> Site:
    """The home, with another base if one is given."""
    site = open_site(home, None, environment(home)["DATAWORTH_SIZE"], None)
    if base is None:
        return site
    config = dataclasses.replace(site.config, values=dataclasses.replace(site.config.values, base=str(base)))  # fmt: skip
    return dataclasses.replace(site, config=config)


def moved(tiny_home: Path, folder: Path) -> Path:
    """The base with its run.json, away from its home."""
    base = base_of(tiny_home)
    shutil.copytree(base, folder / base.parent.name / base.name)
    shutil.copy(base.parent / "run.json", folder / base.parent.name)
    return folder / base.parent.name / base.name


def test_nobody_is_worth_the_loss_of_the_base_and_the_values_add_up_to_what_came_on_top(
    tiny_home: Path, based_home: Path
) -> None:
    """The loss without any lot is that of the base, evaluated by itself; values sum to base loss - full loss to 1e-9."""
    found, base = values(based_home, "owner_values"), base_of(tiny_home)
    run = load_run(based_home / "runs" / found["run"])
    target = TokenStore.open(based_home / "target/target_value")
    nll_Q, tokens_Q = evaluate(load_model(base, run.config.model), [target.tokens(int(i)) for i in target.live_N], 8, 128)  # fmt: skip
    own = float(nll_Q.sum() / tokens_Q.sum())
    assert found["loss_empty"] == pytest.approx(own, abs=1e-12)
    assert found["loss_all"] < own
    assert abs(sum(lot["value"] for lot in found["groups"]) - (own - found["loss_all"])) < 1e-9
    assert abs(sum(owner["value"] for owner in found["owners"]) - (own - found["loss_all"])) < 1e-9
    assert run.config.optim.lr == 0.25 * 0.003


def test_the_base_is_named_wherever_values_are_claimed(
    ask, tiny_home: Path, based_home: Path
) -> None:
    """Plan, its entry, run, entry of the values, receipt, dispute and report name the root; the documents compared are counted."""
    root = verify(base_of(tiny_home)).root
    plan = latest(based_home / "results", "evaluation_plan")
    assert plan is not None
    written = parse_json((based_home / plan["files"][0]).read_bytes())
    assert written["base"]["root"] == root == plan["base"]["root"]
    assert (written["base"]["whole"], written["base"]["compared"]) == (True, 198)
    of = {kind: [entry["body"] for entry in ledger(based_home) if entry["kind"] == kind] for kind in ("plan", "values", "run")}  # fmt: skip
    assert [body["base"] for kind in ("plan", "values") for body in of[kind]] == [root, root]
    run = values(based_home, "owner_values")["run"]
    assert [body["versions"]["initial_weights"] for body in of["run"] if body["run"] == run] == [root]  # fmt: skip
    assert root in foundation.told(plan)[0]
    said = ask(based_home, "verify", "lincoln")
    assert said.code == 0
    assert f"on top of the base model with root {root}" in said.out
    again = ask(based_home, "dispute", "--retrain", "2")
    assert again.code == 0, again.out
    assert f"V(nobody) is the loss of the base with root {root[:16]}" in again.out
    assert "coalition 1, seed " in again.out


def test_a_home_without_a_base_knows_nothing_of_it(tiny_home: Path) -> None:
    """No plan, entry or run of the default home names one."""
    assert "base" not in values(tiny_home, "evaluation_plan")
    assert not [entry for entry in ledger(tiny_home) if "base" in entry["body"]]
    assert load_run(tiny_home / "runs" / values(tiny_home, "owner_values")["run"]).init == "none"


def test_a_changed_byte_of_the_base_is_noticed(
    ask, tiny_home: Path, based_home: Path, copied: Callable[[Path], Path], tmp_path: Path
) -> None:
    """The same base elsewhere is as good; one bit of its weights, and verify, dispute and the next run say no."""
    base, home = moved(tiny_home, tmp_path / "elsewhere"), copied(based_home)
    path = home / "dataworth.toml"
    path.write_text(path.read_text().replace(str(base_of(tiny_home)), str(base)))
    site, plan = opened(home), latest(home / "results", "evaluation_plan")
    assert plan is not None
    assert foundation.problems(site, plan) == []
    flip(next(base.glob("*.distcp")))
    (problem,) = foundation.problems(site, plan)
    assert "expected a checkpoint as its run wrote it" in problem
    assert ask(home, "verify").code == 1
    # A dispute takes the base from where it lay when the values were made; this one here alone is none.
    said = ask(home, "dispute").out
    assert "base yes" in said
    assert "settings changed since: [values] base" in said
    valued = latest(home / "results", "owner_values")
    assert disputes._base(site, site, valued)[1] is False
    refused = ask(home, "run", "--select", "evaluation_plan")
    assert refused.code != 0
    assert "[values] base" in refused.out + refused.err


def test_a_base_that_does_not_fit_is_refused(
    tiny_home: Path, based_home: Path, copied: Callable[[Path], Path], tmp_path: Path
) -> None:
    """No folder, no run, another run's run.json, another shape, another tokenizer: expected, got and what to do."""
    home = copied(based_home)
    site, version = opened(home), values(home, "corpus")["version"]
    assert foundation.checked(site, version)["base"]["whole"]
    with pytest.raises(ConfigError, match=r"got no folder 'nowhere'; correct the path"):
        foundation.checked(opened(home, "nowhere"), version)
    base = moved(tiny_home, tmp_path / "elsewhere")
    assert foundation.checked(opened(home, base), version)["base"] | {"whole": True, "compared": 198} == values(home, "evaluation_plan")["base"]  # fmt: skip
    assert not foundation.checked(opened(home, base), version)["base"]["whole"]
    other = next(path for path in (tiny_home / "runs").glob("gold-*"))
    shutil.copy(other / "run.json", base.parent)
    with pytest.raises(ConfigError, match=r"expected run.json with digest .*, got "):
        foundation.checked(opened(home, base), version)
    (base.parent / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"with run.json beside it, got .*copy both again"):
        foundation.checked(opened(home, base), version)
    wide = dataclasses.replace(site.size, proxy=dataclasses.replace(site.size.proxy, ffn_dim=96))
    with pytest.raises(ConfigError, match=r"expected the shape that size 'tiny' retrains, .*ffn_dim=96.*, got .*ffn_dim=64"):  # fmt: skip
        foundation.checked(dataclasses.replace(site, size=wide), version)
    site.home.tokenizer_path.unlink()
    train_tokenizer(["another language"] * 9, 300, site.home.tokenizer_path)
    with pytest.raises(ConfigError, match=r"expected tokenizer .* this home's and frozen, got "):
        foundation.checked(site, version)


def test_a_base_that_saw_what_it_is_to_measure_is_refused(
    tiny_home: Path, based_home: Path, copied: Callable[[Path], Path]
) -> None:
    """A model of this home is known by the ledger; one record of the corpus or of a target among its documents, by fingerprint."""
    home = copied(based_home)
    version = values(home, "corpus")["version"]
    own = home / values(home, "checkpoint")["checkpoint"]
    with pytest.raises(
        ConfigError, match=r"saw none of this home's records, got one that goes back to run train-"
    ):
        foundation.checked(opened(home, own), version)
    donors = values(tiny_home, "corpus")["version"]
    text = records(opened(tiny_home), donors, "text")["text"][3]
    (home / "rival.jsonl").write_text("".join(json.dumps({"text": one, "licence": "CC0-1.0"}) + "\n" for one in (text, "Unread.")))  # fmt: skip
    with (home / "dataworth.toml").open("a") as file:
        file.write('[buyers.rival]\ntarget = "rival.jsonl"\n')
    site, corpus = opened(home), latest(home / "results", "corpus")
    assert corpus is not None
    foundation.start(site, version)
    buyers.targets(site, corpus, load_tokenizer(site.home.tokenizer_path))
    with pytest.raises(ConfigError, match=r"none of the records of a target, got one that was trained on 1 of "):  # fmt: skip
        foundation.start(site, version)
    with pytest.raises(ConfigError, match=r"none of the records that are to be valued, got one that was trained on 198 of 198"):  # fmt: skip
        _as_donor(tiny_home, home)


def test_a_base_is_refused_for_what_an_earlier_stage_of_it_was_trained_on(
    tiny_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A base of two stages: the second one's tokens are unknown to the ledger, the first one's are this home's."""
    runs, whole = ancestry(next((tiny_home / "runs").glob("unlearn-*/step-*")))
    assert ([path.name.split("-")[0] for path, _ in runs], whole) == (["unlearn", "train"], True)
    (folder, last), first = runs
    harmless = dataclasses.replace(last, tokens_digest="ab" * 32)
    monkeypatch.setattr("trainer.manifest.ancestry", lambda _: ([(folder, harmless), first], True))
    step = next(folder.glob("step-*"))
    found = foundation.Foundation(step, verify(step).root, verify(step).digest, harmless)
    with pytest.raises(ConfigError, match=r"one that goes back to run train-"):
        foundation._refuse_own(opened(tiny_home), found)


def _as_donor(tiny_home: Path, home: Path) -> None:
    """The donor's records valued on the donor's model, by a ledger that doesn't know its tokens."""
    shutil.rmtree(home)
    shutil.copytree(tiny_home, home)
    shutil.rmtree(home / "ledger")
    (home / "ledger").mkdir()
    foundation.checked(opened(home, base_of(tiny_home)), values(home, "corpus")["version"])
