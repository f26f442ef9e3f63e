"""Publishing under fire: kill -9, two publishers, a full disk. HEAD is always a version that verifies."""

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from pipelines.storage.errors import DiskFullError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.versions import Versions

ROWS = """
import os
import polars as pl
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.records import SCHEMA
from provenance.canonical import canonical_bytes, fingerprint, record_id

def rows(owner, count, size=0):
    keys, made = CorpusKeys.demo(), []
    for position in range(count):
        text = f"{owner} {position} " + os.urandom(size).hex()
        content = fingerprint(keys.k_fp, canonical_bytes(text))
        identity = record_id(keys.k_id, owner, "s", position, content)
        made.append((identity, content, owner, "s", position, text, "CC0-1.0", True, True, True, None, False, content))
    return pl.DataFrame(made, schema=SCHEMA, orient="row")
"""
PROGRAM = (
    ROWS
    + """
import sys
from pathlib import Path
from pipelines.storage.home import Home
from pipelines.storage.versions import Versions

home = Home(Path(sys.argv[1])).create()
versions = Versions(home, CorpusKeys.demo(), block_bytes=1)
"""
)
PUBLISH = (
    PROGRAM
    + """
steps = []
def hook(step):
    steps.append(step)
    if len(steps) == int(sys.argv[2]):
        os.kill(os.getpid(), 9)
print(versions.publish(rows("bob", 5000), hook=hook))
"""
)
NAMES: dict[str, Any] = {}
exec(ROWS, NAMES)
rows = NAMES["rows"]


def run(program, *arguments, **options):
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def opened(path):
    return Versions(Home(path).create(), CorpusKeys.demo(), block_bytes=1)


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A home with a first version of 100 records."""
    path = tmp_path_factory.mktemp("started") / "home"
    return path, opened(path).publish(rows("ada", 100))


@pytest.fixture(scope="module")
def finished(started, tmp_path_factory):
    """What an undisturbed publish makes of it: its id and its steps."""
    path = tmp_path_factory.mktemp("finished") / "home"
    shutil.copytree(started[0], path)
    steps = []
    return opened(path).publish(rows("bob", 5000), hook=steps.append), steps


STEPS = ["salts", "block 0", "block 4096", "leaves", "crown", "storage", "manifest", "head"]


def test_the_steps_of_a_publish_are_in_the_safe_order(finished):
    """Salts before leaves, blocks before the map, the manifest last, then HEAD."""
    assert finished[1] == STEPS


@pytest.mark.parametrize("step", range(1, len(STEPS) + 1), ids=STEPS)
def test_kill_9_after_any_step_leaves_the_last_good_version(started, finished, tmp_path, step):
    """A real SIGKILL: HEAD verifies, nothing half-made is listed, the next publish makes the same version."""
    shutil.copytree(started[0], tmp_path / "home")
    child = run(PUBLISH, tmp_path / "home", step)
    assert child.returncode == -signal.SIGKILL
    versions = opened(tmp_path / "home")
    assert versions.head() == (finished[0] if step == len(STEPS) else started[1])
    for version in versions.ids():
        versions.verify(version)
    assert versions.publish(rows("bob", 5000)) == finished[0] == versions.head()
    assert not list((tmp_path / "home").rglob(".*.tmp"))


def test_kill_9_at_any_moment_leaves_the_last_good_version(started, finished, tmp_path):
    """Not only between steps: killed at seven moments spread over the run, in the middle of writes too."""
    begin = time.monotonic()
    shutil.copytree(started[0], tmp_path / "timed")
    run(PUBLISH, tmp_path / "timed", 0)
    whole = time.monotonic() - begin
    for number in range(7):
        path = tmp_path / f"home-{number}"
        shutil.copytree(started[0], path)
        command = [sys.executable, "-c", PUBLISH, str(path), "0"]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            time.sleep(whole * (0.5 + 0.07 * number))
            child.kill()
        versions = opened(path)
        assert versions.head() in (started[1], finished[0])
        versions.verify(versions.head())
        assert versions.publish(rows("bob", 5000)) == finished[0]
        assert not list(path.rglob(".*.tmp"))


def test_two_publishers_at_once_serialise(tmp_path):
    """Four processes publish other records: every record is there once, the lineage is one chain."""
    path = tmp_path / "home"
    Home(path).create()
    program = PROGRAM + "print(versions.publish(rows(sys.argv[2], 50)))"
    owners = ["ada", "bob", "cyd", "dan"]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), owner],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for owner in owners
    ]  # fmt: skip
    made = []
    for child in children:
        with child:
            out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        made.append(out.strip())
    versions = Versions(Home(path), CorpusKeys.demo())
    assert sorted(made) == versions.ids()
    head = versions.head()
    assert versions.manifest(head).owners == dict.fromkeys(owners, 50)
    chain = [head]
    while versions.manifest(chain[-1]).parent != "none":
        chain.append(versions.manifest(chain[-1]).parent)
    assert sorted(chain) == versions.ids()
    versions.verify(head)


FULL = (
    PROGRAM
    + """
