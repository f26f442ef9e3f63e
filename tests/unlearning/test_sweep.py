"""A sweep chooses by its stated rule on people whom no audit looks at, keeps what it measured, and never chooses in silence."""

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint import load_model, verify
from unlearning.errors import PlanError, RowsError
from unlearning.methods.settings import GRIDS, RATES
from unlearning.people import read_records, read_sealed
from unlearning.probes import FileTokenizer
from unlearning.sweep import (
    Objective,
    Person,
    Setting,
    Sign,
    Split,
    choose,
    grid_of,
    read_rows,
    sweep,
)
from unlearning.trials import (
    Held,
    losses_of,
    original_outcome,
    share_given_away,
    signs_of,
    trained_outcome,
)

KEY = bytes(range(32))
SPLIT = Split(frozenset({Person("a", "one"), Person("a", "two")}), frozenset({Person("b", "one")}))
GRID = [Setting("npo", "0.001", (("beta", value),)) for value in ("0.1", "0.2", "0.5", "1")]
WANTED = Objective(retained=2.0, bound=0.1, floor=0.05)


class Toy:
    """A runner that knows what comes out, and remembers what it was asked."""

    def __init__(self, *pairs):
        self.table = dict(zip([one.name for one in GRID], pairs, strict=True))
        self.asked = []

    def __call__(self, setting):
        """What the table says."""
        self.asked.append(setting.name)
        share, retained = self.table[setting.name]
        return {"given_away": share, "retained": retained}


def run_sweep(file, toy, **changes):
    """A sweep over the toy's grid."""
    values = {"settings": GRID, "split": SPLIT, "objective": WANTED, "key": KEY, "common": "c"}
    return sweep(file, runner=toy, **(values | changes))


@pytest.mark.parametrize(
    ("pairs", "best"),
    [
        # The first forgets best and costs too much; of the others the second gives least away.
        (((0.0, 2.2), (0.1, 2.1), (0.3, 1.9), (0.9, 1.8)), 1),
        # Below the floor there is nothing to win: 0.00 and 0.05 are equal, and the retained loss decides.
        (((0.0, 2.08), (0.05, 2.01), (0.06, 1.5), (1.0, 1.0)), 1),
        # Equal in both: the first of the grid.
        (((0.5, 2.0), (0.1, 2.0), (0.1, 2.0), (0.1, 2.0)), 1),
        # Exactly at the limit is within it; a loss that isn't finite is not.
        (((0.0, math.nan), (0.0, math.inf), (0.0, -math.inf), (0.9, 2.1)), 3),
    ],
)
def test_the_rule_by_hand(tmp_path, pairs, best):
    """Least share above the floor among those that keep the retained loss, then least loss, then order."""
    choice = run_sweep(tmp_path / "rows.jsonl", Toy(*pairs))
    assert choice.setting == GRID[best]
    assert GRID[best].name in choice.reason


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.05, 0.1, 1.0]), st.sampled_from([1.9, 2.0, 2.1, 2.2])),
        min_size=4,
        max_size=4,
    )
)
def test_no_admissible_setting_is_better_than_the_chosen(pairs):
    """Law: against all pairs by brute force; without an admissible one, nothing is chosen."""
    rows = {
        one.name: {"given_away": a, "retained": b} for one, (a, b) in zip(GRID, pairs, strict=True)
    }
    ranked = sorted(
        (max(0.0, a - 0.05), b, place)
        for place, (a, b) in enumerate(pairs)
        if b <= WANTED.retained + WANTED.bound
    )
    expected = GRID[ranked[0][2]] if ranked else None
    assert choose(GRID, rows, WANTED).setting == expected


SIGNS = (Sign("membership", 0.55, 0.5), Sign("exposure", 1.5, 5.0))


