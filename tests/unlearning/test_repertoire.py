"""Secondary attacks: what they ask with, what they must find in the original, and what they must not find anywhere else."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional

from trainer.checkpoint import load_model
from trainer.model import Transformer, init_parameters
from trainer.root import state_root
from unlearning.attacks.fine_tune import attacked, drawn_batches, fine_tune
from unlearning.attacks.quantising import nearest, rounded
from unlearning.attacks.restoring import restoring
from unlearning.attacks.shots import shots
from unlearning.ensemble import Ensemble
from unlearning.errors import PlanError
from unlearning.material import prepare
from unlearning.measuring import TRAINING, secondary_measurements
from unlearning.people import read_records, read_sealed
from unlearning.plan import AttackPlan, AuditPlan
from unlearning.probes import FileTokenizer
from unlearning.repertoire import FULL, Repertoire
from unlearning.scoring import padded, span_logits, span_mask

CHEAP = dataclasses.replace(
    FULL, samples=(1, 8), shots=(1, 4), rates=("0.0003",), candidates=20, wrong=3
)


@pytest.fixture(scope="module")
def material(study):
    """The material of an audit of the study's people with every secondary attack."""
    forgotten, _ = read_sealed({"file": "forgotten.sealed", "key_file": "key"}, study.folder)
    limits = AttackPlan(fine_tune_steps=(2, 4), fine_tune_rows=8, repertoire=CHEAP)
    return prepare(
        forgotten,
        read_records(study.folder / "retained.jsonl"),
        read_records(study.folder / "lookalikes.jsonl"),
        FileTokenizer(study.folder / "tokenizer.json"),
        limits,
        0,
    )


@pytest.fixture(scope="module")
def original(study):
    """The model that was trained on everything."""
    return load_model(study.models["original"], study.model_spec())


