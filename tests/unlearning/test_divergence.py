"""The divergence from the original, against torch's own operations in float64."""

import pytest
import torch

from unlearning.methods import divergence
from unlearning.methods.divergence import Distribution, divergence_sum


def case(seed, positions=7, width=11):
    """Logits of ours, the original's states and head, and which positions count."""
    generator = torch.Generator().manual_seed(seed)
    ours, states, head = (
        scale * torch.randn(*shape, generator=generator, dtype=torch.float64)
        for scale, shape in ((4, (positions, width)), (2, (positions, 5)), (1, (width, 5)))
    )
    return ours.requires_grad_(), Distribution(states, head), torch.arange(positions) % 3 != 1


def test_value_and_gradient_are_the_formulas(monkeypatch):
    """Sum of Σ p (log p - log q) over counted positions, and autograd's gradient of it, to 1e-12, in pieces of any size."""
    for size in (1, 24, 2**18):
        monkeypatch.setattr(divergence, "_CHUNK", size)
        ours, theirs, counted = case(size)
        logits = theirs.states_PD @ theirs.head_vD.T
        log_p, log_q = logits.log_softmax(-1)[counted], ours.log_softmax(-1)[counted]
        want = (log_p.exp() * (log_p - log_q)).sum()
        (gradient,) = torch.autograd.grad(3 * want, ours)
        got = divergence_sum(ours, theirs, counted, None)
        (found,) = torch.autograd.grad(3 * got, ours)
        assert torch.allclose(got, want, rtol=1e-12, atol=0)
        assert torch.allclose(found, gradient, rtol=0, atol=1e-12)


def test_nothing_is_said_of_equal_logits_and_of_positions_that_do_not_count():
    """Equal logits and no counted position both give 0 with a gradient of 0."""
    ours, theirs, counted = case(1)
    same = theirs.logits(slice(None)).clone().requires_grad_()
    for pair, which in (((same, theirs), counted), ((ours, theirs), counted & False)):
        found = divergence_sum(*pair, which, None)
        (gradient,) = torch.autograd.grad(found, pair[0])
        assert found.abs() < 1e-12
        assert gradient.abs().max() < 1e-12


def test_float32_is_as_good_as_its_numbers():
    """Near-equal logits far from 0, in float32: 1e-5 of the float64 divergence, where normalisers left in the sum would leave nothing."""
    generator = torch.Generator().manual_seed(3)
    states, head = (
        torch.randn(64, 16, generator=generator),
        torch.randn(512, 16, generator=generator),
    )
    theirs = Distribution(states, head)
    ours = theirs.logits(slice(None)) + 0.02 * torch.randn(64, 512, generator=generator)
    counted = torch.ones(64, dtype=torch.bool)
    wide = [x.double().log_softmax(-1) for x in (theirs.logits(slice(None)), ours)]
    want = (wide[0].exp() * (wide[0] - wide[1])).sum()
    got = divergence_sum(ours.requires_grad_(), theirs, counted, None)
    assert abs(got.item() / want.item() - 1) < 1e-4
    got.backward(retain_graph=True)
    torch.testing.assert_close(
        ours.grad.double(), wide[1].exp() - wide[0].exp(), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.backward()
