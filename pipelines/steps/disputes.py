"""A dispute is a recomputation: from the committed plan and bank to the values, and from the values to the prices."""

import dataclasses
import shutil
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pipelines.results import Result, latest
from pipelines.runs import versions_of
from pipelines.steps import foundation, increments
from pipelines.steps.buyers import marked, names_in, seen_by, table_of
from pipelines.steps.committed import rule_named, site_of
from pipelines.steps.ledger import open_ledger
from pipelines.steps.pricing import price_list
from pipelines.steps.sale import gate
from pipelines.steps.tables import records
from pipelines.steps.worth import entity_names, holders, holdings_of, lot_of_leaf, lot_values
from pipelines.storage.errors import StorageError
from provenance import jcs
from trainer.spec import load_run

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipelines.site import Site
    from valuation.entities import Holdings

T = TypeVar("T")
Finding = tuple[str, bool | None, str]
GONE = "is not there any more, as after an erasure of what it saw, or a hand that removed it: dataworth run makes values anew, what was paid stays"


class DisputeError(ValueError):
    """There is nothing to recompute."""


def recompute(site: "Site", retrain: int = 0, buyer: str = "") -> list[Finding]:
    """Recompute what was published, under the settings that were in force then.

    Args:
        site: The open home.
        retrain: How many coalitions to train again, the smallest ones first, each under every committed seed.
        buyer: For which buyer; "" for the one of [target] and [pricing].

    Returns:
        (what, whether it is as published or None where what it takes is gone, in words) per step.

    Raises:
        DisputeError: Nothing was valued here yet, or coalitions are to be trained in an order that is no longer made.
        LookupError: No such buyer.
    """
    valued, values, prices = (latest(site.home.results, name) for name in ("owner_values", "values", "prices"))  # fmt: skip
    prices = seen_by(prices, buyer) if prices and buyer in ("", *names_in(prices)) else None
    if valued is None or values is None:
        if prices is None:
            raise DisputeError("nothing was valued in this home yet: dataworth run")
        return [("values", None, f"what they were computed from {GONE}"), *_prices(site, None, prices, buyer)]  # fmt: skip
    if "seeds" not in valued.values:
        raise DisputeError("these values were made before errors contained the spread over seeds: dataworth run makes them anew; what was paid by them stays, corrections are entries of the ledger")  # fmt: skip
    part = 1 + names_in(valued).index(buyer) if buyer in names_in(valued) else 0
    valued = seen_by(valued, buyer)
    entries = _entries_of(site, valued, buyer)
    run = _told("run", _run, site, valued, min(entries, default=None))
    findings: list[Finding | None] = [run, _told("ledger", _ledger, site, entries, buyer)]
    then, said = _settings(site, valued, entries, prices, buyer)
    findings.append(said)
    if run[1] is not None:
        findings.append(bank := _told("bank", _bank, site, valued, part))
        if then is not None:
            said, held = holdings(then, valued)
            findings.append(said)
            if bank[1] and held is not None:
                findings.append(_told("values", _table_of_values, then, valued, held, buyer, part))
            findings.append(_told("base", _base, then, site, valued))
    if prices is not None and then is not None:
        findings += _prices(site, then, prices, buyer)
    if retrain:
        findings += _again(site, site.home.runs / valued["run"], retrain)
    return [finding for finding in findings if finding]


def _told(what: str, check: "Callable[..., T]", *arguments: Any) -> T | Finding:
    """A finding, where there is one; a file that is gone or damaged is one too."""
    try:
        return check(*arguments)
    except FileNotFoundError as error:
        return (what, None, f"{Path(error.filename or '').name} {GONE}")
    except (OSError, ValueError, LookupError, StorageError) as error:
        return (what, False, f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error))  # fmt: skip


def _settings(
    site: "Site", valued: Result | None, entries: dict[int, dict[str, Any]], prices: Result | None, buyer: str
) -> "tuple[Site | None, Finding]":  # fmt: skip
    """The home as it was configured when these values were made; None where that isn't known."""
    try:
        table = sha256(table_of(site, "values", buyer).read_bytes()).hexdigest()
        bodies = [body for body in entries.values() if body["table"] == table] or [*entries.values(), {}]  # fmt: skip
        paid = prices and not prices["skipped"] and open_ledger(site).entry(prices["entry"])["body"]
        rule = rule_named(site, paid["rule"], buyer)[0] if paid else None
        size = increments.plan_of_seeds(site, valued)["size"] if valued else site.size.name
        then, said = site_of(site, bodies[0], rule, valued, size)
    except (OSError, ValueError, LookupError) as error:
        return None, ("settings", False, f"{error}; holdings, values and prices can't be recomputed without them")  # fmt: skip
    return then, ("settings", True, said)


