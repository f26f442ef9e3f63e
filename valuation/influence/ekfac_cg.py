"""EK-FAC-preconditioned conjugate gradients on the Gauss-Newton matrix: influence without a Kronecker form.

    (G + D) x_q = g_q,    D = c mean(Lam_l) I on the block of each parameter,    score(q, n) = <x_q, g_n>

EK-FAC's inverse is only the preconditioner (and the start); what is solved has G itself, so the answer
doesn't depend on the Kronecker form once the residual is small. Each iteration is about three passes over the
curvature's documents for every query.

Where a pretrained model is fine-tuned, agreement with retraining is well above EK-FAC's, at a damping of 10 to 100, which
is more than EK-FAC wants, and 6 to 10 steps; at 1 it is below. In models trained from scratch the two are hardly told apart.
The largest relative residual stands in the scores' notes: where it is not small, take more steps or more damping.

Source: ASTRA arXiv 2507.14740 (there with stochastic Neumann steps); conjugate gradients: Hestenes and
Stiefel 1952.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from valuation.errors import GradientError
from valuation.influence.factors import fit
from valuation.influence.gauss_newton import GaussNewton
from valuation.influence.pairing import PASS, finish, gradient_blocks, pair

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

    from valuation.influence.factors import Factors
    from valuation.influence.pairing import Left, Pass
    from valuation.influence.scores import Scores, TokenSet


DAMPING, STEPS = 30.0, 8
"""What a fine-tuned model's retrainings chose on one corpus (`make accept STUDY=finetuned-kinds`), and two others confirmed."""


def scores(
    model: nn.Module,
    train: TokenSet,
    queries: TokenSet,
    *,
    damping: float = DAMPING,
    steps: int = STEPS,
    factors: Factors | None = None,
    curvature: TokenSet | None = None,
    how: Pass = PASS,
) -> Scores:
    """Gauss-Newton influence of every record on every query.

    Args:
        model: the trained model.
        train: records.
        queries: queries, each of 2 or more tokens.
        damping: c > 0, in units of each block's mean EK-FAC eigenvalue.
        steps: most iterations, >= 0; 0 gives EK-FAC.
        factors: of this model and these records, from `factors.fit`; None = fit them.
        curvature: documents for G; None = the records. A sample saves time and adds noise.
        how: rows of a batch, parameters, processes.

    Returns:
        Scores of summed losses, in nats; notes["residual"] is the largest |g - (G + D) x| / |g| of any query.

    Raises:
        GradientError: damping <= 0, steps < 0, or factors of other weights or records.
    """
    solve = solver(
        model, train, how, damping=damping, steps=steps, factors=factors, curvature=curvature
    )
    scores_QN, worst = np.zeros((len(queries.records), len(train.records))), 0.0
    for places, left in gradient_blocks(model, queries, how):
        solved, residual = solve(left)
        scores_QN[places], _ = pair(model, train, solved, how)
        worst = max(worst, residual) if steps else float("nan")
    return finish(
        scores_QN, f"ekfac_cg(damping={damping:g}, steps={steps})", model, train, queries,
        notes={"residual": f"{worst:.3e}"},
    )  # fmt: skip


def solver(
    model: nn.Module,
    train: TokenSet,
    how: Pass,
    *,
    damping: float = DAMPING,
    steps: int = STEPS,
    factors: Factors | None = None,
    curvature: TokenSet | None = None,
) -> Callable[[Left], tuple[Left, float]]:
    """The function that takes query gradients to (x, largest relative residual); arguments as in `scores`."""
    if steps < 0:
        raise GradientError(f"steps: expected 0 or more, got {steps}")
    fitted = factors or fit(model, train, how)
    fitted.require(model, train)
    matrix = GaussNewton(model, curvature or train, how)
    floor = {
        name: damping * float(block.eigenvalues.mean()) for name, block in fitted.blocks.items()
    }

    def apply(vectors: Mapping[str, Tensor]) -> Left:
        products = matrix.product(vectors)
        return {name: values + floor[name] * vectors[name] for name, values in products.items()}

    return lambda left: conjugate_gradients(apply, left, lambda v: fitted.solve(v, damping), steps)


def conjugate_gradients(
    apply: Callable[[Left], Left],
    right: Left,
    precondition: Callable[[Left], Left],
    steps: int,
    tolerance: float = 1e-8,
) -> tuple[Left, float]:
    """Solve A x = b for Q right sides at once, each with steps of its own size.

    Args:
        apply: A, symmetric and positive definite, of Q vectors.
        right: b, parameter -> [Q, *shape].
        precondition: an approximate inverse of A, symmetric and positive definite.
        steps: most iterations; 0 returns the preconditioned right side.
        tolerance: relative residual at which to stop.

    Returns:
        (x, largest relative residual of any right side).
    """
    x = precondition(right)
    applied = apply(x) if steps else {}
    if not steps:
        return x, float("nan")
    r = {name: right[name] - applied[name] for name in right}
    norm_Q = _dots(right, right).sqrt().clamp(min=1e-300)
    z = precondition(r)
    p, rz_Q = z, _dots(r, z)
    for _ in range(steps):
        if float((_dots(r, r).sqrt() / norm_Q).max()) <= tolerance:
            break
        applied = apply(p)
        curvature_Q = _dots(p, applied)
        # A right side that is solved has p = 0: it takes no further step.
        alpha_Q = torch.where(curvature_Q > 0, rz_Q / curvature_Q, torch.zeros_like(rz_Q))
        x = _moved(x, alpha_Q, p)
        r = _moved(r, -alpha_Q, applied)
        z = precondition(r)
        new_Q = _dots(r, z)
        beta_Q = torch.where(rz_Q > 0, new_Q / rz_Q, torch.zeros_like(rz_Q))
        p, rz_Q = _moved(z, beta_Q, p), new_Q
    return x, float((_dots(r, r).sqrt() / norm_Q).max())


def _dots(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensor:
    """Inner product of each pair, float64 [Q]."""
    parts = [
        (values.flatten(1) * right[name].flatten(1)).sum(1, dtype=torch.float64)
        for name, values in left.items()
    ]
    return torch.stack(parts).sum(0)


def _moved(start: Mapping[str, Tensor], size_Q: Tensor, by: Mapping[str, Tensor]) -> Left:
    """Start + size * by, right side by right side."""
    return {
        name: values + size_Q.to(values).view(-1, *[1] * (values.dim() - 1)) * by[name]
        for name, values in start.items()
    }
