"""Claims about sizes: counts are those of a real model, and FLOP those that its operations have."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from trainer_corpus import MIXTURE, MODEL

from trainer.errors import SpecError
from trainer.model import Transformer, num_parameters
from trainer.presets import PRESETS, active_matrices, count_parameters, flops_per_token, preset
from trainer.spec import ModelSpec

# Published numbers of parameters (model cards; safetensors headers for the tied ones).
PUBLISHED = {
    "135M": 134_515_008,
    "1B": 1_235_814_400,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
}


def _meta(spec):
    with torch.device("meta"):
        return Transformer(spec)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_about_the_parameters_of_its_name(name):
    """Every preset builds (without memory), the formula counts its parameters, and its name is within 25 %."""
    count = count_parameters(preset(name))
    assert num_parameters(_meta(preset(name))) == count
    size = name.split("-")[0]
    said = float(size[:-1]) * {"M": 1e6, "B": 1e9}[size[-1]]
    assert abs(count / said - 1) < 0.25


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_published_counts(name):
    """Golden: parameters of SmolLM-135M, Llama-3.2-1B, Llama-3-8B and Llama-3-70B, to the last one."""
    assert count_parameters(PRESETS[name]) == PUBLISHED[name]


SHAPES = st.builds(
    lambda layers, heads, groups, half, ffn, vocab, tied, norm, mixture: ModelSpec(
        vocab_size=vocab, num_layers=layers, dim=2 * half * heads * groups, num_heads=heads * groups,
        num_kv_heads=heads, ffn_dim=ffn, tied=tied, qk_norm=norm, **mixture,
    ),
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 4), st.integers(1, 40),
    st.integers(2, 99), st.booleans(), st.booleans(),
    st.sampled_from([{}, MIXTURE, {**MIXTURE, "shared_expert_dim": 0, "experts_per_token": 1}]),
)  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(SHAPES)
def test_the_formula_counts_any_shape(spec):
    """Law: the closed form equals the number of allocated parameters, for every shape."""
    assert count_parameters(spec) == num_parameters(_meta(spec))


@pytest.mark.parametrize("changes", [{}, {"tied": False, "num_kv_heads": 4}, MIXTURE])
def test_flop_are_those_of_the_operations(changes):
    """Oracle: torch's own counter over a forward and backward pass, attention without halving, to the last FLOP."""
    spec, rows, length = dataclasses.replace(MODEL, **changes), 3, 16
    # float64, since the counter does not know grouped products
    model, tokens = Transformer(spec).double(), torch.arange(rows * length).view(rows, length)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens).logsumexp(-1).sum().backward()
    assert counter.get_total_flops() == flops_per_token(spec, length) * rows * length


def test_a_mixture_holds_more_than_a_token_meets():
    """Experts that are not chosen count as parameters and not as work."""
    spec = PRESETS["12M-8x"]
    held = spec.num_layers * 3 * spec.dim * spec.expert_dim * spec.num_experts
    met = spec.num_layers * 3 * spec.dim * spec.expert_dim * spec.experts_per_token
    assert held == 8 * met
    assert count_parameters(spec) - held < active_matrices(spec)


def test_an_unknown_preset_is_refused():
    """The error names the presets."""
    with pytest.raises(SpecError, match=r"0\.2M, 1M.*got '2M'"):
        preset("2M")
