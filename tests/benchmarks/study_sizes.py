"""How far do owner values from the graph's own proxies hold for a larger model? `make accept STUDY=owners-transfer-sizes`.

The owners, records and target of `owners-transfer`. Each size's proxy is trained as the graph trains it (`valuation.proxy:retrain`): its shape,
optimiser, batch, steps and number of ids are those of `pipelines.sizes`, so its digest is the one that a home's receipts ask for; byte pairs are learnt from texts that no owner
sells. What it is held against, the 7.2M model's values, is read from the figure `valuation.owners.transfer` (`accept.jsonl`), not trained
again: those of both seeds where the figure has them, else their mean, and then the intervals lack that model's seeds. The record of every proxy is written to
`pipelines/studies/transfer.json`, which every home without a `[pricing] transfer` of its own reads. All records together are 50,000 characters, so the larger sizes' steps are a cap that doesn't bind.
"""

import json
from itertools import starmap

import numpy as np
from corpora import STATE, write
from figures import HERE, record
from study_transfer import (  # fmt: skip
    LARGE,
    OTHERS,
    PACKAGES,
    PRESIDENTS,
    SEEDS,
    bootstrap,
    bpe,
    material,
    moved,
    rho,
)

from pipelines.sizes import SIZES
from pipelines.steps.pricing import STUDIED
from provenance.canonical import jcs
from trainer.model import Transformer
from trainer.spec import BatchSpec, OptimSpec, RunConfig, RunSpec, no_versions, save_run
from valuation import exact_shapley
from valuation.bank import ORDER, load_utilities
from valuation.proxy import retrain
from valuation.transfer import Transfer, proxy_digest, write_transfers

NAMES = (*PRESIDENTS, *OTHERS)
MEASURED = ("tiny", "small", "default", "report")
COMMAND = "make accept STUDY=owners-transfer-sizes"


