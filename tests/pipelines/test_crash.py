"""Power cuts, full disks and two runs at once: what was published stays, and the next run goes on as if nothing had been.

A delivery is added to a finished home, so that every asset has something to lose, and the run over it is killed in the
middle of one asset after another.
"""

import re
import subprocess
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from graph_commands import (
    BIN,
    FORGET,
    LETTER,
    LETTER_FILE,
    ROOT,
    command,
    data_versions,
    dataworth,
    environment,
    head,
    kill,
    ledger,
    log_of,
    made,
    processes,
    reused,
    started,
    text_of,
    values,
)

from pipelines.defs import ASSETS

TRAINED = {
    "influence": "gradients", "owner_values": "proxy", "checkpoint": "train", "gold_checkpoint": "gold",
    "unlearned_checkpoint": "unlearn", "robustness_audit": "attack",
}  # fmt: skip
"""Assets that start a trainer run, with the kind that their run's folder is named by."""

UNLIKE = {"receipts", "report", "robustness_audit"}
"""What differs between two runs over the same content: receipts hold the time of a ledger entry, and an audit is
bootstrapped over people in the order of ids that the request's own random key salts."""

KILLED_EACH_DAY = 4
STEP = re.compile(rf" - ({'|'.join(ASSETS)}) - STEP_(START|SUCCESS|FAILURE) - ")


def rotating(day: int) -> list[str]:
    """Four assets, others every day, all within seven days."""
    first = day * KILLED_EACH_DAY
    return [ASSETS[(first + number) % len(ASSETS)] for number in range(KILLED_EACH_DAY)]


def steps_of(log: Path | None) -> dict[str, str]:
    """The last thing that the log says of each asset: START, SUCCESS or FAILURE."""
    return dict(STEP.findall(log.read_text(errors="replace"))) if log else {}


def in_the_middle(home: Path, asset: str, known: set[Path]) -> bool:
    """Whether a started asset has come so far that a power cut hurts: its trainer takes steps."""
    if asset not in TRAINED:
        time.sleep(zlib.crc32(asset.encode()) % 60 / 1000)  # somewhere within the first instants
        return True
    news = set(home.glob(f"runs/{TRAINED[asset]}-*/progress.jsonl")) - known
    return any(path.stat().st_size for path in news)


def kill_in(home: Path, wanted: set[str]) -> str | None:
    """Start a run and kill its whole process group in the first of these assets; None if it ends before."""
    before = set((home / "logs").glob("*.log"))
    known = set(home.glob("runs/*/progress.jsonl"))
    with started(home, str(BIN / "dataworth"), "run") as process:
        while process.poll() is None:
            log = next(iter(set((home / "logs").glob("*.log")) - before), None)
            for asset, what in steps_of(log).items():
                if asset in wanted and (what != "START" or in_the_middle(home, asset, known)):
                    kill(process)
                    return asset
            time.sleep(0.005)
    return None


def survives(home: Path, assets: list[str], ask) -> None:
    """Kill the run in each of the assets; after each everything that was published is there."""
    version = values(home, "corpus")["version"]
    entries = ledger(home)
    wanted = set(assets)
    while wanted:
        killed = kill_in(home, wanted)
        assert killed, f"the run ended before it came to {sorted(wanted)}"
        wanted.discard(killed)
        assert processes(home) == [], killed
        assert (home / f"versions/{head(home)}/manifest.json").exists(), killed
        assert (home / f"versions/{version}/manifest.json").exists(), killed
        said = ask(home, "verify")
        assert said.code == 0, (killed, said)
        assert ledger(home)[: len(entries)] == entries, killed
        entries = ledger(home)


