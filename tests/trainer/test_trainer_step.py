"""Claims about one step: the loss is a sum over global counts, the optimiser is AdamW, and nothing infinite passes."""

import copy
import math

import pytest
import torch
from trainer_corpus import MODEL, write_corpus

from trainer.data import BatchPlan, TokenStore
from trainer.errors import NumericalError
from trainer.likelihood import cross_entropy_sum
from trainer.model import Transformer, init_parameters
from trainer.objective import Accountable, LanguageModelling, Objective
from trainer.optim import build_optimizer, learning_rate
from trainer.spec import BatchSpec, OptimSpec
from trainer.step import train_step


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Batches of 5 rows."""
    folder = tmp_path_factory.mktemp("step")
    return BatchPlan(TokenStore.open(folder, write_corpus(folder)), 1, BatchSpec(rows=5, length=40))


def _model(dtype=torch.float32):
    model = Transformer(MODEL)
    init_parameters(model, 0)
    return model.to(dtype)


def _grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_shares_of_all_processes_add_up_to_the_whole(plan, world):
    """Law: losses and gradients of the shares, each over the global count, sum to those of one process (float64)."""
    objective = LanguageModelling(plan)
    whole, parts = _model(torch.float64), _model(torch.float64)
    batch = objective.batch(3, 0, 1)
    total = objective.counts(batch)
    loss = objective.loss(whole, batch, total)
    loss.backward()
    shares = [objective.batch(3, rank, world) for rank in range(world)]
    counts = [objective.counts(share) for share in shares]
    assert (
        len({count.item() for count in counts}) > 1
    )  # unequal, else a mean of means would pass too
    assert torch.stack(counts).sum(0) == total
    losses = [objective.loss(parts, share, total) for share in shares]
    torch.stack(losses).sum().backward()
    assert sum(x.item() for x in losses) == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(_grads(parts), _grads(whole), rtol=1e-10, atol=1e-14)


def test_the_loss_is_the_mean_over_valid_tokens(plan):
    """Oracle: torch's own mean cross entropy with ignore_index, in nats per label."""
    objective, model = LanguageModelling(plan), _model()
    tokens, labels, positions, documents = batch = objective.batch(0, 0, 1)
    got = objective.loss(model, batch, objective.counts(batch))
    want = torch.nn.functional.cross_entropy(
        model(tokens, positions, documents).flatten(0, 1), labels.flatten()
    )
    assert got.item() == pytest.approx(want.item(), rel=1e-6)


def test_the_default_objective_is_one_and_accounts_for_its_records(plan):
    """LanguageModelling satisfies both protocols; its records are those of the global batch."""
    objective = LanguageModelling(plan)
    assert isinstance(objective, Objective)
    assert isinstance(objective, Accountable)
    assert objective.records(4) == plan.records(4)


@pytest.mark.parametrize("clip_norm", [0.0, 0.05])
def test_steps_are_those_of_torch(plan, clip_norm):
    """Oracle: 8 steps equal torch.optim.AdamW(fused) with two groups and clip_grad_norm_, bit for bit unless clipped."""
    spec, objective = (
        OptimSpec(lr=1e-2, weight_decay=0.3, betas=(0.8, 0.9)),
        LanguageModelling(plan),
    )
    ours, theirs = _model(), _model()
    optimizer = build_optimizer(ours, spec)
    matrices, vectors = (
        [p for p in theirs.parameters() if (p.dim() > 1) is big] for big in (True, False)
    )
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-2, betas=(0.8, 0.9), eps=spec.eps, fused=True,
    )  # fmt: skip
    for step in range(8):
        tokens, labels, positions, documents = batch = objective.batch(step, 0, 1)
        report = train_step(
            ours, optimizer, objective, batch, objective.counts(batch), clip_norm=clip_norm
        )
        reference.zero_grad()
        loss = (
            cross_entropy_sum(theirs(tokens, positions, documents), labels)
            / objective.counts(batch)[0].float()
        )
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm or math.inf)
        reference.step()
        assert report.loss == pytest.approx(loss.item(), rel=1e-6)
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)
        assert report.tokens == objective.counts(batch).item()
    for got, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        # A clipped gradient is scaled by a float64 factor here and a float32 one there.
        torch.testing.assert_close(
            got, want, rtol=0 if not clip_norm else 1e-4, atol=0 if not clip_norm else 1e-6
        )


def test_decay_spares_vectors(plan):
    """With gradients of zero, matrices shrink by lr * decay and norm weights stay."""
    model = _model()
    optimizer = build_optimizer(model, OptimSpec(lr=0.5, weight_decay=0.1))
    before = copy.deepcopy(dict(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] * (0.95 if parameter.dim() > 1 else 1.0))


