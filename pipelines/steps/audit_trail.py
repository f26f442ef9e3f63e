"""What the asset checks recompute from disk: each function returns the problems it found, none when all is well."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.steps import buyers
from pipelines.steps.committed import of_prices
from pipelines.steps.ledger import corpus_keys, key_of, open_ledger, trusted
from pipelines.steps.pricing import price_list
from pipelines.steps.tables import records

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.results import Result
    from pipelines.site import Site


def counts(site: "Site", corpus: "Result") -> list[str]:
    """Received = accepted + held_out + quarantined + duplicates, and the tables hold as many rows as they are said to."""
    import polars as pl

    found = corpus["counts"]
    total = found["accepted"] + found["held_out"] + found["quarantined"] + found["duplicates"]
    problems = []
    if total != found["received"]:
        problems.append(f"received {found['received']}, but the parts add up to {total}")
    for name, count in (("quarantine", found["quarantined"]), ("duplicates", found["duplicates"])):
        rows = len(pl.read_parquet(site.home.table(name)))
        if rows != count:
            problems.append(f"{count} records counted as {name}, the table has {rows} rows")
    return problems


def version(site: "Site", corpus: "Result") -> list[str]:
    """Recompute the corpus version's roots."""
    from pipelines.storage.errors import StorageError
    from pipelines.storage.versions import Versions

    try:
        Versions(site.home, corpus_keys(site)).verify(corpus["version"])
    except StorageError as error:
        return [str(error)]
    return []


def clusters(site: "Site", clusters: "Result", corpus: "Result") -> list[str]:
    """One cluster per live record, leaders first."""
    import polars as pl

    table = pl.read_parquet(site.home.table("clusters"))
    ids = records(site, corpus["version"], "record_id")["record_id"]
    problems = []
    if not table["record_id"].equals(ids):
        problems.append(
            f"expected the {len(ids)} live records in leaf order, got {len(table)} rows of others"
        )
    late = int((table["cluster"] > table["row"]).sum())
    if late:
        problems.append(f"{late} records are in a cluster led by a later record")
    if table["cluster"].n_unique() != clusters["clusters"]:
        problems.append(
            f"expected {clusters['clusters']} clusters, got {table['cluster'].n_unique()}"
        )
    return problems


def tokens(site: "Site", tokens: "Result", corpus: "Result") -> list[str]:
    """Decode every document and compare it with its record."""
    from pipelines.storage.errors import StorageError
    from pipelines.storage.tokens import check_tokens, load_tokenizer
    from pipelines.storage.versions import Versions

    versions = Versions(site.home, corpus_keys(site))
    try:
        tokenizer = load_tokenizer(site.home.tokenizer_path, tokens["tokenizer_digest"])
        check_tokens(
            versions,
            corpus["version"],
            tokenizer,
            site.home.path / tokens["folder"],
            tokens["digest"],
        )
    except (StorageError, ValueError) as error:
        return [str(error)]
    return []


def target(site: "Site", target: "Result", corpus: "Result") -> list[str]:
    """Fingerprints of the target against those of the corpus."""
    from pipelines.storage.buyers import load_buyer_target
    from pipelines.storage.target import load_target

    found = load_target(site.home)
    contents = set(records(site, corpus["version"], "fingerprint")["fingerprint"])
    inside = found.fingerprints & contents
    problems = [f"{len(inside)} records of the corpus are in the target"] if inside else []
    if found.digest != target["digest"]:
        problems.append("the target is not the one that was split")
    for buyer in buyers.names_in(target):
        own = load_buyer_target(site.home, buyer)
        if own is None or own.tokens_digest != target["buyers"][buyer]["digest"]:
            problems.append(f"the target of buyer {buyer} is not the one that was measured on")
        elif inside := own.fingerprints & contents:
            problems.append(
                f"{len(inside)} records of the corpus are in the target of buyer {buyer}"
            )
    return problems


def entropy(site: "Site", tokens: "Result") -> list[str]:
    """Entropy between nothing and uniform."""
    import math

    import polars as pl

    most = (
        math.log2(tokens["vocab_size"]) + 0.1
    )  # the bias correction may pass the bound by a little
    column = pl.read_parquet(site.home.table("owner_entropy"))["entropy_bits_per_token"]
    outside = int(((column < 0) | (column > most)).sum())
    return (
        [f"{outside} owners have an entropy outside 0 .. {most:.2f} bits per token"]
        if outside
        else []
    )


