"""A dispute is a recomputation: from the committed plan and bank to the values, and from the values to the prices."""

import dataclasses
import shutil
from collections import Counter
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.results import latest
from pipelines.runs import versions_of
from pipelines.steps import foundation, increments
from pipelines.steps.buyers import marked, names_in, seen_by, table_of
from pipelines.steps.ledger import open_ledger
from pipelines.steps.pricing import price_list
from pipelines.steps.sale import gate
from pipelines.steps.tables import records
from pipelines.steps.worth import entity_names, holders, holdings_of, lot_of_leaf, lot_values
from provenance import jcs
from trainer.spec import load_run

if TYPE_CHECKING:
    from pathlib import Path

    from pipelines.site import Site
    from valuation.entities import Holdings

Finding = tuple[str, bool, str]


class DisputeError(ValueError):
    """There is nothing to recompute."""


def recompute(site: "Site", retrain: int = 0, buyer: str = "") -> list[Finding]:
    """Recompute what was published.

    Args:
        site: The open home.
        retrain: How many coalitions to train again, the smallest ones first, each under every committed seed.
        buyer: For which buyer; "" for the one of [target] and [pricing].

    Returns:
        (what, whether it is as published, in words) per step.

    Raises:
        DisputeError: Nothing was valued here yet, the run behind the values is gone, or coalitions are to be trained in an order that is no longer made.
        LookupError: No such buyer.
    """
    import polars as pl

    valued, values = latest(site.home.results, "owner_values"), latest(site.home.results, "values")
    if valued is None or values is None:
        raise DisputeError("nothing was valued in this home yet: dataworth run")
    if "seeds" not in valued.values:
        raise DisputeError("these values were made before errors contained the spread over seeds: dataworth run makes them anew; what was paid by them stays, corrections are entries of the ledger")  # fmt: skip
    part = 1 + names_in(valued).index(buyer) if buyer in names_in(valued) else 0
    valued, values = seen_by(valued, buyer), seen_by(values, buyer)
    entries = _entries_of(site, valued, buyer)
    own = min(entries, default=None)
    findings = [_run(site, valued, own), _bank(site, valued, part)]
    finding, held = holdings(site, valued)
    findings.append(finding)
    if findings[1][1] and held is not None:
        table = pl.read_parquet(table_of(site, "values", buyer))
        findings.append(_values(site, valued, held, table, part))
    findings += _base(site, valued)
    findings.append(_ledger(site, entries, buyer))
    made = latest(site.home.results, "prices")
    prices = seen_by(made, buyer) if made else None
    found = price_list(site, values["unattributed_nano"], buyer)
    if prices and not prices["skipped"] and found is not None:
        frame = pl.read_parquet(table_of(site, "prices", buyer))
        paid = {subject: amounts for subject, *amounts in frame.select("subject", "price_microunits", "held_microunits").iter_rows()}  # fmt: skip
        wrong = [row.subject for row in found.rows if paid.get(row.subject) != [row.price_microunits, row.held_microunits]]  # fmt: skip
        said = f"{len(found.rows)} prices and what is held back of them by rule {found.rule_digest[:16]}"
        findings.append(("prices", not wrong, said + (f"; {wrong[0]} differs" if wrong else "")))
        early = prices["rule_before_values"]
        findings.append(("rule", early, f"entry {prices['rule_entry']}, before the values" if early else "entered after the values"))  # fmt: skip
    if retrain:
        findings += _again(site, site.home.runs / valued["run"], retrain)
    return findings


def _entries_of(site: "Site", valued: Any, buyer: str) -> dict[int, dict[str, Any]]:
    """Place and content of the ledger's entries of these values, the first of them their own; a table that an erasure shortened has one more.

    The result's word for the place is not asked: whoever writes results could name an entry of later.
    """
    path, mark = site.home.runs / valued["run"], marked(site, buyer).get("buyer")
    made_by = versions_of(path) if (path / "run.json").exists() else None
    found = {}
    for index, entry in enumerate(open_ledger(site).entries()):
        body = entry["body"]
        if (
            entry["kind"] == "values"
            and (body.get("utilities"), body.get("buyer")) == (valued.data_version, mark)
            and (made_by is None or body.get("versions", made_by) == made_by)
        ):
            found[index] = body
    return found