def finishes(home: Path, undisturbed: Path) -> None:
    """The next run ends well, with the data versions of a run that nobody disturbed, and nothing left over."""
    done = dataworth(home, "run")
    assert done.returncode == 0, done.stderr
    found, expected = data_versions(home), data_versions(undisturbed)
    assert {name for name in ASSETS if found[name] != expected[name]} <= UNLIKE
    verdicts = [values(each, "robustness_audit")["verdict"] for each in (home, undisturbed)]
    assert verdicts[0] == verdicts[1]
    assert head(home) == head(undisturbed)
    bodies = [(entry["kind"], str(entry["body"])) for entry in ledger(home)]
    assert len(set(bodies)) == len(bodies)  # a repeated step enters nothing twice
    assert not list(home.glob("erasure/*/retained.jsonl"))
    assert not list(home.glob("runs/*/*.tmp"))
    assert {path.name for path in home.glob("runs/*-*")} == {path.name for path in undisturbed.glob("runs/*-*")}  # fmt: skip


@pytest.fixture
def delivered(ask, tiny_home: Path, copied: Callable[[Path], Path]) -> Path:
    """A finished home with the delivery and the request of `grown_home`, which no run has seen yet."""
    home = copied(tiny_home)
    (home / LETTER_FILE).write_text(LETTER)
    assert ask(home, *FORGET).code == 0
    return home


def test_every_asset_has_its_day() -> None:
    """Within seven days each asset was killed."""
    assert {asset for day in range(7) for asset in rotating(day)} == set(ASSETS)


def test_killed_in_four_rotating_assets(ask, delivered: Path, grown_home: Path) -> None:
    """SIGKILL of the whole group in the middle of four assets, chosen by the day: nothing published is lost."""
    survives(delivered, rotating(datetime.now(UTC).date().toordinal()), ask)
    finishes(delivered, grown_home)


@pytest.mark.slow
def test_killed_in_every_asset(ask, delivered: Path, grown_home: Path) -> None:
    """The same in all assets, one after the other, in one home."""
    survives(delivered, list(ASSETS), ask)
    finishes(delivered, grown_home)


@pytest.mark.slow
@pytest.mark.parametrize("asset", TRAINED)
def test_a_killed_training_is_resumed_bit_for_bit(
    ask, delivered: Path, grown_home: Path, asset: str
) -> None:
    """One kill in one training: the result is the undisturbed one's, to the last bit of its data version."""
    survives(delivered, [asset], ask)
    finishes(delivered, grown_home)


# --- two runs at once -----------------------------------------------------------------------------------------------


