"""What a model remembers, before any audit: closed forms, counts against the batches themselves, and models that remember nothing."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trainer.data import BatchPlan, write_tokens
from trainer.spec import (
    BatchSpec,
    MixtureSpec,
    ModelSpec,
    RunConfig,
    RunSpec,
    no_versions,
    save_run,
)
from trainer.store import TokenStore
from unlearning.memorisation import (
    ATTACK,
    Memory,
    Person,
    chance_exposure,
    extraction_test,
    grouped,
    memorisation,
    rank_test,
)
from unlearning.plan import AuditPlan
from unlearning.presentations import shown_N, times_shown
from unlearning.rows import Evidence, Row, to_table

ORIGINAL = ("original", "o")


def person(times=1, given_away=0, exposure=math.nan, candidates=0):
    """A person with one question."""
    return Person("x", "forgotten", times, given_away, 1, exposure, candidates)


@pytest.mark.parametrize("candidates", [1, 2, 7, 64])
def test_chance_exposure_is_the_mean_over_all_ranks(candidates):
    """log2 N - log2(N!)/N equals the plain mean of log2(N / rank), and tends to 1 / ln 2."""
    plain = np.mean([math.log2(candidates / rank) for rank in range(1, candidates + 1)])
    assert chance_exposure(candidates) == pytest.approx(plain, abs=1e-12)
    assert chance_exposure(10**7) == pytest.approx(1 / math.log(2), abs=1e-5)
    with pytest.raises(ValueError, match="at least one"):
        chance_exposure(0)


def test_groups_are_powers_of_two_with_wilson_intervals():
    """0, 1, 2-3, 4-7 and untold times are groups of their own; the bound of none of n is z^2 / (n + z^2)."""
    people = [person(times) for times in (0, 0, 0, 1, 2, 3, 3, 4, 7, -1)]
    people[3] = dataclasses.replace(people[3], given_away=1, exposure=6.0, candidates=64)
    groups = grouped(people)
    ranges = [(g.first, g.last, g.people, g.given_away) for g in groups]
    assert ranges == [(0, 0, 3, 0), (1, 1, 1, 1), (2, 3, 3, 0), (4, 7, 2, 0), (-1, -1, 1, 0)]
    z2 = stats.norm.ppf(0.975) ** 2
    assert groups[0].low == 0
    assert groups[0].high == pytest.approx(z2 / (3 + z2), abs=1e-12)
    assert groups[1].low == pytest.approx(1 / (1 + z2), abs=1e-12)
    assert (groups[1].ranked, groups[1].exposure) == (1, 6.0)
    assert math.isnan(groups[0].exposure)


def test_p_values_have_their_closed_forms():
    """One given away against 32 strangers: 1/33. All of n ranked in the upper half: 2^-n. Nobody to compare with: no value."""
    assert extraction_test([person(given_away=1)], [person()] * 32) == pytest.approx(1 / 33)
    assert extraction_test([person()] * 5, [person()] * 5) == pytest.approx(1.0)
    assert math.isnan(extraction_test([person(given_away=1)], []))
    first = [person(exposure=6.0, candidates=64)] * 7
    assert rank_test(first) == pytest.approx(2.0**-7)
    assert rank_test([person(exposure=0.0, candidates=64)] * 7) == pytest.approx(1.0)
    assert math.isnan(rank_test([person()]))


def test_the_middle_rank_counts_as_upper_half_whatever_the_rounding():
    """Rank N/2 is in the upper half for every even N, though log2 N - log2(N/2) may round below 1; rank N/2 + 1 is not."""
    for candidates in range(2, 400, 2):
        middle = math.log2(candidates) - math.log2(candidates / 2)
        below = math.log2(candidates) - math.log2(candidates / 2 + 1)
        inside = [person(exposure=middle, candidates=candidates)]
        outside = [person(exposure=below, candidates=candidates)]
        assert (rank_test(inside), rank_test(outside)) == (0.5, 1.0)


def test_uniform_ranks_are_taken_for_memory_no_oftener_than_the_level():
    """Of 2,000 sets of 20 people whose numbers rank at random, at most the level's share plus four standard errors is called memory."""
    generator = np.random.default_rng(5)
    ranks = generator.integers(1, 65, (2000, 20))
    low = sum(
        rank_test([person(exposure=math.log2(64 / r), candidates=64) for r in row]) <= 0.025
        for row in ranks
    )
    assert low / 2000 <= 0.025 + 4 * math.sqrt(0.025 * 0.975 / 2000)


