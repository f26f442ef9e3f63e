"""Corpus versions: identity, appending, tombstones, purging, verification."""

import hashlib
import re

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.storage import blocks
from pipelines.storage.errors import (
    StaleParentError,
    UnknownVersionError,
    VersionError,
)
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.purging import _holds
from pipelines.storage.records import SCHEMA
from pipelines.storage.salts import SaltStore
from pipelines.storage.versions import Versions
from provenance.canonical import canonical_bytes, fingerprint, jcs, keyed, record_id
from provenance.commitment import commit, leaf_data, tombstone_leaf
from provenance.hashing import leaf_hash
from provenance.merkle import root_of
from provenance.sparse import SparseTree

KEYS = CorpusKeys.demo()
GOLDEN = "dbba19fa977515fe7e8de8bfd2eaf6058030037eba58ddc1fe4e61de56d11c32"


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


@pytest.fixture
def versions(home, keys):
    """Versions whose blocks are cut at every 4,096 leaves, to see several of them."""
    return Versions(home, keys, block_bytes=1)


def test_the_manifest_is_the_interface_to_the_byte(home, keys):
    """Every field recomputed by hand from RFC 9162 leaves; the id is the SHA-256 of the file."""
    versions = Versions(home, keys)
    version = versions.publish(frame([*texts("bob", ["b1", "b2"]), *texts("ada", ["a1", "b1"])]))
    data = versions.manifest_path(version).read_bytes()
    assert hashlib.sha256(data).hexdigest() == version
    salts = SaltStore(home.salts_path, keys)
    ordered = [*texts("ada", ["a1", "b1"]), *texts("bob", ["b1", "b2"])]
    leaves = [
        leaf_hash(
            leaf_data(
                commit(salts.get(row[0]), row[5].encode()),
                keyed(keys.k_owner, row[2].encode()),
                1,
                row[6],
            )
        )
        for row in ordered
    ]
    root = root_of(leaves).hex()
    document = {
        "format": 1,
        "parent": "none",
        "size": 4,
        "live": 4,
        "record_root": root,
        "sparse_root": SparseTree({row[1] for row in ordered}).root.hex(),
        "canonicalisation": 1,
        "owners": {"ada": 2, "bob": 2},
        "blocks": [{"first": 0, "count": 4, "row_root": root}],
    }
    assert data == jcs(document)
    assert versions.leaves(version) == leaves
    assert versions.head() == version
    assert versions.ids() == [version]
    rows = versions.read(version)
    assert rows["index"].to_list() == [0, 1, 2, 3]
    assert rows.drop("index").rows() == ordered
    assert versions.scan(version).collect().equals(rows)
    assert versions.read(version, ["text", "index"]).columns == ["text", "index"]


def test_the_golden_version_of_three_records(home, keys):
    """A root that must never change: a change here breaks every receipt ever given out."""
    version = Versions(home, keys).publish(frame(texts("ada", ["one", "two", "tre"])))
    assert version == GOLDEN


def test_same_input_same_version_in_any_order_and_any_home(tmp_path, keys):
    """Order of rows, home and repetition do not matter; other texts, owners or licences do."""
    rows = [*texts("ada", "abc"), *texts("bob", "abd")]
    homes = [Home(tmp_path / str(number)).create() for number in range(3)]
    first = Versions(homes[0], keys).publish(frame(rows))
    assert Versions(homes[1], keys).publish(frame(rows[::-1])) == first
    assert Versions(homes[0], keys).publish(frame(rows)) == first
    assert Versions(homes[0], keys).stage(frame(rows)) == first
    assert (
        Versions(homes[2], keys).publish(frame([*rows[:-1], record("bob", "e", position=2)]))
        != first
    )
    other = [*rows[:-1], record("bob", "d", position=2, licence="CC-BY-4.0")]
    assert Versions(homes[2], keys).stage(frame(other)) != first


def test_random_keys_are_stable_in_a_home_and_differ_between_homes(tmp_path):
    """Salts are kept, so publishing again finds the same version; another corpus has other roots."""
    found = []
    for number in range(2):
        home, keys = Home(tmp_path / str(number)).create(), CorpusKeys.random()
        versions = Versions(home, keys)
        first = versions.stage(frame(texts("ada", "abc")))
        versions.manifest_path(first).unlink()  # as if the process had died before the last file
        assert versions.stage(frame(texts("ada", "abc"))) == first
        found.append(first)
    assert found[0] != found[1]


