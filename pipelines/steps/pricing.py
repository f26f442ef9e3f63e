"""Steps that turn values into the published tables: integer nano-nats, then integer micro-units."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.runs import digest_of, versions_of
from pipelines.steps.buyers import marked, names_in, price_inputs, seen_by, table_of, terms_of
from pipelines.steps.increments import facts
from pipelines.steps.ledger import corpus_keys, enter
from pipelines.steps.tables import parquet
from provenance import keyed, parse_json, write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from provenance import SumTree
    from valuation import GroupValues, NanoRow, OwnerValues, PriceList, PriceRule, ValueRow
    from valuation.transfer import Transfer

Made = tuple[str, Mapping[str, Any]]

STUDIED = Path(__file__).parents[1] / "studies" / "transfer.json"
"""What the study owners-transfer-sizes measured of the proxies of this package's sizes."""


def value_table(
    site: "Site",
    corpus: "Result",
    tokens: "Result",
    influence: "Result",
    owner_values: "Result",
    plan: "Result",
) -> Made:
    """One table of every value: records in-run and by influence, lots and owners by Shapley."""
    import polars as pl

    from valuation import ValueRow, to_nano, values_frame

    group_rows, derived = _lots_and_owners(owner_values, "target_value")
    credit = pl.read_parquet(site.home.path / influence["files"][0])
    in_run = [
        ValueRow(
            subject_kind="record", subject_id=row["record_id"].hex(), method=f"inrun.{influence['form']}", target="target_value", unit="nat",
            value=row["credit"], n=row["steps_seen"],
        )
        for row in credit.iter_rows(named=True)
    ]  # fmt: skip
    scored = _influence_rows(site, tokens, influence)
    record_rows = to_nano(in_run)
    rows = [*group_rows, *derived.rows, *derived.entities, *record_rows]
    plain, at_checkpoint = (
        values_frame(part, plan_digest=plan["digest"], corpus_version=corpus["version"], checkpoint_root=root)
        for part, root in ((rows, "none"), (to_nano(scored), influence["checkpoint_root"]))
    )  # fmt: skip
    frame = pl.concat([plain, at_checkpoint])
    made = _enter_values(site, "", frame, owner_values, plan, corpus["version"])
    values = {
        "files": ["tables/values.parquet"], **made, "plan": plan["digest"],
        "corpus_version": corpus["version"], "group_sum_nano": sum(row.value_nano for row in group_rows),
        "unattributed_nano": dict(derived.unattributed_nano),
    }  # fmt: skip
    others: dict[str, Any] = {}
    for buyer in names_in(owner_values):
        seen = seen_by(owner_values, buyer)
        group_rows, derived = _lots_and_owners(seen, f"buyer:{buyer}")
        frame = values_frame(
            [*group_rows, *derived.rows, *derived.entities], plan_digest=plan["digest"], corpus_version=corpus["version"],
            checkpoint_root="none",
        )  # fmt: skip
        others[buyer] = _enter_values(site, buyer, frame, seen, plan, corpus["version"]) | {
            "unattributed_nano": dict(derived.unattributed_nano)
        }
    if not others:
        return made["digest"], values
    files = [f"tables/{table_of(site, 'values', buyer).name}" for buyer in others]
    digests = [made["digest"], *(one["digest"] for one in others.values())]
    return digest_of(digests), values | {"buyers": others, "files": [*values["files"], *files]}


def _lots_and_owners(
    owner_values: "Result", target: str
) -> "tuple[tuple[NanoRow, ...], OwnerValues]":
    """Published integers of lots, and of the owners and entities that hold them."""
    from valuation import ValueRow, to_nano

    groups = [
        ValueRow(
            subject_kind="lot", subject_id=group["id"], method=owner_values["method"], target=target, unit="nat",
            value=group["value"], se=group["se"], ci_low=group["low"], ci_high=group["high"], n=owner_values["target_records"],
        )
        for group in owner_values["groups"]
    ]  # fmt: skip
    rows = to_nano(groups)
    return rows, owners_of(owner_values, rows)


