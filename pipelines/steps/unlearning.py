"""Steps of the unlearning group: the batch of pending requests, the retrained reference, the method, the audit."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.anatomy import engineering_settings
from pipelines.erasure.batches import BATCH_FILE
from pipelines.erasure.choosing import EXACT, asked_method, known
from pipelines.erasure.finishing import carry_on, enter_state
from pipelines.requests import Request, RequestError, advance, matching, pending
from pipelines.runs import Job, digest_of, prepare_on, relative, started, versions_of
from pipelines.steps.audit_people import lookalikes_digest, lookalikes_of, retained_records
from pipelines.steps.audit_report import published
from pipelines.steps.erasure_receipts import erasure_receipts
from pipelines.steps.ledger import corpus_keys, enter, open_ledger
from pipelines.steps.sealing import listed, record_lines, seal_records
from pipelines.steps.sharded import SHARDED, refuse_others, train_ensemble
from pipelines.steps.swept import retained_mixture, settings_in_run, swept
from pipelines.steps.tables import records
from pipelines.steps.training import finished, model_job
from provenance import jcs, write_atomic
from unlearning.methods import EDITS

if TYPE_CHECKING:
    import polars as pl

    from pipelines.results import Result
    from pipelines.site import Site

Made = tuple[str, Mapping[str, Any]]
Launch = Callable[[Path, int], dict]

NO_REQUEST = "no erasure request names a record of this corpus version"


def pending_digest(site: "Site") -> str:
    """Digest of the pending requests: which, of what, not their states."""
    return digest_of([request.identity() for request in pending(site.home)])


def erasure_request(site: "Site", corpus: "Result") -> Made:
    """Suspend the records of all pending requests: out of HEAD, text sealed, ids listed for the trainers.

    Held-out records are sealed too; no model has seen them, so there is nothing to unlearn and nothing to audit.
    """
    for left_over in site.home.erasure.glob("*/retained.jsonl"):
        left_over.unlink()  # a killed audit could not remove its copy of people's text
    columns = ("record_id", "owner", "source", "position", "text", "personal")
    frame = records(site, corpus["version"], *columns)
    held = held_out_records(site)
    asked = _refuse_everything(site, frame, pending(site.home))
    method = asked_method(asked)  # first of all: a conflict must leave nothing half-done
    # Records that were suspended before this version was made are not in it: their audit is an earlier version's.
    requests = [one for one in asked if len(matching(frame, [one], required=False))]
    measured = [
        one for one in asked if one not in requests and len(matching(held, [one], required=False))
    ]
    chosen = matching(frame, requests)
    aside = matching(held, [*requests, *measured], required=False)
    chosen_ids = listed(chosen)
    identities = [request.identity() for request in (*requests, *measured)]
    # Named by the records too: later deliveries can add some to a request that names a whole owner.
    content = (
        sha256(chosen_ids + listed(aside)).hexdigest()
        if len(aside)
        else sha256(chosen_ids).hexdigest()
    )
    batch = digest_of([identities, content])[:12] if identities else "none"
    folder = site.home.erasure / batch
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    excluded = folder / "excluded.txt"
    write_atomic(excluded, chosen_ids, 0o600)
    values: dict[str, Any] = {
        "batch": batch, "requests": [request.id for request in requests], "records": len(chosen),
        "people": chosen.select("owner", "source").n_unique(), "excluded": str(excluded.relative_to(site.home.path)),
        "excluded_digest": sha256(excluded.read_bytes()).hexdigest(), "files": [str(excluded.relative_to(site.home.path))],
        "held_out": len(aside), "asked_method": method,
    }  # fmt: skip
    if not identities:
        return digest_of(NO_REQUEST), values | {"head": corpus["version"], "reason": NO_REQUEST}
    for request in (*requests, *measured):
        enter_state(site, request, "received")
    seal_records(folder, chosen, aside)
    write_atomic(
        folder / BATCH_FILE,
        jcs({"format": 1, "requests": [one.id for one in (*requests, *measured)]}),
        0o600,
    )
    head = _suspend(site, corpus["version"], chosen["record_id"].to_list())
    for request in (*requests, *measured):
        advance(site.home, request, "suspended")
        enter_state(site, request, "suspended")
    for request in measured:
        for state in ("unlearned", "audited"):
            advance(site.home, request, state)
            enter_state(site, request, state, by="never trained on")
    values["files"] += [
        str((folder / name).relative_to(site.home.path)) for name in ("sealed", "key")
    ]
    return digest_of([batch, values["excluded_digest"], head]), values | {
        "head": head,
        "reason": "" if requests else NO_REQUEST,
    }


def _suspend(site: "Site", version: str, record_ids: list[bytes]) -> str:
    """Put the version without the records in force."""
    from pipelines.storage.versions import Versions

    versions = Versions(site.home, corpus_keys(site))
    head = versions.tombstone(version, record_ids) if record_ids else (versions.head() or version)
    with site.home.lock("head"):
        versions.move_head(head, expected=versions.head())
    return head


def held_out_records(site: "Site") -> "pl.DataFrame":
    """Held-out records as requests see them."""
    from pipelines.storage.target import held_out
    from pipelines.storage.tokens import load_tokenizer

    if not site.home.tokenizer_path.exists():
        import polars as pl

        names = {
            "record_id": pl.Binary,
            "owner": pl.String,
            "source": pl.String,
            "fingerprint": pl.Binary,
            "text": pl.String,
        }
        return pl.DataFrame(schema=names)
    return held_out(site.home, corpus_keys(site), load_tokenizer(site.home.tokenizer_path))


def _refuse_everything(site: "Site", frame: "pl.DataFrame", asked: list[Request]) -> list[Request]:
    """Refuse, newest first, the requests that would leave a corpus without any record: nothing could be trained or compared."""
    kept = sorted(asked, key=lambda one: (one.received, one.id))
    while kept and len(matching(frame, kept, required=False)) == len(frame):
        request = kept.pop()
        enter_state(site, request, "received")
        enter_state(site, request, "refused", by="no record would be left")
        advance(
            site.home,
            request,
            "refused",
            "no record would be left; to end a corpus, remove its home",
        )
    return sorted(kept, key=lambda one: one.id)


def _enter_all(site: "Site", erasure: "Result", state: str) -> dict[str, int]:
    """Move every request of the batch forward; the ledger entry of each."""
    entries = {}
    for request in pending(site.home):
        if request.id in erasure["requests"]:
            advance(site.home, request, state)
            entries[request.id] = enter_state(site, request, state)
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
        if site.config.training.shards > 1:
            # Not the original's seed: with it a sharded erasure is the gold model itself.
            seed = plan["seeds"]["unlearn"] if number == 1 else seed
            excluded = site.home.path / erasure["excluded"]
            golds.append(train_ensemble(site, tokens, target, plan, training_plan, run, seed=seed, excluded=excluded))  # fmt: skip
            continue
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


def method_inputs(site: "Site", erasure: "Result") -> dict[str, Any]:
    """Settings of the method."""
    method = method_of(site, erasure)
    rank = adapters_of(site, method)
    adapters = {"lora_rank": rank} if rank else {}
    chosen = swept(method)
    return {
        "method": method, "steps": site.size.unlearn_steps, "lr": chosen.rate, **chosen.settings, **chosen.recipe, **adapters
    }  # fmt: skip


def method_of(site: "Site", erasure: "Result") -> str:
    """The method of a batch: what its requests ask for, else what is configured.

    Raises:
        RequestError: There is none of this name.
    """
    return known(erasure["asked_method"] or site.config.erasure.method)


def adapters_of(site: "Site", method: str) -> int:
    """Rank of the adapters that a method trains; 0 where it trains all weights.

    Raises:
        RequestError: Adapters are configured and the method changes all weights at once.
    """
    rank = site.config.erasure.lora_rank
    if rank and method in EDITS:
        raise RequestError(
            f"method {method!r} changes all weights at once and [erasure] lora_rank is {rank}: set it to 0, or take a loss such as npo"
        )
    return 0 if method in (EXACT, SHARDED) else rank


def _how(site: "Site", erasure: "Result", checkpoint: "Result", method: str) -> dict[str, Any]:
    """What a method changes of the recipe: its entry, its steps and what it starts from."""
    if (
        method == EXACT
    ):  # another seed than gold's: two retrainings, or the audit would compare a model with itself
        return {"choices": site.config.training}
    anywhere = site.home.runs / "any"
    extra: dict[str, Any] = {
        "sealed": _sealed_paths(site, erasure, anywhere),
        "tokenizer": relative(site.home.tokenizer_path, anywhere),
    }
    entry, own = settings_in_run(method)
    extra |= own
    how = {
        "entry": entry, "steps": site.size.unlearn_steps, "lr": swept(method).rate, "init": site.home.path / checkpoint["checkpoint"],
        "init_root": checkpoint["root"], "extra": extra,
    }  # fmt: skip
    if rank := adapters_of(site, method):
        from trainer import Layout

        extra["lora"] = {"rank": rank}
        how |= {"world": 1, "layout": Layout()}
    return how


def unlearned_checkpoint(
    site: "Site", tokens: "Result", target: "Result", plan: "Result", training_plan: "Result", erasure: "Result", checkpoint: "Result",
    run: Launch,
) -> Made:  # fmt: skip
    """Run the batch's method: from the released model, or, for exact, from scratch without the records."""
    if none := skipped(erasure):
        return none
    method = method_of(site, erasure)
    refuse_others(site, method)
    if site.config.training.shards > 1:
        seed = plan["seeds"]["train" if method == SHARDED else "audit"]
        values = train_ensemble(
            site, tokens, target, plan, training_plan, run, seed=seed,
            excluded=site.home.path / erasure["excluded"], before=checkpoint if method == SHARDED else None,
        )  # fmt: skip
        _enter_all(site, erasure, "unlearned")
        name = "sharded retraining" if method == SHARDED else method
        return values["root"], values | {"method": name, "method_name": method, "skipped": ""}
    share = swept(method).recipe.get("neighbours", "0")
    repeats = (
        retained_mixture(site, tokens, training_plan, erasure, share) if float(share) else None
    )
    job = model_job(
        site, plan, training_plan, kind="unlearn", seed=plan["seeds"]["unlearn"], excluded=site.home.path / erasure["excluded"],
        repeats=repeats, **_how(site, erasure, checkpoint, method),
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "test_digest")
    started(site, directory, plan)
    values = finished(site, directory, run(directory, job.world))
    _enter_all(site, erasure, "unlearned")
    name = "NPO with a retain term" if method == "npo" else method
    rank = adapters_of(site, method)
    name += f", adapters of rank {rank}" if rank else ""
    return values["root"], values | {"method": name, "method_name": method, "skipped": ""}


