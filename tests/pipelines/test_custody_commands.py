"""`keys`, `backup`, `restore`, `witness`, `publish`, `why`, `verify FILE`: what they say, and that guessing does not work."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from custody_home import PASSPHRASE, PLANTED, all_bytes, erased, user_site

from pipelines import custody
from pipelines.site import Site
from pipelines.steps.ledger import enter, open_ledger
from pipelines.storage import keys as key_file
from pipelines.storage.errors import KeysError, StorageError
from pipelines.storage.home import Home
from provenance import (
    HistoryError,
    canonical_bytes,
    keyed,
    sha256,
    vkey,
)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A user's home with a corpus version and receipts."""
    return user_site(tmp_path)


@pytest.fixture
def tell(site: Site, ask: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
    """Our command line in the site's home."""
    from pipelines.cli import keeping, tracing

    for module in (keeping, tracing):
        monkeypatch.setattr(module.console, "width", 400)
    extra = {"DATAWORTH_INBOX": str(tmp_path / "inbox"), "DATAWORTH_PASSPHRASE": PASSPHRASE}
    return lambda *arguments: ask(site.home.path, *arguments, **extra)


def test_every_keys_command_says_what_is_lost(tell, site, tmp_path):
    """init, show, export, import and rotate name what goes with the key, and none shows one."""
    keys = key_file.load(site.home.keys_path)
    said = [
        tell("keys", "init"),
        tell("keys", "show"),
        tell("keys", "export", str(tmp_path / "copy")),
    ]
    said += [tell("keys", "import", str(tmp_path / "copy")), tell("keys", "rotate", "salts")]
    said.append(tell("keys", "rotate", "ledger", "--root", str(tmp_path / "root")))
    assert [one.code for one in said] == [0] * 6, said
    for purpose, lost in key_file.LOST.values():
        assert purpose in said[0].out
        assert lost in said[1].out
    assert "lost" in said[2].out
    assert "lost" in said[4].out
    assert "not possible" in said[5].out
    everything = "".join(one.out for one in said)
    assert not [name for name in key_file.LOST if getattr(keys, name).hex()[:16] in everything]
    assert tell("keys", "show").out.count("key list 2 signed by") == 1


def test_wrong_use_is_one_paragraph(tell, tmp_path):
    """Unknown kinds, a missing root file, a copy that is none: exit code 2 and what was expected."""
    cases = {
        ("keys", "rotate", "k_fp"): "expected `ledger` or `salts`",
        ("keys", "rotate", "ledger"): "--root FILE",
        ("keys", "import", str(tmp_path / "none")): "No such file",
        ("restore", str(tmp_path / "none")): "No such file",
    }
    for arguments, message in cases.items():
        said = tell(*arguments)
        assert (said.code, message in said.err) == (2, True), said


def test_backup_and_restore_from_the_command_line(tell, site, tmp_path):
    """The messages name what a backup holds, what was erased again, and where the old home lies."""
    said = tell("backup", str(tmp_path / "copy.tar"))
    assert said.code == 0
    assert "every text and key" in said.out
    request = erased(site)
    said = tell("restore", str(tmp_path / "copy.tar"))
    assert said.code == 0, said
    for fact in (
        "files restored and checked",
        "was kept",
        f"1 records of 1 requests ({request.id})",
        "home.replaced",
    ):
        assert fact in said.out
    receipt = next(site.home.receipts.glob("*/ada.receipt.json"))
    assert tell("verify", str(receipt)).code == 0


def test_verify_prints_a_line_per_claim_and_exits_with_one_on_any_damage(tell, site, tmp_path):
    """Both files of an owner work as FILE; wrong key, cut file, extra bytes, bad UTF-8: exit code 1, ledger untouched."""
    receipt = next(site.home.receipts.glob("*/bob.receipt.json"))
    proof = receipt.with_name("bob.tlog-proof")
    key = (site.home.ledger / "vkey").read_text().strip()
    before = (site.home.ledger / "entries.jsonl").read_bytes()
    for path in (receipt, proof):
        said = tell("verify", str(path), "--key", key)
        assert (said.code, said.out.count("under licence CC0-1.0")) == (0, 2)
    good, text = receipt.read_bytes(), proof.read_bytes()
    bad = {
        "cut receipt": (good[:-9], text), "extra bytes": (good + b" ", text), "bad UTF-8": (good.replace(b"bob", b"b\xffb"), text),
        "unknown format": (good.replace(b'"format":1', b'"format":9'), text), "cut proof": (good, text[:-30]),
        "swapped": (good, text.replace(b"index 2", b"index 1")), "duplicate": (good.replace(b'{"abs', b'{"salt":"","abs'), text),
        "proof with garbage": (good, text + b"\xff"), "empty": (b"", b""),
    }  # fmt: skip
    for name, (first, second) in bad.items():
        receipt.write_bytes(first)
        proof.write_bytes(second)
        said = tell("verify", str(receipt), "--key", key)
        assert (said.code, said.out[:2]) == (1, "no"), (name, said)
    receipt.write_bytes(good)
    proof.write_bytes(text)
    other = vkey("dataworth/ledger", custody.SigningKey.generate().public)
    for wrong in (other, "no vkey", key[:-4]):
        said = tell("verify", str(receipt), "--key", wrong)
        assert (said.code, said.out[:2]) == (1, "no")
    assert (site.home.ledger / "entries.jsonl").read_bytes() == before


def test_a_witness_follows_the_ledger_and_its_tiles_and_refuses_a_rollback(tell, site, tmp_path):
    """From the folder, from published files, after a rotation by the root's key; a rolled-back log is a no with exit code 1."""
    key = (site.home.ledger / "vkey").read_text().strip()
    state = ("--state", str(tmp_path / "witness"), "--name", "w.example")
    old = tmp_path / "old"
    shutil.copytree(site.home.ledger, old)
    assert tell("witness", str(site.home.ledger), *state, "--key", key).code == 0
    enter(site, "note", {"n": 1})
    assert tell("publish", str(tmp_path / "www")).code == 0
    assert tell("witness", str(tmp_path / "www"), *state, "--key", key).code == 0
    said = tell("witness", str(old), *state, "--key", key)
    assert said.code == 1
    assert "4 entries were signed, got 3" in said.out
    custody.rotate_ledger(site, tmp_path / "root")
    enter(site, "note", {"n": 2})
    assert tell("publish", str(tmp_path / "www")).code == 0
    root = (site.home.ledger / "root.vkey").read_text().strip()
    assert tell("witness", str(tmp_path / "www"), *state, "--key", key).code == 1
    assert tell("witness", str(tmp_path / "www"), *state, "--key", root).code == 0


def test_a_receipt_is_verified_after_a_rotation_with_the_root_key_and_its_list(
    tell, site, tmp_path
):
    """`--keys` is the list that the root signed; without it, or with the ledger's own key, the answer is no."""
    custody.rotate_ledger(site, tmp_path / "root")
    root, listed = (
        (site.home.ledger / "root.vkey").read_text().strip(),
        str(site.home.ledger / "keys"),
    )
    receipt = str(next(site.home.receipts.glob("*/ada.receipt.json")))
    said = tell("verify", receipt, "--key", root, "--keys", listed)
    assert (said.code, "key list 2 of dataworth/ledger/root names" in said.out) == (0, True)
    own = (site.home.ledger / "vkey").read_text().strip()
    (tmp_path / "empty").write_bytes(b"")
    for arguments in (
        ("--key", root),
        ("--key", own, "--keys", listed),
        ("--keys", listed),
        ("--key", root, "--keys", str(tmp_path / "empty")),
        ("--key", root, "--keys", str(tmp_path / "none")),
    ):
        said = tell("verify", receipt, *arguments)
        assert (said.code, said.out[:2]) == (1, "no")


def test_a_clock_that_runs_backwards_stops_the_command_and_leaves_the_ledger(tell, site, tmp_path):
    """An entry of the year 2999 stands: the next command that enters says expected and got, exit code 1."""
    open_ledger(site).append("note", {"n": 1}, "2999-01-01T00:00:00Z")
    before = {path: path.read_bytes() for path in site.home.ledger.rglob("*") if path.is_file()}
    said = tell("keys", "rotate", "ledger", "--root", str(tmp_path / "root"))
    assert said.code == 1, said
    assert "clock runs backwards: expected a time from 2999-01-01T00:00:00Z on, got 2" in said.err
    assert before == {
        path: path.read_bytes() for path in site.home.ledger.rglob("*") if path.is_file()
    }


def test_a_home_with_a_ledger_of_the_first_layout_goes_on(tell, site, tmp_path):
    """Opened by any command: taken over with every receipt still valid; a backup from before is restored as well."""
    log = site.home.ledger
    lines = (log / "entries.jsonl").read_bytes().splitlines(keepends=True)
    (log / "entries.jsonl").write_bytes(
        b"".join(line for line in lines if not line.startswith(b'{"checkpoint"'))
    )
    assert tell("backup", str(tmp_path / "old.tar")).code == 0
    size = enter(site, "note", {"n": 1})
    assert open_ledger(site).verify((log / "vkey").read_text().strip()).size == size + 1
    for receipt in site.home.receipts.glob("*/*.receipt.json"):
        assert tell("verify", str(receipt)).code == 0
    said = tell("restore", str(tmp_path / "old.tar"))
    assert said.code == 0, said
    assert open_ledger(site).size == size + 1


def test_why_names_what_differs(tell, site, tmp_path):
    """Two runs: every changed item alone, seed and setting with both values; equal ones are said to be equal."""
    from provenance.versions import ITEMS

    base = {
        "versions": {item: sha256(item.encode()).hex() for item in ITEMS}, "seed": 1, "config": {"optim": {"lr": "0.1"}},
    }  # fmt: skip

    def run(name: str, **changes: object) -> str:
        (site.home.runs / name).mkdir(exist_ok=True)
        (site.home.runs / name / "run.json").write_text(json.dumps(base | changes))
        return name

    run("train-a")
    assert "do not differ" in tell("why", "train-a", run("train-b")).out
    for item in ITEMS:
        said = tell("why", "train-a", run("train-c", versions=base["versions"] | {item: "none"}))
        assert (said.code, "1 items differ" in said.out, f" {item} " in said.out) == (0, True, True)
    said = tell("why", "train-a", run("train-d", seed=2, config={"optim": {"lr": "0.2"}}))
    assert 'config.optim.lr "0.1" "0.2"' in said.out
    assert "seed 1 2" in said.out
    index = enter(site, "run", {"run": "gone", "versions": base["versions"] | {"code": "none"}})
    assert " code " in tell("why", "train-a", f"#{index}").out
    incomplete = {item: "none" for item in ITEMS if item != "lock"}
    cases = {
        ("train-a", "nothing"): "names 0 runs", ("train-a", "train-"): "names 4 runs", ("train-a", "#x"): "no ledger entry",
        ("train-a", run("train-e", versions=incomplete)): "'lock' is missing",
    }  # fmt: skip
    for arguments, message in list(cases.items())[::-1]:
        said = tell("why", *arguments)
        code = (
            1 if "missing" in message else 2
        )  # provenance refuses; a name that fits nothing is an error
        assert said.code == code, said
        assert message.replace("4", "5") in said.err or message in said.err, said


def test_low_entropy_texts_are_not_guessable_from_anything_published(site, tmp_path):
    """All 10,000 phone numbers of the planted form are tried against every published byte; unsalted they would be found."""
    keys = key_file.load(site.home.keys_path)
    folder = tmp_path / "www"
    from provenance import commit, leaf_data, leaf_hash, publish

    publish(open_ledger(site), folder)
    shutil.copytree(site.home.versions, folder / "versions")
    for path in site.home.storage.glob("*.leaves"):
        shutil.copy(path, folder)
    for path in site.home.receipts.glob("*/*.tlog-proof"):
        shutil.copy(path, folder)
    published = b"".join(all_bytes(folder))
    guesses = [PLANTED.replace("0134", f"{number:04d}") for number in range(10_000)]
    pseudonym = keyed(
        keys.k_owner, b"bob"
    )  # even the pseudonym, which a neighbour in the sum tree may know

    def forms(text: str) -> list[bytes]:
        canonical = canonical_bytes(text)
        digest, unsalted = sha256(canonical), commit(bytes(32), canonical)
        leaves = [
            leaf_hash(canonical),
            leaf_hash(digest),
            leaf_hash(leaf_data(unsalted, pseudonym, 1, "CC0-1.0")),
        ]
        return [digest, sha256(digest), unsalted, keyed(bytes(32), canonical), *leaves]

    def found(data: bytes, hexed: bytes) -> int:
        return sum(
            form in data or form.hex().encode() in hexed for text in guesses for form in forms(text)
        )

    assert found(published, published) == 0
    control = published + sha256(canonical_bytes(PLANTED))
    assert found(control, b"") == 1


def test_errors_of_this_module_are_storage_errors_or_values():
    """Whatever is refused here ends as one paragraph on the command line, never as a traceback."""
    assert issubclass(KeysError, StorageError)
    assert issubclass(HistoryError, ValueError)
    assert isinstance(Home(Path("x")), Home)
