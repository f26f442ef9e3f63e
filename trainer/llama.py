"""Names and configuration of Hugging Face's Llama, and what of it this model is.

    ours                             theirs                                  shape
    embed.weight                     model.embed_tokens.weight               [V, D]
    blocks.I.attention.wq.weight     model.layers.I.self_attn.q_proj.weight  [H E, D]     wk, wv, wo: k, v, o
    blocks.I.attention.q_norm.weight model.layers.I.self_attn.q_norm.weight  [E]          with QK-norm only
    blocks.I.attention_norm.weight   model.layers.I.input_layernorm.weight   [D]
    blocks.I.ffn_norm.weight         model.layers.I.post_attention_layernorm.weight
    blocks.I.ffn.w1.weight           model.layers.I.mlp.gate_proj.weight     [F, D]       w3: up, w2: down
    norm.weight                      model.norm.weight                       [D]
    head.weight                      lm_head.weight                          [V, D]       only if untied

Both sides turn halves of a head (component i with i + E/2), so no weight is reordered; Meta's own checkpoints, which
turn neighbours, are another format. A model without QK-norm is a `llama`, one with it is a `qwen3`, which is the same
but for these norms. A mixture of experts has no such form and is refused.

What the other side could mean and this model does not do is refused by name: biases, other activations, scaled rotary
angles (Llama 3.1 and later), heads of another width, sliding windows. Nothing is guessed.

Source: transformers, models/llama/modeling_llama.py and models/qwen3/modeling_qwen3.py, version 5.24; the
configuration also as it was before version 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.errors import SpecError
from trainer.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

_KINDS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTER = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_INNER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "ffn.w1": "mlp.gate_proj",
    "ffn.w3": "mlp.up_proj",
    "ffn.w2": "mlp.down_proj",
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Meanings that this model does not have -> the only value that is accepted; absent is the same.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "attention_dropout": (0,),
    "quantization_config": (None,),
}


def their_name(name: str) -> str:
    """The Llama name of one of our parameters, such as "blocks.0.ffn.w1.weight"."""
    part = name.removesuffix(".weight")
    if part in _OUTER:
        return f"{_OUTER[part]}.weight"
    _, layer, inner = part.split(".", 2)
    return f"model.layers.{layer}.{_INNER[inner]}.weight"


def config_of(
    spec: ModelSpec, *, max_positions: int = 2048, end_of_text: int | None = None
) -> dict[str, Any]:
    """What config.json says of a shape; read by transformers before and after its version 5.

    Raises:
        SpecError: a mixture of experts.
    """
    if spec.num_experts:
        raise SpecError(
            f"model.num_experts: expected 0, got {spec.num_experts}; a mixture of experts has no Llama form"
        )
    kind = "qwen3" if spec.qk_norm else "llama"
    return {
        "architectures": [_KINDS[kind]],
        "model_type": kind,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.dim,
        "intermediate_size": spec.ffn_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.dim // spec.num_heads,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end_of_text,
    }


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """The shape that a config.json describes.

    Args:
        config: its content.

    Returns:
        The shape.

    Raises:
        SpecError: another architecture, a feature that this model lacks, or a field that is missing or out of range.
    """
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise SpecError(f"model_type: expected one of {', '.join(_KINDS)}, got {kind!r}")
    for name, accepted in _MUST_BE.items():
        if (value := config.get(name)) is not None and value not in accepted:
            raise SpecError(f"{name}: expected {accepted[0]!r}, got {value!r}; this model has none")
    dim, heads = (_integer(config, name) for name in ("hidden_size", "num_attention_heads"))
    width = config.get("head_dim")
    if width is not None and width * heads != dim:
        raise SpecError(
            f"head_dim: expected hidden_size / num_attention_heads = {dim / heads:g}, got {width}"
        )
    return ModelSpec(
        vocab_size=_integer(config, "vocab_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        dim=dim,
        num_heads=heads,
        num_kv_heads=heads
        if config.get("num_key_value_heads") is None
        else _integer(config, "num_key_value_heads"),
        ffn_dim=_integer(config, "intermediate_size"),
        rope_theta=_rope_theta(config),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        tied=config.get("tie_word_embeddings", False) is True,
        qk_norm=kind == "qwen3",
    )


def _integer(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise SpecError(f"{name}: expected an integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A number, or the default that transformers has for it."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SpecError(f"{name}: expected a number, got {value!r}")
    return float(value)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary angles, which version 5 of transformers moved to `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    known = {"rope_theta", "rope_type", "type"}
    kinds = {rope.get("rope_type", "default"), rope.get("type", "default")}
    if kinds != {"default"} or not set(rope) <= known:
        raise SpecError(f"rope_parameters: expected plain angles (rope_type default), got {rope}")
    return _number({**config, **rope}, "rope_theta", 10000.0)
