"""Shape of the model: everything that decides which parameters it has (`trainer.model`, `trainer.experts`)."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.choices import at_least, positive
from trainer.errors import SpecError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Shape of the decoder-only transformer; the default has about 1.1 million parameters."""

    vocab_size: int = 2048
    """Number of token ids, >= 2."""
    num_layers: int = 4
    """Blocks of attention and feed-forward."""
    dim: int = 128
    """Width of the residual stream; a multiple of 2 * num_heads."""
    num_heads: int = 4
    """Query heads; head width = dim / num_heads, even because RoPE turns pairs."""
    num_kv_heads: int = 2
    """Key and value heads; divides num_heads."""
    ffn_dim: int = 384
    """Inner width of SwiGLU; without effect in a mixture of experts."""
    rope_theta: float = 10000.0
    """Base of the rotary wavelengths."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    tied: bool = True
    """Whether the output head is the embedding matrix."""
    qk_norm: bool = False
    """Whether queries and keys are normalised per head."""
    num_experts: int = 0
    """Experts of a block; 0 = one feed-forward."""
    experts_per_token: int = 0
    """Experts that a token visits, 1..num_experts."""
    expert_dim: int = 0
    """Inner width of an expert."""
    shared_expert_dim: int = 0
    """Inner width of the expert that every token visits; 0 = none."""
    balance_rate: float = 1e-3
    """Change of an expert's bias per step, against its load; 0 = no balancing."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.vocab_size", self.vocab_size, 2)
        if self.dim % (2 * self.num_heads):
            raise SpecError(
                f"model.dim: expected a multiple of 2 * num_heads = {2 * self.num_heads}, got {self.dim}",
            )
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"model.num_kv_heads: expected a divisor of num_heads = {self.num_heads}, got {self.num_kv_heads}",
            )
        positive("model.rope_theta", self.rope_theta)
        positive("model.norm_eps", self.norm_eps)
        self._check_experts()

    def _check_experts(self) -> None:
        if self.num_experts == 0:
            for name in ("experts_per_token", "expert_dim", "shared_expert_dim"):
                if value := getattr(self, name):
                    raise SpecError(
                        f"model.{name}: expected 0 without experts, got {value}; set num_experts"
                    )
            return
        at_least("model.num_experts", self.num_experts, 2)
        at_least("model.expert_dim", self.expert_dim, 1)
        at_least("model.shared_expert_dim", self.shared_expert_dim, 0)
        at_least("model.balance_rate", self.balance_rate, 0)
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise SpecError(
                f"model.experts_per_token: expected 1..num_experts = {self.num_experts}, "
                f"got {self.experts_per_token}",
            )
