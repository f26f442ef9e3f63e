"""Games whose players are owners, played to the end: every coalition is retrained, so no value shares the error of a sample.

    V(S) = -Σ_q nll_q(S) / Σ_q t_q        φ = exact Shapley values over all 2^K coalitions

One training serves all targets: their records stand in one token folder and are told apart afterwards (`Game.at`). A seed
draws the initial weights and the order. Intervals are bootstraps over target records and seeds, and over owners where the
statistic is a correlation of owners.
"""

# ruff: noqa: N802 - shape suffixes in names (STYLE 2)
import hashlib
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
from corpora import PINNED, STATE, write
from setting import BANK, OPTIM, setting

from trainer.spec import BatchSpec
from valuation import exact_shapley
from valuation.subsets import retrain_subsets

BATCH = BatchSpec(rows=16, length=64)


@dataclass(frozen=True)
class Game:
    """Gains of every player on every target record, by seed."""

    gains_RKQ: np.ndarray
    tokens_Q: np.ndarray
    total_RQ: np.ndarray

    def at(self, inside_Q):
        """The same for some target records only."""
        return Game(self.gains_RKQ[:, :, inside_Q], self.tokens_Q[inside_Q], self.total_RQ[:, inside_Q])  # fmt: skip

    @property
    def values_RK(self):
        """Nats per target token."""
        return self.gains_RKQ.sum(2) / self.tokens_Q.sum()

    def draws(self, count=2000, seed=11):
        """Values [B, K] of bootstrap draws over target records and seeds."""
        rng = np.random.default_rng(seed)
        seeds, _, targets = self.gains_RKQ.shape
        found = []
        for _ in range(count):
            at_Q = rng.integers(targets, size=targets)
            mean_KQ = self.gains_RKQ[rng.integers(seeds, size=seeds)].mean(0)
            found.append(mean_KQ[:, at_Q].sum(1) / self.tokens_Q[at_Q].sum())
        return np.array(found)

    def half_K(self):
        """Half-width of each value's 95 % interval."""
        low_K, high_K = np.percentile(self.draws(), [2.5, 97.5], axis=0)
        return (high_K - low_K) / 2


def stored(name, rows, target, coder, vocab, end):
    """Token folders of (owner, text) and of the target, checked against their pin.

    Raises:
        ValueError: the tokens are not the pinned ones.
    """
    folder = STATE / f"owners-{name}"
    digest = {
        part: write(folder / part, [(o, coder(t)) for o, t in found], vocab=vocab, end=end)
        for part, found in (("train", rows), ("target_value", target))
    }
    short = {part: value[:16] for part, value in digest.items()}
    if (expected := PINNED.get(folder.name)) != short:
        raise ValueError(
            f"{folder.name}: expected the token digests {expected}, got {short}; the sources are other ones than those "
            "that the figures are of"
        )
    return SimpleNamespace(name=name, folder=folder, digest=digest, path=lambda part: folder / part)


def nll(found, member_KN, masks, seed, spec, lr=OPTIM.lr, batch=BATCH):
    """Summed nats [C, Q] of each target record after training on each coalition, and the target's tokens [Q]."""
    bits_CK = np.asarray(masks)[:, None] >> np.arange(len(member_KN)) & 1
    config = setting(found, epochs=1, model=spec, optim=replace(OPTIM, lr=lr), batch=batch)
    made = retrain_subsets(config, (bits_CK @ member_KN.astype(int)) > 0, seed, BANK)
    return made.nll_MQ, made.tokens_Q


def play(found, member_KN, seeds, spec, lr=OPTIM.lr):
    """The game of all coalitions."""
    players, gains, totals = len(member_KN), [], []
    for seed in seeds:
        nll_CQ, tokens_Q = nll(found, member_KN, range(1 << players), seed, spec, lr)
        gains.append(-exact_shapley(nll_CQ, players))
        totals.append(nll_CQ[0] - nll_CQ[-1])
        print(found.name, "seed", seed, "of", list(seeds), flush=True)  # noqa: T201 - a long study says that it lives
    return Game(np.array(gains), tokens_Q, np.array(totals))


def by_owner(rows, names):
    """Which records are whose, [K, N]."""
    return np.array([[owner == name for owner, _ in rows] for name in names])


def drawn(texts, count, length, rng):
    """`count` different excerpts of `length` characters, from all of the texts alike."""
    found = sorted({t[i : i + length] for t in texts for i in range(0, len(t) - length + 1, length)})  # fmt: skip
    # By digest, so that the draw depends on the texts and the generator and on no file's order.
    found.sort(key=lambda text: hashlib.sha256(text.encode()).digest())
    return [found[i] for i in rng.permutation(len(found))[:count]]


def said(names, mean_K, half_K):
    """Values with intervals, in words."""
    return ", ".join(f"{n} {v:.4f} ± {h:.4f}" for n, v, h in zip(names, mean_K, half_K, strict=True))  # fmt: skip