def _run(site: "Site", valued: Any, own: int | None) -> Finding:
    """Whether the run is the one that was entered before its values were: it names lots, target and seeds."""
    path = site.home.runs / valued["run"] / "run.json"
    if not path.exists():
        raise DisputeError(f"the run {valued['run']} behind these values is gone, as after an erasure of what it saw: dataworth run values anew; what was paid stays")  # fmt: skip
    digest = sha256(path.read_bytes()).hexdigest()
    first: dict[str, int] = {}
    for index, entry in enumerate(open_ledger(site).entries()):
        if entry["kind"] == "run" and entry["body"]["run"] == valued["run"]:
            first.setdefault(entry["body"]["run_digest"], index)
    said, named = f"{valued['run']}, digest {digest[:16]}", [f"{one[:16]} in entry {index}" for one, index in first.items()]  # fmt: skip
    if len(first) > 1:
        return ("run", False, f"{said}; the ledger names several for this run and none of them counts: {', '.join(named)}")  # fmt: skip
    if digest not in first:
        return ("run", False, f"{said}; the ledger names {', '.join(named) or 'none'}")
    if own is None or first[digest] > own:
        where = "" if own is None else f", in entry {own}"
        return ("run", False, f"{said}; entered in entry {first[digest]}, expected before its values were{where}: nothing says that it was there then")  # fmt: skip
    return ("run", True, said)


def _ledger(site: "Site", entries: dict[int, dict[str, Any]], buyer: str) -> Finding:
    """Whether the ledger names the value table that is there."""
    table = sha256(table_of(site, "values", buyer).read_bytes()).hexdigest()
    named = [index for index, body in entries.items() if body["table"] == table]
    if named:
        return ("ledger", True, f"entry {named[0]} names the table {table[:16]} and the utilities {entries[named[0]]['utilities'][:16]}")  # fmt: skip
    told = ", ".join(f"{body['table'][:16]} in entry {index}" for index, body in entries.items())
    return ("ledger", False, f"the value table is {table[:16]}; of these utilities the ledger names {told or 'none'}")  # fmt: skip


def holdings(site: "Site", valued: Any) -> "tuple[Finding, Holdings | None]":
    """Who holds how much of each lot: from the lots file, the tokens and the corpus version that the run names; the result's word is only compared.

    Args:
        site: The open home.
        valued: The owners' values.

    Returns:
        The finding, and the holdings; None where there is nothing to count them from.
    """
    import numpy as np

    from trainer.errors import DataError
    from trainer.inputs import open_store
    from valuation import Lots, cluster
    from valuation.errors import ProxyError

    directory = site.home.runs / valued["run"]
    run = load_run(directory)
    try:
        leaf_L, tokens_L = lot_of_leaf(directory), open_store(run, directory).lengths_N
    except (OSError, ProxyError, DataError) as error:
        return ("holdings", False, str(error)), None
    by_entity = site.config.pricing.split == "entity"
    more = ("fingerprint", "licence", "consent_train", "consent_resell", "text") if by_entity else ()  # fmt: skip
    frame = records(site, run.corpus_version, "owner", *more)
    index_N = frame["index"].to_numpy().astype(np.int64)
    tokens_N = tokens_L[index_N]
    lot_N, num = leaf_L[index_N], int(leaf_L.max()) + 1
    sizes_K = np.bincount(lot_N[lot_N >= 0], weights=tokens_N[lot_N >= 0], minlength=num).astype(np.int64)  # fmt: skip
    copies: tuple[Any, Any, Any] = (None, None, None)
    if by_entity:
        cluster_N = cluster(frame["fingerprint"].to_list(), frame["text"], seed=0).cluster_N
        copies = (cluster_N, index_N, gate(site, frame, tokens_N)[0])
    lots = Lots(lot_N, sizes_K, np.zeros(num, np.bool_))
    held = holdings_of(site, lots, frame["owner"].to_list(), tokens_N, copies)
    ours = {("lot", name): size for name, size in zip(lots.ids, sizes_K.tolist(), strict=True)}
    stated = {("lot", lot["id"]): lot["tokens"] for lot in valued["groups"]}
    for kind, part in _parts(site, held).items():
        counts = zip(part.tokens_OK.tolist(), part.records_O.tolist(), strict=True)
        ours |= {(kind, name): count for name, count in zip(part.owners, counts, strict=True)}
        stated |= {(kind, row["id"]): (row["tokens"], row["records"]) for row in valued.values.get(kind, ())}  # fmt: skip
    wrong = sorted(key for key in ours.keys() | stated.keys() if ours.get(key) != stated.get(key))
    said = f"tokens and records of {len(held.owners)} owners in {num} lots, counted from the lots that the run names"
    return ("holdings", not wrong, said + (f"; {wrong[0][1]}'s differ" if wrong else "")), held


