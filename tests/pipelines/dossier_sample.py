"""A full dossier with every number different; used by the tests of the audit report."""

from dataclasses import replace
from typing import Any

from pipelines.reports.dossier import (
    Asked,
    Copy,
    Curve,
    Dossier,
    Evidence,
    Fact,
    Forgetting,
    Leakage,
    Likeness,
    Metric,
    Model,
    OneRun,
    PersonRow,
    Question,
    Recovered,
    Review,
    Scope,
    Spent,
    Spread,
)
from pipelines.reports.engineering import (
    DepthCurve,
    Engineering,
    KeptRow,
    LensRange,
    ModuleRow,
    Neighbour,
    OfEnsemble,
    RipplePoint,
    TieGap,
    TieRow,
    Undefined,
)
from pipelines.reports.parts import NotAvailable
from tests.pipelines.report_sample import audit, digest


def engineering() -> Engineering:
    """Two layers, two distances, three gold models' null."""
    return Engineering(
        layers=2,
        depth=(
            DepthCurve(model="original", score=0.0, questions=61, ratio=(0.0, 0.0), cka=(0.0, 0.0), lens=(-3.21, -0.11)),
            DepthCurve(model="unlearned", score=0.47, questions=61, ratio=(0.23, 0.91), cka=(0.31, 0.77), lens=(-3.43, -5.55)),
            DepthCurve(model="gold 1", score=1.0, questions=61, ratio=(1.0, 1.0), cka=(1.0, None), lens=(-3.65, -6.78)),
        ),
        targets=7, others=19, reached=6,
        ties=(
            TieRow(tie="gradient_cosine", r=0.43, low=0.21, high=0.62, within=0.37, first=0.89),
            TieRow(tie="semantic", r=None, low=-1.0, high=1.0, within=None, first=None),
        ),
        gaps=(
            TieGap(gradient="gradient_cosine", other="representation_cosine", gap=0.31, low=0.12, high=0.48),
            TieGap(gradient="gradient_cosine", other="semantic", gap=None, low=-1.0, high=1.0),
        ),
        neighbours=(
            Neighbour(rank="1 to 4", pairs=28, damage=0.0912, low=0.0511, high=0.1333, worst=0.4121),
            Neighbour(rank="5 to 19", pairs=105, damage=0.0123, low=-0.0045, high=0.0288, worst=0.2221),
        ),
        points=tuple(RipplePoint(tie=0.1 * number, damage=0.02 * number) for number in range(9)),
        distances=("1 to 4", "5 to 19"),
        modules=(
            ModuleRow(module="layer 1 attention", norm=0.0312, gold_norm=0.8123, applied=(0.0511, 0.0122), reverted=(0.0433, 0.0111), facts=(0.0313, 0.0), facts_low=(0.0011, 0.0), facts_high=(0.4712, 0.2042), outranked=(0.0313, 0.0119)),
            ModuleRow(module="head", norm=0.0777, gold_norm=0.7321, applied=(0.1511, 0.0322), reverted=(0.1233, 0.0311), facts=(0.125, 0.0625), facts_low=(0.0127, 0.0122), facts_high=(0.6117, 0.2637), outranked=(0.2188, 0.0714)),
        ),
        whole=(0.2022, 0.0444), whole_facts=(0.1875, 0.0526), whole_outranked=(0.3438, 0.0952), numbered=(4, 13), null=(0.0066, 0.0055), null_facts=(0.0157, 0.0079), null_outranked=(0.0469, 0.0238),
        kept=(
            KeptRow(layer=1, norm=0.0312, cka=0.913, cka_null=0.877, loss=0.0321, low=-0.0111, high=0.0713, loss_null=0.0523, damaged=False),
            KeptRow(layer=2, norm=0.0, cka=0.617, cka_null=0.843, loss=0.4213, low=0.3127, high=0.5291, loss_null=0.0618, damaged=True),
        ),
        caveat="for a small step a high r of gradients is a tautology",
    )  # fmt: skip


def of_ensemble() -> OfEnsemble:
    """Two layers of three constituents, in place of the above."""
    return OfEnsemble(
        layers=2, questions=61,
        lens=(
            LensRange(model="original", constituents=3, mean=(-3.21, -1.11), low=(-3.52, -2.13), high=(-2.94, -0.17)),
            LensRange(model="gold 1", constituents=3, mean=(-3.65, -6.78), low=(-3.91, -7.07), high=(-3.33, -6.42)),
        ),
        undefined=(Undefined(what="CKA-erasure", why=NotAvailable(reason="there is no one representation")),),
    )  # fmt: skip