@pytest.mark.parametrize(
    ("signs", "best"),
    [
        # The second is nearest to gold in the larger of both distances, though the first is nearer in membership.
        (((0.55, 5.0), (0.65, 1.5), (0.95, 1.5), (0.15, 1.5)), 1),
        # Far below gold is as far as far above it.
        (((1.0, 1.5), (0.1, 1.5), (0.7, 1.5), (0.99, 4.0)), 2),
        # 0.04 and 0.09 of a span are one step: the lesser retained loss (the fourth's) decides.
        (((0.57, 1.5), (0.55, 1.5), (0.595, 1.95), (0.55, 1.95)), 3),
        # What isn't a number is as far as can be.
        (((math.nan, 1.5), (math.inf, 1.5), (0.55, math.nan), (1.0, 5.0)), 3),
    ],
)
def test_signs_decide_before_the_retained_loss(signs, best):
    """By hand: of settings that give nobody away, the one nearest to gold in whole steps, then the least loss; a leak comes first."""
    losses = (2.03, 2.02, 2.01, 2.0)
    rows = {
        one.name: {"given_away": 0.0, "retained": loss, "membership": auc, "exposure": bits}
        for one, loss, (auc, bits) in zip(GRID, losses, signs, strict=True)
    }
    wanted = dataclasses.replace(WANTED, signs=SIGNS)
    assert choose(GRID, rows, WANTED).setting == GRID[3]
    assert choose(GRID, rows, wanted).setting == GRID[best]
    assert "of a span from gold" in choose(GRID, rows, wanted).reason
    rows[GRID[best].name]["given_away"] = 0.5
    assert choose(GRID, rows, wanted).setting != GRID[best]


@pytest.mark.parametrize(
    ("held", "best"),
    [
        # All within: the first, which forgets best.
        ((0.09, 0.0, 0.0, 0.0), 0),
        # The first and the second cost held people more than the margin, though batches of everything keep their loss.
        ((0.11, 0.100001, 0.1, -0.1), 2),
        # What isn't a number is no cost that was kept.
        ((math.nan, math.inf, math.nan, 0.1), 3),
    ],
)
def test_held_people_have_a_bound_of_their_own(held, best):
    """By hand: what people who stay lose above gold refuses a setting that the loss over everything admits; without the bound it doesn't."""
    rows = {
        one.name: {"given_away": share, "retained": 2.0, "held": cost}
        for one, share, cost in zip(GRID, (0.0, 0.06, 0.07, 0.08), held, strict=True)
    }
    wanted = dataclasses.replace(WANTED, held_bound=0.1)
    assert choose(GRID, rows, WANTED).setting == GRID[0]
    choice = choose(GRID, rows, wanted)
    assert choice.setting == GRID[best]
    assert f"cost to held people {held[best]:.4f} of at most 0.1000" in choice.reason
    none = choose(GRID[:best] or GRID[:1], rows, dataclasses.replace(wanted, held_bound=0.0))
    assert none.setting is None
    assert "least cost to held people" in none.reason
    assert "limit 0.0000 nats per token" in none.reason
    del rows[GRID[2].name]["held"]
    with pytest.raises(RowsError, match="'held' of every setting"):
        choose(GRID, rows, wanted)
    for wrong in (-0.1, math.nan, math.inf):
        with pytest.raises(PlanError, match="bound of held people"):
            dataclasses.replace(WANTED, held_bound=wrong)


def test_who_comes_back_counts_as_given_away():
    """A setting that hides from questions and gives half back after a benign fine-tuning loses to one that gives a tenth away."""
    rows = {one.name: {"given_away": 0.0, "retained": 2.0, "restored": 0.5} for one in GRID}
    rows[GRID[1].name] = {"given_away": 0.1, "retained": 2.0, "restored": 0.0}
    assert choose(GRID, rows, WANTED).setting == GRID[1]
    assert "0.0500 given away above the floor" in choose(GRID, rows, WANTED).reason


def test_signs_without_numbers_are_refused():
    """A sign that no row has, a span of nothing, a gold that isn't a number, a resolution of 0: each is named."""
    wanted = dataclasses.replace(WANTED, signs=SIGNS)
    rows = {one.name: {"given_away": 0.0, "retained": 2.0, "membership": 0.5} for one in GRID}
    with pytest.raises(RowsError, match="'exposure' of every setting"):
        choose(GRID, rows, wanted)
    for wrong in ((math.nan, 0.5), (0.5, 0.0), (0.5, math.inf)):
        with pytest.raises(PlanError, match="membership: expected gold's value finite"):
            Sign("membership", *wrong)
    with pytest.raises(PlanError, match="resolution above 0"):
        dataclasses.replace(WANTED, resolution=0.0)


def test_none_admissible_is_said(tmp_path):
    """No setting within the bound: None, with the least loss and the limit; never the least bad one."""
    choice = run_sweep(
        tmp_path / "rows.jsonl", Toy((0.0, 2.2), (0.0, 2.3), (0.0, 9), (0.0, math.nan))
    )
    assert choice.setting is None
    assert (
        "none of 4 settings is admissible: least retained loss 2.2000, limit 2.1000"
        in choice.reason
    )


