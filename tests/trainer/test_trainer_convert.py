"""Claims about Llama-format folders: what goes out and comes in computes the same logits; the rest is refused."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_corpus import MIXTURE, MODEL, VOCAB

from trainer.convert import export_model, import_model
from trainer.errors import CheckpointError, SpecError
from trainer.llama import config_of, spec_of, their_name
from trainer.model import Transformer, init_parameters

SPECS = {
    "tied grouped": MODEL,
    "untied": dataclasses.replace(MODEL, tied=False, num_kv_heads=4),
    "one key head": dataclasses.replace(MODEL, tied=False, num_kv_heads=1, rope_theta=500000.0),
    "QK-norm": dataclasses.replace(MODEL, qk_norm=True, norm_eps=1e-6),
}
TOKENS = torch.tensor([[(7 * t + r) % VOCAB for t in range(40)] for r in range(2)])


def _model(spec, seed=3):
    """Random weights far from the start, norm weights included."""
    model = Transformer(spec)
    init_parameters(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator)
            parameter.mul_(6 if parameter.dim() > 1 else 0.5 + noise)
    return model.eval()


@pytest.fixture(scope="module")
def transformers():
    """Hugging Face transformers, a development dependency."""
    return pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture
def folder(tmp_path):
    """An untied exported model, to be damaged."""
    export_model(_model(SPECS["untied"]), tmp_path / "hf")
    return tmp_path / "hf"


def _edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_transformers_computes_our_logits(transformers, tmp_path, name):
    """Oracle, outward: an exported model read by transformers has our logits within 1e-5, and nothing is left over."""
    model = _model(SPECS[name])
    export_model(model, tmp_path / "hf", end_of_text=VOCAB - 1)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=torch.float32
    )
    assert not any(report.values()), report
    assert theirs.config.eos_token_id == VOCAB - 1
    expected = model(TOKENS)
    assert expected.abs().max() > 1  # far from a model that says nothing
    torch.testing.assert_close(theirs.eval()(TOKENS).logits, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "llama tied", "qwen3"])
@torch.no_grad()
def test_we_compute_the_logits_of_transformers(transformers, tmp_path, kind):
    """Oracle, inward: a model that transformers wrote, in several files, has its logits here within 1e-5."""
    words = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": "tied" in kind,
        "rope_theta": 50000.0, "initializer_range": 0.3, "head_dim": 8,
    }  # fmt: skip
    classes = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    }
    config, model = (getattr(transformers, name) for name in classes[kind.split()[0]])
    torch.manual_seed(1)  # noqa: TID251 - transformers draws from the global generator
    theirs = model(config(**words)).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="30KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    ours = import_model(tmp_path / "hf")
    assert ours.spec.rope_theta == 50000.0
    expected = theirs(TOKENS).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours(TOKENS), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_there_and_back_is_the_same_model(tmp_path, name, shard_bytes):
    """import(export(m)) has the shape and the bits of m, in one file and in several; no leftovers are there."""
    model = _model(SPECS[name])
    export_model(model, tmp_path / "hf", shard_bytes=shard_bytes)
    files = {path.name for path in (tmp_path / "hf").iterdir()}
    assert ("model.safetensors" in files) == (shard_bytes == 10**9)
    assert not any("tmp" in path.name for path in tmp_path.rglob("*"))
    again = import_model(tmp_path / "hf")
    assert again.spec == model.spec
    for (ours, weight), (theirs, other) in zip(
        model.named_parameters(), again.named_parameters(), strict=True
    ):
        assert ours == theirs
        assert torch.equal(weight, other)
    assert ("lm_head.weight" in _names(tmp_path / "hf")) == (not model.spec.tied)


def _names(folder):
    return {name for path in folder.glob("*.safetensors") for name in load_file(path)}


def test_the_names_are_those_of_the_format():
    """Golden: names as they stand in Llama checkpoints."""
    assert their_name("embed.weight") == "model.embed_tokens.weight"
    assert their_name("blocks.11.attention.wo.weight") == "model.layers.11.self_attn.o_proj.weight"
    assert their_name("blocks.0.ffn.w2.weight") == "model.layers.0.mlp.down_proj.weight"
    assert their_name("head.weight") == "lm_head.weight"


def test_a_published_configuration_is_understood():
    """Golden: the config.json of Llama-3-8B (before version 5 of transformers) gives its shape."""
    config = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.0.dev0", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    from trainer.presets import PRESETS

    assert spec_of(config) == PRESETS["8B"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mistral"}, "expected one of llama, qwen3, got 'mistral'"),
        ({"model_type": None}, "got None"),
        ({"attention_bias": True}, "attention_bias: expected False, got True"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act: expected 'silu', got 'gelu'"),
        ({"head_dim": 16}, "head_dim: expected .* = 8, got 16"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "plain angles"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "plain angles"),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "plain angles"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_size": "32"}, "hidden_size: expected an integer, got '32'"),
        ({"vocab_size": None}, "vocab_size: expected an integer, got None"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
    ],
)  # fmt: skip
def test_another_architecture_is_refused(folder, changes, message):
    """Each meaning that this model does not have is a SpecError that says expected and got."""
    _edit(folder, **changes)
    with pytest.raises(SpecError, match=message):
        import_model(folder)


def _with_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


DAMAGES = {
    "missing tensor": (lambda t: t.pop("model.norm.weight"), r"lacks \['model.norm.weight'\]"),
    "extra tensor": (lambda t: t.update(bias=torch.ones(2)), r"has beyond them \['bias'\]"),
    "wrong shape": (
        lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 31)}),
        r"lm_head.weight: expected shape \[64, 32\], got \[64, 31\]",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_wrong_tensors_are_refused(folder, name):
    """A tensor that is missing, left over or of another shape: an error that names it."""
    change, message = DAMAGES[name]
    _with_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        import_model(folder)


@pytest.mark.parametrize("stop", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(folder, stop):
    """Weights cut anywhere are unreadable, not shorter."""
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:stop])
    with pytest.raises(CheckpointError, match="readable safetensors"):
        import_model(folder)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", None, "config.json: cannot be read"),
        ("config.json", "{", "config.json: not JSON"),
        ("config.json", "[]", "expected an object, got list"),
        ("model.safetensors", None, "model.safetensors: expected readable"),
        ("model.safetensors.index.json", "{}", "expected a weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "../secret"}}', "weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": "gone.safetensors"}}', "gone"),
    ],
)
def test_broken_folders_are_refused(folder, file, text, message):
    """Files that are missing or malformed, and an index that points out of the folder."""
    if text is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        import_model(folder)


def test_a_tied_head_must_be_the_embedding(tmp_path):
    """A file of a tied model may repeat the embedding as head, but not contradict it."""
    model = _model(MODEL)
    export_model(model, tmp_path / "hf")
    embedding = model.embed.weight.detach()
    _with_weights(tmp_path / "hf", lambda t: t.update({"lm_head.weight": embedding.clone()}))
    assert torch.equal(import_model(tmp_path / "hf").embed.weight, embedding)
    _with_weights(tmp_path / "hf", lambda t: t.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        import_model(tmp_path / "hf")


def test_old_files_with_rotary_frequencies_are_read(folder):
    """Buffers that follow from the configuration are no weights."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _with_weights(folder, lambda t: t.update({name: torch.ones(4)}))
    assert import_model(folder).spec == SPECS["untied"]


def test_bfloat16_weights_are_read_exactly(folder, tmp_path):
    """Half-size files come in as float32 of the same numbers, and go out in the model's own type."""
    model = _model(SPECS["untied"]).bfloat16()
    export_model(model, tmp_path / "half")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    for ours, theirs in zip(
        model.parameters(), import_model(tmp_path / "half").parameters(), strict=True
    ):
        assert theirs.dtype == torch.float32
        assert torch.equal(ours.float(), theirs)


def test_what_has_no_llama_form_is_not_exported(folder, tmp_path):
    """A mixture of experts is refused before anything is written; an existing folder is left alone."""
    with pytest.raises(SpecError, match="num_experts: expected 0, got 6"):
        export_model(Transformer(dataclasses.replace(MODEL, **MIXTURE)), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    before = (folder / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="hf: exists"):
        export_model(_model(MODEL), folder)
    assert (folder / "config.json").read_bytes() == before


def test_the_configuration_is_its_own_inverse():
    """spec_of(config_of(spec)) == spec for every kind, through JSON."""
    for spec in SPECS.values():
        assert spec_of(json.loads(json.dumps(config_of(spec)))) == spec