import json
first = versions.publish(rows("ada", 20))
try:
    versions.publish(rows("bob", 5000, size=1500))
except Exception as error:
    said = [type(error).__name__, str(error)]
left = [str(path) for path in home.path.rglob(".*.tmp")]
checked = versions.verify(versions.head()).num_records
small = versions.publish(rows("cyd", 3))
print(json.dumps([said, versions.manifest(small).parent == first, left, checked]))
"""
)


def can_mount():
    return (
        shutil.which("unshare") is not None
        and subprocess.run(
            ["unshare", "-Urm", "mount", "-t", "tmpfs", "none", "/mnt"],
            capture_output=True,
            check=False,
        ).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="no unprivileged user namespaces here")
def test_a_full_disk_keeps_the_last_version_and_says_so(tmp_path):
    """A real 4 MB disk: one clear message, no leftovers, HEAD verifies, and a smaller publish works at once."""
    mount = tmp_path / "disk"
    mount.mkdir()
    script = (
        f"mount -t tmpfs -o size=4m none {mount} && exec {sys.executable} -c '{FULL}' {mount}/home"
    )
    child = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    (kind, message), continued, left, checked = json.loads(child.stdout)
    assert kind == "DiskFullError"
    assert re.fullmatch(
        r"disk full while writing a corpus version: version [0-9a-f]{12} is still HEAD and complete; "
        r"free some space and run the same command again",
        message,
    )
    assert continued
    assert left == []
    assert checked == 20
    assert "panicked" not in child.stderr


@pytest.mark.parametrize("failing", range(15))
def test_any_write_that_fails_keeps_the_last_version(started, tmp_path, monkeypatch, failing):
    """ENOSPC injected into the n-th fsync, whichever file it is: the same message, HEAD stays."""
    shutil.copytree(started[0], tmp_path / "home")
    versions = Versions(Home(tmp_path / "home"), CorpusKeys.demo(), block_bytes=1)
    new = rows("cyd", 10)
    counter = itertools.count()
    real = os.fsync

    def fsync(descriptor):
        if next(counter) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        said = ""
        try:
            versions.publish(new)
        except DiskFullError as error:
            said = str(error)
    # Salts, block, leaves, crown, map, manifest and HEAD have two each: of the file, and of its folder.
    assert next(counter) == 14 if failing >= 14 else "is still HEAD and complete" in said
    # The last one comes after the rename: the new version is in force already, and complete.
    assert (versions.head() == started[1]) == (failing < 13)
    versions.verify(versions.head())
    assert not list((tmp_path / "home").rglob(".*.tmp"))
    versions.publish(new)
    assert versions.manifest(versions.head()).owners == {"ada": 100, "cyd": 10}


def test_other_errors_are_not_called_a_full_disk(started, tmp_path, monkeypatch):
    """A permission error stays what it is."""
    shutil.copytree(started[0], tmp_path / "home")
    versions = Versions(Home(tmp_path / "home"), CorpusKeys.demo())

    def refuse(_descriptor):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "fsync", refuse)
    ids = versions.read(started[1], ["record_id"])["record_id"].to_list()
    with pytest.raises(PermissionError):
        versions.tombstone(started[1], ids[:1])


def test_the_message_of_a_full_disk_without_any_version():
    """The first publish: there is nothing to keep, and it says so."""
    assert "no version existed yet" in str(DiskFullError("salts", None))