def _parts(site: "Site", held: "Holdings") -> "dict[str, Holdings]":
    """Who is valued by these holdings, as a result names them."""
    from valuation.entities import merged

    if site.config.pricing.split != "entity":
        return {"owners": held}
    return {"owners": held, "entities": merged(held, entity_names(site, held))}


def _base(site: "Site", valued: Any) -> list[Finding]:
    """Whether coalitions went on from the base of the committed plan, and it is what it was; nothing where neither has one."""
    plan = latest(site.home.results, "evaluation_plan")
    assert plan is not None, "values were made under a plan"
    committed = plan.values.get("base", {}).get("root", "none")
    used = load_run(site.home.runs / valued["run"]).init_root
    if committed == used == "none":
        return []
    wrong = foundation.problems(site, plan)
    if used != committed:
        wrong.append(f"coalitions went on from {used[:16]}, the plan names {committed[:16]}")
    return [("base", not wrong, "; ".join(wrong) or f"V(nobody) is the loss of the base with root {committed[:16]}, as the plan names it")]  # fmt: skip


def _bank(site: "Site", valued: Any, part: int) -> Finding:
    """Whether the losses on disk are those that the run's result names, under the seeds of the committed plan."""
    from pipelines.steps.valuation import value_seeds
    from valuation.bank import load_seeds
    from valuation.errors import UtilityError

    folder = site.home.runs / valued["run"]
    try:
        found = load_seeds(folder, part)
    except UtilityError as error:
        return ("bank", False, str(error))
    plan, run = increments.plan_of_seeds(site, valued), load_run(folder / "run.json")
    seeds = [run.seed, *run.config.extra.get("seeds", ())]
    guess = 0 if found[0].predicted_C is None else int(found[0].predicted_C.sum())
    said = f"{len(found[0].coalitions_C)} coalitions of {len(found[0].groups)} lots{f', {guess} of them predicted from the others' if guess else ''}, seeds {', '.join(map(str, seeds))}"
    if seeds != value_seeds(plan) or len(found) != len(seeds) or seeds != valued["seeds"]:
        return ("bank", False, f"{said}; the plan's are {', '.join(map(str, value_seeds(plan)))}")  # fmt: skip
    return ("bank", True, said)


