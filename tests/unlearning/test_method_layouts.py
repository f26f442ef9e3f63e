"""Every method on every layout: loss, gradients, weights and λ of one process, to 1e-10 in float64, by real processes."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from forgetting_runs import (
    DEEP,
    DENSE,
    MIXED,
    kept_there,
    measure,
    measure_all,
    measure_broken,
    nobody,
    objective_of,
    only_own,
    unchanged,
    utility,
)
from trainer_processes import run_processes

from trainer import states
from trainer.layout import Layout
from trainer.mesh import Mesh
from trainer.objective import divide
from unlearning.methods import METHODS
from unlearning.methods.settings import DEFAULTS, Lora
from unlearning.methods.spread import Spread

EXACT = 1e-10
PIPE = {"pp": 2, "microbatches": 4}
INNER = ("adaptive_rmu", "rau", "rmu")
PAIRS = {
    "copies": (DENSE, Layout(dp_replicate=2)),
    "slices": (DENSE, Layout(dp_shard=2)),
    "positions": (DENSE, Layout(sp=2)),
    "vocabulary": (DENSE, Layout(tp=2)),
    "experts": (MIXED, Layout(dp_shard=2, ep=2)),
    "stages": (DENSE, Layout(**PIPE)),
}
ROWS_ONLY = {"copies", "slices", "experts"}
"""Layouts that cut nothing of a loss: three methods stand for all of them here, the slow test takes all."""
SOME = {"npo", "pdu", "rau"}
FOURS = {
    "positions and vocabulary": (DENSE, Layout(sp=2, tp=2)),
    "stages and vocabulary": (DENSE, Layout(tp=2, **PIPE)),
    "stages and positions": (DENSE, Layout(sp=2, **PIPE)),
    "experts of cut rows": (MIXED, Layout(dp_shard=2, sp=2, ep=4)),
}


def cases_of(layouts, *, everything=False):
    """(layout's name, method) of all, or of enough of them."""
    return [
        (name, method)
        for name in layouts
        for method in METHODS
        if everything or name not in ROWS_ONLY or method in SOME
    ]


@pytest.fixture(scope="module")
def alone(records_only):
    """What one process computes, by method and model."""
    torch.set_num_threads(1)
    return functools.lru_cache(
        lambda method, spec, settings=None, lora=None: measure(
            records_only.folder,
            method,
            spec,
            Layout(),
            2 if lora is None else 3,
            settings=settings,
            lora=lora,
        )
    )


def launched(folder, file, layouts, *, everything=False):
    """All methods on layouts of as many processes, in one launch: {(layout's name, method): what rank 0 found}."""
    cases = cases_of(layouts, everything=everything)
    calls = [(method, *layouts[name]) for name, method in cases]
    world = next(iter(layouts.values()))[1].world_size
    found, *_ = run_processes(world, file, measure_all, folder, calls)
    return dict(zip(cases, found, strict=True))


@pytest.fixture(scope="module")
def pairs(records_only, tmp_path_factory):
    """All methods on all layouts of two processes."""
    return launched(records_only.folder, tmp_path_factory.mktemp("pairs") / "group", PAIRS)


def difference(got, want):
    """Largest error, each array against its own largest number."""
    (numbers, arrays), (expected_numbers, expected) = got, want
    assert arrays.keys() == expected.keys()
    worst = float(np.abs(numbers - expected_numbers).max() / np.abs(expected_numbers).max())
    for name, array in arrays.items():
        size = max(float(np.abs(expected[name]).max()), 1e-12)
        worst = max(worst, float(np.abs(array - expected[name]).max()) / size)
    return worst


@pytest.mark.parametrize(("name", "method"), cases_of(PAIRS))
def test_two_processes_compute_what_one_computes(pairs, alone, name, method):
    """Loss, norm, every first gradient, the weights after two clipped steps and λ, to 1e-10; rows of 63 are padded."""
    assert difference(pairs[name, method], alone(method, PAIRS[name][0])) < EXACT


@pytest.mark.parametrize("method", METHODS)
def test_retained_utility_is_the_same_and_finite(records_only, pairs, alone, method):
    """On one process and on two (vocabulary cut), each method reports the same finite utility and forgetting."""
    one = utility(records_only.folder, method, DENSE, alone(method, DENSE)[1])
    two = utility(records_only.folder, method, DENSE, pairs["vocabulary", method][1])
    for name in ("logprob", "given_away", "retained"):
        assert math.isfinite(getattr(one, name))
        assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-6, abs=1e-9)
    assert 0 < one.retained < 2 * math.log(512)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sorted(ROWS_ONLY), *FOURS])
