"""Claims about the mixture of experts: it is its formula, it balances itself, and layouts see the same numbers."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import MIXTURE, MODEL, documents, make_run, record_id
from trainer_mixtures import SPEC, mixture_model, mixture_steps
from trainer_processes import run_processes

from trainer.checkpoint import load_model, model_state, newest, verify
from trainer.data import pack
from trainer.errors import SpecError
from trainer.experts import (
    Experts,
    MixtureOfExperts,
    balance_loads,
    grouped_product,
    local_dispatch,
    reset_loads,
)
from trainer.loop import fit
from trainer.model import Transformer
from trainer.spec import ModelSpec, save_run


def _mixture(seed=0, dtype=torch.float64, **changes):
    """One layer of random weights and biases."""
    spec = dataclasses.replace(SPEC, **changes)
    generator = torch.Generator().manual_seed(seed)
    layer = MixtureOfExperts(spec).double()
    with torch.no_grad():
        for tensor in (*layer.parameters(), layer.balance):
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) / 4)
    return layer.to(dtype)


def _tokens(*shape, seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, MODEL.dim, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_()


def _naive(layer, x_BTD):
    """Token by token, expert by expert."""
    rows = []
    for x in x_BTD.flatten(0, -2):
        score = torch.sigmoid(layer.router.weight @ x)
        chosen = (score + layer.balance).sort(descending=True).indices[: layer.num_chosen].tolist()
        total = sum(score[e] for e in chosen)
        out = torch.zeros_like(x) if layer.shared is None else layer.shared(x)
        for e in chosen:
            w1, w3, w2 = (w[e] for w in (layer.experts.w1, layer.experts.w3, layer.experts.w2))
            gate = w1 @ x
            out = out + score[e] / total * (w2 @ (gate * torch.sigmoid(gate) * (w3 @ x)))
        rows.append(out)
    return torch.stack(rows).view_as(x_BTD)


def _gradients(layer, x, y):
    weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return torch.autograd.grad((y * weight).sum(), [x, *layer.parameters()])


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 3),
    length=st.integers(1, 9),
    experts=st.integers(2, 9),
    chosen=st.integers(1, 3),
    shared=st.sampled_from([0, 16]),
)
def test_the_mixture_is_its_formula(seed, rows, length, experts, chosen, shared):
    """Oracle: output and every gradient equal a loop over tokens and experts, in float64 to 1e-12."""
    layer = _mixture(
        seed, num_experts=experts, experts_per_token=min(chosen, experts), shared_expert_dim=shared
    )
    x = _tokens(rows, length, seed=seed)
    y, expected = layer(x), _naive(layer, x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    for got, want in zip(_gradients(layer, x, y), _gradients(layer, x, expected), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("width", [24, 21])
def test_grouped_and_looped_products_agree(dtype, atol, width):
    """One grouped kernel, the loop that float64 takes, and widths that the kernel refuses: the same products."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(s, generator=generator) for s in ((20, 32), (4, width, 32)))
    load = torch.tensor([5, 0, 12, 3])
    got = grouped_product(rows.to(dtype), weight.to(dtype), load)
    assert got.dtype == dtype
    expected = grouped_product(rows.double(), weight.double(), load)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=atol * width**0.5)


