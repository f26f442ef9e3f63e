"""Steps of the corpus group: observe the inbox, publish a version, cluster, tokenize, split the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.requests import load, matching, pending
from pipelines.runs import digest_of
from pipelines.steps import buyers, foundation
from pipelines.steps.ledger import corpus_keys
from pipelines.steps.tables import records, write_table
from provenance import keyed, write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from pipelines.storage.deliveries import Delivery
    from pipelines.storage.intake import Intake

Made = tuple[str, Mapping[str, Any]]

SHARD_LEAVES = 1 << 12


@dataclass(frozen=True, slots=True)
class Seen:
    """The inbox as it was looked at."""

    files: "list[Delivery]"
    inputs: Mapping[str, Any]
    """What the asset's key is made of."""


def observe(site: "Site") -> Seen:
    """Look at every file of the inbox; the default corpus is delivered first where there is nothing.

    Raises:
        IntakeError: A user's inbox is missing or empty; says what to do.
    """
    from pipelines.erasure.finishing import carry_on
    from pipelines.storage.deliveries import scan

    carry_on(site)  # what a killed run left half finished, and what has passed its deadline
    if site.demo:
        from pipelines.storage.demo import seed_demo

        amount = "tiny" if site.size.name == "tiny" else "all"
        marker = site.inbox / ".demo"
        with site.home.lock("inbox"):
            before = marker.read_text() if marker.exists() else ""
            if before not in (
                "all",
                amount,
            ):  # a larger size delivers more; nothing is ever taken back
                seed_demo(site.home, site.size.name)
                write_atomic(marker, amount.encode())
    files = scan(site.inbox, corpus_keys(site).k_file)
    return Seen(files, {"inbox": content_digest(files)})


def content_digest(files: "list[Delivery]") -> str:
    """Name of an inbox by its content: digest over every file's label and keyed digest."""
    return digest_of([[file.label, file.digest.hex()] for file in files])


def deliveries(seen: Seen) -> Made:
    """What was delivered, per owner."""
    per_owner: dict[str, list[int]] = {}
    for file in seen.files:
        counts = per_owner.setdefault(file.owner or "(misplaced)", [0, 0])
        counts[0] += 1
        counts[1] += file.size
    return seen.inputs["inbox"], {
        "num_files": len(seen.files), "num_owners": len(per_owner), "bytes": sum(file.size for file in seen.files),
        "per_owner": [[owner, *counts] for owner, counts in sorted(per_owner.items())],
    }  # fmt: skip


def corpus_inputs(site: "Site") -> dict[str, Any]:
    """What the corpus version depends on besides the deliveries."""
    document = site.config.document()
    target = site.config.require_target()
    owners = {  # who belongs to which legal entity, and what may be sold, are matters of payment
        owner: {name: value for name, value in entry.items() if name not in ("entity", "resell")}
        for owner, entry in document.get("owners", {}).items()
    }
    path = site.home.path / target.path if target.path else None
    return {
        "intake": document["intake"], "owners": owners, "target": document["target"],
        "target_file": sha256(path.read_bytes()).hexdigest() if path and path.is_file() else "none",
        "suppressed": sha256(site.home.suppression_path.read_bytes()).hexdigest() if site.home.suppression_path.exists() else "none",
    }  # fmt: skip


