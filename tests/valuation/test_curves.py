"""Planted records are found with intervals that cover, curves move in the promised direction, attacks don't pay."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.data import write_tokens
from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from valuation.curves import curve, leave_groups_out, paired, ranked, remove_top, subsets_along
from valuation.detection import detection_auc, noise_tokens, shuffled_tokens
from valuation.errors import EvaluationError
from valuation.manipulation import (
    Holdings,
    add_noise,
    copy_from,
    duplicate,
    gain,
    pose_as,
    record_shares,
)
from valuation.subsets import Setting

VOCAB = 31


def test_area_by_hand():
    """Planted 1, 3 against clean 2, 3, 5: pairs won 3 + 1 + half a tie = 4.5 of 6."""
    score, planted = np.array([1.0, 3, 2, 3, 5]), np.array([True, True, False, False, False])
    found = detection_auc(score, planted)
    assert found.estimate == pytest.approx(4.5 / 6)
    assert found.low < 0.5 < found.high
    assert detection_auc(-score, planted).estimate == pytest.approx(1.5 / 6)


def test_all_found_is_not_certainty():
    """AUC 1 of 3 + 3 records has a wide interval, of 300 + 300 a narrow one; both end at 1."""
    few, many = (detection_auc(np.arange(2.0 * n), np.arange(2 * n) < n) for n in (3, 300))
    assert (few.estimate, few.high, many.high) == (1, 1, 1)
    assert few.low < 0.7
    assert many.low > 0.98


def test_the_interval_of_the_area_covers():
    """1,000 draws of 15 planted and 40 clean records: 95 % - 3 standard errors of the intervals contain the true area."""
    from scipy.stats import norm

    rng, trials, covered = np.random.default_rng(0), 1000, 0
    truth = float(norm.cdf(1.2 / np.sqrt(2)))
    planted = np.arange(55) < 15
    for _ in range(trials):
        found = detection_auc(rng.normal(size=55) - 1.2 * planted, planted)
        covered += found.low <= truth <= found.high
    assert covered / trials >= 0.95 - 3 * np.sqrt(0.95 * 0.05 / trials)


def test_planting():
    """Noise uses every id but the end-of-text, which stands last; shuffling keeps the tokens."""
    rng = np.random.default_rng(0)
    noise = noise_tokens(5000, 8, 3, rng)
    assert set(noise[:-1].tolist()) == {0, 1, 2, 4, 5, 6, 7}
    assert noise[-1] == 3
    mixed = shuffled_tokens([5, 6, 7, 1, 2, 9], rng)
    assert sorted(mixed.tolist()) == [1, 2, 5, 6, 7, 9]
    assert mixed[-1] == 9


def test_detection_refuses_what_it_cannot_judge():
    """No planted record, no clean one, a score that is not finite."""
    for score, planted in (
        (np.ones(3), np.zeros(3, bool)),
        (np.ones(3), np.ones(3, bool)),
        (np.array([1, np.nan, 2]), np.array([True, False, False])),
    ):
        with pytest.raises(EvaluationError):
            detection_auc(score, planted)


def test_orders_of_the_arms():
    """Top takes the best first, bottom the worst first, ties fall at random."""
    value, rng = np.array([0.0, 5.0, -1.0]), np.random.default_rng(1)
    assert ranked(value, "top", rng).tolist() == [1, 0, 2]
    assert ranked(value, "bottom", rng).tolist() == [2, 0, 1]
    firsts = {int(ranked(np.zeros(5), "top", rng)[0]) for _ in range(100)}
    assert firsts == set(range(5))


def test_subsets_along_a_curve():
    """Removing a share and adding the rest in reverse order give the same subset."""
    order = np.array([2, 0, 3, 1])
    np.testing.assert_array_equal(
        subsets_along(order, [0, 0.5, 1], "remove"),
        subsets_along(order[::-1], [1, 0.5, 0], "add"),
    )
    assert subsets_along(order, [0.25], "remove").tolist() == [[True, True, False, True]]
    with pytest.raises(EvaluationError):
        subsets_along(order, [1.5], "add")


def test_pairs_by_hand():
    """Differences 1, 2, 3: mean 2, half-width 4.302653 / sqrt(3); one seed shows nothing."""
    found = paired(np.array([2.0, 3, 4]), np.ones(3))
    assert found.estimate == pytest.approx(2)
    assert found.high - found.estimate == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert not paired(np.array([2.0]), np.array([1.0])).distinct


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Half of the records count in threes as the target does, half are noise; the true value is known."""
    folder, rng = tmp_path_factory.mktemp("curves"), np.random.default_rng(0)

    def write(name, count, noise):
        length = (
            15 if noise else 14
        )  # the target's texts are cut, so that none is one that is trained on
        records = []
        for i in range(count):
            body = (rng.integers(VOCAB) + 3 * np.arange(length)) % (VOCAB - 1)
            tokens = (
                noise_tokens(16, VOCAB, VOCAB - 1, rng) if noise and i % 2 else [*body, VOCAB - 1]
            )
            identity = hashlib.sha256(f"{name} {i}".encode()).digest()
            records.append((i, identity, f"owner{i % 4}", tokens))
        return write_tokens(
            folder / name, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB,
            end_of_text=VOCAB - 1, records=records,
        )  # fmt: skip

    setting = Setting(
        train=folder / "train", train_digest=write("train", 80, noise=True),
        target=folder / "target", target_digest=write("target", 6, noise=False),
        model=ModelSpec(vocab_size=VOCAB, num_layers=1, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24),
        optim=OptimSpec(lr=0.02, warmup_steps=2), batch=BatchSpec(rows=8, length=16), epochs=3,
    )  # fmt: skip
    return setting, np.where(np.arange(80) % 2, -1.0, 1.0), folder


