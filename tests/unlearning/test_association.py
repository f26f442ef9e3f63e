"""Ties between people and the ripple coefficient against slow oracles, and the tautology that the reports warn of."""

import copy
import dataclasses
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from trainer.model import Transformer, init_parameters, num_parameters
from trainer.spec import ModelSpec
from unlearning import association, damage, grafts
from unlearning.association import Person

SPEC = ModelSpec(vocab_size=61, num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24)


@pytest.fixture(scope="module")
def net():
    """A small model that was trained a little, so that losses have structure."""
    made = Transformer(SPEC)
    init_parameters(made, 0)
    everybody = people(8)
    for _ in range(30):
        for person in everybody:
            damage._ascend(made, person, -0.02)  # a step down is training
    return made.eval()


def people(count, seed=1):
    """People with four records of 3 to 9 tokens; the last token stands for the end of text."""
    generator = np.random.default_rng(seed)

    def record():
        return (*generator.integers(1, 61, size=generator.integers(3, 10)).tolist(), 0)

    words = ["the", "number", "of", "is"]
    return [
        Person(
            f"p{n}",
            tuple(record() for _ in range(4)),
            frozenset([*words, f"town{n % 3}", f"name{n}"]),
        )
        for n in range(count)
    ]


def slow_gradient(net, person):
    """Gradient of the mean loss per token, one record at a time without padding or packing."""
    total = torch.zeros(())
    for document in person.documents:
        row = torch.tensor([document])
        total = total + functional.cross_entropy(net(row[:, :-1])[0], row[0, 1:], reduction="sum")
    total = total / sum(len(document) - 1 for document in person.documents)
    grads = torch.autograd.grad(total, list(net.parameters()))
    return torch.cat([g.flatten() for g in grads]).double().numpy()


@pytest.mark.parametrize("memory", [1, association.MEMORY_BYTES])
def test_gradient_ties_equal_one_backward_pass_per_person(net, monkeypatch, memory):
    """Dots and cosines from batched passes are those of separate gradients, also one person at a time."""
    monkeypatch.setattr(association, "MEMORY_BYTES", memory)
    targets, others = people(3), people(7)
    dots, cosines = association.gradient_ties(net, targets, others)
    one, two = (np.stack([slow_gradient(net, p) for p in side]) for side in (targets, others))
    np.testing.assert_allclose(dots, one @ two.T, rtol=1e-3, atol=1e-3 * np.abs(dots).max())
    scale = np.outer(np.linalg.norm(one, axis=1), np.linalg.norm(two, axis=1))
    np.testing.assert_allclose(cosines, one @ two.T / scale, atol=1e-4)
    np.testing.assert_allclose(np.diag(cosines), 1.0, atol=1e-6)


def test_last_states_are_those_before_the_end_of_text(net):
    """The state of a record is that of an unpadded row at its last word."""
    person = people(1)[0]
    found = association.last_states(net, [person])[0]
    for row, document in zip(found, person.documents, strict=True):
        with torch.inference_mode():
            hidden, _ = net.trunk(torch.tensor([document[:-1]]))
        np.testing.assert_allclose(row, hidden[0, -1].double(), atol=1e-5)


def test_representation_ties_by_hand():
    """Cosine of means; CKA of the records that both have, 1 under rotation, 0 where there are too few."""
    generator = np.random.default_rng(0)
    one = generator.normal(size=(5, 4))
    turn, _ = np.linalg.qr(generator.normal(size=(4, 4)))
    cosines, cka = association.representation_ties([one], [one, one @ turn, one[:2]])
    assert cosines[0, 0] == pytest.approx(1.0)
    assert cka[0] == pytest.approx([1.0, 1.0, 0.0])
    a, b = one.mean(0), one[:2].mean(0)
    assert cosines[0, 2] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_semantic_ties_leave_the_template_out():
    """Words of half of the people are template; what is left is compared by Jaccard."""
    everybody = people(7)
    ties = association.semantic_ties(everybody[:1], everybody)
    assert ties[0, 0] == 1.0
    assert ties[0, 3] == pytest.approx(1 / 3)  # same town, other names
    assert ties[0, 1] == 0.0
    assert association.words_of(["The Number,", "the x-ray"]) == {"the", "number", "x", "ray"}


