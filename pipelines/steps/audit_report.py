"""The audit report of a batch of erasure requests: one function writes it for the graph and for `dataworth audit`.

`publish` collects the facts of an audit that has just been made; `find` takes the report of a request that was audited before, brings
what may have changed since up to date (states, copies, what was released) and writes it again. Both end in `_write`.

Files: `reports/audit-BATCH.html` and `.json`. They hold no text, name or record id (`pipelines.reports.dossier`), so an erasure
leaves them where they are: they are the evidence that it took place.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelines.anatomy import FILE, read_engineering
from pipelines.audits import read_audit
from pipelines.evidence import read_evidence
from pipelines.reports.dossier import Asked, Copy, Dossier, Fact, Model, Scope
from pipelines.reports.errors import ReportError
from pipelines.requests import BASES, OPEN_STATES, Request, RequestError, load
from pipelines.results import Result, latest
from pipelines.steps import audit_review
from pipelines.steps.ledger import corpus_keys, open_ledger
from provenance import keyed, write_atomic

if TYPE_CHECKING:
    from pipelines.site import Site

ATTRIBUTES = "numbers of four digits or more in the people's records (telephone numbers and the like); in records without one, how they go on"
RUN_FIRST = "run `dataworth run`, or `dataworth audit REQUEST --run`"
_LIBRARIES = ("torch", "numpy", "polars", "pyarrow", "tokenizers", "dagster", "cryptography")


@dataclass(frozen=True, slots=True)
class Batch:
    """What one audit was made of."""

    corpus: Result
    erasure: Result
    plan: Result
    models: Mapping[str, Result]
    """original, gold, unlearned."""
    audit: Result


@dataclass(frozen=True, slots=True)
class Published:
    """An audit report as it lies in the home."""

    dossier: Dossier
    html: Path
    json: Path

    def files(self, home: Path) -> list[str]:
        """Its files, relative to the home."""
        return [path.relative_to(home).as_posix() for path in (self.html, self.json)]


def publish(site: "Site", batch: Batch) -> Published:
    """Write the report of an audit that was just made.

    Args:
        site: The open home.
        batch: The audit and what it was made of.

    Returns:
        The report and its files.
    """
    requests = [one for one in load(site.home) if one.id in batch.erasure["requests"]]
    audit = batch.audit
    folder = site.home.runs / audit["run"]
    dossier = Dossier(
        demo=corpus_keys(site).is_demo,
        profile=site.size.name,
        batch=audit["batch"],
        requests=_asked(site, requests),
        scope=_scope(site, batch),
        kind=_kind(batch.models["unlearned"].values.get("method_name", "")),
        audit=read_audit(site.home.path, audit),
        models=_models(batch, folder),
        release=_release(site, requests, audit["verdict"]),
        copies=_copies(site, requests),
        evidence=read_evidence(folder, audit["entry"]),
        engineering=read_engineering(folder, site.config.training.shards),
        versions=_versions(folder),
        reviews=audit_review.kept(_paths(site, audit["batch"])[1]),
    )
    return _write(site, dossier)


def published(
    site: "Site", corpus: Result, erasure: Result, plan: Result, models: Mapping[str, Result], digest: str, values: Mapping[str, Any]
) -> tuple[str, Mapping[str, Any]]:  # fmt: skip
    """What the asset of an audit leaves: its values with the report and its files added.

    Args:
        site: The open home.
        corpus: The version that held the records.
        erasure: The batch.
        plan: The evaluation plan, which holds the seeds.
        models: original, gold, unlearned.
        digest: Digest of `audit.json`.
        values: What the asset knows of the audit; `files` grows by the report's.

    Returns:
        Data version and values.
    """
    made = publish(
        site, Batch(corpus, erasure, plan, models, Result("robustness_audit", "", digest, values))
    )
    measured = f"runs/{values['run']}/{FILE}"
    files = [*values["files"], *made.files(site.home.path)]
    files += [measured] * (site.home.path / measured).exists()
    return digest, {
        **values,
        "files": files,
        "report": made.html.relative_to(site.home.path).as_posix(),
    }


def find(site: "Site", request: str = "") -> Published:
    """The report of a request that was audited, brought up to date.

    Args:
        site: The open home.
        request: Id or reference of the request, or the beginning of one; empty for the newest audit.

    Returns:
        The report and its files.

    Raises:
        RequestError: There is no such request, or it has no audit; says why and what to do.
    """
    requests = [one for one in load(site.home) if one.kind == "erase"]
    if not requests:
        raise RequestError(
            "no erasure was asked for in this home, so that there is nothing to audit; "
            "`dataworth erase --owner OWNER` writes a request"
        )
    chosen = _named(site, requests, request) if request else None
    for dossier in _stored(site):
        references = {one.reference for one in dossier.requests}
        if chosen is None or reference_of(site, chosen.id) in references:
            mine = [one for one in requests if reference_of(site, one.id) in references]
            fresh = dataclasses.replace(
                dossier,
                requests=_asked(site, mine) or dossier.requests,
                release=_release(site, mine, dossier.audit.verdict),
                copies=_copies(site, mine),
            )
            return _write(site, fresh)
    batch = _latest(site)
    if batch is not None and (chosen is None or chosen.id in batch.erasure["requests"]):
        return publish(site, batch)
    raise RequestError(_why_none(site, requests, chosen))


def review(site: "Site", made: Published, name: str) -> Published:
    """Enter that somebody has read a report, and write it with that.

    Args:
        site: The open home.
        made: The report.
        name: Who answers for the reading.

    Returns:
        The report with the review.

    Raises:
        RequestError: That is no name.
    """
    return _write(site, audit_review.reviewed(site, made.dossier, name))


def contradicted(site: "Site", _audit: Result) -> list[str]:
    """Where a report in the home says something else than the ledger, or a page isn't the one of its facts.

    Args:
        site: The open home.

    Returns:
        One sentence per finding.
    """
    entries = list(open_ledger(site).entries())
    found = []
    for dossier in _stored(site):
        evidence, name = dossier.evidence, f"reports/audit-{dossier.batch}"
        entry = (
            entries[evidence.ledger_entry] if 0 <= evidence.ledger_entry < len(entries) else None
        )
        body = entry["body"] if entry and entry["kind"] == "audit" else {}
        told = {
            "run": evidence.run,
            "audit": evidence.audit_digest,
            "plan": dossier.audit.plan_digest,
            "verdict": dossier.audit.verdict,
        }
        found += [
            f"{name}.json: {what} is {value}, the ledger's entry {evidence.ledger_entry} says {body.get(what)}"
            for what, value in told.items()
            if body.get(what) != value
        ]
        found += audit_review.contradicted(dossier, entries)
        page, facts = _paths(site, dossier.batch)
        digest = sha256(facts.read_bytes()).hexdigest()
        if not page.exists() or digest not in page.read_text(encoding="utf-8"):
            found.append(f"{name}.html is not the page of {name}.json: dataworth audit writes it")
    return found


def waits(site: "Site", request: str = "") -> bool:
    """Whether a run of the graph would audit the request (or any, when none is named).

    Args:
        site: The open home.
        request: Id or reference, or the beginning of one; empty for any.

    Raises:
        RequestError: There is no such request.
    """
    requests = [one for one in load(site.home) if one.kind == "erase"]
    chosen = [_named(site, requests, request)] if request else requests
    return any(one.state in OPEN_STATES[:3] for one in chosen)


def reference_of(site: "Site", request: str) -> str:
    """How a report names a request: the id of one made before ids were keyed could be confirmed by guessing.

    Args:
        site: The open home, whose keys make the reference.
        request: The request's id.
    """
    return keyed(corpus_keys(site).k_file, b"audit-report/request/" + request.encode()).hex()[:16]


def _write(site: "Site", dossier: Dossier) -> Published:
    from pipelines.reports.dossier_page import render_dossier

    html, data = _paths(site, dossier.batch)
    html.parent.mkdir(exist_ok=True)
    write_atomic(html, render_dossier(dossier).encode())
    write_atomic(data, dossier.to_json().encode())
    return Published(dossier, html, data)


def _paths(site: "Site", batch: str) -> tuple[Path, Path]:
    html, data = (site.home.path / "reports" / f"audit-{batch}.{kind}" for kind in ("html", "json"))
    return html, data


def _stored(site: "Site") -> list[Dossier]:
    """Reports that lie in the home, the newest audit first: by the ledger, since bringing one up to date changes its file."""
    paths = sorted((site.home.path / "reports").glob("audit-*.json"))
    found = []
    for path in paths:
        try:
            found.append(Dossier.from_json(path.read_text(encoding="utf-8")))
        except (ReportError, ValueError) as error:
            raise RequestError(
                f"reports/{path.name} is no audit report of this version ({error}): put it and its page elsewhere and ask again"
            ) from error
    return sorted(found, key=lambda one: one.evidence.ledger_entry, reverse=True)


def _named(site: "Site", requests: Sequence[Request], name: str) -> Request:
    found = [one for one in requests if one.id.startswith(name) or reference_of(site, one.id).startswith(name)]  # fmt: skip
    if len(found) != 1:
        known = ", ".join(f"{one.id} ({one.state})" for one in requests)
        raise RequestError(
            f"{name!r} names {len(found)} erasure requests, expected one; requests here: {known}"
        )
    return found[0]


def _latest(site: "Site") -> Batch | None:
    """The newest audit of the graph, as long as its parts belong together."""
    names = ("corpus", "erasure_request", "evaluation_plan", "checkpoint", "gold_checkpoint", "unlearned_checkpoint", "robustness_audit")  # fmt: skip
    found = {name: latest(site.home.results, name) for name in names}
    parts = {name: result for name, result in found.items() if result is not None}
    if len(parts) < len(names):
        return None
    audit, erasure = parts["robustness_audit"], parts["erasure_request"]
    if audit["skipped"] or audit["batch"] != erasure["batch"]:
        return None
    if not (site.home.path / erasure["excluded"]).exists():
        return None  # finished since: the list of its records is destroyed
    models = {
        "original": parts["checkpoint"],
        "gold": parts["gold_checkpoint"],
        "unlearned": parts["unlearned_checkpoint"],
    }
    return Batch(parts["corpus"], erasure, parts["evaluation_plan"], models, audit)


def _why_none(site: "Site", requests: Sequence[Request], chosen: Request | None) -> str:
    if chosen is None:
        waiting = ", ".join(f"{one.id} ({one.state})" for one in requests)
        return f"no request of this home has an audit: {waiting}; {RUN_FIRST}"
    if chosen.state == "refused":
        return f"request {chosen.id} was refused, so that nothing was forgotten: {chosen.note}"
    if chosen.state in OPEN_STATES[:3]:
        return f"request {chosen.id} is {chosen.state} and not audited yet: {RUN_FIRST}"
    return _why_gone(site, chosen)


def _why_gone(site: "Site", chosen: Request) -> str:
    """Why a request whose state is past its audit has no report."""
    entries = [entry["body"] for entry in open_ledger(site).entries() if entry["kind"] == "erasure"]
    mine = [body for body in entries if body["request"] == chosen.id]
    if any(body.get("by") == "never trained on" for body in mine):
        return f"no model was ever trained on the records of request {chosen.id}: they were held out, so that there is nothing to audit"
    if any(body.get("by") == "deadline" for body in mine):
        return f"request {chosen.id} was finished by its deadline before it was audited; its text is destroyed, so that it can't be audited any more"
    if chosen.state == "shredded":
        return (
            f"request {chosen.id} is shredded: its text and its key are destroyed, so that nothing can be audited any more; the verdict "
            "of before stands in the ledger, its report is no longer in reports/"
        )
    return f"the audit of request {chosen.id} is not in this home any more; dataworth run makes it again"


def _asked(site: "Site", requests: Sequence[Request]) -> tuple[Asked, ...]:
    keys = corpus_keys(site)
    closed = {
        entry["body"]["request"]: entry["time"]
        for entry in open_ledger(site).entries()
        if entry["kind"] == "erasure" and entry["body"]["state"] in ("shredded", "refused")
    }
    return tuple(
        Asked(
            reference=reference_of(site, one.id), by=keyed(keys.k_owner, one.owner.encode()).hex()[:16] if one.owner else "",
            state=one.state, received=one.received, deadline=one.deadline, closed=closed.get(one.id, ""), basis=BASES.get(one.basis, ""),
        )
        for one in requests
    )  # fmt: skip


def _scope(site: "Site", batch: Batch) -> Scope:
    """What the requests concern, with each record's path to the old root and its absence from the new one recomputed."""
    from pipelines.steps.tables import records
    from pipelines.storage.versions import Versions
    from provenance import MerkleTree, SparseTree, verify_absence, verify_inclusion

    keys = corpus_keys(site)
    versions = Versions(site.home, keys)
    before, after = batch.corpus["version"], batch.erasure["head"]
    leaves = list(versions.leaves(before))
    tree = MerkleTree(leaves)
    listed = (site.home.path / batch.erasure["excluded"]).read_text().split()
    frame = records(site, before, "record_id", "fingerprint")
    gone = frame.filter(frame["record_id"].is_in([bytes.fromhex(line) for line in listed]))
    root = tree.root()
    for index in gone["index"]:
        verify_inclusion(leaves[index], index, len(leaves), tree.inclusion_path(index), root)
    live = records(site, after, "fingerprint")["fingerprint"].to_list()
    sparse, still = SparseTree(live), set(live)
    absent = [mark for mark in gone["fingerprint"] if mark not in still]
    for mark in absent:
        verify_absence(sparse.root, mark, sparse.prove(mark))
    return Scope(
        people=batch.erasure["people"], records=batch.erasure["records"], attributes=ATTRIBUTES, version_before=before, root_before=root.hex(),
        version_after=after, root_after=MerkleTree(versions.leaves(after)).root().hex(), included=len(gone), absent=len(absent),
        kept_by_others=len(gone) - len(absent),
    )  # fmt: skip


