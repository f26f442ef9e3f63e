"""Exact metagradients (MAGIC): how the target's final loss depends on the weight of every training record.

A training is a function of the record weights omega: step t minimises

    l_t(w) = (1/n_t) sum_r omega_r l_r(w)        l_r summed loss of record r in the batch, n_t the labels of the batch

at omega = 1, so that omega_r = 0 leaves record r out and everything else, the other records' scale included, as it
was. Reverse mode through all steps gives the exact dL(w_T)/d omega_r for every r at once: with s = (w, m, v) the state
of AdamW and F_t its step, clipping included,

    lambda_T = (grad L(w_T), 0, 0)        lambda_t = lambda_{t+1} dF_t/ds        dL/d omega = sum_t lambda_{t+1} dF_t/d omega

``score_r = -dL/d omega_r``: positive = training on the record lowers the target's loss. This is the ceiling that
influence functions approximate: no Hessian, no convergence, no proxy. It answers for *this* training: order, seed,
schedule and length are held fixed.

*Checkpoints.* The steps are cut into about sqrt(N) intervals; only the states at their starts are kept, and the states
inside an interval are computed again when its turn comes, by the same code, hence to the same bits. Memory is
2 sqrt(N) states, each three times the weights; the result doesn't depend on the number of checkpoints.

*Cost.* Two trainings, and per step and target one vector-Jacobian product, which differentiates a gradient once more
(about three steps). Several targets share the forward and the first backward pass.

*When it is wrong.* The derivative is exact; whether a derivative says what leaving a record out does depends on how
smooth the training is. AdamW divides by the root of the second moment, which has no derivative at 0: `eps_root` is
added under that root (0 is the trainer's own AdamW). Larger batches, clipping, a warm-up and eps_root of 1e-8 to 1e-5
make a training metasmooth; `smoothness` measures it, near 1 is good. bfloat16 is refused, as are a mixture of experts
(its choice of experts and its balance have no derivative) and Muon.

Legend: N records, Q targets, S segments of a batch.

Source: MAGIC arXiv 2504.16430; metagradients by replay, metasmoothness: arXiv 2503.13751, sections 2 and 3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.experts import MixtureOfExperts
from trainer.optim import learning_rate
from valuation.errors import GradientError
from valuation.gradients import Segments
from valuation.hessian import token_losses_at, twice_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.data import Batch, BatchPlan
    from trainer.model import Transformer
    from trainer.spec import OptimSpec
    from valuation.influence.scores import Scores, TokenSet

State = list["Tensor"]
"""Weights, first and second moments, one after the other, each in the order of the parameters."""


class WeightedTraining:
    """A training as a differentiable function of its record weights."""

    def __init__(
        self, model: Transformer, plan: BatchPlan, optim: OptimSpec, steps: int, *, eps_root: float = 1e-8
    ) -> None:  # fmt: skip
        """Prepare a training; nothing is computed yet.

        Args:
            model: gives the initial weights, which stay as they are; float32 or float64.
            plan: the batches; its records are those that have weights.
            optim: adamw, its schedule and clipping.
            steps: number of steps, at least 1.
            eps_root: added to the bias-corrected second moment before its root, >= 0.

        Raises:
            GradientError: an optimiser, model, type or number that has no exact metagradient.
        """
        if optim.name != "adamw":
            raise GradientError(f"optim.name: metagradients are those of adamw, got {optim.name!r}")
        if any(isinstance(module, MixtureOfExperts) for module in model.modules()):
            raise GradientError(
                "model: expected dense feed-forwards, got a mixture of experts, whose choice of experts has no derivative"
            )
        self.names = [name for name, p in model.named_parameters() if p.requires_grad]
        named = dict(model.named_parameters())
        self.initial = [named[name].detach().clone() for name in self.names]
        if wrong := {p.dtype for p in self.initial} - {torch.float32, torch.float64}:
            raise GradientError(
                f"model: expected float32 or float64 weights, got {sorted(map(str, wrong))}; "
                "a derivative of a derivative has no digit left in them"
            )
        if steps < 1 or eps_root < 0:
            raise GradientError(
                f"expected steps >= 1 and eps_root >= 0, got {steps} and {eps_root}"
            )
        self.model, self.plan, self.optim, self.steps = model, plan, optim, steps
        self.eps_root = eps_root
        self.index_N = np.unique(plan.order.index_N.astype(np.int64))
        """Corpus index of each record that has a weight, ascending."""
        self.peak_states = 0
        """Most states that were kept at a time."""

    def ones(self) -> Tensor:
        """The weights of the training as it is: 1 for every record."""
        return torch.ones(len(self.index_N), dtype=torch.float64)

    def start(self) -> State:
        """The state before the first step: initial weights, moments of zero."""
        return [
            *(w.clone() for w in self.initial),
            *(torch.zeros_like(w) for w in self.initial * 2),
        ]

    def step(self, state: State, step: int, weight_N: Tensor, *, differentiable: bool) -> State:
        """One AdamW step.

        Args:
            state: before it.
            step: counted from 0.
            weight_N: weight of each record of `index_N`.
            differentiable: whether the result knows how it depends on state and weights.

        Returns:
            The state after it.
        """
        count, optim, P = step + 1, self.optim, len(self.names)
        weights = [w if differentiable else w.detach().requires_grad_() for w in state[:P]]
        with twice_differentiable(), torch.enable_grad():
            loss = self._loss(weights, step, weight_N)
            grads = torch.autograd.grad(loss, weights, create_graph=differentiable)
        beta1, beta2 = optim.betas
        lr = learning_rate(step, optim, self.steps)
        with torch.set_grad_enabled(differentiable):
            norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
            if not torch.isfinite(norm):
                raise GradientError(
                    f"step {count}: the gradient is not finite; lower lr or clip, such a training has no derivative"
                )
            if optim.clip_norm and norm.item() > optim.clip_norm:
                factor = optim.clip_norm / (norm + 1e-6)
                grads = tuple(g * factor for g in grads)
            after: tuple[State, State, State] = [], [], []
            for w, m, v, g in zip(state[:P], state[P : 2 * P], state[2 * P :], grads, strict=True):
                first, second = m.lerp(g, 1 - beta1), v * beta2 + (1 - beta2) * g.square()
                root = _root(second / (1 - beta2**count) + self.eps_root) + optim.eps
                kept = w * (1 - lr * optim.weight_decay) if w.dim() > 1 else w
                after[0].append(kept - lr * (first / (1 - beta1**count)) / root)
                after[1].append(first)
                after[2].append(second)
        return [*after[0], *after[1], *after[2]]

    def _loss(self, weights: State, step: int, weight_N: Tensor) -> Tensor:
        batch = self.plan.batch(step)
        segments = Segments.of(batch)
        place_S = torch.from_numpy(np.searchsorted(self.index_N, segments.index_S))
        weight_P = weight_N[place_S][torch.from_numpy(segments.segment_P)].to(weights[0].dtype)
        shares = torch.zeros(batch.tokens_BT.size, dtype=weights[0].dtype)
        shares = shares.index_put((torch.from_numpy(segments.position_P),), weight_P)
        nll_BT = token_losses_at(self.model, dict(zip(self.names, weights, strict=True)), batch)
        return (nll_BT.flatten() * shares).sum() / max(1, batch.num_labels)

    @torch.no_grad()
    def train(self, weight_N: Tensor | None = None) -> State:
        """The final state under given weights; the retraining that metagradients predict.

        Args:
            weight_N: weight of each record of `index_N`, float64; 0 leaves a record out; None = ones.
        """
        chosen = self.ones() if weight_N is None else weight_N
        state = self.start()
        for step in range(self.steps):
            state = self.step(state, step, chosen, differentiable=False)
        return state

    def weights_of(self, state: State) -> dict[str, Tensor]:
        """The weights of a state, by parameter name."""
        return dict(zip(self.names, state, strict=False))

    def loss(self, state: State, target: Sequence[Batch]) -> Tensor:
        """Summed nats of a target under the weights of a state; differentiable in them."""
        parts = [token_losses_at(self.model, self.weights_of(state), b).sum() for b in target]
        return torch.stack(parts).sum()


def _root(x: Tensor) -> Tensor:
    """sqrt(x) with derivative 0 at 0: a parameter that never had a gradient doesn't move, whatever the weights are."""
    positive = x > 0
    return torch.where(positive, torch.where(positive, x, 1.0).sqrt(), 0.0)


