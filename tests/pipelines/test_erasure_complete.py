"""The completeness of an erasure: a planted text is first found in every store, then in none; killed anywhere, it is carried on."""

import datetime as dt
import gzip
import io
import json
import shutil
import signal
import sqlite3
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import zstandard
from custody_home import PLANTED, row, user_site, write_receipts
from graph_commands import ROOT

from pipelines import requests
from pipelines.erasure.batches import groups
from pipelines.erasure.finishing import ErasureError, carry_on, enter_state, inventory_path
from pipelines.erasure.stores import STORES
from pipelines.requests import STATES, Request
from pipelines.results import Result, store
from pipelines.site import Site
from pipelines.steps import audit_trail
from pipelines.steps.ledger import open_ledger
from pipelines.steps.unlearning import erasure_request
from pipelines.storage import keys as key_file
from pipelines.storage.buyers import write_buyer_target
from pipelines.storage.errors import SaltError
from pipelines.storage.intake import read_deliveries
from pipelines.storage.records import SCHEMA
from pipelines.storage.salts import SaltStore
from pipelines.storage.suppression import SuppressionList
from pipelines.storage.tokens import load_tokenizer, train_tokenizer, write_version_tokens
from pipelines.storage.versions import Versions
from provenance import keyed

BY_PLACE = (
    "tables/surprisal.f16", "tables/surprisal.json", "tables/.surprisal.part", "tables/surprisal.model.f16", "tables/surprisal.model.json",
    "tables/.surprisal.model.part", "tables/.surprisal.parquet.0123456789abcdef.tmp", "tables/model_surprisal.f16", "runs/inputs/lots-000000000000.bin", "reports/audit-000000000000.pdf",
)  # fmt: skip
LONG = PLANTED + " It is the lodger of the third floor, 7719 by name of lot. " * 90
"""Longer than a page of SQLite."""


def words(site: Site) -> dict:
    """The planted record in the forms in which it may lie about."""
    keys = key_file.load(site.home.keys_path)
    identity, content = row(keys, "bob", 0, PLANTED)[:2]
    return {"id": identity, "fingerprint": content, "keys": keys}


def plant(site: Site) -> None:
    """Put the text, its tokens or its id into every store of a home, as the program and accidents do."""
    home, known = site.home, words(site)
    keys, identity = known["keys"], known["id"]
    versions = Versions(home, keys)
    first = versions.head()
    tokenizer = train_tokenizer([PLANTED, "the loom weaves cloth"], 300, home.tokenizer_path)
    more = pl.DataFrame([row(keys, "cyd", 0, "A third voice.")], schema=SCHEMA, orient="row")
    later = versions.publish(more)
    for version in (first, later):
        write_version_tokens(versions, version, tokenizer, home.tokens / version)
    write_receipts(site, keys, later)
    texts = (PLANTED, "Another buyer asks about looms.", "And about cloth.")
    asked = [row(keys, "target", place, text) for place, text in enumerate(texts)]
    write_buyer_target(home, keys, "acme", pl.DataFrame(asked, schema=SCHEMA, orient="row"), tokenizer, ())  # fmt: skip
    half_written = home.target / "buyers/killed"
    shutil.copytree(home.target / "buyers/acme", half_written)
    ids = np.array(tokenizer.encode([PLANTED])[0])
    _plant_run(site, "train-aaaaaaaaaaaa", later, ids, identity)
    inputs = home.runs / "inputs"
    inputs.mkdir()
    (inputs / "copies-000000000000.txt").write_text(identity.hex() + "\n")
    for name in BY_PLACE:  # numbers of records by their place: no search can tell whose they are
        (home.path / name).write_bytes(np.arange(8, dtype="<f2").tobytes())
    table = pl.DataFrame(
        {"subject_kind": ["record"], "subject_id": [identity.hex()], "value_nano": [7]}
    )
    table.write_parquet(home.table("values"))
    pl.DataFrame({"record_id": [identity], "cluster": [1]}).write_parquet(home.table("clusters"))
    mark = keyed(keys.k_file, PLANTED.encode())
    for name in ("quarantine", "duplicates"):
        pl.DataFrame({"owner": ["bob"], "raw_digest": [mark]}).write_parquet(home.table(name))
    (home.path / "logs/run.log").write_text(f"one line\na record: {PLANTED}\nlast line\n")
    (home.path / "logs/wide.log").write_bytes(PLANTED.encode("utf-16"))
    (home.staging / "left.gz").write_bytes(gzip.compress(PLANTED.encode()))
    (home.staging / "left.zst").write_bytes(zstandard.compress(LONG.encode()))
    (home.path / "reports/page.html").write_text(f"<p>{PLANTED}</p>")
    store(home.results, Result("quality", "k", "v", {"worst": identity.hex(), "files": []}))
    database = home.path / "dagster/history/runs.db"
    database.parent.mkdir(parents=True)
    with closing(sqlite3.connect(database)) as db:
        db.execute("create table logs (id integer primary key, event text, raw blob)")
        db.execute(
            "insert into logs (event, raw) values (?, ?)", (json.dumps({"m": LONG}), identity)
        )
        db.execute("insert into logs (event) values ('kept')")
        db.commit()


