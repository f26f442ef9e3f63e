"""Claims about the model: it is the formula of its docstring, and packing is invisible to it."""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_corpus import MIXTURE, MODEL, VOCAB, documents, record_id

from trainer.data import pack
from trainer.likelihood import cross_entropy_sum
from trainer.model import KVCache, Transformer, init_parameters, num_parameters
from trainer.spec import ModelSpec

SPECS = [
    MODEL,
    dataclasses.replace(MODEL, tied=False, num_kv_heads=4),
    dataclasses.replace(MODEL, num_kv_heads=1, num_layers=1),
    dataclasses.replace(MODEL, qk_norm=True),
    dataclasses.replace(MODEL, **MIXTURE, qk_norm=True),
]


def _model(spec=MODEL, seed=0, dtype=torch.float64):
    model = Transformer(spec)
    init_parameters(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)  # far from the near-linear start
        for name, buffer in model.named_buffers():
            if name.endswith("balance"):
                buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    return model.to(dtype).eval()


def _swiglu(w1, w3, w2, n):
    gate = w1 @ n
    return w2 @ (gate / (1 + torch.exp(-gate)) * (w3 @ n))


def _feed_forward(spec, weight, at, n):
    """The feed-forward or mixture of experts of one token."""
    names = ("w1", "w3", "w2")
    if not spec.num_experts:
        return _swiglu(*(weight[f"{at}.{w}.weight"] for w in names), n)
    score = [1 / (1 + math.exp(-float(row @ n))) for row in weight[f"{at}.router.weight"]]
    biased = [s + float(b) for s, b in zip(score, weight[f"{at}.balance"], strict=True)]
    chosen = sorted(range(spec.num_experts), key=biased.__getitem__)[-spec.experts_per_token :]
    out = _swiglu(*(weight[f"{at}.shared.{w}.weight"] for w in names), n)
    for e in chosen:
        share = score[e] / sum(score[j] for j in chosen)
        out += share * _swiglu(*(weight[f"{at}.experts.{w}"][e] for w in names), n)
    return out


def _per_head_norm(norm, xs, name, width):
    return [torch.cat([norm(head, name) for head in x.split(width)]) for x in xs]


def _oracle(model, tokens):
    """The model of one document in plain loops over positions, heads and pairs; returns logits [T][V]."""
    spec, weight = model.spec, dict(model.named_parameters()) | dict(model.named_buffers())
    width, half = spec.dim // spec.num_heads, spec.dim // spec.num_heads // 2

    def norm(x, name):
        return x / math.sqrt(float((x * x).mean()) + spec.norm_eps) * weight[f"{name}.weight"]

    def rope(x, position):
        turned = x.clone()
        for i in range(half):
            angle = position * spec.rope_theta ** (-i / half)
            a, b = x[i], x[i + half]
            turned[i] = a * math.cos(angle) - b * math.sin(angle)
            turned[i + half] = b * math.cos(angle) + a * math.sin(angle)
        return turned

    xs = [weight["embed.weight"][token] for token in tokens]
    for layer in range(spec.num_layers):
        at = f"blocks.{layer}"
        ns = [norm(x, f"{at}.attention_norm") for x in xs]
        q, k, v = (
            [weight[f"{at}.attention.{w}.weight"] @ n for n in ns] for w in ("wq", "wk", "wv")
        )
        if spec.qk_norm:
            q = _per_head_norm(norm, q, f"{at}.attention.q_norm", width)
            k = _per_head_norm(norm, k, f"{at}.attention.k_norm", width)
        for t, x in enumerate(list(xs)):
            heads = []
            for h in range(spec.num_heads):
                g = h // (spec.num_heads // spec.num_kv_heads)
                query = rope(q[t][h * width : (h + 1) * width], t)
                keys = [rope(k[s][g * width : (g + 1) * width], s) for s in range(t + 1)]
                scores = torch.stack([query @ key / math.sqrt(width) for key in keys]).softmax(0)
                heads.append(
                    sum(p * v[s][g * width : (g + 1) * width] for s, p in enumerate(scores))
                )
            xs[t] = x + weight[f"{at}.attention.wo.weight"] @ torch.cat(heads)
        for t, x in enumerate(list(xs)):
            xs[t] = x + _feed_forward(spec, weight, f"{at}.ffn", norm(x, f"{at}.ffn_norm"))
    head = weight.get("head.weight", weight["embed.weight"])
    return torch.stack([head @ norm(x, "norm") for x in xs])