def efficiency(owner_values: "Result") -> list[str]:
    """The law of efficiency, for exact values to rounding."""
    error = owner_values["efficiency_error"]
    return [] if error <= 1e-9 else [f"the values miss V(all) - V(nobody) by {error:.3g} nats"]


def prices(site: "Site", prices: "Result") -> list[str]:
    """Sum to the pool, and tables that the ledger names; of every buyer."""
    told = [_prices(site, prices, "")]
    for buyer in buyers.names_in(prices):
        if buyer in site.config.buyers:
            found = _prices(site, buyers.seen_by(prices, buyer), buyer)
            told.append([f"buyer {buyer}: {problem}" for problem in found])
    return [problem for problems in told for problem in problems]


def _prices(site: "Site", prices: "Result", buyer: str) -> list[str]:
    if prices["skipped"]:
        return []
    import polars as pl

    log = open_ledger(site)
    body = log.entry(prices["entry"])["body"]
    problems = []
    if not _named(site, log.entries(), "prices", body["table"], buyer):
        problems.append("prices.parquet is not the table that the ledger names")
    if not _named(site, log.entries(), "values", body["values"], buyer):
        problems.append("values.parquet is not the table that the prices were made from")
    if problems:
        return problems  # a damaged table may not even be readable
    frame = pl.read_parquet(buyers.table_of(site, "prices", buyer))
    total = int(frame["price_microunits"].sum())
    if total != prices["pool"]:
        problems.append(f"prices add up to {total}, the pool is {prices['pool']}")
    values_now = sha256(buyers.table_of(site, "values", buyer).read_bytes()).hexdigest()
    if values_now == prices["values"]:
        then, rule = of_prices(site, prices, buyer)
        recomputed = price_list(then, prices["unattributed_nano"], buyer, rule)
        assert recomputed is not None, "there is a rule"
        paid = dict(zip(frame["subject"], frame["price_microunits"], strict=True))
        wrong = [
            row.subject for row in recomputed.rows if paid.get(row.subject) != row.price_microunits
        ]
        if wrong:
            problems.append(
                f"the price of {wrong[0]} is not what the rule gives for the committed values"
            )
    return problems


def _named(
    site: "Site", entries: "list[dict[str, Any]]", kind: str, digest: str, buyer: str
) -> bool:
    """Whether a buyer's table on disk is the one of this digest, or one that the ledger named later.

    A run that was stopped between two tables leaves the later one newer than what was made from the one before.
    """
    found = sha256(buyers.table_of(site, kind, buyer).read_bytes()).hexdigest()
    mark = buyers.marked(site, buyer).get("buyer")
    bodies = [entry["body"] for entry in entries if entry["kind"] == kind]
    named = [body["table"] for body in bodies if body.get("buyer") == mark]
    return found in named[named.index(digest) :] if digest in named else False


def ledger(site: "Site", commitment: "Result") -> list[str]:
    """Verify the whole ledger with its public key."""
    try:
        found = open_ledger(site).verify(trusted(site))
    except ValueError as error:
        return [str(error)]
    return (
        []
        if found.size >= commitment["ledger_size"]
        else [f"the ledger shrank to {found.size} entries"]
    )


def receipts(site: "Site", receipts: "Result") -> list[str]:
    """Every receipt and Chainpoint proof, by the verifiers that outsiders use."""
    from provenance import verify_chainpoint_v2

    folder = site.home.receipts / receipts["version"]
    chain = receipts["chainpoint"]
    problems = []
    for owner in receipts["owners"]:
        try:
            _verified(site, folder, owner)
            proof = json.loads((folder / f"{owner}.chainpoint.json").read_bytes())
            verify_chainpoint_v2(
                proof, chain["index_of"][owner], chain["size"], bytes.fromhex(chain["root"])
            )
        except (OSError, ValueError) as error:
            problems.append(f"{owner}: {error}")
    for buyer in receipts.values.get("buyers", ()):
        for owner in receipts["owners"]:
            try:
                _verified(site, folder / "buyers" / buyer, owner)
            except (OSError, ValueError) as error:
                problems.append(f"{owner} for buyer {buyer}: {error}")
    return problems


def _verified(site: "Site", folder: "Path", owner: str) -> None:
    """Nothing, if an owner's receipt in a folder holds; else an error that says why not."""
    from provenance.verify_standalone import verify_receipt

    receipt = json.loads((folder / f"{owner}.receipt.json").read_bytes())
    text = (folder / f"{owner}.tlog-proof").read_text()
    verify_receipt(receipt, text, key_of(site.home.ledger, text))