def _plant_run(site: Site, name: str, version: str, ids: np.ndarray, identity: bytes) -> None:
    folder = site.home.runs / name
    (folder / "bank").mkdir(parents=True)
    (folder / "step-1").mkdir()
    run = {"kind": "train", "corpus_version": version, "init_root": "none", "excluded": None}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "step-1/manifest.json").write_text(json.dumps({"root": "f" * 64}))
    (folder / "step-1/weights").write_bytes(bytes(100))
    (folder / "trainer.log").write_text(f"refused: {PLANTED}\nstep 1\n")
    np.savez_compressed(folder / "bank/0.npz", tokens=ids.astype(np.int64))
    pl.DataFrame({"record_id": [identity], "credit": [0.5]}).write_parquet(
        folder / "influence.parquet"
    )


# --- an oracle of its own: what a careful stranger would try -----------------------------------------------------------


def parts(path: Path):  # noqa: C901 - one branch per kind of file
    """(texts and bytes, lists of integers) that a file decodes to."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    if path.suffix == ".zst":
        data = zstandard.decompress(data)
    yield data, []
    if path.suffix == ".parquet":
        frame = pl.read_parquet(path, memory_map=False)
        for column in frame:
            if column.dtype in (pl.String, pl.Binary):
                joined = [
                    one.encode() if isinstance(one, str) else one
                    for one in column
                    if one is not None
                ]
                yield b"\n".join(joined), []
    elif path.suffix == ".arrow":
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
        yield b"\n".join(one for one in table["record_id"].to_pylist() if one), []
        for tokens in table["tokens"].to_pylist():
            yield b"", tokens or []
    elif path.suffix == ".npz":
        with np.load(io.BytesIO(data)) as arrays:
            for name in arrays:
                yield arrays[name].tobytes(), arrays[name].ravel().tolist()
        assert zipfile.is_zipfile(path)
    elif path.suffix == ".db":
        with closing(sqlite3.connect(path)) as db:
            for values in db.execute("select event, raw from logs"):
                yield b"\n".join(v.encode() if isinstance(v, str) else v for v in values if v), []


def stores_that_hold(site: Site, grams: set) -> set[str]:
    """Top folders (and kind of file) in which the planted record is found: text, 8-grams of its tokens, or its id."""
    known = words(site)
    mark = keyed(known["keys"].k_file, PLANTED.encode())
    text = PLANTED.encode()
    wanted = [
        text,
        PLANTED.encode("utf-16-le"),
        PLANTED.encode("utf-16-be"),
        known["id"],
        known["id"].hex().encode(),
        mark,
    ]
    found = set()
    for path in sorted(site.home.path.rglob("*")):
        place = str(path.relative_to(site.home.path)).split("/")
        if not path.is_file() or place[0] in ("erasure", "requests"):
            continue
        for data, tokens in parts(path):
            runs = {tuple(tokens[at : at + 8]) for at in range(len(tokens) - 7)}
            if any(one in data for one in wanted) or runs & grams:
                found.add(f"{place[0]} {path.suffix}")
    return found


EVERYWHERE = {
    "blocks .parquet", "tokens .arrow", "receipts .json", "tables .parquet", "runs .npz", "runs .parquet", "runs .log", "runs .txt", "logs .log", "target .arrow",
    "staging .gz", "staging .zst", "reports .html", "results .json", "dagster .db",
}  # fmt: skip


def grams_of(site: Site) -> set:
    """Runs of eight token ids of the planted text."""
    (ids,) = load_tokenizer(site.home.tokenizer_path).encode([PLANTED])
    return {tuple(ids[at : at + 8]) for at in range(len(ids) - 7)}


def asked(site: Site, **changes) -> Request:
    """A request for the planted record, suspended by the step of the graph."""
    request = Request(kind="erase", owner="bob", record_ids=(words(site)["id"].hex(),), **changes)
    requests.save(site.home, request)
    head = Versions(site.home, words(site)["keys"]).head()
    erasure_request(site, Result("corpus", "k", head, {"version": head}))
    return request


def audited(site: Site, request: Request) -> None:
    """As if its audit were made."""
    for state in ("unlearned", "audited"):
        requests.advance(site.home, request, state)
        enter_state(site, request, state)


def state_of(site: Site, request: Request) -> str:
    return next(one.state for one in requests.load(site.home) if one.id == request.id)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A user's home with the text in every store, its request suspended."""
    made = user_site(tmp_path)
    plant(made)
    return made


