"""A full report with every number different, and a reader of pages; used by the tests of the report."""

import hashlib
import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from pipelines.reports import (
    Audit,
    Control,
    Corpus,
    Coverage,
    CurvePoint,
    EntropySpread,
    Estimate,
    EvaluationPlan,
    FairRow,
    GroupValue,
    HeatCell,
    Influence,
    Intake,
    Judged,
    LossCurve,
    Membership,
    Memory,
    MemoryRow,
    MethodScore,
    Narrowing,
    NotAvailable,
    OwnerRow,
    OwnerWorth,
    PriceRow,
    Pricing,
    Provenance,
    Rate,
    Reason,
    ReceiptCheck,
    RecordInfluence,
    ReportData,
    Request,
    RunRef,
    Seed,
    SideAttack,
    Strip,
    TierRow,
    Utility,
    Valuation,
    Verdict,
    Version,
    Worth,
    ZeroBound,
)


def digest(number: int) -> str:
    return hashlib.sha256(bytes([number])).hexdigest()


def audit(**changes: Any) -> Audit:
    rate = {"original": Rate(hits=64, n=64), "gold": Rate(hits=0, n=64), "margin": 0.05}
    made = Audit(
        method="NPO with a retain term",
        num_people=64,
        num_gold_seeds=3,
        plan_digest=digest(5),
        tiers=(
            TierRow(
                tier="1",
                name="direct question",
                unlearned=Rate(hits=0, n=64),
                bound=0.0406,
                verdict="PASS",
                reason="within the margin",
                budget="questions only",
                has_power=True,
                **rate,
            ),
            TierRow(
                tier="3",
                name="fine-tuning",
                unlearned=Rate(hits=21, n=64),
                bound=0.4402,
                low=0.2212,
                verdict="FAIL",
                reason="the lower bound lies above the margin",
                budget="weights, 64 records, 100 steps",
                **rate,
            ),
        ),
        membership=Membership(
            original=Estimate(value=1.0, low=0.99, high=1.0),
            unlearned=Estimate(value=0.94, low=0.89, high=0.98),
            gold=Estimate(value=0.581, low=0.48, high=0.68),
            difference=Estimate(value=0.359, low=0.25, high=0.47),
            margin=0.15,
            verdict="FAIL",
            reason="0.359 from gold",
        ),
        utility=Utility(
            original=Estimate(value=3.204, se=0.011),
            unlearned=Estimate(value=3.298, se=0.012),
            gold=NotAvailable(reason="gold was not evaluated"),
            bound=None,
            margin=0.05,
            verdict="INCONCLUSIVE",
            reason="no gold loss",
        ),
        zero_bounds=(ZeroBound(what="direct question", n=64, bound=0.0457),),
        verdict="FAIL",
        reason="tier 3 and membership exceed their margins",
        controls=(Control(name="original leaks", holds=True, detail="expected 0.95, saw 1.00"),),
        side=(
            SideAttack(
                name="sampled/k-64",
                original=1.0,
                unlearned=0.541,
                gold=0.0,
                bound=0.662,
                margin=0.05,
                leaks=True,
                best="64 samples",
            ),
        ),
        not_tested=("Copies of the model that left the house.",),
        memory=Memory(
            memory="enough",
            statement="memorised enough to audit (asked directly, the original gives away 64 of 64 people)",
            rows=(
                MemoryRow(shown="never (people it never saw)", people=64, given_away=0, low=0.0, high=0.057, exposure=Estimate(value=1.31, n=64)),
                MemoryRow(shown="32 to 63 times", people=64, given_away=63, low=0.917, high=0.997, exposure=Estimate(value=5.97, n=64)),
                MemoryRow(shown="how often can't be told", people=1, given_away=1, low=0.207, high=1.0, exposure=NotAvailable(reason="nobody has a number")),
            ),
            chance_exposure=Estimate(value=1.37, n=64),
            hardest=62,
            ranked=64,
        ),
    )  # fmt: skip
    return replace(made, **changes)


