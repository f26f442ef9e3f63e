"""The ledger as static files: tlog-tiles by their written definition, served by any web server."""

from __future__ import annotations

import http.server
import threading
import urllib.request
from functools import partial
from hashlib import sha256

import pytest

from provenance import (
    FormatError,
    Ledger,
    RootMismatchError,
    SigningKey,
    cosign,
    open_checkpoint,
    publish,
    read_tiles,
    split_bundle,
    tile_path,
    verify_cosignature,
    verify_inclusion,
    vkey,
)
from tests.oracles import merkle_recursion as oracle

KEY = SigningKey.demo()
ORIGIN = "dataworth.example/demo"
VKEY = vkey(ORIGIN, KEY.public)
TIME = "2025-01-31T12:00:00Z"


@pytest.fixture(scope="module")
def ledger(tmp_path_factory):
    """A ledger of 600 entries, one of them with a large body."""
    made = Ledger.open(tmp_path_factory.mktemp("ledger"), ORIGIN, KEY)
    made.append_many([("test", {"n": number}) for number in range(599)], TIME)
    made.append("large", {"text": "x" * 40_000}, TIME)
    return made


def test_paths_by_their_written_definition():
    """The examples of the specification."""
    assert tile_path("0", 1234067) == "tile/0/x001/x234/067"
    assert tile_path("0", 1, 17) == "tile/0/001.p/17"
    assert tile_path("entries", 999) == "tile/entries/999"
    assert tile_path("2", 1000) == "tile/2/x001/000"


def test_tiles_by_their_written_definition(ledger, tmp_path):
    """Level 0 holds leaf hashes, level 1 the roots over 256 leaves, bundles the entries."""
    publish(ledger, tmp_path)
    entries = [ledger.entry_bytes(index) for index in range(600)]
    hashes = [sha256(b"\x00" + entry).digest() for entry in entries]
    assert (tmp_path / "tile/0/000").read_bytes() == b"".join(hashes[:256])
    assert (tmp_path / "tile/0/002.p/88").read_bytes() == b"".join(hashes[512:])
    above = oracle.root(entries[:256]) + oracle.root(entries[256:512])
    assert (tmp_path / "tile/1/000.p/2").read_bytes() == above
    assert not (tmp_path / "tile/2").exists()
    bundle = (tmp_path / "tile/entries/001").read_bytes()
    assert split_bundle(bundle) == entries[256:512]
    assert bundle[:2] == len(entries[256]).to_bytes(2, "big")
    assert (tmp_path / "checkpoint").read_bytes() == ledger.checkpoint
    digest = ledger.entry(599)["body_sha256"]
    assert sha256((tmp_path / "bodies" / digest).read_bytes()).hexdigest() == digest


def test_publishing_again_writes_only_what_is_new(tmp_path):
    """A full tile never changes; nothing is written for a state that was published."""
    ledger = Ledger.open(tmp_path / "ledger", ORIGIN, KEY)
    ledger.append_many([("test", {"n": number}) for number in range(300)], TIME)
    assert publish(ledger, tmp_path / "tiles") == 6
    assert publish(ledger, tmp_path / "tiles") == 0
    full = (tmp_path / "tiles/tile/0/000").stat().st_mtime_ns
    ledger.append("test", {}, TIME)
    assert publish(ledger, tmp_path / "tiles") == 3
    assert (tmp_path / "tiles/tile/0/000").stat().st_mtime_ns == full


def test_an_outsider_reads_the_log_over_http_and_proves_an_entry(ledger, tmp_path):
    """The tree from the served tiles has the signed root, and its paths verify."""
    publish(ledger, tmp_path)
    handler = partial(Silent, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]

        def fetch(path: str) -> bytes:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}") as answer:
                return answer.read()

        checkpoint = open_checkpoint(fetch("checkpoint"), VKEY)
        tree = read_tiles(fetch, checkpoint)
        entry = split_bundle(fetch(tile_path("entries", 1)))[44]
        server.shutdown()
    leaf = sha256(b"\x00" + entry).digest()
    verify_inclusion(leaf, 300, 600, tree.inclusion_path(300), checkpoint.root)


def test_attack_a_changed_or_cut_tile_is_refused(ledger, tmp_path):
    """One flipped bit in any level-0 tile leads to another root; a cut one has another length."""
    publish(ledger, tmp_path)
    checkpoint = open_checkpoint(ledger.checkpoint, VKEY)
    for name in ("tile/0/000", "tile/0/001", "tile/0/002.p/88"):
        data = (tmp_path / name).read_bytes()
        bent = bytes([data[0] ^ 1]) + data[1:]
        for forged, error in ((bent, RootMismatchError), (data[:-32], FormatError)):
            files = {name: forged}
            with pytest.raises(error):
                read_tiles(
                    lambda path, f=files: f.get(path) or (tmp_path / path).read_bytes(), checkpoint
                )
    for bundle in (b"\x00", b"\x00\x05abc", b"\x00\x01a\x00"):
        with pytest.raises(FormatError, match="ends inside"):
            split_bundle(bundle)


def test_a_cosigned_checkpoint_is_served_and_no_other(ledger, tmp_path):
    """The witnesses' lines stand behind ours; a note of another state is refused."""
    own = SigningKey.generate()
    cosigned = cosign(ledger.checkpoint, "w.example", own, 5)
    publish(ledger, tmp_path, cosigned)
    served = (tmp_path / "checkpoint").read_bytes()
    assert open_checkpoint(served, VKEY).size == 600
    assert verify_cosignature(served, vkey("w.example", own.public, b"\x04")) == 5
    other = Ledger.open(tmp_path / "other", ORIGIN, KEY)
    with pytest.raises(FormatError, match="newest"):
        publish(ledger, tmp_path, other.checkpoint)


class Silent(http.server.SimpleHTTPRequestHandler):
    """A web server that says nothing on the terminal."""

    def log_message(self, *arguments):
        """Keep quiet."""