def checkpoint(site: "Site", checkpoint: "Result") -> list[str]:
    """Every file of the checkpoint is the one that its manifest names, and manifest and root are those in the ledger."""
    from trainer.checkpoint import verify
    from trainer.errors import CheckpointError

    if constituents := checkpoint.values.get("constituents"):
        return _ensemble(site, checkpoint, constituents)
    try:
        found = verify(site.home.path / checkpoint["checkpoint"])
    except CheckpointError as error:
        return [str(error)]
    body = open_ledger(site).entry(checkpoint["entry"])["body"]
    windows = body["windows"]
    manifest = site.home.path / checkpoint["checkpoint"] / "manifest.json"
    problems = []
    if sha256(manifest.read_bytes()).hexdigest() != body["manifest"]:
        problems.append(
            "the checkpoint's manifest, which names its files, is not the one in the ledger"
        )
    if found.root != checkpoint["root"]:
        problems.append(f"expected root {checkpoint['root'][:16]}, got {found.root[:16]}")
    if windows[-1]["state_digest"] != checkpoint["root"]:
        problems.append("the ledger's last window ends in another state than the checkpoint")
    return problems


def _ensemble(site: "Site", made: "Result", constituents: Sequence[Mapping[str, Any]]) -> list[str]:
    """`checkpoint` for each constituent, and the ensemble is the one that the ledger names with exactly these."""
    from pipelines.results import Result
    from unlearning.ensemble import root_of
    from unlearning.errors import UnlearningError

    problems = [
        f"shard {one['shard']}: {problem}"
        for one in constituents
        for problem in checkpoint(site, Result(made.asset, made.key, one["root"], dict(one)))
    ]
    if problems:
        return problems
    try:
        root = root_of(site.home.path / made["checkpoint"])
    except UnlearningError as error:
        return [str(error)]
    body = open_ledger(site).entry(made["entry"])["body"]
    if not root == made["root"] == body["ensemble"]:
        problems.append(f"expected ensemble {body['ensemble'][:16]}, got {root[:16]}")
    if [one["root"] for one in body["constituents"]] != [one["root"] for one in constituents]:
        problems.append("the ledger names other constituents of the ensemble")
    return problems


def phases(site: "Site", checkpoint: "Result") -> list[str]:
    """The phase record of each of the model's runs answers every question, and every phase's check passed."""
    runs = [one["run"] for one in checkpoint.values.get("constituents", ())] or [checkpoint["run"]]
    return [problem for run in runs for problem in _phases_of(site, run)]


def _phases_of(site: "Site", run: str) -> list[str]:
    from trainer.phases import check_phases, failures

    path = site.home.runs / run / "phases.json"
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        return [f"{path.name} cannot be read ({type(error).__name__})"]
    return check_phases(record) or [f"{phase}: {why}" for phase, why in failures(record).items()]


def outputs(site: "Site", *_made: "Result") -> list[str]:
    """Every finished run's files are those that it left; a run that was set aside for that is past."""
    from pipelines.outputs import damage

    folders = [one for one in sorted(site.home.runs.glob("*-*")) if ".damaged-" not in one.name]
    return [problem for folder in folders for problem in damage(folder)]


def model(site: "Site", found: "Result") -> list[str]:
    """`checkpoint` for a model of the audit, which is not there when no request is pending."""
    return [] if found["skipped"] else checkpoint(site, found)


def plan(site: "Site", evaluation: "Result", plan: "Result", checkpoint: "Result") -> list[str]:
    """The plan precedes the run in the ledger and its rule gives the decision."""
    body = json.loads((site.home.path / plan["files"][0]).read_bytes())
    log = open_ledger(site)
    problems = []
    if (
        log.entry(plan["entry"])["body"]["plan"]
        != sha256((site.home.path / plan["files"][0]).read_bytes()).hexdigest()
    ):
        problems.append("the plan file is not the one whose digest is in the ledger")
    if plan["entry"] >= checkpoint["start"]:
        problems.append(
            f"the plan is entry {plan['entry']}, the training began at {checkpoint['start']}"
        )
    entered = log.entry(evaluation["entry"])["body"]
    gain = (entered["baseline_micronats"] - entered["loss_micronats"]) / 1e6
    if abs(gain - evaluation["gain"]) > 2e-6:
        problems.append(
            f"the ledger's evaluation gives a gain of {gain:.6f} nats, the result says {evaluation['gain']:.6f}"
        )
    expected = (
        "promote"
        if evaluation["gain"] * 1000 >= body["threshold_millinats"]
        else "keep the previous champion"
    )
    if evaluation["decision"] != expected:
        problems.append(
            f"the plan's rule gives {expected!r}, the evaluation says {evaluation['decision']!r}"
        )
    return problems