def metagradients(
    training: WeightedTraining, targets: Sequence[Sequence[Batch]], *, checkpoints: int = 0
) -> tuple[NDArray[np.float64], State]:
    """dL_q(w_T) / d omega_r for every target and record, at omega = 1.

    Args:
        training: what to differentiate.
        targets: Q targets, each of packed rows; L_q is the summed loss in nats.
        checkpoints: states kept from the first pass, 1..steps; 0 = about sqrt(steps). Changes no bit of the result.

    Returns:
        gradients [Q, N], records as in `training.index_N`, and the final state.

    Raises:
        GradientError: checkpoints out of range, no target, or a loss or gradient that is not finite.
    """
    steps = training.steps
    if not targets or not 0 <= checkpoints <= steps:
        raise GradientError(
            f"expected at least one target and 0..{steps} checkpoints, got {len(targets)} and {checkpoints}"
        )
    width = math.ceil(steps / (checkpoints or math.ceil(math.sqrt(steps))))
    starts, kept = list(range(0, steps, width)), []
    state, ones = training.start(), training.ones()
    for step in range(steps):
        if step % width == 0:
            kept.append(state)
        state = training.step(state, step, ones, differentiable=False)
    final = state
    adjoints = [_at_the_end(training, final, target) for target in targets]
    total_QN = torch.zeros(len(targets), len(ones), dtype=torch.float64)
    training.peak_states = 0
    for first in reversed(starts):
        inside = [kept.pop()]
        for step in range(first, min(first + width, steps) - 1):
            inside.append(training.step(inside[-1], step, ones, differentiable=False))
        training.peak_states = max(training.peak_states, len(kept) + len(inside))
        for step in range(first + len(inside) - 1, first - 1, -1):
            _pull_back(training, inside.pop(), step, adjoints, total_QN)
    if not torch.isfinite(total_QN).all():
        raise GradientError(
            "metagradient: expected finite numbers, got others; raise eps_root or lower lr: this training isn't smooth"
        )
    return total_QN.numpy(), final


