"""Verification: every damage is found, and the finding says where."""

import hashlib
import json

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.storage import blocks
from pipelines.storage.errors import (
    CorruptionError,
    VersionError,
)
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.manifest import parse_manifest, parse_storage
from pipelines.storage.records import SCHEMA
from pipelines.storage.salts import SaltStore
from pipelines.storage.versions import Versions
from provenance.canonical import canonical_bytes, fingerprint, jcs, keyed, record_id

KEYS = CorpusKeys.demo()


def record(owner, text, source="s", position=0, licence="CC0-1.0"):
    content = fingerprint(KEYS.k_fp, canonical_bytes(text))
    identity = record_id(KEYS.k_id, owner, source, position, content)
    digest = keyed(KEYS.k_file, text.encode())
    return (
        identity,
        content,
        owner,
        source,
        position,
        text,
        licence,
        True,
        False,
        False,
        None,
        False,
        digest,
    )


def frame(rows):
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def texts(owner, words, first=0):
    return [record(owner, word, position=first + place) for place, word in enumerate(words)]


def findings(versions, version):
    with pytest.raises(CorruptionError) as caught:
        versions.verify(version)
    return caught.value.findings


def test_verify_finds_every_kind_of_damage_and_says_where(home, keys, tmp_path):
    """One damage at a time, then restored: the finding names block, file or index."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", [f"text {number}" for number in range(10)])))
    (block,) = home.blocks.iterdir()
    leaves, salts = versions.leaves_path(version), home.salts_path
    storage, manifest = versions.storage_path(version), versions.manifest_path(version)
    rows = pl.read_parquet(block)

    def rewritten(change):
        """The block with other rows, and a map that agrees with it: only the roots can tell."""
        stored = blocks.write_block(home.blocks, change, keys.k_file)
        document = json.loads(storage.read_bytes())
        document["blocks"] = [{"file": stored.file, "rows": stored.rows, "digest": stored.digest}]
        return jcs(document)

    def flip(path, at):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        return bytes(data)

    changed = rows.with_columns(
        text=pl.when(pl.col("index") == 4).then(pl.lit("text X")).otherwise("text")
    )
    owner = rows.with_columns(
        owner=pl.when(pl.col("index") == 3).then(pl.lit("eve")).otherwise("owner")
    )
    licence = rows.with_columns(
        licence=pl.when(pl.col("index") == 5).then(pl.lit("MIT")).otherwise("licence")
    )
    position = rows.with_columns(
        position=pl.when(pl.col("index") == 6).then(99).otherwise("position")
    )
    moved = rows.with_columns(index=(pl.col("index") + 1).cast(pl.UInt64))
    cases = [
        (block, flip(block, 40), "the file was changed"),
        (block, block.read_bytes()[:-4], "the file was changed"),
        (block, None, "the file is missing"),
        (leaves, flip(leaves, 32 * 6 + 5), "storage leaves: index 6 was changed"),
        (leaves, leaves.read_bytes()[:-32], "storage leaves: expected 10, got 9"),
        (salts, flip(salts, 50), "the salt store 'salts' does not open"),
        (salts, None, "index 0: the salt is missing"),
        (storage, rewritten(changed), "index 4: the text was changed"),
        (storage, rewritten(owner), "index 3: owner, source, position or record id was changed"),
        (storage, rewritten(licence), "index 5: the salt, owner or licence was changed"),
        (storage, rewritten(position), "index 6: owner, source, position or record id was changed"),
        (storage, rewritten(rows[:9]), "index 9: the row is missing"),
        (storage, rewritten(moved), "holds a row of index 10"),
        (storage, rewritten(rows.drop("date")), "other columns or rows"),
        (storage, storage.read_bytes()[:-9], "storage map"),
        (manifest, flip(manifest, 60), "expected the SHA-256 in its name"),
    ]
    for path, data, said in cases:
        good = path.read_bytes()
        path.write_bytes(data) if data is not None else path.unlink()
        assert any(said in finding for finding in findings(versions, version)), (
            said,
            findings(versions, version),
        )
        path.write_bytes(good)
        assert versions.verify(version).num_records == 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sparse_root": "0" * 64}, "the sparse root does not follow from the fingerprints"),
        ({"record_root": "0" * 64}, "the record root does not follow from the blocks"),
        ({"owners": {"ada": 2, "eve": 1}}, "the owners' counts do not follow from the rows"),
        ({"live": 2}, "expected 2 live of 3 leaves, got 3 of 3"),
    ],
)
def test_a_manifest_that_claims_something_else_is_found(home, keys, change, said):
    """A forged version whose id fits its manifest: every claim in it is recomputed."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", "abc")))
    document = json.loads(versions.manifest_path(version).read_bytes()) | change
    forged = hashlib.sha256(jcs(document)).hexdigest()
    versions.manifest_path(forged).parent.mkdir()
    versions.manifest_path(forged).write_bytes(jcs(document))
    storage = json.loads(versions.storage_path(version).read_bytes()) | {"version": forged}
    versions.storage_path(forged).write_bytes(jcs(storage))
    versions.leaves_path(forged).write_bytes(versions.leaves_path(version).read_bytes())
    assert findings(versions, forged) == (said,)