def test_found_in_every_store_before_and_in_none_after(site: Site) -> None:
    """Positive control: the oracle finds the planted record in each store. After the erasure it finds it nowhere."""
    grams = grams_of(site)
    assert len(grams) > 8
    request = asked(site)
    assert stores_that_hold(site, grams) == EVERYWHERE
    audited(site, request)
    (done,) = carry_on(site)
    assert (done.requests, done.records, done.release) == ((request.id,), 1, "none yet")
    assert stores_that_hold(site, grams) == set()
    assert not any((site.home.path / name).exists() for name in BY_PLACE)
    assert state_of(site, request) == "shredded"
    known = words(site)
    with pytest.raises(SaltError):
        SaltStore(site.home.salts_path, known["keys"]).get(known["id"])
    assert [path.name for path in site.home.erasure.iterdir()] == [f"{request.id}.derivatives.json"]
    versions = Versions(site.home, known["keys"])
    for version in versions.ids():  # identities stay, and each verifies without the text
        versions.verify(version)
    for name in (
        "quarantine",
        "duplicates",
    ):  # a check counts the rows, so they stay without the digest
        assert pl.read_parquet(site.home.table(name))["raw_digest"].to_list() == [None]
    assert "one line" in (site.home.path / "logs/run.log").read_text()
    assert (site.home.runs / "train-aaaaaaaaaaaa/run.json").exists()
    assert not (site.home.runs / "train-aaaaaaaaaaaa/step-1").exists()


def test_the_inventory_names_every_store_and_the_ledger_the_inventory(site: Site) -> None:
    """One line per store with its state; the digest is in the `shredded` entry; a changed inventory is noticed."""
    request = asked(site)
    audited(site, request)
    carry_on(site)
    path = inventory_path(site, request.id)
    listed = json.loads(path.read_bytes())["stores"]
    assert {one["store"] for one in listed} >= set(STORES)
    removed = {one["store"]: one["removed"] for one in listed}
    kinds = set(STORES) - {"deliveries in the home"}
    assert [name for name in kinds if not removed[name]] == []
    assert audit_trail.shredded(site) == []
    states = [
        entry["body"]["state"]
        for entry in open_ledger(site).entries()
        if entry["kind"] == "erasure" and entry["body"]["request"] == request.id
    ]
    assert states == ["received", "suspended", "unlearned", "audited", "shredded"]
    path.write_bytes(path.read_bytes().replace(b"salts", b"saltz"))
    assert "no inventory" in audit_trail.shredded(site)[0]


def test_sealed_text_is_encrypted_and_private(site: Site) -> None:
    """Between suspension and shredding the text lies in one sealed file of mode 0600."""
    asked(site)
    (group,) = groups(site)
    for path in group.folders[0].iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
        assert PLANTED.encode() not in path.read_bytes()


class KilledError(BaseException):
    """What a power cut is to the code above it."""


def test_killed_after_every_step_it_is_carried_on(site: Site) -> None:
    """Stopped after each durable step once, in one home: the state is one of the five, and the next call goes on to the end."""
    grams = grams_of(site)
    request = asked(site)
    audited(site, request)
    passed: list[str] = []

    def stop(step: str) -> None:
        if step not in passed:
            passed.append(step)
            raise KilledError

    for _ in range(100):
        try:
            carry_on(site, hook=stop)
        except KilledError:
            assert state_of(site, request) in STATES
            assert {"state", "ledger"} & set(passed) or state_of(site, request) == "audited"
        else:
            break
    assert len(passed) > len(STORES) + 5
    assert state_of(site, request) == "shredded"
    assert stores_that_hold(site, grams) == set()
    assert audit_trail.shredded(site) == []
    bodies = [
        json.dumps(entry["body"])
        for entry in open_ledger(site).entries()
        if entry["kind"] == "erasure"
    ]
    assert len(bodies) == len(set(bodies)) == 5


KILL = """
import os, signal, sys
from pathlib import Path
from pipelines.erasure.finishing import carry_on
from pipelines.site import open_site
def hook(step):
    if step == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)
carry_on(open_site(Path(sys.argv[1]), sys.argv[2], "tiny", "1"), hook=hook)
"""