def evidence(**changes: Any) -> Evidence:
    """Part 2 of the sample."""
    curve = {"source": "retained records, planned rate", "steps": (10, 25), "people": 64}
    quantiles = tuple(number / 7 for number in range(21))
    made = Evidence(
        run="attack-0123456789ab", audit_digest=digest(20), rows_digest=digest(21), num_rows=9876, ledger_entry=31, alpha=0.05,
        plan=(Fact(name="attacks.fine_tune_lr", value="0.0001"), Fact(name="margin", value="0.05")),
        metrics=(
            Metric(name="direct", subgroup="", unit="share of people", ideal="0, at least as low as gold's", people=64, original=1.0, unlearned=0.0, gold=(0.0, 0.0156), low=-0.0411, high=0.0406, margin=0.05, verdict="PASS", has_power=True),
            Metric(name="sampled/k-64", subgroup="", unit="mean chance of the secret", ideal="0", people=64, original=1.0, unlearned=0.541, gold=(0.0,), low=0.432, high=0.662, margin=0.05, verdict="leaks", p_value=0.0005, p_holm=0.0021, best="64 samples", has_power=True),
            Metric(name="asked/inverted", subgroup="", unit="share of people", ideal="0", people=64, original=0.0312, unlearned=0.0, gold=(0.0,), low=-0.0412, high=0.0413, margin=0.05, verdict="no leak shown", p_value=1.0, p_holm=1.0, best="asked/inverted", has_power=False),
        ),
        curves=tuple(
            Curve(model=model, rates=rates, lows=tuple(0.9 * rate for rate in rates), highs=tuple(0.1 + 0.9 * rate for rate in rates), **curve)
            for model, rates in (("original", (1.0, 0.97)), ("unlearned", (0.13, 0.33)), ("gold 1", (0.0, 0.0)))
        ),
        spreads=tuple(
            Spread(score="extraction strength, best question", unit="share of the secret that comes by itself; lower is better", model=model, people=64, quantiles=tuple(top * one / 3 for one in quantiles))
            for model, top in (("original", 1.0), ("unlearned", 0.3), ("gold 1", 0.2), ("gold 2", 0.1))
        ) + tuple(
            Spread(score="loss on the person's records", unit="nats per token; nearer to gold is better", model=model, people=64, quantiles=tuple(shift + one for one in quantiles))
            for model, shift in (("original", 0.0), ("unlearned", 1.0), ("gold 1", 0.8), ("gold 2", 0.9))
        ),
        leakage=(
            Leakage(subgroup="", people=64, given_away=0.0156, low=0.0028, high=0.0833, excess_mean=0.123, excess_95=0.987, excess_worst=2.345),
            Leakage(subgroup="rare", people=5, given_away=0.2, low=0.0362, high=0.6245, excess_mean=0.444, excess_95=1.111, excess_worst=1.234),
        ),
        questions=(Question(attack="direct/trained", question=2, people=64, original=0.98, unlearned=0.0, gold=(0.0,), low=0.0, high=0.0566),),
        likeness=(Likeness(score="direct: secret_logprob", people=64, d=0.451, p_value=0.0003, cliff=0.512, band=0.141, margin=0.031, low=0.221, high=0.287, equivalent=False),),
        one_run=(OneRun(model="original", epsilon=3.36), OneRun(model="unlearned", epsilon=1.98)),
        people=tuple(PersonRow(person=digest(40 + number)[:32], subgroup="", original=3, unlearned=int(number == 0), gold=0, excess=2.345 - number / 100, forgetting=0.13 + number / 50 if number else None) for number in range(64)),
        deviations=(), unchecked=(), noted=("33 of the 320 records stand in no window",), seconds=(Spent(name="original: direct", wall_s=12.3, cpu_s=11.7),),
        forgetting=Forgetting(people=64, usable=63, median=0.87, low_5=0.21, high_95=1.34),
        recovery=(
            Recovered(tier=3, source="restored/partial", score="exact_match", people=48, original=0.958, unlearned=0.625, gold=0.042, recovery=0.636, low=0.512, high=0.757),
            Recovered(tier=2, source="in_context", score="exact_match", people=64, original=0.031, unlearned=0.0, gold=0.0, recovery=None, low=None, high=None),
        ),
    )  # fmt: skip
    return replace(made, **changes)


def dossier(**changes: Any) -> Dossier:
    """A full dossier; FAIL like `report_sample.audit`."""
    made = Dossier(
        demo=True, profile="pilot", batch="0123456789ab",
        requests=(
            Asked(reference="a1b2c3d4e5f60718", by="9f8e7d6c5b4a3928", state="audited", received="2026-11-03", deadline="2026-12-03", closed="", basis="Art. 17(1)(b) GDPR: consent withdrawn"),
            Asked(reference="0011223344556677", by="", state="shredded", received="2026-11-04", deadline="", closed="2026-11-30T10:11:12Z", basis=""),
        ),
        scope=Scope(
            people=64, records=320, attributes="numbers of four digits or more", version_before=digest(22), root_before=digest(23), version_after=digest(24),
            root_after=digest(25), included=320, absent=318, kept_by_others=2,
        ),
        kind="approximate", audit=audit(),
        models=(
            Model(role="original", root=digest(26), run="train-1", seed="1789", steps=1000, tokens_per_s=18211.4, peak_rss_bytes=700 * 2**20),
            Model(role="gold", root=digest(27), run="gold-1", seed="1790"),
            Model(role="random", root=digest(28), run="", seed="1791"),
        ),
        release="when the requests are finished, the model that was retrained without the records takes the original's place; until then it stays",
        copies=(
            Copy(what="token shards", state="kept until the requests are finished"), Copy(what="tables", state="kept until the requests are finished"),
            Copy(what="backups outside of the home", state="out of reach"),
        ),
        evidence=evidence(), engineering=engineering(), versions=(Fact(name="torch", value="2.13.0"),),
        reviews=(Review(by="Ada Example", at="2026-12-01T09:08:07Z", report=digest(30), audit=digest(20), nonce=digest(31), entry=33),),
    )  # fmt: skip
    return replace(made, **changes)


def as_fourth(plain: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a report as format 4 wrote it."""
    for name in ("whole_facts", "whole_outranked", "null_outranked", "numbered"):
        plain["engineering"].pop(name, None)
    for one in plain["engineering"].get("modules", []):
        del one["outranked"]
    return plain | {"format": 4}


def as_third(plain: dict[str, Any]) -> dict[str, Any]:
    """The JSON of a report as format 3 wrote it."""
    plain = as_fourth(plain)
    del plain["evidence"]["noted"]
    for name in ("kept", "null_facts"):
        plain["engineering"].pop(name, None)  # not measured in the smallest audits
    return plain | {"format": 3}
