"""A loss that isn't finite is named where it is found, and stands in no bank."""

import dataclasses

import numpy as np
import pytest
from test_several_targets import prepared
from test_subsets import setting  # noqa: F401 - a fixture

from trainer import generate
from trainer.errors import NumericalError
from trainer.spec import OptimSpec
from valuation import proxy
from valuation.bank import bank_file, load_utilities, read_bank
from valuation.errors import ProxyError
from valuation.proxy import retrain
from valuation.subsets import retrain_subsets

WILD = OptimSpec(lr=1e30, warmup_steps=0, clip_norm=0.0)


def test_a_coalition_that_diverges_is_named_and_leaves_no_file(tmp_path, monkeypatch):
    """One of four trainings has an absurd step size: the error says which and under which seed, and the others' files stay."""
    run, folder = prepared(tmp_path)
    fit, calls = proxy.fit_rows, []

    def wild_at_the_third(model, rows, optim):
        calls.append(1)
        fit(model, rows, WILD if len(calls) == 3 else optim)

    monkeypatch.setattr(proxy, "fit_rows", wild_at_the_third)
    # Longest first: both owners, one, the other, nobody.
    with pytest.raises(NumericalError, match=r"^coalition 2, seed 5: training step: .*(nan|inf)"):
        retrain(run, folder)
    assert sorted(path.stem for path in (folder / "bank").glob("*.npz")) == ["1", "3"]
    assert not (folder / "result.json").exists()


def test_a_subset_that_diverges_is_named(setting, tmp_path):  # noqa: F811
    """The row among those asked for, its size and its seed; in a worker as in this process."""
    member_MN = np.zeros((3, 40), bool)
    member_MN[1, :30] = True  # nobody and one's own: no step, so nothing can diverge
    wild = dataclasses.replace(setting, optim=WILD)
    for jobs in (1, 2):
        with pytest.raises(
            NumericalError, match=r"^subset 1 of 30 records, seed 8: training step: .*(nan|inf)"
        ):
            retrain_subsets(wild, member_MN, [7, 8, 9], tmp_path, jobs)


@pytest.mark.parametrize(("place", "name"), [(0, "target"), (1, "other target 1")])
def test_a_loss_that_is_not_finite_is_not_written(tmp_path, monkeypatch, place, name):
    """A NaN planted in the measurement of any target: coalition, target and record are named, no file is left."""
    run, folder = prepared(tmp_path, "second")
    measure, calls = generate.evaluate, []

    def planted(*given):
        nll_Q, tokens_Q = measure(*given)
        if len(calls) == place:
            nll_Q[2] = np.nan
        calls.append(1)
        return nll_Q, tokens_Q

    monkeypatch.setattr(generate, "evaluate", planted)
    with pytest.raises(
        NumericalError, match=rf"^coalition 3, seed 5: {name}: .*got nan for record 2 and 1 of"
    ):
        retrain(run, folder)
    assert not list((folder / "bank").glob("*.npz"))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_loss_that_is_not_finite_is_not_read(tmp_path, number):
    """Planted behind the run's back it is refused by file, with the run's key and with any; another key trains it anew."""
    run, folder = prepared(tmp_path)
    assert retrain(run, folder) == 0
    path = bank_file(folder, 1)
    content = dict(np.load(path))
    content["nll_Q"][2] = number
    np.savez(path, **content)
    for read in (
        lambda: read_bank(path, str(content["key"])), lambda: read_bank(path, None), lambda: load_utilities(folder),
        lambda: retrain(run, folder),
    ):  # fmt: skip
        with pytest.raises(ProxyError, match=r"bank/1.npz: expected finite losses, got 1 of 9"):
            read()
    assert read_bank(path, "another") is None
