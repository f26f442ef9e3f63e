"""Requests that are not the usual one: copies elsewhere, several owners, an erased version, twice, during a run, held out, too late."""

import json
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import polars as pl
import pytest
from custody_home import PLANTED, row, user_site
from graph_commands import ROOT, dataworth, values

from pipelines import requests
from pipelines.erasure.choosing import CORE_SET, EXACT, asked_method, methods
from pipelines.erasure.finishing import carry_on, enter_state
from pipelines.erasure.needles import needles
from pipelines.erasure.stores import EVIDENCE, Scope, models, results, run_inputs
from pipelines.requests import Request, RequestError
from pipelines.results import Result, latest, store
from pipelines.site import Site, open_site
from pipelines.steps.swept import UNLEARN_LR, settings_in_run, swept
from pipelines.steps.unlearning import (
    _sealed_paths,
    adapters_of,
    erasure_request,
    held_out_records,
)
from pipelines.storage import keys as key_file
from pipelines.storage.records import SCHEMA
from pipelines.storage.versions import Versions
from provenance import jcs
from trainer import load_run
from trainer.inputs import batch_plan
from unlearning.methods.forget_retain import ForgetConfig
from unlearning.methods.settings import SWEPT


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A user's home in which ada delivered bob's planted text too, as after a run of the graph."""
    made = user_site(tmp_path)
    keys = key_file.load(made.home.keys_path)
    copy = pl.DataFrame([row(keys, "ada", 9, PLANTED)], schema=SCHEMA, orient="row")
    head = Versions(made.home, keys).publish(copy)
    store(made.home.results, Result("corpus", "k", head, {"version": head, "files": []}))
    return made


@pytest.fixture
def erase(ask, site: Site) -> Callable:
    """`dataworth erase` in that home."""
    inbox = str(site.home.path.parent / "inbox")
    return lambda *words: ask(site.home.path, "erase", *words, DATAWORTH_INBOX=inbox)


def record_of(site: Site, owner: str, text: str) -> str:
    """Id of a record."""
    versions = Versions(site.home, key_file.load(site.home.keys_path))
    frame = versions.read(versions.head(), ["record_id", "owner", "text"])
    (found,) = frame.filter(pl.col("owner") == owner, pl.col("text") == text)["record_id"]
    return found.hex()


def carried_out(site: Site) -> list[Request]:
    """Suspend, pretend that the audit was made, and finish; the requests afterwards."""
    head = latest(site.home.results, "corpus")
    erasure_request(site, head)
    for request in requests.pending(site.home):
        for state in ("unlearned", "audited"):
            requests.advance(site.home, request, state)
            enter_state(site, request, state)
    carry_on(site, asked=[])
    return requests.load(site.home)


def texts(site: Site) -> list[str]:
    """What is left in the version in force."""
    versions = Versions(site.home, key_file.load(site.home.keys_path))
    return versions.read(versions.head(), ["text"])["text"].to_list()


def test_a_copy_elsewhere_is_named_and_stays(erase, site: Site) -> None:
    """Without --everywhere the other owner is named, nothing of theirs is asked for, and their copy is there afterwards."""
    said = erase("--record", record_of(site, "bob", PLANTED))
    assert said.code == 0
    assert "the same or nearly the same text was also delivered by ada" in said.out
    assert "--everywhere" in said.out
    (request,) = carried_out(site)
    assert request.state == "shredded"
    assert texts(site).count(PLANTED) == 1


def test_everywhere_takes_the_copies_too(erase, site: Site) -> None:
    """With --everywhere both records are in the request, both owners are named, and the text is nowhere afterwards."""
    wanted = {record_of(site, owner, PLANTED) for owner in ("ada", "bob")}
    said = erase("--record", record_of(site, "bob", PLANTED), "--everywhere")
    assert "2 records of 2 owners" in said.out
    assert "these owners' records are meant: ada, bob" in said.out
    (request,) = requests.load(site.home)
    assert set(request.record_ids) == wanted
    (request,) = carried_out(site)
    assert request.state == "shredded"
    assert PLANTED not in texts(site)
    assert "Rain again." in texts(site)


def test_records_of_several_owners_are_one_request_and_said(erase, site: Site) -> None:
    """Two records of two owners by id: one request, which names both owners, and erases these records and no others."""
    ids = [record_of(site, "ada", "Cloth is counted."), record_of(site, "bob", "Rain again.")]
    said = erase(*(word for one in ids for word in ("--record", one)))
    assert "2 records of 2 owners" in said.out
    assert "ada, bob" in said.out
    carried_out(site)
    assert sorted(texts(site)) == sorted(["The loom weaves.", PLANTED, PLANTED])


def test_an_erased_version_is_refused(erase, site: Site) -> None:
    """Records can't be named in a version that has lost some since; the sentence says what to do, nothing is written."""
    before = latest(site.home.results, "corpus")["version"]
    erase("--record", record_of(site, "bob", PLANTED))
    carried_out(site)
    said = erase("--owner", "bob", "--version", before[:16])
    assert said.code == 2
    assert "holds records that were erased since; name records of a later version" in said.err
    assert len(requests.load(site.home)) == 1


