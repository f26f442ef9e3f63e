"""Depth and ripple on their way into the report: which sizes measure them, and every number from the rows."""

import json
from dataclasses import replace

import pytest

from pipelines.anatomy import FILE, engineering_settings, read_engineering
from pipelines.erasure.stores import EVIDENCE
from pipelines.reports import NotAvailable
from pipelines.reports.dossier import Dossier
from pipelines.reports.dossier_drawings import drawings
from pipelines.reports.dossier_page import render_dossier
from pipelines.reports.engineering import OfEnsemble
from pipelines.reports.errors import ReportError
from pipelines.sizes import SIZES
from tests.pipelines.dossier_sample import dossier, engineering, of_ensemble
from tests.pipelines.report_sample import Page
from unlearning.association import TIES
from unlearning.engineering import EVERYBODY, Scale, _row
from unlearning.ensemble import UNDEFINED
from unlearning.rows import to_table, write_rows
from unlearning.statistics import wilson_bounds

MODELS = (("original", "o"), ("unlearned", "u"), ("gold", "g"), ("gold", "h"))
OTHERS = [f"{number:032x}" for number in range(6)]


def kept_rows():
    """A method that touched the first layer only: nothing is lost there, a nat and a half in the second; gold models differ by a quarter."""
    rows = []
    for layer, lost, cka in ((1, 0.0, 1.0), (2, 1.5, 0.5)):
        attack = f"kept/layer-{layer}"
        for model, kept, like in zip(MODELS, (-1.0, -1.0 - lost, -1.25, -1.5), (1.0, cka, 0.75, 0.875), strict=True):  # fmt: skip
            rows += [_row(other, "retained", 0, model, attack, "kept_logprob", kept) for other in OTHERS]  # fmt: skip
            rows += [_row(EVERYBODY, "retained", 0, model, attack, score, like) for score in ("cka_original", "cka_gold")]  # fmt: skip
    for part in ("layer 1 feed-forward", "layer 2 attention", "layer 2 feed-forward"):
        rows.append(_row(EVERYBODY, "retained", 0, MODELS[1], f"part/{part}", "update_norm", 0.0))
        rows += [_row(other, "retained", 0, MODELS[1], f"part/{part}", score, 0.0) for other in OTHERS for score in ("applied_loss", "reverted_loss", "applied_facts")]  # fmt: skip
    return rows