def _enter_values(
    site: "Site", buyer: str, frame: Any, owner_values: "Result", plan: "Result", version: str
) -> dict[str, Any]:
    """Enter a buyer's value table, then write it: a run that is killed in between leaves no table that the ledger doesn't name."""
    from pipelines.steps.committed import keep
    from provenance import values_body

    data = parquet(frame)
    digest = sha256(data).hexdigest()
    body = values_body(value_tree(frame, corpus_keys(site).k_owner)) | {
        "table": digest, "utilities": owner_values.data_version, "rows": len(frame), "plan": plan["digest"], "corpus_version": version,
        "settings": keep(site), "versions": versions_of(site.home.runs / owner_values["run"]), **proxy_facts(site, owner_values["run"]), **facts(owner_values), **marked(site, buyer),
    }  # fmt: skip
    entry = enter(site, "values", body)
    write_atomic(table_of(site, "values", buyer), data)
    return {"rows": len(frame), "entry": entry, "digest": digest}


def proxy_facts(site: "Site", run: str) -> dict[str, Any]:
    """What values were measured on, and what is known of how that compares with a larger model.

    Args:
        site: The open home.
        run: Name of the run that trained the coalitions.

    Returns:
        `proxy` (with the seeds of its trainings, and what errors cover) and `transfer` in words, `proxy_digest`, `seeds`, `base` where coalitions went on
        from one (the root of its state), and, where it was measured, the record as `transfer_record`.

    Raises:
        EvaluationError: The configured transfer file can't be read.
    """
    from valuation.seeds import spread_words
    from valuation.transfer import NOT_MEASURED, proxy_digest

    document = parse_json((site.home.runs / run / "run.json").read_bytes())
    digest, model = proxy_digest(document), document["config"]["model"]
    found = _transfers(site).get(digest)
    base = {"base": document["init_root"]} if document["init_root"] != "none" else {}
    seeds = [document["seed"], *document["config"]["extra"].get("seeds", ())]
    said = (
        f"of size {document['recipe']}: {model['num_layers']} layers of width {model['dim']}, {document['steps']} steps, "
        f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))} (errors {spread_words(len(seeds), base=bool(base))}), settings {digest}"
        + (f", on top of the base model with root {base['base']}" if base else "")
    )
    facts = {
        **base,
        "proxy": said,
        "seeds": seeds,
        "proxy_digest": digest,
        "transfer": found.sentence if found else NOT_MEASURED,
    }
    return facts | ({"transfer_record": asdict(found)} if found else {})


def transfer_inputs(site: "Site") -> dict[str, Any]:
    """What the statement about the proxy depends on beside the values.

    Raises:
        EvaluationError: The transfer file can't be read.
    """
    return {"transfer": {proxy: record.sentence for proxy, record in _transfers(site).items()}}


def _transfers(site: "Site") -> "dict[str, Transfer]":
    """What was measured of proxies: the configured file, else the one that the package holds for its own sizes."""
    from valuation.transfer import read_transfers

    path = site.config.pricing.transfer
    return read_transfers(site.home.path / path if path else STUDIED)


def _influence_rows(site: "Site", tokens: "Result", influence: "Result") -> "list[ValueRow]":
    """Influence of single records with intervals, once the scores are found to be of these data and these weights.

    Raises:
        GradientError: the scores are of other data, another tokenizer, other queries or another checkpoint.
    """
    import polars as pl

    from valuation import ValueRow
    from valuation.influence import Binding, Scores

    binding = {
        **influence["binding"], "data_root": tokens["record_root"], "tokenizer_digest": tokens["tokenizer_digest"],
        "checkpoint_root": influence["checkpoint_root"],
    }  # fmt: skip
    Scores.load(site.home.runs / influence["scores_run"] / "scores", Binding(**binding))
    table = pl.read_parquet(site.home.path / influence["files"][1])
    return [
        ValueRow(
            subject_kind="record", subject_id=row["record_id"].hex(), method=influence["method"], target="target_value", unit="nat",
            value=row["value"], se=row["se"], ci_low=row["ci_low"], ci_high=row["ci_high"], n=influence["queries"],
        )
        for row in table.iter_rows(named=True)
    ]  # fmt: skip