def test_removal_and_addition_move_the_loss_as_promised(world):
    """Taking the good half away costs more than a random half, taking the noise away costs less; adding likewise."""
    setting, value, folder = world
    arms = {
        arm: curve(setting, value, arm, [0.0, 0.5], [1, 2, 3], folder)
        for arm in ("top", "bottom", "random")
    }
    assert arms["top"].difference(arms["random"], 0.5).low > 0
    assert arms["bottom"].difference(arms["random"], 0.5).high < 0
    np.testing.assert_array_equal(arms["top"].loss_RF[:, 0], arms["bottom"].loss_RF[:, 0])
    first = curve(setting, value, "top", [0.5], [1, 2, 3], folder, mode="add")
    np.testing.assert_allclose(first.loss_RF[:, 0], arms["bottom"].loss_RF[:, 1], atol=0.05)


def test_groups_are_left_out_one_by_one(world):
    """Owners 0 and 2 hold the language, 1 and 3 the noise: without a useful owner the loss rises more."""
    setting, _, folder = world
    found = leave_groups_out(setting, [f"owner{i % 4}" for i in range(80)], [1, 2], folder)
    assert found.groups == ("owner0", "owner1", "owner2", "owner3")
    mean = found.rise_RG.mean(0)
    assert min(mean[0], mean[2]) > max(mean[1], mean[3])
    assert found.agreement(np.array([2.0, -1, 2, -1])) > 0.8


def test_top_removal_beats_random_removal(world):
    """Removing what truly helps raises the loss above a random removal of as many; reversed scores don't."""
    setting, value, folder = world
    scores = np.tile(value, (6, 1))
    found = remove_top(setting, scores, 0.3, 1, folder, random_sets=4)
    assert found.removed == 24
    assert found.gap.low > 0
    assert remove_top(setting, -scores, 0.3, 1, folder, random_sets=4).gap.estimate < 0
    with pytest.raises(EvaluationError, match="one row per target"):
        remove_top(setting, scores[:5], 0.3, 1, folder)


HONEST = Holdings(("a", "a", "b", "b", "c"), ((1, 9), (2, 9), (3, 9), (4, 9), (5, 9)))
VALUE = {(1, 9): 3.0, (2, 9): -2.0, (3, 9): 1.0, (4, 9): 1.0, (5, 9): 0.5}


def by_record(holdings):
    """Pay positive values of first-committed records; unknown texts are worthless."""
    return record_shares(holdings, np.array([VALUE.get(text, 0.0) for text in holdings.tokens]))


def by_owner(holdings):
    """The naive rule: sums per owner, copies counted, cut at zero per owner."""
    sums = {}
    for owner, text in zip(holdings.owners, holdings.tokens, strict=True):
        sums[owner] = sums.get(owner, 0.0) + VALUE.get(text, 0.0)
    total = sum(max(0.0, s) for s in sums.values())
    return {owner: max(0.0, s) / total for owner, s in sums.items()}


def test_copies_shells_and_noise_earn_nothing_extra():
    """All four attacks gain exactly 0 under the rule per record; under the naive rule copies and shells pay (control)."""
    rng = np.random.default_rng(0)
    attacked = {
        "duplicate": duplicate(HONEST, "b", 3),
        "copy": copy_from(HONEST, "c", "a"),
        "shell": pose_as(HONEST, {1: 1}, "a"),
        "noise": add_noise(HONEST, "b", 4, 50, 9, rng),
    }
    for name, after in attacked.items():
        attacker = {"copy": "c", "shell": "a"}.get(name, "b")
        assert gain(HONEST, after, attacker, by_record) == pytest.approx(0, abs=1e-12), name
        if name != "noise":
            assert gain(HONEST, after, attacker, by_owner) > 0.05, name


@given(st.lists(st.integers(0, 3), min_size=2, max_size=2))
def test_any_split_is_worth_the_whole(shells):
    """However an owner deals its records to shells, shells together earn what the owner did."""
    after = pose_as(HONEST, dict(enumerate(shells)), "a")
    assert gain(HONEST, after, "a", by_record) == pytest.approx(0, abs=1e-12)


def test_attacks_need_an_attacker():
    """An owner without records can't attack; records without owner are refused."""
    with pytest.raises(EvaluationError, match="nobody"):
        duplicate(HONEST, "nobody", 1)
    with pytest.raises(EvaluationError, match="one owner per record"):
        Holdings(("a",), ())
