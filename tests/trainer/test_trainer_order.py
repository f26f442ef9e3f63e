"""Claims about weights: how often a record stands, in closed form; and that they change nothing where they are one."""

import dataclasses
import hashlib
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import make_run, record_id, write_corpus

from trainer.checkpoint import newest, verify
from trainer.data import BatchPlan, TokenStore
from trainer.errors import DataError
from trainer.inputs import batch_plan
from trainer.loop import fit
from trainer.order import MAX_MICRO, MICRO, Order
from trainer.selection import RecordWeights, read_selection, sorted_ids, write_selection
from trainer.spec import BatchSpec, MixtureSpec, Selection, save_run

MICROS = st.one_of(st.sampled_from([0, 1, MICRO, 3 * MICRO]), st.integers(0, 4 * MICRO))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """120 documents of three owners, two of them tombstones."""
    folder = tmp_path_factory.mktemp("order")
    return TokenStore.open(folder, write_corpus(folder))


def _weights(micro, default=MICRO):
    ids = sorted(micro)
    return RecordWeights(
        sorted_ids(frozenset(ids)), np.array([micro[i] for i in ids], np.int64), default
    )


@settings(max_examples=60, deadline=None)
@given(
    micro=st.lists(MICROS, min_size=1, max_size=12).filter(any),
    seed=st.integers(0, 2**53 - 1),
    epochs=st.integers(1, 40),
)
def test_a_record_stands_its_weight_times_the_epochs(micro, seed, epochs):
    """Law: over any E epochs from the first, E w times, less than one more or less; whole weights exactly, 0 never."""
    micro_N = np.array(micro, np.int64)
    order = Order(np.arange(len(micro)), np.full(len(micro), 7), micro_N, len(micro), seed)
    seen = Counter()
    for number in range(epochs):
        epoch = Counter(order.epoch(number).order_R.tolist())
        for index, weight in enumerate(micro):
            assert weight // MICRO <= epoch[index] <= -(-weight // MICRO)
        seen += epoch
        for index, weight in enumerate(micro):
            assert abs(seen[index] * MICRO - (number + 1) * weight) < MICRO


def test_over_seeds_a_record_stands_its_weight_times_on_average():
    """Law: with weight 0.3, the share of 3,000 (seed, record) pairs that stand in epoch 5 is 0.3 within 4 SE."""
    micro_N = np.full(100, 300_000, np.int64)
    times = [
        Order(np.arange(100), np.ones(100, np.int64), micro_N, 100, seed).times_N(5).sum()
        for seed in range(30)
    ]
    assert abs(sum(times) / 3000 - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 3000)