def plan_of(forgotten, strangers):
    """A plan without gold."""
    return AuditPlan(
        num_forgotten=forgotten, num_retained=1, num_lookalikes=strangers, original="o", unlearned="u", gold=()
    )  # fmt: skip


def rows_of(away, ranks, strangers=20, times=None):
    """Rows of an original: who of the forgotten is given away, and the rank of each one's number among 64."""
    rows = []

    def add(subject, population, attack, score, value):
        rows.append(Row(subject, population, "", 0, *ORIGINAL, attack, score, float(value)))

    for number, (leaks, rank) in enumerate(zip(away, ranks, strict=True)):
        add(f"f{number:02d}", "forgotten", "direct/trained", "exact_match", leaks)
        add(f"f{number:02d}", "forgotten", ATTACK, "exact_match", leaks)
        add(f"f{number:02d}", "forgotten", ATTACK, "exposure", math.log2(64 / rank))
        add(f"f{number:02d}", "forgotten", ATTACK, "candidates", 64)
        if times:
            add(f"f{number:02d}", "forgotten", ATTACK, "times_shown", times[number])
    for number in range(strangers):
        add(f"s{number:02d}", "lookalike", ATTACK, "exact_match", 0)
        add(f"s{number:02d}", "lookalike", ATTACK, "times_shown", 0)
    return Evidence(to_table(rows)), plan_of(len(away), strangers)


def test_a_model_that_memorised_nothing_is_called_so():
    """Nobody is given away and ranks are spread evenly: nothing, in words that name no one."""
    found = memorisation(*rows_of([0] * 16, [4 * n + 2 for n in range(16)], times=[1, 2] * 8))
    assert found.memory is Memory.NOTHING
    assert found.statement.startswith("memorised nothing: an audit says nothing (")
    assert "0 of 16 people; 0 of 20 people whom it never saw" in found.statement
    assert [g.first for g in found.groups] == [0, 1, 2]
    assert "f0" not in found.statement


def test_ranks_alone_show_memory_that_no_answer_shows():
    """Nobody is given away but every number ranks second: too little for an audit, yet not nothing."""
    found = memorisation(*rows_of([0] * 16, [2] * 16))
    assert found.memory is Memory.LITTLE
    assert found.p_rank == pytest.approx(2.0**-16)
    assert [g.first for g in found.groups] == [0, -1]


def test_a_model_that_gives_half_of_them_away_can_be_audited():
    """At the control's rate there is enough to forget; each person stands there with times, answers and bits."""
    found = memorisation(*rows_of([1] * 8 + [0] * 8, [1] * 16, times=list(range(1, 17))))
    assert found.memory is Memory.ENOUGH
    assert [(p.times, p.given_away, p.exposure) for p in found.people[:2]] == [
        (1, 1, 6.0),
        (2, 1, 6.0),
    ]
    plain = found.to_json()
    assert plain["memory"] == "enough"
    assert plain["people"][0]["exposure"] == "6.000000"
    assert plain["groups"][0]["exposure"] == "none"  # look-alikes without a number


def test_without_strangers_one_secret_is_memory():
    """No look-alikes and one given away: no test of extraction, and not nothing either; none given away is nothing."""
    found = memorisation(*rows_of([1] + [0] * 15, [4 * n + 2 for n in range(16)], strangers=0))
    assert math.isnan(found.p_extraction)
    assert found.memory is Memory.LITTLE
    none = memorisation(*rows_of([0] * 16, [4 * n + 2 for n in range(16)], strangers=0))
    assert none.memory is Memory.NOTHING


def test_rows_of_before_say_nothing_about_memory():
    """An audit without these rows has no report, and nothing is made up for it."""
    rows = [Row("f", "forgotten", "", 0, *ORIGINAL, "direct/trained", "exact_match", 1.0)]
    assert memorisation(Evidence(to_table(rows)), plan_of(1, 0)) is None


