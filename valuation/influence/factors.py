"""The curvature of the loss in a Kronecker eigenbasis, one block per parameter, and its damped inverse.

The Fisher matrix of a parameter, ``F = (1/N) sum_n vec(G_n) vec(G_n)^T``, is too large to form. K-FAC takes

    C = (1/N) sum_{n,p} a_p a_p^T  [I, I]      S = (1/N) sum_{n,p} g_p g_p^T  [O, O]      F ~ S (x) C / tokens per document

and EK-FAC keeps its eigenbases, ``C = U D_C U^T`` and ``S = W D_S W^T`` (in float64), but measures the
eigenvalues in them, which makes it the closest matrix of that basis to F:

    Lam = (1/N) sum_n (W^T G_n U)^2  [O, I]              K-FAC: Lam = d_S d_C^T / tokens per document
    H^-1 v = W [ (W^T v U) / (Lam + c mean(Lam)) ] U^T

G_n is the gradient of a document's *summed* loss, all sums run over all documents of all processes and
are divided by the number of all documents. With the data's labels (the default) F is the empirical
Fisher; with labels drawn from the model it is the true one.

What is not a Linear:

- *Embedding*: its input is one-hot, so the covariance of its rows is diagonal, and the identity is an
  exact eigenbasis of theirs. Lam is measured as above.
- *Tied embedding and head*: rows keep the identity, columns get the eigenvectors of the partial trace of
  both uses, ``sum_use tr(S_use) C_use``, and Lam is measured on the gradient of both uses together.
- an axis longer than `MAX_SIDE` (a large vocabulary): the identity, for an eigenbasis would cost its cube.
- *RMSNorm gains and biases*: the diagonal of F.
- *Experts*: one block per expert.

Legend: N documents, P positions, I inputs, O outputs, K matrices in a stack (1, or the experts).

Source: K-FAC arXiv 1503.05671; EK-FAC arXiv 1806.03884; for influence arXiv 2308.03296, section 2.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.data import IGNORE
from valuation.capture import Capture, ExpertsSite, LookupSite, MatrixSite, Site, outer_sums
from valuation.errors import GradientError
from valuation.influence.pairing import watched
from valuation.influence.scores import weights_root

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from trainer.data import Batch
    from valuation.capture import Groups
    from valuation.gradients import Draw
    from valuation.influence.pairing import Left, Pass
    from valuation.influence.scores import TokenSet

MAX_SIDE = 4096
"""Longest axis that gets an eigenbasis."""


@dataclass(frozen=True, slots=True)
class Block:
    """Curvature of one parameter, seen as K matrices [O, I]."""

    rows: Tensor | None
    """W, [K, O, O]; None = identity."""
    columns: Tensor | None
    """U, [K, I, I]; None = identity."""
    eigenvalues: Tensor
    """Lam, float64 [K, O, I]."""

    def rotate(self, values: Tensor) -> Tensor:
        """W^T v U of each of N tensors of the parameter's shape: [N, K, O, I]."""
        turned = values.reshape(len(values), *self.eigenvalues.shape)
        if self.columns is not None:
            turned = _times(turned, self.columns)
        return turned if self.rows is None else _times(turned.mT, self.rows).mT

    def solve(self, values: Tensor, damping: float) -> Tensor:
        """(F + damping mean(Lam))^-1 v of each of N tensors [N, *shape]; zero where no document has a gradient."""
        floor = damping * self.eigenvalues.mean()
        if not floor > 0:
            return torch.zeros_like(values)
        turned = self.rotate(values) / (self.eigenvalues + floor).to(values.dtype)
        if self.columns is not None:
            turned = _times(turned, self.columns.mT)
        if self.rows is not None:
            turned = _times(turned.mT, self.rows.mT).mT
        return turned.reshape(values.shape)


def _times(values: Tensor, basis: Tensor) -> Tensor:
    """[N, K, X, Y] times [K, Y, Y]; one product where there is one matrix."""
    return values @ (basis[0] if len(basis) == 1 else basis)