def owners_of(owner_values: "Result", lot_rows: Any) -> "OwnerValues":
    """Owners' values: their tokens in each lot, with the error of the lots they hold; and entities', where those are paid."""
    import numpy as np

    from valuation import values_of_lots
    from valuation.entities import Holdings, values_of_entities

    owners = owner_values["owners"]
    names = [owner["id"] for owner in owners]
    tokens_OK = np.array([owner["tokens"] for owner in owners])
    records_O = np.array([owner["records"] for owner in owners])
    errors = _errors_of(owner_values, owners)
    if "entities" not in owner_values.values:
        return values_of_lots(lot_rows, names, tokens_OK, records_O=records_O, errors=errors)
    return values_of_entities(
        lot_rows, Holdings(tuple(names), tokens_OK, records_O), owner_values["entity_of"], errors=errors,
        player_errors=_errors_of(owner_values, owner_values["entities"]),
    )  # fmt: skip


def _errors_of(owner_values: "Result", rows: Any) -> "GroupValues":
    import numpy as np

    from valuation import GroupValues
    from valuation.intervals import LEVEL

    column = {
        name: np.array([row[name] for row in rows]) for name in ("value", "se", "low", "high")
    }
    return GroupValues(
        values_n=column["value"], se_n=column["se"], ci_low_n=column["low"], ci_high_n=column["high"],
        total=float(column["value"].sum()), total_se=float("nan"), num_target_records=owner_values["target_records"],
        level=LEVEL, method=owner_values["method"],
    )  # fmt: skip


def pricing_inputs(site: "Site") -> dict[str, Any]:
    """The part of the configuration that prices depend on."""
    pricing = site.config.pricing
    pool = pricing.pool_microunits
    return {
        "pool": -1 if pool is None else pool,
        "currency": pricing.currency,
        "reserve": pricing.reserve_microunits,
        "rate": pricing.rate_microunits,
        "floor": pricing.floor_microunits,
        "negative": pricing.negative,
        "basis": pricing.basis,
        **entity_inputs(site),
        **price_inputs(site),
    }


def entity_inputs(site: "Site") -> dict[str, Any]:
    """Who belongs to which legal entity, where that decides who is paid: by pseudonyms; nothing otherwise."""
    if site.config.pricing.split != "entity":
        return {}
    k_owner = corpus_keys(site).k_owner
    members = {
        keyed(k_owner, owner.encode()).hex(): keyed(k_owner, f"entity:{entity}".encode()).hex()
        for owner, entity in site.config.entity_of.items()
    }
    return {"split": "entity", "entities": digest_of(members)}


def rule_of(site: "Site", buyer: str = "") -> "PriceRule | None":
    """A buyer's configured price rule, or None without a pool."""
    from valuation import PriceRule

    terms = terms_of(site, buyer)
    if terms.pool_microunits is None:
        return None
    return PriceRule(
        pool_microunits=terms.pool_microunits, currency=terms.currency, reserve_microunits=terms.reserve_microunits,
        scheme="posted" if terms.rate_microunits else "pool", rate_microunits=terms.rate_microunits,
        floor_microunits=terms.floor_microunits, negative=terms.negative, basis=terms.basis,  # type: ignore[arg-type]
        **entity_inputs(site),
    )  # fmt: skip


