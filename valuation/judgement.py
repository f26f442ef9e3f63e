"""The judge that runs with every valuation: one call from scores to a verdict on them.

    scores ── are they of these records, queries and tokens? ──▶ LDS against retrained subsets, beside baselines and a random draw
                                                             ├▶ the same of the target as a whole, where in-run credit is judged too
                                                             ├▶ how far any score could come: the ceiling, from subsets of two seeds
                                                             ├▶ loss without each query's top records, against random ones
                                                             ├▶ removal and addition curves on a second held-out set
                                                             └▶ which records' values are distinct from zero

**The population is who was scored.** Scores of a sample are held against trainings on halves of that sample: a record that no
retraining could read can't be wrong, and a record that all retrainings read can't be right. Values are judged as they are
published: weighted by the queries' tokens.

Scores of other data are refused by name of what differs, and so is a target that stands in the training data: a text that was
trained on is foretold by looking it up. A method that isn't distinct from BM25 on this corpus is not worth its cost here, and
the verdict says so. Under `MIN_SUBSETS` subsets there is no verdict but INCONCLUSIVE.

*Ceiling*: an upper bound of what scores reach on average that are blind to a training's seed (`valuation.evaluation`); loose where queries
differ in noise. With one seed, the first `again` subsets are retrained under the next seed and the bound is that of one seed's losses; with
several it is that of their mean. It has an interval of its own, wide where few subsets are trained twice.

The random control has an interval at `CONTROL_LEVEL`: it stops whoever relies on the judge, and at 95 % it would do so in one
valuation of twenty without cause.

Cost: subsets x seeds + again + queries + random sets + 6 x shares x curve seeds small trainings, kept in the bank.

Legend: Q queries, N scored records, M subsets, K subsets trained again, R seeds, F shares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from valuation.curves import TopRemoval, curve, remove_top
from valuation.errors import EvaluationError
from valuation.evaluation import (
    LEVEL,
    Estimate,
    RecordValues,
    lds,
    lds_difference,
    predicted,
    record_values,
    reliability,
)
from valuation.heldout import refuse_overlap, texts
from valuation.influence.baselines import bm25, random
from valuation.influence.scores import Scores, TokenSet
from valuation.subsets import Setting, random_subsets, retrain_subsets, spread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from valuation.curves import Arm, Curve

MIN_SUBSETS = 10
"""Fewer can't be ranked into a verdict: of 9, one swap moves a rank correlation by up to 0.1."""
CONTROL_LEVEL = 0.999
FORMAT = 4
BM25, CONTROL = "bm25", "random"
ARMS: tuple[Arm, ...] = ("top", "bottom", "random")
Mode = Literal["remove", "add"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a judge may retrain; whole numbers, so that a run can name them."""

    subsets: int = 60
    """Half subsets, >= 2; under `MIN_SUBSETS` the verdict stays open."""
    seeds: int = 1
    """Retrainings of each subset, >= 1."""
    again: int = 0
    """Subsets retrained once more, for the ceiling: 2 .. subsets, or 0 = no ceiling. With 2 or more seeds all have been."""
    top_percent: int = 1
    """Share of the records that the top removal takes away."""
    top_queries: int | None = None
    """Queries whose top records are removed; None = all, 0 = the measure is off."""
    random_sets: int = 8
    """Random removals beside them, >= 1."""
    curve_percents: tuple[int, ...] = ()
    """Shares along the removal and addition curves; none = they are off."""
    curve_seeds: int = 3
    """Seeds of each curve, >= 1; one has no interval."""
    draws: int = 1000
    """Of the bootstrap, >= 1."""

    def __post_init__(self) -> None:
        least = {"subsets": 2, "seeds": 1, "random_sets": 1, "curve_seeds": 1, "draws": 1}
        short = {name: getattr(self, name) for name in least if getattr(self, name) < least[name]}
        shares = (self.top_percent, *self.curve_percents)
        if self.again and not (self.seeds == 1 and 2 <= self.again <= self.subsets):
            raise EvaluationError(
                f"again: expected 0, or with one seed 2 .. {self.subsets} subsets, got {self.again} with {self.seeds}"
            )
        if short or not all(0 < share < 100 for share in shares):
            raise EvaluationError(
                f"effort: expected at least {least} and shares within 1 .. 99 %, got {short} and {list(shares)}"
            )


@dataclass(frozen=True, slots=True)
class Arms:
    """A curve in its three arms."""

    mode: Mode
    """Removed from all, or added to nobody."""
    curves: dict[Arm, Curve]
    """Most valued first, least valued first, any order."""

    def against_random(self, arm: Arm) -> list[Estimate]:
        """How much higher the loss of an arm is than the random arm's at each share, paired by seed."""
        mine, blind = self.curves[arm], self.curves["random"]
        return [mine.difference(blind, float(share)) for share in mine.share_F]


@dataclass(frozen=True, slots=True)
class Ceiling:
    """An upper bound of the LDS that scores would have that knew the expected loss; met where all queries are equally noisy."""

    each: Estimate
    """Mean over queries."""
    whole: Estimate
    """Of the target as a whole."""
    subsets: int
    """Subsets with losses of several seeds."""
    seeds: int
    """How many."""

    @classmethod
    def of(cls, loss_RMQ: NDArray[np.float64], effort: Effort, seed: int) -> Self:
        """From losses of the same subsets under several seeds; of their mean, or of one where all but some subsets have one.

        Args:
            loss_RMQ: R >= 2 seeds.
            effort: says which of the two.
            seed: of the bootstrap.
        """

        def found(*, whole: bool) -> Estimate:
            generator = np.random.default_rng(seed)
            got = reliability(loss_RMQ, generator, effort.draws, whole=whole)
            return got.ceiling if effort.seeds > 1 else got.ceiling_one

        return cls(found(whole=False), found(whole=True), loss_RMQ.shape[1], len(loss_RMQ))


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a valuation run knows about its own scores."""

    method: str
    """The method that was judged."""
    lds: Estimate
    """Its linear datamodeling score."""
    beside: dict[str, Estimate]
    """LDS of everything else on the same retrainings: `BM25`, further baselines, and `CONTROL` last."""
    above_bm25: Estimate
    """LDS less BM25's, on the same draws."""
    whole: dict[str, Estimate]
    """LDS of the target as a whole, of the method first, of all that stands `beside`, and of what knows no single query."""
    ceiling: Ceiling | None
    """How high an LDS could be; None where no subset has losses of two seeds."""
    top: TopRemoval | None
    """Removal of each query's top records; None = off."""
    arms: tuple[Arms, ...]
    """Removal and addition curves; none = off."""
    values: RecordValues
    """Value per record as it is published, with flags."""
    told: dict[str, NDArray[np.float64]]
    """What each method foretells, [Q, M], or [1, M] of the target as a whole: the rows that the numbers rest on."""
    loss_RMQ: NDArray[np.float64]
    """Measured losses, summed nats."""
    again_KQ: NDArray[np.float64]
    """Those of the subsets that were retrained under another seed."""
    effort: Effort
    """How much was retrained."""
    seed: int
    """Of subsets, retrainings, bootstrap and control."""

    @property
    def control(self) -> Estimate:
        """A random draw's LDS at `CONTROL_LEVEL`; an interval without 0 says that the judge is broken."""
        return self.beside[CONTROL]

    @property
    def bm25(self) -> Estimate:
        """BM25's LDS."""
        return self.beside[BM25]

    @property
    def verdict(self) -> str:
        """See `verdict_of`."""
        return verdict_of(self.effort.subsets, self.lds, self.above_bm25, self.control)

    def document(self) -> dict[str, Any]:
        """JSON without floats, for a result file that is hashed."""
        sizes = {
            "records": len(self.values.value_N), "queries": self.loss_RMQ.shape[2], "subsets": self.effort.subsets, "seeds": self.effort.seeds,
            "again": self.effort.again, "seed": self.seed, "draws": self.effort.draws, "distinct_from_zero": int(self.values.distinct_N.sum()),
        }  # fmt: skip
        return sizes | {
            "format": FORMAT,
            "method": self.method,
            "verdict": self.verdict,
            "lds": _text(self.lds),
            "beside": {name: _text(found) for name, found in self.beside.items()},
            "above_bm25": _text(self.above_bm25),
            "whole": {name: _text(found) for name, found in self.whole.items()},
            "ceiling": "none" if self.ceiling is None else {
                "each": _text(self.ceiling.each), "whole": _text(self.ceiling.whole), "subsets": self.ceiling.subsets, "seeds": self.ceiling.seeds,
            },
            "top": "none" if self.top is None else _text(self.top.gap) | {"removed": self.top.removed, "queries": len(self.top.gap_Q)},
            "curves": [_curves(arms) for arms in self.arms],
        }  # fmt: skip


def verdict_of(subsets: int, own: Estimate, above_bm25: Estimate, control: Estimate) -> str:
    """INCONCLUSIVE (too few subsets to tell), INVALID (the control isn't 0), PASS (above 0 and above BM25), FAIL (below one), INCONCLUSIVE.

    Args:
        subsets: retrained half subsets.
        own: LDS of the method.
        above_bm25: the same less BM25's.
        control: LDS of a random draw.
    """
    if subsets < MIN_SUBSETS:
        return "INCONCLUSIVE"
    if control.distinct:
        return "INVALID"
    if own.low > 0 and above_bm25.low > 0:
        return "PASS"
    if own.high < 0 or above_bm25.high < 0:
        return "FAIL"
    return "INCONCLUSIVE"


def estimate_of(text: Mapping[str, str]) -> Estimate:
    """An estimate from its form in a document."""
    return Estimate(*(float(text[name]) for name in ("estimate", "low", "high", "level")))


def _text(estimate: Estimate) -> dict[str, Any]:
    return {name: f"{getattr(estimate, name):.6f}" for name in ("estimate", "low", "high", "level")}


def _curves(arms: Arms) -> dict[str, Any]:
    one = arms.curves["random"]
    return {
        "mode": arms.mode,
        "percents": [round(100 * share) for share in one.share_F],
        "loss": {
            arm: [[f"{loss:.6f}" for loss in row] for row in found.loss_RF.tolist()]
            for arm, found in arms.curves.items()
        },
        "against_random": {
            arm: [_text(gap) for gap in arms.against_random(arm)] for arm in ("top", "bottom")
        },
    }


def judge(  # noqa: PLR0913 - a judgement has that many parts
    scores: Scores,
    setting: Setting,
    directory: Path,
    effort: Effort,
    *,
    seed: int = 0,
    test: Setting | None = None,
    others: Mapping[str, NDArray[np.float64]] | None = None,
    whole: Mapping[str, NDArray[np.float64]] | None = None,
    jobs: int = 1,
) -> Judgement:
    """Hold scores against retrained subsets of the records that were scored.

    Args:
        scores: of all live records of the training tokens or of a sample, for any live records of the target.
        setting: what the retrainings share: tokens, model, optimiser.
        directory: folder of the bank.
        effort: how much to retrain.
        seed: of subsets, retrainings, bootstrap and control.
        test: the same with the held-out set that curves are measured on; None = `setting`.
        others: further methods' scores_QN for the same records and queries, such as baselines, by name; one called
            `BM25` takes the place of BM25 over tokens, for a vocabulary whose tokens are no words.
        whole: values [N] of the same records for the target as a whole, by name, such as in-run credits, which know no single query.
        jobs: processes.

    Returns:
        The judgement.

    Raises:
        GradientError: scores of other records, queries or tokenizer.
        EvaluationError: scores of another shape, a name twice, or values that are all 0.
        HeldOutError: a record of the target or of `test` that is trained on.
        ProxyError: records or queries that the tokens don't have.
    """
    train, queries = judged_sets(scores, setting, test)
    size, records_N = setting.stores()[0].size, scores.train_index_N
    generator = np.random.default_rng(seed)
    half_MN = random_subsets(effort.subsets, len(records_N), 0.5, generator)
    methods = {scores.method: scores.scores_QN, BM25: bm25(train, queries).scores_QN}
    methods |= {**(others or {}), CONTROL: random(train, queries, generator).scores_QN}
    blind = {name: np.asarray(value_N)[None] for name, value_N in (whole or {}).items()}
    if empty := sorted(name for name, value_1N in blind.items() if not value_1N.any()):
        raise EvaluationError(f"whole: expected values other than 0, got none of {empty}; they rank nothing")  # fmt: skip
    if twice := sorted(set(methods) & set(blind)):
        raise EvaluationError(f"whole: expected names of their own, got {twice} twice")
    told = {name: predicted(scores_QN, half_MN) for name, scores_QN in (methods | blind).items()}
    in_store_MN = spread(half_MN, records_N, size)
    member_MN = np.concatenate([in_store_MN] * effort.seeds + [in_store_MN[: effort.again]])
    seed_M = [seed + number for number in range(effort.seeds) for _ in half_MN]
    seed_M += [seed + 1] * effort.again
    found = retrain_subsets(setting, member_MN, seed_M, directory, jobs).of(scores.query_index_Q)
    loss_RMQ = found.nll_MQ[: effort.seeds * effort.subsets].reshape(
        effort.seeds, effort.subsets, -1
    )
    again_KQ = found.nll_MQ[effort.seeds * effort.subsets :]
    loss_MQ = loss_RMQ.mean(0)

    def judged(name: str, *, whole: bool = False) -> Estimate:
        level = CONTROL_LEVEL if name == CONTROL else LEVEL
        scores_QN = (
            methods[name] if name in methods else np.repeat(blind[name], loss_MQ.shape[1], 0)
        )
        draw = np.random.default_rng(seed)
        return lds(scores_QN, half_MN, loss_MQ, draw, effort.draws, level, whole=whole).lds

    estimates = {name: judged(name) for name in methods}
    repeated_RKQ = loss_RMQ if effort.seeds > 1 else np.stack([loss_MQ[: effort.again], again_KQ])
    names = [name for name in methods if name != CONTROL]
    return Judgement(
        method=scores.method,
        lds=estimates.pop(scores.method),
        beside=estimates,
        above_bm25=lds_difference(
            scores.scores_QN, methods[BM25], half_MN, loss_MQ, np.random.default_rng(seed), effort.draws
        ),
        whole={name: judged(name, whole=True) for name in (*names, *blind, CONTROL)},
        ceiling=Ceiling.of(repeated_RKQ, effort, seed) if repeated_RKQ.shape[1] else None,
        top=_top(scores, setting, directory, effort, seed, jobs),
        arms=_arms(scores, test or setting, directory, effort, seed, jobs),
        values=record_values(scores.scores_QN / queries.labels_N[:, None], queries.labels_N.astype(np.float64)),
        told=told,
        loss_RMQ=loss_RMQ,
        again_KQ=again_KQ,
        effort=effort,
        seed=seed,
    )  # fmt: skip


def judged_sets(
    scores: Scores, setting: Setting, test: Setting | None = None
) -> tuple[TokenSet, TokenSet]:
    """The scored records and queries as the bank's tokens have them.

    Args:
        scores: scores.
        setting: names the tokens.
        test: names the second held-out set, where there is one.

    Raises:
        GradientError: they are not those that the scores are bound to.
        EvaluationError: an index that the tokens don't have.
        HeldOutError: a query, or a record of `test`, stands among the records.
    """
    store, target = setting.stores()
    for what, index, size in (
        ("records", scores.train_index_N, store.size), ("queries", scores.query_index_Q, target.size)
    ):  # fmt: skip
        if len(index) and not 0 <= index.min() <= index.max() < size:
            raise EvaluationError(f"{what}: expected indices in 0 .. {size - 1}, got {index.max()}")
    length = setting.batch.length
    train = TokenSet.of(store, length, scores.train_index_N)
    queries = TokenSet.of(target, length, scores.query_index_Q)
    scores.require(
        replace(
            scores.binding, tokens_digest=train.digest(), query_digest=queries.digest(),
            tokenizer_digest=train.tokenizer_digest,
        )
    )  # fmt: skip
    held_out = {"target": queries.texts()}
    if test is not None:  # before the first training, not before the last
        held_out["test"] = texts(test.stores()[1])
    refuse_overlap(train.texts(), held_out)
    return train, queries


def _top(
    scores: Scores, setting: Setting, directory: Path, effort: Effort, seed: int, jobs: int
) -> TopRemoval | None:
    if effort.top_queries == 0:
        return None
    chosen = slice(effort.top_queries)  # the queries are a random sample already
    return remove_top(
        setting, scores.scores_QN[chosen], effort.top_percent / 100, seed, directory, random_sets=effort.random_sets,
        index_N=scores.train_index_N, query_index_Q=scores.query_index_Q[chosen], jobs=jobs,
    )  # fmt: skip


def _arms(
    scores: Scores, setting: Setting, directory: Path, effort: Effort, seed: int, jobs: int
) -> tuple[Arms, ...]:
    if not effort.curve_percents:
        return ()
    shares = [percent / 100 for percent in effort.curve_percents]
    seeds = [seed + again for again in range(effort.curve_seeds)]
    modes: tuple[Mode, ...] = ("remove", "add")
    return tuple(
        Arms(
            mode,
            {
                arm: curve(
                    setting, scores.totals_N(), arm, shares, seeds, directory, mode=mode,
                    index_N=scores.train_index_N, jobs=jobs,
                )
                for arm in ARMS
            },
        )
        for mode in modes
    )  # fmt: skip
