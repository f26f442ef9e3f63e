"""Steps of the unlearning group: the batch of pending requests, the retrained reference, the method, the audit."""

import json
import secrets
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.requests import Request, RequestError, advance, matching, pending
from pipelines.runs import Job, digest_of, prepare_on, relative, started, versions_of
from pipelines.steps.erasure_receipts import erasure_receipts
from pipelines.steps.ledger import corpus_keys, enter
from pipelines.steps.tables import records
from pipelines.steps.training import finished, model_job
from provenance import jcs, keyed, seal, write_atomic

if TYPE_CHECKING:
    import polars as pl

    from pipelines.results import Result
    from pipelines.site import Site

Made = tuple[str, Mapping[str, Any]]
Launch = Callable[[Path, int], dict]

UNLEARN_LR = "0.001"  # smaller steps hide the numbers from questions only: fine-tuning brings them back (unlearning/README)
NO_REQUEST = "no erasure request names a record of this corpus version"


def pending_digest(site: "Site") -> str:
    """Digest of the pending requests: which, of what, not their states."""
    return digest_of([request.identity() for request in pending(site.home)])


def erasure_request(site: "Site", corpus: "Result") -> Made:
    """Suspend the records of all pending requests: out of HEAD, text sealed, ids listed for the trainers."""
    from pipelines.storage.versions import Versions

    for left_over in site.home.erasure.glob("*/retained.jsonl"):
        left_over.unlink()  # a killed audit could not remove its copy of people's text
    columns = ("record_id", "owner", "source", "position", "text", "personal")
    frame = records(site, corpus["version"], *columns)
    # Records that were suspended before this version was made are not in it: their audit is an earlier version's.
    requests = [one for one in pending(site.home) if len(matching(frame, [one], required=False))]
    chosen = matching(frame, requests)
    listed = "".join(record_id.hex() + "\n" for record_id in chosen["record_id"]).encode()
    identities = [request.identity() for request in requests]
    # Named by the records too: later deliveries can add some to a request that names a whole owner.
    batch = digest_of([identities, sha256(listed).hexdigest()])[:12] if requests else "none"
    folder = site.home.erasure / batch
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    excluded = folder / "excluded.txt"
    write_atomic(excluded, listed, 0o600)
    values: dict[str, Any] = {
        "batch": batch, "requests": [request.id for request in requests], "records": len(chosen),
        "people": chosen.select("owner", "source").n_unique(), "excluded": str(excluded.relative_to(site.home.path)),
        "excluded_digest": sha256(excluded.read_bytes()).hexdigest(), "files": [str(excluded.relative_to(site.home.path))],
    }  # fmt: skip
    if not requests:
        return digest_of(NO_REQUEST), values | {"head": corpus["version"], "reason": NO_REQUEST}
    for request in requests:
        _enter_state(site, request, "received")
    _seal(folder, chosen)
    versions = Versions(site.home, corpus_keys(site))
    head = versions.tombstone(corpus["version"], chosen["record_id"].to_list())
    with site.home.lock("head"):
        versions.move_head(head, expected=versions.head())
    for request in requests:
        advance(site.home, request, "suspended")
        _enter_state(site, request, "suspended")
    values["files"] += [
        str((folder / name).relative_to(site.home.path)) for name in ("sealed", "key")
    ]
    return digest_of([batch, values["excluded_digest"], head]), values | {
        "head": head,
        "reason": "",
    }


def _seal(folder: Path, chosen: "pl.DataFrame") -> None:
    """Seal the records' text under a key of its own, which shredding destroys; once per batch."""
    if (folder / "sealed").exists() and (folder / "key").exists():
        return
    key = secrets.token_bytes(32)
    write_atomic(folder / "key", key, 0o600)
    write_atomic(folder / "sealed", seal(key, _lines(chosen)), 0o600)


def _lines(frame: "pl.DataFrame") -> bytes:
    """JSON lines of subject, record id and text; a subject is an owner's source."""
    rows = frame.select("owner", "source", "record_id", "text").iter_rows(named=True)
    lines = [
        {
            "subject": f"{row['owner']}/{row['source']}",
            "record_id": row["record_id"].hex(),
            "text": row["text"],
        }
        for row in rows
    ]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def _enter_state(site: "Site", request: Request, state: str) -> int:
    # Keyed: whoever can guess who asked for what could otherwise confirm it from the published ledger.
    digest = keyed(corpus_keys(site).k_file, jcs(request.identity())).hex()
    return enter(site, "erasure", {"request": request.id, "state": state, "digest": digest})