def test_every_method_where_axes_meet(records_only, alone, tmp_path, name):
    """All methods, also on the layouts that cut rows only, and on four processes where two of the axes meet."""
    layouts = {name: (PAIRS | FOURS)[name]}
    found = launched(records_only.folder, tmp_path / "group", layouts, everything=True)
    for (_, method), got in found.items():
        assert difference(got, alone(method, layouts[name][0])) < EXACT, method


def test_the_comparison_finds_a_missing_exchange(records_only, alone, tmp_path):
    """Negative controls: a loss said twice, sums or positions not put together, a layer's gradient not passed on differ by far more."""
    faults = [
        (Spread, "said_once", unchanged, ("npo", *PAIRS["positions"])),
        (Spread, "group", nobody, ("kl", *PAIRS["vocabulary"])),
        (Spread, "_whole", only_own, ("undial", *PAIRS["vocabulary"])),
        (states._Beside, "backward", kept_there, ("rmu", *PAIRS["stages"])),
    ]
    found, _ = run_processes(2, tmp_path / "group", measure_broken, records_only.folder, faults)
    for got, (*_, (method, spec, _)) in zip(found, faults, strict=True):
        assert difference(got, alone(method, spec)) > 1e-4


def test_states_of_inner_layers_under_every_schedule(records_only, alone, tmp_path):
    """Losses of the embedding's, inner and the last block's states, on stages of two processes, are those of one process."""
    settings = {name: dataclasses.replace(DEFAULTS[name], layers=(0, 1, -2, -1)) for name in INNER}
    calls = [
        (name, DEEP, Layout(pp=2, microbatches=4, schedule=schedule), 2, 63, settings[name])
        for schedule, name in zip(("gpipe", "interleaved", "zero-bubble", "zbv"), (*INNER, "rau"), strict=True)
    ]  # fmt: skip
    found, _ = run_processes(2, tmp_path / "group", measure_all, records_only.folder, calls)
    for got, (name, *_) in zip(found, calls, strict=True):
        assert difference(got, alone(name, DEEP, settings[name])) < EXACT, name


def test_adapters_on_every_layout(records_only, alone, tmp_path):
    """Rank 2 on all matrices: gradients, merged weights, A, B and their moments of two processes are one process's; six layouts, kl and rmu."""
    lora = Lora(rank=2, alpha=6.0)
    layouts = [layout for name, (_, layout) in PAIRS.items() if name != "experts"]
    layouts += [Layout(pp=2, microbatches=4, schedule="zbv")]
    calls = [
        (method, DEEP, layout, 3, 63, None, lora)
        for layout, method in zip(layouts, ("kl", "rmu", "npo", "kl", "rmu", "npo"), strict=True)
    ]
    found, _ = run_processes(2, tmp_path / "group", measure_all, records_only.folder, calls)
    for got, (method, *_) in zip(found, calls, strict=True):
        want = alone(method, DEEP, None, lora)
        assert any(name.endswith("lora_b") and array.any() for name, array in want[1].items())
        assert difference(got, want) < EXACT, method


def test_an_objective_that_cannot_be_divided_is_refused():
    """A loss of somebody else's, without `divide`, runs where rows are shared and nowhere else."""

    class Own:
        """Rows only."""

    divide(Own(), Mesh(layout=Layout(dp_shard=2)))
    for degrees in ({"sp": 2}, {"tp": 2}, PIPE, {"dp_shard": 2, "ep": 2}):
        with pytest.raises(ValueError, match="dp_replicate and dp_shard only"):
            divide(Own(), Mesh(layout=Layout(**degrees)))


def test_a_record_and_its_answer_share_a_microbatch(records_only):
    """In a pipeline's batch every piece has whole records, both texts of a pair, and as many rows as any other."""
    objective, _ = objective_of(records_only.folder, "dpo", rows=8, forget_records=7)
    whole = objective.batch(1, 0, 1)
    objective._spread = Spread(Mesh(layout=Layout(**PIPE)))
    batch = objective.batch(1, 0, 1)
    assert (batch.pieces, batch.num_retained_rows) == (4, 2)
    assert batch.chosen == whole.chosen
    num, seen = len(batch.chosen), []
    for record in batch.record_BT.chunk(4):
        here = sorted(set(record[record >= 0].tolist()))
        secrets = [ordinal for ordinal in here if ordinal < num]
        assert here == [*secrets, *(ordinal + num for ordinal in secrets)]
        seen += secrets
    assert seen == list(range(num))
    assert objective.counts(batch).tolist() == objective.counts(whole).tolist()
