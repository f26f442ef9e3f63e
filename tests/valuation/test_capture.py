"""Every kind of parameter's gradient is autograd's, whatever stands beside the record in its batch."""

import numpy as np
import pytest
import torch
from torch import nn
from valuation_models import LENGTH, autograd, tiny_model, token_set

from trainer.data import pack
from valuation.capture import Capture
from valuation.errors import GradientError
from valuation.gradients import captured_pass, record_dots, record_gradients

MIXTURE = {"num_experts": 3, "experts_per_token": 2, "expert_dim": 4}
SHAPES = {
    "tied": {},
    "untied": {"tied": False},
    "grouped query": {"num_heads": 4, "num_kv_heads": 2},
    "qk norm": {"qk_norm": True},
    "experts": MIXTURE,
    "shared expert": MIXTURE | {"shared_expert_dim": 4, "tied": False},
}


class Adapter(nn.Module):
    """A frozen Linear with a low-rank update, as LoRA has it, and a bias."""

    def __init__(self, frozen, rank):
        super().__init__()
        self.frozen = frozen.requires_grad_(requires_grad=False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False, dtype=torch.float64)
        self.up = nn.Linear(rank, frozen.out_features, bias=True, dtype=torch.float64)

    def forward(self, x):
        """The matrix and its update."""
        return self.frozen(x) + self.up(self.down(x))


def with_adapters():
    """A model of which only adapters on two kinds of matrix are trained."""
    model = tiny_model()
    model.requires_grad_(requires_grad=False)
    for block in model.blocks.values():
        block.attention.wq = Adapter(block.attention.wq, 2)
        block.ffn.w2 = Adapter(block.ffn.w2, 2)
    return model


def check(model, train, batches):
    """Formed gradients and vector-route dots of every parameter against autograd on single records."""
    grads = {index: {} for index in train.index_N.tolist()}
    for found in (record_gradients(model, batch) for batch in batches):
        for name, values in found.all().items():
            for index, value in zip(found.groups.index_N.tolist(), values, strict=True):
                grads[index][name] = grads[index].get(name, 0) + value
    noise = torch.Generator().manual_seed(3)
    direction = {
        name: torch.randn(p.shape, generator=noise, dtype=torch.float64)
        for name, p in model.named_parameters()
        if p.requires_grad
    }
    dots = record_dots(model, batches, [direction])
    for place, record in enumerate(train.records):
        want = autograd(model, record)
        assert want.keys() == grads[record[0]].keys()
        for name, value in want.items():
            torch.testing.assert_close(
                grads[record[0]][name], value, rtol=1e-10, atol=1e-10, msg=name
            )
        total = sum((value * direction[name]).sum().item() for name, value in want.items())
        assert dots.dots_NK[place, 0] == pytest.approx(total, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_gradients_of_packed_records_equal_autograd(shape):
    """Per parameter, to 1e-10 in float64: packed, cut at row ends, padded, with pieces in two batches."""
    model, train = tiny_model(**shape), token_set(np.random.default_rng(2), 8)
    batch = pack(train.records, LENGTH)
    assert (batch.documents_BT == -1).any()
    assert any(len(row) > 1 for row in batch.segments)
    check(model, train, [batch])
    check(
        model, train, [batch.rows(start, start + 2) for start in range(0, len(batch.segments), 2)]
    )


def test_adapters_and_biases_are_exact():
    """Only the adapters' parameters have gradients, and these are autograd's."""
    model, train = with_adapters(), token_set(np.random.default_rng(5), 6)
    assert len(Capture(model).shapes) == 6
    check(model, train, list(train.batches(2)))


def test_a_loss_mask_changes_the_gradient_as_autograd_says():
    """Labels that are masked out count for nothing, in every parameter."""
    model, record = (
        tiny_model(),
        token_set(np.random.default_rng(6), 1, shortest=9, longest=9).records[0],
    )
    batch = pack([record], LENGTH)
    batch.labels_BT[0, :4] = -100
    tokens = torch.from_numpy(record[2])
    logits = model(tokens[None])[0, 4:8]
    loss = nn.functional.cross_entropy(logits, tokens[5:9], reduction="sum")
    want = torch.autograd.grad(loss, list(model.parameters()))
    got = record_gradients(model, batch).all()
    for value, expected in zip(got.values(), want, strict=True):
        torch.testing.assert_close(value[0], expected, rtol=1e-10, atol=1e-10)


def test_a_module_used_twice_gives_the_sum():
    """Sharing a block between layers adds its uses, as autograd does."""
    model = tiny_model(num_layers=2)
    model.blocks["1"].ffn.w1 = model.blocks["0"].ffn.w1
    train = token_set(np.random.default_rng(7), 5)
    check(model, train, list(train.batches(3)))


def test_names_restrict_what_is_watched():
    """A subset gives the same numbers for these parameters, and no others; an unknown one is refused."""
    model, train = tiny_model(), token_set(np.random.default_rng(8), 3)
    (batch,) = train.batches(4)
    everything = record_gradients(model, batch).all()
    some = record_gradients(model, batch, names=["norm.weight", "embed.weight"]).all()
    assert set(some) == {"norm.weight", "embed.weight"}
    for name, value in some.items():
        torch.testing.assert_close(value, everything[name], rtol=0, atol=0)
    with pytest.raises(GradientError, match=r"nothing.weight"):
        Capture(model, ["nothing.weight"])


def test_a_parameter_that_is_used_behind_the_modules_back_is_refused():
    """A head applied as a bare product would otherwise be a silent zero."""
    model, train = tiny_model(tied=False), token_set(np.random.default_rng(9), 2)
    model.logits = lambda x: x @ model.head.weight.T
    with pytest.raises(GradientError, match=r"head.weight.*no call"):
        record_gradients(model, next(iter(train.batches(2))))


def test_a_spread_mixture_is_refused():
    """Experts in other processes can't be seen from here."""
    model, train = tiny_model(**MIXTURE), token_set(np.random.default_rng(9), 2)
    model.blocks["0"].ffn.dispatch = lambda rows, load, experts: experts(rows, load)
    with pytest.raises(GradientError, match="undivided"):
        record_gradients(model, next(iter(train.batches(2))))


def test_the_pass_forms_no_weight_gradient():
    """No `.grad` appears and no hook stays; a mixture's sites keep the weights of the pass."""
    model, train = tiny_model(**MIXTURE), token_set(np.random.default_rng(9), 3)
    capture = Capture(model)
    batch = next(train.batches(9))
    captured_pass(model, batch, capture)
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    before = capture.token_dots(direction)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    torch.testing.assert_close(capture.token_dots(direction), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
