"""Depth: patching, CKA and the logit lens against slow obvious oracles, and the two fixed points of the score."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from unlearning import depth
from unlearning.probes import Probe

SPEC = ModelSpec(vocab_size=97, num_layers=3, dim=24, num_heads=4, num_kv_heads=2, ffn_dim=40)


def model(seed, scale=6.0):
    """A model with sharp answers: weights of a fresh one would make every layer say the same."""
    made = Transformer(SPEC)
    init_parameters(made, seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    return made.eval()


def questions(count=9, seed=3):
    """Prompts of 2 to 12 tokens and secrets of 1 to 4, of nine people."""
    generator = np.random.default_rng(seed)
    return [
        Probe(
            f"person-{n}",
            "",
            tuple(generator.integers(0, 97, size=generator.integers(2, 13)).tolist()),
            tuple(generator.integers(0, 97, size=generator.integers(1, 5)).tolist()),
            0,
        )
        for n in range(count)
    ]


def slow_logprob(net, probe, hooks=()):
    """Mean log-probability of one secret, one row without padding, with forward hooks in place."""
    handles = [block.register_forward_hook(hook) for block, hook in hooks]
    try:
        with torch.inference_mode():
            logits = net(torch.tensor([[*probe.prompt_tokens, *probe.secret_tokens]]))[0]
    finally:
        for handle in handles:
            handle.remove()
    first = len(probe.prompt_tokens)
    found = logits.log_softmax(-1).double()
    return np.mean([found[first + t - 1, y].item() for t, y in enumerate(probe.secret_tokens)])


def slow_drop(original, source, probe, layer):
    """One person, one layer: states copied position by position through a hook on the block."""
    row = torch.tensor([[*probe.prompt_tokens, *probe.secret_tokens]])
    with torch.inference_mode():
        _, hidden = source(row, return_hidden=True)
    start = len(probe.prompt_tokens) - 1

    def patch(_module, _inputs, output):
        patched = output.clone()
        for position in range(start, start + len(probe.secret_tokens)):
            patched[0, position] = hidden[layer + 1][0, position]
        return patched

    block = original.blocks[str(layer)]
    return slow_logprob(original, probe) - slow_logprob(original, probe, [(block, patch)])


def test_patching_a_batch_equals_patching_one_person_and_one_layer_at_a_time():
    """Batched drops of questions of many lengths are those of a hook on one unpadded row."""
    original, source, asked = model(0), model(1), questions()
    batches = depth.sites(asked, original)
    fast = depth.patch_drops(original, batches, depth.states(source, batches))
    slow = [[slow_drop(original, source, probe, layer) for probe in asked] for layer in range(3)]
    np.testing.assert_allclose(fast, slow, atol=2e-5)
    assert np.abs(fast).max() > 0.5


def test_questions_may_be_cut_into_any_batches(monkeypatch):
    """One question per batch gives the same drops and lenses as all together."""
    original, source, asked = model(0), model(1), questions()
    together = depth.sites(asked, original)
    monkeypatch.setattr(depth, "batch_tokens", lambda _: 1)  # of the device, as in scoring
    alone = depth.sites(asked, original)
    assert len(alone) == len(asked) > len(together)
    for measure in (depth.patch_drops, depth.lens_logprobs):
        one = measure(original, together, depth.states(source, together))
        other = measure(original, alone, depth.states(source, alone))
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_batches_are_larger_where_an_accelerator_holds_the_model():
    """As many tokens together as scoring takes there; on a processor what fits into its cache."""
    asked = questions() * 200
    here, there = depth.sites(asked, model(0)), depth.sites(asked, torch.nn.Linear(1, 1, device="meta"))  # fmt: skip
    assert max(site.tokens_BT.shape[0] for site in there) > 3 * max(site.tokens_BT.shape[0] for site in here)  # fmt: skip
    assert sorted(i for site in there for i in site.place_B) == list(range(len(asked)))


def test_gold_scores_one_and_the_original_zero_exactly():
    """A12: UDS(gold) = 1 and UDS(original) = 0 without tolerance, and the original's drops are zero bit for bit."""
    original, gold, asked = model(0), model(1), questions()
    batches = depth.sites(asked, original)
    of_gold = depth.patch_drops(original, batches, depth.states(gold, batches))
    of_itself = depth.patch_drops(original, batches, depth.states(original, batches))
    assert (of_itself == 0.0).all()
    scored = ~np.isnan(depth.erasure(of_gold, of_gold).scores_N)
    assert scored.any()
    assert (depth.erasure(of_gold, of_gold).scores_N[scored] == 1.0).all()
    assert (depth.erasure(of_gold, of_itself).scores_N[scored] == 0.0).all()


def test_a_model_changed_in_its_last_layer_only_is_shallow():
    """Only the last layer from gold: earlier layers keep the secret (drop 0), the last loses it as gold does."""
    original, gold, asked = model(0), model(1), questions()
    shallow = model(0)
    shallow.blocks["2"].load_state_dict(gold.blocks["2"].state_dict())
    batches = depth.sites(asked, original)
    drops = depth.patch_drops(original, batches, depth.states(shallow, batches))
    assert (drops[:2] == 0.0).all()
    assert np.abs(drops[2]).max() > 0.1


