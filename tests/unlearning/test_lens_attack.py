"""Answers read off an inner layer: a planted model whose last layer alone was bent, a slow decoder, the choice of the layer, the verdict."""

import dataclasses

import pytest
import torch

from trainer.checkpoint import load_model
from trainer.model import Transformer, init_parameters
from unlearning.attacks.direct import ask
from unlearning.attacks.lens import lens
from unlearning.ensemble import Ensemble
from unlearning.errors import PlanError
from unlearning.material import prepare
from unlearning.people import read_records, read_sealed
from unlearning.plan import AttackPlan, AuditPlan
from unlearning.probes import FileTokenizer
from unlearning.repertoire import CHEAP, FULL, Repertoire


@pytest.fixture(scope="module")
def material(study):
    """An audit's material that has layers read."""
    forgotten, _ = read_sealed({"file": "forgotten.sealed", "key_file": "key"}, study.folder)
    return prepare(
        forgotten, read_records(study.folder / "retained.jsonl"), [], FileTokenizer(study.folder / "tokenizer.json"),
        AttackPlan(repertoire=Repertoire(lens=16)), 0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def original(study):
    """The model that was trained on everything, two layers deep."""
    return load_model(study.models["original"], study.model_spec())


def deepened(original, *, before=0, bent=True):
    """The original with `before` layers that do nothing below it, and one on top: random weights, or one that does nothing."""
    spec = dataclasses.replace(original.spec, num_layers=original.spec.num_layers + before + 1)
    model = Transformer(spec)
    init_parameters(model, 5)
    weights = dict(model.state_dict())
    for name, value in original.state_dict().items():
        _, layer, *rest = [*name.split(".", 2), "", ""]
        inside = name.startswith("blocks.")
        weights[f"blocks.{int(layer) + before}.{rest[0]}" if inside else name] = value
    for layer in [*range(before), *([] if bent else [spec.num_layers - 1])]:
        own = f"blocks.{layer}."
        weights |= {
            name: torch.zeros_like(value) for name, value in weights.items() if name.startswith(own)
        }
    if bent:
        own = f"blocks.{spec.num_layers - 1}."
        weights |= {
            name: value * 30
            for name, value in weights.items()
            if name.startswith(own) and value.dim() == 2
        }
    model.load_state_dict(weights)
    return model.eval()


def by_score(found, score):
    """(person, question) → value."""
    return {(m.subject, m.probe): m.value for m in found if m.score == score}


def test_a_bent_last_layer_hides_nothing(original, material):
    """Asked, the bent model says nothing; read below the bent layer it says, question by question, what the original says."""
    asked = (*material.trained, *material.unseen)
    bent = deepened(original)
    before, after = ask(original, asked, "x"), ask(bent, asked, "x")
    assert sum(by_score(before, "exact_match").values()) > 40
    assert not any(by_score(after, "exact_match").values())
    read = lens(bent, material)
    assert by_score(read, "exact_match") == by_score(before, "exact_match")
    assert by_score(read, "secret_logprob") == pytest.approx(by_score(before, "secret_logprob"), abs=1e-4)  # fmt: skip
    assert set(by_score(read, "layer").values()) == {2.0}


def test_the_layer_is_chosen_on_people_who_stay(original, material):
    """Layers that do nothing are passed over; with nobody to choose on, the deepest inner one is read; forgotten people choose nothing."""
    deep = deepened(original, before=1)
    assert set(by_score(lens(deep, material), "layer").values()) == {3.0}
    blind = dataclasses.replace(material, demonstrations=())
    assert set(by_score(lens(deep, blind), "layer").values()) == {3.0}
    one = dataclasses.replace(material, trained=material.trained[:1], unseen=())
    assert by_score(lens(deep, one), "layer") == {(material.trained[0].subject_id, 0): 3.0}


def test_reading_is_greedy_decoding_from_the_layer(original, material):
    """For each question: token after token, the first choice of layer one's lens, as a loop finds it."""
    found = by_score(lens(original, material), "exact_match")
    said, asked = {}, {}
    for probe in material.trained:
        tokens = list(probe.prompt_tokens)
        with torch.inference_mode():
            for _ in probe.secret_tokens:
                _, hidden = original.trunk(torch.tensor([tokens]))
                tokens.append(int(original.logits(original.norm(hidden[1][0, -1])).argmax()))
        number = asked[probe.subject_id] = asked.get(probe.subject_id, -1) + 1
        right = tuple(tokens[len(probe.prompt_tokens) :]) == tuple(probe.secret_tokens)
        said[probe.subject_id, number] = float(right)
    assert {key: found[key] for key in said} == said


def test_a_constituent_that_kept_the_answers_is_found(original, material, study):
    """Of an ensemble the layer of the constituent that tells most is read."""
    empty = Transformer(dataclasses.replace(study.model_spec(), num_layers=3))
    init_parameters(empty, 9)
    mixed = Ensemble([empty.eval(), deepened(original)])
    told = by_score(lens(mixed, material), "exact_match")
    assert told == by_score(lens(deepened(original), material), "exact_match")


def test_old_repertoires_keep_their_digests():
    """A plan whose repertoire reads no layer has the JSON it had; the sizes' repertoires read one; fewer than nobody is refused."""
    plan = AuditPlan(
        num_forgotten=64, num_retained=9, num_lookalikes=9, original="o", unlearned="u", gold=("g",),
        attacks=AttackPlan(repertoire=Repertoire(bits=(8,))),
    )  # fmt: skip
    told = plan.to_json()["attacks"]["repertoire"]
    assert "lens" not in told
    assert AuditPlan.from_json(plan.to_json()) == plan
    assert "lens" in CHEAP.attacks
    assert "lens" in FULL.attacks
    with pytest.raises(PlanError, match="lens >= 0"):
        Repertoire(lens=-1)