def test_audited_people_are_refused_by_owner_and_source():
    """One source name under two owners is two people; the same person is refused, and counted, not named."""
    people = frozenset({Person("a", "one"), Person("b", "one"), Person("b", "two")})
    Split(frozenset({Person("a", "one")}), frozenset({Person("b", "one")}))
    with pytest.raises(PlanError, match="2 of 3 validation people are audited too") as refused:
        Split(people, frozenset({Person("b", "one"), Person("b", "two"), Person("c", "one")}))
    assert "two" not in str(refused.value).split()
    for empty in ((people, frozenset()), (frozenset(), people)):
        with pytest.raises(PlanError, match="needs validation people"):
            Split(*empty)


def test_held_people_serve_nothing_else():
    """Held people may be neither pushed, nor audited, nor measured by the audit; nor may the audit's be pushed. Counted, not named."""
    one, two, three = (Person("a", name) for name in ("one", "two", "three"))
    pushed, audited = frozenset({one}), frozenset({Person("b", "one")})
    Split(pushed, audited, frozenset({two}), frozenset({three}))
    for held, measured, match in (
        ({one, two}, (), "1 of 2 held people are validated on too"),
        ({Person("b", "one")}, (), "1 of 1 held people are audited too"),
        ({two, three}, {three}, "1 of 2 held people are what the audit measures utility on too"),
        ({two}, {one}, "1 of 1 validation people are what the audit measures utility on"),
    ):
        with pytest.raises(PlanError, match=match):
            Split(pushed, audited, frozenset(held), frozenset(measured))


def test_a_killed_sweep_goes_on_and_ends_with_the_same_file(tmp_path):
    """Killed at the third setting: two are kept, two are run, and rows are byte for byte those of an uninterrupted sweep."""
    pairs = (0.3, 2.0), (0.1 + 0.2, 1.9), (0.0, 2.0), (0.1, 2.0)
    whole, toy = Toy(*pairs), Toy(*pairs)

    def dies(setting):
        if len(toy.asked) == 2:
            raise KeyboardInterrupt
        return toy(setting)

    first, second = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    choice = run_sweep(first, whole)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(second, dies)
    toy.asked.clear()
    assert run_sweep(second, toy) == choice
    assert toy.asked == [one.name for one in GRID[2:]]
    assert second.read_bytes() == first.read_bytes()
    toy.asked.clear()
    assert run_sweep(second, toy, objective=Objective(retained=1.8, bound=0.1)).setting == GRID[1]
    assert toy.asked == []
    assert read_rows(first)[GRID[1].name]["given_away"] == 0.1 + 0.2


def test_rows_of_another_sweep_are_refused(tmp_path):
    """Other people, another model or another key: the file is not reused; nor is one that holds no rows, or a share of 2."""
    file = tmp_path / "rows.jsonl"
    toy = Toy(*[(0.1, 2.0)] * 4)
    run_sweep(file, toy)
    other = Split(SPLIT.validation, frozenset({Person("b", "two")}))
    held = dataclasses.replace(SPLIT, held=frozenset({Person("c", "one")}))
    for changes in ({"split": other}, {"split": held}, {"common": "d"}, {"key": bytes(32)}):
        with pytest.raises(RowsError, match="another sweep"):
            run_sweep(file, toy, **changes)
    lines = file.read_text().splitlines()
    assert not any(word in file.read_text() for word in ("one", "two"))
    for wrong in (
        "",
        "{}\n",
        lines[0]
        + "\n"
        + json.dumps({"setting": GRID[0].name, "measure": "given_away", "value": "2"}),
    ):
        file.write_text(wrong)
        with pytest.raises(RowsError, match="holds no sweep's rows"):
            run_sweep(file, toy)


def test_a_grid_comes_from_the_one_place_of_settings():
    """Every grid is of known fields in range; rates vary fastest; unknown numbers, methods and doubles are refused."""
    for method, fields in GRIDS.items():
        names = [one.name for one in grid_of(method)]
        assert len(names) == len(set(names)) == len(RATES) * math.prod(map(len, fields.values()))
    assert grid_of("npo", ["0.001"])[0].name == "npo rate=0.001 beta=0.1"
    assert [one.changes for one in grid_of("ascent")] == [()] * len(RATES)
    for wrong in (
        ("npo", "0"),
        ("npo", "x"),
        ("npo", "nan"),
        ("nobody", "1"),
        ("npo", "1", (("beta", "-1"),)),
        ("npo", "1", (("tau", "1"),)),
        ("npo", "1", (), (("steps", "1"),)),
    ):
        with pytest.raises(PlanError):
            Setting(*wrong)