def drawn(targets=5, others=9, seed=0):
    """Ties that damage follows with noise, pairs without the diagonal, and resamples."""
    generator = np.random.default_rng(seed)
    ties = generator.normal(size=(targets, others)) + generator.normal(size=(targets, 1))
    harm = 1e-4 * (0.6 * ties + generator.normal(size=ties.shape)) + 3.0
    pairs = ~np.eye(targets, others, dtype=bool)
    return ties, harm, pairs, association.target_draws(targets, 400, generator)


def test_the_coefficient_is_pearsons_and_its_interval_draws_whole_targets():
    """Pearson over pairs, mean r within targets and percentiles equal numpy on pairs that are copied out."""
    ties, harm, pairs, draws = drawn()
    found = association.ripple(1e6 * ties + 5e7, harm, pairs, draws)
    assert found.r == pytest.approx(np.corrcoef(ties[pairs], harm[pairs])[0, 1], abs=1e-9)
    within = [np.corrcoef(t[p], h[p])[0, 1] for t, h, p in zip(ties, harm, pairs, strict=True)]
    assert found.within == pytest.approx(np.mean(within), abs=1e-9)
    slow = []
    for row in draws.astype(int):
        chosen = np.repeat(np.arange(len(row)), row)
        x = np.concatenate([ties[t][pairs[t]] for t in chosen])
        y = np.concatenate([harm[t][pairs[t]] for t in chosen])
        slow.append(np.corrcoef(x, y)[0, 1])
    np.testing.assert_allclose(
        [found.low, found.high], np.quantile(slow, [0.025, 0.975]), atol=1e-9
    )
    assert (found.targets, found.pairs) == (5, 40)


def test_ties_without_relation_have_an_interval_around_zero():
    """Negative control: damage drawn without regard to the tie gives no coefficient."""
    generator = np.random.default_rng(1)
    ties, _, pairs, draws = drawn(8, 60)
    found = association.ripple(ties, generator.normal(size=ties.shape), pairs, draws)
    assert found.low < 0 < found.high
    assert abs(found.r) < 0.2


def test_a_constant_tie_has_no_coefficient_and_one_target_no_interval():
    """What does not vary has no r; an interval over one target says nothing and says so."""
    ties, harm, pairs, draws = drawn()
    assert np.isnan(association.ripple(np.ones_like(ties), harm, pairs, draws).r)
    alone = association.ripple(ties[:1], harm[:1], pairs[:1], np.ones((3, 1)))
    assert (alone.low, alone.high) == (-1.0, 1.0)


def test_the_difference_of_two_ties_uses_the_same_resamples():
    """A tie against itself differs by exactly zero; against noise by about its own r."""
    ties, harm, pairs, draws = drawn()
    assert association.ripple_difference(ties, ties, harm, pairs, draws) == (0.0, 0.0, 0.0)
    noise = np.random.default_rng(2).normal(size=ties.shape)
    gap, low, high = association.ripple_difference(ties, noise, harm, pairs, draws)
    one, other = (association.ripple(t, harm, pairs, draws).r for t in (ties, noise))
    assert gap == pytest.approx(one - other)
    assert low < gap < high


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.1, 1e5), st.floats(-1e5, 1e5))
def test_origin_and_unit_of_a_tie_do_not_matter(seed, unit, origin):
    """The coefficient is invariant under positive affine changes and changes sign with the tie."""
    ties, harm, pairs, draws = drawn(seed=seed)
    plain = association.ripple(ties, harm, pairs, draws)
    moved = association.ripple(unit * ties + origin, harm, pairs, draws)
    assert moved.r == pytest.approx(plain.r, abs=1e-6)
    assert association.ripple(-ties, harm, pairs, draws).r == pytest.approx(-plain.r, abs=1e-9)