def prepared(size, tokens, target, seed, folder):
    """The graph's proxy run of a size, on these tokens.

    Args:
        size: of `pipelines.sizes`.
        tokens: (folder, digest) of the records.
        target: the same of the target.
        seed: of weights and order.
        folder: of the run.
    """
    steps = -(-size.proxy_tokens // (size.rows * size.length))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "groups.json").write_bytes(jcs({"groups": [{"id": n, "owners": [n]} for n in NAMES]}))
    extra = {"groups": "groups.json", "target": str(target[0]), "target_digest": target[1], "order": ORDER}  # fmt: skip
    run = RunSpec(
        run=folder.name, kind="proxy", entry="valuation.proxy:retrain", seed=seed, tokens=str(tokens[0]), tokens_digest=tokens[1], steps=steps,
        versions=no_versions(), config=RunConfig(
            model=size.proxy.shape(size.vocab_size), optim=OptimSpec(lr=float(size.lr), warmup_steps=min(size.warmup, steps)),
            batch=BatchSpec(rows=size.rows, length=size.length), extra=extra,
        ),
    )  # fmt: skip
    save_run(run, folder)
    return run


def values(size, rows, target, spare):
    """Exact values [R, O] in nats per character of the target, and the proxy's digest."""
    coder, vocab = bpe(spare, size.vocab_size), size.vocab_size
    base, characters = STATE / f"transfer-{vocab}", sum(map(len, target))
    tokens, aim = (
        (base / name, write(base / name, [(o, coder(t)) for o, t in found], vocab=vocab, end=vocab - 1))
        for name, found in (("train", rows), ("target_value", [("buyer", t) for t in target]))
    )  # fmt: skip
    made = []
    for seed in SEEDS:
        folder = STATE / f"transfer-sizes/{size.name}-{seed}"
        retrain(prepared(size, tokens, aim, seed, folder), folder)
        value_C = -load_utilities(folder).nll_CQ.sum(1) / characters
        made.append(exact_shapley(value_C[:, None], len(NAMES))[:, 0])
        print(size.name, "seed", seed, value_C[[0, -1]].round(3), made[-1].round(4), flush=True)  # noqa: T201 - a long study says that it lives
    return np.array(made), proxy_digest(json.loads((folder / "run.json").read_bytes()))


def larger():
    """Values [R, O] of the larger model, R = 1 where the figure has their mean only, and the commit they are of."""
    lines = map(json.loads, (HERE / "accept.jsonl").read_text().splitlines())
    line = next(one for one in lines if one["name"] == "valuation.owners.transfer")
    row = line["table"]["large"]
    return np.array([[v[n] for n in NAMES] for v in row.get("by_seed", [row["values"]])]), line["commit"]  # fmt: skip


def record_of(digest, found, seeds_known, commit):
    """A proxy's record: what was measured, in millionths; an interval is widened where it lacks its own estimate."""
    parts = {}
    for name, (estimate, low, high) in found.items():
        numbers = (estimate, min(low, estimate), max(high, estimate))
        parts |= {f"{name}{end}": round(x * 10**6) for end, x in zip(("", "_low", "_high"), numbers, strict=True)}  # fmt: skip
    words = "50,000 characters of presidents, mathematics and plays, for addresses since 1994"
    return Transfer(
        proxy=digest, parameters=sum(p.numel() for p in Transformer(LARGE.spec).parameters()), owners=len(NAMES), seeds=len(SEEDS), **parts,
        measured_on=f"{words}; larger model of {commit[:12]}, {'its seeds too' if seeds_known else 'its seeds not in the interval'}", command=COMMAND,
    )  # fmt: skip


def study():
    """Every size's proxy against the larger model, and the file of their records."""
    rows, target, spare = material()
    large_Rn, commit = larger()
    records, table, found = {}, {}, {}
    for name in MEASURED:
        value_Rn, digest = values(SIZES[name], rows, target, spare)
        parts = {
            label: (function(value_Rn.mean(0), large_Rn.mean(0)), *bootstrap(function, value_Rn, large_Rn))
            for label, function in (("rank", rho), ("moved", moved))
        }  # fmt: skip
        records[digest] = record_of(digest, parts, len(large_Rn) > 1, commit)
        found[name] = parts
        table[name] = {
            "proxy": digest, "values": dict(zip(NAMES, value_Rn.mean(0).round(5).tolist(), strict=True)), "rho": list(parts["rank"]),
            "moved": list(parts["moved"]), "seeds agree": rho(*value_Rn), "seeds move": moved(*value_Rn),
        }  # fmt: skip
    write_transfers(STUDIED, records.values())
    said = "; ".join(starmap("{}: rank {:.2f} ({:.2f} to {:.2f}), {:.1%} ({:.1%} to {:.1%}) of the pool moves".format, ((n, *p["rank"], *p["moved"]) for n, p in found.items())))  # fmt: skip
    lacks = "" if len(large_Rn) > 1 else f"; intervals over owners and the proxies' seeds, not over the larger model's, whose values are those of {commit[:12]}"  # fmt: skip
    worst, first = max((p["moved"] for p in found.values()), key=lambda p: p[0]), found["default"]["rank"]  # fmt: skip
    figure("sizes", worst, unit="share", bar="<= 0.1", holds=worst[0] <= 0.1, what="share of the pool that would change hands, worst of the proxies of four sizes", table=table, note=said + lacks)  # fmt: skip
    figure("default", first, unit="1", bar=">= 0.8", holds=first[0] >= 0.8, what="Spearman correlation of owner values from the proxy of SIZE=default with those of a 7.2M model, 5 owners", note=lacks.removeprefix("; "))  # fmt: skip


def figure(name, found, **more):
    """A line of this study."""
    estimate, low, high = found
    record(
        "accept.jsonl", f"valuation.owners.transfer.{name}", packages=PACKAGES, kind="hypothesis", seeds=list(SEEDS), n=len(SEEDS), estimate=estimate,
        low=low, high=high, level=0.95, spread="bootstrap over owners and seeds", command=COMMAND, **more,
    )  # fmt: skip
