"""Models in the format of Hugging Face's Llama: a folder with config.json and safetensors, in and out.

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
angles (Llama 3.1 and later), heads of another width, sliding windows. Nothing is skipped or guessed.

safetensors holds numbers and no code, but also no digest: a flipped bit in a weight can't be seen here. Compare the
root of what was loaded (`trainer.root.state_root`), or the publisher's digest of the file, before trusting it.

Source: transformers, models/llama/modeling_llama.py and models/qwen3; github.com/huggingface/safetensors, format.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from provenance.canonical import sync_folder, write_atomic
from trainer.errors import CheckpointError, SpecError
from trainer.spec import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer.model import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # transformers' own default for a file of weights

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
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Meanings that this model does not have -> the only value that is accepted; absent is the same.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "attention_dropout": (0,),
    "quantization_config": (None,),
}


def export_model(
    model: Transformer,
    directory: Path,
    *,
    max_positions: int = 2048,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model so that `transformers` reads it: all of the folder, or nothing.

    Args:
        model: a whole model; weights keep their type.
        directory: a folder that does not exist yet.
        max_positions: longest row that the model was trained on; a statement, nothing depends on it here.
        end_of_text: token id that ends a document, or None.
        shard_bytes: largest file of weights; a tensor is never split.

    Raises:
        SpecError: a mixture of experts, which has no Llama form.
        CheckpointError: the folder exists.
    """
    from safetensors.torch import save_file

    config = config_of(model.spec, max_positions=max_positions, end_of_text=end_of_text)
    if directory.exists():
        raise CheckpointError(f"{directory.name}: exists; expected a new folder to export to")
    unfinished = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = {
        their_name(name): parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
    }
    config["dtype"] = config["torch_dtype"] = str(next(iter(tensors.values())).dtype).split(".")[1]
    shards = list(_shards(tensors, shard_bytes))
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = (
            WEIGHTS_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        save_file({n: tensors[n] for n in names}, unfinished / file, metadata={"format": "pt"})
        with (unfinished / file).open("rb") as written:
            os.fsync(written.fileno())
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_atomic(unfinished / INDEX_FILE, _json_bytes(index))
    write_atomic(unfinished / CONFIG_FILE, _json_bytes(config))
    unfinished.rename(directory)
    sync_folder(directory.parent)


def import_model(directory: Path) -> Transformer:
    """The model of a folder in Llama format, in float32, on the CPU, in evaluation mode.

    Args:
        directory: holds config.json and model.safetensors, or an index and its files.

    Returns:
        The model; its shape is `model.spec`.

    Raises:
        SpecError: config.json describes something that this model is not.
        CheckpointError: a file or tensor is missing, unreadable, left over, or of another shape.
    """
    import torch

    from trainer.model import Transformer

    spec = spec_of(_read_json(directory / CONFIG_FILE))
    model = Transformer(spec)
    wanted = {their_name(name): parameter for name, parameter in model.named_parameters()}
    homes = _locate(directory, wanted, tied=spec.tied)
    head = None
    with torch.no_grad():
        for name, tensor in _read(directory, homes):
            if name in wanted:
                wanted[name].copy_(tensor)
            else:
                head = tensor
        if head is not None and not torch.equal(head.float(), wanted[_EMBEDDING]):
            raise CheckpointError(
                f"{directory.name}: {_HEAD} differs from the embedding, but tie_word_embeddings is true"
            )
    return model.eval()


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
        raise SpecError(f"{CONFIG_FILE}: {name}: expected an integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A number, or the default that transformers has for it."""
    value = config.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise SpecError(f"{CONFIG_FILE}: {name}: expected a number, got {value!r}")
    return float(value)


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of the rotary angles, which version 5 of transformers moved to `rope_parameters`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    known = {"rope_theta", "rope_type", "type"}
    kinds = {rope.get("rope_type", "default"), rope.get("type", "default")}
    if kinds != {"default"} or not set(rope) <= known:
        raise SpecError(f"rope_parameters: expected plain angles (rope_type default), got {rope}")
    return _number({**config, **rope}, "rope_theta", 10000.0)


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut where the next tensor would make a file too large."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _locate(directory: Path, wanted: Mapping[str, Tensor], *, tied: bool) -> dict[str, str]:
    """Name -> file of every tensor; all names and shapes are checked before a number is read."""
    shapes: dict[str, list[int]] = {}
    homes: dict[str, str] = {}
    for file in _weight_files(directory):
        with _opened(directory, file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                # Old files hold the rotary frequencies too, which follow from the configuration.
                if not name.endswith("rotary_emb.inv_freq"):
                    homes[name], shapes[name] = file, opened.get_slice(name).get_shape()
    extra = set(homes) - set(wanted) - ({_HEAD} if tied else set())
    missing = set(wanted) - set(homes)
    if missing or extra:
        raise CheckpointError(
            f"{directory.name}: expected {len(wanted)} tensors, got {len(homes)}: lacks {sorted(missing)[:2]}, "
            f"has beyond them {sorted(extra)[:2]}",
        )
    for name, shape in shapes.items():
        expected = list(wanted.get(name, wanted[_EMBEDDING]).shape)
        if shape != expected:
            raise CheckpointError(
                f"{directory.name}: {name}: expected shape {expected}, got {shape}"
            )
    return homes


def _read(directory: Path, homes: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, one at a time."""
    for file in sorted(set(homes.values())):
        with _opened(directory, file) as opened:
            for name in sorted(name for name, home in homes.items() if home == file):
                yield name, opened.get_tensor(name)


@contextmanager
def _opened(directory: Path, file: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory.name}: {file}: expected readable safetensors, got: {error}"
        ) from error


def _weight_files(directory: Path) -> list[str]:
    if not (directory / INDEX_FILE).is_file():
        return [WEIGHTS_FILE]
    index = _read_json(directory / INDEX_FILE).get("weight_map")
    files = sorted(set(index.values())) if isinstance(index, dict) else []
    if not files or not all(isinstance(f, str) and "/" not in f and "\\" not in f for f in files):
        raise CheckpointError(f"{INDEX_FILE}: expected a weight_map of file names, got {files[:2]}")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path.name}: not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path.name}: expected an object, got {type(parsed).__name__}")
    return parsed


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