def test_at_a_tiny_step_damage_is_the_gradient_dot_product(net):
    """The caveat in numbers: within each target, Taylor's theorem makes r of gradient dots nearly 1."""
    targets, others = people(4), people(30)
    goal = np.full(len(targets), 0.0)  # reached at once: one step
    harm = damage.damages(net, targets, others, goal, max_steps=3, step=1e-5)
    assert (harm.steps_T == 1).all()
    np.testing.assert_array_equal(harm.damage_TN, harm.first_TN)
    dots, _ = association.gradient_ties(net, targets, others)
    pairs = np.ones(dots.shape, dtype=bool)
    draws = association.target_draws(4, 200, np.random.default_rng(0))
    found = association.ripple(dots, harm.first_TN, pairs, draws)
    assert found.within > 0.95


def test_a_target_is_pushed_until_gold_would_not_know_it_and_the_model_stays(net):
    """Ascent stops at the goal, counts its steps, raises the target's own loss most, and leaves the model as it was."""
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    targets, others = people(2), people(8)
    start = damage.person_losses(net, targets)
    harm = damage.damages(net, targets, others, start + 0.5, max_steps=60, step=0.003)
    assert harm.reached_T.all()
    assert (harm.rise_T >= 0.5).all()
    assert (harm.steps_T > 1).all()
    assert np.diag(harm.damage_TN) == pytest.approx(harm.rise_T, abs=1e-5)
    assert all(torch.equal(before[n], p) for n, p in net.named_parameters())
    short = damage.damages(net, targets, others, start + 99.0, max_steps=2)
    assert not short.reached_T.any()
    assert (short.steps_T == 2).all()


def test_a_loader_gives_the_same_damage_and_one_model_is_alive_at_a_time(net):
    """What is pushed is what was loaded, and it is gone before the next one is read."""
    alive = weakref.WeakSet()

    def load():
        assert not alive
        made = copy.deepcopy(net)
        alive.add(made)
        return made

    targets, others = people(3), people(5)
    goal = damage.person_losses(net, targets) + 0.1
    loaded = damage.damages(load, targets, others, goal, max_steps=3)
    given_one = damage.damages(net, targets, others, goal, max_steps=3)
    np.testing.assert_array_equal(loaded.damage_TN, given_one.damage_TN)
    np.testing.assert_array_equal(loaded.first_TN, given_one.first_TN)


def test_ties_hold_one_targets_gradients_and_the_others_parameter_by_parameter(monkeypatch):
    """By the allocator's own events: beside the model one set of gradients and less than another quarter, where a set for each side would be two."""
    wide = Transformer(dataclasses.replace(SPEC, num_layers=8, dim=256, ffn_dim=256))
    init_parameters(wide, 0)
    asked = [dataclasses.replace(p, documents=p.documents[:1]) for p in people(5)]
    targets, others = asked[:2], asked[2:]
    monkeypatch.setattr(association, "MEMORY_BYTES", 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        association.gradient_ties(wide, targets, others)
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    grown = np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())])
    copies = grown / (4 * num_parameters(wide))
    assert 1 <= copies.max() < 1.25
    assert copies[-1] == 0


def test_a_parameter_in_pieces_gives_the_same_ties_norms_and_steps(net, monkeypatch):
    """What is looked at in double precision seven numbers at a time adds up to the same."""
    targets, others = people(3), people(5)
    whole = association.gradient_ties(net, targets, others)
    squares = [grafts.square_of(p) for p in net.parameters()]
    for module in (association, grafts):
        monkeypatch.setattr(module, "PIECE", 7)
    for found, expected in zip(association.gradient_ties(net, targets, others), whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    np.testing.assert_allclose([grafts.square_of(p) for p in net.parameters()], squares, rtol=1e-12)
    np.testing.assert_allclose(
        squares, [p.detach().double().norm() ** 2 for p in net.parameters()], rtol=1e-12
    )


def test_a_persons_loss_is_the_mean_over_records(net):
    """Against one unpadded row at a time."""
    person = people(1)[0]
    slow = []
    for document in person.documents:
        row = torch.tensor([document])
        with torch.inference_mode():
            slow.append(functional.cross_entropy(net(row[:, :-1])[0], row[0, 1:]).item())
    assert damage.person_losses(net, [person])[0] == pytest.approx(np.mean(slow), abs=1e-5)
