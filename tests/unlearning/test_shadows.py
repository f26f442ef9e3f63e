"""The per-record test by shadow models: closed forms on made-up scores, leaving the target out, and models that hold what their coins say."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm

from unlearning.pilot.models import prepare
from unlearning.pilot.profiles import SHADOWS
from unlearning.pilot.shadows import Shadows, evidence, told

RNG = np.random.default_rng


def chances(generator, in_TN, gap, spread=0.5, apart=3.0):
    """Scores whose logit is a canary's own level, plus `gap` where it was in, plus noise."""
    level_N = RNG(7).normal(0, apart, in_TN.shape[1])
    logit_TN = level_N + gap * in_TN + generator.normal(0, spread, in_TN.shape)
    return 1 / (1 + np.exp(-logit_TN))


def coins(generator, *shape):
    """Fair coins."""
    return generator.random(shape) < 0.5


def test_the_per_record_test_reaches_its_closed_form_where_a_threshold_cannot():
    """Two normals a gap apart: AUC is Phi(gap / spread / sqrt 2); one threshold also pays for the levels of the canaries."""
    generator = RNG(0)
    in_JN, in_TN = coins(generator, 200, 30), coins(generator, 60, 30)
    shadow_JN, target_TN = chances(generator, in_JN, 1.0), chances(generator, in_TN, 1.0)
    found = told(evidence(target_TN, shadow_JN, in_JN, own=False), in_TN, RNG(1), 100)
    crowd = told(target_TN, in_TN, RNG(1), 100)
    assert found.auc == pytest.approx(norm.cdf(1.0 / 0.5 / math.sqrt(2)), abs=0.02)
    assert crowd.auc == pytest.approx(norm.cdf(1.0 / math.sqrt(2 * (3.0**2 + 0.5**2))), abs=0.06)
    assert found.low <= found.auc <= found.high
    assert found.rates[0] <= found.rates[1]
    assert found.rate_lows[1] > crowd.rates[1]
    assert np.quantile(found.drawn_B - crowd.drawn_B, 0.025) > 0


def test_it_sees_records_that_were_pushed_too_far():
    """Where forgetting leaves them less likely than never seen, evidence is still for "in"; a threshold upwards is wrong."""
    generator = RNG(2)
    in_JN = coins(generator, 30, 20)
    score_JN = chances(generator, in_JN, -2.0, apart=0.1)
    assert told(evidence(score_JN, score_JN, in_JN, own=True), in_JN, RNG(0), 100).auc > 0.95
    assert told(score_JN, in_JN, RNG(0), 100).auc < 0.05


def test_a_target_is_no_shadow_of_itself():
    """Nothing to find: leaving the target out gives no more than chance, keeping it in would invent a leak."""
    generator = RNG(3)
    in_JN = coins(generator, 16, 60)
    score_JN = chances(generator, in_JN, 0.0)
    honest = told(evidence(score_JN, score_JN, in_JN, own=True), in_JN, RNG(0), 200)
    assert honest.auc < 0.55
    wrong = told(evidence(score_JN, score_JN, in_JN, own=False), in_JN, RNG(0), 200)
    assert wrong.low > 0.55


def test_a_canary_without_two_shadows_of_a_kind_says_nothing():
    """It has no evidence, and the others are judged without it."""
    in_JN = np.array([[True, True], [True, False], [True, True], [False, False], [True, False]])
    found = evidence(np.full((1, 2), 0.5), RNG(4).random((5, 2)), in_JN, own=False)
    assert np.isnan(found[0, 0])
    assert np.isfinite(found[0, 1])


def test_models_hold_what_their_coins_say(tmp_path):
    """An original leaves out the canaries whose coin is tails; NPO pushes the others and keeps both steps; gold holds none."""
    profile = dataclasses.replace(
        SHADOWS, steps=4, counts={"retained": 24, "forgotten": 8, "lookalike": 2}
    )
    shadows = Shadows(prepare(tmp_path, profile), bytes(range(32)), 2, (1, 2))
    in_JN, place = shadows.in_JN(), {one: n for n, one in enumerate(shadows.canaries)}
    assert in_JN.any(1).all()
    assert not in_JN.all(1).any()
    ids = {r.record_id: place[r.subject] for r in shadows.study.people["forgotten"]}

    def left_out(name):
        return {ids[line] for line in (tmp_path / f"{name}.txt").read_text().split()}

    folder = shadows.original(1)
    assert left_out("original-1") == set(np.flatnonzero(~in_JN[1]).tolist())
    first, last = shadows.npo(1)
    assert left_out("npo-1") == set(range(8))
    shadows.gold(0)
    assert left_out("gold-0") == set(range(8))
    p = [shadows.scores(one)[0] for one in (folder, first, last)]
    assert all(one.shape == (8,) and ((one > 0) & (one < 1)).all() for one in p)
    assert np.log(p[0] / p[2])[in_JN[1]].mean() > np.log(p[0] / p[1])[in_JN[1]].mean() > 0
