"""Cross entropy against torch's own: values, gradients, pieces, types; cut by token id it is tested with the exchanges."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer import likelihood
from trainer.data import IGNORE
from trainer.likelihood import cross_entropy_sum


def case(rows, length, vocab, seed, scale=3.0, dtype=torch.float64):
    """Logits, labels of which some are left out, and a weight for the gradient."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, vocab, dtype=torch.float64, generator=generator) * scale
    labels = torch.randint(0, vocab, (rows, length), generator=generator)
    labels[torch.rand(rows, length, generator=generator) < 0.3] = IGNORE
    return logits.to(dtype).requires_grad_(), labels


def reference(logits, labels):
    """Torch's cross entropy, in float64."""
    return torch.nn.functional.cross_entropy(
        logits.double().flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 40), st.integers(1, 64), st.integers(0))
def test_equals_torch_whatever_the_pieces(rows, length, vocab, chunk, seed):
    """Value and gradient are those of torch's cross entropy, however many rows are worked on at a time."""
    logits, labels = case(rows, length, vocab, seed % 2**32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(likelihood._CHUNK, "cpu", chunk)
        found = cross_entropy_sum(logits, labels)
        (grad,) = torch.autograd.grad(0.3 * found, logits)
    wanted = reference(logits, labels)
    (expected,) = torch.autograd.grad(0.3 * wanted, logits)
    assert torch.allclose(found, wanted, rtol=1e-13, atol=1e-13)
    assert torch.allclose(grad, expected, rtol=1e-12, atol=1e-14)
    assert (grad[labels == IGNORE] == 0).all(), "a position without label has a gradient"


def test_large_logits_overflow_nothing():
    """A sum of exponentials of float32 logits beyond 88 would be infinite; the loss stays exact."""
    logits, labels = case(2, 5, 7, seed=1, scale=1e4, dtype=torch.float32)
    found = cross_entropy_sum(logits, labels)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.item(), reference(logits, labels).item(), rtol=1e-6)


def test_bfloat16_logits_are_summed_in_float32():
    """For bfloat16 logits the loss is float32 and only the gradient is rounded, once."""
    logits, labels = case(4, 64, 300, seed=2, dtype=torch.bfloat16)
    found = cross_entropy_sum(logits, labels)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.item(), reference(logits, labels).item(), rtol=1e-6)
    (grad,) = torch.autograd.grad(found, logits)
    (expected,) = torch.autograd.grad(reference(logits, labels), logits)
    assert grad.dtype == torch.bfloat16
    assert torch.allclose(grad.double(), expected.double(), rtol=2**-8, atol=1e-9)


def test_no_label_at_all_is_zero_not_nan():
    """A batch of padding alone costs nothing and moves nothing, also where its logits are not finite."""
    logits = torch.full((1, 3, 4), float("nan"), requires_grad=True)
    found = cross_entropy_sum(logits, torch.full((1, 3), IGNORE))
    assert found.item() == 0


def test_not_finite_logits_are_seen():
    """NaN in a position with a label makes the loss NaN, which the step refuses."""
    logits, labels = case(1, 3, 4, seed=0)
    labels[0, 1] = 2
    broken = logits.detach().clone()
    broken[0, 1, 3] = float("nan")
    assert cross_entropy_sum(broken, labels).isnan()


def test_second_derivatives_are_those_of_torch():
    """A Hessian-vector product through the loss is that of torch's cross entropy; none of its terms is lost."""
    logits, labels = case(2, 3, 5, seed=4)
    vector = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def product(loss):
        (grad,) = torch.autograd.grad(loss(logits.sin(), labels), logits, create_graph=True)
        return torch.autograd.grad((grad * vector).sum(), logits)[0]

    assert torch.allclose(product(cross_entropy_sum), product(reference), rtol=1e-12, atol=1e-14)
