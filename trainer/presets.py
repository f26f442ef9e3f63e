"""Models by size, from a test's to 70 billion parameters, and what a size costs: parameters and FLOP per token.

The small ones are for CPUs and a vocabulary of 2,048; `135M` to `70B` have the shapes of published models, whose counts
they share (`1B` is Llama 3.2's without its scaled rotary angles). All counts follow from the shape; no weight is
allocated.

    attention   D (H + 2 K) E + H E D  [+ 2 E with QK-norm]           E = D / H
    SwiGLU      3 D F                  mixture: experts * 3 D F' + shared 3 D F'' + router D * experts
    block       attention + SwiGLU + 2 D
    model       V D  [+ V D untied]  + L blocks + D

Training FLOP per token = 6 * (matrix entries that a token meets, head included, embedding look-up not) + 12 L D T:
two per entry forward, four backward; scores and values of T positions likewise, without halving for causality. Norms,
softmax and the optimiser are left out, as is customary.

Source: PaLM arXiv 2204.02311 appendix B. Shapes: SmolLM-135M, Llama-3.2-1B, Llama-3-8B, Llama-3-70B model cards.
"""

from __future__ import annotations

from trainer.errors import SpecError
from trainer.spec import ModelSpec

PRESETS: dict[str, ModelSpec] = {
    "0.2M": ModelSpec(num_layers=2, dim=64, num_heads=2, num_kv_heads=1, ffn_dim=192),
    "1M": ModelSpec(),
    "6M": ModelSpec(num_layers=8, dim=256, num_heads=4, num_kv_heads=2, ffn_dim=704),
    "27M": ModelSpec(num_layers=9, dim=512, num_heads=8, num_kv_heads=4, ffn_dim=1408),
    "12M-8x": ModelSpec(
        num_layers=6, dim=192, num_heads=6, num_kv_heads=2, num_experts=16, experts_per_token=2,
        expert_dim=192, shared_expert_dim=192,
    ),
    "135M": ModelSpec(
        vocab_size=49152, num_layers=30, dim=576, num_heads=9, num_kv_heads=3, ffn_dim=1536,
    ),
    "1B": ModelSpec(
        vocab_size=128256, num_layers=16, dim=2048, num_heads=32, num_kv_heads=8, ffn_dim=8192,
        rope_theta=500000.0,
    ),
    "8B": ModelSpec(
        vocab_size=128256, num_layers=32, dim=4096, num_heads=32, num_kv_heads=8, ffn_dim=14336,
        rope_theta=500000.0, tied=False,
    ),
    "70B": ModelSpec(
        vocab_size=128256, num_layers=80, dim=8192, num_heads=64, num_kv_heads=8, ffn_dim=28672,
        rope_theta=500000.0, tied=False,
    ),
}  # fmt: skip
"""Name, which is about the number of parameters -> shape; `12M-8x` holds many times the experts that a token visits."""


def preset(name: str) -> ModelSpec:
    """The shape of a preset.

    Args:
        name: one of PRESETS.

    Returns:
        The shape; change a field with `dataclasses.replace`.

    Raises:
        SpecError: no such preset.
    """
    if name not in PRESETS:
        raise SpecError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name]


def count_parameters(spec: ModelSpec) -> int:
    """Number of trained numbers of a shape; a tied head counts once.

    Args:
        spec: the shape.

    Returns:
        What `num_parameters` counts on a model of this shape.
    """
    norms = 2 * spec.dim + (2 * (spec.dim // spec.num_heads) if spec.qk_norm else 0)
    block = _attention(spec) + _feed_forward(spec, spec.num_experts) + norms
    embeddings = spec.vocab_size * spec.dim * (1 if spec.tied else 2)
    return embeddings + spec.num_layers * block + spec.dim


def active_matrices(spec: ModelSpec) -> int:
    """Number of matrix entries that one token is multiplied with: the chosen experts only, and the head.

    Args:
        spec: the shape.

    Returns:
        Entries; times 2 they are the FLOP of a forward pass without attention scores.
    """
    block = _attention(spec) + _feed_forward(spec, spec.experts_per_token)
    return spec.num_layers * block + spec.vocab_size * spec.dim


def flops_per_token(spec: ModelSpec, length: int) -> int:
    """FLOP of forward and backward pass per token, by the formula above.

    Args:
        spec: the shape.
        length: positions in a row, >= 1.

    Returns:
        FLOP; a multiplication and an addition are two.
    """
    return 6 * active_matrices(spec) + 12 * spec.num_layers * spec.dim * length


def _attention(spec: ModelSpec) -> int:
    width = spec.dim // spec.num_heads
    return 2 * spec.dim * spec.dim + 2 * spec.dim * spec.num_kv_heads * width


def _feed_forward(spec: ModelSpec, experts: int) -> int:
    """Entries of a feed-forward, or of so many experts with the shared one and the whole router."""
    if not spec.num_experts:
        return 3 * spec.dim * spec.ffn_dim
    widths = experts * spec.expert_dim + spec.shared_expert_dim
    return 3 * spec.dim * widths + spec.dim * spec.num_experts