def _kind(method: str) -> Literal["exact retrain", "shard retrain", "approximate"]:
    if method == "exact":
        return "exact retrain"
    return "shard retrain" if method == "sisa" else "approximate"


def _models(batch: Batch, folder: Path) -> tuple[Model, ...]:
    seeds = batch.plan["seeds"]
    original, unlearned = batch.models["original"], batch.models["unlearned"]
    found = [
        _model("original", original.values, str(seeds["train"])),
        _model("unlearned", unlearned.values, str(seeds["unlearn"])),
    ]
    for number, gold in enumerate(batch.models["gold"]["golds"], start=1):
        seed = seeds["train" if number == 1 else f"gold-{number}"]
        more = batch.models["gold"].values if number == 1 else {}
        found.append(_model("gold", {**more, **gold}, str(seed)))
    random = json.loads((folder / "plan.json").read_text()).get("random_init", "")
    if random:
        found.append(Model(role="random", root=random, run="", seed=str(seeds["audit"])))
    return tuple(found)


def _model(role: str, values: Mapping[str, Any], seed: str) -> Model:
    return Model(
        role=role, root=values["root"], run=values["run"], seed=seed, steps=values.get("steps"), tokens_per_s=values.get("tokens_per_s"),
        peak_rss_bytes=values.get("peak_rss_bytes"),
    )  # fmt: skip