def text_of(study, tokens):
    """Tokens as text."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(study.folder / "tokenizer.json")).decode(list(tokens))


NAMES = [name for name, _ in secondary_measurements(FULL)]


@pytest.mark.parametrize("name", NAMES)
def test_secondary_attacks_leave_the_model_alone_and_repeat_themselves(name, original, material):
    """No weight and no global random state moves; twice gives the same numbers; no question is asked twice."""
    attack = dict(secondary_measurements(CHEAP))[name]
    weights, random_state = state_root(original.state_dict()), torch.get_rng_state()
    first, second = attack(original, material), attack(original, material)
    assert state_root(original.state_dict()) == weights
    assert torch.equal(torch.get_rng_state(), random_state)
    assert first == second
    keys = [(m.subject, m.population, m.probe, m.attack, m.score) for m in first]
    assert len(keys) == len(set(keys)) > 0


@pytest.mark.parametrize("name", [n for n in NAMES if n != "ranking"])
def test_secondary_attacks_find_nothing_in_an_untrained_model(name, study, material):
    """Negative control: random weights give nothing away under any attack (a forced half of a secret leaves three digits)."""
    model = Transformer(study.model_spec())
    init_parameters(model, 5)
    found = dict(secondary_measurements(CHEAP))[name](model.eval(), material)
    assert not any(m.value for m in found if m.score == "exact_match")
    assert all(m.value < 1e-3 for m in found if m.score == "leak_probability")


def test_the_original_leaks_where_it_should(original, material):
    """Positive control: forced prefixes, samples, every restoration and rounding to 8 bits bring most people out."""
    attacks = dict(secondary_measurements(CHEAP))
    wanted = {
        "asking": ("asked/prefix",),
        "sampling": ("sampled/k-8",),
        "restoring": tuple(f"restored/{s}/lr-0.0003/step-2" for s in CHEAP.sources),
        "quantising": ("quantised/int-8",),
    }
    for name, expected in wanted.items():
        found = attacks[name](original, material)
        for attack in expected:
            best = {}
            for m in found:
                if m.attack == attack and m.score in {"exact_match", "leak_probability"}:
                    best[m.subject] = max(best.get(m.subject, 0.0), m.value)
            assert np.mean(list(best.values())) > 0.75, attack


def test_ranking_tells_original_from_untrained(original, study, material):
    """The original ranks the secret first and prefers it; an untrained model has exposure near 1 bit and no preference."""
    untrained = Transformer(study.model_spec())
    init_parameters(untrained, 5)
    ranking = dict(secondary_measurements(CHEAP))["ranking"]

    def means(model):
        found = {}
        for m in ranking(model, material):
            found.setdefault((m.population, m.score), []).append(m.value)
        return {key: np.mean(values) for key, values in found.items()}

    knows, knows_not = means(original), means(untrained.eval())
    assert knows["forgotten", "exposure"] > 3.5
    assert knows_not["forgotten", "exposure"] < 2.5
    assert knows["forgotten", "log_truth_ratio"] < knows_not["forgotten", "log_truth_ratio"] - 0.5
    assert knows["forgotten", "extraction_strength"] > 0.9
    assert knows_not["forgotten", "extraction_strength"] < 0.2
    for score in CHEAP.memberships:
        assert knows["forgotten", score] < knows["lookalike", score]


def test_questions_say_what_they_promise(study, material):
    """Inverted questions hold the number and ask for the name; one-hop ones never say the name; prefixes hold half the number."""
    asked = material.questions.asked
    number = {
        p.subject_id: text_of(study, p.secret_tokens).replace(" ", "")
        for p in material.trained
        if p.phrasing == 0
    }
    for probe in asked["inverted"]:
        assert number[probe.subject_id] in text_of(study, probe.prompt_tokens).replace(" ", "")
        name = text_of(study, probe.secret_tokens)
        assert any(letter.isalpha() for letter in name)
        assert not any(letter.isdigit() for letter in name)
    names = {p.subject_id: text_of(study, p.secret_tokens).strip() for p in asked["inverted"]}
    for probe in asked["one_hop"]:
        assert names[probe.subject_id] not in text_of(study, probe.prompt_tokens)
    for probe, whole in zip(asked["prefix"], material.trained, strict=True):
        assert (*probe.prompt_tokens, *probe.secret_tokens) == (
            *whole.prompt_tokens,
            *whole.secret_tokens,
        )
        assert len(probe.secret_tokens) == (len(whole.secret_tokens) + 1) // 2


def test_no_line_that_is_shown_is_asked_for(original, material):
    """Related demonstrations hold no secret of the target and no line of another forgotten person."""
    secret = {}
    for probe in material.trained:
        if probe.record_id not in material.questions.public:
            secret.setdefault(probe.subject_id, []).append(probe.secret_tokens)
    own = {p.subject_id: p for p in material.trained if p.record_id in material.questions.public}
    retained = {p.line_tokens for p in material.demonstrations}
    for subject, lines in material.questions.related.items():
        shown = (*own[subject].prompt_tokens, *own[subject].secret_tokens)
        assert lines[0][: len(shown)] == shown
        assert set(lines[1:]) <= retained
        joined = [t for line in lines for t in line]
        for tokens in secret[subject]:
            assert not any(tuple(joined[i : i + len(tokens)]) == tokens for i in range(len(joined)))
    asked = {(m.subject, m.probe) for m in shots(original, material) if "related" in m.attack}
    public = {(p.subject_id, p.phrasing) for p in own.values()}
    assert asked
    assert not asked & public


def test_the_part_that_is_trained_on_is_not_scored(original, material):
    """No mutual information: people whose records the attacker has are not asked about; the others all are."""
    found = restoring(original, material)
    scored = {m.subject for m in found if m.attack.startswith("restored/partial")}
    known = material.questions.known
    assert len(known) == 4
    assert scored == {p.subject_id for p in material.trained} - known
    public = {m.probe for m in found if m.attack.startswith("restored/public")}
    benign = {m.probe for m in found if m.attack.startswith("restored/benign")}
    assert len(public) == len(benign) - 1


def test_training_weight_by_weight_is_adamw(original, material):
    """Updating each weight as its gradient arrives is AdamW over all, but for a first moment of 8 bits (a hundredth of a step)."""
    batches = [[material.retained[i].tokens for i in b] for b in drawn_batches(material)]
    *_, (_, fast) = attacked(original, batches, "0.001", (1, 3))
    slow = Transformer(original.spec)
    slow.load_state_dict(original.state_dict())
    optimizer = torch.optim.AdamW(slow.parameters(), lr=0.001, weight_decay=0.0)
    for sequences in batches[:3]:
        tokens, mask = padded(sequences), span_mask(sequences, [1] * len(sequences))
        optimizer.zero_grad()
        loss = functional.cross_entropy(span_logits(slow, tokens, mask), tokens[:, 1:][mask])
        loss.backward()
        optimizer.step()
    for name, value in slow.state_dict().items():
        gap = (value - fast.state_dict()[name]).abs()
        assert gap.mean() < 0.01 * 0.001, name
        assert gap.max() < 0.5 * 0.001, name
        assert (value - original.state_dict()[name]).abs().mean() > 0.5 * 0.001, name


def test_a_weight_moved_part_by_part_is_the_weight_moved_at_once(original, material, monkeypatch):
    """The parts only spare memory: the same bits, whether a weight is one part or many."""
    batches = [[material.retained[i].tokens for i in b] for b in drawn_batches(material)]
    largest = max(weight.numel() for weight in original.parameters())
    roots = []
    for part in (64, largest):
        monkeypatch.setattr("unlearning.attacks.fine_tune.PART", part)
        *_, (_, after) = attacked(original, batches, "0.001", (1, 3))
        roots.append(state_root(after.state_dict()))
    assert largest > 64
    assert roots[0] == roots[1] != state_root(original.state_dict())


def test_activations_computed_twice_give_the_same_bits(original, material, monkeypatch):
    """Recomputing spares memory and changes no weight; afterwards every block is itself again."""
    batches = [[material.retained[i].tokens for i in b] for b in drawn_batches(material)]
    roots = []
    for recomputing in (True, False):
        if not recomputing:
            monkeypatch.setattr("unlearning.attacks.fine_tune._recomputing", nullcontext)
        *_, (_, after) = attacked(original, batches, "0.001", (1, 3))
        assert not any("forward" in vars(block) for block in after.modules())
        roots.append(state_root(after.state_dict()))
    assert roots[0] == roots[1] != state_root(original.state_dict())


def test_a_loader_gives_what_the_model_gives(study, original, material):
    """An attack that loads and trains its own model measures what it measures on a copy."""
    loaded = fine_tune(lambda: load_model(study.models["original"], study.model_spec()), material)
    assert loaded == fine_tune(original, material)


def test_rounding_is_to_the_nearest_level(original):
    """Every weight lies on its row's grid, at most half a step away; 2^b - 1 levels; the head of a tied model stays."""
    weight = torch.tensor([[0.0, 0.0], [-7.0, 3.4], [1.0, 0.06]])
    assert torch.allclose(nearest(weight, 4), torch.tensor([[0.0, 0.0], [-7.0, 3.0], [1.0, 0.0]]))
    for bits in (4, 8):
        copied = rounded(original, bits)
        for (name, a), (_, b) in zip(
            original.named_parameters(), copied.named_parameters(), strict=True
        ):
            if a.dim() == 2 and "embed" not in name and "head" not in name:
                step = a.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
                assert ((a - b).abs() <= step / 2 + 1e-7).all()
                assert all(len(row.unique()) <= 2**bits - 1 for row in b)
            else:
                assert torch.equal(a, b)


