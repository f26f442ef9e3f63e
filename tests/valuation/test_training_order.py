"""The order of a training depends on the contents of its records: not on who else is there, on places, or on names."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.canonical import jcs
from trainer.data import TokenStore, write_tokens
from trainer.spec import (
    BatchSpec,
    Excluded,
    ModelSpec,
    OptimSpec,
    RunConfig,
    RunSpec,
    no_versions,
    save_run,
    with_extra,
)
from valuation import proxy, subsets
from valuation.bank import ORDER, load_utilities
from valuation.errors import ProxyError
from valuation.proxy import retrain
from valuation.retraining import contents, shared_order
from valuation.subsets import Setting, retrain_subsets

VOCAB = 31
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=12)
OPTIM, BATCH = OptimSpec(lr=0.02, warmup_steps=2), BatchSpec(rows=4, length=16)
DIGESTS = st.lists(st.binary(min_size=32, max_size=32), max_size=12)


def identity(number):
    return hashlib.sha256(f"id {number}".encode()).digest()


def texts(count, seed=1):
    """Token lists that count in steps."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 5, count)
    return [
        [*((rng.integers(VOCAB - 1) + step * np.arange(rng.integers(6, 24))) % (VOCAB - 1)).tolist(), VOCAB - 1]
        for step in steps
    ]  # fmt: skip


def stored(folder, rows):
    """A token folder of (owner, tokens), leaves in that order."""
    write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=[(i, identity(i), owner, tokens) for i, (owner, tokens) in enumerate(rows)],
    )  # fmt: skip
    return TokenStore.open(folder)


def ordered(digests, seed=7, epoch=0):
    """The digests in the order of training."""
    place = shared_order(digests, np.arange(len(digests)), seed, epoch)
    return [digests[i] for i in place]


def test_the_order_can_be_recomputed_from_seed_and_tokens_alone(tmp_path):
    """A plain re-implementation from what is committed, written from the formula, and a fixed vector."""
    store = stored(tmp_path, [("a", tokens) for tokens in texts(40)])
    key = hashlib.sha256(b"dataworth-order-2|11|3").digest()

    def place(index):
        body = b"".join(int(token).to_bytes(4, "little") for token in store.tokens(index))
        return hashlib.blake2b(hashlib.sha256(body).digest(), key=key, digest_size=16).digest()

    assert shared_order(contents(store), store.live_N, 11, 3).tolist() == sorted(range(40), key=place)  # fmt: skip
    digests = [bytes([i]) * 32 for i in range(8)]
    assert [d[0] for d in ordered(digests, 1789, 0)] == GOLDEN


GOLDEN = [5, 7, 1, 3, 0, 2, 6, 4]