def enter_rule(site: "Site") -> dict[str, int]:
    """Enter every buyer's price rule before any value is known. A rule of later shows by its place in the ledger.

    Returns:
        Buyer → entry, of those with a pool.
    """
    from valuation import rule_document

    rules = {buyer: rule_of(site, buyer) for buyer in ("", *sorted(site.config.buyers))}
    return {
        buyer: enter(site, "price_rule", rule_document(rule) | marked(site, buyer))
        for buyer, rule in rules.items()
        if rule is not None
    }


def stored_values(
    site: "Site", unattributed_nano: Mapping[str, int], buyer: str = ""
) -> "OwnerValues":
    """The owners' rows of a buyer's value table, and those of entities."""
    import polars as pl

    from valuation import NanoRow, OwnerValues
    from valuation.entities import players

    table = pl.read_parquet(table_of(site, "values", buyer))
    columns = [column.name for column in fields(NanoRow)]
    rows = [
        NanoRow(**row)
        for row in table.filter(pl.col("subject_kind").is_in(["owner", "entity"])).select(columns).iter_rows(named=True)
    ]  # fmt: skip
    owners, entities = (
        tuple(row for row in rows if row.subject_kind == kind) for kind in ("owner", "entity")
    )
    if site.config.pricing.split != "entity":
        return OwnerValues(owners, unattributed_nano)
    names = [row.subject_id for row in owners]
    told = zip(names, players(names, site.config.entity_of), strict=True)
    return OwnerValues(
        owners, unattributed_nano, entities, {owner: player for owner, player in told if owner != player}
    )  # fmt: skip


def price_list(
    site: "Site", unattributed_nano: Mapping[str, int], buyer: str = "", rule: "PriceRule | None" = None
) -> "PriceList | None":  # fmt: skip
    """Prices from a buyer's stored values by a committed rule, or by the configured one: what anyone can recompute."""
    from valuation import price

    rule = rule or rule_of(site, buyer)
    return None if rule is None else price(stored_values(site, unattributed_nano, buyer), rule)


def prices(site: "Site", values: "Result") -> Made:
    """Share each buyer's pool; without a pool prices are skipped, visibly."""
    digest, made = _prices(site, values, "")
    others = {buyer: _prices(site, seen_by(values, buyer), buyer) for buyer in names_in(values)}
    if not others:
        return digest, made
    files = [file for _, one in others.values() for file in one.pop("files", [])]
    told = made | {"buyers": {buyer: one for buyer, (_, one) in others.items()}, "files": [*made.get("files", []), *files]}  # fmt: skip
    return digest_of([digest, *(one for one, _ in others.values())]), told


def _prices(site: "Site", values: "Result", buyer: str) -> tuple[str, dict[str, Any]]:
    """One buyer's prices: entered, then written."""
    from provenance import prices_body
    from valuation import prices_frame

    path = table_of(site, "prices", buyer)
    found = price_list(site, values["unattributed_nano"], buyer)
    if found is None:
        path.unlink(missing_ok=True)
        where = f"[buyers.{buyer}]" if buyer else "[pricing]"
        return digest_of("no pool"), {
            "skipped": f"no pool: set pool_microunits under {where} in dataworth.toml",
            "rows": 0,
        }
    rule_entry = enter_rule(site)[buyer]
    frame = prices_frame(found, plan_digest=values["plan"])
    data = parquet(frame)
    digest = sha256(data).hexdigest()
    tree = payout_tree(frame, corpus_keys(site).k_owner)
    root, total = tree.root
    body = prices_body(values["corpus_version"], tree) | {
        "values": values["digest"], "rule": found.rule_digest, "table": digest, "currency": found.currency, **marked(site, buyer),
    }  # fmt: skip
    rule = rule_of(site, buyer)
    if rule is not None and rule.is_plain:
        payable, value_total = _shared_out(site, values["unattributed_nano"], buyer)
        body |= {"payable": payable, "value_total": value_total}
    corrected = _correct(site, found, digest, buyer)
    entry = enter(site, "prices", body)
    write_atomic(path, data)
    return digest, {
        "files": [f"tables/{path.name}"], "rows": len(found.rows), "currency": found.currency, "pool": terms_of(site, buyer).pool_microunits,
        "sum": total, "reserve": found.reserve_microunits, "reserve_reasons": list(found.reserve_reasons),
        "entry": entry, "rule_entry": rule_entry, "rule_before_values": rule_entry < values["entry"],
        "rule_digest": found.rule_digest, "sum_root": root.hex(), "values": values["digest"],
        "unattributed_nano": dict(values["unattributed_nano"]), "skipped": "", "held": found.held_microunits, "corrections": corrected,
    }  # fmt: skip