def _prices(
    site: "Site", then: "Site | None", prices: Result, buyer: str
) -> list[Finding]:  # fmt: skip
    """Prices by the rule that their entry names, from the value table that it names; and whether that rule came first.

    Where `then` is None the values are gone, and the settings are those of the entry that names their table.
    """
    if prices["skipped"]:
        return []
    log, mark = open_ledger(site), marked(site, buyer).get("buyer")
    paid = log.entry(prices["entry"])
    body = paid["body"]
    if (paid["kind"], body.get("buyer")) != ("prices", mark):
        return [("prices", False, f"entry {prices['entry']} is not one of these prices")]
    rule, entered = rule_named(site, body["rule"], buyer)
    if rule is None or entered is None:
        return [("rule", False, f"entry {prices['entry']} names the rule {body['rule'][:16]}, the ledger has none of that digest")]  # fmt: skip
    made = {index: entry["body"] for index, entry in enumerate(log.entries()) if entry["kind"] == "values" and entry["body"].get("buyer") == mark}  # fmt: skip
    own = [index for index, one in made.items() if one["table"] == body["values"]]
    early = bool(own) and entered < own[0]
    findings: list[Finding] = [("rule", early, f"entry {entered}, {'before the values' if early else 'entered after the values'}")]  # fmt: skip
    if then is None:
        then, said = _settings(site, None, {index: made[index] for index in own}, prices, buyer)
        findings.insert(0, said)
    if then is not None:
        games = {made[index]["utilities"] for index in own}
        tables = {body["values"], *(one["table"] for one in made.values() if one["utilities"] in games and one.get("erasure"))}  # fmt: skip
        findings.insert(0, _told("prices", _price_table, then, prices, buyer, body, rule, tables))
    return findings


def _price_table(
    then: "Site", prices: Any, buyer: str, body: dict[str, Any], rule: Any, tables: set[str]
) -> Finding:  # fmt: skip
    """The price table made again, from a value table of these digests: that of its entry, or what an erasure left of it."""
    import polars as pl

    from valuation import prices_frame

    data = table_of(then, "prices", buyer).read_bytes()
    if sha256(data).hexdigest() != body["table"]:
        return ("prices", False, f"the price table is not the one that entry {prices['entry']} names")  # fmt: skip
    source = sha256(table_of(then, "values", buyer).read_bytes()).hexdigest()
    if source not in tables:
        return ("prices", None, f"they were made from the value table {body['values'][:16]}, which a later run wrote over: dataworth run makes prices of the new one, what was paid stays")  # fmt: skip
    found = price_list(then, prices["unattributed_nano"], buyer, rule)
    assert found is not None, "a rule is named"
    columns = ("price_microunits", "held_microunits", "currency")
    paid, ours = ({row["subject"]: [row[name] for name in columns] for row in frame.iter_rows(named=True)} for frame in (pl.read_parquet(data), prices_frame(found, plan_digest="")))  # fmt: skip
    wrong = sorted(name for name in paid.keys() | ours.keys() if paid.get(name) != ours.get(name))
    said = f"{len(found.rows)} prices and what is held back of them by rule {found.rule_digest[:16]}"  # fmt: skip
    return ("prices", not wrong, said + (f"; {wrong[0]} differs" if wrong else ""))


