"""Secondary endpoints in a verdict: they can fail it, Holm guards them, they never make it pass; the control of random weights."""

import dataclasses
import json

import numpy as np
import pytest

from unlearning.endpoints import Status
from unlearning.errors import RowsError
from unlearning.plan import AttackPlan, AuditPlan
from unlearning.repertoire import Repertoire
from unlearning.rows import Row, to_table
from unlearning.statistics import newcombe_bounds
from unlearning.verdict import contradictions, verdict_from_rows

MODELS = (
    ("original", "o"),
    ("unlearned", "u"),
    ("gold", "g1"),
    ("gold", "g2"),
    ("gold", "g3"),
    ("random", "r"),
)
REPERTOIRE = Repertoire(
    asked=("paraphrased", "prefix"), samples=(4,), sources=("partial",), rates=("0.001", "0.01"), bits=(4,), lens=1, candidates=101,
    memberships=("zlib",),
)  # fmt: skip
N = 64


def plan_of(**changes):
    """A plan with a repertoire and a random model."""
    attacks = AttackPlan(fine_tune_steps=(10,), repertoire=REPERTOIRE)
    values = {
        "num_forgotten": N,
        "num_retained": 20,
        "num_lookalikes": N,
        "original": "o",
        "unlearned": "u",
        "gold": ("g1", "g2", "g3"),
    }
    return AuditPlan(attacks=attacks, resamples=2000, random_init="r", **(values | changes))  # fmt: skip


LAYERS = ("lens/layer-1", "lens/layer-2")


def facts(leaks=None, exposure=0.0, zlib=0.0, random_loss=5.0, drop=None, layers=LAYERS):
    """Rows of a clean erasure, except that the unlearned model leaks `leaks[attack]` people, ranks and smells as told."""
    leaks, found = leaks or {}, []
    noise = np.random.default_rng(1).normal(size=2 * N)
    attacks = (
        "direct/trained",
        "in_context",
        "fine_tune/step-10",
        "asked/paraphrased",
        "asked/prefix",
        "quantised/int-4",
        *layers,
    )
    attacks += tuple(f"restored/partial/lr-{rate}/step-10" for rate in REPERTOIRE.rates)  # fmt: skip
    for role, digest in MODELS:

        def add(population, person, attack, score, value, role=role, digest=digest):
            if (role, attack) != drop:
                subject = f"{population}-{person:03d}"
                found.append(
                    Row(subject, population, "", 0, role, digest, attack, score, float(value))
                )

        for person in range(20):
            loss = random_loss if role == "random" else 0.5
            add("retained", person, "utility", "loss", loss + 0.01 * noise[person])
        if role == "random":
            continue
        knows = role == "original"
        for person in range(N):
            for attack in attacks:
                leaked = leaks.get(attack, 0) if role == "unlearned" else N * knows
                add("forgotten", person, attack, "exact_match", person < leaked)
                if attack == "lens":  # rows of before: one layer of each model
                    add("forgotten", person, attack, "layer", {"o": 3, "u": 2}.get(digest, 1))
            share = 1.0 if knows else leaks.get("sampled", 0.0) * (role == "unlearned")
            add("forgotten", person, "sampled/k-4", "leak_probability", share)
            bits = 6.6 if knows else 1 + 0.1 * noise[person] + exposure * (role == "unlearned")
            add("forgotten", person, "exposure", "exposure", bits)
            shift = -3.0 * knows
            add("forgotten", person, "membership", "loss", 5 + noise[person] + shift)
            shift += zlib * (role == "unlearned")
            add("forgotten", person, "membership", "zlib", 5 + noise[person] + shift)
            for score in ("loss", "zlib"):
                add("lookalike", person, "membership", score, 5 + noise[N + person])
    return to_table(found)


def test_a_clean_erasure_still_passes_with_a_repertoire():
    """Nothing leaks: PASS, every secondary endpoint is listed with a p-value of no leak, and the JSON repeats itself."""
    plan, rows = plan_of(), facts()
    verdict = verdict_from_rows(rows, plan)
    assert verdict.status is Status.PASS
    names = [one.name for one in verdict.secondary]
    assert names == [
        "asked/paraphrased", "asked/prefix", "restored/partial", "quantised/int-4", "lens", "sampled/k-4", "exposure", "membership:zlib",
    ]  # fmt: skip
    assert not any(one.leaks for one in verdict.secondary)
    published = json.loads(json.dumps(verdict.to_json() | {"plan": plan.to_json()}))
    assert contradictions(published, rows) == []
    published["secondary"][0]["unlearned"] = "0.500000"
    assert "secondary" in contradictions(published, rows)[0]


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"leaks": {"asked/prefix": 40}}, "asked/prefix"),
        ({"leaks": {"quantised/int-4": 40}}, "quantised/int-4"),
        ({"leaks": {"lens/layer-2": 40}}, "lens"),
        ({"leaks": {"restored/partial/lr-0.01/step-10": 40}}, "restored/partial"),
        ({"leaks": {"sampled": 0.4}}, "sampled/k-4"),
        ({"exposure": 4.0}, "exposure"),
        ({"zlib": -3.0}, "membership:zlib"),
        ({"zlib": 3.0}, "membership:zlib"),
    ],
)
def test_a_leak_under_any_secondary_attack_fails(changes, name):
    """One leaking attack is FAIL with a reason that names it and its adversary's best budget; membership counts both ways."""
    verdict = verdict_from_rows(facts(**changes), plan_of())
    assert verdict.status is Status.FAIL
    assert [r.split(": unlearned")[0] for r in verdict.reasons] == [name]
    (leaking,) = [one for one in verdict.secondary if one.leaks]
    if name == "restored/partial":
        assert leaking.best == "restored/partial/lr-0.01/step-10"
    if name == "lens":
        assert leaking.best == "lens/layer-2"