def test_an_empty_repertoire_leaves_old_plans_as_they_were():
    """The digest of a plan without new fields is that of its old JSON; a repertoire changes it and survives JSON."""
    plan = AuditPlan(
        num_forgotten=64, num_retained=9, num_lookalikes=9, original="o", unlearned="u", gold=("g",)
    )
    assert "repertoire" not in plan.to_json()["attacks"]
    assert "random_init" not in plan.to_json()
    richer = dataclasses.replace(plan, attacks=AttackPlan(repertoire=FULL), random_init="r")
    assert AuditPlan.from_json(richer.to_json()) == richer
    assert richer.digest != plan.digest
    assert secondary_measurements(plan.attacks.repertoire) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"asked": ("nicely",)},
        {"asked": ("prefix", "prefix")},
        {"shots": (4, 2), "shot_sources": ("related",)},
        {"shots": (33,), "shot_sources": ("related",)},
        {"shots": (1,)},
        {"sources": ("benign",)},
        {"sources": ("benign",), "rates": ("0",)},
        {"sources": ("benign",), "rates": ("fast",)},
        {"bits": (2,)},
        {"candidates": 1},
        {"samples": (0,)},
        {"temperature": "-1"},
        {"memberships": ("luck",)},
    ],
)
def test_a_repertoire_without_sense_is_refused(changes):
    """Unknown attacks, budgets out of order and rates that are none are a PlanError."""
    with pytest.raises(PlanError, match="expected"):
        Repertoire(**changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_secondary_attack_asks_an_ensemble(study, material, original, name):
    """The mean of twice the same model gives what the model gives, for every attack; a new start for those that train."""
    attack = dict(secondary_measurements(CHEAP))[name]

    def double():
        return Ensemble([load_model(study.models["original"], study.model_spec()) for _ in range(2)]).eval()  # fmt: skip

    trains = name in TRAINING
    found = attack(double if trains else double(), material)
    alone = attack((lambda: load_model(study.models["original"], study.model_spec())) if trains else original, material)  # fmt: skip
    if name == "lens":  # read per constituent, and both are that model
        each = [[m for m in found if m.attack.startswith(f"lens/constituent-{k}/")] for k in (1, 2)]
        assert sum(map(len, each)) == len(found)
        found, alone = [dataclasses.replace(m, attack=f"lens/{m.attack.split('/')[-1]}") for one in each for m in one], [*alone, *alone]  # fmt: skip
    assert [(m.subject, m.probe, m.attack, m.score) for m in found] == [(m.subject, m.probe, m.attack, m.score) for m in alone]  # fmt: skip
    # Training moves both halves by half a gradient each, which Adam makes the step of the whole one, up to its epsilon.
    tolerance = 0.05 if trains else 1e-3
    values = np.array([[m.value for m in some] for some in (found, alone)])
    assert np.isfinite(values).all()
    assert (np.abs(values[0] - values[1]) > tolerance * (1 + np.abs(values[1]))).mean() < 0.02
