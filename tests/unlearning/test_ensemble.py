"""An ensemble is asked like one model: closed forms against its constituents, cache and mask included, and files that are refused."""

import copy
import json

import pytest
import torch
from torch.nn import functional

from trainer.generate import generate
from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from unlearning.attacks.quantising import rounded
from unlearning.decoding import Prefix
from unlearning.ensemble import (
    FILE,
    Constituent,
    Ensemble,
    members,
    read_ensemble,
    write_ensemble,
)
from unlearning.errors import PlanError
from unlearning.probes import Probe
from unlearning.scoring import score_probes

SPEC = ModelSpec(vocab_size=40, num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32)


def model_of(seed):
    """A small model that decodes something."""
    model = Transformer(SPEC)
    init_parameters(model, seed)
    with torch.no_grad():
        model.embed.weight.mul_(8)
    return model.eval()


@pytest.fixture(scope="module")
def models():
    """Three constituents."""
    return [model_of(seed) for seed in range(3)]


def test_the_probabilities_are_the_mean_of_the_constituents(models):
    """softmax(logits) of the ensemble is the plain mean of the softmaxes, with and without several documents in a row."""
    tokens_BT = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(0))
    documents_BT = torch.tensor([[0] * 4 + [1] * 5] * 4)
    for given in ((tokens_BT,), (tokens_BT, None, documents_BT)):
        mean = torch.stack([model(*given).softmax(-1) for model in models]).mean(0)
        found = Ensemble(models)(*given)
        assert torch.allclose(found.softmax(-1), mean, atol=1e-6)
        assert torch.allclose(found.logsumexp(-1), torch.zeros(()), atol=1e-5)


def test_one_constituent_is_the_model_itself(models):
    """An ensemble of one, or of the same model twice, scores and decodes as the model does."""
    prompts = [[1, 2, 3], [7, 8, 9]]
    alone = generate(models[0], prompts, 6)
    assert generate(Ensemble(models[:1]), prompts, 6) == alone
    assert generate(Ensemble([models[0], models[0]]), prompts, 6) == alone


def test_a_cache_changes_nothing(models):
    """Greedy decoding with cached keys is decoding the whole text anew for every token; shared prefixes score like whole lines."""
    ensemble = Ensemble(models).eval()
    tokens = [3, 1, 4]
    for token in generate(ensemble, [tokens], 5)[0]:
        with torch.inference_mode():
            assert int(ensemble(torch.tensor([tokens]))[0, -1].argmax()) == token
        tokens.append(token)
    probe = Probe("x", "", (5, 6, 7, 8), (9, 10, 11), 0)
    whole = score_probes(ensemble, [probe])
    parts = Prefix(ensemble, probe.prompt_tokens).scores([(probe.secret_tokens, 0)] * 2)
    assert parts.loss_N == pytest.approx([whole.loss_N[0]] * 2, abs=1e-5)


def test_training_the_mean_moves_every_constituent(models):
    """The fine-tuning attack on an ensemble is defined: its loss has a gradient in each of the models."""
    ensemble = Ensemble(copy.deepcopy(models)).requires_grad_(requires_grad=True)
    tokens_BT = torch.tensor([[1, 2, 3, 4]])
    functional.nll_loss(ensemble(tokens_BT[:, :-1]).flatten(0, 1), tokens_BT[0, 1:]).backward()
    for part in ensemble.parts:
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters())


def test_rounding_an_ensemble_rounds_every_constituent(models):
    """It answers with (p_1 + p_2) / 2 of the models rounded alone, in float64 against softmax written out; the ensemble itself keeps its weights."""
    first, second = (copy.deepcopy(model).double() for model in models[:2])
    tokens_BT = torch.tensor([[3, 1, 4, 1, 5]])
    ensemble = Ensemble([first, second]).eval()
    before = ensemble(tokens_BT)
    for bits in (3, 8):
        mean = 0
        for model in (first, second):
            alone = copy.deepcopy(model)
            levels = 2 ** (bits - 1) - 1
            for name, weight in alone.named_parameters():
                if weight.dim() == 2 and "embed" not in name:
                    step_O1 = weight.detach().abs().max(1, keepdim=True).values / levels
                    weight.data = step_O1 * torch.round(weight.detach() / step_O1)
            exp_BTV = alone(tokens_BT).exp()
            mean = mean + exp_BTV / exp_BTV.sum(-1, keepdim=True) / 2
        found = rounded(ensemble, bits)(tokens_BT).exp()
        assert torch.allclose(found, mean, atol=1e-12)
        assert (found - before.exp()).abs().max() > 1e-6
    assert torch.equal(ensemble(tokens_BT), before)


def test_members_are_the_constituents_or_the_model(models):
    """What is done to each weight of a model is done to each constituent."""
    assert members(models[0]) == [models[0]]
    assert members(Ensemble(models)) == models


def test_an_ensemble_is_named_by_its_constituents(tmp_path):
    """The digest follows from what is named; what is no ensemble is None, and a damaged file is refused."""
    one, two = Constituent(0, "../a", "a" * 64, ("../a",)), Constituent(1, "../b", "b" * 64)
    first = write_ensemble(tmp_path / "x", [one, two])
    assert first == write_ensemble(tmp_path / "y", [one, two])
    assert first != write_ensemble(tmp_path / "z", [two, one])
    assert read_ensemble(tmp_path / "x") == (one, two)
    assert read_ensemble(tmp_path) is None
    for change in ({"format": 2}, {"mean": "logits"}, {"constituents": []}, {"constituents": [1]}):
        body = json.loads((tmp_path / "x" / FILE).read_text()) | change
        (tmp_path / "y" / FILE).write_text(json.dumps(body))
        with pytest.raises(PlanError, match="no ensemble"):
            read_ensemble(tmp_path / "y")
    with pytest.raises(PlanError, match="at least one"):
        write_ensemble(tmp_path / "empty", [])