def test_appending_keeps_indices_and_sorts_only_the_new(home, keys):
    """Old rows stay where they are; new ones follow in (owner, source, position) order."""
    versions = Versions(home, keys)
    first = versions.publish(frame(texts("mia", ["m1", "m2"])))
    more = [
        *texts("mia", ["m1", "m2"]),
        record("zoe", "z"),
        record("ada", "a"),
        record("mia", "m3", "t"),
    ]
    second = versions.publish(frame(more))
    assert versions.read(second)["text"].to_list() == ["m1", "m2", "a", "m3", "z"]
    assert versions.leaves(second)[:2] == versions.leaves(first)
    assert versions.manifest(second).parent == first
    assert versions.manifest(second).owners == {"ada": 1, "mia": 3, "zoe": 1}
    assert versions.verify(first).num_records == 2
    assert versions.verify(second).num_records == 5


def test_nothing_new_is_no_new_version(home, keys):
    """The same records, a subset, or the same contents under other places: the parent itself."""
    versions = Versions(home, keys)
    head = versions.publish(frame(texts("ada", "abc")))
    moved = texts("ada", "xabc")[1:]  # a paragraph was put in front: every position moved by one
    for rows in (texts("ada", "abc"), texts("ada", "a"), moved, []):
        assert versions.publish(frame(rows)) == head
    assert versions.ids() == [head]
    added = versions.publish(frame(texts("ada", "xabc")))
    assert versions.read(added)["text"].to_list() == ["a", "b", "c", "x"]


def test_no_records_is_an_error_that_says_where_they_are(home, keys):
    """An empty first version is not published; a frame of other columns neither."""
    versions = Versions(home, keys)
    with pytest.raises(VersionError, match="quarantine or held out"):
        versions.publish(frame([]))
    with pytest.raises(VersionError, match="expected the columns record_id"):
        versions.publish(frame([]).drop("text"))
    assert versions.head() is None


def test_a_full_block_is_never_rewritten_by_an_append(versions):
    """Blocks close at 4,096 leaves here; appending rewrites the open one and adds more."""
    first = versions.publish(frame(texts("ada", [f"a{number}" for number in range(5000)])))
    stored = versions.storage(first).blocks
    assert [(block.first, block.count) for block in versions.manifest(first).blocks] == [
        (0, 4096),
        (4096, 904),
    ]
    second = versions.publish(frame(texts("bob", [f"b{number}" for number in range(8000)])))
    manifest = versions.manifest(second)
    assert [(block.first, block.count) for block in manifest.blocks] == [
        (0, 4096), (4096, 4096), (8192, 4096), (12288, 712),
    ]  # fmt: skip
    assert versions.storage(second).blocks[0] == stored[0]
    assert stored[1] not in versions.storage(second).blocks
    assert manifest.blocks[0] == versions.manifest(first).blocks[0]
    assert versions.verify(first).num_blocks == 2
    assert versions.verify(second).num_records == 13000
    assert versions.read(second)["index"].to_list() == list(range(13000))


@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 30), st.integers(0, 40))
@settings(deadline=None)
def test_cuts_do_not_depend_on_what_follows(sizes, block_bytes, split):
    """Cutting a prefix and going on from its last full block is cutting the whole."""
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(blocks, "SHARD_LEAVES", 4)
        whole = blocks.block_counts(0, sizes, block_bytes)
        assert sum(whole) == len(sizes)
        for first, count in zip(
            [sum(whole[:number]) for number in range(len(whole))], whole, strict=True
        ):
            held = sum(sizes[first : first + count])
            full = blocks.is_full(first, count, held, block_bytes)
            assert full or first + count == len(sizes)
            assert not full or (first + count) % 4 == 0
        prefix = blocks.block_counts(0, sizes[:split], block_bytes)
        if len(prefix) > 1:
            assert whole[: len(prefix) - 1] == prefix[:-1]


def test_tombstones_keep_indices_and_touch_only_their_block(versions):
    """Two records of the first block go: one file changes, their leaves are tombstones, roots follow."""
    first = versions.publish(frame(texts("ada", [f"a{number}" for number in range(5000)])))
    rows = versions.read(first)
    gone = rows.filter(pl.col("index").is_in([7, 4095]))["record_id"].to_list()
    second = versions.tombstone(first, gone)
    before, after = versions.manifest(first), versions.manifest(second)
    assert (after.size, after.live, after.num_tombstones) == (5000, 4998, 2)
    assert after.parent == first
    assert after.owners == {"ada": 4998}
    assert after.blocks[1] == before.blocks[1]
    assert after.blocks[0].row_root != before.blocks[0].row_root
    assert after.sparse_root != before.sparse_root
    assert versions.storage(second).blocks[1] == versions.storage(first).blocks[1]
    kept = versions.read(second)
    assert kept.equals(rows.filter(~pl.col("index").is_in([7, 4095])))
    old, new = versions.leaves(first), versions.leaves(second)
    assert [index for index in range(5000) if old[index] != new[index]] == [7, 4095]
    assert new[7] == leaf_hash(tombstone_leaf(7))
    assert versions.verify(second).num_tombstones == 2
    assert versions.head() == first
    versions.move_head(second)
    third = versions.publish(frame(texts("bob", ["new"])))
    assert versions.read(third)["index"].to_list()[-1] == 5000
    assert versions.verify(third).num_tombstones == 2