def _sealed_paths(site: "Site", erasure: "Result", anywhere: Path) -> dict[str, str]:
    folder = site.home.erasure / erasure["batch"]
    if not (folder / "key").exists():
        raise RequestError(
            f"requests {', '.join(erasure['requests'])} are shredded: their text and its key are destroyed, so that nothing can be "
            "unlearned or audited any more; the audit of before stands in the ledger"
        )
    return {
        "file": relative(folder / "sealed", anywhere),
        "key_file": relative(folder / "key", anywhere),
    }


def audit_inputs(site: "Site", erasure: "Result", models: Mapping[str, "Result"]) -> dict[str, Any]:
    """What the audit depends on."""
    roots = {name: model.data_version for name, model in models.items()}
    return {
        "models": roots, "lookalikes": lookalikes_digest(site), "batch": erasure["batch"], "attack_steps": list(site.size.attack_steps),
        "secondary": site.size.secondary, "size": site.size.name, "demonstrations": site.config.audit.demonstrations, **engineering_settings(site.size),
    }  # fmt: skip


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
        "tokenizer": relative(site.home.tokenizer_path, anywhere), "derived_subgroups": True,
        **_attacks(site), **engineering_settings(site.size),
        "ledger": _known(site, [models["original"]["root"], models["unlearned"]["root"], *(gold["root"] for gold in models["gold"]["golds"])]),
    }  # fmt: skip
    if (lookalikes := lookalikes_of(site)) is not None:
        extra["lookalikes"] = {"file": relative(lookalikes, anywhere)}
    job = Job(
        kind="attack", entry="unlearning.audit:run", network=site.size.model, steps=0, seed=plan["seeds"]["audit"], extra=extra,
        prompts=lookalikes_digest(site),
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "test_digest")
    started(site, directory, plan)
    try:
        write_atomic(retained, record_lines(retained_records(site, corpus, erasure)), 0o600)
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
        "method": models["unlearned"]["method_name"],
        "versions": versions_of(directory),
    }
    entries["audit"] = enter(site, "audit", body)
    files = [f"runs/{directory.name}/{name}" for name in ("audit.json", "rows.parquet", "plan.json")]  # fmt: skip
    files += erasure_receipts(site, corpus, erasure, body, entries)
    return published(site, corpus, erasure, plan, models, body["audit"], {
        "files": files, "run": directory.name, "verdict": audit["verdict"], "entry": entries["audit"], "plan_digest": plan_digest, "people": erasure["people"], "batch": erasure["batch"],
        "gold_seeds": len(models["gold"]["golds"]), "method": models["unlearned"]["method"], "skipped": "",
        "memorised": audit["description"]["memorisation"]["memory"],
    })  # fmt: skip


