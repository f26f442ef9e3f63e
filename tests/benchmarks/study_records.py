"""Do values of *records* from small proxies hold for a model ten times as large? `make accept STUDY=owners-transfer-records`.

The records, target, proxies and larger model (7.2 million parameters) of `owners-transfer`. Each owner's 160 records are cut into four lots of 40.
A proxy scores all 800 records at once, by EK-FAC influence on each record of the target at the weights that one training on all of them left. The
larger model is retrained on 28 halves of the 20 lots, one pass each, from common initial weights in a common order; the scores of a half's records are
added up and held against how far it brings the target's loss down:

    per record of the target    the linear datamodeling score on the larger model's losses, interval over target records and halves
    for the whole target        Spearman over halves of the summed scores and the fall of the target's loss, interval over halves
    beside them                 the same of the proxy's own retrained losses (what no method of scoring it could be blamed for), and each proxy on its own losses

One seed for all: what another seed of the larger model would say is in no interval. Retrainings stand in the bank; a killed study goes on.
"""

from dataclasses import replace

import numpy as np
from figures import record
from setting import BANK, OPTIM, setting
from study_transfer import BATCH, LARGE, PACKAGES, PROXIES, RECORDS, corpora

from valuation.evaluation import lds, spearman_rows
from valuation.influence import ekfac
from valuation.influence.pairing import Pass
from valuation.influence.scores import TokenSet
from valuation.subsets import fit_subset, retrain_subsets

LOTS_EACH, HALVES, SEED = 4, 28, 0
COMMAND = "make accept STUDY=owners-transfer-records"


def halves(num_records, size=RECORDS // LOTS_EACH):
    """Membership [M, N] of half of the lots; a lot is `size` records of one owner, as they were drawn."""
    lot_N = np.arange(num_records) // size
    num = int(lot_N.max()) + 1
    rng = np.random.default_rng(20261203)
    chosen_MK = rng.random((HALVES, num)).argsort(1).argsort(1) < num // 2
    return chosen_MK[:, lot_N]


def config_of(found, model):
    """One pass, as `owners-transfer` trains a model."""
    return setting(found[model.tokenizer], epochs=1, model=model.spec, optim=replace(OPTIM, lr=model.lr), batch=BATCH)  # fmt: skip


def scores(config):
    """Influence [Q, N] of every record on every record of the target, at weights that all records left."""
    train, target = config.stores()
    model = fit_subset(config, np.ones(train.size, bool), SEED).model
    longest = int(max(train.lengths_N.max(), target.lengths_N.max()))
    return ekfac.scores(model, TokenSet.of(train, longest), TokenSet.of(target, longest), how=Pass(rows=32)).scores_QN  # fmt: skip


def over_halves(one_M, other_M, draws=2000):
    """Spearman over halves with a bootstrap interval."""
    rng, found = np.random.default_rng(13), []
    for _ in range(draws):
        at = rng.integers(len(one_M), size=len(one_M))
        if np.ptp(one_M[at]) and np.ptp(other_M[at]):
            found.append(spearman_rows(one_M[None, at], other_M[None, at]).item())
    estimate = spearman_rows(one_M[None], other_M[None]).item()
    return [float(x) for x in (estimate, *np.percentile(found, [2.5, 97.5]))]


def figure(name, told, *, bar, holds, what, **more):
    """A line of this study."""
    estimate, low, high = told
    record(
        "accept.jsonl", f"valuation.records.transfer{name}", packages=PACKAGES, kind="hypothesis", seeds=[SEED], n=HALVES, unit="1", what=what,
        estimate=estimate, low=low, high=high, level=0.95, spread="bootstrap over halves (and target records, where there are several)", bar=bar,
        holds=holds, command=COMMAND, **{"note": "", **more},
    )  # fmt: skip


def study():
    """The larger model on all halves, then every proxy against it."""
    found, member_KN, _ = corpora()
    member_MN = halves(member_KN.shape[1])
    large = retrain_subsets(config_of(found, LARGE), member_MN, SEED, BANK)
    large_MQ = large.nll_MQ
    fall_M, table = -large_MQ.sum(1), {}
    print("large", large.mean_M.round(4), flush=True)  # noqa: T201 - a long study says that it lives
    for name, model in PROXIES.items():
        config = config_of(found, model)
        scores_QN, own_MQ = scores(config), retrain_subsets(config, member_MN, SEED, BANK).nll_MQ
        told_M = scores_QN.sum(0) @ member_MN.T
        per_record = {
            label: lds(scores_QN, member_MN, loss_MQ, np.random.default_rng(7)).lds
            for label, loss_MQ in (("lds", large_MQ), ("lds_own", own_MQ))
        }
        table[name] = {
            "rho": over_halves(told_M, fall_M), "rho_own": over_halves(told_M, -own_MQ.sum(1)),
            "retrained": over_halves(-own_MQ.sum(1), fall_M),
            **{label: [e.estimate, e.low, e.high] for label, e in per_record.items()},
        }  # fmt: skip
        print(name, table[name], flush=True)  # noqa: T201
    first = table["0.05M"]
    many = "records' influence scores of the smallest proxy, added up over a half"
    figure(
        "", first["rho"], bar=">= 0.8", holds=first["rho"][0] >= 0.8, table=table,
        what=f"Spearman correlation of {many}, with the fall of the target's loss when a 7.2M model is retrained on it, 28 halves of 20 lots",
        note="; ".join(f"{n}: {r['rho'][0]:.2f} ({r['rho'][1]:.2f} to {r['rho'][2]:.2f})" for n, r in table.items()),
    )  # fmt: skip
    figure(
        ".lds", first["lds"], bar="low > 0", holds=first["lds"][1] > 0,
        what=f"linear datamodeling score of {many}, on the 7.2M model's losses of 96 records of the target",
        note=f"on the proxy's own losses {first['lds_own'][0]:.2f} ({first['lds_own'][1]:.2f} to {first['lds_own'][2]:.2f})",
    )  # fmt: skip
    figure(
        ".retrained", first["retrained"], bar=">= 0.8", holds=first["retrained"][0] >= 0.8,
        what="Spearman correlation over halves of the smallest proxy's own retrained losses of the target with the 7.2M model's: what a perfect score of the proxy would reach",
        note="; ".join(f"{n}: {r['retrained'][0]:.2f}" for n, r in table.items()),
    )  # fmt: skip
