"""`dataworth confirm`: the sealed part of the target is looked at once, in the ledger, and its texts stay nowhere."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from graph_commands import ledger, values

from pipelines.site import open_site
from pipelines.steps.ledger import corpus_keys
from provenance.sealing import unseal


def test_the_sealed_part_is_opened_once_and_measured(
    tiny_home: Path, copied: Callable[[Path], Path], ask: Callable[..., tuple[int, str, str]]
) -> None:
    """One look with its loss and threshold; entered before it happens; a second is refused; no text of it lies in the home."""
    home = copied(tiny_home)
    code, out, err = ask(home, "confirm")
    said = re.search(
        r"(\d+) records: loss ([\d.]+) ± [\d.]+ .*? gain over unigrams (-?[\d.]+) .*?threshold ([\d.]+): (holds|does not hold)",
        out,
    )
    assert said, (out, err)
    assert (code, said[5]) == ((0, "holds") if float(said[3]) >= float(said[4]) else (1, "does not hold"))  # fmt: skip
    opened, measured = (entry["body"] for entry in ledger(home) if entry["kind"] == "confirm")
    plan, model = values(home, "evaluation_plan")["digest"], values(home, "checkpoint")["root"]
    assert opened == {"plan": plan, "checkpoint": model, "state": "opened"}
    assert (measured["state"], measured["records"]) == ("measured", int(said[1]))
    assert abs(measured["loss_micronats"] / 1e6 - float(said[2])) < 1e-4
    code, _, err = ask(home, "confirm")
    assert code == 2
    assert "a confirmation is looked at once" in err
    assert len([1 for entry in ledger(home) if entry["kind"] == "confirm"]) == 2
    site = open_site(home, None, "tiny", None)
    sealed = (home / "target/target_confirm.sealed").read_bytes()
    plain = unseal(corpus_keys(site).sealing_key("target_confirm"), sealed, b"target_confirm")
    texts = [text for text in pl.read_parquet(io.BytesIO(plain))["text"] if len(text) > 60]
    assert texts
    written = [path for path in home.rglob("*") if path.is_file() and path.stat().st_mtime >= (home / "target/openings").stat().st_mtime]  # fmt: skip
    assert not any(text[:60].encode() in path.read_bytes() for path in written for text in texts)
    assert ask(home, "verify")[0] == 0
    assert json.dumps(measured).isascii()


def test_a_look_that_was_killed_goes_on_and_another_model_has_none(
    tiny_home: Path, copied: Callable[[Path], Path], ask: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Killed after the seal was broken: the same model is measured by the next command, a model that came since is refused."""
    home = copied(tiny_home)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("pipelines.evaluate.measure", killed)
        ask(home, "confirm")
    assert len(list((home / "target/openings").iterdir())) == 1
    states = [one["body"]["state"] for one in ledger(home) if one["kind"] == "confirm"]
    assert states == ["opened"]
    result = home / "results/checkpoint/latest.json"
    kept = result.read_text()
    body = json.loads(kept)
    other = values(home, "gold_checkpoint")["golds"][0]
    body["values"] |= {"root": other["root"], "checkpoint": other["checkpoint"]}
    result.write_text(json.dumps(body))
    code, _, err = ask(home, "confirm")
    assert code == 2
    assert "opened for plan" in err
    result.write_text(kept)
    assert ask(home, "confirm")[0] in {0, 1}
    states = [one["body"]["state"] for one in ledger(home) if one["kind"] == "confirm"]
    assert states == ["opened", "measured"]
    assert ask(home, "confirm")[0] == 2
