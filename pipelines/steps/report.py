"""The report step: collects every fact of this materialisation and renders one self-contained page."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.audits import read_audit
from pipelines.reports.audit import Request as ReportRequest
from pipelines.reports.audit import Verdict
from pipelines.reports.model import (
    Corpus,
    EvaluationPlan,
    GroupValue,
    Intake,
    LossCurve,
    OwnerRow,
    PriceRow,
    Pricing,
    Provenance,
    Reason,
    ReceiptCheck,
    ReportData,
    RunRef,
    Seed,
    Valuation,
    Version,
)
from pipelines.reports.parts import Estimate, NotAvailable
from pipelines.requests import load
from pipelines.steps import foundation
from pipelines.steps.influence import influence_part
from pipelines.steps.ledger import corpus_keys, key_of, open_ledger
from pipelines.steps.owners import worth_part
from provenance import write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site

Made = tuple[str, Mapping[str, Any]]


def report(site: "Site", parts: Mapping[str, "Result"]) -> Made:
    """Render the page and keep its machine-readable form beside it."""
    from pipelines.reports.page import render

    data = collect(site, parts)
    page = render(data).encode()
    digest = sha256(page).hexdigest()
    folder = site.home.path / "reports"
    folder.mkdir(exist_ok=True)
    for name in (digest[:16], "latest"):
        write_atomic(folder / f"{name}.html", page)
        write_atomic(folder / f"{name}.json", data.to_json().encode())
    path = f"reports/{digest[:16]}.html"
    return digest, {
        "files": [path, "reports/latest.html"],
        "path": path,
        "url": (site.home.path / path).as_uri(),
        "bytes": len(page),
    }


def collect(site: "Site", parts: Mapping[str, "Result"]) -> ReportData:
    """Every section of the report, or the reason why it is missing."""
    audit_result = parts["audit"]
    audit: Any = (
        NotAvailable(reason=audit_result["skipped"])
        if audit_result["skipped"]
        else read_audit(site.home.path, audit_result)
    )
    verdict: Any = (
        audit
        if isinstance(audit, NotAvailable)
        else Verdict(verdict=audit.verdict, reason=audit.reason)
    )
    if (
        isinstance(verdict, Verdict)
        and verdict.verdict == "PASS"
        and not parts["evaluation"]["holds"]
    ):
        verdict = Verdict(
            verdict="INCONCLUSIVE",
            reason="The erasure audit passed, but the evaluation plan's gate did not hold.",
        )
    return ReportData(
        title="Dataworth report",
        profile=site.size.name,
        demo=corpus_keys(site).is_demo,
        verdict=verdict,
        requests=_requests(site, parts),
        corpus=_corpus(parts["corpus"]),
        intake=_intake(parts["corpus"]),
        owners=_owners(site),
        valuation=_valuation(parts["owner_values"], parts["evaluation_plan"]),
        influence=influence_part(site, parts["influence"], parts["value_judgement"]),
        pricing=_pricing(site, parts["prices"]),
        worth=worth_part(site, parts["owner_values"], parts["prices"], parts),
        training=_training(parts["checkpoint"]),
        evaluation=_evaluation(parts["evaluation_plan"], parts["evaluation"]),
        audit=audit,
        provenance=_provenance(site, parts),
        versions=_versions(parts),
        seeds=tuple(Seed(what=name, seed=str(seed), chosen=parts["evaluation_plan"]["seed_rule"]) for name, seed in parts["evaluation_plan"]["seeds"].items()),
        runs=tuple(RunRef(run=parts[name]["run"], kind=name, status="done") for name in ("influence", "value_judgement", "owner_values", "checkpoint", "evaluation", "audit") if "run" in parts[name].values),
    )  # fmt: skip


def _requests(site: "Site", parts: Mapping[str, "Result"]) -> Any:
    found = [request for request in load(site.home) if request.kind == "erase"]
    if not found:
        return NotAvailable(reason="no erasure request was received")
    people, records = parts["audit"].values.get("people", 0), parts["erasure_request"]["records"]
    # One batch: its people and records stand with its first request, so that sums over rows stay right.
    return tuple(
        ReportRequest(
            request=request.id, state=request.state, num_people=people if row == 0 else 0, num_records=records if row == 0 else 0,
            received=request.received, deadline=request.deadline,
        )
        for row, request in enumerate(found)
    )  # fmt: skip


def _corpus(corpus: "Result") -> Corpus:
    return Corpus(
        version=corpus["version"],
        size=corpus["size"],
        live=corpus["live"],
        num_owners=len(corpus["owners"]),
    )


def _intake(corpus: "Result") -> Intake:
    reasons = sorted(corpus["reasons"].items(), key=lambda pair: -pair[1])
    return Intake(
        **corpus["counts"],
        reasons=tuple(Reason(reason=name, count=count) for name, count in reasons),
    )


def _owners(site: "Site") -> tuple[OwnerRow, ...]:
    import polars as pl

    records = pl.read_parquet(site.home.table("entropy")).group_by("owner").len()
    frame = (
        pl.read_parquet(site.home.table("owner_entropy")).join(records, on="owner").sort("owner")
    )
    return tuple(
        OwnerRow(
            owner=row["owner"], records=row["len"], tokens=row["tokens"],
            bits_per_token=Estimate(value=row["surprisal_bits_per_token"], se=row["surprisal_se"]),
            bits_per_byte=Estimate(value=row["surprisal_bits_per_byte"]),
        )
        for row in frame.iter_rows(named=True)
    )  # fmt: skip


def _valuation(values: "Result", plan: "Result") -> Valuation:
    from valuation.seeds import spread_words

    groups = tuple(
        GroupValue(
            group=group["id"], owners=tuple(group["owners"]),
            value=Estimate(value=group["value"], se=group["se"], low=group["low"], high=group["high"], n=values["target_records"]),
        )
        for group in values["groups"]
    )  # fmt: skip
    return Valuation(
        method=values["method"], target="target_value", num_coalitions=values["coalitions"], groups=groups,
        loss_without=Estimate(value=values["loss_empty"]), loss_with=Estimate(value=values["loss_all"]), plan_digest=plan["digest"],
        notes=(
            f"Standard errors and intervals are {spread_words(len(values.values.get('seeds', [0])), base='base' in plan.values)}.",
            "Copies are left out of every coalition, so that a copier earns nothing.",
            "The players are lots of records in order of time and content; an owner gets its share of tokens in each, whatever its names.",
            *foundation.told(plan),
        ),
    )  # fmt: skip


def _pricing(site: "Site", prices: "Result") -> Any:
    if prices["skipped"]:
        return NotAvailable(reason=prices["skipped"])
    import polars as pl

    frame = pl.read_parquet(site.home.table("prices"))
    values = pl.read_parquet(site.home.table("values")).filter(pl.col("subject_kind") == "owner")
    value_of = dict(zip(values["subject_id"], values["value_nano"], strict=True))
    rows = tuple(
        PriceRow(
            subject=row["subject"], price_microunits=row["price_microunits"],
            value=value_of[row["subject"]] / 1e9 if row["subject"] in value_of else None,
        )
        for row in frame.sort("price_microunits", descending=True).iter_rows(named=True)
    )  # fmt: skip
    from pipelines.steps.pricing import rule_of
    from valuation import rule_sentence

    rule = rule_of(site)
    return Pricing(
        currency=prices["currency"],
        pool_microunits=prices["pool"],
        rows=rows,
        rule_digest=prices["rule_digest"],
        rule=rule_sentence(rule) if rule else "",
    )


def _training(checkpoint: "Result") -> tuple[LossCurve, ...]:
    curve = checkpoint["curve"]
    return (
        LossCurve(
            run=checkpoint["run"], kind="train", steps=tuple(step for step, _ in curve), losses=tuple(loss for _, loss in curve),
            tokens_per_s=checkpoint["tokens_per_s"], peak_rss_bytes=checkpoint["peak_rss_bytes"],
        ),
    )  # fmt: skip


def _evaluation(plan: "Result", evaluation: "Result") -> EvaluationPlan:
    return EvaluationPlan(
        digest=plan["digest"], decision=plan["decision"], metric="fall of loss below the unigram baseline on target_test",
        unit="nats per token", better="higher", threshold=evaluation["threshold"],
        observed=Estimate(value=evaluation["gain"], se=evaluation["gain_se"], n=evaluation["records"]), holds=evaluation["holds"],
        reason=f"decision by the committed rule: {evaluation['decision']}",
    )  # fmt: skip


def _provenance(site: "Site", parts: Mapping[str, "Result"]) -> Provenance:
    from provenance.verify_standalone import VerifyError, verify_receipt

    ledger = open_ledger(site)
    folder = site.home.receipts / parts["receipts"]["version"]
    checks = []
    for owner in parts["receipts"]["owners"]:
        receipt = json.loads((folder / f"{owner}.receipt.json").read_bytes())
        try:
            proof = (folder / f"{owner}.tlog-proof").read_text()
            facts = verify_receipt(receipt, proof, key_of(site.home.ledger, proof))
            checks.append(
                ReceiptCheck(owner=owner, verified=True, detail=f"{len(facts)} facts proven")
            )
        except VerifyError as error:
            checks.append(ReceiptCheck(owner=owner, verified=False, detail=str(error)))
    return Provenance(
        record_root=parts["commitment"]["record_root"], sparse_root=parts["commitment"]["sparse_root"], ledger_size=ledger.size,
        ledger_root=ledger.root.hex(), checkpoint_root=parts["checkpoint"]["root"], receipts=tuple(checks),
    )  # fmt: skip


def _versions(parts: Mapping[str, "Result"]) -> tuple[Version, ...]:
    import platform
    from importlib import metadata

    from pipelines.runs import code_digest

    names = (
        "torch",
        "numpy",
        "polars",
        "pyarrow",
        "tokenizers",
        "tiktoken",
        "dagster",
        "cryptography",
    )
    found = [Version(name=name, version=metadata.version(name)) for name in names]
    return (
        Version(name="python", version=platform.python_version()),
        *found,
        Version(name="code (digest)", version=code_digest()),
        Version(name="corpus", version=parts["commitment"]["version"]),
    )


def report_path(home: Path) -> Path:
    """The newest report.

    Raises:
        FileNotFoundError: There is none yet.
    """
    path = home / "reports" / "latest.html"
    if not path.exists():
        raise FileNotFoundError("no report in this home yet: run `dataworth run` first")
    return path
