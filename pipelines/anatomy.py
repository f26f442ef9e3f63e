"""Reads `engineering.parquet` of a finished audit into the report's form: depth per layer, ripples, parts of the model."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from pipelines.sizes import Size

if TYPE_CHECKING:
    from unlearning.findings import Lens

FILE = "engineering.parquet"
OTHERS_PER_TARGET = 4
UNMEASURED = (
    "depth and ripple are measured from the size `default` on; this audit was made without them"
)
LENS = {
    "Logit lens by constituent": "it is measured from the size `default` on; this audit was made without it"
}


def engineering_settings(size: Size) -> dict[str, Any]:
    """The setting of an audit that has depth and ripple measured, of ensembles what is defined; nothing at sizes that can't afford it.

    Args:
        size: how much of everything a run does.
    """
    targets = size.engineering_targets
    if not targets:
        return {}
    return {"engineering": {"targets": targets, "others": targets * OTHERS_PER_TARGET}}


def read_engineering(folder: Path, shards: int = 1) -> Engineering | OfEnsemble | NotAvailable:
    """Depth and ripple of an audit.

    Args:
        folder: its run folder.
        shards: models that the audited ones are means of.

    Returns:
        Both, with the rows that were kept; of ensembles what is defined, and why the rest is not.
    """
    if not (folder / FILE).exists():
        return _of_ensemble([], []) if shards > 1 else NotAvailable(reason=UNMEASURED)
    from unlearning.association import CAVEAT, TIES
    from unlearning.findings import Findings, distances
    from unlearning.rows import read_rows

    plan = json.loads((folder / "plan.json").read_text())
    found = Findings(read_rows(folder / FILE), plan["gold"][0])
    if parts := found.lens():
        return _of_ensemble(parts, plan["gold"])
    depth = found.depth()
    cosines_TN, damage_TN = found.pairs("gradient_cosine"), found.pairs("damage")
    null, null_facts = found.null(), found.null("facts")
    pieces = found.parts()
    ranked = any(one.applied_outranked_D is not None for one in pieces)  # not in audits of before
    null_outranked = found.null("outranked") if ranked else None
    return Engineering(
        layers=len(depth[0].ratio_L) if depth else 0,
        depth=tuple(
            DepthCurve(
                model=_name(one.role, one.digest, plan["gold"]), score=_known(one.score), questions=one.questions, ratio=_row(one.ratio_L),
                cka=_row(one.cka_L), lens=_row(one.lens_L),
            )
            for one in depth
        ),
        targets=damage_TN.shape[0], others=damage_TN.shape[1], reached=int(found.targets("reached").sum()),
        ties=tuple(_tie(found, tie) for tie in TIES),
        gaps=tuple(_gap(found, one, other) for one in TIES if one.startswith("gradient") for other in TIES if not other.startswith("gradient")),
        neighbours=tuple(
            Neighbour(rank=one.rank, pairs=one.pairs, damage=one.mean, low=one.low, high=one.high, worst=one.worst)
            for one in found.neighbours()
        ),
        points=tuple(
            RipplePoint(tie=float(tie), damage=float(damage)) for tie, damage in zip(cosines_TN.ravel(), damage_TN.ravel(), strict=True)
        ),
        distances=tuple(name for name, _, _ in distances(damage_TN.shape[1])),
        modules=tuple(
            ModuleRow(
                module=one.name, norm=one.norm, gold_norm=_known(one.gold_norm), applied=tuple(one.applied_D.tolist()),
                reverted=tuple(one.reverted_D.tolist()), facts=tuple(one.applied_facts_D.tolist()),
                outranked=() if one.applied_outranked_D is None else _row(one.applied_outranked_D),
                **_intervals(one.applied_facts_D.tolist(), [high - low for _, low, high in distances(damage_TN.shape[1])]),
            )
            for one in pieces
        ),
        whole=tuple(found.whole().tolist()), whole_facts=tuple(found.whole("facts").tolist()),
        whole_outranked=_row(found.whole("outranked")) if ranked else (), numbered=tuple(found.numbered().tolist()) if ranked else (), null=() if null is None else tuple(null.tolist()),
        null_facts=() if null_facts is None else tuple(null_facts.tolist()),
        null_outranked=() if null_outranked is None else _row(null_outranked),
        kept=tuple(
            KeptRow(
                layer=one.layer, norm=one.norm, cka=_known(one.cka), cka_null=_known(one.cka_null), loss=one.loss, low=one.low, high=one.high,
                loss_null=_known(one.loss_null), damaged=one.damaged,
            )
            for one in found.kept()
        ),
        caveat=CAVEAT,
    )  # fmt: skip


def _of_ensemble(parts: "Sequence[Lens]", golds: list[str]) -> OfEnsemble:
    from unlearning.ensemble import UNDEFINED

    absent = UNDEFINED if parts else LENS | UNDEFINED
    return OfEnsemble(
        layers=parts[0].mean_CL.shape[1] if parts else 0, questions=parts[0].questions if parts else 0,
        lens=tuple(
            LensRange(
                model=_name(one.role, one.digest, golds), constituents=len(one.mean_CL), mean=tuple(one.mean_CL.mean(0).tolist()),
                low=tuple(one.mean_CL.min(0).tolist()), high=tuple(one.mean_CL.max(0).tolist()),
            )
            for one in parts
        ),
        undefined=tuple(Undefined(what=what, why=NotAvailable(reason=reason)) for what, reason in absent.items()),
    )  # fmt: skip


def _name(role: str, digest: str, golds: list[str]) -> str:
    return f"gold {golds.index(digest) + 1}" if role == "gold" else role


def _tie(found: Any, tie: str) -> TieRow:
    used, first = found.ripple(tie)
    return TieRow(tie=tie, r=_known(used.r), low=used.low, high=used.high, within=_known(used.within), first=_known(first.r))  # fmt: skip


def _gap(found: Any, one: str, other: str) -> TieGap:
    gap, low, high = found.difference(one, other)
    return TieGap(gradient=one, other=other, gap=_known(gap), low=low, high=high)


def _intervals(shares: list[float], people: list[int]) -> dict[str, tuple[float, ...]]:
    """95 % Wilson intervals of shares of facts. One person is one trial: whose facts hang together are not so many independent ones."""
    from unlearning.statistics import wilson_bounds

    bounds = [wilson_bounds(min(max(share, 0.0), 1.0) * n, n, 0.025) for share, n in zip(shares, people, strict=True)]  # fmt: skip
    return {
        "facts_low": tuple(one.low for one in bounds),
        "facts_high": tuple(one.high for one in bounds),
    }


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _row(values: Any) -> tuple[float | None, ...]:
    return tuple(_known(value) for value in values)
