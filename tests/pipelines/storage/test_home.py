"""The home folder, its locks, keys, salts and the suppression list."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.storage import keys as key_file
from pipelines.storage.errors import HomeError, KeysError, SaltError, StorageError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.salts import SaltStore
from pipelines.storage.suppression import SuppressionList
from provenance.canonical import jcs

IDS = [bytes([number]) * 32 for number in range(1, 9)]


def test_create_is_idempotent_and_keeps_what_is_there(tmp_path):
    """A second create() changes nothing."""
    home = Home(tmp_path / "h").create()
    (home.inbox / "ada").mkdir()
    assert home.create() == home
    home.check()
    assert (home.inbox / "ada").is_dir()


def test_a_newer_a_damaged_and_a_missing_home_are_refused(tmp_path):
    """The format file decides, and each message says what to do."""
    with pytest.raises(HomeError, match="dataworth init"):
        Home(tmp_path).check()
    home = Home(tmp_path / "h").create()
    home.format_path.write_bytes(b'{"format":2}')
    with pytest.raises(HomeError, match="use a newer dataworth"):
        home.create()
    for damaged in (b"", b"{}", b'{"format":"1"}', b'{"format":0}', b'{"format":true}', b"[1]"):
        home.format_path.write_bytes(damaged)
        with pytest.raises(HomeError, match="damaged"):
            home.check()
    (tmp_path / "f").write_text("")
    with pytest.raises(HomeError, match="is a file"):
        Home(tmp_path / "f").create()


def test_a_lock_excludes_threads_and_can_time_out(home):
    """Two holders are never inside at once; a waiter with a limit gives up and says why."""
    inside = []

    def work(number: int) -> None:
        with home.lock("corpus"):
            inside.append(number)
            time.sleep(0.01)
            assert inside[-1] == number

    threads = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    gave_up = []

    def give_up() -> None:
        try:
            with home.lock("corpus", timeout_s=0.05):
                gave_up.append("no")
        except HomeError as error:
            gave_up.append(str(error))

    waiter = threading.Thread(target=give_up)
    with home.lock("corpus"):
        for thread in [*threads, waiter]:
            thread.start()
        waiter.join()
        assert not inside
    for thread in threads:
        thread.join()
    assert sorted(inside) == list(range(5))
    assert len(gave_up) == 1
    assert "another process holds the lock 'corpus'" in gave_up[0]


def test_a_lock_of_a_killed_process_is_free(home):
    """Kill -9 of the holder frees the lock: a leftover lock file means nothing."""
    program = (
        "import sys, time; from pathlib import Path; from pipelines.storage.home import Home\n"
        "with Home(Path(sys.argv[1])).lock('corpus'): print('held', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(home.path)], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(HomeError), home.lock("corpus", timeout_s=0.05):
            pass
        child.kill()
    with home.lock("corpus", timeout_s=5):
        assert (home.locks / "corpus.lock").exists()


def test_demo_keys_are_fixed_and_random_keys_are_not(tmp_path):
    """Golden digest of the demo keys; a user's keys are fresh, differ, and say that they are no demo."""
    demo = key_file.load_or_create(tmp_path / "demo", demo=True)
    assert demo == CorpusKeys.demo()
    assert demo.is_demo
    assert demo.k_fp.hex().startswith("d69903f2b84d")
    mine = key_file.load_or_create(tmp_path / "mine", demo=False)
    assert mine == key_file.load_or_create(tmp_path / "mine", demo=True)
    assert not mine.is_demo
    assert mine != CorpusKeys.random()


def test_of_two_processes_that_make_keys_both_get_the_same(tmp_path):
    """Keys that were replaced by others a moment later would orphan everything made with them."""
    made = []
    ready = threading.Barrier(8)

    def work() -> None:
        ready.wait()
        made.append(key_file.load_or_create(tmp_path / "keys", demo=False))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 8
    assert all(found == made[0] for found in made)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_keys_are_secret_on_disk_and_in_messages(tmp_path):
    """Mode 0600, enforced on reading; repr shows no key."""
    path = tmp_path / "keys"
    mine = key_file.load_or_create(path, demo=False)
    assert path.stat().st_mode & 0o777 == 0o600
    assert mine.k_fp.hex() not in repr(mine)
    assert repr(mine.k_fp) not in repr(mine)
    path.chmod(0o640)
    with pytest.raises(KeysError, match="chmod 600"):
        key_file.load(path)


def test_damaged_key_files_are_refused(tmp_path):
    """Missing, torn, of another format, with unknown fields or short keys."""
    path = tmp_path / "keys"
    with pytest.raises(KeysError, match="keys init"):
        key_file.load(path)
    key_file.load_or_create(path, demo=True)
    good = path.read_bytes()
    for bad in (
        good[:-20],
        b"[]",
        good.replace(b'"format":1', b'"format":2'),
        good.replace(b'"k_id":"', b'"k_xx":"'),
        good.replace(b'"k_id":"', b'"k_id":"00'),
        good.replace(b'"k_id":"', b'"k_id":"zz'),
    ):
        path.write_bytes(bad)
        with pytest.raises(KeysError):
            key_file.load(path)


