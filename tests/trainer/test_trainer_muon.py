"""Claims about Muon: its formula, which parameters it moves, and that slices change nothing."""

import copy
import math

import pytest
import torch
from trainer_corpus import MODEL
from trainer_processes import run_processes
from trainer_slices import SPEC, Net, muon_steps, set_gradients, sliced_steps

from trainer.model import Transformer, init_parameters
from trainer.muon import NS_COEFFICIENTS, Muon, is_hidden_matrix, orthogonalise
from trainer.optim import AdamW, build_optimizer
from trainer.spec import OptimSpec


def _model(dtype=torch.float32):
    model = Transformer(MODEL)
    init_parameters(model, 0)
    return model.to(dtype)


@pytest.mark.parametrize(("rows", "columns"), [(12, 12), (40, 7), (7, 40), (1, 5)])
def test_singular_vectors_stay_and_singular_values_go_to_one(rows, columns):
    """Oracle: with U = P S Q^T, NS(U) = P f(S / |U|) Q^T where f is the polynomial, five times; so says the SVD."""
    p, q, r = NS_COEFFICIENTS
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = p * values + q * values**3 + r * values**5
    want = left @ torch.diag(values) @ right
    torch.testing.assert_close(orthogonalise(matrix), want, rtol=0, atol=1e-12)
    assert ((values > 0.3) & (values < 1.3)).all()


def test_a_stack_is_orthogonalised_matrix_by_matrix():
    """Experts [E, a, b]: each as if it were alone; a matrix of zeros stays zero instead of becoming NaN."""
    generator = torch.Generator().manual_seed(0)
    stack = torch.randn(3, 6, 4, dtype=torch.float64, generator=generator)
    stack[1] = 0
    found = orthogonalise(stack)
    for matrix, expected in zip(found, stack, strict=True):
        torch.testing.assert_close(matrix, orthogonalise(expected), rtol=0, atol=1e-14)
    assert (found[1] == 0).all()


def test_steps_are_those_of_torch():
    """Oracle: five steps equal torch.optim.Muon(match_rms_adamw), which computes Newton-Schulz in bfloat16 only."""
    ours, theirs = _model(), _model()
    optimizer = Muon(dict(ours.named_parameters()), SPEC, torch.bfloat16)
    hidden = [p for name, p in theirs.named_parameters() if is_hidden_matrix(name, p.shape)]
    reference = torch.optim.Muon(
        hidden, lr=SPEC.lr, weight_decay=0.1, momentum=0.9, nesterov=True,
        ns_coefficients=NS_COEFFICIENTS, ns_steps=5, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    start = copy.deepcopy(dict(theirs.named_parameters()))
    for step in range(5):
        set_gradients(ours.named_parameters(), step)
        set_gradients(theirs.named_parameters(), step)
        optimizer.step()
        reference.step()
    twins = dict(theirs.named_parameters())
    for name in optimizer.hidden:
        got, want = optimizer.parameters[name], twins[name]
        moved = (want - start[name]).norm()
        # Bfloat16 rounds each product by up to 0.4 %, in another order here and there, over five rounds and five steps.
        assert (got - want).norm() < 0.05 * moved, name


def test_the_update_is_the_formula_in_float64():
    """Oracle: momentum, Nesterov, decay and scale written out once more, for two steps, to 1e-14."""
    model = _model(torch.float64)
    optimizer = build_optimizer(model, SPEC)
    name = "blocks.0.ffn.w1.weight"
    weight = model.get_parameter(name).detach().clone()
    momentum = torch.zeros_like(weight)
    for step in range(2):
        set_gradients(model.named_parameters(), step)
        grad = model.get_parameter(name).grad.clone()
        optimizer.lr = 0.01 * (step + 1)
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * grad
        update = orthogonalise(0.1 * grad + 0.9 * momentum)
        scale = 0.2 * math.sqrt(max(weight.shape))
        weight = weight * (1 - optimizer.lr * 0.1) - optimizer.lr * scale * update
    torch.testing.assert_close(model.get_parameter(name).detach(), weight, rtol=0, atol=1e-14)


def test_an_update_has_the_size_of_one_of_adamw():
    """Law behind the shared learning rate: root mean square of an update in 0.1..0.3, for tall and wide matrices."""
    model = _model()
    optimizer = build_optimizer(model, OptimSpec(name="muon", lr=1.0, weight_decay=0.0))
    before = copy.deepcopy(dict(model.named_parameters()))
    set_gradients(model.named_parameters(), 0)
    optimizer.step()
    for name in optimizer.hidden:
        rms = (before[name] - optimizer.parameters[name]).square().mean().sqrt().item()
        assert 0.1 < rms < 0.3, name


def test_who_moves_what():
    """Matrices of the blocks go by Muon; embedding, head, norms and router by AdamW; each has its own state."""
    model = _model()
    optimizer = build_optimizer(model, SPEC)
    assert isinstance(optimizer, Muon)
    assert isinstance(build_optimizer(model, OptimSpec()), AdamW)
    names = {name for name, _ in model.named_parameters()}
    assert set(optimizer.hidden) == {
        n for n in names if n.startswith("blocks.") and "norm" not in n
    }
    assert set(optimizer.rest.parameters) == names - set(optimizer.hidden)
    assert set(optimizer.state()) == (
        {"step"}
        | {f"{n}.momentum" for n in optimizer.hidden}
        | {f"{n}.{m}" for n in optimizer.rest.parameters for m in ("exp_avg", "exp_avg_sq")}
    )
    for name, shape, hidden in [
        ("blocks.3.experts.w1", (8, 4, 4), True),
        ("blocks.3.experts.router.weight", (8, 4), False),
        ("blocks.3.router.weight", (8, 4), False),
        ("blocks.3.attention_norm.weight", (4,), False),
        ("embed.weight", (9, 4), False),
        ("head.weight", (9, 4), False),
    ]:
        assert is_hidden_matrix(name, torch.Size(shape)) is hidden, name


def test_what_is_frozen_or_without_gradient_stays():
    """A parameter without gradient keeps its bits and gets no decay; a frozen one has no state."""
    model = _model()
    model.get_parameter("blocks.0.attention.wq.weight").requires_grad_(requires_grad=False)
    optimizer = build_optimizer(model, SPEC)
    assert "blocks.0.attention.wq.weight" not in optimizer.parameters
    set_gradients(model.named_parameters(), 0)
    model.get_parameter("blocks.1.ffn.w2.weight").grad = None
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    same = {n for n, t in model.state_dict().items() if torch.equal(t, before[n])}
    assert same == {"blocks.0.attention.wq.weight", "blocks.1.ffn.w2.weight"}


@pytest.mark.parametrize("layout", ["fsdp", "hsdp", "tp and ep", "fsdp over tp"])
def test_slices_move_as_the_whole_does(tmp_path, layout):
    """Four processes with sliced matrices and experts: weights after three steps equal one process's to 1e-12 (float64)."""
    want = muon_steps(Net())
    for found in run_processes(4, tmp_path / "group", sliced_steps, layout):
        for name, weight in found.items():
            torch.testing.assert_close(
                torch.tensor(weight), torch.tensor(want[name]), rtol=0, atol=1e-12, msg=name
            )


def test_orthogonalising_slices_would_be_seen():
    """Negative control: Newton-Schulz of the two halves is far from the half of Newton-Schulz."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(14, 10, dtype=torch.float64, generator=generator)
    halves = torch.cat([orthogonalise(matrix[:7]), orthogonalise(matrix[7:])])
    assert (halves - orthogonalise(matrix)).abs().max() > 0.1
