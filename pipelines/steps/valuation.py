"""Steps of the valuation group: in-run credit, influence, Shapley values by retraining."""

from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.runs import Job, digest_of, prepare_on, relative, started
from pipelines.settings import cores
from pipelines.steps import foundation, increments
from pipelines.steps.buyers import names_in
from pipelines.steps.increments import remade_bank
from pipelines.steps.information import token_arrays
from pipelines.steps.pricing import enter_rule, entity_inputs
from pipelines.steps.sale import gate, sale_inputs
from pipelines.steps.tables import records, token_store
from pipelines.steps.worth import entity_names, holdings_of, told, worth
from provenance import write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site

Made = tuple[str, Mapping[str, Any]]
Launch = Callable[[Path, int], dict]


def influence_inputs(
    site: "Site", tokens: "Result", target: "Result", plan: "Result"
) -> dict[str, Any]:
    """What the in-run credit and the influence at its checkpoint depend on."""
    size = site.size
    return {
        "tokens": tokens["digest"], "target": target["value_digest"], "plan": plan["digest"],
        "steps": size.influence_steps, "size": size.name, "rows": [size.attribution_rows, size.query_rows],
    }  # fmt: skip


def influence(
    site: "Site", tokens: "Result", target: "Result", plan: "Result", run: Launch
) -> Made:
    """Train the proxy once, crediting every record in every batch; then score records at the weights it ended with."""
    size, anywhere = site.size, site.home.runs / "any"
    held_out = {
        "target": relative(site.home.path / target["value_folder"], anywhere),
        "target_digest": target["value_digest"],
    }
    training = Job(
        kind="gradients", entry="valuation.inrun:train", network=size.proxy, steps=size.influence_steps, seed=plan["seeds"]["proxy"],
        extra=held_out | {"target_rows": size.rows},
    )  # fmt: skip
    directory = prepare_on(site, training, tokens, target, "value_digest")
    enter_rule(site)
    started(site, directory, plan)
    credited = run(directory, 1)
    weights = directory / credited["checkpoint"]
    scoring = Job(
        kind="gradients", entry="valuation.influence.attribution:run", network=size.proxy, steps=0, seed=plan["seeds"]["proxy"],
        init=weights, init_root=credited["checkpoint_root"],
        extra=held_out | {"record_rows": size.attribution_rows, "query_rows": size.query_rows},
    )  # fmt: skip
    scored_in = prepare_on(site, scoring, tokens, target, "value_digest")
    started(site, scored_in, plan)
    scored = run(scored_in, 1)
    files = [
        directory / "influence.parquet",
        scored_in / "records.parquet",
        scored_in / "owners.parquet",
    ]
    sums = {name: float(value) for name, value in credited.items() if name.startswith("sum_")}
    return digest_of([sha256(path.read_bytes()).hexdigest() for path in files]), sums | {
        "files": [str(path.relative_to(site.home.path)) for path in files], "run": directory.name, "steps": credited["steps"],
        "form": credited["forms"].split(",")[0], "checkpoint_root": credited["checkpoint_root"], "scores_run": scored_in.name,
        "method": scored["method"], "binding": scored["binding"], "records": scored["records"], "queries": scored["queries"],
        "distinguishable": scored["distinguishable"], "level": scored["level"],
    }  # fmt: skip


def owner_values_inputs(
    site: "Site", clusters: "Result", tokens: "Result", target: "Result", plan: "Result"
) -> dict[str, Any]:
    """What the owners' values depend on."""
    return influence_inputs(site, tokens, target, plan) | {
        "clusters": clusters.data_version, "groups": increments.num_lots(site), "proxy_tokens": site.size.proxy_tokens,
        "permutations": site.size.permutations, "seeds": value_seeds(plan), **sale_inputs(site), **entity_inputs(site),
        **({"update": site.config.values.update} if site.config.values.update != "sampled" else {}),
        **({"buyers": {name: target["buyers"][name]["digest"] for name in names_in(target)}} if names_in(target) else {}),
    }  # fmt: skip


def value_seeds(plan: "Result | dict[str, Any]") -> list[int]:
    """The committed seeds that every coalition is trained under, the proxy's own first; as many as the plan names."""
    seeds = plan["seeds"]
    further = (f"proxy-{number}" for number in range(2, len(seeds) + 1))
    return [seeds["proxy"], *(seeds[name] for name in further if name in seeds)]


def _cut_lots(site: "Site", corpus: "Result", tokens: "Result", target: "Result") -> dict[str, Any]:
    """The lots of all records that may be sold, copies left out, and who holds how much of them."""
    import numpy as np
    import polars as pl

    from valuation import content_axis, cut_lots, first_in_cluster

    frame = records(
        site, corpus["version"], "record_id", "fingerprint", "owner", "date", "personal", "licence", "consent_train", "consent_resell"
    )  # fmt: skip
    flat = token_arrays(site, corpus, tokens)
    cluster_N = pl.read_parquet(site.home.table("clusters"))["cluster"].to_numpy()
    index_N = frame["index"].to_numpy().astype(np.int64)
    prints = frame["fingerprint"].to_list()
    # The gate comes first: where the first of a cluster may not be sold, a later one that may stands for it.
    sold_N, held_back = gate(site, frame, flat["lengths"])
    first_N = sold_N.copy()
    first_N[sold_N] = first_in_cluster(cluster_N[sold_N], index_N[sold_N])
    personal_N = frame["personal"].to_numpy()

    def cut(valued_N: Any, most: int) -> Any:
        axis_N = content_axis(flat["tokens"], flat["offsets"], prints, valued_N)
        return cut_lots(prints, flat["lengths"], frame["date"].to_list(), personal_N, valued_N, axis_N, most)  # fmt: skip

    grown = increments.grown(site, target, (index_N, first_N, flat["lengths"], personal_N), cut)
    lots = grown.lots
    held = holdings_of(site, lots, frame["owner"].to_list(), flat["lengths"], (cluster_N, index_N, sold_N))  # fmt: skip
    return {
        "frame": frame, "lots": lots, "grown": grown, "holdings": held, "first_N": first_N, "index_N": index_N, "held_back": held_back,
    }  # fmt: skip