def corpus(site: "Site", seen: "Result") -> Made:
    """Take in the inbox, stage a version on the last one, verify it, then move HEAD.

    Records of an erasure request stay in the version that their audit rests on, but never in HEAD, and never in a version
    that is made after their suspension.

    Args:
        site: The open home.
        seen: The `deliveries` that the result is kept under; if the inbox is another by now, the next run looks again.
    """
    from pipelines.storage.intake import read_deliveries, read_target
    from pipelines.storage.suppression import SuppressionList
    from pipelines.storage.versions import Versions

    keys = corpus_keys(site)
    target = site.config.require_target()
    held: Any = None
    if target.path:
        held = read_target(
            site.home.path / target.path, config=site.config, keys=keys, scratch=site.home.staging
        )
    suppression = SuppressionList(site.home.suppression_path, keys)
    found = read_deliveries(
        site.inbox, config=site.config, keys=keys, suppression=suppression, scratch=site.home.staging,
        target_fingerprints=frozenset(held["fingerprint"]) if held is not None else frozenset(),
    )  # fmt: skip
    held = found.held_out if held is None else held
    _refuse_held_out_content(site, found)
    versions = Versions(site.home, keys)
    before = lineage(site)
    gone = suspended_ids(site)
    fresh = (
        found.records.filter(~found.records["record_id"].is_in(list(gone)))
        if gone
        else found.records
    )
    version = _without_withdrawn(site, versions, versions.stage(fresh, before))
    if before is not None and version != before:
        version = _without(versions, version, gone)
    versions.verify(version)
    head = _without(versions, version, gone)
    versions.verify(head)
    with site.home.lock("head"):
        versions.move_head(head, expected=versions.head())
        write_atomic(site.home.path / "LINEAGE", version.encode())
    quarantine = write_table(site.home.table("quarantine"), found.quarantine)
    write_table(site.home.table("duplicates"), found.duplicates)
    held_path = site.home.target / "held_out.parquet"
    write_table(held_path, held)
    held_path.chmod(0o600)
    held_digest = keyed(keys.k_file, b"".join(sorted(held["record_id"]))).hex()
    manifest = versions.manifest(version)
    read = digest_of([[file.delivery, file.digest] for file in found.files])
    counts = {
        name: getattr(found.counts, name)
        for name in ("received", "accepted", "held_out", "quarantined", "duplicates")
    }
    return version, {
        "files": [f"versions/{version}/manifest.json", "tables/quarantine.parquet"],
        "version": version, "parent": manifest.parent, "settled": read == seen.data_version, "size": manifest.size, "live": manifest.live, "head": head,
        "record_root": manifest.record_root, "sparse_root": manifest.sparse_root, "owners": dict(manifest.owners), "counts": counts,
        "quarantine_digest": quarantine, "target_digest": held_digest,
        "reasons": dict(found.quarantine.group_by("reason").len().sort("reason").iter_rows()),
    }  # fmt: skip


def lineage(site: "Site") -> str | None:
    """The version that the next one builds on: the last that was made, not HEAD, which lacks suspended records."""
    path = site.home.path / "LINEAGE"
    return path.read_text().strip() if path.exists() else None


def suspended_ids(site: "Site") -> set[bytes]:
    """Record ids of all erasures beyond `received`, as their batches list them."""
    if not any(request.state != "received" for request in pending(site.home)):
        return set()
    lists = site.home.erasure.glob("*/excluded.txt")
    return {bytes.fromhex(line) for path in lists for line in path.read_text().split()}


def _refuse_held_out_content(site: "Site", found: "Intake") -> None:
    """Stop before content of the frozen target enters the lineage, which only grows.

    Raises:
        IntakeError: Says how to go on.
    """
    from pipelines.storage.errors import IntakeError
    from pipelines.storage.target import load_target

    if (site.home.target / "target.json").exists():
        held = load_target(site.home).fingerprints
        inside = int(found.records["fingerprint"].is_in(list(held)).sum())
        if inside:
            raise IntakeError(
                f"{inside} delivered records are in the held-out target, which was split once and is frozen; set [target] since "
                "in dataworth.toml back to what it was, or take these records out of the inbox"
            )


def _without_withdrawn(site: "Site", versions: Any, version: str) -> str:
    """The version without what its owners withdrew; nothing that is made from now on sees it."""
    requests = [request for request in load(site.home) if request.kind == "withdraw"]
    if not requests:
        return version
    frame = versions.read(version, ["index", "record_id", "owner", "source"])
    return _without(versions, version, set(matching(frame, requests, required=False)["record_id"]))


def _without(versions: Any, version: str, gone: set[bytes]) -> str:
    """The version without those of the records that are live in it."""
    live = gone & set(versions.read(version, ["record_id"])["record_id"]) if gone else set()
    return versions.tombstone(version, sorted(live)) if live else version


def quarantine(corpus: "Result") -> Made:
    """The table that the corpus step wrote, as an asset of its own."""
    rows = sum(corpus["reasons"].values())
    return corpus["quarantine_digest"], {
        "files": ["tables/quarantine.parquet"],
        "rows": rows,
        "reasons": corpus["reasons"],
    }