@settings(max_examples=40, deadline=None)
@given(
    micro=st.lists(MICROS, min_size=1, max_size=8).filter(any),
    lengths=st.data(),
    seed=st.integers(0, 999),
    position=st.integers(0, 3000),
)
def test_every_position_is_found_without_walking(micro, lengths, seed, position):
    """Law: the epoch of a position is that of the stream laid out token by token, also over empty epochs."""
    size = len(micro)
    length_N = np.array(
        lengths.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)), np.int64
    )
    micro_N = np.maximum(np.array(micro, np.int64), MICRO // 20)  # else the walk is too long
    order = Order(np.arange(size), length_N, micro_N, size, seed)
    walked, first = 0, 0
    while True:
        tokens = int((length_N * order.times_N(walked)).sum())
        if position < first + tokens:
            break
        first, walked = first + tokens, walked + 1
    epoch = Order(np.arange(size), length_N, micro_N, size, seed).at(position)
    assert (epoch.number, epoch.first) == (walked, first)
    assert epoch.starts_R1[-1] == tokens
    assert abs(order.mean_tokens - float((length_N * micro_N).sum()) / MICRO) < 1e-6


def test_weights_of_one_are_no_weights(store):
    """Invariance: once-per-epoch weights give the batches of a plan without weights, the pinned order included."""
    spec = BatchSpec(rows=4, length=50)
    plain = BatchPlan(store, 7, spec)
    ones = BatchPlan(store, 7, spec, weights=_weights({record_id(5): MICRO}))
    for step in (0, 3, 40):
        assert np.array_equal(plain.batch(step).tokens_BT, ones.batch(step).tokens_BT)
        assert plain.batch(step).segments == ones.batch(step).segments


@settings(max_examples=15, deadline=None)
@given(data=st.data(), seed=st.integers(0, 99), default=st.sampled_from([0, MICRO]))
def test_batches_hold_what_the_weights_say(store, data, seed, default):
    """Law: in the tokens of the first epochs, a record of weight 0 never stands, others E w times within one."""
    live = [int(i) for i in store.live_N]
    named = data.draw(st.dictionaries(st.sampled_from(live), MICROS, max_size=40))
    weight = {i: named.get(i, default) for i in live}
    weights = _weights({record_id(i): w for i, w in named.items()}, default)
    if not any(weight.values()):
        with pytest.raises(DataError, match="no record is left"):
            BatchPlan(store, seed, weights=weights)
        return
    plan = BatchPlan(store, seed, BatchSpec(rows=4, length=16), weights=weights)
    epochs, begun = 3, Counter()
    last = plan.order.epoch(epochs).first
    for step in range(-(-last // 64)):
        for row, segments in enumerate(plan.batch(step).segments):
            for segment in segments:
                place = step * 64 + row * 16 + segment.column
                if segment.first == 0 and place < last:
                    begun[segment.index] += 1
    for index in live:
        assert abs(begun[index] * MICRO - epochs * weight[index]) < MICRO


def test_weights_and_repeats_multiply(store):
    """A record of weight 1.5 whose owner stands twice stands three times; leaving it out wins over both."""
    weights = _weights({record_id(i): 1_500_000 for i in range(120)})
    plan = BatchPlan(
        store, 3, mixture=MixtureSpec(repeats={"a": 2, "b": 0}), excluded={record_id(0)}, weights=weights
    )  # fmt: skip
    seen = Counter(plan.order.epoch(0).order_R.tolist())
    for i in store.live_N.tolist():
        owner = store.owner_of(i)
        assert seen[i] in ({0} if owner == "b" or i == 0 else {3} if owner == "a" else {1, 2})
    with pytest.raises(DataError, match="weight times repeats"):
        BatchPlan(store, 3, mixture=MixtureSpec(repeats={"a": 10**4}), weights=weights)


def test_leaving_a_record_out_moves_no_phase(store):
    """The gold model's records stand as often as in the original run: phases belong to records, not to places."""
    weights = _weights({record_id(i): 300_000 + 7 * i for i in range(120)})
    whole = BatchPlan(store, 3, weights=weights).order
    gold = BatchPlan(store, 3, excluded={record_id(i) for i in range(0, 120, 3)}, weights=weights)
    for number in range(4):
        times = dict(zip(whole.index_N.tolist(), whole.times_N(number).tolist(), strict=True))
        pairs = zip(gold.order.index_N.tolist(), gold.order.times_N(number).tolist(), strict=True)
        assert all(times[index] == count for index, count in pairs)


def test_large_sums_are_exact():
    """Weights times lengths beyond 63 bits are added exactly: 10^13 tokens at the largest weight."""
    length_N = np.full(1000, 10**10, np.int64)
    order = Order(np.arange(1000), length_N, np.full(1000, MAX_MICRO - 1), 1000, 0)
    assert order._micro_tokens == 10**13 * (MAX_MICRO - 1)


def test_a_file_of_weights_is_read_as_it_was_written(tmp_path):
    """Round trip, golden digest, and the same digest whatever the order of the mapping."""
    path = tmp_path / "w.jsonl"
    micro = {record_id(2): 0, record_id(1): 2_500_000, bytes(31) + b"\1": 7, b"\1" + bytes(31): 9}
    digest = write_selection(path, micro, 5)
    assert write_selection(path, dict(reversed(micro.items())), 5) == digest
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert digest == "867cecf98e6db0da329e58466b678e772a0b785eabbe9dfcdb94c19fdb67d362"
    weights = read_selection(path, digest)
    names = [*micro, record_id(3), bytes(32)]
    ids_N32 = np.frombuffer(b"".join(names), np.uint8).reshape(-1, 32)
    assert weights.of(ids_N32).tolist() == [*micro.values(), 5, 5]
    empty = read_selection(path, write_selection(path, {}, 3))
    assert empty.of(ids_N32).tolist() == [3] * 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.replace(b'"format":1', b'"format":2'), "expected format 1"),
        (
            lambda data: data.replace(b'"default":5', b'"default":-5'),
            "default: expected an integer",
        ),
        (lambda data: data.replace(b",7]", b",7.5]"), r'expected \["record id",millionths\]'),
        (lambda data: data.replace(b",7]", b", 7]"), r'expected \["record id",millionths\]'),
        (lambda data: data.replace(b",7]", b",07]"), r'expected \["record id",millionths\]'),
        (lambda data: data.replace(b",7]", b",9999999999]"), "line 2: expected an integer weight"),
        (lambda data: data + data.splitlines(keepends=True)[1], "ascending"),
        (lambda data: data[:-1], "newline"),
        (lambda data: b"{" + data, "line 1"),
    ],
)
def test_a_malformed_file_of_weights_is_refused(tmp_path, change, message):
    """Floats, blanks, doubles, unknown formats and weights out of range: DataError that names the line."""
    path = tmp_path / "w.jsonl"
    write_selection(path, {record_id(1): 7, record_id(2): 8}, 5)
    # The line of weight 7 comes first or second, by id; the messages above count on it being line 2.
    write_selection(
        path, {min(record_id(1), record_id(2)): 7, max(record_id(1), record_id(2)): 8}, 5
    )
    data = change(path.read_bytes())
    path.write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_selection(path, hashlib.sha256(data).hexdigest())