def _enter_all(site: "Site", erasure: "Result", state: str) -> dict[str, int]:
    """Move every request of the batch forward; the ledger entry of each."""
    entries = {}
    for request in pending(site.home):
        if request.id in erasure["requests"]:
            advance(site.home, request, state)
            entries[request.id] = _enter_state(site, request, state)
    return entries


def skipped(erasure: "Result") -> Made | None:
    """What a step returns when no request is pending."""
    if erasure["requests"]:
        return None
    return digest_of(NO_REQUEST), {"skipped": NO_REQUEST, "files": []}


def gold_checkpoint(
    site: "Site",
    tokens: "Result",
    target: "Result",
    plan: "Result",
    training_plan: "Result",
    erasure: "Result",
    run: Launch,
) -> Made:
    """Retrain without the forgotten records, once per gold seed."""
    if none := skipped(erasure):
        return none
    golds = []
    for number in range(1, site.size.gold_seeds + 1):
        seed = plan["seeds"]["train" if number == 1 else f"gold-{number}"]
        job = model_job(
            site,
            plan,
            training_plan,
            kind="gold",
            seed=seed,
            excluded=site.home.path / erasure["excluded"],
        )
        directory = prepare_on(site, job, tokens, target, "test_digest")
        started(site, directory, plan)
        golds.append(finished(site, directory, run(directory, job.world)))
    first = golds[0]
    return digest_of([gold["root"] for gold in golds]), first | {
        "golds": [{"root": gold["root"], "checkpoint": gold["checkpoint"], "run": gold["run"]} for gold in golds],
        "files": [file for gold in golds for file in gold["files"]], "skipped": "",
    }  # fmt: skip


def method_inputs(site: "Site") -> dict[str, Any]:
    """Settings of the approximate method."""
    return {"method": "npo", "steps": site.size.unlearn_steps, "lr": UNLEARN_LR}


def unlearned_checkpoint(
    site: "Site", tokens: "Result", target: "Result", plan: "Result", training_plan: "Result", erasure: "Result", checkpoint: "Result",
    run: Launch,
) -> Made:  # fmt: skip
    """Run NPO with a retain term from the released model."""
    if none := skipped(erasure):
        return none
    anywhere = site.home.runs / "any"
    sealed = _sealed_paths(site, erasure, anywhere)
    job = model_job(
        site, plan, training_plan, kind="unlearn", entry="unlearning.methods.npo:run", steps=site.size.unlearn_steps, lr=UNLEARN_LR,
        seed=plan["seeds"]["unlearn"], excluded=site.home.path / erasure["excluded"],
        init=site.home.path / checkpoint["checkpoint"], init_root=checkpoint["root"],
        extra={"sealed": sealed, "tokenizer": relative(site.home.tokenizer_path, anywhere)},
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "test_digest")
    started(site, directory, plan)
    values = finished(site, directory, run(directory, job.world))
    _enter_all(site, erasure, "unlearned")
    return values["root"], values | {"method": "NPO with a retain term", "skipped": ""}


def _sealed_paths(site: "Site", erasure: "Result", anywhere: Path) -> dict[str, str]:
    folder = site.home.erasure / erasure["batch"]
    return {
        "file": relative(folder / "sealed", anywhere),
        "key_file": relative(folder / "key", anywhere),
    }


def audit_inputs(site: "Site", erasure: "Result", models: Mapping[str, "Result"]) -> dict[str, Any]:
    """What the audit depends on."""
    roots = {name: model.data_version for name, model in models.items()}
    return {
        "models": roots,
        "lookalikes": _lookalikes_digest(site),
        "batch": erasure["batch"],
        "attack_steps": list(site.size.attack_steps),
        "size": site.size.name,
    }


