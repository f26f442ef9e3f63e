"""Power cuts and keeping of a sharded home: the same bytes after a kill, nothing live offered for removal, and a backup that verifies."""

import shutil

import pytest
from graph_commands import BIN, dataworth, kill, started, text_of, until, values

from pipelines.erasure.choosing import SHARDED


def roots(home, asset):
    """Digest of every constituent, by place, and of the ensemble."""
    made = values(home, asset)
    return {(c["shard"], c["slice"]): c["root"] for c in made["constituents"]}, made["root"]


def training(home):
    """Runs of constituents that have taken steps."""
    return {path.parent for path in home.glob("runs/train-*/progress.jsonl") if path.stat().st_size}


def killed(home, arguments, enough):
    """SIGKILL the command once so many constituents have taken steps."""
    with started(home, str(BIN / "dataworth"), *arguments) as process:

        def there():
            assert process.poll() is None, "it ended before it was killed"
            return len(training(home)) >= enough

        until(there, f"{enough} constituents take steps")
        kill(process)


def succeeds(home, *arguments):
    """A command that must."""
    done = dataworth(home, *arguments)
    assert done.returncode == 0, text_of(done)


@pytest.mark.slow
def test_a_sharded_home_that_was_killed_twice_ends_with_the_same_bytes(tmp_path):
    """SIGKILL in the second constituent, and in the retraining of an erasure: digests as undisturbed, nothing finished is trained again; then gc, backup, restore."""
    home, other, restored = tmp_path / "killed", tmp_path / "undisturbed", tmp_path / "restored"
    succeeds(home, "init")
    path = home / "dataworth.toml"
    text = path.read_text().replace("\nshards = 1", "\nshards = 2")
    path.write_text(text.replace('\nmethod = "npo"', f'\nmethod = "{SHARDED}"'))
    succeeds(home, "run", "--select", "*training_plan,*commitment")
    shutil.copytree(home, other, symlinks=True)

    killed(home, ("run", "--select", "checkpoint"), 2)
    (finished,) = [path.parent for path in home.glob("runs/train-*/constituent.json")]
    before = (finished / "progress.jsonl").read_bytes()
    for each in (home, other):
        succeeds(each, "run", "--select", "checkpoint")
    assert (finished / "progress.jsonl").read_bytes() == before
    assert roots(home, "checkpoint") == roots(other, "checkpoint")

    killed(home, ("run",), len(training(home)) + 1)
    for each in (home, other):
        succeeds(each, "run")
    for asset in ("checkpoint", "unlearned_checkpoint"):
        assert roots(home, asset) == roots(other, asset)

    runs = {c["run"] for a in ("checkpoint", "unlearned_checkpoint") for c in values(home, a)["constituents"]}  # fmt: skip
    succeeds(home, "gc", "--delete")
    assert runs <= {folder.name for folder in (home / "runs").iterdir()}
    succeeds(home, "verify")
    succeeds(home, "backup", str(tmp_path / "copy.tar"))
    succeeds(restored, "restore", str(tmp_path / "copy.tar"))
    succeeds(restored, "verify")
    assert roots(restored, "unlearned_checkpoint") == roots(home, "unlearned_checkpoint")