def _values(site: "Site", valued: Any, held: "Holdings", table: Any, target: int) -> Finding:
    """Shapley values from the bank, means over its seeds, and holders' shares of them, with their errors, against the published integers."""
    import numpy as np

    from pipelines.steps.pricing import owners_of
    from valuation import owner_intervals, sample_orders, to_nano
    from valuation.bank import load_seeds
    from valuation.intervals import value_rows

    banks = load_seeds(site.home.runs / valued["run"], target)
    num, orders = len(banks[0].groups), None
    if valued["method"] not in ("shapley.exact", "shapley.updated"):
        plan = latest(site.home.results, "evaluation_plan")
        assert plan is not None, "values were made under a plan"
        orders = sample_orders(
            num, site.size.permutations, np.random.default_rng(plan["seeds"]["orders"])
        )
    group, gains_KQ, variance_K = lot_values(banks, orders)
    lot_rows = to_nano(value_rows(group, banks[0].groups, target="target_value"))
    again: dict[str, Any] = {"entity_of": entity_names(site, held)}
    for kind, part in _parts(site, held).items():
        each = owner_intervals(gains_KQ, part.tokens_OK, banks[0].tokens_Q, order_variance_K=variance_K)  # fmt: skip
        again[kind] = holders(part, each)
    shared = owners_of(dataclasses.replace(valued, values={**valued.values, **again}), lot_rows)
    numbers = ("value_nano", "se_nano", "ci_low_nano", "ci_high_nano")
    made = {
        ({"group": "lot"}.get(row.subject_kind, row.subject_kind), row.subject_id): tuple(getattr(row, name) for name in numbers)
        for row in (*lot_rows, *shared.rows, *shared.entities)
    }  # fmt: skip
    published = {
        (row["subject_kind"], row["subject_id"]): tuple(row[name] for name in numbers)
        for row in table.filter(table["subject_kind"].is_in(["lot", "owner", "entity"])).iter_rows(named=True)
    }  # fmt: skip
    # The lower end is what an uncertainty-aware rule pays by, so errors are recomputed as well as values.
    wrong = [name for name in sorted(made.keys() | published.keys()) if not _near(made.get(name), published.get(name))]  # fmt: skip
    counted = Counter(kind for kind, _ in made)
    told = " and ".join(f"{counted[kind]} {kind}s" for kind in ("lot", "owner") if counted[kind])
    told += f" and {counted['entity']} legal entities" if counted["entity"] else ""
    said = f"{told} recomputed from the bank of {len(banks)} seeds, with their errors"
    return (
        "values",
        not wrong,
        said + (f"; {wrong[0][1]}'s value, standard error or interval differs" if wrong else ""),
    )


def _near(ours: Any, stated: Any) -> bool:
    """Whether value and errors are the same to two nano: sums of floats may be rounded differently by another processor."""
    if ours is None or stated is None:
        return False
    return all(a == b or (None not in (a, b) and abs(a - b) <= 2) for a, b in zip(ours, stated, strict=True))  # fmt: skip


def _again(site: "Site", directory: "Path", count: int) -> list[Finding]:
    """Train the smallest coalitions again, under each committed seed, with the committed data and settings."""
    from provenance.canonical import parse_json
    from valuation.bank import ORDER
    from valuation.proxy import retrain

    run = load_run(directory / "run.json")
    if run.config.extra.get("order") != ORDER:
        raise DisputeError(
            f"the coalitions of {directory.name} were not trained in the order by content ({ORDER}) but in an older one, so training them again "
            "with this version gives other losses: bank, values and prices are recomputed without --retrain, coalitions by the code that "
            "run.json names under versions; dataworth run values anew"
        )
    document = parse_json((directory / "result.json").read_bytes())
    result = document["coalitions"]
    chosen = sorted(result, key=lambda name: (result[name]["tokens"], int(name)))[:count]
    folder = site.home.runs / f"dispute-{directory.name}"
    folder.mkdir(exist_ok=True)
    try:
        groups = parse_json((directory / run.config.extra["groups"]).read_bytes())["groups"]
        (folder / "groups.json").write_bytes(jcs({"groups": groups, "coalitions": sorted(map(int, chosen))}))  # fmt: skip
        extra = {**run.config.extra, "groups": "groups.json", "jobs": 1}
        retrain(
            dataclasses.replace(run, config=dataclasses.replace(run.config, extra=extra)), folder
        )
        repeated = parse_json((folder / "result.json").read_bytes())
    finally:
        shutil.rmtree(folder)
    seeds = {str(run.seed): (result, repeated["coalitions"])}
    seeds |= {seed: (told, repeated["seeds"][seed]) for seed, told in document.get("seeds", {}).items()}  # fmt: skip
    return [
        (
            f"coalition {name}, seed {seed}",
            again[name]["losses_digest"] == told[name]["losses_digest"],
            f"trained again: {again[name]['tokens']} tokens, losses {again[name]['losses_digest'][:16]}",
        )
        for name in chosen
        for seed, (told, again) in seeds.items()
    ]