def made_up(folder, *, ranked=()):
    """Two layers, three questions, two targets, six others, two parts; the unlearned model is erased in the last layer only."""
    rows = []
    drops = {"o": (0.0, 0.0), "u": (0.0, 2.0), "g": (1.0, 2.0), "h": (1.1, 1.9)}
    for role, digest in MODELS:
        for layer in (1, 2):
            attack = f"depth/layer-{layer}"
            for probe in range(3):
                rows.append(_row("t0", "forgotten", probe, (role, digest), attack, "patch_drop", drops[digest][layer - 1]))  # fmt: skip
                rows.append(_row("t0", "forgotten", probe, (role, digest), attack, "lens_logprob", -float(layer)))  # fmt: skip
            rows.append(_row(EVERYBODY, "forgotten", 0, (role, digest), attack, "cka_erasure", 0.5))
            rows.append(_row(EVERYBODY, "forgotten", 0, (role, digest), attack, "cka_weight", 0.1))
    for number, target in enumerate(("t0", "t1")):
        rows += [_row(target, "forgotten", 0, MODELS[0], "ripple", score, value) for score, value in (("steps", 3), ("rise", 1.0), ("reached", number))]  # fmt: skip
        for place, other in enumerate(OTHERS):
            values = dict.fromkeys(TIES, 1.0 - place / 10) | {"damage": 0.1 * (6 - place) + 0.01 * number, "damage_first": 0.0}  # fmt: skip
            rows += [_row(target, "forgotten", 0, MODELS[0], f"ripple/{other}", score, value) for score, value in values.items()]  # fmt: skip
    for part in ("embedding", "layer 1 attention"):
        rows.append(_row(EVERYBODY, "retained", 0, MODELS[1], f"part/{part}", "update_norm", 0.125))
        rows.append(_row(EVERYBODY, "retained", 0, MODELS[3], f"part/{part}", "update_norm", 0.75))
        for other in OTHERS:
            rows += [_row(other, "retained", 0, MODELS[1], f"part/{part}", score, 0.25) for score in ("applied_loss", "reverted_loss", "applied_facts")]  # fmt: skip
    for other in OTHERS:
        rows.append(_row(other, "retained", 0, MODELS[1], "part/all", "applied_loss", 0.5))
        rows.append(_row(other, "retained", 0, MODELS[1], "part/all", "applied_facts", 0.75))
        rows.append(_row(other, "retained", 0, MODELS[3], "gold_difference", "loss", -0.0625))
        rows.append(_row(other, "retained", 0, MODELS[3], "gold_difference", "facts", 0.03125))
        if other in ranked:
            rows.append(
                _row(other, "retained", 0, MODELS[1], "part/all", "applied_outranked", 0.625)
            )
            rows.append(
                _row(other, "retained", 0, MODELS[1], "part/embedding", "applied_outranked", 0.375)
            )
            rows.append(
                _row(other, "retained", 0, MODELS[3], "gold_difference", "outranked", -0.1875)
            )
    rows += kept_rows()
    write_rows(folder / FILE, to_table(rows))
    (folder / "plan.json").write_text(json.dumps({"gold": ["g", "h"]}))


def test_small_sizes_measure_neither_and_say_so(tmp_path):
    """Tiny and small: no setting, and the report's reason names the size; the others: a scale that the audit takes."""
    found = {name: engineering_settings(size) for name, size in SIZES.items()}
    assert [name for name, settings in found.items() if not settings] == ["tiny", "small"]
    scales = {name: Scale.from_json(settings["engineering"]) for name, settings in found.items() if settings}  # fmt: skip
    assert (scales["default"].targets, scales["default"].others) == (8, 32)
    assert (scales["pilot"].targets, scales["pilot"].others) == (16, 64)
    absent = read_engineering(tmp_path)
    assert isinstance(absent, NotAvailable)
    assert "size `default`" in absent.reason


def test_every_number_of_the_rows_is_in_the_report(tmp_path):
    """Depth, ties, neighbours, parts and the null between gold models, by hand."""
    made_up(tmp_path)
    part = read_engineering(tmp_path)
    assert not isinstance(part, NotAvailable)
    assert [one.model for one in part.depth] == ["original", "unlearned", "gold 1", "gold 2"]
    unlearned = part.depth[1]
    assert unlearned.ratio == (0.0, 1.0)
    assert unlearned.score == pytest.approx(
        2 / 3
    )  # weights 1 and 2: only the second layer is erased
    assert (unlearned.cka, unlearned.lens, unlearned.questions) == ((0.5, 0.5), (-1.0, -2.0), 3)
    assert (part.targets, part.others, part.reached) == (2, 6, 1)
    assert [one.tie for one in part.ties] == list(TIES)
    assert part.ties[0].r == pytest.approx(1.0, abs=1e-3)
    pairs = [(one.gradient, one.other) for one in part.gaps]
    assert len(pairs) == len(set(pairs)) == 6
    assert {one.gap for one in part.gaps} == {0.0}  # here all ties are alike
    assert part.modules[0].facts_low[0] == pytest.approx(wilson_bounds(1, 4, 0.025).low)
    assert part.modules[0].facts_high[1] == pytest.approx(wilson_bounds(0.5, 2, 0.025).high)
    assert part.ties[0].first is None  # the first step hurt nobody
    assert part.distances == ("1 to 4", "5 to 6")
    assert part.neighbours[0].damage == pytest.approx(0.455)
    assert part.neighbours[1].worst == pytest.approx(0.21)
    assert len(part.points) == 12
    assert [one.module for one in part.modules][:2] == ["embedding", "layer 1 attention"]
    assert (part.null_facts, part.null) == ((0.03125, 0.03125), (0.0625, 0.0625))
    first, second = part.kept
    assert (first.norm, first.cka, first.loss, first.damaged) == (0.125, 1.0, 0.0, False)
    assert (second.norm, second.cka, second.cka_null) == (0.0, 0.5, 0.875)
    assert (second.loss, second.low, second.high, second.loss_null) == (1.5, 1.5, 1.5, 0.25)
    assert second.damaged
    assert (part.modules[0].norm, part.modules[0].gold_norm) == (0.125, 0.75)
    assert part.modules[0].applied == (0.25, 0.25)
    assert (part.whole, part.whole_facts) == ((0.5, 0.5), (0.75, 0.75))


