"""The judge that runs with every valuation: one call from scores to a verdict on them.

    scores ── are they of these records, queries and tokens? ──▶ LDS against M retrained subsets, beside BM25's and a random draw's
                                                             ├▶ loss without each query's top records, against random ones
                                                             └▶ which records' values are distinct from zero

Scores of other data are refused by name of what differs, and so is a target that stands in the training data: a text that was
trained on is foretold by looking it up. A method that isn't distinct from BM25 on this corpus is not worth its cost here, and
the verdict says so.

Cost: M + Q + 8 small trainings, kept in the bank.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from valuation.curves import TopRemoval, remove_top
from valuation.errors import EvaluationError
from valuation.evaluation import (
    Estimate,
    RecordValues,
    lds,
    lds_difference,
    record_values,
)
from valuation.influence.baselines import bm25, random
from valuation.influence.scores import Scores, TokenSet
from valuation.subsets import Setting, random_subsets, retrain_subsets

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

MIN_SUBSETS = 10


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a valuation run knows about its own scores."""

    method: str
    """The method that was judged."""
    lds: Estimate
    """Its linear datamodeling score."""
    bm25: Estimate
    """BM25's, on the same retrainings."""
    control: Estimate
    """A random draw's; an interval without 0 says that the judge is broken."""
    above_bm25: Estimate
    """LDS less BM25's, on the same draws."""
    top: TopRemoval
    """Removal of each query's top records."""
    values: RecordValues
    """Mean over queries per record, with flags."""
    num_subsets: int
    """Retrainings behind the LDS."""
    seed: int
    """Of the retrainings."""

    @property
    def verdict(self) -> str:
        """INVALID (the control isn't 0), PASS (above 0 and above BM25), FAIL (below one of them), INCONCLUSIVE."""
        if self.control.distinct:
            return "INVALID"
        if self.lds.low > 0 and self.above_bm25.low > 0:
            return "PASS"
        if self.lds.high < 0 or self.above_bm25.high < 0:
            return "FAIL"
        return "INCONCLUSIVE"

    def document(self) -> dict[str, Any]:
        """JSON without floats, for a result file that is hashed."""

        def text(estimate: Estimate) -> dict[str, str]:
            return {
                name: f"{getattr(estimate, name):.6f}"
                for name in ("estimate", "low", "high", "level")
            }

        return {
            "format": 1,
            "method": self.method,
            "verdict": self.verdict,
            "lds": text(self.lds),
            "bm25": text(self.bm25),
            "control": text(self.control),
            "above_bm25": text(self.above_bm25),
            "top_gap": text(self.top.gap),
            "top_removed": self.top.removed,
            "records": len(self.values.value_N),
            "distinct_from_zero": int(self.values.distinct_N.sum()),
            "subsets": self.num_subsets,
            "seed": self.seed,
        }


def judge(
    scores: Scores,
    setting: Setting,
    directory: Path,
    *,
    num_subsets: int = 60,
    top_share: float = 0.01,
    seed: int = 0,
    terms: Callable[[Sequence[int]], Sequence[Hashable]] | None = None,
    jobs: int = 1,
) -> Judgement:
    """Hold scores against retrained subsets.

    Args:
        scores: of all live records of the training tokens, for all live records of the target.
        setting: what the retrainings share: tokens, model, optimiser.
        directory: folder of the bank.
        num_subsets: half subsets to retrain, >= 10.
        top_share: share of records that the top removal takes away.
        seed: of subsets, retrainings, bootstrap and control.
        terms: what a word is for BM25, see `valuation.influence.baselines`.
        jobs: processes.

    Returns:
        The judgement.

    Raises:
        GradientError: scores of other records, queries or tokenizer.
        EvaluationError: too few subsets, a tombstone among the records, or a target record that stands in the training data.
    """
    if num_subsets < MIN_SUBSETS:
        raise EvaluationError(
            f"num_subsets: expected at least {MIN_SUBSETS}, got {num_subsets}; a rank correlation over fewer says nothing"
        )
    train, queries = (TokenSet.of(store, setting.batch.length) for store in setting.stores())
    scores.require(
        replace(
            scores.binding, tokens_digest=train.digest(), query_digest=queries.digest(),
            tokenizer_digest=train.tokenizer_digest,
        )
    )  # fmt: skip
    refuse_overlap(train, queries)
    size = setting.stores()[0].size
    if size != len(train.records):
        raise EvaluationError(
            f"records: expected tokens without erased records, got {size - len(train.records)} of them; rebuild the tokens"
        )
    generator = np.random.default_rng(seed)
    member_MN = random_subsets(num_subsets, size, 0.5, generator)
    losses = retrain_subsets(setting, member_MN, seed, directory, jobs)
    loss_MQ = losses.nll_MQ
    words = bm25(train, queries, terms=terms).scores_QN
    blind = random(train, queries, generator).scores_QN

    def judged(scores_QN: Any) -> Estimate:
        return lds(scores_QN, member_MN, loss_MQ, np.random.default_rng(seed)).lds

    return Judgement(
        method=scores.method,
        lds=judged(scores.scores_QN),
        bm25=judged(words),
        control=judged(blind),
        above_bm25=lds_difference(scores.scores_QN, words, member_MN, loss_MQ, np.random.default_rng(seed)),
        top=remove_top(setting, scores.scores_QN, top_share, seed, directory, jobs=jobs),
        values=record_values(scores.scores_QN),
        num_subsets=num_subsets,
        seed=seed,
    )  # fmt: skip


def refuse_overlap(train: TokenSet, queries: TokenSet) -> None:
    """Refuse a held-out set that stands in the training data.

    Args:
        train: training records.
        queries: held-out records.

    Raises:
        EvaluationError: records with the same tokens; names the first and counts them.
    """

    def prints(tokens: TokenSet) -> list[bytes]:
        return [
            hashlib.sha256(np.ascontiguousarray(row, dtype="<u4").tobytes()).digest()
            for *_, row in tokens.records
        ]

    known = set(prints(train))
    found = [
        index
        for index, p in zip(queries.index_N.tolist(), prints(queries), strict=True)
        if p in known
    ]
    if found:
        raise EvaluationError(
            f"target: expected texts that are not trained on, got {len(found)} of {len(queries.records)} that are, "
            f"the first at index {found[0]}; take them out of the target"
        )
