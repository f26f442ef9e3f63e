"""Answers read off inner layers: planted models whose later layers were bent, for all or for the forgotten alone, and a slow decoder."""

import dataclasses

import pytest
import torch

from trainer.checkpoint import load_model
from trainer.model import Transformer, init_parameters
from unlearning import depth
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
        AttackPlan(repertoire=Repertoire(lens=1)), 0,
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


class Traitor(Transformer):
    """The original but for texts that begin as some given ones do: of those the last layer gets another state from the layer below."""

    begins: frozenset = frozenset()

    def trunk(self, tokens_BT, *more):
        """As of the original, with the states of the given texts turned round from the last inner layer on."""
        last_BTD, hidden = super().trunk(tokens_BT, *more)
        chosen_B = [tuple(row[:5]) in self.begins for row in tokens_BT.tolist()]
        turned = [*hidden[:-2], *(one.clone() for one in hidden[-2:])]
        for state in turned[-2:]:
            state[chosen_B] = -state[chosen_B].flip(-1)
        last_BTD = last_BTD.clone()
        last_BTD[chosen_B] = self.norm(turned[-1][chosen_B])
        return last_BTD, turned


def by_score(found, score, attack="lens/layer-2"):
    """(person, question) → value under one attack."""
    return {(m.subject, m.probe): m.value for m in found if (m.score, m.attack) == (score, attack)}


def test_a_bent_last_layer_hides_nothing(original, material):
    """Asked, the bent model says nothing; read below the bent layer it says, question by question, what the original says."""
    asked = (*material.trained, *material.unseen)
    bent = deepened(original)
    before, after = ask(original, asked, "x"), ask(bent, asked, "x")
    assert sum(by_score(before, "exact_match", "x").values()) > 40
    assert not any(by_score(after, "exact_match", "x").values())
    read = lens(bent, material)
    assert by_score(read, "exact_match") == by_score(before, "exact_match", "x")
    assert by_score(read, "secret_logprob") == pytest.approx(by_score(before, "secret_logprob", "x"), abs=1e-4)  # fmt: skip
    assert {m.attack for m in read} == {
        "lens/layer-1",
        "lens/layer-2",
    }  # not the last one, which is the model


def test_who_hides_the_forgotten_alone_from_the_last_inner_layer_on_is_found(original, material):
    """People who stay are read off every layer as before, most of them off the last inner one; the forgotten are still told by the one below it."""
    honest = deepened(original, bent=False)
    traitor = Traitor(honest.spec)
    traitor.load_state_dict(honest.state_dict())
    asked = (*material.trained, *material.unseen)
    traitor.eval().begins = frozenset(tuple(p.prompt_tokens[:5]) for p in asked) - {
        tuple(p.prompt_tokens[:5]) for p in material.demonstrations
    }
    hidden = [p for p in asked if tuple(p.prompt_tokens[:5]) in traitor.begins]
    assert len(hidden) > 40
    mine = dataclasses.replace(material, trained=tuple(hidden), unseen=())
    staying = dataclasses.replace(material, trained=material.demonstrations, unseen=())
    assert lens(traitor, staying) == lens(honest, staying)
    counts = [sum(by_score(lens(honest, staying), "exact_match", f"lens/layer-{n}").values()) for n in (1, 2)]  # fmt: skip
    assert counts[1] > counts[0]
    found = lens(traitor, mine)
    assert not any(by_score(found, "exact_match").values())
    told = by_score(found, "exact_match", "lens/layer-1")
    assert told == by_score(lens(honest, mine), "exact_match", "lens/layer-1")
    assert sum(told.values()) > 0


def test_reading_is_greedy_decoding_from_the_layer(original, material, monkeypatch):
    """For each question: token after token, the first choice of layer one's lens, as a loop finds it; states of one batch at a time."""
    kept = []

    def counted(model, batches):
        kept.append(len(batches))
        return depth.states(model, batches)

    monkeypatch.setattr("unlearning.attacks.lens.states", counted)
    found = by_score(lens(original, material), "exact_match", "lens/layer-1")
    assert set(kept) == {1}
    assert len(kept) > 1
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


def test_every_constituent_of_an_ensemble_is_read(original, material, study):
    """Of a mixed ensemble the rows of the second constituent are what it says alone."""
    empty = Transformer(dataclasses.replace(study.model_spec(), num_layers=3))
    init_parameters(empty, 9)
    read = lens(Ensemble([empty.eval(), deepened(original)]), material)
    assert len({m.attack for m in read}) == 4
    alone = lens(deepened(original), material)
    assert by_score(read, "exact_match", "lens/constituent-2/layer-2") == by_score(alone, "exact_match")  # fmt: skip
    assert not any(by_score(read, "exact_match", "lens/constituent-1/layer-2").values())


def test_old_repertoires_keep_their_digests():
    """A plan whose repertoire reads no layer has the JSON it had; the sizes' repertoires read all; a negative number is refused."""
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