def test_kill_nine_in_the_middle(site: Site) -> None:
    """SIGKILL of the process while stores are emptied: the request is `audited`, the next call finishes it."""
    grams = grams_of(site)
    request = asked(site)
    audited(site, request)
    command = [sys.executable, "-c", KILL, str(site.home.path), str(site.inbox), "receipts"]
    done = subprocess.run(command, cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    assert state_of(site, request) == "audited"
    carry_on(site)
    assert state_of(site, request) == "shredded"
    assert stores_that_hold(site, grams) == set()


def test_what_no_store_can_remove_keeps_the_request_open(site: Site) -> None:
    """A copy in a place that nobody thought of is found, named by path, and the text isn't called erased."""
    request = asked(site)
    audited(site, request)
    (site.home.path / "notes").mkdir()
    (site.home.path / "notes/copy.bin").write_bytes(gzip.compress(LONG.encode()))
    with pytest.raises(ErasureError, match=r"notes/copy.bin") as error:
        carry_on(site)
    assert PLANTED not in str(error.value)
    assert state_of(site, request) == "audited"
    (site.home.path / "notes/copy.bin").unlink()
    carry_on(site)
    assert state_of(site, request) == "shredded"


def deliver(site: Site) -> None:
    """The user's own file, outside of the home."""
    (site.inbox / "bob").mkdir()
    line = json.dumps({"text": PLANTED, "licence": "CC0-1.0", "consent_train": True})
    (site.inbox / "bob/lines.jsonl").write_text(line + "\n")


def test_files_of_the_users_inbox_keep_it_open_until_gone_or_acknowledged(site: Site) -> None:
    """They are listed; once they are gone, or acknowledged, the request is finished."""
    deliver(site)
    request = asked(site)
    audited(site, request)
    assert carry_on(site) == []
    (waiting,) = requests.pending(site.home)
    assert "bob/lines.jsonl" in waiting.note
    (site.inbox / "bob/lines.jsonl").unlink()
    assert [one.requests for one in carry_on(site)] == [(request.id,)]


def test_no_request_waits_past_its_deadline(site: Site) -> None:
    """Suspended only, and with a file in the inbox: from the day after its deadline it is shredded, by the deadline."""
    deliver(site)
    yesterday = (dt.datetime.now(dt.UTC).date() - dt.timedelta(days=1)).isoformat()
    request = asked(site, deadline=yesterday)
    assert state_of(site, request) == "suspended"
    (done,) = carry_on(site)
    assert done.release == "none yet"
    assert state_of(site, request) == "shredded"
    entries = [one["body"] for one in open_ledger(site).entries() if one["kind"] == "erasure"]
    assert [one["state"] for one in entries] == ["received", "suspended", "shredded"], (
        "an entry claims what was never done"
    )
    assert [one.get("by", "") for one in entries] == ["", "", "deadline"]


def test_erased_text_delivered_again_is_quarantined(site: Site) -> None:
    """From whoever delivers it."""
    request = asked(site)
    audited(site, request)
    carry_on(site)
    deliver(site)
    keys = words(site)["keys"]
    found = read_deliveries(
        site.inbox, config=site.config, keys=keys, scratch=site.home.staging,
        suppression=SuppressionList(site.home.suppression_path, keys),
    )  # fmt: skip
    assert found.quarantine["reason"].to_list() == ["erased"]
    assert found.counts.accepted == 0


def test_another_owners_copy_stays_and_is_refused_from_the_one_who_asked(tmp_path: Path) -> None:
    """The same text of an owner who did not ask stays in the corpus; intake refuses it from the one who did only."""
    site = user_site(tmp_path)
    keys = words(site)["keys"]
    copy = pl.DataFrame([row(keys, "ada", 9, PLANTED)], schema=SCHEMA, orient="row")
    versions = Versions(site.home, keys)
    versions.publish(copy)
    request = asked(site)
    audited(site, request)
    carry_on(site)
    kept = versions.read(versions.head(), ["owner", "text"]).filter(pl.col("text") == PLANTED)
    assert kept["owner"].to_list() == ["ada"]
    listed = SuppressionList(site.home.suppression_path, keys)
    mark = words(site)["fingerprint"]
    assert (listed.reason("bob", mark), listed.reason("ada", mark)) == ("withdrawn", None)


def test_a_request_for_everything_is_refused_and_the_graph_goes_on(tmp_path: Path) -> None:
    """Nothing would be left to train on: `refused` with a ledger entry, and the step reports no request."""
    site = user_site(tmp_path)
    requests.save(site.home, Request(kind="erase", owner="", reason="all"))
    head = Versions(site.home, words(site)["keys"]).head()
    _, made = erasure_request(site, Result("corpus", "k", head, {"version": head}))
    assert made["requests"] == []
    (request,) = requests.load(site.home)
    assert request.state == "refused"
    assert "no record would be left" in request.note
    assert Versions(site.home, words(site)["keys"]).head() == head
