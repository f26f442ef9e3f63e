"""Planted records: `make accept STUDY=detection-sotu` and `detection-peps`.

Values are EK-FAC's, of models trained on everything, as the mean over target_value.
"""

import numpy as np
from corpora import LENGTH, STATE, corpus, encode, excerpts, write
from figures import record
from setting import setting

from valuation.detection import detection_auc, shuffled_tokens
from valuation.influence import dot, ekfac
from valuation.influence.pairing import Pass
from valuation.influence.scores import TokenSet
from valuation.subsets import fit_subset

HOW = Pass(rows=32)
PACKAGES = ("torch", "numpy", "scipy")
VALUE_SEEDS = (100, 101)
PLANTED = 32


def edited(tokens, rng, share=0.1):
    """A copy in which a share of the characters is another printable one."""
    changed = tokens.copy()
    places = rng.permutation(len(tokens) - 1)[: round(share * (len(tokens) - 1))]
    changed[places] = rng.integers(32, 127, len(places))
    return changed


def token_sets(config):
    """Records and queries of a setting."""
    return [TokenSet.of(store, config.batch.length) for store in config.stores()]


def values(config, seeds=VALUE_SEEDS):
    """EK-FAC's mean over the queries, averaged over models of several seeds."""
    train, queries = token_sets(config)
    everyone = np.ones(config.stores()[0].size, bool)
    found = [
        ekfac.scores(fit_subset(config, everyone, seed).model, train, queries, how=HOW).totals_N()
        for seed in seeds
    ]
    return np.mean(found, axis=0)


def detection(name):
    """AUC of noise, shuffled text and edited copies among real records."""
    base = corpus(name, 256, 24)
    rng = np.random.default_rng([1, *name.encode()])
    clean = excerpts(name, "train", 256, 0)
    picked = rng.permutation(256)
    # Printable characters only: rare ids would be found without a language model.
    noise = [
        ("noise", encode("".join(map(chr, rng.integers(32, 127, LENGTH - 1)))))
        for _ in range(PLANTED)
    ]
    shuffled = [("shuffled", shuffled_tokens(clean[i][1], rng)) for i in picked[:PLANTED]]
    copied = picked[PLANTED : 2 * PLANTED]
    copies = [("copies", edited(clean[i][1], rng)) for i in copied]
    folder = STATE / f"{base.folder.name}-planted"
    digest = write(folder, clean + noise + shuffled + copies)
    config = setting(base, train=folder, train_digest=digest)
    value_N = values(config)
    train, _ = token_sets(config)
    model = fit_subset(config, np.ones(len(value_N), bool), VALUE_SEEDS[0]).model
    likeness_NN = dot.scores(model, train, train, cosine=True, how=HOW).scores_QN
    np.fill_diagonal(likeness_NN, -1)
    kind_N = np.repeat([0, 1, 2, 3], [256, PLANTED, PLANTED, PLANTED])
    for number, label in ((1, "noise"), (2, "shuffled")):
        chosen_N = (kind_N == 0) | (kind_N == number)
        found = detection_auc(value_N[chosen_N], kind_N[chosen_N] == number)
        _figure(name, f"detection.{name}.{label}", found, label)
    chosen_N = (kind_N == 0) | (kind_N == 3)
    planted_N = (kind_N == 3) | np.isin(np.arange(len(kind_N)), copied)
    found = detection_auc(-likeness_NN[chosen_N][:, chosen_N].max(1), planted_N[chosen_N])
    _figure(name, f"detection.{name}.duplicates", found, "edited copies and their originals")


def _figure(name, label, found, what):
    record(
        "accept.jsonl", f"valuation.{label}", estimate=found.estimate, low=found.low, high=found.high, level=found.level,
        unit="AUC", n=288, seeds=list(VALUE_SEEDS), spread="Newcombe's interval over records", what=what, bar="low > 0.5",
        kind="requirement", holds=found.low > 0.5, packages=PACKAGES, note="", command=f"make accept STUDY=detection-{name}",
    )  # fmt: skip