def owner_values(
    site: "Site",
    corpus: "Result",
    clusters: "Result",
    tokens: "Result",
    target: "Result",
    plan: "Result",
    run: Launch,
) -> Made:
    """Retrain the proxy on the coalitions of lots, copies left out, take their Shapley values, and the owners' shares of them."""
    import numpy as np
    import polars as pl

    from valuation import coalitions_needed, sample_orders
    from valuation.bank import ORDER, load_seeds

    size = site.size
    cut = _cut_lots(site, corpus, tokens, target)
    frame, lots, held, grown = cut["frame"], cut["lots"], cut["holdings"], cut["grown"]
    seeds = list(grown.seeds) or value_seeds(plan)
    num = len(lots.ids)
    orders, generator = None, np.random.default_rng(plan["seeds"]["orders"])
    if num > increments.MOST_LOTS:
        orders = sample_orders(num, size.permutations, generator)
    coalitions = coalitions_needed(num, orders) if orders else grown.coalitions(site, generator)
    lot_of = np.full(token_store(site, tokens).size, -1, dtype="<i8")
    lot_of[cut["index_N"]] = lots.lot_N
    name = sha256(lot_of.tobytes()).hexdigest()
    named = name[:12] + (f"-{digest_of(coalitions)[:8]}" if grown.full else "")
    groups_file = site.home.runs / "inputs" / f"lots-{named}.json"
    lots_file = groups_file.with_suffix(".bin")
    copies = site.home.runs / "inputs" / f"copies-{clusters.data_version[:12]}.txt"
    groups_file.parent.mkdir(parents=True, exist_ok=True)
    body = {"groups": [{"id": lot, "owners": [lot]} for lot in lots.ids], "coalitions": coalitions}
    from provenance import jcs

    write_atomic(groups_file, jcs(body))
    write_atomic(lots_file, lot_of.tobytes())
    write_atomic(
        copies,
        "".join(
            row.hex() + "\n" for row in frame.filter(~pl.Series(cut["first_N"]))["record_id"]
        ).encode(),
    )
    anywhere = site.home.runs / "any"
    steps = -(-size.proxy_tokens // (size.rows * size.length))
    job = Job(
        kind="proxy", entry="valuation.proxy:retrain", network=size.proxy, steps=steps, seed=seeds[0],
        excluded=copies if not cut["first_N"].all() else None,
        extra={
            "groups": relative(groups_file, anywhere), "target": relative(site.home.path / target["value_folder"], anywhere),
            "target_digest": target["value_digest"], "jobs": cores() if site.size.world > 1 else 1, "order": ORDER,
            "lots": [relative(lots_file, anywhere), name],
            **({"seeds": seeds[1:]} if seeds[1:] else {}), **_other_targets(site, target), **grown.extra,
        },
        **foundation.start(site, corpus["version"]),
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "value_digest")
    enter_rule(site)
    started(site, directory, plan)
    remade = remade_bank(site)
    increments.adopt(site, directory, grown, coalitions)
    run(directory, 1)
    names = names_in(target)
    banks = [load_seeds(directory, part) for part in range(1 + len(names))]
    values = {
        # Reports and disputes read the lots again: without them the values are to be made again, from the same bank.
        "files": [str(path.relative_to(site.home.path)) for path in (directory / "bank", groups_file, lots_file)],
        "run": directory.name, "coalitions": len(coalitions), "seeds": seeds, "held_back": cut["held_back"],
        "update": increments.told(site, target, directory, grown, lots_file, plan["digest"]),
        **worth(site, banks[0], cut, orders), **({"remade": remade} if remade else {}),
    }  # fmt: skip
    if site.config.pricing.split == "entity":
        values["entity_of"] = entity_names(site, held)
    said: list[Any] = told(banks[0])
    if names:
        others = dict(zip(names, banks[1:], strict=True))
        values["buyers"] = {name: worth(site, bank, cut, orders) for name, bank in others.items()}
        said += [[name, *told(bank)] for name, bank in others.items()]
    return digest_of(said), values


def _other_targets(site: "Site", target: "Result") -> dict[str, Any]:
    """Settings of a run that measures every model on the targets of other buyers as well; nothing without them."""
    anywhere = site.home.runs / "any"
    others = [
        [
            relative(site.home.path / target["buyers"][name]["folder"], anywhere),
            target["buyers"][name]["digest"],
        ]
        for name in names_in(target)
    ]
    return {"others": others} if others else {}