@dataclass(frozen=True, slots=True)
class Factors:
    """The blocks of all parameters, and what they are of."""

    blocks: dict[str, Block]
    """By parameter."""
    documents: int
    """Documents of all processes that have a gradient."""
    tokens: int
    """Their tokens."""
    checkpoint_root: str
    """Logical root of the weights."""
    tokens_digest: str
    """Digest of the documents."""

    def solve(self, left: Mapping[str, Tensor], damping: float) -> Left:
        """H^-1 v, block by block.

        Args:
            left: parameter -> [Q, *shape].
            damping: c > 0, as a share of each block's mean eigenvalue.

        Raises:
            GradientError: damping <= 0.
        """
        if not damping > 0:
            raise GradientError(f"damping: expected a number above 0, such as 0.1, got {damping}")
        return {name: self.blocks[name].solve(values, damping) for name, values in left.items()}

    def require(self, model: nn.Module, documents: TokenSet) -> None:
        """Refuse factors of other weights or documents.

        Raises:
            GradientError: which of them differs.
        """
        for what, expected, got in (
            ("checkpoint_root", weights_root(model), self.checkpoint_root),
            ("tokens_digest", documents.digest(), self.tokens_digest),
        ):
            if expected != got:
                raise GradientError(
                    f"factors: {what}: expected {expected}, got {got}; fit them again"
                )


@dataclass(slots=True)
class _Moments:
    """Sums over one kind of use of one parameter; a covariance [K, X, X], or its diagonal [K, X]."""

    rows: Tensor
    columns: Tensor
    visits: Tensor
    """Positions, per matrix of the stack [K]."""


def fit(
    model: nn.Module,
    documents: TokenSet,
    how: Pass,
    *,
    corrected: bool = True,
    generator: np.random.Generator | None = None,
) -> Factors:
    """Measure the curvature on a set of documents.

    Args:
        model: the trained model.
        documents: usually the training records.
        how: rows of a batch, parameters, processes.
        corrected: EK-FAC's eigenvalues, by a second pass; False = K-FAC's.
        generator: draws labels from the model (true Fisher), the same ones for every batch size and number of
            processes; None = the data's labels (empirical Fisher), which needs no chance.

    Returns:
        Factors, the same in every process.

    Raises:
        GradientError: no document predicts anything.
    """
    draw = None if generator is None else model_labels(int(generator.integers(2**63)))
    moments, squares, counts = _first_pass(model, documents, how, draw)
    if not counts[0]:
        raise GradientError("documents: expected at least one of 2 or more tokens, got none")
    bases = _bases(moments, how)
    blocks = {}
    for name, shape in Capture(model, how.names).shapes.items():
        if name in squares:
            blocks[name] = Block(None, None, (squares[name] / counts[0]).reshape(1, 1, -1))
            continue
        rows, columns = bases[name]
        blocks[name] = Block(
            rows,
            columns,
            _kfac_eigenvalues(moments[name], rows, columns, counts[0]),
        )
        assert blocks[name].eigenvalues.shape[-2:] == shape[-2:]
    dtype = next(model.parameters()).dtype
    blocks = {
        name: Block(_cast(block.rows, dtype), _cast(block.columns, dtype), block.eigenvalues)
        for name, block in blocks.items()
    }
    if corrected:
        blocks |= _second_pass(
            model,
            documents,
            how,
            draw,
            {n: b for n, b in blocks.items() if n in moments},
            counts[0],
        )
    return Factors(blocks, int(counts[0]), int(counts[1]), weights_root(model), documents.digest())


