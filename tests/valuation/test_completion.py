"""What a delivery leaves untrained is predicted record by record, at 0.3 of the calls, with an interval that holds."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from provenance.canonical import jcs
from trainer.data import write_tokens
from trainer.spec import BatchSpec, ModelSpec, OptimSpec, RunConfig, RunSpec, no_versions, save_run
from valuation import UtilityError, exact_shapley
from valuation.bank import ORDER, ProxyError, bank_file, load_utilities, read_bank, read_plan
from valuation.completion import SHARE, coalitions_after, complete
from valuation.proxy import retrain

VOCAB, RECORDS = 31, 4
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=16)
TOKENS_Q = np.array([10, 20])


def losses(num_players, seed, noise):
    """Losses [C, 2] that fall with the log of useful tokens; lots overlap in topics, each training has noise, the second record half the gain."""
    rng = np.random.default_rng(seed)
    topic_nk = rng.dirichlet(np.ones(3), num_players) * rng.uniform(5, 15, (num_players, 1))
    member_Cn = np.arange(1 << num_players)[:, None] >> np.arange(num_players) & 1
    gain_C = np.log1p(member_Cn @ topic_nk).sum(1) / 3 + noise * rng.normal(size=1 << num_players)
    return 9.0 * TOKENS_Q - gain_C[:, None] * TOKENS_Q * [1.0, 0.5]


@pytest.mark.parametrize("num_players", [5, 6, 8])
@pytest.mark.parametrize("new", [1, 2])
def test_values_of_a_completed_table_are_those_of_all_trainings_within_the_interval(
    num_players, new
):
    """Over 40 games at least 90 % of all values, at 0.3 of the calls; sums exact; and a shift of the truth by three widths is noticed."""
    inside = shifted = total = 0
    for seed in range(40):
        nll_CQ = losses(num_players, seed, noise=0.03)
        asked = coalitions_after(num_players, num_players - new, np.random.default_rng(seed))
        assert len(asked) - (1 << num_players - new) <= SHARE * (1 << num_players)
        made = complete({m: nll_CQ[m] for m in asked}, num_players, num_players - new, TOKENS_Q)
        assert made.predicted_C.sum() == (1 << num_players) - len(asked)
        np.testing.assert_array_equal(made.nll_CQ[~made.predicted_C], nll_CQ[~made.predicted_C])
        truth_n, found_n = (-exact_shapley(x.sum(1) / 30, num_players) for x in (nll_CQ, made.nll_CQ))  # fmt: skip
        assert found_n.sum() == pytest.approx((nll_CQ[0] - nll_CQ[-1]).sum() / 30, abs=1e-12)
        half_n = 1.96 * np.sqrt(made.variance_n)
        inside += int((np.abs(found_n - truth_n) <= half_n).sum())
        shifted += int((np.abs(found_n - truth_n - 3 * half_n) <= half_n).sum())
        total += num_players
    assert inside / total >= 0.9
    assert shifted / total <= 0.1


def test_what_the_rule_says_exactly_is_predicted_exactly():
    """A gain of the new lot that is linear in membership and in what is known already leaves no error, on every record."""
    old_CQ = losses(5, 0, noise=0.01)
    member_Cn = np.arange(32)[:, None] >> np.arange(5) & 1
    gain_CQ = 0.1 * old_CQ.sum(1, keepdims=True) * [1, -2] + member_Cn @ [[1, 0], [2, 1], [0, 3], [1, 1], [4, 2]] + 5.0  # fmt: skip
    nll_CQ = np.concatenate([old_CQ, old_CQ - gain_CQ])
    asked = coalitions_after(6, 5, np.random.default_rng(1))
    made = complete({m: nll_CQ[m] for m in asked}, 6, 5, TOKENS_Q)
    assert made.predicted_C.any()
    np.testing.assert_allclose(made.nll_CQ, nll_CQ, atol=1e-9)
    assert made.variance_n.max() < 1e-18


def test_small_games_and_exact_updates_are_trained_in_full():
    """Under five lots, and with a share of 1, nothing is predicted and no variance added."""
    rng = np.random.default_rng(0)
    assert coalitions_after(4, 3, rng) == list(range(16))
    assert coalitions_after(6, 5, rng, 1.0) == list(range(64))
    assert coalitions_after(6, 6, rng) == list(range(64))
    nll_CQ = losses(4, 0, 0.1)
    made = complete(dict(enumerate(nll_CQ)), 4, 3, TOKENS_Q)
    np.testing.assert_array_equal(made.nll_CQ, nll_CQ)
    assert not made.variance_n.any()


def test_a_table_that_cannot_be_completed_is_refused():
    """An old coalition or that of all is missing, too few of the others, numbers out of range."""
    nll_CQ = losses(6, 0, 0.1)
    asked = coalitions_after(6, 5, np.random.default_rng(0))
    for lacking in (3, 63):
        with pytest.raises(UtilityError, match=f"got no {lacking}"):
            complete({m: nll_CQ[m] for m in asked if m != lacking}, 6, 5, TOKENS_Q)
    with pytest.raises(UtilityError, match="at least 10 coalitions with a new lot, got 9"):
        complete({m: nll_CQ[m] for m in (*range(32), *range(55, 64))}, 6, 5, TOKENS_Q)
    with pytest.raises(UtilityError, match="1 <= first <= 6"):
        coalitions_after(6, 7, np.random.default_rng(0))


def proxy(directory, lots, order=None, **extra):
    """A run over lots of records that count in steps of their lot's number; `order` is the order of the leaves."""
    rows = []
    for place in order or range(lots):
        rng = np.random.default_rng(place)
        for i in range(RECORDS):
            body = (rng.integers(VOCAB - 1) + (place + 1) * np.arange(20)) % (VOCAB - 1)
            identity = hashlib.sha256(f"{len(rows)} {place} {i}".encode()).digest()
            rows.append((len(rows), identity, f"owner-{i}", [*body.tolist(), VOCAB - 1]))
    shape = {
        "corpus_version": "none",
        "tokenizer_digest": "0" * 64,
        "vocab_size": VOCAB,
        "end_of_text": VOCAB - 1,
    }
    train = write_tokens(directory / "tokens", records=rows, **shape)
    begun = [(*row[:3], [*row[3][:12], VOCAB - 1]) for row in rows[:3]]  # not what is trained on
    target = write_tokens(directory / "target", records=begun, **shape)
    lot_N = np.repeat(order or range(lots), RECORDS).astype("<i8").tobytes()
    run = directory / "run"
    run.mkdir(parents=True)
    (run / "groups.json").write_bytes(jcs({"groups": [{"id": f"lot-{i}", "owners": [f"lot-{i}"]} for i in range(lots)]}))  # fmt: skip
    (run / "lots.bin").write_bytes(lot_N)
    spec = RunSpec(
        run="proxy-test", kind="proxy", entry="valuation.proxy:retrain", seed=5, tokens="../tokens", tokens_digest=train, steps=2, versions=no_versions(),
        config=RunConfig(
            model=MODEL, optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=2, length=32),
            extra={"groups": "groups.json", "target": "../target", "target_digest": target, "lots": ["lots.bin", hashlib.sha256(lot_N).hexdigest()], "order": ORDER, **extra},
        ),
    )  # fmt: skip
    save_run(spec, run)
    return spec, run


