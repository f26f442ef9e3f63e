"""Every coalition trains on its own records in the shared order, and the bank survives a kill."""

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from provenance.canonical import jcs
from trainer.data import BatchPlan, TokenStore, write_tokens
from trainer.errors import EXIT_RESUME, DataError
from trainer.generate import evaluate
from trainer.model import Transformer, init_parameters
from trainer.spec import (
    BatchSpec,
    MixtureSpec,
    ModelSpec,
    OptimSpec,
    RunConfig,
    RunSpec,
    load_run,
    no_versions,
    save_run,
    with_extra,
)
from valuation.bank import ORDER, ProxyPlan, bank_file, bank_key, load_utilities, read_bank
from valuation.errors import ProxyError, UtilityError
from valuation.proxy import retrain
from valuation.retraining import contents, shared_order, training_rows
from valuation.shapley import exact_shapley

VOCAB = 31
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)
OPTIM = OptimSpec(lr=0.02, warmup_steps=2)
BATCH = BatchSpec(rows=4, length=16)
OWNERS = ("ada", "ben", "noise", "registry")
REPOSITORY = Path(__file__).parents[2]
needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")


def write_corpus(folder, count, seed, owners=OWNERS, *, drop=None):
    """Records in turn of each owner; `noise` holds noise, the others count in threes; `drop` is a tombstone."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        owner, length = owners[i % len(owners)], int(rng.integers(4, 24))
        body = rng.integers(0, VOCAB - 1, length)
        if owner != "noise":
            body = (body[0] + 3 * np.arange(length)) % (VOCAB - 1)
        identity = hashlib.sha256(f"{seed} {i}".encode()).digest()
        records.append(
            (i, None, None, []) if i == drop else (i, identity, owner, [*body.tolist(), VOCAB - 1])
        )
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=records,
    )  # fmt: skip


def make_run(directory, *, steps=100, model=MODEL, count=80, groups=None, **extra):
    tokens = write_corpus(directory / "tokens", count, seed=1, drop=5)
    target = write_corpus(directory / "target", 12, seed=2, owners=("ada",))
    groups = groups or [
        {"id": "counting", "owners": ["ada", "ben"]},
        {"id": "noise", "owners": ["noise"]},
        {"id": "people", "owners": ["registry"]},
    ]
    (directory / "groups.json").write_bytes(jcs({"groups": groups}))
    settings = {"groups": "groups.json", "target": "target", "target_digest": target, "order": ORDER} | extra  # fmt: skip
    run = RunSpec(
        run="proxy-test",
        kind="proxy",
        entry="valuation.proxy:retrain",
        seed=5,
        tokens="tokens",
        tokens_digest=tokens,
        steps=steps,
        versions=no_versions(),
        config=RunConfig(
            model=model,
            optim=OPTIM,
            batch=BATCH,
            extra={name: value for name, value in settings.items() if value is not None},
        ),
    )
    save_run(run, directory)
    return run


def banks(directory):
    """Losses of every bank file, by coalition."""
    return {int(p.stem): dict(np.load(p)) for p in (directory / "bank").glob("*.npz")}


def start(directory, **environment):
    command = [sys.executable, "-m", "trainer", "--run", str(directory / "run.json")]
    variables = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.Popen(
        command, cwd=REPOSITORY, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_the_full_set_is_packed_as_the_trainer_packs_it(tmp_path):
    """In one order, rows of all records are those of `trainer.data.BatchPlan`, step by step."""
    write_corpus(tmp_path, 40, seed=3)
    store = TokenStore.open(tmp_path)
    plan = BatchPlan(store, 9, BATCH)
    # The trainer's order: one word per leaf index under the same kind of key.
    key = hashlib.sha256(b"dataworth-order-1|9|0").digest()
    words = np.random.Philox(key=int.from_bytes(key[:16], "big")).random_raw(len(store.live_N))
    order_N = store.live_N[np.argsort(words, kind="stable")]
    rows = training_rows(store, order_N, 10**9, BATCH.rows, BATCH.length)
    assert rows.steps == -(-int(store.lengths_N.sum()) // (BATCH.rows * BATCH.length))
    for step in range(rows.steps - 1):
        got, want = rows.batch(step), plan.batch(step)
        for name in ("tokens_BT", "labels_BT", "positions_BT"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        same = [
            documents[:, :, None] == documents[:, None, :]
            for documents in (got.documents_BT, want.documents_BT)
        ]
        np.testing.assert_array_equal(*same)


def test_a_coalitions_stream_is_its_documents_in_shared_order(tmp_path):
    """Removing owners removes their documents and moves nothing else; free places have no label."""
    write_corpus(tmp_path, 40, seed=3)
    store = TokenStore.open(tmp_path)
    code = store.owners.index("ben")
    whole_N = shared_order(contents(store), store.live_N, 9, 0)
    order_N = [int(i) for i in whole_N if store.owner_codes_N[i] == code]
    rows = training_rows(store, np.array(order_N), 10**9, BATCH.rows, BATCH.length).rows
    used = rows.documents_BT >= 0
    want = np.concatenate([store.tokens(i) for i in order_N])
    np.testing.assert_array_equal(rows.tokens_BT[used], want)
    ends = want == VOCAB - 1
    np.testing.assert_array_equal(rows.labels_BT[used] == -100, ends)
    np.testing.assert_array_equal(rows.labels_BT[used][~ends], np.append(want[1:], 0)[~ends])
    assert (rows.labels_BT[~used] == -100).all()


@pytest.mark.parametrize("budget", [0, 1, 17, 64, 65])
def test_a_budget_cuts_the_stream(tmp_path, budget):
    """No more tokens than the budget, in whole batches."""
    write_corpus(tmp_path, 40, seed=3)
    store = TokenStore.open(tmp_path)
    rows = training_rows(store, store.live_N, budget, BATCH.rows, BATCH.length)
    assert (rows.rows.documents_BT >= 0).sum() == budget
    assert rows.steps == -(-budget // 64)


def test_utilities_obey_the_laws_of_a_game(tmp_path):
    """V(empty) is the untrained model, Shapley values add up to V(all) - V(empty), noise earns less than language."""
    run = make_run(tmp_path)
    assert retrain(run, tmp_path) == 0
    found = load_utilities(tmp_path)
    assert found.groups == ("counting", "noise", "people")
    np.testing.assert_array_equal(found.coalitions_C, np.arange(8))
    untrained = Transformer(MODEL)
    init_parameters(untrained, run.seed)
    target = TokenStore.open(tmp_path / "target")
    nll_Q, tokens_Q = evaluate(
        untrained, [target.tokens(i) for i in range(12)], BATCH.rows, BATCH.length
    )
    np.testing.assert_allclose(found.nll_CQ[0], nll_Q, rtol=1e-6)
    np.testing.assert_array_equal(found.tokens_Q, tokens_Q)
    utility_C = found.utility_C
    assert utility_C[0] == pytest.approx(-np.log(VOCAB), abs=0.2), (
        "an untrained model knows nothing"
    )
    np.testing.assert_allclose(found.record_utility_CQ.sum(1), utility_C)
    values = np.asarray(exact_shapley(utility_C, 3))
    assert values.sum() == pytest.approx(utility_C[7] - utility_C[0], abs=1e-12)
    assert values[0] > values[1]
    assert utility_C[1] > utility_C[2]
    result = json.loads((tmp_path / "result.json").read_bytes())
    assert result["status"] == "done"
    assert float(result["coalitions"]["7"]["utility"]) == pytest.approx(utility_C[7], rel=1e-14)
    progress = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    assert [line["step"] for line in progress] == list(range(1, 9))
    assert {"step", "utility", "tokens_per_s", "rss_bytes", "time"} <= set(progress[0])


def test_steps_are_in_proportion_to_tokens(tmp_path):
    """A cap scales every coalition alike; the full set takes exactly the cap."""
    run = make_run(tmp_path, steps=6, epochs=2)
    assert retrain(run, tmp_path) == 0
    bank = banks(tmp_path)
    assert int(bank[7]["steps"]) == 6
    tokens = {c: int(bank[c]["tokens"]) for c in bank}
    assert tokens[0] == 0
    assert tokens[7] == 6 * BATCH.rows * BATCH.length
    store = TokenStore.open(tmp_path / "tokens")
    for bit, owners in enumerate((("ada", "ben"), ("noise",), ("registry",))):
        own = sum(
            int(store.lengths_N[store.owner_codes_N == store.owners.index(o)].sum()) for o in owners
        )
        assert tokens[1 << bit] == own * tokens[7] // int(store.lengths_N.sum())


@needs_proc
def test_jobs_and_killing_change_no_bit(tmp_path):
    """`kill -9` in the middle, workers gone with their parent, then a resume in one process: bits of an unbroken run."""
    model = dataclasses.replace(MODEL, num_layers=2, dim=32, ffn_dim=64)
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert retrain(make_run(reference, model=model, count=240), reference) == 0
    make_run(killed, model=model, count=240, jobs=2)
    process = start(killed)
    until = time.monotonic() + 60
    while not banks_exist(killed) and time.monotonic() < until:
        time.sleep(0.01)
    workers = children(process.pid)
    process.kill()
    process.communicate()
    finished = len(list((killed / "bank").glob("*.npz")))
    assert 0 < finished < 8, "the kill should come in the middle"
    assert workers, "two jobs should have worker processes"
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not (killed / "result.json").exists()
    (killed / "bank" / ".9.npz.0123.tmp").write_bytes(b"left over")
    survivors = {p.name: p.stat().st_mtime_ns for p in (killed / "bank").glob("*.npz")}
    assert retrain(with_extra(load_run(killed), jobs=1), killed) == 0, "jobs are not in the key"
    for name, written in survivors.items():
        assert (killed / "bank" / name).stat().st_mtime_ns == written, (
            "finished coalitions are not trained again"
        )
    assert not list((killed / "bank").glob(".*"))
    for coalition, content in banks(reference).items():
        for name in ("nll_Q", "tokens_Q", "index_Q", "steps", "tokens"):
            np.testing.assert_array_equal(banks(killed)[coalition][name], content[name])
    results = [json.loads((folder / "result.json").read_bytes()) for folder in (reference, killed)]
    assert results[0]["coalitions"] == results[1]["coalitions"]


def banks_exist(directory):
    return any((directory / "bank").glob("*.npz"))


def read_or_empty(path):
    """A file of /proc, or nothing where the task has just ended."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def children(parent):
    """Live descendants of a process that train (not joblib's resource tracker)."""
    found, wave = [], [parent]
    while wave:
        tasks = [task for pid in wave for task in Path(f"/proc/{pid}/task").glob("*")]
        wave = [int(child) for task in tasks for child in read_or_empty(task / "children").split()]
        found += wave
    return [
        p for p in found if b"resource_tracker" not in read_or_empty(Path(f"/proc/{p}/cmdline"))
    ]