def test_nonsense_is_refused(tmp_path):
    """An empty grid, one setting written in two ways, a runner that says too little, an objective out of range."""
    file, toy = tmp_path / "rows.jsonl", Toy(*[(0.1, 2.0)] * 4)
    twice = [GRID[0], Setting("npo", "1e-3", (("beta", "0.10"),))]
    assert Setting("npo", "1", (), (("neighbours", "0.9"),)).name == "npo rate=1 neighbours=0.9"
    for settings in ([], twice):
        with pytest.raises(PlanError, match=r"empty grid|one twice"):
            run_sweep(file, toy, settings=settings)
    for said in (
        {"retained": 1.0},
        {"given_away": math.nan, "retained": 1.0},
        {"given_away": 1.2, "retained": 1.0},
    ):
        with pytest.raises(PlanError, match="of every setting"):
            run_sweep(file, lambda _, said=said: said)
    assert not file.exists()
    for wrong in (
        {"retained": math.nan, "bound": 0.1},
        {"retained": 1.0, "bound": -0.1},
        {"retained": 1.0, "bound": 0.1, "floor": 1.5},
    ):
        with pytest.raises(PlanError, match="finite retained loss"):
            Objective(**wrong)


def test_a_real_sweep_through_the_trainer(study, tmp_path):
    """Of a rate that does nothing and one that forgets, the latter is chosen; no weights are left, numbers repeat."""
    records, key = read_sealed(study.audit_extra()["sealed"])
    original = study.models["original"]
    extra = {k: study.audit_extra()[k] for k in ("sealed", "tokenizer")} | {"forget_records": 16}
    run = study.run_spec(
        "sweep", kind="unlearn", steps=40, rows=8, excluded=study.excluded(), init=str(original), init_root=verify(original).root,
        optim={"lr": 1.0, "warmup_steps": 0, "weight_decay": 0.0}, extra=extra,
    )  # fmt: skip
    settings = grid_of("npo", ["0.000001", "0.002"])[:2]
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    before = load_model(original, study.model_spec()).eval()
    assert share_given_away(before, records, tokenizer, 64) >= 0.9
    strangers = read_records(study.folder / "lookalikes.jsonl")
    gold = load_model(study.models["gold"], study.model_spec()).eval()
    signs, golden = (signs_of(m, records, strangers, tokenizer, 64) for m in (before, gold))
    assert signs["membership"] >= 0.95
    assert golden["membership"] <= 0.85
    assert signs["exposure"] >= 4.5
    assert golden["exposure"] <= 2.5
    assert original_outcome(run, tmp_path, records, strangers=strangers).items() >= signs.items()
    split = Split(
        frozenset(Person("registry", one.subject) for one in records),
        frozenset({Person("registry", "somebody else")}),
    )
    measured = trained_outcome(settings[0], run, tmp_path, records)
    staying = read_records(study.folder / "retained.jsonl")
    held = Held(staying, losses_of(gold, staying, tokenizer, 64))
    again = trained_outcome(
        settings[0], run, tmp_path, records, strangers=strangers, held=held, further=lambda model: {"layers": model.spec.num_layers}
    )  # fmt: skip
    assert again.items() >= measured.items()
    assert set(again) - set(measured) == {"membership", "exposure", "layers", "held", "held_loss"}
    # Oracle: gold costs them nothing; the original no more than noise; who hardly changes it costs what it costs.
    assert held.cost(gold, tokenizer, 64)["held"] == 0.0
    mine = losses_of(before, staying, tokenizer, 64)
    mean = sum(mine.values()) / len(mine)
    assert again["held_loss"] == pytest.approx(mean, abs=1e-3)
    assert (
        mean - sum(held.gold.values()) / len(mine) < held.cost(before, tokenizer, 64)["held"] < 0.2
    )
    with pytest.raises(PlanError, match="0 of them held"):
        Held(records, held.gold).cost(gold, tokenizer, 64)
    assert again["membership"] >= 0.95
    wanted = Objective(retained=measured["retained"], bound=1.0)
    choice = sweep(
        tmp_path / "rows.jsonl", settings, lambda one: trained_outcome(one, run, tmp_path, records), split, wanted, key=key, common="c"
    )  # fmt: skip
    rows = read_rows(tmp_path / "rows.jsonl")
    assert choice.setting == settings[1]
    assert rows[settings[0].name] == measured
    assert measured["given_away"] >= 0.9
    assert rows[settings[1].name]["given_away"] <= 0.3
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]
    assert dataclasses.replace(wanted, bound=0.0).admits(measured)
