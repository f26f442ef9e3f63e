"""Steps of the provenance group: commitment, the plan hashed before training, receipts."""

import json
import secrets
from collections.abc import Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.results import latest
from pipelines.runs import digest_of
from pipelines.sizes import SIZES
from pipelines.steps import foundation
from pipelines.steps.buyers import names_in, seen_by, table_of
from pipelines.steps.ledger import corpus_keys, enter, now, open_ledger, verifier_key
from pipelines.steps.pricing import committed_values, payout_tree, value_tree
from pipelines.steps.tables import records
from provenance import (
    CorpusState,
    MerkleTree,
    ReceiptOwner,
    ReceiptRecord,
    SumTree,
    build_receipt,
    canonical_bytes,
    chainpoint_tree,
    commit,
    issue_receipts,
    jcs,
    keyed,
    sum_path_of,
    to_chainpoint_v2,
    value_proof,
    write_atomic,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pipelines.results import Result
    from pipelines.site import Site
    from provenance import IssuedReceipt

Made = tuple[str, Mapping[str, Any]]

PRIMARY_METRIC = "loss on target_test, nats per token"


def corpus_state(site: "Site", version: str) -> CorpusState:
    """Roots of a version as receipts and the ledger name them."""
    from pipelines.storage.versions import Versions

    manifest = Versions(site.home, corpus_keys(site)).manifest(version)
    return CorpusState(
        version,
        bytes.fromhex(manifest.record_root),
        manifest.size,
        bytes.fromhex(manifest.sparse_root),
    )


def commitment(site: "Site", corpus: "Result", tokens: "Result") -> Made:
    """Enter the version's roots in the ledger, beside the digest of its token shards."""
    state = corpus_state(site, corpus["version"])
    index = enter(site, "corpus", state.body())
    shards = _enter_tokens(site, corpus, tokens)
    ledger = open_ledger(site)
    return digest_of(state.body()), {
        "files": ["ledger/checkpoint"], "version": corpus["version"], "record_root": state.record_root.hex(), "size": state.size,
        "sparse_root": state.sparse_root.hex(), "entry": index, "tokens_entry": shards, "ledger_size": ledger.size,
        "vkey": verifier_key(site), "demo": corpus_keys(site).is_demo,
    }  # fmt: skip


def _enter_tokens(site: "Site", corpus: "Result", tokens: "Result") -> int:
    body = {
        "corpus_version": corpus["version"], "tokens": tokens["digest"], "tokenizer": tokens["tokenizer_digest"],
        "shard_leaves": tokens["shard_leaves"],
    }  # fmt: skip
    return enter(site, "tokens", body)


def plan_inputs(site: "Site", commitment: "Result", target: "Result") -> dict[str, Any]:
    """What the evaluation plan depends on; the number of gold models only where another than the size's is asked for."""
    size = site.size
    asked = {} if size.gold_seeds == SIZES[size.name].gold_seeds else {"gold_models": size.gold_seeds}  # fmt: skip
    return {
        "commitment": commitment.data_version,
        "target": target.data_version,
        "size": size.name,
        **foundation.base_inputs(site),
        **asked,
    }


def evaluation_plan(site: "Site", commitment: "Result", target: "Result") -> Made:
    """Write the plan with its seeds and enter its digest before any training.

    The seeds of a user's corpus are `H(ledger checkpoint || nonce)`, so that nobody can choose them after seeing the data;
    the demo corpus fixes them, so that its numbers can be reproduced.
    """
    started_from = foundation.checked(site, commitment["version"])
    ledger = open_ledger(site)
    if commitment["demo"]:
        nonce, anchor, rule = (
            "",
            "",
            "fixed by the recipe, so that the default corpus gives the same numbers everywhere",
        )
    else:
        nonce, anchor = _drawn_before(site, commitment, target, started_from) or (
            secrets.token_hex(32),
            sha256(ledger.checkpoint).hexdigest(),
        )
        rule = "SHA-256(ledger checkpoint digest || nonce || name), first 48 bits"

    def seed(name: str) -> int:
        return int.from_bytes(sha256(f"{anchor}|{nonce}|{name}".encode()).digest()[:6])

    # Below 300 steps a model has not converged enough for a demanding bar; the bar is written down before training either way.
    threshold = 500 if site.size.steps >= 300 else 0
    plan = {
        "format": 1,
        "decision": "release the checkpoint, or keep the previous champion",
        "baseline": "unigram frequencies of the training shards, add-one smoothing",
        "primary_metric": PRIMARY_METRIC,
        "better": "lower",
        "threshold_millinats": threshold,
        "threshold": "the checkpoint's loss is at least threshold_millinats / 1000 below the baseline's",
        "refutes": "a loss above the baseline's: the corpus taught the model nothing about this target",
        "abort": "a loss that is not finite stops the run with exit code 4; nothing is released",
        "confirmation": "target_confirm is sealed; one opening per plan, with a ledger entry",
        "target": {
            name: target[name] for name in ("value_digest", "test_digest", "confirm_digest")
        },
        "corpus_version": commitment["version"],
        "size": site.size.name,
        "seeds": {
            name: seed(name)
            for name in ("train", "proxy", "orders", "unlearn", "audit", "gold-2", "gold-3")
        }
        | {
            name: seed(name)
            for name in (f"proxy-{number}" for number in range(2, site.size.value_seeds + 1))
        },
        "seed_rule": rule,
        "values": "all coalitions of lots by seeds.proxy; after a delivery, lots, seed and share of tokens are those of the full computation that is gone on "
        "from, which the entry of the values names under update",
        "nonce": nonce,
        "ledger_checkpoint": anchor,
        "audit": {
            "margins": "by number of forgotten people: 16: 0.15, 64: 0.05, 100: 0.04, 300: 0.02",
            "gold_seeds": site.size.gold_seeds,
        },
        **started_from,
    }
    data = jcs(plan)
    digest = sha256(data).hexdigest()
    folder = site.home.path / "plans"
    folder.mkdir(exist_ok=True)
    write_atomic(folder / f"{digest}.json", data)
    named = {"base": started_from["base"]["root"]} if started_from else {}
    entry = enter(site, "plan", {"plan": digest, "corpus_version": commitment["version"], **named})
    return digest, {
        "files": [f"plans/{digest}.json"], "digest": digest, "entry": entry, "seeds": plan["seeds"], "seed_rule": rule,
        "threshold_millinats": threshold, "metric": PRIMARY_METRIC, "decision": plan["decision"], "baseline": plan["baseline"], **started_from,
    }  # fmt: skip


def _drawn_before(
    site: "Site", commitment: "Result", target: "Result", base: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Nonce and checkpoint digest of the plan before, where only the number of gold models is another: nothing else is made anew, and nobody draws again."""
    before = latest(site.home.results, "evaluation_plan")
    if before is None:
        return None
    body = json.loads((site.home.path / before["files"][0]).read_bytes())
    same = (
        body["corpus_version"] == commitment["version"]
        and body["size"] == site.size.name
        and all(digest == target[name] for name, digest in body["target"].items())
        and body.get("base") == base.get("base")
        and body["audit"]["gold_seeds"] != site.size.gold_seeds
    )
    return (body["nonce"], body["ledger_checkpoint"]) if same else None


def receipts(
    site: "Site",
    corpus: "Result",
    tokens: "Result",
    values: "Result",
    prices: "Result",
    checkpoint: "Result",
) -> Made:
    """One receipt and one tlog-proof per owner, checked before they are written, and one Chainpoint proof."""
    from pipelines.storage.salts import SaltStore
    from pipelines.storage.versions import Versions

    keys = corpus_keys(site)
    version = corpus["version"]
    state = corpus_state(site, version)
    versions = Versions(site.home, keys)
    tree = MerkleTree(versions.leaves(version))
    salts = SaltStore(site.home.salts_path, keys)
    frame = records(site, version, "record_id", "owner", "licence", "text")
    opened: dict[str, list[ReceiptRecord]] = {}
    commitments: list[bytes] = []
    for row in frame.iter_rows(named=True):
        canonical = canonical_bytes(row["text"])
        salt = salts.get(row["record_id"])
        record = ReceiptRecord(
            record_id=row["record_id"], index=row["index"], salt=salt, text_digest=sha256(canonical).digest(), licence=row["licence"],
            path=tree.inclusion_path(row["index"]),
        )  # fmt: skip
        opened.setdefault(row["owner"], []).append(record)
        commitments.append(commit(salt, canonical))
    owners = sorted(opened)
    lean = [
        enter(site, "corpus", state.body()),
        _enter_tokens(site, corpus, tokens),
        checkpoint["start"],
        checkpoint["entry"],
    ]
    windows = {
        owner: _windows_of({record.index // tokens["shard_leaves"] for record in opened[owner]}, checkpoint)
        for owner in owners
    }  # fmt: skip

    def issue(buyer: str) -> "tuple[list[IssuedReceipt], int]":
        """One receipt per owner about what one buyer pays, and the ledger's size after them."""
        valued, priced = seen_by(values, buyer), seen_by(prices, buyer)
        price_of, sum_tree, entries = _payouts(site, priced, keys.k_owner, buyer)
        shown = _values(site, keys.k_owner, buyer)
        built = []
        for owner in owners:
            paid = price_of.get(owner)
            salt = "|".join([version, owner, *([buyer] if buyer else [])])
            built.append(
                build_receipt(
                    ReceiptOwner(
                        owner,
                        keyed(keys.k_owner, owner.encode()),
                        keyed(keys.sealing_key("receipts"), salt.encode()),
                    ),
                    state,
                    opened[owner],
                    values=shown(owner),
                    price={"price_microunits": paid[0], "currency": priced["currency"]}
                    if paid
                    else None,
                    sum_path=sum_path_of(sum_tree, paid[1]) if paid and sum_tree else None,
                    windows=windows[owner],
                )
            )
        with site.home.lock("ledger-enter"):
            ledger = open_ledger(site)
            leaned_on = [*lean[:2], valued["entry"], *entries, *lean[2:]]
            return issue_receipts(ledger, built, leaned_on, now()), ledger.size

    folder = site.home.receipts / version
    folder.mkdir(exist_ok=True, mode=0o700)
    issued, ledger_size = issue("")
    chain = chainpoint_tree(commitments)
    first_of = {
        owner: next(row for row, name in enumerate(frame["owner"]) if name == owner)
        for owner in owners
    }
    files = _write_receipts(site, folder, owners, issued)
    for owner in owners:
        proof = to_chainpoint_v2(chain, first_of[owner])
        write_atomic(folder / f"{owner}.chainpoint.json", json.dumps(proof, indent=1).encode())
        files.append(f"receipts/{version}/{owner}.chainpoint.json")
    others: dict[str, Any] = {}
    for buyer in names_in(prices):
        more, ledger_size = issue(buyer)
        issued += more
        files += _write_receipts(site, receipts_of(site, version, buyer), owners, more)
        others.setdefault("buyers", []).append(buyer)
    body = {
        "size": chain.size,
        "root": chain.root.hex(),
        "binding": chain.binding.hex(),
        "corpus_version": version,
    }
    enter(site, "chainpoint", body)
    return digest_of([sha256(made.receipt).hexdigest() for made in issued]), {
        "files": files, "version": version, "owners": owners, "receipts": len(owners), "ledger_size": ledger_size,
        "chainpoint": body | {"index_of": first_of}, "vkey": verifier_key(site), **others,
    }  # fmt: skip


def receipts_of(site: "Site", version: str, buyer: str) -> "Path":
    """The folder of the receipts about what one buyer pays."""
    folder = site.home.receipts / version
    return folder / "buyers" / buyer if buyer else folder


def _write_receipts(
    site: "Site", folder: "Path", owners: list[str], issued: "list[IssuedReceipt]"
) -> list[str]:
    """Write both files of every owner; their paths in the home."""
    folder.mkdir(exist_ok=True, mode=0o700, parents=True)
    files = []
    for owner, made in zip(owners, issued, strict=True):
        write_atomic(folder / f"{owner}.receipt.json", made.receipt, 0o600)
        write_atomic(folder / f"{owner}.tlog-proof", made.tlog_proof.encode())
        files += [folder / f"{owner}.receipt.json", folder / f"{owner}.tlog-proof"]
    return [str(path.relative_to(site.home.path)) for path in files]


def _windows_of(shards: set[int], checkpoint: "Result") -> list[dict[str, Any]]:
    """The training windows that used one of the shards."""
    return [
        {name: window[name] for name in ("run", "first_step", "last_step", "shards")}
        for window in checkpoint["windows"]
        if shards & set(window["shards"])
    ]


def _values(site: "Site", k_owner: bytes, buyer: str) -> "Callable[[str], list[dict[str, Any]]]":
    """What a receipt shows of an owner's value: its own row and those of the lots it has tokens in, each with its path to the total."""
    import polars as pl

    from valuation.entities import players

    frame = pl.read_parquet(table_of(site, "values", buyer))
    rows, tree = committed_values(frame), value_tree(frame, k_owner)
    valued = latest(site.home.results, "owner_values")
    entity_of = valued.values.get("entity_of", {}) if valued else {}
    lots_of: dict[str, set[str]] = {}
    for lot in valued["groups"] if valued else []:
        for owner in lot["owners"]:
            lots_of.setdefault(owner, set()).add(lot["id"])

    def shown(owner: str) -> list[dict[str, Any]]:
        wanted = {("owner", owner), *(("lot", lot) for lot in lots_of.get(owner, ()))}
        wanted.add(("entity", players([owner], entity_of)[0]))
        return [
            value_proof(row, tree, index)
            for index, row in enumerate(rows)
            if (row["subject_kind"], row["subject_id"]) in wanted
        ]

    return shown


def _payouts(
    site: "Site", prices: "Result", k_owner: bytes, buyer: str
) -> tuple[dict[str, tuple[int, int]], SumTree | None, list[int]]:
    """Price and place in the sum tree per subject, the tree, and the ledger entry that commits to it."""
    import polars as pl

    if prices["skipped"]:
        return {}, None, []
    frame = pl.read_parquet(table_of(site, "prices", buyer))
    tree = payout_tree(frame, k_owner)
    place = {
        row["subject"]: (row["price_microunits"], index)
        for index, row in enumerate(frame.iter_rows(named=True))
    }
    return place, tree, [prices["entry"]]