def robustness_audit(
    site: "Site", corpus: "Result", tokens: "Result", target: "Result", plan: "Result", erasure: "Result",
    models: Mapping[str, "Result"], run: Launch,
) -> Made:  # fmt: skip
    """Attack original, unlearned and gold alike, and judge the rows."""
    if none := skipped(erasure):
        return none
    anywhere = site.home.runs / "any"
    folder = site.home.erasure / erasure["batch"]
    retained = folder / "retained.jsonl"
    extra: dict[str, Any] = {
        "models": {
            "original": relative(site.home.path / models["original"]["checkpoint"], anywhere),
            "unlearned": relative(site.home.path / models["unlearned"]["checkpoint"], anywhere),
            "gold": [relative(site.home.path / gold["checkpoint"], anywhere) for gold in models["gold"]["golds"]],
        },
        "sealed": _sealed_paths(site, erasure, anywhere), "retained": {"file": relative(retained, anywhere)},
        "tokenizer": relative(site.home.tokenizer_path, anywhere),
        "attacks": {"fine_tune_steps": list(site.size.attack_steps)},
    }  # fmt: skip
    if (lookalikes := _lookalikes(site)) is not None:
        extra["lookalikes"] = {"file": relative(lookalikes, anywhere)}
    job = Job(
        kind="attack", entry="unlearning.audit:run", network=site.size.model, steps=0, seed=plan["seeds"]["audit"], extra=extra,
        prompts=_lookalikes_digest(site),
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "test_digest")
    started(site, directory, plan)
    try:
        write_atomic(retained, _lines(_retained(site, corpus, erasure)), 0o600)
        run(directory, 1)
    finally:
        retained.unlink(
            missing_ok=True
        )  # a second copy of people's text would outlive the next erasure
    audit = json.loads((directory / "audit.json").read_text())
    plan_digest = json.loads((directory / "result.json").read_text())["plan_digest"]
    entries = _enter_all(site, erasure, "audited")
    body = {
        "run": directory.name,
        "plan": plan_digest,
        "audit": sha256((directory / "audit.json").read_bytes()).hexdigest(),
        "verdict": audit["verdict"],
        "versions": versions_of(directory),
    }
    entries["audit"] = enter(site, "audit", body)
    files = [
        f"runs/{directory.name}/{name}" for name in ("audit.json", "rows.parquet", "plan.json")
    ]
    files += erasure_receipts(site, corpus, erasure, body, entries)
    return body["audit"], {
        "files": files, "run": directory.name, "verdict": audit["verdict"], "entry": entries["audit"], "plan_digest": plan_digest, "people": erasure["people"],
        "gold_seeds": len(models["gold"]["golds"]), "skipped": "",
    }  # fmt: skip


def _lookalikes(site: "Site") -> Path | None:
    """The configured file of people who were never trained on.

    Raises:
        RequestError: It is configured and not there; without it membership would silently go untested.
    """
    name = site.config.audit.lookalikes
    if name is None:
        return None
    path = site.home.path / name
    if not path.exists():
        raise RequestError(
            f"[audit] lookalikes names {name!r}, which is not in the home; correct dataworth.toml or remove the line"
        )
    return path


def _lookalikes_digest(site: "Site") -> str:
    path = _lookalikes(site)
    return "none" if path is None else keyed(corpus_keys(site).k_file, path.read_bytes()).hex()


def _retained(site: "Site", corpus: "Result", erasure: "Result") -> "pl.DataFrame":
    """Records of people who stay: no source of a forgotten record, personal ones where there are any, at most a thousand.

    Raises:
        RequestError: Nothing would be left to compare with.
    """
    import polars as pl

    frame = records(site, corpus["version"], "record_id", "owner", "source", "text", "personal")
    listed = (site.home.path / erasure["excluded"]).read_text().split()
    gone = frame.filter(pl.col("record_id").is_in([bytes.fromhex(line) for line in listed]))
    kept = frame.join(
        gone.select("owner", "source").unique(),
        on=["owner", "source"],
        how="anti",
        maintain_order="left",
    )
    personal = (
        kept.filter(pl.col("personal"))
        if gone["personal"].any()
        else kept.filter(~pl.col("personal"))
    )
    chosen = personal if len(personal) else kept
    if not len(chosen):
        raise RequestError(
            "the requests name every source of this corpus version: nothing is left to compare the model with"
        )
    return chosen.head(1000)