def test_the_score_is_the_published_formula_by_hand():
    """Two layers carry the secret, one does not; the ratio is clipped, and nobody's score stands in for nobody's."""
    gold = np.array([[1.0, 0.01], [3.0, 0.02], [0.04, 0.03]])
    unlearned = np.array([[0.5, 1.0], [6.0, 1.0], [1.0, 1.0]])
    scores = depth.erasure(gold, unlearned).scores_N
    assert scores[0] == pytest.approx((1.0 * 0.5 + 3.0 * 1.0) / 4.0)
    assert np.isnan(scores[1])
    ratios = depth.erasure(gold, unlearned).ratios_LN
    np.testing.assert_array_equal(ratios[:, 0], [0.5, 2.0, np.nan])
    assert depth.erasure(gold, -unlearned).scores_N[0] == 0.0


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
def test_the_score_rises_with_every_drop(seed, share):
    """Moving the unlearned drops toward gold's never lowers the score, which stays in [0, 1]."""
    generator = np.random.default_rng(seed)
    gold, start = generator.exponential(size=(4, 5)), generator.normal(size=(4, 5))
    nearer = np.maximum(start, start + share * (gold - start))
    low, high = depth.erasure(gold, start).scores_N, depth.erasure(gold, nearer).scores_N
    kept = ~np.isnan(low)
    assert (high[kept] >= low[kept] - 1e-12).all()
    assert ((high[kept] >= 0.0) & (high[kept] <= 1.0)).all()


def test_the_lens_at_the_last_layer_is_what_the_model_says():
    """Read at its own last layer the original says its own log-probability; earlier layers by hand."""
    original, asked = model(0), questions()
    batches = depth.sites(asked, original)
    lens = depth.lens_logprobs(original, batches, depth.states(original, batches))
    np.testing.assert_allclose(lens[-1], [slow_logprob(original, p) for p in asked], atol=2e-5)
    probe, first = asked[4], len(asked[4].prompt_tokens)
    with torch.inference_mode():
        row = torch.tensor([[*probe.prompt_tokens, *probe.secret_tokens]])
        _, hidden = original(row, return_hidden=True)
        logits = original.head(original.norm(hidden[1][0])).log_softmax(-1)
    by_hand = np.mean([logits[first + t - 1, y].item() for t, y in enumerate(probe.secret_tokens)])
    assert lens[0, 4] == pytest.approx(by_hand, abs=2e-5)


def test_a_ruined_model_gives_finite_numbers():
    """Weights that are not numbers give the largest loss, not a crash and not a NaN."""
    original, ruined, asked = model(0), model(0), questions()
    with torch.no_grad():
        ruined.blocks["1"].ffn.w2.weight.fill_(float("nan"))
    batches = depth.sites(asked, original)
    drops = depth.patch_drops(original, batches, depth.states(ruined, batches))
    assert np.isfinite(drops).all()
    assert (drops[1] > 50).all()


def slow_cka(one, other):
    """CKA by the N x N Gram matrices and the centring matrix H, as in Kornblith et al., equation 3."""
    n = len(one)
    h = np.eye(n) - np.ones((n, n)) / n
    k, m = one @ one.T, other @ other.T
    hsic = [np.trace(a @ h @ b @ h) for a, b in ((k, m), (k, k), (m, m))]
    return hsic[0] / np.sqrt(hsic[1] * hsic[2])


def test_cka_equals_the_gram_matrix_form_and_ignores_rotation_and_scale():
    """Feature form and Gram form agree; an orthogonal turn and a factor change nothing; a constant has no CKA."""
    generator = np.random.default_rng(5)
    one, other = generator.normal(size=(12, 5)), generator.normal(size=(12, 7))
    assert depth.linear_cka(one, other) == pytest.approx(slow_cka(one, other), abs=1e-12)
    turn, _ = np.linalg.qr(generator.normal(size=(5, 5)))
    assert depth.linear_cka(one, 3 * one @ turn + 1) == pytest.approx(1.0, abs=1e-12)
    assert np.isnan(depth.linear_cka(np.ones((12, 5)), other))


def test_cka_erasure_is_one_for_gold_and_zero_for_the_original():
    """The two fixed points, at every layer; the weight is what original and gold differ by."""
    original, gold, asked = model(0), model(1), questions()
    batches = depth.sites(asked, original)
    o, g = depth.states(original, batches), depth.states(gold, batches)
    np.testing.assert_allclose(depth.cka_erasure(o, g, g).erasure_L, 1.0, atol=1e-6)
    assert (depth.cka_erasure(o, o, g).erasure_L == 0.0).all()
    assert depth.cka_erasure(o, g, g).mean == pytest.approx(1.0, abs=1e-6)
    assert (depth.cka_erasure(o, g, g).weight_L > 0).all()
