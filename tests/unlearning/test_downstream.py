"""Damage planted in one layer is seen in it and in untouched layers after it, and nowhere before it."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trainer.checkpoint import load_model
from unlearning.depth import lens_logprobs, sites, states
from unlearning.downstream import streams
from unlearning.engineering import EVERYBODY, _row, kept_rows
from unlearning.findings import Findings
from unlearning.grafts import update_norms
from unlearning.people import read_records
from unlearning.probes import FileTokenizer, trained_probes
from unlearning.rows import to_table
from unlearning.scoring import score_probes

PEOPLE = 16


@pytest.fixture(scope="module")
def asked(study):
    """Questions about sixteen people who stay."""
    records = read_records(study.folder / "retained.jsonl")
    probes = trained_probes(records, FileTokenizer(study.folder / "tokenizer.json"))
    chosen = sorted({probe.subject_id for probe in probes})[:PEOPLE]
    return [probe for probe in probes if probe.subject_id in chosen]


@pytest.fixture(scope="module")
def trained(study):
    """Original and two gold models."""
    return {name: load_model(study.models[name], study.model_spec()).eval() for name in ("original", "gold", "gold2")}  # fmt: skip


def planted(model, layer, size=0.5):
    """A copy whose one layer is drawn anew around its weights, `size` times as far as they are long."""
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(layer)
    block = list(changed.blocks.values())[layer - 1]
    with torch.no_grad():
        for weight in block.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(size * noise * weight.norm() / noise.norm())
    return changed


def findings_of(trained, unlearned, probes):
    """Findings of the rows that the stage writes, with the update norms of the parts."""
    models = {"original": [trained["original"]], "unlearned": [unlearned], "gold": [trained["gold"], trained["gold2"]]}  # fmt: skip
    subjects = sorted({probe.subject_id for probe in probes})
    bench = SimpleNamespace(
        others=lambda: [SimpleNamespace(subject=subject) for subject in subjects],
        material=SimpleNamespace(demonstrations=probes),
        load=lambda role, number=0: models[role][number],
        compared=lambda: [(role, number) for role, found in models.items() for number in range(len(found))],
        models=lambda role: [(f"{role}-{number}", None) for number in range(len(models[role]))],
        id=lambda subject: subject,
    )  # fmt: skip
    key = ("unlearned", "unlearned-0")
    rows = [*kept_rows(bench), _row(subjects[0], "retained", 0, key, "part/all", "applied_loss", 0.0)]  # fmt: skip
    norms = update_norms(*(dict(m.named_parameters()) for m in (trained["original"], unlearned)))
    rows += [_row(EVERYBODY, "retained", 0, key, f"part/{part}", "update_norm", norm) for part, norm in norms.items()]  # fmt: skip
    return Findings(to_table(rows), "gold-0").kept()


def test_damage_of_the_first_layer_is_seen_in_the_untouched_second(trained, asked):
    """The second layer's weights are the original's, and it hurts more than gold models differ by."""
    first, second = findings_of(trained, planted(trained["original"], 1), asked)
    assert first.norm == pytest.approx(0.5, rel=1e-3)
    assert second.norm == 0.0
    assert first.damaged
    assert second.damaged
    assert second.low > 10 * second.loss_null > 0
    assert first.cka < 0.8  # the share of the weights' square that isn't noise: 1 / (1 + 0.25)
    assert second.cka < second.cka_null  # less like the original than two gold models are alike


def test_layers_before_the_change_are_bit_for_bit_the_original(trained, asked):
    """Negative control: only the last layer was changed, so that nothing at all is lost in the first."""
    first, second = findings_of(trained, planted(trained["original"], 2), asked)
    assert (first.norm, first.loss, first.low, first.high, first.damaged) == (0.0, 0.0, 0.0, 0.0, False)  # fmt: skip
    assert first.cka == pytest.approx(1.0)
    assert second.damaged


def test_an_unchanged_model_shows_no_damage(trained, asked):
    """The original as it was loses nothing in any layer."""
    for one in findings_of(trained, trained["original"], asked):
        assert (one.loss, one.damaged) == (0.0, False)


def test_damage_grows_with_what_was_planted_and_chance_is_not_damage(trained, asked):
    """A twentieth of the weights' length moves the untouched layer, no further than chance; four times that is damage."""
    slight, plain = (findings_of(trained, planted(trained["original"], 1, size), asked)[1] for size in (0.05, 0.2))  # fmt: skip
    assert slight.cka < 1 - 1e-3
    assert 0 < slight.loss < slight.loss_null < plain.loss
    assert (slight.damaged, plain.damaged) == (False, True)


def test_a_retrained_model_is_not_damaged(trained, asked):
    """Negative control: other weights in every layer, and no layer lost more than chance gives, with confidence."""
    for one in findings_of(trained, trained["gold2"], asked):
        assert one.norm > 0.5
        assert not one.damaged


def test_the_last_layer_is_what_the_model_says(trained, asked):
    """Oracle: after the last layer the own head reads the model's own log-probability of each answer."""
    made = list(streams(lambda role, _: trained[role], [("original", 0), ("gold", 0)], asked))
    for one in made:
        expected_N = -score_probes(trained[one.role], asked).loss_N
        np.testing.assert_allclose(one.kept_LN[-1], expected_N, atol=1e-4)
    np.testing.assert_allclose(made[0].cka_original_L, 1.0)
    np.testing.assert_allclose(made[0].cka_gold_L, made[1].cka_original_L)
    batches = sites(asked, trained["original"])
    foreign_LN = lens_logprobs(trained["original"], batches, states(trained["gold"], batches))
    # Another's head reads another thing: by more than the two models' answers can differ by rounding.
    assert abs(foreign_LN[-1] - made[1].kept_LN[-1]).max() > 0.1