def test_under_autocast_experts_compute_in_bfloat16_and_the_router_does_not():
    """bfloat16 autocast: expert products have its rounding, choices and weights are those of float32."""
    layer, x = _mixture(dtype=torch.float32), _tokens(2, 8, dtype=torch.float32)
    plain = layer.route(x.flatten(0, 1))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, y = layer.route(x.flatten(0, 1)), layer(x)
        product = grouped_product(x[0], layer.experts.w1, torch.tensor([8, 0, 0, 0, 0, 0]))
    assert product.dtype == torch.bfloat16
    assert torch.equal(plain[0], mixed[0])
    assert torch.equal(plain[1], mixed[1])
    assert 0 < (y - layer(x)).abs().max() < 0.05 * layer(x).abs().max()
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_idle_experts_have_a_gradient_of_zero(dtype):
    """All tokens at two experts: the others' gradients are zeros, not missing, and the chosen ones' are not."""
    layer, x = _mixture(dtype=dtype), _tokens(2, 8, dtype=dtype)
    layer.balance.fill_(-9)
    layer.balance[[1, 4]] = 9
    layer(x).square().sum().backward()
    for weight in layer.experts.parameters():
        idle = weight.grad[[0, 2, 3, 5]]
        assert (idle == 0).all()
        assert (weight.grad[[1, 4]].abs().amax((1, 2)) > 0).all()
    assert layer.load.tolist() == [0, 16, 0, 0, 16, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_token_at_all_is_computed_too(dtype):
    """A process whose experts get nothing: an empty result, and gradients of zero."""
    experts = Experts(32, 24, 3).to(dtype)
    rows = torch.empty(0, 32, dtype=dtype, requires_grad=True)
    y = experts(rows, torch.zeros(3, dtype=torch.int64))
    assert y.shape == (0, 32)
    y.square().sum().backward()
    assert all((weight.grad == 0).all() for weight in experts.parameters())


def test_a_bias_chooses_but_neither_weighs_nor_learns():
    """A bias that changes no choice changes no number; and it has no gradient."""
    layer, x = _mixture(), _tokens(2, 8)
    before = layer(x)
    layer.balance += 3.0
    assert torch.equal(layer(x), before)
    assert "balance" not in dict(layer.named_parameters())
    assert not layer.balance.requires_grad


def test_the_dispatch_can_be_replaced():
    """The seam for expert parallelism gets rows sorted by expert and their numbers, and returns rows in that order."""
    layer, x, seen = _mixture(), _tokens(2, 8), []

    def dispatch(rows, load, experts):
        seen.append((rows.detach(), load))
        parts = zip(rows.split(load.tolist()), load.diag(), strict=True)
        return torch.cat([experts(part, only) for part, only in parts])

    expected, layer.dispatch = layer(x), dispatch
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    rows, load = seen[0]
    assert load.sum() == len(rows) == 2 * 8 * 2
    chosen, _ = layer.route(x.flatten(0, 1))
    for expert, part in enumerate(rows.split(load.tolist())):
        assert torch.equal(part, x.detach().flatten(0, 1)[(chosen == expert).any(1)])
    layer.dispatch = local_dispatch


def test_one_step_of_balance_is_the_sign_of_the_load_error():
    """Oracle: loads 5, 1, 3, 3 of mean 3 move the biases by -rate, +rate, 0, 0, and are forgotten."""
    layer = _mixture(num_experts=4)
    before = layer.balance.clone()
    layer.load += torch.tensor([5, 1, 3, 3])
    balance_loads(layer, lambda loads: loads)
    moved = torch.tensor([-1.0, 1.0, 0.0, 0.0], dtype=torch.float64) * SPEC.balance_rate
    assert torch.equal(layer.balance, before + moved)
    assert (layer.load == 0).all()


def test_only_gradients_and_real_tokens_count_as_load():
    """Evaluation and padding are no load; and a step forgets what was counted before it."""
    model = mixture_model()
    docs = [(i, record_id(i), doc) for i, doc in enumerate(documents(3, seed=2, longest=20))]
    batch = pack(docs, 40)
    tokens, _, *where = batch.tensors()
    real = int((batch.documents_BT >= 0).sum())
    assert 0 < real < tokens.numel()
    with torch.no_grad():
        model(tokens, *where)
    loads = [block.ffn.load for block in model.blocks.values()]
    assert all((load == 0).all() for load in loads)
    model(tokens, *where)
    assert [int(load.sum()) for load in loads] == [2 * real] * 2
    reset_loads(model)
    assert all((load == 0).all() for load in loads)


def test_balancing_evens_out_the_load():
    """After 60 steps the busiest expert has less than with rate 0 (negative control), and no expert is idle."""
    busiest = {}
    for rate in (0.0, 2e-2):
        layer = _mixture(seed=3, balance_rate=rate)
        layer.balance.zero_()
        x = _tokens(8, 64).detach() + 1.0  # all tokens lean to the same experts
        for _ in range(60):
            layer(x)
            load = layer.load.clone()
            balance_loads(layer, lambda loads: loads)
        busiest[rate] = (load.max() / load.sum()).item()
    assert busiest[0.0] > 0.3
    assert busiest[2e-2] < 0.22  # 1 / 6 = 0.167 is even
    assert load.min() > 0


def test_two_processes_balance_like_one(tmp_path):
    """Loads are added up over processes before the sign is taken: the biases are equal bit for bit after 4 steps."""
    expected, losses = mixture_steps(4)
    for balance, seen in run_processes(2, tmp_path / "group", mixture_steps, 4):
        assert balance == expected
        torch.testing.assert_close(seen, losses, rtol=1e-12, atol=0)
    assert any(abs(b) > 2 * SPEC.balance_rate for layer in expected for b in layer)


def test_biases_are_part_of_the_checkpoint(tmp_path):
    """A mixture stops and resumes bitwise; its biases come back, and the root depends on them."""
    roots = {}
    for name, every in (("whole", 6), ("parts", 3)):
        run = make_run(tmp_path, name, steps=6, every=every, model=SPEC)
        save_run(run, tmp_path / name)
        assert fit(run, tmp_path / name) == 0
        if name == "parts":
            for path in (tmp_path / name / "step-6").iterdir():
                path.unlink()
            (tmp_path / name / "step-6").rmdir()
            (tmp_path / name / "result.json").unlink(missing_ok=True)
            assert fit(run, tmp_path / name) == 0
        roots[name] = verify(newest(tmp_path / name)).root
    assert roots["whole"] == roots["parts"]
    model = load_model(newest(tmp_path / "whole"), SPEC)
    biases = [block.ffn.balance for block in model.blocks.values()]
    assert all((bias != 0).any() for bias in biases)
    assert {f"model.blocks.{i}.ffn.balance" for i in range(2)} <= set(model_state(model))
    assert not any(name.endswith("load") for name in model_state(model))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"experts_per_token": 2}, "num_experts"),
        ({"expert_dim": 8}, "num_experts"),
        ({"shared_expert_dim": 8}, "num_experts"),
        (MIXTURE | {"num_experts": 1}, "num_experts"),
        (MIXTURE | {"experts_per_token": 0}, "experts_per_token"),
        (MIXTURE | {"experts_per_token": 7}, "1..num_experts = 6"),
        (MIXTURE | {"expert_dim": 0}, "expert_dim"),
        (MIXTURE | {"shared_expert_dim": -1}, "shared_expert_dim"),
        (MIXTURE | {"balance_rate": -0.1}, "balance_rate"),
    ],
)
def test_impossible_mixtures_are_refused(changes, word):
    """Each field out of range, and each without experts, is an error that names what to change."""
    with pytest.raises(SpecError, match=word):
        ModelSpec(**changes)


def test_a_dense_model_has_no_trace_of_experts():
    """Without experts, names are those of before: feed-forward weights and no buffer."""
    model = Transformer(MODEL)
    assert not dict(model.named_buffers())
    assert "blocks.0.ffn.w1.weight" in dict(model.named_parameters())