def _at_the_end(training: WeightedTraining, final: State, target: Sequence[Batch]) -> State:
    """lambda_T: the target's gradient, and zero for the moments."""
    P = len(training.names)
    leaves = [w.detach().requires_grad_() for w in final[:P]]
    loss = training.loss(leaves, target)
    return [*torch.autograd.grad(loss, leaves), *(torch.zeros_like(w) for w in final[P:])]


def _pull_back(
    training: WeightedTraining, state: State, step: int, adjoints: list[State], total_QN: Tensor
) -> None:
    """lambda_{t+1} -> lambda_t for every target, and its share of the result; both in place."""
    leaves = [tensor.detach().requires_grad_() for tensor in state]
    weight_N = training.ones().requires_grad_()
    after = training.step(leaves, step, weight_N, differentiable=True)
    for q, adjoint in enumerate(adjoints):
        with twice_differentiable():
            *before, weight_grad = torch.autograd.grad(
                after, [*leaves, weight_N], adjoint, retain_graph=q + 1 < len(adjoints)
            )
        adjoints[q] = before
        total_QN[q] += weight_grad


@torch.no_grad()
def smoothness(
    training: WeightedTraining, generator: np.random.Generator, *, size: float = 0.1
) -> float:
    """How straight the trained weights move when the record weights do: 1 = straight, 0 = no relation.

    Two successive differences of the final weights along a random direction d of record weights, compared by sign and
    weighed by size: sum |D_1| sign(D_1) sign(D_2) / sum |D_1| with D_k = w(1 + k h d) - w(1 + (k-1) h d).

    Args:
        training: what to look at; three trainings are done.
        generator: draws d, signs of records.
        size: h, the change of a record's weight.

    Returns:
        A number in [-1, 1].
    """
    signs = generator.choice(np.array([-1.0, 1.0]), size=len(training.index_N))
    direction, P = torch.from_numpy(signs), len(training.names)
    flat = [
        torch.cat([w.flatten() for w in training.train(training.ones() + k * size * direction)[:P]])
        for k in range(3)
    ]
    one, two = flat[1] - flat[0], flat[2] - flat[1]
    return float((one.abs() * one.sign() * two.sign()).sum() / one.abs().sum().clamp(min=1e-300))


def scores(
    training: WeightedTraining,
    train: TokenSet,
    queries: TokenSet,
    *,
    checkpoints: int = 0,
    aggregate: bool = False,
) -> Scores:
    """Metagradients as influence scores: positive = training on the record lowers the query's loss.

    Args:
        training: what to differentiate.
        train: records to score; each must be one of the training's.
        queries: whose summed losses; each its own target.
        checkpoints: see `metagradients`.
        aggregate: one target, the sum of all queries, at the cost of one; every row of the result is then its Q-th part.

    Returns:
        Scores bound to the final weights; the settings stand in the notes.

    Raises:
        HeldOutError: a query that the training uses.
        GradientError: a record that the training doesn't use, or what `metagradients` refuses.
    """
    from valuation.heldout import refuse_overlap, texts
    from valuation.influence.scores import Scores, bind

    trained = texts(training.plan.store, training.index_N.tolist())
    refuse_overlap(trained, {"queries": queries.texts()})
    place_N = np.searchsorted(training.index_N, train.index_N)
    place_N = np.minimum(place_N, len(training.index_N) - 1)
    if strangers := train.index_N[training.index_N[place_N] != train.index_N][:3].tolist():
        raise GradientError(
            f"train: expected records that the training uses, got indices {strangers} besides; leave them out"
        )
    singles = [[queries.batch(range(q, q + 1))] for q in range(len(queries.records))]
    targets = [[batch for single in singles for batch in single]] if aggregate else singles
    gradients_QN, final = metagradients(training, targets, checkpoints=checkpoints)
    if aggregate:
        gradients_QN = np.repeat(gradients_QN / len(singles), len(singles), axis=0)
    values_QN = -gradients_QN[:, place_N]
    return Scores(
        scores_QN=np.ascontiguousarray(values_QN, dtype=np.float64),
        query_index_Q=queries.index_N,
        train_index_N=train.index_N,
        query_ids=queries.ids,
        record_ids=train.ids,
        method=f"magic(eps_root={training.eps_root!r},steps={training.steps},aggregate={aggregate})",
        binding=bind(_trained(training, final), train, queries),
        notes={"optim": repr(training.optim), "seed": str(training.plan.seed)},
    )


def _trained(training: WeightedTraining, final: State) -> Transformer:
    """A model with the final weights."""
    import copy

    model = copy.deepcopy(training.model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in training.names:
                parameter.copy_(final[training.names.index(name)])
    return model