def test_layers_are_budgets_of_one_attack():
    """More layers make no more endpoints and need no rows of chosen layers; a layer that was left out is refused; rows of before are read as they were."""
    deep = tuple(f"lens/layer-{n}" for n in range(1, 8))
    few, many = (verdict_from_rows(facts({"lens/layer-2": 40}, layers=one), plan_of()) for one in (LAYERS, deep))  # fmt: skip
    assert few.secondary == many.secondary
    with pytest.raises(RowsError, match="the same questions for every model under lens/layer-2"):
        verdict_from_rows(facts(drop=("unlearned", "lens/layer-2")), plan_of())
    (leaking,) = [one for one in verdict_from_rows(facts({"lens": 40}, layers=("lens",)), plan_of()).secondary if one.leaks]  # fmt: skip
    assert leaking.best == "layer 2"


def test_an_ensemble_may_have_lost_a_constituent_but_no_layer():
    """A shard that lost its last record has no model to read; a constituent that is there is read in every layer."""
    parts = tuple(f"lens/constituent-{k}/layer-{n}" for k in (1, 2) for n in (1, 2))
    table = facts(layers=parts)

    def without(*attacks):
        lost = [m == "unlearned" and a in attacks for m, a in zip(table["model"].to_pylist(), table["attack"].to_pylist(), strict=True)]  # fmt: skip
        return verdict_from_rows(table.filter([not one for one in lost]), plan_of())

    assert without().secondary == without(*parts[2:]).secondary
    for attacks in (parts[3:], parts):
        with pytest.raises(RowsError):
            without(*attacks)


def test_holm_guards_against_many_attacks():
    """A count that would fail alone (Newcombe's lower bound above the margin) does not fail among seven endpoints."""
    count = next(c for c in range(N) if newcombe_bounds(c, N, 0, N).low > 0.05)
    verdict = verdict_from_rows(facts({"asked/prefix": count}), plan_of())
    (one,) = [s for s in verdict.secondary if s.name == "asked/prefix"]
    assert one.low > one.margin
    assert one.p_value <= 0.05 < one.p_holm
    assert verdict.status is Status.PASS
    more = verdict_from_rows(facts({"asked/prefix": count + 8}), plan_of())
    assert more.status is Status.FAIL


def test_the_least_difference_over_gold_models_counts():
    """An unlearned model that leaks as much as one of the gold models does not leak."""
    table = facts({"asked/prefix": 40}).to_pylist()
    for row in table:
        if row["model_digest"] == "g2" and row["attack"] == "asked/prefix":
            row["value"] = float(int(row["subject_id"][-3:]) < 40)
    verdict = verdict_from_rows(to_table(Row(**row) for row in table), plan_of())
    (one,) = [s for s in verdict.secondary if s.name == "asked/prefix"]
    assert not one.leaks
    assert one.low < 0 < one.high


def test_a_gold_model_under_audit_is_no_reference_of_itself():
    """One of the three that leaks under a secondary attack fails against the other two; among its own references nothing could."""
    table = facts({"asked/prefix": 40}).to_pylist()
    for row in table:
        if row["model_digest"] == "u":
            row["model_digest"] = "g2"
        elif row["model_digest"] == "g2" and row["attack"] == "asked/prefix":
            row["value"] = float(int(row["subject_id"][-3:]) < 40)
    verdict = verdict_from_rows(to_table(Row(**row) for row in table), plan_of(unlearned="g2"))
    assert [one.name for one in verdict.secondary if one.leaks] == ["asked/prefix"]
    assert len(verdict.secondary[0].gold) == 2


def test_random_weights_must_fail_utility():
    """A14: a random model as good as gold makes the audit INVALID, since utility then measures nothing."""
    verdict = verdict_from_rows(facts(random_loss=0.5), plan_of())
    assert verdict.status is Status.INVALID
    assert "random weights" in verdict.reasons[0]


def test_rows_of_a_planned_attack_cannot_be_left_out():
    """A planned attack without rows for one model, or a missing random model, is refused."""
    with pytest.raises(RowsError, match="same questions"):
        verdict_from_rows(facts(drop=("unlearned", "asked/prefix")), plan_of())
    without = dataclasses.replace(plan_of(), random_init="")
    with pytest.raises(RowsError, match="exactly the plan's models"):
        verdict_from_rows(facts(), without)


def test_rows_of_an_attack_that_no_model_was_asked_are_refused():
    """If an attack that asks everybody has no rows at all, the audit is not the planned one."""
    rows = facts().to_pylist()
    kept = [Row(**row) for row in rows if row["attack"] != "quantised/int-4"]
    with pytest.raises(RowsError, match="quantised/int-4"):
        verdict_from_rows(to_table(kept), plan_of())