@pytest.mark.parametrize("spec", SPECS)
@torch.no_grad()
def test_the_model_is_its_formula(spec):
    """Oracle: logits equal a loop over positions, heads and rotary pairs, in float64 to 1e-10."""
    model = _model(spec)
    tokens = documents(1, seed=3, longest=9)[0]
    torch.testing.assert_close(
        model(torch.tensor([tokens]))[0], _oracle(model, tokens), rtol=0, atol=1e-10
    )


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), length=st.integers(20, 50), spec=st.sampled_from(SPECS))
@torch.no_grad()
def test_documents_in_a_packed_row_do_not_see_each_other(seed, length, spec):
    """Law: the logits of each packed document equal its logits alone, whatever stands beside it."""
    model, docs = _model(spec), documents(6, seed=seed, longest=20)
    batch = pack([(i, record_id(i), doc) for i, doc in enumerate(docs)], length)
    tokens, _, positions, documents_BT = batch.tensors()
    logits = model(tokens, positions, documents_BT)
    for row, segments in enumerate(batch.segments):
        for index, _, first, count, column in segments:
            alone = model(torch.tensor([docs[index][first : first + count]]))[0]
            torch.testing.assert_close(
                logits[row, column : column + count], alone, rtol=0, atol=1e-10
            )


def test_no_gradient_crosses_a_document_border():
    """Attack: the loss of one packed document has exactly zero gradient in its neighbours' embeddings."""
    model = _model()
    batch = pack([(0, record_id(0), [1, 2, 3, 4]), (1, record_id(1), [5, 6, 7])], 8)
    tokens, _, positions, documents_BT = batch.tensors()
    model(tokens, positions, documents_BT)[0, 4:7].logsumexp(-1).sum().backward()
    used = model.embed.weight.grad
    alone = _model()
    alone(torch.tensor([[5, 6, 7]]))[0].logsumexp(-1).sum().backward()
    torch.testing.assert_close(used, alone.embed.weight.grad, rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_position_sees_no_later_one():
    """Causality: changing a token changes no logits before it, and all from it on."""
    model, tokens = _model(), torch.tensor([documents(1, seed=1, longest=30)[0][:12]])
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert (difference[:7] == 0).all()
    assert (difference[7:] > 0).all()


@torch.no_grad()
def test_only_differences_of_positions_count():
    """RoPE: moving a whole document along the position axis changes nothing."""
    model, tokens = _model(), torch.tensor([documents(1, seed=2, longest=30)[0]])
    positions = torch.arange(tokens.shape[1])[None]
    torch.testing.assert_close(
        model(tokens, positions), model(tokens, positions + 1000), rtol=0, atol=1e-9
    )


@torch.no_grad()
def test_padding_and_single_documents_take_no_mask():
    """A row of one document without labels of several documents runs the causal path and gives the same logits."""
    model, tokens = _model(), torch.tensor([documents(1, seed=4, longest=30)[0]])
    one = torch.zeros_like(tokens)
    torch.testing.assert_close(model(tokens, None, one), model(tokens), rtol=0, atol=0)
    two = torch.cat([tokens, tokens])
    mixed = torch.stack([one[0], torch.arange(tokens.shape[1])])
    torch.testing.assert_close(model(two, None, mixed)[0], model(tokens)[0], rtol=0, atol=1e-10)


@torch.no_grad()
def test_cached_decoding_equals_the_whole_sequence():
    """The logits of prompt + one token at a time through the cache are those of the whole sequence."""
    for spec in SPECS:
        model, tokens = (
            _model(spec),
            torch.tensor(documents(1, seed=5, longest=30)[0][:9])[None].repeat(3, 1),
        )
        cache = KVCache(spec, 3, 9, model.embed.weight)
        parts = [model(tokens[:, :4], cache=cache)] + [
            model(tokens[:, t : t + 1], cache=cache) for t in range(4, 9)
        ]
        torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=0, atol=1e-10)


@torch.no_grad()
def test_hidden_states_are_embedding_and_every_block():
    """return_hidden gives num_layers + 1 states, from the embedding to what the head reads, and the same logits."""
    model, tokens = _model(), torch.tensor([[1, 2, 3]])
    logits, hidden = model(tokens, return_hidden=True)
    assert len(hidden) == MODEL.num_layers + 1
    assert torch.equal(hidden[0], model.embed(tokens))
    assert torch.equal(model.head(model.norm(hidden[-1])), logits)
    assert torch.equal(model(tokens), logits)


