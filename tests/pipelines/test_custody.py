"""Keys at rest, rotation, backups: what survives a kill, and what a restore must not bring back."""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
from custody_home import (
    COLUMNS,
    PASSPHRASE,
    PLANTED,
    all_bytes,
    erased,
    holding,
    row,
    user_site,
    verified,
)

from pipelines import backups, custody, requests
from pipelines.requests import Request
from pipelines.site import Site, open_site
from pipelines.steps.ledger import enter, key_list, now, open_ledger, trusted
from pipelines.storage import keys as key_file
from pipelines.storage.errors import HomeError, KeysError, SaltError
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.salts import SaltStore
from pipelines.storage.suppression import SuppressionList
from pipelines.storage.versions import Versions
from provenance import (
    HistoryError,
    Ledger,
    VerifyError,
    verify_receipt,
    vkey,
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A user's home with a corpus version and receipts."""
    return user_site(tmp_path)


# --- keys at rest ----------------------------------------------------------------------------------------------------


def test_with_a_key_in_the_environment_nothing_in_the_home_opens_the_salts(
    site, monkeypatch, tmp_path
):
    """The key file is sealed: no key stands in it, and without the variable, or with another, it does not open."""
    path = site.home.keys_path
    plain = key_file.load(path)
    monkeypatch.setenv("DATAWORTH_KEY", "ab" * 32)
    key_file.save(plain, path)
    assert path.stat().st_mode & 0o777 == 0o600
    for name in key_file.LOST:
        secret = getattr(plain, name)
        assert not any(
            secret in data or secret.hex().encode() in data for data in all_bytes(site.home.path)
        )
    assert key_file.load(path) == plain
    assert SaltStore(site.home.salts_path, key_file.load(path))
    monkeypatch.setenv("DATAWORTH_KEY", "cd" * 32)
    with pytest.raises(KeysError, match="does not open with the DATAWORTH_KEY"):
        key_file.load(path)
    monkeypatch.delenv("DATAWORTH_KEY")
    with pytest.raises(KeysError, match="set DATAWORTH_KEY"):
        key_file.load(path)
    (tmp_path / "secret").write_text("ab" * 32 + "\n")
    monkeypatch.setenv("DATAWORTH_KEY_FILE", str(tmp_path / "secret"))
    assert key_file.load(path) == plain
    for bad in ("ab" * 31, "no hex at all"):
        monkeypatch.setenv("DATAWORTH_KEY", bad)
        with pytest.raises(ValueError, match="expected 64 hex digits, got"):
            key_file.load(path)


def test_an_exported_copy_opens_with_its_passphrase_only(site, tmp_path):
    """Export, import into the emptied home, and every refusal on the way."""
    keys, copy = key_file.load(site.home.keys_path), tmp_path / "copy"
    with pytest.raises(KeysError, match="at least 12 characters, got 5"):
        custody.export_keys(keys, copy, "short")
    custody.export_keys(keys, copy, PASSPHRASE)
    assert copy.stat().st_mode & 0o777 == 0o600
    assert keys.k_salts.hex().encode() not in copy.read_bytes()
    with pytest.raises(KeysError, match="exists"):
        custody.export_keys(keys, copy, PASSPHRASE)
    with pytest.raises(KeysError, match="another passphrase"):
        custody.read_export(copy, PASSPHRASE + "!")
    copy_bytes = bytearray(copy.read_bytes())
    copy_bytes[-1] ^= 1
    (tmp_path / "bent").write_bytes(copy_bytes)
    (tmp_path / "other").write_bytes(b"something else")
    for name, message in (("bent", "damaged"), ("other", "expected a copy made by")):
        with pytest.raises(KeysError, match=message):
            custody.read_export(tmp_path / name, PASSPHRASE)
    with pytest.raises(KeysError, match="has other keys"):
        custody.import_keys(site, CorpusKeys.random())
    site.home.keys_path.unlink()
    with pytest.raises(SaltError, match="other keys"):
        custody.import_keys(site, CorpusKeys.random())
    assert not site.home.keys_path.exists()
    custody.import_keys(site, custody.read_export(copy, PASSPHRASE))
    assert key_file.load(site.home.keys_path) == keys


# --- rotation --------------------------------------------------------------------------------------------------------


def test_rotated_salts_are_the_same_salts_under_another_key(site, monkeypatch):
    """Commitments stay; the old key opens nothing; a kill after the first step is finished by the next call."""
    old = key_file.load(site.home.keys_path)
    before = SaltStore(site.home.salts_path, old)._salts
    custody.rotate_salts(site)
    new = key_file.load(site.home.keys_path)
    assert SaltStore(site.home.salts_path, new)._salts == before
    with pytest.raises(SaltError):
        SaltStore(site.home.salts_path, old)
    assert not custody.finish_salts(site)
    monkeypatch.setattr(SaltStore, "reseal", killed)
    with pytest.raises(KeyboardInterrupt):
        custody.rotate_salts(site)
    monkeypatch.undo()
    assert SaltStore(site.home.salts_path, key_file.load(site.home.keys_path))._salts == before
    assert custody.finish_salts(site)
    assert key_file.load(site.home.keys_path).k_salts not in (old.k_salts, new.k_salts)
    assert SaltStore(site.home.salts_path, key_file.load(site.home.keys_path))._salts == before


def killed(*_arguments: object, **_options: object) -> None:
    raise KeyboardInterrupt


def test_a_rotated_ledger_goes_on_and_old_receipts_stay_valid(site, tmp_path):
    """Before and after the rotation each checkpoint is checked under its own key, by the list that the root signed."""
    old = (site.home.ledger / "vkey").read_text().strip()
    new = custody.rotate_ledger(site, tmp_path / "root")
    assert new != old
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o600
    assert (site.home.ledger / "vkey").read_text().strip() == new
    enter(site, "note", {"after": True})
    assert open_ledger(site).verify(trusted(site)).size == 5
    assert verified(site.home.path) == 2
    path = next(site.home.receipts.glob("*/ada.receipt.json"))
    proof = path.with_name("ada.tlog-proof").read_text()
    with pytest.raises(VerifyError):
        verify_receipt(json.loads(path.read_bytes()), proof, new)
    custody.rotate_ledger(site, tmp_path / "root")
    assert len(key_list(site.home.ledger).keys) == 3
    assert open_ledger(site).verify(trusted(site)).size == 6
    (tmp_path / "other").write_text("ab" * 32)
    (tmp_path / "other").chmod(0o600)
    for name, message in (("missing", "is missing"), ("other", "is not the root key")):
        with pytest.raises(KeysError, match=message):
            custody.rotate_ledger(site, tmp_path / name)


def test_a_rotation_killed_at_any_step_is_finished_by_the_next_call(site, tmp_path, monkeypatch):
    """Every file that the rotation writes is the last one once; the ledger verifies after the second call."""
    saved = tmp_path / "saved"
    shutil.copytree(site.home.path, saved)
    done, step = False, 0
    while not done:
        shutil.rmtree(site.home.path)
        shutil.copytree(saved, site.home.path)
        root, calls = tmp_path / f"root-{step}", []

        def write(path, data, mode=0o644, real=custody.write_atomic, calls=calls, limit=step):
            calls.append(path.name)
            if len(calls) > limit:
                raise KeyboardInterrupt
            real(path, data, mode)

        monkeypatch.setattr(custody, "write_atomic", write)
        monkeypatch.setattr(key_file, "write_atomic", write)
        try:
            custody.rotate_ledger(site, root)
            done = True
        except KeyboardInterrupt:
            step += 1
        monkeypatch.undo()
        if not done:
            custody.rotate_ledger(site, root)
        enter(site, "note", {"step": step})
        assert open_ledger(site).verify(trusted(site)).size == 5
        assert len(key_list(site.home.ledger).keys) == 2
        assert not list(site.home.path.glob("keys.next-*"))
        assert verified(site.home.path) == 2
    assert step == 6


def test_demo_keys_are_never_rotated(tmp_path):
    """They are published so that numbers can be reproduced; a rotation would pretend that they protect something."""
    demo = open_site(tmp_path / "home", None, "tiny", "1")
    key_file.load_or_create(demo.home.keys_path, demo=True)
    for rotate in (
        custody.rotate_salts,
        lambda site: custody.rotate_ledger(site, tmp_path / "root"),
    ):
        with pytest.raises(KeysError, match="demo keys"):
            rotate(demo)


# --- backup and restore ----------------------------------------------------------------------------------------------


def test_a_restored_home_verifies_every_receipt_and_has_every_byte(site, tmp_path):
    """The home is lost and comes back from the one file, keys' modes included."""
    before = {path: path.read_bytes() for path in backups._files(site.home.path)}
    count = backups.backup(site.home, tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").stat().st_mode & 0o777 == 0o600
    shutil.rmtree(site.home.path)
    done = backups.restore(tmp_path / "copy.tar", site.home)
    assert (done.files, done.replaced, done.applied) == (count, None, ())
    assert {path: path.read_bytes() for path in backups._files(site.home.path)} == before
    assert site.home.keys_path.stat().st_mode & 0o777 == 0o600
    assert verified(site.home.path) == 2
    assert open_ledger(site).verify(trusted(site)).size == 3
    keys = key_file.load(site.home.keys_path)
    versions = Versions(site.home, keys)
    assert versions.verify(versions.head())


def test_a_restore_older_than_an_erasure_applies_it_again(site, tmp_path):
    """Positive control: the text is in the backup. After the restore it is in no file, no salt opens it, intake refuses it."""
    backups.backup(site.home, tmp_path / "copy.tar")
    assert PLANTED.encode() in b"".join(all_bytes(unpacked(tmp_path))) or holding(
        unpacked(tmp_path), PLANTED
    )
    request = erased(site)
    size = open_ledger(site).size
    done = backups.restore(tmp_path / "copy.tar", site.home)
    assert done.applied == (request.id,)
    assert done.records == 1
    assert done.kept_ledger
    assert open_ledger(site).size == size
    assert holding(site.home.path, PLANTED) == []
    assert (
        "Rain again."
        in Versions(site.home, key_file.load(site.home.keys_path))
        .read(head(site))["text"]
        .to_list()
    )
    check_forgotten(site, request)


def unpacked(folder: Path) -> Path:
    """What a backup holds, as files."""
    with tarfile.open(folder / "copy.tar") as archive:
        archive.extractall(folder / "unpacked", filter="data")
    return folder / "unpacked"


def head(site: Site) -> str:
    return site.home.head_path.read_text().strip()


def check_forgotten(site: Site, request: Request) -> None:
    keys = key_file.load(site.home.keys_path)
    versions = Versions(site.home, keys)
    identity = bytes.fromhex(request.record_ids[0])
    assert identity not in versions.read(head(site), COLUMNS)["record_id"].to_list()
    with pytest.raises(SaltError):
        SaltStore(site.home.salts_path, keys).get(identity)
    suppressed = SuppressionList(site.home.suppression_path, keys)
    assert suppressed.reason("carol", row(keys, "bob", 0, PLANTED)[1]) == "erased"
    assert versions.verify(head(site))


def test_where_no_home_is_left_a_copy_of_the_requests_is_enough(site, tmp_path):
    """The folder of requests holds no text and tells the restore what was erased since."""
    backups.backup(site.home, tmp_path / "copy.tar")
    request = erased(site)
    shutil.copytree(site.home.requests, tmp_path / "requests")
    assert holding(tmp_path / "requests", PLANTED) == []
    shutil.rmtree(site.home.path)
    done = backups.restore(tmp_path / "copy.tar", site.home, requests=tmp_path / "requests")
    assert done.applied == (request.id,)
    assert holding(site.home.path, PLANTED) == []
    check_forgotten(site, request)


def test_a_restore_during_an_open_request_takes_the_records_out_of_head(site, tmp_path):
    """A request that was acted on and not finished: its records leave HEAD again, its state stays."""
    backups.backup(site.home, tmp_path / "copy.tar")
    request = erased(site, "suspended")
    done = backups.restore(tmp_path / "copy.tar", site.home)
    assert (done.applied, done.records) == ((request.id,), 1)
    assert [one.state for one in requests.load(site.home)] == ["suspended"]
    keys = key_file.load(site.home.keys_path)
    assert PLANTED not in Versions(site.home, keys).read(head(site))["text"].to_list()


def test_a_restore_never_goes_back_behind_the_ledger_that_was_seen(site, tmp_path):
    """The longer ledger of the home stays; one that contradicts the backup's is refused and nothing changes."""
    backups.backup(site.home, tmp_path / "copy.tar")
    enter(site, "note", {"since": "the backup"})
    kept = open_ledger(site).checkpoint
    done = backups.restore(tmp_path / "copy.tar", site.home)
    assert done.kept_ledger
    assert open_ledger(site).checkpoint == kept
    shutil.rmtree(done.replaced)
    seed = key_file.load(site.home.keys_path).ledger_seed
    name = "dataworth/ledger"
    shutil.rmtree(site.home.ledger)
    other = Ledger.open(site.home.ledger, name, custody.SigningKey.from_seed(seed))
    other.append_many([("note", {"another": number}) for number in range(9)], now())
    (site.home.ledger / "vkey").write_text(vkey(name, custody.SigningKey.from_seed(seed).public))
    before = {path: path.read_bytes() for path in backups._files(site.home.path)}
    with pytest.raises(HistoryError, match="two histories"):
        backups.restore(tmp_path / "copy.tar", site.home)
    assert {path: path.read_bytes() for path in backups._files(site.home.path)} == before


def test_a_backup_that_is_not_whole_is_refused_and_the_home_stays(site, tmp_path):
    """Cut, flipped, of another format, with a file too many, or no backup at all: the home is not touched."""
    copy = tmp_path / "copy.tar"
    backups.backup(site.home, copy)
    whole = copy.read_bytes()
    before = {path: path.read_bytes() for path in backups._files(site.home.path)}
    flipped = bytearray(whole)
    flipped[whole.index(b"PAR1") + 10] ^= 1
    with tarfile.open(tmp_path / "more.tar", "w") as archive:
        for path in sorted(unpacked(tmp_path).rglob("*")):
            archive.add(path, arcname=str(path.relative_to(tmp_path / "unpacked")), recursive=False)
        archive.add(copy, arcname="one-too-many")
    cases = {
        whole[: len(whole) // 2]: "whole backup|damaged|expected a backup",
        bytes(flipped): "is damaged: 1 files differ",
        whole.replace(b'"format":1', b'"format":9', 1): "backup format 9, this program knows 1",
        (tmp_path / "more.tar").read_bytes(): "damaged|expected a backup",
        b"": "whole backup",
        b"not a tar" * 200: "whole backup",
    }
    for data, message in cases.items():
        (tmp_path / "bad.tar").write_bytes(data)
        with pytest.raises(HomeError, match=message):
            backups.restore(tmp_path / "bad.tar", site.home)
        assert {path: path.read_bytes() for path in backups._files(site.home.path)} == before
    with pytest.raises(HomeError, match="never written over"):
        backups.backup(site.home, copy)
    with pytest.raises(HomeError, match="inside of the home"):
        backups.backup(site.home, site.home.path / "copy.tar")
