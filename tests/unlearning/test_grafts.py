"""Ripple by part of the model: exact where one part was changed, additive where parts don't interact, weights as they were."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from unlearning.association import Person
from unlearning.damage import person_losses
from unlearning.errors import RowsError
from unlearning.grafts import grafts, parts_of, update_norms

SPEC = ModelSpec(vocab_size=61, num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24)
UNTIED = ModelSpec(vocab_size=61, num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=24, tied=False)  # fmt: skip


def model(spec=SPEC, seed=0):
    made = Transformer(spec)
    init_parameters(made, seed)
    return made.eval()


def people(count=5):
    generator = np.random.default_rng(4)
    return [
        Person(f"p{n}", tuple(tuple(generator.integers(0, 61, size=7).tolist()) for _ in range(2)), frozenset())
        for n in range(count)
    ]  # fmt: skip


def losses(net):
    return person_losses(net, people())


def moved(net, part, by=0.5, seed=1):
    """Parameters with one part moved by noise."""
    generator = torch.Generator().manual_seed(seed)
    chosen = parts_of([name for name, _ in net.named_parameters()])[part]
    return {
        name: p.detach() + by * torch.randn(p.shape, generator=generator) * (name in chosen)
        for name, p in net.named_parameters()
    }


PARTS = ["embedding", "layer 1 attention", "layer 1 feed-forward", "layer 2 attention", "layer 2 feed-forward", "head"]  # fmt: skip


@pytest.mark.parametrize("spec", [SPEC, UNTIED])
def test_every_parameter_belongs_to_exactly_one_part(spec):
    """Six parts of a two-layer model, in order; together they are all parameters, once."""
    names = [name for name, _ in model(spec).named_parameters()]
    found = parts_of(names)
    assert list(found) == PARTS
    assert sorted(name for part in found.values() for name in part) == sorted(names)
    assert ("head.weight" in found["head"]) == (not spec.tied)


@pytest.mark.parametrize("part", PARTS)
def test_a_method_that_changes_one_part_does_nothing_through_the_others(part):
    """Applied and reverted are the whole damage for that part, and exactly zero, like the norm, for the untouched ones."""
    net = model()
    after = moved(net, part)
    changed = model()
    with torch.no_grad():
        for name, p in changed.named_parameters():
            p.copy_(after[name])
    whole = losses(changed) - losses(net)
    assert np.abs(whole).max() > 1e-3
    for one in grafts(net, after, losses):
        if one.part == part:
            np.testing.assert_array_equal(one.applied, whole)
            np.testing.assert_array_equal(one.reverted, whole)
            assert one.norm > 0
        else:
            assert one.norm == 0.0
            assert not one.applied.any()
            assert not one.reverted.any()


def test_norms_by_hand():
    """A part whose weights are doubled has moved by its own length; one that is halved by half of it."""
    net = model()
    factors = {"layer 1 attention": 2.0, "head": 0.5}
    parts = parts_of([name for name, _ in net.named_parameters()])
    factor_of = {name: factors.get(part, 1.0) for part, names in parts.items() for name in names}
    before = dict(net.named_parameters())
    found = update_norms(before, {name: factor_of[name] * p for name, p in before.items()})
    assert found["layer 1 attention"] == pytest.approx(1.0)
    assert found["head"] == pytest.approx(0.5)
    assert found["layer 2 attention"] == 0.0
    zero = {"embed.weight": torch.zeros(2, 2)}
    assert update_norms(zero, {"embed.weight": torch.ones(2, 2)}) == {"embedding": float("inf")}
    assert update_norms(zero, zero) == {"embedding": 0.0}


@given(st.integers(0, 2**16))
@settings(max_examples=20, deadline=None)
def test_of_a_measure_that_is_linear_in_the_weights_the_parts_add_up(seed):
    """Closed form: for c . theta both sums over parts are c . (theta_u - theta_o), part by part the same number."""
    net, other = model(), model(seed=seed + 1)
    generator = torch.Generator().manual_seed(seed)
    weights = {n: torch.randn(p.shape, generator=generator) for n, p in net.named_parameters()}

    def measure(one):
        return np.array([sum(float((weights[n].double() * p.detach().double()).sum()) for n, p in one.named_parameters())])  # fmt: skip

    whole = measure(other) - measure(net)
    found = grafts(net, dict(other.named_parameters()), measure)
    np.testing.assert_allclose(sum(one.applied for one in found), whole, atol=1e-8)
    for one in found:
        np.testing.assert_allclose(one.applied, one.reverted, atol=1e-8)


def test_both_models_are_bit_for_bit_their_own_again():
    """Also when the measure fails in the middle."""
    net, other = model(), model(seed=3)
    before = [p.detach().clone() for p in net.parameters()]
    after = [p.detach().clone() for p in other.parameters()]
    grafts(net, dict(other.named_parameters()), losses)
    calls = []

    def failing(one):
        calls.append(one)
        if len(calls) == 9:  # inside of a part taken back, with everything exchanged
            raise KeyboardInterrupt
        return losses(one)

    with pytest.raises(KeyboardInterrupt):
        grafts(net, dict(other.named_parameters()), failing)
    for kept, p in zip((*before, *after), (*net.parameters(), *other.parameters()), strict=True):
        assert torch.equal(kept, p)


def test_models_of_two_shapes_are_refused():
    """By the name of the first parameter that differs."""
    with pytest.raises(RowsError, match=r"head\.weight differs"):
        update_norms(dict(model().named_parameters()), dict(model(UNTIED).named_parameters()))