def _stage(spec, first, stop):
    """A pipeline stage with the blocks first..stop-1, cut from a whole model."""
    model = _model(spec)
    for layer in {*range(spec.num_layers)} - {*range(first, stop)}:
        del model.blocks[str(layer)]
    if first > 0:
        model.embed = None
    if stop < spec.num_layers:
        model.norm = model.head = None
    return model


def test_a_model_cut_into_stages_is_the_whole_model():
    """Stages of any cut, one without embed, norm and head too, keep names and bits and compose to the same logits."""
    spec = dataclasses.replace(MODEL, tied=False, num_layers=4)
    docs = [(i, record_id(i), doc) for i, doc in enumerate(documents(6, seed=7, longest=20))]
    tokens, _, *where = pack(docs, 40).tensors()
    whole = _model(spec)
    expected, hidden = whole(tokens, *where, return_hidden=True)
    expected.logsumexp(-1).sum().backward()
    for cuts in ([0, 4], [0, 1, 4], [0, 1, 3, 4], [0, 2, 2, 4]):
        stages = [_stage(spec, *cut) for cut in itertools.pairwise(cuts)]
        x, states = tokens, []
        for stage in stages:
            x, seen = stage(x, *where, return_hidden=True)
            states += seen[:-1]
        assert torch.equal(x, expected)
        for ours, theirs in zip([*states, seen[-1]], hidden, strict=True):
            assert torch.equal(ours, theirs)
        x.logsumexp(-1).sum().backward()
        named = [pair for stage in stages for pair in stage.named_parameters()]
        assert sorted(name for name, _ in named) == sorted(dict(whole.named_parameters()))
        for name, parameter in named:
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad)


def test_a_stage_starts_from_the_bits_of_the_whole_model():
    """Initial weights drawn after the cut are those of the whole model, the scale by its depth included."""
    spec = dataclasses.replace(MODEL, tied=False, num_layers=3)
    whole, stage = Transformer(spec), _stage(spec, 1, 2).float()
    init_parameters(whole, 5)
    init_parameters(stage, 5)
    assert {name.split(".")[1] for name, _ in stage.named_parameters()} == {"1"}
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name))


def test_initial_weights_depend_on_seed_and_name_only():
    """Same seed, same bits; another seed, other bits; more layers change no other layer's; the type is no matter."""
    small, again, other = (Transformer(MODEL) for _ in range(3))
    deep, double = (
        Transformer(dataclasses.replace(MODEL, num_layers=3)),
        Transformer(MODEL).double(),
    )
    for model, seed in ((small, 1), (again, 1), (other, 2), (deep, 1), (double, 1)):
        init_parameters(model, seed)
    names = dict(small.named_parameters())
    for name, weight in names.items():
        assert torch.equal(weight, dict(again.named_parameters())[name])
        assert torch.equal(weight.double(), dict(double.named_parameters())[name])
        if weight.dim() > 1:
            assert not torch.equal(weight, dict(other.named_parameters())[name])
            if not name.endswith(("wo.weight", "w2.weight")):  # their scale depends on the depth
                assert torch.equal(weight, dict(deep.named_parameters())[name])
    assert len({tuple(w.flatten()[:4].tolist()) for w in names.values() if w.dim() > 1}) == sum(
        w.dim() > 1 for w in names.values()
    )


def test_the_untrained_model_knows_nothing():
    """Initial loss is ln V within 0.05 nats: logits have a standard deviation near 0.02 * sqrt(D) (bound: var / 2)."""
    model = Transformer(MODEL)
    init_parameters(model, 0)
    docs = documents(40, seed=6)
    tokens, labels, positions, docs_BT = pack(
        [(i, record_id(i), d) for i, d in enumerate(docs)], 64
    ).tensors()
    loss = cross_entropy_sum(model(tokens, positions, docs_BT), labels) / (labels >= 0).sum()
    assert abs(loss.item() - math.log(VOCAB)) < 0.05


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_counted_once(tied):
    """num_parameters is the formula: embeddings + L * (attention + feed-forward + 2 norms) + norm (+ head)."""
    spec = ModelSpec(tied=tied)
    kv = spec.dim * spec.num_kv_heads // spec.num_heads
    block = 2 * spec.dim**2 + 2 * spec.dim * kv + 3 * spec.dim * spec.ffn_dim + 2 * spec.dim
    expected = spec.vocab_size * spec.dim * (1 if tied else 2) + spec.num_layers * block + spec.dim
    assert num_parameters(Transformer(spec)) == expected
    assert not tied or expected == 1_049_728  # the default model, about a million
