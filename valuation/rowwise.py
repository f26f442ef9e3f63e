"""What a method keeps of one block of records, and how scores follow once every record has its row.

`valuation.passes` writes a row of numbers per record, block by block, so that a killed pass goes on where it was:

    method                        row of record n                                scores
    dot, kfac, ekfac, ...         <H^-1 g_q, g_n> for every query                the rows
    tracin, less                  sum over checkpoints of lr <g_q, step of n>    the rows
    trak, logra                   projected gradients, of every model            ridge products (`influence.features`)
    fisher                        <g_n, g_m> for every record, <g_n, g_q>        one linear system (`influence.fisher`)

A block's rows depend on nothing but the block, so neither the number of processes nor a kill changes a bit of them.

Legend: Q queries, N records, W numbers per record, n records of one block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from valuation.capture import Capture
from valuation.gradients import Segments, captured_pass
from valuation.influence.features import features, ridge_check, ridge_products
from valuation.influence.fisher import solved
from valuation.influence.less import step_dots
from valuation.influence.pairing import BLOCK_BYTES, Pass, as_cosines, gradient_blocks, pair
from valuation.routes import formed_dots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from valuation.capture import Groups
    from valuation.influence.less import AdamCheckpoint
    from valuation.influence.pairing import Left
    from valuation.influence.scores import TokenSet
    from valuation.projection import OneSided, TwoSided

MAX_FISHER_BLOCK = 64
"""Records of a block of the kernel: each block passes over all records once, and is lost whole by a kill."""


class Rows(Protocol):
    """A method, block by block."""

    @property
    def width(self) -> int:
        """W."""
        ...

    def block(self, block: range) -> NDArray[np.float64]:
        """The rows of a block's records, [n, W]; zeros for a record that predicts nothing."""
        ...

    def scores(self, values_NW: NDArray[np.float64]) -> NDArray[np.float64]:
        """scores_QN of all rows, in one process."""
        ...


def _passed(
    model: nn.Module, capture: Capture, train: TokenSet, block: range, into: NDArray[np.float64],
    made: Callable[[Groups, NDArray[np.int64]], NDArray[np.float64]],
) -> None:  # fmt: skip
    """One pass over a block; `made(groups, places)` gives the rows of the records that predict something."""
    batch = train.batch(block)
    if batch.num_labels:
        nll_BT = captured_pass(model, batch, capture)
        groups = Segments.of(batch).groups(nll_BT.device)
        places = np.searchsorted(train.index_N[block.start : block.stop], groups.index_N)
        into[places] = made(groups, places)