def _correct(site: "Site", found: "PriceList", digest: str, buyer: str) -> int:
    """Enter what the new prices differ by from those that were paid; the earlier entry stays. Number of owners corrected."""
    import polars as pl

    from valuation import PriceList, PriceRow, corrections
    from valuation.pricing import HELD, RESERVE

    path = table_of(site, "prices", buyer)
    if not path.exists():
        return 0
    data = path.read_bytes()
    before_digest = sha256(data).hexdigest()
    if before_digest == digest:
        return 0
    frame = pl.read_parquet(data).filter(~pl.col("subject").is_in([RESERVE, HELD]))
    if not len(frame) or frame["currency"][0] != found.currency:
        return 0
    rows = tuple(
        PriceRow(row["subject"], row["price_microunits"], row["currency"], row["rule_digest"])
        for row in frame.iter_rows(named=True)
    )
    gaps = corrections(PriceList(rows, 0, (), found.currency, found.rule_digest), found)
    k_owner = corpus_keys(site).k_owner
    body = {
        "before": before_digest, "after": digest, "currency": found.currency,
        "microunits": {keyed(k_owner, owner.encode()).hex(): gap for owner, gap in gaps.items()},
        **marked(site, buyer),
    }  # fmt: skip
    enter(site, "price_correction", body)
    return len(gaps)


def _shared_out(site: "Site", unattributed_nano: Mapping[str, int], buyer: str) -> tuple[int, int]:
    """What the rule shares out and by which total: with an owner's value they give its price, checked by every receipt."""
    import polars as pl

    terms = terms_of(site, buyer)
    payable = (terms.pool_microunits or 0) - terms.reserve_microunits
    table = pl.read_parquet(table_of(site, "values", buyer)).filter(
        pl.col("subject_kind") == "owner"
    )
    worth = sum(max(0, value) for value in table["value_nano"].to_list())
    nobody = sum(max(0, value) for value in unattributed_nano.values())
    return payable, worth + nobody if worth else 0


VALUE_FIELDS = (
    "subject_kind",
    "subject_id",
    "method",
    "target",
    "unit",
    "value_nano",
    "n",
    "se_nano",
    "ci_low_nano",
    "ci_high_nano",
)


def committed_values(frame: Any) -> list[dict[str, Any]]:
    """The rows of owners and lots as receipts show them, in the order of the committed tree; what is null is left out."""
    rows = frame.filter(frame["subject_kind"].is_in(["owner", "lot", "entity"])).iter_rows(
        named=True
    )
    return [{name: row[name] for name in VALUE_FIELDS if row[name] is not None} for row in rows]


def value_tree(frame: Any, k_owner: bytes) -> "SumTree":
    """Merkle-sum tree over the values of owners, with the lots at amount 0."""
    from provenance import SumTree, value_leaf

    return SumTree(
        value_leaf(row, keyed(k_owner, row["subject_id"].encode()))
        for row in committed_values(frame)
    )


def payout_tree(frame: Any, k_owner: bytes) -> "SumTree":
    """Merkle-sum tree over a price table; its labels are owner pseudonyms."""
    from provenance import SumTree

    return SumTree(
        (keyed(k_owner, row["subject"].encode()), row["price_microunits"])
        for row in frame.iter_rows(named=True)
    )