LENGTHS = st.lists(st.integers(2, 9), min_size=3, max_size=12)


def store_of(folder, lengths, owners=None):
    """A token folder: record n holds its own tokens."""
    records = [
        (n, bytes([n + 1]) * 32, (owners or {}).get(n, "a"), [(n * 3 + t) % 50 for t in range(length - 1)] + [50])
        for n, length in enumerate(lengths)
    ]  # fmt: skip
    digest = write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=51, end_of_text=50, records=records
    )  # fmt: skip
    return TokenStore.open(folder), digest


@given(LENGTHS, st.integers(0, 3), st.integers(0, 6))
@settings(max_examples=40, deadline=None)
def test_times_shown_are_those_of_the_batches(tmp_path_factory, lengths, seed, steps):
    """Counted from the order, a record was shown as often as its first token stands in the batches, repeats and all."""
    folder = tmp_path_factory.mktemp("tokens")
    store, _ = store_of(folder, lengths, {0: "b", 1: "b"})
    excluded = {bytes([3]) * 32}
    plan = BatchPlan(store, seed, BatchSpec(rows=2, length=7), MixtureSpec(repeats={"b": 3}), excluded)  # fmt: skip
    counted = np.zeros(len(lengths), dtype=int)
    for step in range(steps):
        for row in plan.batch(step).segments:
            for segment in row:
                counted[segment.index] += segment.first == 0
    assert shown_N(plan, steps).tolist() == counted.tolist()
    assert counted[2] == 0


def run_in(folder, digest, **changes):
    """A run over the tokens, with its file."""
    config = RunConfig(
        model=ModelSpec(vocab_size=51, num_layers=1, dim=8, num_heads=1, num_kv_heads=1, ffn_dim=8),
        batch=BatchSpec(rows=2, length=7),
    )
    run = RunSpec(
        run="one", config=config, tokens=str(folder / "tokens"), tokens_digest=digest, steps=5, seed=1,
        versions=no_versions(), **changes,
    )  # fmt: skip
    (folder / "one").mkdir(exist_ok=True, parents=True)
    save_run(run, folder / "one")
    return folder / "one" / "step-5"


def test_copies_count_whoever_owns_them_and_strangers_count_nothing(tmp_path):
    """Two records with the same tokens are one text shown as often as both together; a text of nobody was never shown."""
    (tmp_path / "tokens").mkdir()
    text = [7, 8, 9, 50]
    records = [(0, b"\1" * 32, "a", text), (1, b"\2" * 32, "b", text), (2, b"\3" * 32, "b", [1, 2, 3, 4, 50])]  # fmt: skip
    digest = write_tokens(
        tmp_path / "tokens", corpus_version="none", tokenizer_digest="0" * 64, vocab_size=51, end_of_text=50, records=records
    )  # fmt: skip
    checkpoint = run_in(tmp_path, digest)
    store = TokenStore.open(tmp_path / "tokens")
    shown = shown_N(BatchPlan(store, 1, BatchSpec(rows=2, length=7)), 5)
    asked = {("\1" * 32).encode().hex(): [0], "stranger": [7, 8, 50], "copyist": text}
    found = times_shown(checkpoint, asked)
    assert found == {"01" * 32: shown[0] + shown[1], "stranger": 0, "copyist": shown[0] + shown[1]}
    assert shown.min() > 0


def test_what_cannot_be_told_is_not_guessed(tmp_path):
    """No run file, tokens that are gone, or a model that goes on from another one: no count at all."""
    (tmp_path / "tokens").mkdir()
    _, digest = store_of(tmp_path / "tokens", [4, 5, 6])
    assert times_shown(tmp_path / "none" / "step-5", {"x": [1, 50]}) is None
    checkpoint = run_in(tmp_path, digest)
    assert times_shown(checkpoint, {"x": [1, 50]}) == {"x": 0}
    later = run_in(tmp_path / "later", digest, init="elsewhere", init_root="0" * 64)
    assert times_shown(later, {"x": [1, 50]}) is None
    (tmp_path / "tokens" / "tokens.json").unlink()
    assert times_shown(checkpoint, {"x": [1, 50]}) is None
