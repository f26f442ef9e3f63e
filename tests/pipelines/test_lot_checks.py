"""The values of lots held against their own bank, on the asset's page."""

from pathlib import Path

import numpy as np
import pytest
from graph_commands import environment

from pipelines.describe import valuation as describe
from pipelines.results import latest
from pipelines.site import open_site
from pipelines.steps.owners import Bank
from valuation.bank import load_seeds


def test_the_page_shows_the_loss_without_each_lot_and_the_paths_by_value(tiny_home: Path) -> None:
    """Numbers from the bank's files themselves; a table, a picture and the seeds' agreement on the page."""
    site = open_site(tiny_home, None, environment(tiny_home)["DATAWORTH_SIZE"], None)
    valued, plan = (latest(site.home.results, name) for name in ("owner_values", "evaluation_plan"))
    assert valued is not None
    assert plan is not None
    found = Bank(site, valued, plan).checks()
    banks = load_seeds(tiny_home / "runs" / valued["run"])
    loss_C = np.mean([one.nll_CQ for one in banks], axis=0).sum(axis=1) / banks[0].tokens_Q.sum()
    of = dict(zip(banks[0].coalitions_C.tolist(), loss_C, strict=True))
    everybody = len(of) - 1
    lots = range(len(banks[0].groups))
    without = [of[everybody ^ 1 << lot] - of[everybody] for lot in lots]
    np.testing.assert_allclose(found.left_out.values_n, without, atol=1e-12)
    assert (found.best_first[0], found.best_first[-1]) == pytest.approx((of[0], of[everybody]))
    ranked = sorted(lots, key=lambda lot: -valued["groups"][lot]["value"])
    assert found.best_first[1] == pytest.approx(of[1 << ranked[0]])
    assert found.worst_first[1] == pytest.approx(of[1 << ranked[-1]])
    page = describe.owner_values(site, plan, valued)
    assert "lot-00" in str(page["loss without each lot, less the loss of all"])
    assert "Lots added and removed by value" in page
    assert page["rank correlation of values between seeds"].startswith("mean ")
