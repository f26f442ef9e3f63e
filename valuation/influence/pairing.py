"""What all methods of the form ``<H^-1 g_q, g_n>`` share: the queries' gradients, and one pass over the records.

Query gradients are few and are formed, block by block where memory asks for it. Records are many:
each batch of whole records is passed once, forward and backward, and its gradients meet all queries
and are forgotten. So memory is a block of query gradients and one layer's gradients of one batch.

Processes share the records block by block; what a score is does not depend on who computed it, since
a block is the same batch in every process. Each process fills its columns, and zeros are added up.

Legend: Q queries, N records.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.mesh import Mesh
from valuation.capture import Capture
from valuation.errors import GradientError
from valuation.gradients import Segments, captured_pass
from valuation.influence.scores import Scores, bind
from valuation.routes import formed_dots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray
    from torch import Tensor, nn

    from valuation.capture import Groups
    from valuation.gradients import Draw
    from valuation.influence.scores import TokenSet

BLOCK_BYTES = 1 << 30
"""Memory for a block of query gradients."""
Left = dict[str, "Tensor"]
"""Parameter -> one tensor of its shape per query, [Q, *shape]."""


@dataclass(frozen=True, slots=True)
class Pass:
    """How passes over records are made; only `names` changes what is computed, the rest changes rounding."""

    rows: int = 32
    """Rows of a batch."""
    names: frozenset[str] | None = None
    """Parameters whose gradients count; None = all trainable ones."""
    mesh: Mesh = field(default_factory=Mesh)
    """The processes, who share the records block by block."""


PASS = Pass()
"""All parameters, one process."""


def watched(
    model: nn.Module, tokens: TokenSet, how: Pass, draw: Draw | None = None
) -> Iterator[tuple[NDArray[np.int64], Capture, Groups]]:
    """One forward and backward pass per block of this process's share.

    Args:
        model: the model.
        tokens: records.
        how: rows, parameters, processes.
        draw: gives other labels than the data's; see `valuation.gradients.token_losses`.

    Yields:
        (places in `tokens`, capture after its pass, positions of the records), without records that have no token.
    """
    capture, all_N = Capture(model, how.names), tokens.index_N
    for number, block in enumerate(tokens.blocks(how.rows)):
        if number % how.mesh.world_size != how.mesh.rank:
            continue
        batch = tokens.batch(block)
        if not batch.num_labels:  # nothing to predict: no gradient
            continue
        nll_BT = captured_pass(model, batch, capture, draw)
        groups = Segments.of(batch).groups(nll_BT.device)
        yield np.searchsorted(all_N, groups.index_N), capture, groups


def query_check(queries: TokenSet) -> None:
    """Refuse queries that have no loss.

    Raises:
        GradientError: no query, or one that predicts nothing.
    """
    if not queries.records:
        raise GradientError("queries: expected at least one, got none")
    if not queries.labels_N.all():
        short = queries.index_N[queries.labels_N == 0]
        raise GradientError(
            f"queries: expected 2 tokens or more, got fewer at indices {short[:5].tolist()}; leave them out"
        )


def as_cosines(
    dots_QN: NDArray[np.float64], left: Mapping[str, Tensor], squares_N: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Dot products divided by both norms; 0 for a record without gradient."""
    squares_Q = sum(g.double().flatten(1).square().sum(1).cpu().numpy() for g in left.values())
    size_QN = np.sqrt(np.outer(squares_Q, squares_N))
    return np.divide(dots_QN, size_QN, out=np.zeros_like(dots_QN), where=size_QN > 0)


