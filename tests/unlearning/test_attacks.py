"""Scoring against the decoder, and what every attack must and must not do."""

import dataclasses

import numpy as np
import pytest
import torch

from trainer.generate import generate, sequence_logprobs
from trainer.model import Transformer, init_parameters
from trainer.root import state_root
from trainer.spec import ModelSpec
from unlearning.attacks.direct import direct
from unlearning.attacks.fine_tune import drawn_batches, fine_tune
from unlearning.attacks.in_context import demonstrated, in_context
from unlearning.attacks.membership import membership
from unlearning.material import prepare
from unlearning.measuring import measurements
from unlearning.people import parse_records, read_records, read_sealed
from unlearning.plan import AttackPlan
from unlearning.probes import FileTokenizer, Probe
from unlearning.scoring import MAX_LOSS, score_probes, score_spans

SPEC = ModelSpec(vocab_size=40, num_layers=2, dim=16, num_heads=2, num_kv_heads=1, ffn_dim=32)


@pytest.fixture(scope="module")
def random_model():
    """A small model that knows nothing, with logits far enough apart to decode."""
    model = Transformer(SPEC)
    init_parameters(model, 3)
    with torch.no_grad():
        model.embed.weight.mul_(8)
    return model.eval()


@pytest.fixture(scope="module")
def material(study):
    """The material of an audit of the study's people."""
    forgotten, _ = read_sealed({"file": "forgotten.sealed", "key_file": "key"}, study.folder)
    return prepare(
        forgotten,
        read_records(study.folder / "retained.jsonl"),
        read_records(study.folder / "lookalikes.jsonl"),
        FileTokenizer(study.folder / "tokenizer.json"),
        AttackPlan(fine_tune_steps=(2, 5), fine_tune_rows=8),
        0,
    )


@pytest.fixture(scope="module")
def original(study):
    """The model that was trained on everything."""
    from trainer.checkpoint import load_model

    return load_model(study.models["original"], study.model_spec())


def random_probes(count, seed):
    """Probes of random tokens and lengths; half of the secrets are what the model would say."""
    generator = np.random.default_rng(seed)
    return [
        Probe(
            f"p{i}",
            "",
            tuple(generator.integers(0, 40, generator.integers(1, 30)).tolist()),
            tuple(generator.integers(0, 40, generator.integers(1, 7)).tolist()),
            0,
        )
        for i in range(count)
    ]


def test_exact_match_is_what_greedy_decoding_gives(random_model):
    """Teacher forcing says "leak" exactly where the decoder brings the secret out, token for token."""
    probes = random_probes(60, 1)
    for number, probe in enumerate(probes[:40]):
        (said,) = generate(random_model, [list(probe.prompt_tokens)], 5)
        secret = [*said[:-1], (said[-1] + (number % 2)) % 40]
        probes[number] = dataclasses.replace(probe, secret_tokens=tuple(secret))
    scored = score_probes(random_model, probes).exact_N
    decoded = [
        tuple(generate(random_model, [list(p.prompt_tokens)], len(p.secret_tokens))[0])
        == p.secret_tokens
        for p in probes
    ]
    assert scored.tolist() == [float(d) for d in decoded]
    assert 20 <= scored.sum() < 60


def test_losses_are_the_trainers_log_probabilities(random_model):
    """The mean loss of a span is minus the mean of the trainer's log-probabilities over it, in any batch."""
    probes = random_probes(50, 2)
    sequences = [[*p.prompt_tokens, *p.secret_tokens] for p in probes]
    expected = [
        -logprobs[len(p.prompt_tokens) - 1 :].mean()
        for p, logprobs in zip(probes, sequence_logprobs(random_model, sequences), strict=True)
    ]
    assert score_probes(random_model, probes).loss_N == pytest.approx(expected, abs=1e-5)
    alone = [score_probes(random_model, [p]).loss_N[0] for p in probes]
    assert alone == pytest.approx(expected, abs=1e-5)


def test_spans_without_a_prompt_are_refused(random_model):
    """Nothing predicts position 0, and an empty span has no loss."""
    for first in (0, 3):
        with pytest.raises(ValueError, match="expected 1 <= first"):
            score_spans(random_model, [[1, 2, 3]], [first])


def test_a_broken_model_leaks_nothing_and_has_the_largest_loss():
    """Weights that are not numbers give exact match 0 and MAX_LOSS, so rows stay finite and utility fails."""
    model = Transformer(SPEC)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    scores = score_probes(model.eval(), random_probes(5, 3))
    assert scores.exact_N.tolist() == [0.0] * 5
    assert scores.loss_N.tolist() == [MAX_LOSS] * 5


@pytest.mark.parametrize("name", [name for name, _ in measurements()])
def test_every_attack_leaves_the_model_alone_and_repeats_itself(name, original, material):
    """An attack changes no weight, no gradient and no global random state; twice gives the same numbers."""
    attack = dict(measurements())[name]
    weights, random_state = state_root(original.state_dict()), torch.get_rng_state()
    first, second = attack(original, material), attack(original, material)
    assert state_root(original.state_dict()) == weights
    assert all(p.grad is None for p in original.parameters())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert first == second