def test_the_same_request_after_it_was_finished_is_told(erase, site: Site) -> None:
    """While it is open: its state. After it is shredded: that nothing is there any more, and no second request."""
    words = ("--record", record_of(site, "bob", PLANTED))
    erase(*words)
    assert "was made before: received" in erase(*words).out
    carried_out(site)
    head = Versions(site.home, key_file.load(site.home.keys_path)).head()
    store(site.home.results, Result("corpus", "k2", head, {"version": head, "files": []}))
    said = erase(*words)
    assert said.code == 2
    assert "is shredded: nothing of them is in the corpus any more" in said.err
    assert len(requests.load(site.home)) == 1


def test_a_request_during_a_run_waits_for_the_next(erase, site: Site) -> None:
    """It is taken and told when it will act; finishing is refused until the run has ended."""
    hold = (
        "import sys; from pathlib import Path; from pipelines.storage.home import Home\n"
        "with Home(Path(sys.argv[1])).lock('run'): print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", hold, str(site.home.path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=-1, stdout=-1) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"held\n"
        said = erase("--record", record_of(site, "bob", PLANTED))
        assert said.code == 0
        assert "it ends as it began, and the next one acts on this request" in said.out
        late = erase("--finish")
        assert late.code == 2
        assert "a run is going on" in late.err
        run.communicate()
    (request,) = requests.load(site.home)
    assert request.state == "received"


def test_nothing_can_be_audited_after_shredding(erase, site: Site) -> None:
    """The sealed text and its key are gone: asking for them names the request and where the audit of before stands."""
    erase("--record", record_of(site, "bob", PLANTED))
    made = erasure_request(site, latest(site.home.results, "corpus"))[1]
    batch = Result("erasure_request", "k", "v", made)
    assert _sealed_paths(site, batch, site.home.runs / "any")["file"].endswith("sealed")
    carried_out(site)
    with pytest.raises(RequestError, match=r"shredded.*the audit of before stands in the ledger"):
        _sealed_paths(site, batch, site.home.runs / "any")


def test_a_method_is_chosen_by_the_request(erase, site: Site) -> None:
    """--method goes before the configuration; two methods in one batch, and an unknown name, are refused."""
    said = erase("--owner", "bob", "--method", "wishing")
    assert said.code == 2
    assert "expected one of exact" in said.err
    assert not requests.load(site.home)
    erase("--record", record_of(site, "bob", "Rain again."), "--method", EXACT)
    (first,) = requests.load(site.home)
    assert asked_method([first]) == EXACT
    assert asked_method([]) == ""
    erase("--record", record_of(site, "ada", "Cloth is counted."), "--method", "rmu")
    head = latest(site.home.results, "corpus")
    with pytest.raises(RequestError, match="exact and for rmu"):
        erasure_request(site, head)
    assert {one.state for one in requests.load(site.home)} == {"received"}
    requests.advance(site.home, first, "audited")
    assert asked_method(requests.pending(site.home)) == "rmu"
    assert erasure_request(site, head)[1]["asked_method"] == "rmu"
    assert {"exact", "coreset", "newton", "npo", "task_vector"} <= set(methods())


def test_a_core_set_is_chosen_by_gradients(erase) -> None:
    """NPO's loss, numbers and rate on 0.3 of the records; one at random is a run's setting for studies and no method that a request may name."""
    runs = {name: settings_in_run(name) for name in ("coreset", "npo", "newton")}
    core = runs["coreset"][1]
    assert core == runs["npo"][1] | {"core_set": "0.3", "core_choice": "gradient"}
    assert swept("coreset") == swept("npo")
    for choice in ("gradient", "random"):
        read = ForgetConfig.from_extra({"sealed": {}, "tokenizer": "t"} | core | {"core_choice": choice})  # fmt: skip
        assert (read.core_set, read.core_choice) == (0.3, choice)
    assert runs["coreset"][0] == runs["npo"][0]
    assert "core_set" not in runs["npo"][1]
    assert runs["newton"] == ("unlearning.methods.edits:run", {"method": "newton"})
    said = erase("--owner", "bob", "--method", "coreset_random")
    assert said.code == 2
    assert "expected one of exact" in said.err
    assert "coreset, " in said.err


def test_a_held_out_record_leaves_the_target(ask, copied, tiny_home: Path) -> None:
    """A record that only measured is suspended, never unlearned, and gone from every part of the target at the end."""
    home = copied(tiny_home)
    site = open_site(home, None, "tiny", None)
    for path in site.home.requests.glob("*.json"):
        path.unlink()  # the demonstration's own request
    held = held_out_records(site)
    name, text = held["record_id"][0].hex(), held["text"][0]
    said = ask(home, "erase", "--record", name)
    assert said.code == 0, said.err
    corpus = latest(site.home.results, "corpus")
    made = erasure_request(site, corpus)[1]
    assert (made["records"], made["held_out"], made["requests"]) == (0, 1, [])
    mine = next(one for one in requests.load(site.home) if name in one.record_ids)
    assert mine.state == "audited"
    carry_on(site, asked=[])
    mine = next(one for one in requests.load(site.home) if name in one.record_ids)
    assert mine.state == "shredded", mine.note
    left = held_out_records(site)
    assert len(left) == len(held) - 1
    assert text not in left["text"].to_list()
    states = [
        json.loads(path.read_text())["state"] for path in sorted(site.home.requests.glob("*.json"))
    ]
    assert "refused" not in states


def test_a_guess_of_who_asked_for_what_is_not_in_the_ledger(erase, site: Site) -> None:
    """Owner and source are guessable: no entry, file name or inventory holds a digest that they alone give; the same words are known again."""
    words = ("--record", record_of(site, "bob", PLANTED))
    assert erase(*words).code == 0
    (request,) = requests.load(site.home)
    guess = sha256(jcs(request.words())).hexdigest()
    assert request.id == sha256(jcs(request.words() | {"nonce": request.nonce})).hexdigest()[:16]
    assert len(request.nonce) == 64
    carried_out(site)
    assert erase(*words).code == 2
    held = [path for path in site.home.path.rglob("*") if path.is_file() and (guess[:16] in path.name or guess[:16].encode() in path.read_bytes())]  # fmt: skip
    assert held == []
    old = Request(kind="erase", owner="bob", record_ids=request.record_ids, number=1)
    assert old.id == sha256(jcs(old.words())).hexdigest()[:16]
    requests.save(site.home, old)
    assert requests.same_words(site.home, old) == old


def test_values_whose_lots_went_with_an_erasure_are_made_again(
    copied: Callable[[Path], Path], tiny_home: Path
) -> None:
    """A deadline can pass within a run: the lots of values that stand go too, so their note goes, or the next report has none."""
    site = open_site(copied(tiny_home), None, "tiny", None)
    none: frozenset = frozenset()
    scope = Scope(site, none, (), none, needles((), (), none), none, none)
    assert results(scope) == 0
    assert run_inputs(scope)
    results(scope)
    assert latest(site.home.results, "owner_values") is None
    assert latest(site.home.results, "influence") is not None


def test_an_erasure_empties_the_judges_run_too(
    copied: Callable[[Path], Path], tiny_home: Path
) -> None:
    """Its retrainings read the records and its rows tell of them: nothing but evidence stays, and the judgement is made again."""
    site = open_site(copied(tiny_home), None, "tiny", None)
    versions = Versions(site.home, key_file.load(site.home.keys_path))
    none: frozenset = frozenset()
    everything = frozenset(versions.ids())
    run = site.home.runs / latest(site.home.results, "value_judgement")["run"]
    assert {"bank", "judgement.json", "judged.parquet"} <= {path.name for path in run.iterdir()}
    scope = Scope(site, none, (), none, needles((), (), none), everything, none)
    assert models(scope) > 0
    assert {path.name for path in run.iterdir()} <= EVIDENCE
    results(scope)
    assert latest(site.home.results, "value_judgement") is None


def test_adapters_are_trained_where_they_are_configured(
    copied: Callable[[Path], Path], tiny_home: Path
) -> None:
    """[erasure] lora_rank: the next run unlearns by adapters, on one process, and says so; what has none is not asked for them."""
    home = copied(tiny_home)
    path = home / "dataworth.toml"
    assert "lora_rank = 0" in path.read_text()
    before = values(home, "unlearned_checkpoint")
    path.write_text(path.read_text().replace("lora_rank = 0", "lora_rank = 2"))
    site = open_site(home, None, "tiny", None)
    assert [adapters_of(site, method) for method in (EXACT, "sharded", "npo", "rmu")] == [
        0,
        0,
        2,
        2,
    ]
    with pytest.raises(RequestError, match="'newton' changes all weights at once"):
        adapters_of(site, "newton")
    done = dataworth(home, "run")
    assert done.returncode == 0, done.stderr
    found = values(home, "unlearned_checkpoint")
    assert found["method"] == "NPO with a retain term, adapters of rank 2"
    assert found["root"] != before["root"]
    run = json.loads((home / "runs" / found["run"] / "run.json").read_text())
    assert run["config"]["extra"]["lora"] == {"rank": 2}


def test_the_method_takes_what_the_sweep_chose(tiny_home: Path) -> None:
    """Rate, numbers, pushed tokens and neighbours are the sweep's; retained tokens are counted against the share, the original's are not."""
    chosen = SWEPT["npo"]
    found = values(tiny_home, "unlearned_checkpoint")["run"]
    run = load_run(tiny_home / "runs" / found)
    assert run.config.optim.lr == float(chosen.rate)
    assert run.config.extra["settings"] == chosen.settings
    assert run.config.extra["forget_tokens"] == chosen.recipe["forget_tokens"]
    share = float(chosen.recipe["neighbours"])
    of = {}
    for name in (found, values(tiny_home, "checkpoint")["run"]):
        one = load_run(tiny_home / "runs" / name)
        plan = batch_plan(one, tiny_home / "runs" / name)
        store = plan.store
        gone = {index for index in store.live_N.tolist() if store.record_id(index) in plan.excluded}
        tokens = dict.fromkeys(store.owners, 0)
        for index in store.live_N.tolist():
            times = store.repeats(one.config.mixture)[store.owner_of(index)]
            tokens[store.owner_of(index)] += times * len(store.tokens(index)) * (index not in gone)
        of[name] = tokens["registry"] / sum(tokens.values())
        # Who stands how often is said by pseudonym: a run.json can be shown to people who may not know the owners.
        assert set(one.config.mixture.repeats) <= {store.pseudonym(owner) for owner in store.owners}
        text = (tiny_home / "runs" / name / "run.json").read_text()
        assert not [owner for owner in store.owners if owner in text]
    retained, trained = of.values()
    assert retained == pytest.approx(share, abs=0.02)
    assert trained < share - 0.2
    # A method that no sweep looked at keeps its published numbers and the training's mixture.
    assert swept("rmu") == (UNLEARN_LR, {}, {})
    assert swept(CORE_SET) == chosen