def sample() -> ReportData:
    """A full report; every number in it is different, so that a mix-up shows."""
    steps = tuple(range(0, 2000, 2))
    return ReportData(
        title="Erasure 17",
        profile="pilot",
        demo=True,
        verdict=Verdict(verdict="FAIL", reason="the exact retrain takes its place"),
        requests=(
            Request(
                request="REQ-17",
                state="audited",
                num_people=64,
                num_records=320,
                received="2026-11-03",
                deadline="2026-12-03",
            ),
        ),
        corpus=Corpus(version=digest(1), size=12345, live=12025, num_owners=7),
        intake=Intake(
            received=14002,
            accepted=12346,
            held_out=1203,
            quarantined=309,
            duplicates=144,
            reasons=(Reason(reason="unknown licence", count=221),),
        ),
        owners=(
            OwnerRow(
                owner="washington",
                records=121,
                tokens=30211,
                bits_per_token=Estimate(value=8.6124, se=0.0131, low=8.5871, high=8.6377),
                bits_per_byte=Estimate(value=2.1531, se=0.0041),
            ),
            OwnerRow(owner="adams", records=9, tokens=801, bits_per_token=None, bits_per_byte=None),
        ),
        valuation=Valuation(
            method="Exact Shapley",
            target="target_value",
            num_coalitions=16,
            groups=(
                GroupValue(
                    group="early",
                    owners=("washington", "adams"),
                    value=Estimate(value=0.8124, se=0.0121, low=0.7887, high=0.8361, n=512),
                ),
                GroupValue(
                    group="registry",
                    owners=("registry",),
                    value=Estimate(value=-0.0312, se=0.0094, low=-0.0496, high=-0.0128, n=511),
                ),
            ),
            loss_without=Estimate(value=7.6246),
            loss_with=Estimate(value=7.6246 - 0.7812),
            plan_digest=digest(2),
            notes=("One order seed for all coalitions.",),
        ),
        influence=Influence(
            method="influence.ekfac",
            form="trapezoid",
            checkpoint_root=digest(10),
            num_records=613,
            num_queries=47,
            num_distinguishable=38,
            heat=tuple(
                HeatCell(owner=owner, target_owner=target, value=value)
                for owner, target, value in (("adams", "lincoln", -2.2e-5),)
            ),
            helpful=(
                RecordInfluence(
                    record=digest(11),
                    owner="adams",
                    value=Estimate(value=0.0731, se=0.0113, low=0.0504, high=0.0958, n=47),
                    distinguishable=True,
                ),
            ),
            harmful=(
                RecordInfluence(
                    record=digest(12),
                    owner="washington",
                    value=Estimate(value=-0.0162, se=0.0117, low=-0.0398, high=0.0074, n=47),
                    distinguishable=False,
                ),
            ),
            steps=(1, 2, 3),
            drops=(0.031, 0.027, -0.004),
            credits=(0.030, 0.011, 0.009),
            judged=Judged(
                verdict="PASS",
                words="the values foretell retraining, and better than BM25 does",
                subsets=20,
                scores=(
                    MethodScore(
                        method="influence.ekfac", score=Estimate(value=0.41, low=0.33, high=0.49)
                    ),
                    MethodScore(method="bm25", score=Estimate(value=0.19, low=0.1, high=0.28)),
                    MethodScore(
                        method="random",
                        score=Estimate(value=0.01, low=-0.14, high=0.15, level=0.999),
                    ),
                ),
                above_bm25=Estimate(value=0.22, low=0.12, high=0.31),
                whole=(
                    MethodScore(
                        method="influence.ekfac", score=Estimate(value=0.31, low=-0.1, high=0.63)
                    ),
                    MethodScore(method="bm25", score=Estimate(value=-0.12, low=-0.5, high=0.3)),
                    MethodScore(
                        method="inrun.trapezoid", score=Estimate(value=0.17, low=-0.29, high=0.55)
                    ),
                    MethodScore(
                        method="random",
                        score=Estimate(value=0.03, low=-0.62, high=0.66, level=0.999),
                    ),
                ),
                again=10,
                ceiling=Estimate(value=0.71, low=0.55, high=0.82),
                ceiling_whole=Estimate(value=0.68, low=0.21, high=0.9),
                records=512,
                distinct=17,
                top=Estimate(value=0.0123, low=0.0011, high=0.0235),
                curve=tuple(
                    CurvePoint(
                        removed=sign > 0,
                        percent=percent,
                        top=5.1 + sign * percent / 1000,
                        bottom=5.1 - sign * percent / 1000,
                        random=5.1,
                        top_gap=Estimate(value=sign * percent / 1000, low=-0.001, high=0.061),
                        bottom_gap=Estimate(value=-sign * percent / 1000, low=-0.07, high=0.002),
                    )
                    for sign in (1, -1)
                    for percent in (10, 50)
                ),
            ),
            notes=("Records are named by id.",),
        ),
        pricing=Pricing(
            currency="EUR",
            pool_microunits=10_000_000_001,
            rows=(
                PriceRow(subject="washington", price_microunits=412_345_678, value=0.0329),
                PriceRow(subject="adams", price_microunits=9_587_654_323),
            ),
            rule_digest=digest(3),
            rule="Shared by tokens without duplicates.",
        ),
        worth=Worth(
            currency="EUR",
            owners=(
                OwnerWorth(
                    owner="washington",
                    tokens=29871,
                    value=Estimate(value=0.7713, se=0.0141, low=0.7437, high=0.7989, n=513),
                    price_microunits=412_345_679,
                ),
                OwnerWorth(
                    owner="adams",
                    tokens=799,
                    value=Estimate(value=-0.0211, se=0.0052, low=-0.0313, high=-0.0109, n=514),
                    price_microunits=0,
                ),
            ),
            entropy=(
                EntropySpread(
                    owner="adams",
                    records=8,
                    low=5.123,
                    quarter=6.234,
                    median=7.345,
                    three_quarters=8.456,
                    high=9.567,
                ),
            ),
            coverage=(
                Coverage(size=0, trained=1, possible=1),
                Coverage(size=2, trained=5, possible=6),
            ),
            narrowing=Narrowing(
                calls=(4, 7, 16), mean_width=(0.25, 0.17, 0.083), worst_width=(0.31, 0.19, 0.094)
            ),
            strips=(Strip(record=digest(13), owner="adams", bits=(3.1, 12.7, 19.9)),),
            fairness=(
                FairRow(
                    by="era",
                    name="1750-1799",
                    records=122,
                    owners=2,
                    tokens=30119,
                    value=Estimate(value=0.7502, low=0.7001, high=0.8003),
                    value_rate=0.0249,
                    worst_value_rate=-0.0264,
                    worst_value_owner="adams",
                    price_rate=13_690_550.0,
                    worst_price_rate=0.0,
                    worst_price_owner="adams",
                ),
            ),
            notes=("A record is worth its share.",),
        ),
        training=(
            LossCurve(
                run="train-1",
                kind="train",
                steps=steps,
                losses=tuple(3 + 4 * math.exp(-step / 400) for step in steps),
                tokens_per_s=18211.4,
                peak_rss_bytes=700 * 2**20,
            ),
            LossCurve(run="gold-1", kind="gold", steps=(), losses=(), status="resume me"),
        ),
        evaluation=EvaluationPlan(
            digest=digest(4),
            decision="Release if better than the champion.",
            metric="held-out loss",
            unit="nat per token",
            better="lower",
            threshold=4.2,
            observed=Estimate(value=4.0911, se=0.0131, low=4.0654, high=4.1168),
            holds=True,
            reason="The sealed set was not opened.",
        ),
        audit=audit(),
        provenance=Provenance(
            record_root=digest(6),
            sparse_root=digest(7),
            ledger_size=42,
            ledger_root=digest(8),
            checkpoint_root=digest(9),
            receipts=(
                ReceiptCheck(owner="washington", verified=True, detail="121 records"),
                ReceiptCheck(owner="adams", verified=False, detail="expected aa, got bb"),
            ),
        ),
        versions=(Version(name="torch", version="2.13.0"),),
        seeds=(Seed(what="order", seed="1789", chosen="fixed by the recipe"),),
        runs=(RunRef(run="train-1", kind="train", status="done"),),
    )


class Page(HTMLParser):
    """Tags, attributes and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._silent = 0
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element."""
        self.tags.append((tag, dict(attrs)))
        self._silent += tag == "style"

    def handle_endtag(self, tag: str) -> None:
        """Note where the style sheet ends."""
        self._silent -= tag == "style"

    def handle_data(self, data: str) -> None:
        """Note visible text."""
        if not self._silent:
            self.words.append(data)

    @property
    def text(self) -> str:
        """Visible text on one line, with ordinary spaces."""
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())