def _attacks(site: "Site") -> dict[str, Any]:
    """Limits of the adversary: the size's, and a configured number of lines, which is tried beside those that every audit tries."""
    attacks = {"fine_tune_steps": list(site.size.attack_steps)} | _repertoire(site.size.secondary)
    if lines := site.config.audit.demonstrations:
        attacks |= {"demonstrations": lines}
    return {"attacks": attacks, "calibrate": True}


def _repertoire(name: str) -> dict[str, Any]:
    """The size's secondary attacks as an audit's settings; nothing for none."""
    from unlearning.repertoire import NAMED, Repertoire

    chosen = NAMED[name]
    return {} if chosen == Repertoire() else {"repertoire": json.loads(json.dumps(asdict(chosen)))}


def _known(site: "Site", roots: Sequence[str]) -> list[str]:
    """Those of the models' roots that a window in the ledger ends with, or ensembles whose every constituent is one of these."""
    entries = list(open_ledger(site).entries())
    windows = (one["body"]["windows"] for one in entries if one["kind"] == "windows")
    ended = {window["state_digest"] for some in windows for window in some}
    made = (one["body"] for one in entries if one["kind"] == "ensemble" and one["body"]["state"] == "made")  # fmt: skip
    ended |= {body["ensemble"] for body in made if {one["root"] for one in body["constituents"]} <= ended}  # fmt: skip
    return sorted(ended & set(roots))


def shredding_inputs(site: "Site", erasure: "Result", audit: "Result") -> dict[str, Any]:
    """What finishing depends on: the batch, its verdict, who asked for it, and the day."""
    from pipelines.erasure.batches import groups, today
    from pipelines.erasure.finishing import waiting

    waits = sorted(waiting(site, group) for group in groups(site))
    late = any(group.overdue(today()) for group in groups(site))
    return {"batch": erasure["batch"], "verdict": audit.data_version, "waits": waits, "late": late}


def shredding(site: "Site") -> Made:
    """Finish every request whose time has come; say of the others why they wait."""
    done = carry_on(site)
    open_now = [[one.id, one.state, one.note] for one in pending(site.home)]
    finished = [
        {"requests": list(one.requests), "records": one.records, "release": one.release}
        for one in done
    ]
    return digest_of([finished, open_now]), {
        "files": [], "finished": finished, "open": open_now, "removed": [dict(one.stores) for one in done],
    }  # fmt: skip