@dataclass(slots=True)
class PairRows:
    """<left_q, g_n>, added up over models with a weight each."""

    models: Sequence[nn.Module]
    train: TokenSet
    lefts: Sequence[Left]
    """The queries' side at each model."""
    weights: Sequence[float] = (1.0,)

    @property
    def width(self) -> int:
        """Q."""
        return len(next(iter(self.lefts[0].values())))

    def block(self, block: range) -> NDArray[np.float64]:
        """See `Rows`."""
        total = np.zeros((len(block), self.width))
        for model, left, weight in zip(self.models, self.lefts, self.weights, strict=True):
            capture, rows = Capture(model, frozenset(left)), np.zeros_like(total)

            def dots(groups: Groups, _: object, capture: Capture = capture, left: Left = left) -> NDArray[np.float64]:  # fmt: skip
                return formed_dots(capture, groups, left).T.cpu().numpy()

            _passed(model, capture, self.train, block, rows, dots)
            total += weight * rows
        return total

    def scores(self, values_NW: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Rows`."""
        return values_NW.T


@dataclass(slots=True)
class LessRows:
    """cos(g_q, Adam step of n), added up over checkpoints with their learning rates."""

    checkpoints: Sequence[AdamCheckpoint]
    train: TokenSet
    lefts: Sequence[Left]

    @property
    def width(self) -> int:
        """Q."""
        return len(next(iter(self.lefts[0].values())))

    def block(self, block: range) -> NDArray[np.float64]:
        """See `Rows`."""
        total = np.zeros((len(block), self.width))
        labels_n = self.train.labels_N[block.start : block.stop]
        for checkpoint, left in zip(self.checkpoints, self.lefts, strict=True):
            capture, rows = Capture(checkpoint.model), np.zeros_like(total)

            def cosines(
                groups: Groups, places: NDArray[np.int64], *, capture: Capture = capture, left: Left = left,
                checkpoint: AdamCheckpoint = checkpoint,
            ) -> NDArray[np.float64]:  # fmt: skip
                dots_Qn, squares_n = step_dots(checkpoint, capture, groups, labels_n[places], left)
                return as_cosines(dots_Qn.cpu().numpy(), left, squares_n.cpu().numpy()).T

            _passed(checkpoint.model, capture, self.train, block, rows, cosines)
            total += checkpoint.lr * rows
        return total

    def scores(self, values_NW: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Rows`."""
        return values_NW.T


class FeatureRows:
    """Projected gradients, of every model one after another; the scores are ridge products, block by block."""

    def __init__(
        self, models: Sequence[nn.Module], train: TokenSet, queries: TokenSet, projection: OneSided | TwoSided,
        ridge: float, how: Pass, *, per_block: bool,
    ) -> None:  # fmt: skip
        """Look at the queries' features, which name the blocks and their widths.

        Args:
            models: one or more.
            train: records.
            queries: queries.
            projection: of gradients.
            ridge: as a share of the mean diagonal, > 0 where a block has more features than there are records.
            how: rows of a batch; no process waits for another.
            per_block: each block's products count N times (LoGra's mean Fisher) and its ridge is its own; else there is one
                block per model, and models are averaged (TRAK).
        """
        self.models, self.train, self.projection = list(models), train, projection
        self.ridge, self.per_block, solo = ridge, per_block, Pass(rows=how.rows)
        self.asked = [features(model, queries, projection, solo) for model in self.models]
        self.blocks = [
            (number, name, phi_Qk.shape[1])
            for number, found in enumerate(self.asked)
            for name, phi_Qk in sorted(found.items())
        ]
        self.width = sum(size for *_, size in self.blocks)
        for *_, size in self.blocks:
            ridge_check(ridge, len(train.records), size)

    def block(self, block: range) -> NDArray[np.float64]:
        """See `Rows`."""
        parts = []
        for number, model in enumerate(self.models):
            sizes = [(name, size) for place, name, size in self.blocks if place == number]
            capture, rows = Capture(model), np.zeros((len(block), sum(size for _, size in sizes)))

            def made(groups: Groups, _: object, capture: Capture = capture, sizes: list[tuple[str, int]] = sizes) -> NDArray[np.float64]:  # fmt: skip
                found = self.projection.features(capture, groups)
                return torch.cat([found[name].double().cpu() for name, _ in sizes], 1).numpy()

            _passed(model, capture, self.train, block, rows, made)
            parts.append(rows)
        return np.concatenate(parts, 1)

    def scores(self, values_NW: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Rows`."""
        num, start = len(values_NW), 0
        queries = len(next(iter(self.asked[0].values())))
        total_QN = np.zeros((queries, num))
        for number, name, size in self.blocks:
            phi_Nk = np.ascontiguousarray(values_NW[:, start : start + size])
            start += size
            if phi_Nk.any():  # an expert that no record visits has no curvature and no influence
                share = num if self.per_block else 1 / len(self.models)
                total_QN += share * ridge_products(self.asked[number][name], phi_Nk, self.ridge)
        return total_QN


@dataclass(slots=True)
class FisherRows:
    """Products of a record's gradient with all records' and all queries'."""

    model: nn.Module
    train: TokenSet
    queries: TokenSet
    damping: float
    rows: int
    """Rows of a batch."""

    @property
    def width(self) -> int:
        """N + Q."""
        return len(self.train.records) + len(self.queries.records)

    def blocks(self) -> list[range]:
        """Blocks of as many records as have room for their gradients."""
        parameter = next(self.model.parameters())
        size = sum(int(np.prod(shape)) for shape in Capture(self.model).shapes.values())
        step = max(1, min(MAX_FISHER_BLOCK, BLOCK_BYTES // (size * parameter.element_size())))
        num = len(self.train.records)
        return [range(start, min(start + step, num)) for start in range(0, num, step)]

    def block(self, block: range) -> NDArray[np.float64]:
        """See `Rows`."""
        rows, solo = np.zeros((len(block), self.width)), Pass(rows=self.rows)
        live_n = np.flatnonzero(self.train.labels_N[block.start : block.stop])
        if len(live_n):
            for places, left in gradient_blocks(self.model, self.train.take(live_n + block.start), solo):  # fmt: skip
                parts = [pair(self.model, one, left, solo)[0] for one in (self.train, self.queries)]
                rows[live_n[places]] = np.concatenate(parts, 1)
        return rows

    def scores(self, values_NW: NDArray[np.float64]) -> NDArray[np.float64]:
        """See `Rows`."""
        num = len(self.train.records)
        return solved(values_NW[:, :num], values_NW[:, num:].T, self.damping)