def test_a_tombstone_at_the_end_of_the_open_block_keeps_its_place(home, keys):
    """The last record goes, then another is appended: it takes the next index, not the freed one."""
    versions = Versions(home, keys)
    first = versions.publish(frame(texts("ada", "abc")))
    last = versions.read(first)["record_id"][-1]
    second = versions.tombstone(first, [last])
    versions.move_head(second)
    third = versions.publish(frame([record("ada", "d", "t")]))
    assert versions.read(third).select("index", "text").rows() == [(0, "a"), (1, "b"), (3, "d")]
    assert versions.manifest(third).size == 4
    versions.verify(third)


def test_what_cannot_be_tombstoned_changes_nothing(home, keys):
    """Unknown ids, no ids, all ids, the same id twice in a lineage."""
    versions = Versions(home, keys)
    head = versions.publish(frame(texts("ada", "ab")))
    ids = versions.read(head)["record_id"].to_list()
    for wrong, said in (
        ([bytes(32)], "1 of 1"),
        ([], "0 of 0"),
        (ids, "at least one"),
        ([ids[0], bytes(32)], "1 of 2"),
    ):
        with pytest.raises(VersionError, match=said):
            versions.tombstone(head, wrong)
    child = versions.tombstone(head, [ids[0], ids[0]])
    with pytest.raises(VersionError, match="not live"):
        versions.tombstone(child, [ids[0]])
    assert set(versions.ids()) == {head, child}


def test_a_purge_removes_the_text_from_every_file_and_keeps_every_identity(versions, home, keys):
    """Positive control first: the planted text is in the files. Then in none, and all versions verify."""
    marker = "The phone number of Zaphod B. is 424242."
    first = versions.publish(frame([*texts("ada", ["a", "b"]), record("ada", marker, "p")]))
    second = versions.publish(frame(texts("bob", [f"b{number}" for number in range(5000)])))
    doomed = versions.read(first).filter(pl.col("text") == marker)["record_id"].to_list()

    def holders():
        return [
            path.name
            for path in home.blocks.iterdir()
            if marker in pl.read_parquet(path, columns=["text"])["text"].to_list()
        ]

    assert len(holders()) == 2
    with pytest.raises(VersionError, match="live in HEAD"):
        versions.purge(doomed)
    third = versions.tombstone(second, doomed)
    versions.move_head(third)
    assert len(holders()) == 2
    orphan = home.blocks / f"{'0' * 64}.parquet"
    pl.DataFrame({"text": [marker]}).write_parquet(orphan)
    before = {version: versions.manifest(version) for version in versions.ids()}
    purged = versions.purge(doomed)
    assert holders() == []
    assert set(purged.versions) == {first, second}
    assert purged.num_files == 3
    SaltStore(home.salts_path, keys).shred(doomed)
    assert {version: versions.manifest(version) for version in versions.ids()} == before
    for version, erased, stones in ((first, 1, 0), (second, 1, 0), (third, 0, 1)):
        verified = versions.verify(version)
        assert (verified.num_erased, verified.num_tombstones) == (erased, stones)
    assert versions.purge(doomed) == type(purged)((), 0, 0)
    with pytest.raises(VersionError, match="build on a later version"):
        versions.stage(frame(texts("eve", "e")), second)
    assert versions.verify(versions.publish(frame(texts("eve", "e")))).num_tombstones == 1


def test_head_moves_only_from_the_parent(home, keys):
    """Two versions staged on one HEAD: the second is refused, and can go back only when it says from where."""
    versions = Versions(home, keys)
    base = versions.publish(frame(texts("ada", "a")))
    left = versions.stage(frame(texts("bob", "b")), base)
    right = versions.stage(frame(texts("cyd", "c")), base)
    versions.move_head(left)
    versions.move_head(left)
    with pytest.raises(StaleParentError, match="stage the records again"):
        versions.move_head(right)
    versions.move_head(base, expected=left)
    versions.move_head(right)
    assert versions.head() == right
    with pytest.raises(UnknownVersionError):
        versions.move_head("0" * 64)