def test_the_schedule_at_its_corners():
    """Warm-up is linear to the peak, the last step is min_lr_ratio of it, the middle of the cosine is the mean."""
    spec = OptimSpec(lr=2.0, min_lr_ratio=0.1, warmup_steps=4)
    rates = [learning_rate(step, spec, 15) for step in range(15)]
    assert rates[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rates[9] == pytest.approx(1.1)
    assert rates[-1] == pytest.approx(0.2)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert learning_rate(99, spec, 15) == pytest.approx(0.2)
    assert learning_rate(0, OptimSpec(lr=2.0, warmup_steps=0), 1) == 2.0


def test_wsd_is_flat_and_then_falls_as_one_minus_a_root():
    """Closed form: linear warm-up, lr until the last D steps, r + (1-r)(1 - sqrt(k/D)) in them, r at the last step."""
    spec = OptimSpec(lr=2.0, min_lr_ratio=0.1, warmup_steps=4, schedule="wsd", decay_share=0.25)
    rates = [learning_rate(step, spec, 64) for step in range(64)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4:48] == [2.0] * 44
    for k in range(1, 17):
        assert rates[47 + k] == pytest.approx(2 * (0.1 + 0.9 * (1 - math.sqrt(k / 16))), rel=1e-15)
    assert rates[-1] == pytest.approx(0.2)
    assert learning_rate(999, spec, 64) == pytest.approx(0.2)
    never = OptimSpec(lr=2.0, warmup_steps=0, schedule="wsd", decay_share=0.0)
    assert {learning_rate(step, never, 8) for step in range(8)} == {2.0}


def test_the_stable_part_of_wsd_knows_no_length():
    """Why it is there: runs of 100 and 1,000 steps have the same rates until the shorter one decays; cosine hasn't."""
    for schedule, same in (("wsd", True), ("cosine", False)):
        spec = OptimSpec(schedule=schedule, warmup_steps=10, decay_share=0.2)
        short, long = (
            [learning_rate(step, spec, steps) for step in range(80)] for steps in (100, 1000)
        )
        assert (short == long) is same


def test_one_batch_can_be_learned_by_heart(plan):
    """The loss of a repeated batch falls below a tenth of its start: gradients reach every part."""
    objective, model = LanguageModelling(plan), _model()
    optimizer = build_optimizer(model, OptimSpec(lr=1e-2, weight_decay=0.0))
    batch = objective.batch(0, 0, 1)
    losses = [
        train_step(model, optimizer, objective, batch, objective.counts(batch)).loss
        for _ in range(150)
    ]
    assert losses[-1] < 0.1 * losses[0]


class _Poisoned(LanguageModelling):
    """Next-token training whose loss is not finite."""

    def __init__(self, plan, factor):
        super().__init__(plan)
        self.factor = factor

    def loss(self, model, batch, totals_K):
        """The loss, spoiled."""
        return super().loss(model, batch, totals_K) * self.factor


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_changes_no_weight(plan, factor):
    """NaN and infinity raise NumericalError before the update."""
    model = _model()
    optimizer, objective = build_optimizer(model, OptimSpec()), _Poisoned(plan, factor)
    before = copy.deepcopy(model.state_dict())
    batch = objective.batch(0, 0, 1)
    with pytest.raises(NumericalError, match="loss"):
        train_step(model, optimizer, objective, batch, objective.counts(batch))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert optimizer.count == 0


class _TwoTerms:
    """Even rows are term 0, odd rows term 1 with weight 3: what unlearning losses look like."""

    def __init__(self, plan):
        self.inner = LanguageModelling(plan)

    def batch(self, step, rank, world):
        """As the inner objective."""
        return self.inner.batch(step, rank, world)

    def counts(self, batch):
        """Labels in even and in odd rows."""
        labels = batch[1]
        return torch.stack([(labels[k::2] >= 0).sum() for k in (0, 1)]).double()

    def loss(self, model, batch, totals_K):
        """Sum of both terms over their own totals."""
        tokens, labels, positions, documents = batch
        logits = model(tokens, positions, documents)
        terms = [
            cross_entropy_sum(logits[k::2], labels[k::2]) / totals_K[k].float() for k in (0, 1)
        ]
        return terms[0] + 3 * terms[1]


def test_two_terms_have_their_own_totals_and_may_be_empty(plan):
    """A two-term loss is each term's own mean; a term without any position counts 0, not NaN."""
    objective, model = _TwoTerms(plan), _model()
    optimizer = build_optimizer(model, OptimSpec())
    tokens, labels, positions, documents = batch = objective.batch(0, 0, 1)
    mean = torch.nn.functional.cross_entropy
    logits = model(tokens, positions, documents)
    want = sum(
        w * mean(logits[k::2].flatten(0, 1), labels[k::2].flatten()) for k, w in ((0, 1), (1, 3))
    )
    report = train_step(model, optimizer, objective, batch, objective.counts(batch))
    assert report.loss == pytest.approx(want.item(), rel=1e-6)
    labels[1::2] = -100
    report = train_step(model, optimizer, objective, batch, objective.counts(batch))
    assert math.isfinite(report.loss)