def keys(run, count):
    """Keys of the first bank files of a run."""
    found = []
    for mask in range(count):
        with np.load(bank_file(run, mask)) as archive:
            found.append(str(archive["key"]))
    return found


def test_a_coalition_keeps_its_key_when_others_come_and_loses_it_with_its_contents(tmp_path):
    """In another corpus with one lot more, at other leaves, the old coalitions' files are taken as they are; with another share of tokens, not."""
    spec, first = proxy(tmp_path / "a", 3)
    assert retrain(spec, first) == 0
    whole = 3 * RECORDS * 21
    for name, extra, same in (("b", {"first": 3, "share": [128, whole]}, True), ("c", {}, False)):
        more, later = proxy(tmp_path / name, 4, order=[3, 1, 0, 2], **extra)
        # The target is that of the first run, not the first records of another order.
        for path in (tmp_path / "a/target").iterdir():
            (tmp_path / name / "target" / path.name).write_bytes(path.read_bytes())
        config = {**more.config.extra, "target_digest": spec.config.extra["target_digest"]}
        (later / "run.json").unlink()
        more = replace(more, config=replace(more.config, extra=config))
        (later / "bank").mkdir()
        stamps = {}
        for mask in range(8):
            path = bank_file(later, mask)
            path.write_bytes(bank_file(first, mask).read_bytes())
            stamps[mask] = path.stat().st_mtime_ns
        assert retrain(more, later) == 0
        assert (keys(later, 8) == keys(first, 8)) is same
        kept = [mask for mask in range(8) if bank_file(later, mask).stat().st_mtime_ns == stamps[mask]]  # fmt: skip
        assert kept == (list(range(8)) if same else [])
        if same:
            np.testing.assert_array_equal(load_utilities(later).nll_CQ[:8], load_utilities(first).nll_CQ)  # fmt: skip
            for mask in range(8):  # and trained anew they are the same, bit for bit
                bank_file(later, mask).unlink()
            assert retrain(more, later) == 0
            np.testing.assert_array_equal(load_utilities(later).nll_CQ[:8], load_utilities(first).nll_CQ)  # fmt: skip
    assert read_bank(bank_file(first, 1), "another") is None


def test_a_share_and_first_lots_that_cannot_be_meant_are_refused(tmp_path):
    """More than all tokens, no lots, more lots than there are."""
    for extra, message in (({"share": [3, 2]}, "share"), ({"share": [0, 2]}, "share"), ({"first": 0}, "first"), ({"first": 4}, "first")):  # fmt: skip
        spec, run = proxy(tmp_path / f"{message}-{len(list(tmp_path.iterdir()))}", 3, **extra)
        with pytest.raises(ProxyError, match=message):
            read_plan(spec.config.extra, run)