def test_the_difference_of_two_versions(home, keys):
    """Added and removed records and their counts per owner, in both directions."""
    versions = Versions(home, keys)
    first = versions.publish(frame([*texts("ada", "ab"), *texts("bob", "c")]))
    ids = dict(versions.read(first).select("text", "record_id").iter_rows())
    second = versions.tombstone(first, [ids["a"], ids["c"]])
    third = versions.stage(frame([record("bob", "d", "t", 9), record("cyd", "e")]), second)
    diff = versions.diff(first, third)
    assert diff.added.select("owner", "source", "position").rows() == [
        ("bob", "t", 9),
        ("cyd", "s", 0),
    ]
    assert diff.removed["record_id"].to_list() == [ids["a"], ids["c"]]
    assert diff.per_owner == {"ada": (0, 1), "bob": (1, 1), "cyd": (1, 0)}
    assert versions.diff(third, first).per_owner == {"ada": (1, 0), "bob": (1, 1), "cyd": (0, 1)}
    assert versions.diff(first, first).per_owner == {}


def test_unknown_versions_are_named(home, keys):
    """Every reading method says which id it does not know."""
    versions = Versions(home, keys)
    for method in (
        versions.manifest,
        versions.storage,
        versions.read,
        versions.leaves,
        versions.verify,
        versions.scan,
    ):
        with pytest.raises(UnknownVersionError, match=re.escape("no corpus version abc")):
            method("abc")


def test_purge_takes_the_file_that_tombstoning_wrote(home, monkeypatch):
    """No block is compressed twice."""
    versions = Versions(home, KEYS)
    rows = frame(texts("ada", ["one", "two", "three"]))
    first = versions.stage(rows)
    versions.move_head(first)
    gone = [rows["record_id"][0]]
    versions.move_head(versions.tombstone(first, gone))
    written = []
    real = blocks.write_block
    monkeypatch.setattr(blocks, "write_block", lambda *a: written.append(1) or real(*a))
    versions.purge(gone)
    assert not written
    assert versions.storage(first).blocks == versions.storage(versions.head()).blocks
    versions.verify(first)


def test_a_missing_or_damaged_crown_costs_time_only(versions, home):
    """Tombstones and appends give the version that they give with the crown; copies of two owners are one content."""
    same = [record("bob", "a1", "copy")]
    first = versions.publish(frame([*texts("ada", [f"a{number}" for number in range(200)]), *same]))
    gone = versions.read(first)["record_id"].to_list()[:3]  # a copy of the second stays with bob
    crown = versions.crown_path(first)
    whole = crown.read_bytes()
    made = set()
    for data in (whole, None, b"", bytes(len(whole)), whole[::-1], whole[: len(whole) // 2]):
        crown.unlink(missing_ok=True)
        if data is not None:
            crown.write_bytes(data)
        child = versions.tombstone(first, gone)
        made.add((child, versions.crown_path(child).read_bytes()))
    ((child, _),) = made
    left = versions.read(child)["fingerprint"].to_list()
    assert record("bob", "a1")[1] in left
    assert versions.manifest(child).sparse_root == SparseTree(left).root.hex()
    versions.move_head(child)
    versions.verify(versions.publish(frame(texts("eve", ["new", "a1"]))))


def test_purge_takes_no_file_of_other_rows(home, monkeypatch):
    """A file with as many rows is taken only if every row is the right one: with and without digests of the raw texts."""
    versions = Versions(home, KEYS)
    rows = [list(row) for row in texts("ada", ["one", "two", "three"])]
    for without in (False, True):
        other = [[*row[:-1], None] if without else row for row in rows]
        records = frame([[*row[:3], f"s{without}", *row[4:]] for row in other])
        head = versions.stage(records)
        versions.move_head(head, expected=versions.head())
        ids = records["record_id"].to_list()
        versions.move_head(versions.tombstone(head, ids[:1]))
        changed = versions.storage(versions.head()).blocks[0]
        kept = blocks.read_block(home.blocks, changed)
        wrong = kept.with_columns(text=pl.lit("x")) if without else kept.with_columns(licence=pl.lit("x"))  # fmt: skip
        fake = blocks.write_block(home.blocks, wrong, KEYS.k_file)
        storage = versions.storage(head).blocks[0]
        assert _holds(versions, changed, storage, [0], is_checked=False)
        assert not _holds(versions, fake, storage, [0], is_checked=False)
        path = home.blocks / changed.file
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        assert not _holds(versions, changed, storage, [0], is_checked=False)
        (home.blocks / changed.file).write_bytes(path.read_bytes()[:-1] + b"1")
