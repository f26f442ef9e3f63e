"""Retrainings end with the same bits wherever they run, and a killed worker costs time and nothing else."""

import dataclasses
import hashlib
import importlib.util
import os
import signal
import sys
import time
import warnings

import numpy as np
import pytest

from provenance.canonical import jcs
from trainer.data import write_tokens
from trainer.errors import NumericalError
from trainer.spec import BatchSpec, ModelSpec, OptimSpec, RunConfig, RunSpec, no_versions, save_run
from valuation.bank import ORDER, load_utilities
from valuation.errors import ProxyError
from valuation.proxy import retrain
from valuation.subsets import Setting, random_subsets, retrain_subsets
from valuation.workers import MAX_STARTS, in_workers

BACKENDS = ("processes", "ray")
MODEL = ModelSpec(vocab_size=31, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)


@pytest.fixture(scope="module")
def cluster():
    """Two Ray nodes of one CPU on this machine, and a connection to them."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: make ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ray's own
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": 100_000_000, "include_dashboard": False}
        made = Cluster(initialize_head=True, head_node_args=node)
        made.add_node(num_cpus=1, object_store_memory=100_000_000)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each place where retrainings run."""
    if request.param == "ray":
        request.getfixturevalue("cluster")
    return request.param


@pytest.fixture
def setting(tmp_path):
    """Thirty records of two owners, four queries."""

    def folder(name, count):
        rng = np.random.default_rng(count)
        rows = [
            (i, hashlib.sha256(f"{name} {i}".encode()).digest(), "ab"[i % 2], [*rng.integers(30, size=12).tolist(), 30])
            for i in range(count)
        ]  # fmt: skip
        return write_tokens(
            tmp_path / name, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=31, end_of_text=30, records=rows
        )  # fmt: skip

    return Setting(
        train=tmp_path / "train", target=tmp_path / "target", train_digest=folder("train", 30), target_digest=folder("target", 4),
        model=MODEL, optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=4, length=16), epochs=2,
    )  # fmt: skip


def test_a_bank_holds_the_same_bits_wherever_it_was_trained(setting, tmp_path, backend):
    """Two workers of either kind leave what this process leaves, under the same keys; bytes, not nearly."""
    member_MN = random_subsets(4, 30, 0.5, np.random.default_rng(1))
    serial = retrain_subsets(setting, member_MN, [1, 1, 2, 2], tmp_path / "serial")
    other = retrain_subsets(setting, member_MN, [1, 1, 2, 2], tmp_path / "other", 2, backend)
    assert serial.nll_MQ.tobytes() == other.nll_MQ.tobytes()
    assert serial.keys == other.keys
    files = [
        {p.name: p.read_bytes() for p in (tmp_path / n / "bank").iterdir()}
        for n in ("serial", "other")
    ]
    assert files[0] == files[1]


def test_a_run_over_owners_takes_either_place(setting, tmp_path, backend):
    """`config.extra.backend` moves the coalitions; result.json's utilities are those of one process."""
    groups = [{"id": owner, "owners": [owner]} for owner in "ab"]
    found = {}
    for name, place in (("one", {}), ("two", {"jobs": 2, "backend": backend})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "groups.json").write_bytes(jcs({"groups": groups}))
        extra = {"groups": "groups.json", "target": str(setting.target), "order": ORDER, **place}
        run = RunSpec(
            run="same", kind="proxy", entry="valuation.proxy:retrain", seed=5, tokens=str(setting.train), steps=1000,
            tokens_digest=setting.train_digest, versions=no_versions(),
            config=RunConfig(model=MODEL, optim=setting.optim, batch=setting.batch, extra=extra),
        )  # fmt: skip
        save_run(run, folder)
        assert retrain(run, folder) == 0
        found[name] = load_utilities(folder).nll_CQ
    assert found["one"].tobytes() == found["two"].tobytes()


def test_a_killed_workers_job_is_done_anew(tmp_path, backend):
    """`kill -9` of a worker in the middle of a job: every result comes, each once."""

    def once_killed(number):
        mark = tmp_path / f"begun-{number}"
        if number == 1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return number * number

    assert sorted(in_workers(once_killed, range(4), 2, backend)) == [0, 1, 4, 9]


def test_a_job_that_kills_every_worker_is_reported(tmp_path, backend):
    """After three starts it is an error that says so, not an endless retry; other results had come."""

    def deadly(number):
        if number == 1:
            with (tmp_path / "starts").open("a") as file:
                file.write("x")
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    done = []
    with pytest.raises(ProxyError, match=r"3 (starts|times)"):
        done.extend(in_workers(deadly, [0, 1], 2, backend))
    assert (tmp_path / "starts").read_text() == "x" * MAX_STARTS
    assert set(done) <= {0}


def test_an_error_of_the_training_is_passed_on_and_not_repeated(tmp_path, backend):
    """A loss that isn't finite comes out as itself after one start."""

    def diverges(number):
        with (tmp_path / f"starts-{number}").open("a") as file:
            file.write("x")
        raise NumericalError(f"loss of {number}: expected a finite number, got nan")

    with pytest.raises(NumericalError, match="finite"):
        list(in_workers(diverges, [0, 1], 2, backend))
    assert all((p.read_text() == "x") for p in tmp_path.glob("starts-*"))


def test_both_nodes_of_the_cluster_work(cluster):
    """Two jobs at once stand on two nodes of one CPU each; never more than `at_once` run."""

    def where(_):
        import ray

        time.sleep(0.5)
        return ray.get_runtime_context().get_node_id()

    assert len(set(in_workers(where, range(4), 2, "ray"))) == 2


def test_no_cluster_is_an_error_and_none_is_started(setting, tmp_path, monkeypatch):
    """Without a connection and without a cluster the call says how to start one."""
    ray = pytest.importorskip("ray", reason="ray is not installed: make ray")

    def absent(**options):
        assert options["address"] == "auto"
        raise ConnectionError

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", absent)
    with pytest.raises(ProxyError, match="ray start --head"):
        retrain_subsets(setting, np.ones((2, 30), bool), 1, tmp_path, 2, "ray")


def test_an_unknown_place_and_a_missing_ray_are_refused(setting, tmp_path, monkeypatch):
    """The message names what exists, and the extra that brings Ray."""
    member_MN = np.ones((2, 30), bool)
    with pytest.raises(ProxyError, match=r"processes.*ray.*'dask'"):
        retrain_subsets(setting, member_MN, 1, tmp_path, 2, "dask")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ProxyError, match=r"dataworth\[ray\]"):
        retrain_subsets(dataclasses.replace(setting, epochs=1), member_MN, 1, tmp_path, 2, "ray")
