"""What the children of the multi-process tests call; importable by name."""

import numpy as np
from valuation_models import tiny_model, token_set

from trainer.layout import Layout
from trainer.mesh import init_mesh
from valuation import passes
from valuation.influence import (
    datainf,
    dot,
    ekfac,
    ekfac_cg,
    fisher,
    kfac,
    less,
    logra,
    tracin,
    trak,
)
from valuation.influence.pairing import Pass
from valuation.projection import OneSided, TwoSided


def all_scores(world):
    """Every method's scores in this process, as one of `world`."""
    mesh = init_mesh(Layout(dp_replicate=world))
    how, rng = Pass(rows=2, mesh=mesh), np.random.default_rng(0)
    model, train, queries = tiny_model(), token_set(rng, 14), token_set(rng, 3, first=100)
    moments = {name: p.detach().square() + 0.1 for name, p in model.named_parameters()}
    adam = less.AdamCheckpoint(
        model=model, lr=0.1, first=moments, second=moments, count=3, betas=(0.9, 0.99), eps=1e-8
    )
    found = {
        "dot": dot.scores(model, train, queries, how=how),
        "cosine": dot.scores(model, train, queries, cosine=True, how=how),
        "tracin": tracin.scores(
            [model, tiny_model(seed=4)], train, queries, weights=[1, 2], how=how
        ),
        "trak": trak.scores([model], train, queries, projection=OneSided(0, 32), how=how),
        "datainf": datainf.scores(model, train, queries, how=how),
        "logra": logra.scores(model, train, queries, projection=TwoSided(0, 3, 3), how=how),
        "fisher": fisher.scores(model, train, queries, how=how),
        "kfac": kfac.scores(model, train, queries, how=how),
        "ekfac": ekfac.scores(model, train, queries, how=how),
        "sampled": ekfac.scores(model, train, queries, generator=np.random.default_rng(1), how=how),
        "ekfac_cg": ekfac_cg.scores(model, train, queries, steps=3, how=how),
        "less": less.scores([adam], train, queries, how=how),
    }
    return {name: scores.scores_QN for name, scores in found.items()}


def run_pass(run, directory):
    """`valuation.passes.run` with a module-level name, for the children."""
    return passes.run(run, directory)