@needs_proc
def test_a_worker_ends_with_its_parent():
    """A worker in the middle of a long task follows a parent that was killed without a word."""
    code = "import os, time, valuation.workers as r; r.follow_parent(os.getppid()); print(os.getpid(), flush=True); time.sleep(90)"
    shell = subprocess.Popen(
        ["/bin/sh", "-c", f"{sys.executable} -c '{code}' & wait"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    worker = Path("/proc", shell.stdout.readline().strip())
    assert worker.exists()
    shell.kill()
    shell.wait()
    shell.stdout.close()
    until = time.monotonic() + 20
    while worker.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert not worker.exists()


def test_sigterm_asks_to_be_started_again(tmp_path):
    """SIGTERM ends the run with exit code 75 and a reason; the bank stays."""
    model = dataclasses.replace(MODEL, num_layers=2, dim=32, ffn_dim=64)
    make_run(tmp_path, model=model, count=240)
    process = start(tmp_path)
    until = time.monotonic() + 60
    while not banks_exist(tmp_path) and time.monotonic() < until:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_RESUME, errors
    assert json.loads((tmp_path / "exit.json").read_bytes())["code"] == EXIT_RESUME
    assert 0 < len(banks(tmp_path)) < 8


def test_a_bank_of_other_settings_is_not_used(tmp_path):
    """Another seed has other keys: every coalition is trained again, and the numbers differ."""
    run = make_run(tmp_path, coalitions=[0, 1])
    assert retrain(run, tmp_path) == 0
    first = load_utilities(tmp_path)
    assert retrain(dataclasses.replace(run, seed=6), tmp_path) == 0
    second = load_utilities(tmp_path)
    np.testing.assert_array_equal(second.coalitions_C, [0, 1])
    assert (first.nll_CQ != second.nll_CQ).all()


def test_every_setting_is_in_the_key():
    """The key changes with each setting, the passes, the owners of the coalition and those of all groups."""
    plan = ProxyPlan(groups=(("a", ("x",)), ("b", ("y",))), coalitions=(0,), target=Path("t"))
    wider = dataclasses.replace(plan, groups=(*plan.groups, ("c", ("z",))))
    renamed = dataclasses.replace(plan, groups=(("p", ("x",)), ("q", ("y",))))
    keys = [
        bank_key({"seed": 1}, plan, 1),
        bank_key({"seed": 2}, plan, 1),
        bank_key({"seed": 1}, plan, 2),
        bank_key({"seed": 1}, dataclasses.replace(plan, epochs=2), 1),
        bank_key({"seed": 1}, wider, 1),
    ]
    assert len(set(keys)) == len(keys)
    assert bank_key({"seed": 1}, renamed, 1) == keys[0], (
        "names of groups and number of jobs don't matter"
    )
    assert bank_key({"seed": 1}, dataclasses.replace(plan, jobs=2), 1) == keys[0]


def test_altered_losses_are_found(tmp_path):
    """A bank file that was replaced, damaged or removed after the run is refused when it is read back."""
    run = make_run(tmp_path, coalitions=[0, 1])
    with pytest.raises(UtilityError, match="run it first"):
        load_utilities(tmp_path)
    assert retrain(run, tmp_path) == 0
    path = bank_file(tmp_path, 1)
    content = dict(np.load(path))
    np.savez(path, **content | {"nll_Q": content["nll_Q"] * 0.9})
    with pytest.raises(UtilityError, match="other ones"):
        load_utilities(tmp_path)
    path.write_bytes(b"no archive")
    with pytest.raises(ProxyError, match="delete it"):
        read_bank(path, None)
    path.unlink()
    with pytest.raises(UtilityError, match="no file"):
        load_utilities(tmp_path)


def test_excluded_records_are_never_trained_on(tmp_path):
    """Excluding all records of a group makes it worth exactly nothing alone."""
    run = make_run(tmp_path, coalitions=[0, 2, 4])
    store = TokenStore.open(tmp_path / "tokens")
    noise = [i for i in store.live_N if store.owner_of(int(i)) == "noise"]
    lines = "".join(store.record_id(int(i)).hex() + "\n" for i in noise)
    (tmp_path / "excluded.txt").write_text(lines)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    from trainer.spec import Excluded

    assert (
        retrain(
            dataclasses.replace(run, excluded=Excluded(file="excluded.txt", digest=digest)),
            tmp_path,
        )
        == 0
    )
    found = load_utilities(tmp_path)
    assert found.utility_C[0] == found.utility_C[1] != found.utility_C[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"surprise": 1}, "surprise"),
        ({"coalitions": [9]}, r"0\.\.7"),
        ({"coalitions": []}, "one or more"),
        ({"coalitions": [1, 1]}, "each once"),
        ({"jobs": 0}, "jobs"),
        ({"epochs": 0}, "epochs"),
        ({"target": None}, "missing"),
        (
            {"groups": [{"id": "a", "owners": ["ada"]}, {"id": "b", "owners": ["ada"]}]},
            "owner once",
        ),
        (
            {"groups": [{"id": "a", "owners": ["ada"]}, {"id": "a", "owners": ["ben"]}]},
            "group id once",
        ),
        ({"groups": [{"id": "a", "owners": ["stranger"]}]}, "stranger"),
        ({"steps": 0}, "steps"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(tmp_path, change, message):
    """Each mistake is an error that names it, before anything is written to the bank."""
    steps, groups = change.pop("steps", 5), None
    if isinstance(change.get("groups"), list):
        groups = change.pop("groups")
    run = make_run(tmp_path, steps=steps, groups=groups, **change)
    with pytest.raises(ProxyError, match=message):
        retrain(run, tmp_path)
    assert not (tmp_path / "bank").exists() or not banks(tmp_path)


def test_repeats_and_altered_targets_are_refused(tmp_path):
    """A mixture would be ignored, and a target of another digest is another question: both are errors."""
    run = make_run(tmp_path)
    config = dataclasses.replace(run.config, mixture=MixtureSpec(repeats={"ada": 2}))
    with pytest.raises(ProxyError, match="repeats"):
        retrain(dataclasses.replace(run, config=config), tmp_path)
    extra = run.config.extra | {"target_digest": "0" * 64}
    with pytest.raises(DataError, match="digest"):
        retrain(
            dataclasses.replace(run, config=dataclasses.replace(run.config, extra=extra)), tmp_path
        )


def test_lots_that_are_owners_train_the_very_same_models(tmp_path):
    """A file of lots that follows the owners gives, bit for bit, the losses of the groups of those owners."""
    by_owner, by_lot = tmp_path / "owner", tmp_path / "lot"
    by_owner.mkdir()
    by_lot.mkdir()
    retrain(make_run(by_owner), by_owner)
    run = make_run(by_lot)
    store = TokenStore.open(by_lot / "tokens")
    group_of = {"ada": 0, "ben": 0, "noise": 1, "registry": 2}
    lot_of = {code: group_of[owner] for code, owner in enumerate(store.owners)}
    lot_N = np.array([lot_of.get(int(code), -1) for code in store.owner_codes_N], dtype="<i8")
    (by_lot / "lots.bin").write_bytes(lot_N.tobytes())
    named = [{"id": f"lot-0{k}", "owners": [f"lot-0{k}"]} for k in range(3)]
    (by_lot / "groups.json").write_bytes(jcs({"groups": named}))
    lots = ["lots.bin", hashlib.sha256(lot_N.tobytes()).hexdigest()]
    extra = {**run.config.extra, "lots": lots}
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, extra=extra))
    assert retrain(run, by_lot) == 0
    owners, found = banks(by_owner), banks(by_lot)
    for mask in range(8):
        np.testing.assert_array_equal(found[mask]["nll_Q"], owners[mask]["nll_Q"])
    short = lot_N[1:].tobytes()
    (by_lot / "short.bin").write_bytes(short)
    for named_file, message in (
        (["lots.bin", "0" * 64], "SHA-256"),
        (["short.bin", hashlib.sha256(short).hexdigest()], "expected 80 entries"),
    ):
        config = dataclasses.replace(run.config, extra={**extra, "lots": named_file})
        with pytest.raises(ProxyError, match=message):
            retrain(dataclasses.replace(run, config=config), by_lot)