def _cast(basis: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if basis is None else basis.to(dtype)


def _first_pass(
    model: nn.Module, documents: TokenSet, how: Pass, draw: Draw | None
) -> tuple[dict[str, dict[type[Site], _Moments]], dict[str, Tensor], Tensor]:
    """Sums over all processes: covariances per matrix, squares per vector, (documents, tokens)."""
    device = next(model.parameters()).device
    counts = torch.zeros(2, dtype=torch.float64, device=device)
    moments: dict[str, dict[type[Site], _Moments]] = {}
    squares: dict[str, Tensor] = {}
    for _, capture, groups in watched(model, documents, how, draw):
        counts += torch.tensor([len(groups.count_N), len(groups.position_P)], device=device)
        seen: dict[int, Tensor] = {}
        for name, shape in capture.shapes.items():
            sites = capture.sites_of(name)
            if len(shape) == 1:
                square = capture.gradients(name, groups).double().square().sum(0)
                squares[name] = squares.get(name, 0) + square
                continue
            identity = any(isinstance(site, LookupSite) for site in sites)
            for site in sites:
                found = _site_moments(site, groups, shape, seen, identity=identity)
                known = moments.setdefault(name, {}).get(type(site))
                if known is None:
                    moments[name][type(site)] = found
                    continue
                known.rows += found.rows
                known.columns += found.columns
                known.visits += found.visits
    _agree(how, sorted(moments))
    how.mesh.sum(counts)
    for name in sorted(squares):
        how.mesh.sum(squares[name])
    for name in sorted(moments):
        for kind in sorted(moments[name], key=lambda kind: kind.__name__):
            part = moments[name][kind]
            for values in (part.rows, part.columns, part.visits):
                how.mesh.sum(values)
    return moments, squares, counts


def _agree(how: Pass, names: list[str]) -> None:
    """Every process must have something to add up, or the collectives would not meet."""
    if any(other != names for other in how.mesh.gather(names)):
        raise GradientError(
            f"documents: expected at least one batch per process, got none in some of {how.mesh.world_size}; "
            "use fewer processes, or fewer rows in a batch"
        )


@torch.no_grad()
def _site_moments(
    site: Site,
    groups: Groups,
    shape: tuple[int, ...],
    seen: dict[int, Tensor],
    *,
    identity: bool,
) -> _Moments:
    """Row and column sums of one use in one batch, in float64; matrices that read one input share its covariance."""
    if isinstance(site, ExpertsSite):
        kept_R = site.groups_of_rows(groups) >= 0
        assert site.expert_R is not None
        a_RI, g_RO = site.input[kept_R], site.arrived[kept_R]
        load_E = torch.bincount(site.expert_R[kept_R], minlength=shape[0])
        loads = load_E.cpu().numpy()
        rows, columns = outer_sums(g_RO, g_RO, loads), outer_sums(a_RI, a_RI, loads)
        return _Moments(rows.double(), columns.double(), load_E.double())
    visits = torch.tensor(
        [len(groups.position_P)], dtype=torch.float64, device=groups.position_P.device
    )
    if isinstance(site, LookupSite):
        token_P, g_PD = site.rows(groups)
        frequency_V = torch.bincount(token_P, minlength=shape[0]).double()
        return _Moments(frequency_V[None], (g_PD.T @ g_PD).double()[None], visits)
    assert isinstance(site, MatrixSite)
    a_PI, g_PO = site.rows(groups)
    diagonal = identity or shape[0] > MAX_SIDE
    rows = g_PO.square().sum(0) if diagonal else g_PO.T @ g_PO
    key = (
        site.input.data_ptr()
    )  # alive as long as the capture is, so no two inputs have one address
    if key not in seen:
        seen[key] = a_PI.square().sum(0) if shape[1] > MAX_SIDE else a_PI.T @ a_PI
    # A copy each: sums over batches are made in place.
    columns = seen[key].to(torch.float64, copy=True)
    return _Moments(rows.double()[None], columns[None], visits)


def _bases(
    moments: dict[str, dict[type[Site], _Moments]], how: Pass
) -> dict[str, tuple[Tensor | None, Tensor | None]]:
    """Eigenbases of both axes; the processes share the work and add up zeros."""
    found: dict[str, tuple[Tensor | None, Tensor | None]] = {}
    number = 0
    for name in sorted(moments):
        parts = list(moments[name].values())
        pair: list[Tensor | None] = []
        for own, other in (("rows", "columns"), ("columns", "rows")):
            # Partial trace: of the Kronecker sum of the uses, what is left when the other axis is summed out.
            total = sum(
                getattr(part, own) * _trace(getattr(part, other), getattr(part, own))
                for part in parts
            )
            assert isinstance(total, Tensor)
            if total.dim() == 2:
                pair.append(None)
                continue
            basis = torch.zeros_like(total)
            if number % how.mesh.world_size == how.mesh.rank:
                basis = torch.linalg.eigh(total).eigenvectors
            pair.append(how.mesh.sum(basis.contiguous()))
            number += 1
        found[name] = pair[0], pair[1]
    return found


def _trace(matrices: Tensor, like: Tensor) -> Tensor:
    """Trace of each matrix of a stack (or of a diagonal), to multiply [K, ...] with."""
    trace_K = matrices.sum(-1) if matrices.dim() == 2 else matrices.diagonal(dim1=1, dim2=2).sum(-1)
    return trace_K.view(-1, *[1] * (like.dim() - 1))


def _kfac_eigenvalues(
    parts: dict[type[Site], _Moments],
    rows: Tensor | None,
    columns: Tensor | None,
    documents: Tensor,
) -> Tensor:
    """Sum over the uses of d_S d_C^T / positions per document, [K, O, I]."""

    def along(moment: Tensor, basis: Tensor | None) -> Tensor:
        if basis is None:
            return (moment if moment.dim() == 2 else moment.diagonal(dim1=1, dim2=2)) / documents
        return (basis * (moment @ basis)).sum(1).clamp(min=0) / documents

    total: Tensor | None = None
    for part in parts.values():
        per_document_K = (part.visits / documents).clamp(min=1e-30)[:, None, None]
        outer = along(part.rows, rows)[:, :, None] * along(part.columns, columns)[:, None, :]
        outer /= per_document_K
        total = outer if total is None else total + outer
    assert total is not None
    return total


def _second_pass(
    model: nn.Module,
    documents: TokenSet,
    how: Pass,
    draw: Draw | None,
    blocks: Mapping[str, Block],
    count: Tensor,
) -> dict[str, Block]:
    """EK-FAC's eigenvalues: mean squares of the gradients in the eigenbasis."""
    sums = {name: torch.zeros_like(block.eigenvalues) for name, block in blocks.items()}
    for _, capture, groups in watched(model, documents, how, draw):
        for name, block in blocks.items():
            sums[name] += _squares(capture, groups, name, block)
    corrected = {}
    for name in sorted(blocks):
        how.mesh.sum(sums[name])
        corrected[name] = Block(blocks[name].rows, blocks[name].columns, sums[name] / count)
    return corrected


@torch.no_grad()
def _squares(capture: Capture, groups: Groups, name: str, block: Block) -> Tensor:
    """sum_n (W^T G_n U)^2, by the cheaper order: turn the positions, or the formed gradients."""
    sites, (_, outputs, inputs) = capture.sites_of(name), block.eigenvalues.shape
    documents, positions = len(groups.count_N), len(groups.position_P)
    if (
        len(sites) == 1
        and isinstance(sites[0], MatrixSite)
        and block.rows is not None
        and block.columns is not None
        and positions * (outputs**2 + inputs**2) < documents * outputs * inputs * (outputs + inputs)
    ):
        a_PI, g_PO = sites[0].rows(groups)
        turned = outer_sums(g_PO @ block.rows[0], a_PI @ block.columns[0], groups.count_N)[:, None]
    else:
        turned = block.rotate(capture.gradients(name, groups))
    # Over the few records of a batch in the model's own precision, over batches in float64.
    return turned.square().sum(0).double()


def model_labels(seed: int) -> Draw:
    """Labels drawn from the model's own prediction, by inverse transform of one uniform number per position.

    The number is a function of (seed, record id, place in the record), so no batch size, packing or number of
    processes changes what is drawn.

    Args:
        seed: >= 0.

    Returns:
        A function for `valuation.gradients.token_losses`.
    """

    def draw(logits_BTV: Tensor, batch: Batch) -> Tensor:
        uniform_BT = np.zeros(batch.tokens_BT.shape)
        for row, segments in enumerate(batch.segments):
            for segment in segments:
                key = hashlib.sha256(b"dataworth-labels-1|%d|" % seed + segment.record_id).digest()
                stream = np.random.Generator(np.random.Philox(key=int.from_bytes(key[:16], "big")))
                values = stream.random(segment.first + segment.count)[segment.first :]
                uniform_BT[row, segment.column : segment.column + segment.count] = values
        below_BT1 = torch.from_numpy(uniform_BT).to(logits_BTV.device)[..., None]
        cumulative_BTV = logits_BTV.double().softmax(-1).cumsum(-1)
        drawn_BT = (cumulative_BTV < below_BT1).sum(-1).clamp(max=logits_BTV.shape[-1] - 1)
        labels_BT = torch.from_numpy(batch.labels_BT).to(logits_BTV.device)
        return torch.where(labels_BT == IGNORE, labels_BT, drawn_BT)

    return draw