def together(home: Path, *argument_lists: list[str]) -> list[tuple[int, str]]:
    """Start programs at the same moment; exit code and words of each."""
    running = [
        subprocess.Popen(
            arguments, cwd=ROOT, env=environment(home), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for arguments in argument_lists
    ]  # fmt: skip
    ended = [process.communicate(timeout=900)[0] for process in running]
    return [(process.returncode, said) for process, said in zip(running, ended, strict=True)]


SOME = "group:corpus,commitment,evaluation_plan"


def test_two_runs_at_once_both_end_well(ask, tmp_path: Path) -> None:
    """On a fresh home, so that even making it is a race: both exit 0, and the work was done once."""
    home = tmp_path / "home"
    ours = [str(BIN / "dataworth"), "run", "--select", SOME]
    ended = together(home, ours, ours)
    assert [code for code, _ in ended] == [0, 0], ended
    logs = [path.read_text() for path in home.glob("logs/*.log")]
    assert len(logs) == 2
    assert not made(logs[0]) & made(logs[1])
    assert made(logs[0]) | made(logs[1]) == reused(logs[0]) | reused(logs[1])
    bodies = [(entry["kind"], str(entry["body"])) for entry in ledger(home)]
    assert len(set(bodies)) == len(bodies)
    assert "no ledger" not in ask(home, "verify").out


def test_two_of_dagsters_own_runs_at_once_both_end_well(
    tiny_home: Path, copied: Callable[[Path], Path]
) -> None:
    """Runs that Dagster starts hold the assets' locks only: both end well too, over a new delivery."""
    home = copied(tiny_home)
    (home / "inbox/wilson/note.txt").write_text("A note that both runs find.\n")
    theirs = [
        str(BIN / "dagster"),
        "asset",
        "materialize",
        "--select",
        SOME,
        "-m",
        "pipelines.definitions",
    ]
    ended = together(home, theirs, theirs)
    assert [code for code, _ in ended] == [0, 0], ended
    both = [made(said) for _, said in ended]
    assert not both[0] & both[1]
    assert both[0] | both[1] >= {"deliveries", "corpus", "tokens", "commitment"}


# --- a full disk ----------------------------------------------------------------------------------------------------

SMALL_DISK = """
mount -t tmpfs -o size=256m tmpfs "$DATAWORTH_HOME" || exit 99
cp -a "$SOURCE/." "$DATAWORTH_HOME/"
used=$(df --output=used -k "$DATAWORTH_HOME" | tail -1)
mount -o remount,size=$((used + ROOM))k "$DATAWORTH_HOME"
"$DATAWORTH" run; echo "ended with $?"
"$DATAWORTH" verify; echo "verify $?"
mount -o remount,size=256m "$DATAWORTH_HOME"
"$DATAWORTH" run --select "$SELECT"; echo "again $?"
"""


def on_a_small_disk(
    source: Path, mount: Path, room: int, select: str
) -> subprocess.CompletedProcess[str]:
    """Run in a copy of a home on a file system with so many KiB left, then on one with enough."""
    mount.mkdir()
    done = command(
        mount, "unshare", "-Urm", "sh", "-c", SMALL_DISK,
        SOURCE=str(source), ROOM=str(room), SELECT=select, DATAWORTH=str(BIN / "dataworth"),
    )  # fmt: skip
    if done.returncode == 99 or "unshare" in done.stderr.partition(":")[0]:
        pytest.skip("a file system of one's own needs unshare and a kernel that allows it")
    return done


def said_it_was_full(done: subprocess.CompletedProcess[str]) -> None:
    """One clear message, everything published still verifies, and with space the next run ends well."""
    text = text_of(done)
    assert "the disk of the home is full; free some space and run the same command again" in text
    assert "ended with 2" in text
    assert "Traceback" not in text
    assert "verify 0" in text
    assert "again 0" in text


def test_a_full_disk_is_said_and_costs_nothing(delivered: Path, tmp_path: Path) -> None:
    """No room for Dagster's own log: the run stops with one clear message, the next one goes on."""
    said_it_was_full(on_a_small_disk(delivered, tmp_path / "disk", 300, "deliveries,corpus"))


@pytest.mark.slow
@pytest.mark.parametrize("room", [700, 1100, 1500, 2000, 2600])
def test_a_disk_that_fills_up_later_is_said_too(delivered: Path, tmp_path: Path, room: int) -> None:
    """The same in the middle of the graph, wherever the space runs out."""
    said_it_was_full(on_a_small_disk(delivered, tmp_path / "disk", room, "*"))


NO_SPACE = """
import errno, os
real = os.replace
def replace(source, target, **options):
    if "/versions/" in str(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
    return real(source, target, **options)
os.replace = replace
"""


def test_no_space_for_a_version_leaves_the_last_one(ask, delivered: Path, tmp_path: Path) -> None:
    """ENOSPC at the write that completes a version: the message names the version that still stands."""
    (tmp_path / "sitecustomize.py").write_text(NO_SPACE)
    before = head(delivered)
    done = dataworth(delivered, "run", "--select", "deliveries,corpus", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert (
        f"disk full while writing a corpus version: version {before[:12]} is still HEAD and complete"
        in done.stderr
    )
    assert "free some space and run the same command again" in done.stderr
    assert "Traceback" not in done.stderr
    assert head(delivered) == before
    assert ask(delivered, "verify").code == 0
    done = dataworth(delivered, "run", "--select", "deliveries,corpus")
    assert done.returncode == 0, done.stderr
    assert "corpus" in made(log_of(delivered))
