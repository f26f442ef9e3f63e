"""The divergence from the original, against torch's own operations in float64."""

import torch

from unlearning.methods import divergence
from unlearning.methods.divergence import divergence_sum


def case(seed, positions=7, width=11):
    """Logits of ours and of the original, and which positions count."""
    generator = torch.Generator().manual_seed(seed)
    ours, theirs = (
        4 * torch.randn(positions, width, generator=generator, dtype=torch.float64)
        for _ in range(2)
    )
    return ours.requires_grad_(), theirs, torch.arange(positions) % 3 != 1


def test_value_and_gradient_are_the_formulas(monkeypatch):
    """Sum of Σ p (log p - log q) over counted positions, and autograd's gradient of it, to 1e-12, in pieces of any size."""
    for size in (1, 24, 2**18):
        monkeypatch.setattr(divergence, "_CHUNK", size)
        ours, theirs, counted = case(size)
        log_p, log_q = theirs.log_softmax(-1)[counted], ours.log_softmax(-1)[counted]
        want = (log_p.exp() * (log_p - log_q)).sum()
        (gradient,) = torch.autograd.grad(3 * want, ours)
        got = divergence_sum(ours, theirs, counted, None)
        (found,) = torch.autograd.grad(3 * got, ours)
        assert torch.allclose(got, want, rtol=1e-12, atol=0)
        assert torch.allclose(found, gradient, rtol=0, atol=1e-12)


def test_nothing_is_said_of_equal_logits_and_of_positions_that_do_not_count():
    """Equal logits and no counted position both give 0 with a gradient of 0."""
    ours, theirs, counted = case(1)
    for pair, which in (((ours, ours.detach()), counted), ((ours, theirs), counted & False)):
        found = divergence_sum(*pair, which, None)
        (gradient,) = torch.autograd.grad(found, ours)
        assert found.abs() < 1e-12
        assert gradient.abs().max() < 1e-12