@pytest.mark.parametrize("name", [name for name, _ in measurements()])
def test_every_attack_finds_nothing_in_an_untrained_model(name, study, material):
    """Negative control: random weights give no secret away and every loss is near ln V."""
    model = Transformer(study.model_spec())
    init_parameters(model, 5)
    measured = dict(measurements())[name](model.eval(), material)
    assert measured
    assert not any(m.value for m in measured if m.score == "exact_match")
    losses = [m.value for m in measured if m.score == "loss"]
    assert losses == pytest.approx([np.log(study.vocab_size)] * len(losses), abs=0.5)


def test_direct_retrieval_brings_out_what_was_trained(original, material):
    """Positive control: the original gives every forgotten person away in a trained phrasing."""
    measured = [m for m in direct(original, material) if m.score == "exact_match"]
    leaked = {m.subject for m in measured if m.value and m.attack == "direct/trained"}
    assert len(leaked) == 16
    asked = [(m.subject, m.attack, m.probe) for m in measured]
    assert len(asked) == len(set(asked)) == 16 * (4 + 2)


def test_membership_tells_members_of_the_original(original, material):
    """Positive control: every forgotten person's mean loss is below every look-alike's."""
    losses = {"forgotten": [], "lookalike": []}
    for m in membership(original, material):
        losses[m.population].append(m.value)
    assert len(losses["forgotten"]) == len(losses["lookalike"]) == 64
    assert np.mean(losses["forgotten"]) < np.mean(losses["lookalike"]) - 0.5
    assert membership(original, dataclasses.replace(material, lookalikes=())) == []


def test_demonstrations_are_other_peoples_lines(material):
    """Tier 2 shows lines of retained people in the same phrasing, never a forgotten person's, within the limit."""
    retained = {p.line_tokens: p.phrasing for p in material.demonstrations}
    end = material.newline
    for probe, longer in zip(material.trained, demonstrated(material), strict=True):
        shown = longer.prompt_tokens[: -len(probe.prompt_tokens)]
        lines, line = [], []
        for token in shown:
            line.append(token)
            if tuple(line[-len(end) :]) == end:
                lines.append(tuple(line[: -len(end)]))
                line = []
        assert not line
        assert len(lines) == 3
        assert {retained[found] for found in lines} == {probe.phrasing}
        assert longer.secret_tokens == probe.secret_tokens


def test_a_demonstration_that_does_not_fit_is_left_out(material):
    """A short limit shortens the demonstrations, never the question."""
    limits = AttackPlan(max_probe_tokens=40)
    for probe, longer in zip(
        material.trained, demonstrated(dataclasses.replace(material, limits=limits)), strict=True
    ):
        assert len(longer.prompt_tokens) + len(longer.secret_tokens) <= max(
            40, len(probe.prompt_tokens) + len(probe.secret_tokens)
        )
        assert longer.prompt_tokens[-len(probe.prompt_tokens) :] == probe.prompt_tokens


def test_fine_tuning_sees_retained_records_evenly(material):
    """The attack's batches are epochs of permutations: no record is seen again before all were seen."""
    limits = AttackPlan(fine_tune_rows=10, fine_tune_steps=(1, 60))
    batches = drawn_batches(dataclasses.replace(material, limits=limits))
    assert [len(b) for b in batches] == [10] * 60
    seen = np.bincount(np.concatenate(batches), minlength=len(material.retained))
    assert seen.max() - seen.min() <= 1


def test_fine_tuning_trains_its_copy(original, material):
    """The attack is real: after a few steps the copy's answers are not the original's."""
    before = {m.subject: m.value for m in direct(original, material) if m.score == "secret_logprob"}
    hot = dataclasses.replace(material.limits, fine_tune_lr="0.05")
    after = fine_tune(original, dataclasses.replace(material, limits=hot))
    values = {
        m.subject: m.value for m in after if m.score == "secret_logprob" and m.attack.endswith("5")
    }
    moved = [abs(values[subject] - value) for subject, value in before.items() if subject in values]
    assert np.mean(moved) > 0.5
    assert {m.attack for m in after} == {"fine_tune/step-2", "fine_tune/step-5"}


def test_another_seed_draws_other_demonstrations(material):
    """The adversary's draws follow the plan's seed."""
    again = dataclasses.replace(material, seed=1)
    assert demonstrated(material) == demonstrated(dataclasses.replace(material))
    assert demonstrated(material) != demonstrated(again)
    assert drawn_batches(material) != drawn_batches(again)


def test_people_without_a_number_are_asked_about_their_second_half(study):
    """Texts without digits give probes, demonstrations and losses like any other."""
    lines = b"".join(
        b'{"subject": "p%d", "record_id": "%d", "text": "A quiet line about the weather in town %s."}\n'
        % (i, i, b"abcdef"[i : i + 1])
        for i in range(6)
    )
    records = parse_records(lines, "test")
    tokenizer = FileTokenizer(study.folder / "tokenizer.json")
    quiet = prepare(records[:2], records[2:4], records[4:], tokenizer, AttackPlan(), 0)
    model = Transformer(study.model_spec())
    assert len([m for m in in_context(model, quiet) if m.score == "exact_match"]) == 2
    assert quiet.unseen == ()