def gradient_blocks(model: nn.Module, queries: TokenSet, how: Pass) -> Iterator[tuple[slice, Left]]:
    """The queries' gradients, formed, in blocks of at most `BLOCK_BYTES`.

    Args:
        model: the model.
        queries: queries; each must predict at least one token.
        how: rows, parameters, processes.

    Yields:
        (places of the queries, their gradients).

    Raises:
        GradientError: no query, or one that predicts nothing.
    """
    query_check(queries)
    shapes = Capture(model, how.names).shapes
    like = next(model.parameters())
    size = sum(int(np.prod(shape)) for shape in shapes.values()) * like.element_size()
    step = max(1, BLOCK_BYTES // size)
    for start in range(0, len(queries.records), step):
        places = slice(start, min(start + step, len(queries.records)))
        part = queries.take(range(places.start, places.stop))
        left = {
            name: like.new_zeros((len(part.records), *shape), requires_grad=False)
            for name, shape in shapes.items()
        }
        for place_N, capture, groups in watched(model, part, how):
            for name, grads in left.items():
                grads[torch.from_numpy(place_N)] = capture.gradients(name, groups)
        for grads in left.values():
            how.mesh.sum(grads)
        yield places, left


def pair(
    model: nn.Module, train: TokenSet, left: Mapping[str, Tensor], how: Pass, *, norms: bool = False
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """<left_q, G_n> for every record, in one pass over the records.

    Args:
        model: the model.
        train: records.
        left: the queries' side; its parameters are the ones watched.
        how: rows and processes.
        norms: whether the records' squared norms are wanted.

    Returns:
        dots_QN, and |G_n|^2 (zeros if not wanted). A record that predicts nothing has no gradient: zeros.
    """
    num_queries = len(next(iter(left.values())))
    dots = torch.zeros(num_queries, len(train.records), dtype=torch.float64)
    squares = torch.zeros(len(train.records), dtype=torch.float64)
    for place_N, capture, groups in watched(model, train, replace(how, names=frozenset(left))):
        columns = torch.from_numpy(place_N)
        dots[:, columns] = formed_dots(capture, groups, left).cpu()
        if norms:
            for name in left:
                flat = capture.gradients(name, groups).flatten(1)
                squares[columns] += flat.square().sum(1, dtype=torch.float64).cpu()
    return add_up(how.mesh, dots).numpy(), add_up(how.mesh, squares).numpy()


def add_up(mesh: Mesh, values: Tensor) -> Tensor:
    """Added up over the processes, by way of the device that they speak through; on the CPU."""
    return mesh.sum(values.to(mesh.device)).cpu()


def finish(
    scores_QN: NDArray[np.float64],
    method: str,
    models: nn.Module | list[nn.Module],
    train: TokenSet,
    queries: TokenSet,
    *,
    per_token: bool = False,
    notes: dict[str, str] | None = None,
) -> Scores:
    """Scores with their ids and binding.

    Args:
        scores_QN: of summed losses.
        method: name with settings.
        models: what they were computed from.
        train: records.
        queries: queries.
        per_token: divide by the predicted tokens of query and record, as if losses were means.
        notes: of the method.

    Raises:
        GradientError: a score isn't finite, or records and queries are of two tokenizers.
    """
    if per_token:
        labels_Q, labels_N = queries.labels_N[:, None], np.maximum(train.labels_N, 1)[None]
        scores_QN = scores_QN / labels_Q / labels_N
    return Scores(
        np.ascontiguousarray(scores_QN, dtype=np.float64), queries.index_N, train.index_N, queries.ids, train.ids,
        method, bind(models, train, queries), notes or {},
    )  # fmt: skip


def preconditioned(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    solve: Callable[[Left], Left],
    method: str,
    *,
    per_token: bool = False,
    how: Pass = PASS,
) -> Scores:
    """Scores <H^-1 g_q, g_n>, for any H that can be applied to the queries' gradients.

    Args:
        model: the model.
        train: records.
        queries: queries.
        solve: H^-1 of a block of query gradients.
        method: name with settings.
        per_token: losses are means over predicted tokens instead of sums.
        how: rows, parameters, processes.

    Returns:
        The scores.
    """
    scores_QN = np.zeros((len(queries.records), len(train.records)))
    for places, left in gradient_blocks(model, queries, how):
        scores_QN[places], _ = pair(model, train, solve(left), how)
    return finish(scores_QN, method, model, train, queries, per_token=per_token)