def _inventories(site: "Site", requests: Sequence[Request]) -> list[dict[str, Any]]:
    from pipelines.erasure.finishing import inventory_path

    paths = [inventory_path(site, one.id) for one in requests]
    return [json.loads(path.read_bytes()) for path in paths if path.exists()]


def _release(site: "Site", requests: Sequence[Request], verdict: str) -> str:
    """Which model takes the original's place: as it was done, or as it will be."""
    done = {one["release"] for one in _inventories(site, requests)}
    words = {
        "unlearned": "the cleaned model",
        "exact": "the model that was retrained without the records",
        "none yet": "a model that the next run trains without the records",
    }
    if len(done) == 1:
        return (
            f"{words.get(done.pop(), 'a model without the records')} has taken the original's place"
        )
    coming = words["unlearned" if verdict == "PASS" else "exact"]
    return (
        f"when the requests are finished, {coming} takes the original's place; until then it stays"
    )


def _copies(site: "Site", requests: Sequence[Request]) -> tuple[Copy, ...]:
    """Every place where the records or what was made of them lie, and their state now."""
    done = _inventories(site, requests)
    if done:
        return tuple(
            Copy(what=one["store"], state=f"{one['state']} ({one['removed']} removed)" if one["removed"] else one["state"])
            for one in done[0]["stores"]
        )  # fmt: skip
    from pipelines.erasure.stores import STORES, outside

    waits = "kept until the requests are finished"
    found = [
        Copy(what="version in force", state="without the records since their suspension"),
        Copy(what="sealed text and its key", state=f"encrypted, readable by the audit only; {waits}"),
        *(Copy(what=name, state=waits) for name in STORES),
        *(Copy(what=f"replaced home {name}", state="out of reach: remove it") for name in outside(site)),
    ]  # fmt: skip
    return (
        *found,
        Copy(
            what="backups outside of the home", state="out of reach; a restore applies the erasure"
        ),
        Copy(
            what="quantised builds, exports and further fine-tunes of the original",
            state="not known to this program",
        ),
    )


def _versions(folder: Path) -> tuple[Fact, ...]:
    import os
    import platform
    from importlib import metadata

    from pipelines.runs import code_digest, versions_of

    found = {"python": platform.python_version()}
    found |= {name: metadata.version(name) for name in _LIBRARIES}
    found |= {"code (digest)": code_digest()}
    found |= {"machine": f"{platform.machine()}, {os.cpu_count()} processors"}
    found |= {f"run: {name}": value for name, value in versions_of(folder).items()}
    return tuple(Fact(name=name, value=value) for name, value in found.items())