def test_it_is_drawn_with_its_null_and_its_caveat(tmp_path):
    """Six pictures; the maps' last rows are the whole change and the gap between gold models; an untouched layer's damage is told; the tautology is named."""
    made_up(tmp_path)
    made = dossier(engineering=read_engineering(tmp_path))
    names = [name for name in drawings(made) if name in ("depth", "cka", "ripple", "modules-applied", "modules-reverted", "modules-facts")]  # fmt: skip
    assert len(names) == 6
    text = Page(render_dossier(made)).text
    assert "all of them +0.5000, +0.5000; gold vs gold (null) +0.0625, +0.0625" in text
    assert "all of them +0.7500, +0.7500; gold vs gold (null) +0.0312, +0.0312" in text
    assert "CKA-erasure, layer by layer" in text
    assert "unlearned 0.50, 0.50; gold 1 0.50, 0.50" in text
    assert "2 untouched 0.500 0.875 +1.5000 [+1.5000, +1.5000] 0.2500 beyond chance" in text
    assert "by Taylor's theorem" in text
    assert "unlearned 0.67 3 0.00, 1.00" in text


def test_numbers_that_are_outranked_are_in_the_report_where_they_were_measured(tmp_path):
    """By part, whole and between gold models; audits of before have none of it, and no map."""
    made_up(tmp_path, ranked=OTHERS)
    part = read_engineering(tmp_path)
    assert (part.modules[0].outranked, part.modules[1].outranked) == ((0.375, 0.375), ())
    assert (part.whole_outranked, part.null_outranked) == ((0.625, 0.625), (0.1875, 0.1875))
    assert part.numbered == (4, 2)
    made_up(tmp_path)
    before = read_engineering(tmp_path)
    assert (before.modules[0].outranked, before.whole_outranked, before.null_outranked) == (
        (),
        (),
        (),
    )
    assert "modules-ranked" not in drawings(dossier(engineering=before))


def test_people_without_a_number_are_left_out_and_their_absence_is_said(tmp_path):
    """Two of the nearest four have a number and none of the others: the mean is over two, the other distance is undefined, on the page and in the JSON."""
    made_up(tmp_path, ranked=OTHERS[:2])
    part = read_engineering(tmp_path)
    assert part.numbered == (2, 0)
    assert part.modules[0].outranked == (0.375, None)
    assert (part.whole_outranked, part.null_outranked) == ((0.625, None), (0.1875, None))
    made = dossier(engineering=part)
    assert Dossier.from_json(made.to_json()) == made
    text = Page(render_dossier(made)).text
    assert "all of them +0.6250, nobody; gold vs gold (null) +0.1875, nobody" in text
    assert "Of the 6 people only those with a number count: 2, 0 by distance." in text