def test_the_writer_refuses_what_no_reader_takes(tmp_path):
    """Short ids, floats, booleans and negative weights never reach a file."""
    for bad in ({b"short": 1}, {record_id(0): -1}, {record_id(0): 0.5}, {record_id(0): True}):
        with pytest.raises(DataError, match="selection"):
            write_selection(tmp_path / "w.jsonl", bad)
    assert not (tmp_path / "w.jsonl").exists()


def test_a_run_trains_by_its_weights(tmp_path):
    """Records of weight 0 are in no window, the run resumes bitwise, and an altered file is refused before a step."""
    import shutil

    from trainer.metrics import read_lines

    write_corpus(tmp_path / "tokens")
    path = tmp_path / "w.jsonl"
    micro = {record_id(i): 0 if i % 2 else 1_700_000 for i in range(120)}
    digest = write_selection(path, micro)
    run = make_run(
        tmp_path,
        "weighted",
        steps=8,
        every=4,
        selection=Selection(file="../w.jsonl", digest=digest),
    )
    directory = tmp_path / "weighted"
    save_run(run, directory)
    plan = batch_plan(run, directory)
    assert all(index % 2 == 0 for step in range(30) for index, _ in plan.records(step))
    assert fit(run, directory) == 0
    again = tmp_path / "again"
    shutil.copytree(directory, again)
    shutil.rmtree(again / "step-8")
    assert fit(run, again) == 0
    assert verify(newest(again)).root == verify(newest(directory)).root
    plain = dataclasses.replace(run, run="plain", selection=None)
    save_run(plain, tmp_path / "plain")
    assert fit(plain, tmp_path / "plain") == 0
    records = [
        read_lines(d / "windows.jsonl")[0]["records_root"] for d in (directory, tmp_path / "plain")
    ]
    assert records[0] != records[1]
    path.write_bytes(path.read_bytes().replace(b"1700000", b"1800000", 1))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"selection\.file: expected digest"):
        fit(run, empty)
    path.unlink()
    with pytest.raises(DataError, match=r"selection\.file: cannot be read"):
        fit(run, empty)
    assert list(empty.iterdir()) == []