def suspended(site: "Site", erasure: "Result") -> list[str]:
    """No suspended record under HEAD."""
    from pipelines.storage.versions import Versions

    listed = site.home.path / erasure["excluded"]
    gone = (
        {bytes.fromhex(line) for line in listed.read_text().split()} if listed.exists() else set()
    )
    if not gone:  # nobody asked, or it is finished and not even the ids are left
        return []
    head = Versions(site.home, corpus_keys(site)).head()
    left = gone & set(records(site, head, "record_id")["record_id"]) if head else set()
    return [f"{len(left)} suspended records are still in HEAD"] if left else []


def verdict(site: "Site", audit: "Result") -> list[str]:
    """Judge the stored rows again; they and the audit are the ones that the ledger names, with as many gold models as the committed plan."""
    if audit["skipped"]:
        return []
    from unlearning.rows import read_rows
    from unlearning.verdict import contradictions

    folder = site.home.runs / audit["run"]
    data = (folder / "audit.json").read_bytes()
    if sha256(data).hexdigest() != open_ledger(site).entry(audit["entry"])["body"]["audit"]:
        return ["audit.json is not the audit that the ledger names"]
    body = json.loads(data)
    if sha256((folder / "rows.parquet").read_bytes()).hexdigest() != body["rows"]["sha256"]:
        return ["rows.parquet does not hold the rows that the audit was made from"]
    return _gold_models(site, audit, len(body["plan"]["gold"])) + contradictions(
        body, read_rows(folder / "rows.parquet")
    )


def _gold_models(site: "Site", audit: "Result", used: int) -> list[str]:
    """At least as many as the plan names under which the ledger says that the audit began."""
    began = [
        entry["body"]["plan"]
        for entry in open_ledger(site).entries()[: audit["entry"]]
        if entry["kind"] == "run" and entry["body"]["run"] == audit["run"]
    ]
    if not began:
        return [f"the ledger names no plan for {audit['run']} before its audit"]
    data = (site.home.path / f"plans/{began[-1]}.json").read_bytes()
    if sha256(data).hexdigest() != began[-1]:
        return [f"plans/{began[-1]}.json is not the plan that the ledger names"]
    named = json.loads(data)["audit"]["gold_seeds"]
    if used >= named:
        return []
    return [
        f"the audit used {used} gold models, the plan that was committed before it names {named}: set [audit] gold_models = {named} and run again"
    ]


def erasure(site: "Site", erasure: "Result") -> list[str]:
    """`suspended` and `shredded` together."""
    return suspended(site, erasure) + shredded(site)


def shredded(site: "Site") -> list[str]:
    """Every shredded request has its inventory, the one that the ledger names, and no batch folder is left of it."""
    from pipelines.erasure.batches import groups
    from pipelines.erasure.finishing import inventory_path
    from pipelines.requests import load

    named = {
        entry["body"]["request"]: entry["body"]["derivatives"]
        for entry in open_ledger(site).entries()
        if entry["kind"] == "erasure" and entry["body"].get("state") == "shredded"
    }
    left = {one.id for group in groups(site) for one in group.requests}
    problems = []
    for request in load(site.home):
        if request.state != "shredded" or request.kind != "erase":
            continue
        path = inventory_path(site, request.id)
        if request.id in left:
            problems.append(f"request {request.id} is shredded and its sealed batch is still there")
        elif not path.exists() or sha256(path.read_bytes()).hexdigest() != named.get(request.id):
            problems.append(
                f"request {request.id} has no inventory of derivatives that the ledger names"
            )
    return problems


def report(site: "Site", report: "Result", erasure: "Result") -> list[str]:
    """Nothing from outside, no suspended text."""
    import re

    from provenance import unseal

    page = (site.home.path / report["path"]).read_text()
    outside = re.findall(r"""(?:src|href)=["']?(?:https?:)?//[^"' >]+""", page)
    problems = [f"the page points outside: {outside[0]}"] if outside else []
    folder = site.home.erasure / erasure["batch"]
    if (folder / "sealed").exists():
        lines = (
            unseal((folder / "key").read_bytes(), (folder / "sealed").read_bytes())
            .decode()
            .splitlines()
        )
        shown = sum(json.loads(line)["text"] in page for line in lines)
        if shown:
            problems.append(f"the page holds the text of {shown} suspended records")
    return problems