def test_sealing_keys_differ_by_purpose(keys):
    """One key per purpose, none of them equal to k_seal."""
    made = {keys.sealing_key(purpose) for purpose in ("a", "b", "target_confirm")}
    assert len(made | {keys.k_seal}) == 4


@pytest.mark.parametrize("demo", [True, False])
def test_salts_are_stable_until_shredded(tmp_path, demo):
    """ensure() is idempotent and durable; shred() is for ever and spares the others."""
    keys = CorpusKeys.demo() if demo else CorpusKeys.random()
    store = SaltStore(tmp_path / "salts", keys)
    salts = store.ensure(IDS)
    assert len(set(salts)) == len(IDS)
    assert store.ensure(IDS[::-1]) == salts[::-1]
    again = SaltStore(tmp_path / "salts", keys)
    assert [again.get(record) for record in IDS] == salts
    assert again.shred([IDS[0], IDS[0], b"?" * 32]) == 1
    assert again.shred([IDS[0]]) == 0
    for opened in (again, SaltStore(tmp_path / "salts", keys)):
        assert len(opened) == len(IDS) - 1
        assert IDS[0] not in opened
        with pytest.raises(SaltError, match="shredded"):
            opened.get(IDS[0])
        assert opened.get(IDS[1]) == salts[1]


def test_shredding_leaves_no_copy_of_the_old_store(tmp_path):
    """A link to the old file, as a process that still has it open would hold, reads zeros."""
    store = SaltStore(tmp_path / "salts", CorpusKeys.random())
    store.ensure(IDS)
    os.link(tmp_path / "salts", tmp_path / "open")
    store.shred(IDS[:1])
    assert set((tmp_path / "open").read_bytes()) == {0}
    assert (tmp_path / "salts").stat().st_mode & 0o777 == 0o600


@given(st.data())
@settings(deadline=None)
def test_any_flipped_bit_of_the_salt_store_is_found(tmp_path_factory, data):
    """The sealed store does not open with one bit changed, nor with other keys."""
    folder = tmp_path_factory.mktemp("salts")
    SaltStore(folder / "salts", CorpusKeys.demo()).ensure(IDS)
    blob = bytearray((folder / "salts").read_bytes())
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << bit % 8
    (folder / "salts").write_bytes(blob)
    with pytest.raises(SaltError, match="does not open"):
        SaltStore(folder / "salts", CorpusKeys.demo())


def test_suppression_is_by_content_for_erased_and_by_owner_for_withdrawn(tmp_path, keys):
    """Erased: from nobody. Withdrawn: not from this owner. Both survive a restart."""
    store = SuppressionList(tmp_path / "s", keys)
    assert store.reason("ada", IDS[0]) is None
    store.add_erased([IDS[0]])
    store.add_withdrawn("ada", [IDS[1]])
    for opened in (store, SuppressionList(tmp_path / "s", keys)):
        assert len(opened) == 2
        assert opened.reason("ada", IDS[0]) == opened.reason("bob", IDS[0]) == "erased"
        assert opened.reason("ada", IDS[1]) == "withdrawn"
        assert opened.reason("bob", IDS[1]) is None


def test_the_suppression_list_tells_nothing_to_who_reads_it(tmp_path, keys):
    """Mode 0600; the fingerprints themselves do not stand in it."""
    SuppressionList(tmp_path / "s", keys).add_erased(IDS)
    data = (tmp_path / "s").read_bytes()
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert not any(record.hex().encode() in data for record in IDS)


def test_a_damaged_suppression_list_stops_intake(tmp_path, keys):
    """Going on without it would let erased texts back in."""
    for bad in (b"", b"{}", jcs({"format": 2, "erased": [], "withdrawn": []})):
        (tmp_path / "s").write_bytes(bad)
        with pytest.raises(StorageError, match="could come back"):
            SuppressionList(tmp_path / "s", keys)


def test_paths_lie_inside_the_home():
    """Every path of a home begins with it; making the object touches no disk."""
    home = Home(Path("/nowhere/h"))
    for name in dir(home):
        value = getattr(home, name) if not name.startswith("_") else None
        if isinstance(value, Path):
            assert value.is_relative_to(home.path)
    assert home.table("values") == Path("/nowhere/h/tables/values.parquet")


def test_a_thread_may_take_its_own_lock_again(home):
    """A step that holds the corpus lock can call a method that takes it; others still wait."""
    others = []

    def other() -> None:
        try:
            with home.lock("corpus", timeout_s=0.02):
                others.append("in")
        except HomeError:
            others.append("out")

    def ask() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    with home.lock("corpus"):
        with home.lock("corpus"), Home(home.path).lock("corpus"):
            ask()
        ask()
    ask()
    assert others == ["out", "out", "in"]


def test_a_forked_child_does_not_inherit_a_lock(home):
    """After fork the child holds nothing: taking the lock again must wait, not walk in."""
    program = (
        "import os, sys; from pathlib import Path; from pipelines.storage.home import Home, HomeError\n"
        "home = Home(Path(sys.argv[1]))\n"
        "with home.lock('corpus'):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            with home.lock('corpus', timeout_s=0.05): os._exit(1)\n"
        "        except HomeError: os._exit(0)\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )
    subprocess.run([sys.executable, "-c", program, str(home.path)], check=True)