@settings(max_examples=200, deadline=None)
@given(DIGESTS, DIGESTS, st.randoms(use_true_random=False), st.integers(0, 2**31), st.integers(0, 3))  # fmt: skip
def test_whoever_comes_goes_or_is_copied_leaves_the_others_in_their_order(mine, others, random, seed, epoch):  # fmt: skip
    """Insert, remove, copy and shuffle: the records of before stand in the relative order of before."""
    alone = ordered(mine, seed, epoch)
    together = [*mine, *others, *random.sample(mine, len(mine) // 2)]
    random.shuffle(together)
    found = ordered(together, seed, epoch)
    kept = [digest for digest in dict.fromkeys(found) if digest in set(mine)]
    assert kept == list(dict.fromkeys(alone))
    assert ordered(random.sample(mine, len(mine)), seed, epoch) == alone


def test_every_record_stands_everywhere_over_seeds_and_passes():
    """The mean place of each record over 400 keys is the middle within 5 standard errors; keys differ by seed and by pass."""
    digests = [identity(i) for i in range(20)]
    rank = {digest: [] for digest in digests}
    for seed in range(200):
        for epoch in (0, 1):
            for place, digest in enumerate(ordered(digests, seed, epoch)):
                rank[digest].append(place)
    error = np.sqrt((20**2 - 1) / 12 / 400)
    assert max(abs(np.mean(places) - 9.5) for places in rank.values()) < 5 * error
    assert ordered(digests, 1, 0) != ordered(digests, 1, 1) != ordered(digests, 2, 1)


def prepared(directory, rows, copied=()):
    """A run of two owners on these rows; those at `copied` are left out."""
    store = stored(directory / "tokens", rows)
    target = stored(directory / "target", [("t", tokens) for tokens in texts(8, seed=9)])
    (directory / "run").mkdir()
    groups = [{"id": owner, "owners": [owner]} for owner in ("m", "n")]
    (directory / "run/groups.json").write_bytes(jcs({"groups": groups}))
    excluded = None
    if copied:
        listed = "".join(identity(i).hex() + "\n" for i in copied).encode()
        (directory / "run/copies.txt").write_bytes(listed)
        excluded = Excluded(file="copies.txt", digest=hashlib.sha256(listed).hexdigest())
    extra = {"groups": "groups.json", "target": "../target", "target_digest": target.digest, "epochs": 2, "order": ORDER}  # fmt: skip
    run = RunSpec(
        run="order", kind="proxy", entry="valuation.proxy:retrain", seed=5, tokens="../tokens", tokens_digest=store.digest, steps=1000,
        versions=no_versions(), excluded=excluded, config=RunConfig(model=MODEL, optim=OPTIM, batch=BATCH, extra=extra),
    )  # fmt: skip
    save_run(run, directory / "run")
    return run, directory / "run"


def trained(directory, rows, copied=()):
    """Losses of all coalitions."""
    run, folder = prepared(directory, rows, copied)
    assert retrain(run, folder) == 0
    return load_utilities(folder).nll_CQ


def by_leaf(digest_N, live_K, seed, epoch):
    """The order of old: a word per leaf index."""
    del digest_N
    words = np.random.Philox(key=seed + epoch).random_raw(len(live_K))
    return live_K[np.argsort(words, kind="stable")]


def test_copies_that_nobody_trains_on_change_no_bit_of_any_coalition(tmp_path, monkeypatch):
    """A copier whose name sorts first, and deliveries the other way round: every loss is the same; by leaf index the latter moved all."""
    mine = [(owner, tokens) for owner, part in (("m", texts(14)), ("n", texts(14, 2))) for tokens in part]  # fmt: skip
    copies = [("a", mine[i][1]) for i in (0, 5, 9, 20)]
    plain = trained(tmp_path / "plain", mine)
    assert plain.tobytes() == trained(tmp_path / "copied", [*copies, *mine], range(4)).tobytes()
    assert plain.tobytes() == trained(tmp_path / "reversed", mine[::-1]).tobytes()
    monkeypatch.setattr(proxy, "shared_order", by_leaf)
    before = trained(tmp_path / "old-plain", mine)
    after = trained(tmp_path / "old-reversed", mine[::-1])
    assert (before[1:] != after[1:]).any(), "a control: what this test looks for can be seen"


def test_a_bank_of_records_serves_every_delivery_of_the_same_records(tmp_path, monkeypatch):
    """Files are named by contents: after a delivery, a copy and a reshuffle nothing that was trained is trained again."""
    mine = texts(20)
    target = stored(tmp_path / "target", [("t", tokens) for tokens in texts(6, seed=9)])

    def setting(name, rows):
        return Setting(
            train=tmp_path / name, train_digest=stored(tmp_path / name, rows).digest, target=tmp_path / "target",
            target_digest=target.digest, model=MODEL, optim=OPTIM, batch=BATCH, epochs=2,
        )  # fmt: skip

    first = setting("first", [("m", tokens) for tokens in mine])
    later = setting("later", [("x", mine[3]), *(("y", t) for t in texts(5, 8)), *(("m", t) for t in mine[::-1])])  # fmt: skip
    half_N = np.arange(20) % 3 > 0
    moved_N = np.concatenate([np.zeros(6, bool), half_N[::-1]])
    one = retrain_subsets(first, half_N[None], 1, tmp_path)
    two = retrain_subsets(later, moved_N[None], 1, tmp_path)
    assert one.keys == two.keys
    assert len(list((tmp_path / "bank").iterdir())) == 1
    fresh = retrain_subsets(later, moved_N[None], 1, tmp_path / "fresh")
    assert one.nll_MQ.tobytes() == fresh.nll_MQ.tobytes(), "the name is right: the training is the same"  # fmt: skip
    masked = [Setting(**{f: getattr(s, f) for f in s.__slots__} | {"leave_out": "mask"}) for s in (first, later)]  # fmt: skip
    assert masked[0].key(half_N, 1) != masked[1].key(moved_N, 1), "a masked record keeps its place"
    monkeypatch.setattr(subsets, "shared_order", by_leaf)
    old, moved = (
        retrain_subsets(setting, member_N[None], 1, tmp_path / folder).nll_MQ
        for setting, member_N, folder in ((first, half_N, "old"), (later, moved_N, "old-moved"))
    )
    assert (old != moved).any(), "a control: by leaf index, records that are in no subset moved it"


def test_a_run_that_was_planned_in_another_order_is_refused(tmp_path):
    """Neither a plan from before orders had versions nor one of another version is trained: its bank would be another one."""
    run, folder = prepared(tmp_path, [("m", t) for t in texts(4)] + [("n", t) for t in texts(4, 2)])
    extra = dict(run.config.extra)
    del extra["order"]
    without = RunSpec(**{f: getattr(run, f) for f in run.__slots__} | {"config": RunConfig(model=MODEL, optim=OPTIM, batch=BATCH, extra=extra)})  # fmt: skip
    with pytest.raises(ProxyError, match="ordered by leaf index; plan it anew"):
        retrain(without, folder)
    with pytest.raises(ProxyError, match=r"expected 2 \(by content\), got 1"):
        retrain(with_extra(run, order=1), folder)
    assert not (folder / "result.json").exists()