def _entries_of(site: "Site", valued: Any, buyer: str) -> dict[int, dict[str, Any]]:
    """Place and content of the ledger's entries of these values, the first of them their own; a table that an erasure shortened has one more.

    The result's word for the place is not asked: whoever writes results could name an entry of later.
    """
    path, mark = site.home.runs / valued["run"], marked(site, buyer).get("buyer")
    try:
        made_by = versions_of(path)
    except (OSError, ValueError):  # whether the file is there and whole is the run's finding
        made_by = None
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
        return ("run", None, f"{valued['run']} {GONE}")
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
    directory = site.home.runs / valued["run"]
    try:
        run = load_run(directory)
        for what, path in (("lots file", run.config.extra["lots"][0]), ("token folder", run.tokens)):  # fmt: skip
            if not (directory / path).exists():
                return ("holdings", None, f"the {what} {Path(path).name} {GONE}"), None
        held, sizes = _counted(site, run, directory)
    except (OSError, ValueError, LookupError, StorageError) as error:
        return ("holdings", False, str(error)), None
    ours: dict[tuple[str, str], Any] = {("lot", name): size for name, size in sizes.items()}
    stated = {("lot", lot["id"]): lot["tokens"] for lot in valued["groups"]}
    for kind, part in _parts(site, held).items():
        counts = zip(part.tokens_OK.tolist(), part.records_O.tolist(), strict=True)
        ours |= {(kind, name): count for name, count in zip(part.owners, counts, strict=True)}
        stated |= {(kind, row["id"]): (row["tokens"], row["records"]) for row in valued.values.get(kind, ())}  # fmt: skip
    wrong = sorted(key for key in ours.keys() | stated.keys() if ours.get(key) != stated.get(key))
    said = f"tokens and records of {len(held.owners)} owners in {len(sizes)} lots, counted from the lots that the run names"
    return ("holdings", not wrong, said + (f"; {wrong[0][1]}'s differ" if wrong else "")), held


def _counted(site: "Site", run: Any, directory: "Path") -> "tuple[Holdings, dict[str, int]]":
    """Who holds how much of each lot, and the lots' tokens by name."""
    import numpy as np

    from trainer.inputs import open_store
    from valuation import Lots, cluster

    leaf_L, tokens_L = lot_of_leaf(directory), open_store(run, directory).lengths_N
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
    return held, dict(zip(lots.ids, sizes_K.tolist(), strict=True))


def _parts(site: "Site", held: "Holdings") -> "dict[str, Holdings]":
    """Who is valued by these holdings, as a result names them."""
    from valuation.entities import merged

    if site.config.pricing.split != "entity":
        return {"owners": held}
    return {"owners": held, "entities": merged(held, entity_names(site, held))}


def _base(site: "Site", today: "Site", valued: Any) -> Finding | None:
    """Whether coalitions went on from the base of the committed plan, and it is what it was; nothing where neither has one.

    It is looked for where it lay then; where that is empty, where `dataworth.toml` has it today.
    """
    plan = Result("evaluation_plan", "", "", increments.plan_of_seeds(site, valued))
    committed = plan.values.get("base", {}).get("root", "none")
    used = load_run(site.home.runs / valued["run"]).init_root
    if committed == used == "none":
        return None
    wrong = foundation.problems(site, plan) and foundation.problems(today, plan)
    if used != committed:
        wrong.append(f"coalitions went on from {used[:16]}, the plan names {committed[:16]}")
    return ("base", not wrong, "; ".join(wrong) or f"V(nobody) is the loss of the base with root {committed[:16]}, as the plan names it")  # fmt: skip


def _bank(site: "Site", valued: Any, part: int) -> Finding:
    """Whether the losses on disk are those that the run's result names, under the seeds of the committed plan."""
    from pipelines.steps.valuation import value_seeds
    from valuation.bank import load_seeds

    folder = site.home.runs / valued["run"]
    if not (folder / "result.json").exists() or not any(folder.glob("bank/*.npz")):
        return (
            "bank",
            None,
            f"the bank of {valued['run']} {GONE}; --retrain N trains coalitions of it again",
        )
    found = load_seeds(folder, part)
    plan, run = increments.plan_of_seeds(site, valued), load_run(folder / "run.json")
    seeds = [run.seed, *run.config.extra.get("seeds", ())]
    guess = 0 if found[0].predicted_C is None else int(found[0].predicted_C.sum())
    said = f"{len(found[0].coalitions_C)} coalitions of {len(found[0].groups)} lots{f', {guess} of them predicted from the others' if guess else ''}, seeds {', '.join(map(str, seeds))}"
    if seeds != value_seeds(plan) or len(found) != len(seeds) or seeds != valued["seeds"]:
        return ("bank", False, f"{said}; the plan's are {', '.join(map(str, value_seeds(plan)))}")  # fmt: skip
    return ("bank", True, said)


def _table_of_values(
    site: "Site", valued: Any, held: "Holdings", buyer: str, target: int
) -> Finding:
    import polars as pl

    return _values(site, valued, held, pl.read_parquet(table_of(site, "values", buyer)), target)


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
        seed = increments.plan_of_seeds(site, valued)["seeds"]["orders"]
        orders = sample_orders(num, site.size.permutations, np.random.default_rng(seed))
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