def test_verify_finds_one_flipped_bit_in_one_salt(home, keys, monkeypatch):
    """A salt that opens but is another one: the index is named and nothing else."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", [f"text {number}" for number in range(10)])))
    record_of_7 = versions.read(version)["record_id"][7]
    real = SaltStore.get

    def flipped(self, identity):
        salt = real(self, identity)
        return bytes([salt[0] ^ 0x80]) + salt[1:] if identity == record_of_7 else salt

    monkeypatch.setattr(SaltStore, "get", flipped)
    assert findings(versions, version) == ("index 7: the salt, owner or licence was changed",)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A home with one version of 30 records, for damage that is undone each time."""
    home = Home(tmp_path_factory.mktemp("small") / "home").create()
    versions = Versions(home, KEYS)
    version = versions.publish(frame(texts("ada", [f"text {number}" for number in range(30)])))
    return versions, version


@given(st.data())
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
def test_any_flipped_bit_of_any_stored_file_is_found(small, data):
    """Block, leaves, map, manifest, salts: verify() raises for each bit of each."""
    versions, version = small
    paths = [
        next(versions.home.blocks.iterdir()),
        versions.leaves_path(version),
        versions.storage_path(version),
        versions.manifest_path(version),
        versions.home.salts_path,
    ]
    path = data.draw(st.sampled_from(paths))
    good = path.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    try:
        path.write_bytes(bad)
        with pytest.raises(CorruptionError):
            versions.verify(version)
    finally:
        path.write_bytes(good)
    assert versions.verify(version).num_records == 30


def test_reading_a_damaged_block_is_refused(home, keys):
    """read() checks digests on the way: no changed text reaches a trainer."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", "abc")))
    (block,) = home.blocks.iterdir()
    data = bytearray(block.read_bytes())
    data[30] ^= 1
    block.write_bytes(data)
    with pytest.raises(CorruptionError, match="the file was changed"):
        versions.read(version)
    leaves = versions.leaves_path(version)
    leaves.write_bytes(bytes(96))
    with pytest.raises(CorruptionError, match="record root"):
        versions.leaves(version)


def test_a_publish_that_does_not_verify_leaves_head(home, keys, monkeypatch):
    """Damage between writing and checking: HEAD stays at the last good version."""
    versions = Versions(home, keys)
    good = versions.publish(frame(texts("ada", "abc")))

    def damage(step):
        if step == "manifest":
            newest = max(home.blocks.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            newest.write_bytes(b"PAR1")

    with pytest.raises(CorruptionError):
        versions.publish(frame(texts("bob", "abc")), hook=damage)
    assert versions.head() == good


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "newer dataworth"),
        ({"extra": 1}, "unknown or missing fields extra"),
        ({"blocks": 3}, "expected a list"),
        ({"blocks": [{"first": 0}]}, "unknown or missing fields"),
    ],
)
def test_unknown_formats_and_fields_are_refused(home, keys, change, said):
    """Manifest and storage map: an unknown field is an error, not a guess."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", "abc")))
    data = jcs(json.loads(versions.manifest_path(version).read_bytes()) | change)
    with pytest.raises(VersionError, match=said):
        parse_manifest(data, hashlib.sha256(data).hexdigest())
    data = jcs(json.loads(versions.storage_path(version).read_bytes()) | change)
    with pytest.raises(VersionError, match=said):
        parse_storage(data, version)


@pytest.mark.parametrize(
    "change",
    [
        {"size": "3"},
        {"live": -1},
        {"live": True},
        {"owners": ["ada"]},
        {"owners": {"ada": "3"}},
        {"parent": "../x"},
        {"record_root": 3},
        {"sparse_root": "A" * 64},
        {"blocks": [{"first": 0, "count": "3", "row_root": "0" * 64}]},
        {"blocks": [{"first": 0, "count": 3, "row_root": "x"}]},
    ],
)
def test_wrong_kinds_of_values_are_refused(home, keys, change):
    """A manifest whose id fits but whose fields are of other kinds is an error of ours, not a crash."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", "abc")))
    data = jcs(json.loads(versions.manifest_path(version).read_bytes()) | change)
    with pytest.raises(VersionError, match="wrong kind of value"):
        parse_manifest(data, hashlib.sha256(data).hexdigest())


def test_a_storage_map_cannot_point_out_of_the_home(home, keys):
    """A file name that is not the digest is refused: no ../../etc/passwd."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", "abc")))
    path = versions.storage_path(version)
    for name, digest in (("../x.parquet", "a" * 64), ("../x.parquet", "../x"), ("a.parquet", "a")):
        block = {"file": name, "rows": 3, "digest": digest}
        data = jcs({"format": 1, "version": version, "blocks": [block], "erased": []})
        path.write_bytes(data)
        with pytest.raises(VersionError, match="not named by its digest"):
            versions.read(version)


def test_stored_digests_of_texts_are_keyed_and_texts_stand_in_blocks_only(home, keys):
    """Neither the text nor its plain SHA-256 stands in manifest, map, leaves, salts or a file name."""
    versions = Versions(home, keys)
    version = versions.publish(frame(texts("ada", ["a very particular text", "b"])))
    plain = hashlib.sha256(b"a very particular text").digest()
    (block,) = home.blocks.iterdir()
    assert hashlib.sha256(block.read_bytes()).hexdigest() not in block.name
    for path in home.path.rglob("*"):
        if path.is_file() and path != block:
            data = path.read_bytes()
            assert b"particular" not in data
            assert plain not in data
            assert plain.hex().encode() not in data
    assert version