def clusters(site: "Site", corpus: "Result") -> Made:
    """Exact duplicates by fingerprint, near-duplicates by MinHash."""
    import polars as pl

    from valuation import cluster

    frame = records(site, corpus["version"], "record_id", "owner", "fingerprint", "text")
    found = cluster(frame["fingerprint"].to_list(), frame["text"], seed=0)
    table = frame.select("record_id", "owner").with_columns(
        row=pl.int_range(len(frame), dtype=pl.Int64), cluster=pl.Series(found.cluster_N),
        kind=pl.Series(found.kind_N).replace_strict({0: "single", 1: "exact", 2: "near"}, return_dtype=pl.String),
        similarity=pl.Series(found.similarity_N),
    )  # fmt: skip
    digest = write_table(site.home.table("clusters"), table)
    return digest, {
        "files": ["tables/clusters.parquet"], "version": corpus["version"], "records": len(table), "clusters": int(table["cluster"].n_unique()),
        "exact": int((table["kind"] == "exact").sum()), "near": int((table["kind"] == "near").sum()),
    }  # fmt: skip


def tokens(site: "Site", corpus: "Result") -> Made:
    """Train the lineage's tokenizer once, or take that of the base model; then write the version's shards."""
    from pipelines.storage.tokens import (
        load_tokenizer,
        train_tokenizer,
        training_texts,
        write_version_tokens,
    )
    from pipelines.storage.versions import Versions

    versions = Versions(site.home, corpus_keys(site))
    version, path = corpus["version"], site.home.tokenizer_path
    with site.home.lock("tokenizer"):
        foundation.adopt_tokenizer(site)
        if path.exists():
            tokenizer = load_tokenizer(path)
        else:
            tokenizer = train_tokenizer(
                training_texts(versions, version), site.size.vocab_size, path
            )
    folder = site.home.tokens / version
    digest = write_version_tokens(versions, version, tokenizer, folder)
    from trainer import TokenStore

    store = TokenStore.open(folder, digest)
    texts = records(site, version, "text")["text"]
    relative = str(folder.relative_to(site.home.path))
    return digest, {
        "files": [f"{relative}/tokens.json", str(path.relative_to(site.home.path))], "folder": relative, "digest": digest,
        "corpus_version": version, "record_root": corpus["record_root"], "tokenizer_digest": tokenizer.digest, "vocab_size": tokenizer.vocab_size,
        "tokens": int(store.lengths_N.sum()), "bytes": int(texts.str.len_bytes().sum()), "shards": -(-corpus["size"] // SHARD_LEAVES),
        "shard_leaves": SHARD_LEAVES,
    }  # fmt: skip


def target(site: "Site", corpus: "Result", tokens: "Result") -> Made:
    """Split the held-out records once into value, test and a sealed confirmation part."""
    import polars as pl

    from pipelines.storage.records import SCHEMA
    from pipelines.storage.target import CONFIRM, TEST, VALUE, split_target
    from pipelines.storage.tokens import load_tokenizer
    from trainer import TokenStore

    path = site.home.target / "held_out.parquet"
    held = pl.read_parquet(path) if path.exists() else pl.DataFrame(schema=SCHEMA)
    tokenizer = load_tokenizer(site.home.tokenizer_path, tokens["tokenizer_digest"])
    inside = records(site, corpus["version"], "fingerprint")["fingerprint"]
    found = split_target(site.home, corpus_keys(site), held, tokenizer, inside)
    path.unlink(
        missing_ok=True
    )  # it holds the confirmation part in the clear, which is sealed from now on
    others = buyers.targets(site, corpus, tokenizer)
    values: dict[str, Any] = {
        "files": [
            "target/target.json",
            "target/target_confirm.sealed",
            *(f"{made['folder']}.json" for made in others.get("buyers", {}).values()),
        ],
        "digest": found.digest,
        **others,
    }
    for short, name in (("value", VALUE), ("test", TEST)):
        store = TokenStore.open(site.home.target / name, found.token_digests[name])
        values |= {
            f"{short}_folder": f"target/{name}", f"{short}_digest": found.token_digests[name],
            f"{short}_records": found.num_records[name], f"{short}_tokens": int(store.lengths_N.sum()),
        }  # fmt: skip
    sealed = (site.home.target / "target_confirm.sealed").read_bytes()
    values |= {
        "confirm_digest": sha256(sealed).hexdigest(),
        "confirm_records": found.num_records[CONFIRM],
        "confirm_tokens": -1,
    }
    return found.digest, values