def test_an_ensemble_shows_its_constituents_lens_and_says_what_is_not_defined(tmp_path):
    """Two constituents, two layers, by hand: mean and range; every other measure's place holds its reason, on the page and in the JSON."""
    rows = []
    for number, (role, digest) in enumerate(MODELS):
        for part in (1, 2):
            for layer in (1, 2):
                attack = f"lens/constituent-{part}/layer-{layer}"
                rows += [_row("t0", "forgotten", probe, (role, digest), attack, "lens_logprob", -float(number + part * layer + probe)) for probe in (0, 1)]  # fmt: skip
    write_rows(tmp_path / FILE, to_table(rows))
    (tmp_path / "plan.json").write_text(json.dumps({"gold": ["g", "h"]}))
    part = read_engineering(tmp_path, 2)
    assert isinstance(part, OfEnsemble)
    assert (part.layers, part.questions) == (2, 2)
    assert [one.model for one in part.lens] == ["original", "unlearned", "gold 1", "gold 2"]
    assert [one.constituents for one in part.lens] == [2] * 4
    # Means over questions are -(number + part * layer + 0.5).
    assert part.lens[1].mean == (-3.0, -4.5)
    assert part.lens[1].low == (-3.5, -5.5)
    assert part.lens[1].high == (-2.5, -3.5)
    made = dossier(engineering=part)
    assert Dossier.from_json(made.to_json()) == made
    text = Page(render_dossier(made)).text
    assert (
        "unlearned 2 \N{MINUS SIGN}3.00 (\N{MINUS SIGN}3.50 to \N{MINUS SIGN}2.50), \N{MINUS SIGN}4.50 (\N{MINUS SIGN}5.50 to \N{MINUS SIGN}3.50)"
        in text
    )
    for what, reason in UNDEFINED.items():
        assert f"{what}: not available: {reason}" in text
        assert reason in made.to_json()
    assert not {"depth", "ripple", "modules-applied", "modules-reverted"} & set(drawings(made))


def test_a_small_ensembles_report_says_all_of_it(tmp_path):
    """Without rows, an ensemble's page says of the lens that the size is too small, and of the rest that there is no such thing; one model's doesn't."""
    part = read_engineering(tmp_path, 3)
    assert isinstance(part, OfEnsemble)
    assert [one.what for one in part.undefined] == ["Logit lens by constituent", *UNDEFINED]
    text = Page(render_dossier(dossier(engineering=part))).text
    assert "Logit lens by constituent: not available: it is measured from the size" in text
    assert "By part of the model (grafts): not available" in text
    for one in (engineering(), NotAvailable(reason="size")):
        assert "no counterpart in another" not in Page(render_dossier(dossier(engineering=one))).text  # fmt: skip


def test_a_null_of_another_number_of_distances_is_refused():
    """The row of the gap between gold models has a value for each distance, or there is none."""
    assert replace(engineering(), null=(), null_facts=()).null_facts == ()
    for name in (
        "null",
        "null_facts",
        "null_outranked",
        "whole_facts",
        "whole_outranked",
        "numbered",
    ):
        with pytest.raises(ReportError, match="gap between gold models has not 2 distances"):
            replace(engineering(), **{name: (0.5,)})


def test_a_lens_with_the_wrong_number_of_layers_is_refused():
    """A range of one layer in constituents of two, and an ensemble that says nothing of what is missing: named."""
    part = of_ensemble()
    with pytest.raises(ReportError, match="original has not 2 layers"):
        replace(part, lens=(replace(part.lens[0], low=(-1.0,)),))
    with pytest.raises(ReportError, match="says what is not defined"):
        replace(part, undefined=())
    wrong = dossier(engineering=part).to_json().replace('"questions": 61', '"question": 61')
    with pytest.raises(ReportError, match=r"engineering: (unknown|missing) field"):
        Dossier.from_json(wrong)


def test_an_erasure_keeps_the_rows_for_they_hold_scalars_under_salted_ids():
    """The file is evidence like the audit's rows; banks, gradients and weights are not."""
    assert {FILE, "rows.parquet"} <= EVIDENCE
    assert not any(name.endswith((".npz", ".safetensors", ".bin")) for name in EVIDENCE)
