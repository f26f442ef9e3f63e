"""Do real copycats earn by what they copied? `make accept STUDY=owners-copycats`.

Installed distributions vendor each other's functions: pip carries old copies of rich, pyparsing and requests, setuptools one of packaging. Records
are functions of 120 to 600 characters; owners are the four originals and the two copycats with functions of their own. A vendored function is

    verbatim    its text stands in the original                                       pip, setuptools
    near        same module and name, other text, Jaccard similarity of shingles >= 0.85
    drifted     the same, 0.5 to 0.85: below the threshold of a cluster, so new text by the rules

Each way to deliver goes through the platform's own path: clusters, first commits, four lots cut blind to owners, exact Shapley over retrained
coalitions, the pool split by the rule. Gain and loss are paired differences over seeds against the delivery without vendored functions, in half-widths
of the owner's own interval (over target records and seeds). The buyer's target: functions of other distributions. As a control the
copies are also left in the game with lots that know nothing of clusters (`naive`): there copying must pay, or this study could not see it.
"""

import ast
import hashlib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from figures import record
from owner_games import nll, stored
from setting import MODEL
from study_transfer import VOCAB, bpe

from valuation import (
    cluster,
    content_axis,
    cut_lots,
    exact_shapley,
    first_in_cluster,
    lot_shares,
    owner_intervals,
)
from valuation.shingles import shingle_hashes, token_hashes

SEEDS = (0, 1)
SITE = Path(find_spec("pip").submodule_search_locations[0]).parent
COPIED = {"pip": ("rich", "pyparsing", "requests"), "setuptools": ("packaging",)}
OWN = {"pip": "pip/_internal", "setuptools": "setuptools"}
EACH, WAYS, QUERIES, LOTS = 60, 20, 96, 4
SPEC = replace(MODEL, vocab_size=VOCAB, tied=True)
PACKAGES = ("torch", "numpy", "tokenizers", "pip", "setuptools", "rich", "pyparsing", "requests", "packaging", "jinja2", "networkx")  # fmt: skip


def functions(folder):
    """(module, name) → text of every function of 120 to 600 characters, vendored folders apart."""
    found = {}
    for file in sorted((SITE / folder).rglob("*.py")):
        where = file.relative_to(SITE / folder)
        if "_vendor" in where.parts or "tests" in where.parts:
            continue
        text = file.read_text(errors="replace")
        lines = text.splitlines()
        stack = [("", ast.parse(text))]
        while stack:
            prefix, node = stack.pop()
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.ClassDef):
                    stack.append((f"{prefix}{child.name}.", child))
                elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                    body = "\n".join(lines[child.lineno - 1 : child.end_lineno])
                    if 120 <= len(body) <= 600:
                        found[where.as_posix(), prefix + child.name] = body
    return found


def shingles(text):
    """Set of a text's shingles."""
    hashes, _ = shingle_hashes(*token_hashes([text]))
    return set(hashes.tolist())


def vendored(copycat, original):
    """Way → keys of the original's functions that the copycat carries, and the carried texts."""
    theirs, carried = functions(original), functions(f"{copycat}/_vendor/{original}")
    found = {"verbatim": [], "near": [], "drifted": []}
    for key in sorted(carried.keys() & theirs.keys()):
        one, other = shingles(carried[key]), shingles(theirs[key])
        alike = len(one & other) / len(one | other)
        way = "verbatim" if carried[key] == theirs[key] else "near" if alike >= 0.85 else "drifted"
        if alike >= 0.5:
            found[way].append((theirs[key], carried[key]))
    return found


def material():
    """Texts of owners without their vendored functions; copycat → way → texts; the target's; texts for the tokenizer."""
    rng = np.random.default_rng(20261202)

    def some(texts, count):
        texts = sorted(set(texts), key=lambda t: hashlib.sha256(t.encode()).digest())
        return [texts[i] for i in rng.permutation(len(texts))[:count]]

    own, copies = {}, {}
    for copycat, originals in COPIED.items():
        copies[copycat] = {"verbatim": [], "near": [], "drifted": []}
        for original in originals:
            needed = []
            for way, pairs in vendored(copycat, original).items():
                taken = [pairs[i] for i in rng.permutation(len(pairs))[:WAYS]]
                copies[copycat][way] += [text for _, text in taken]
                needed += [text for text, _ in taken]
            rest = set(functions(original).values()) - set(needed)
            own[original] = list(dict.fromkeys([*needed, *some(rest, EACH)]))
        own[copycat] = some(functions(OWN[copycat]).values(), EACH)
    return own, copies, some(functions("jinja2").values(), QUERIES), some(functions("networkx").values(), 300)  # fmt: skip


def deliveries(own, copies):
    """Way → (owner, text, place of the commit), originals first or, in `first`, copies first."""
    base = [(o, t, 1000 + i) for i, (o, t) in enumerate((o, t) for o in own for t in own[o])]

    def with_copies(ways, start):
        rows = [(c, t) for c in copies for way in ways for t in copies[c][way]]
        return base + [(c, t, start + i) for i, (c, t) in enumerate(rows)]

    return {
        "without": base, "verbatim": with_copies(["verbatim"], 9000), "near": with_copies(["near"], 9000),
        "drifted": with_copies(["drifted"], 9000), "first": with_copies(["verbatim"], 0), "naive": with_copies(["verbatim"], 9000),
    }  # fmt: skip


def delivered(way, rows, target, coder):
    """Owners, lots' token shares, membership and folders of a delivery; and how many copies no cluster caught."""
    rows = sorted(rows, key=lambda row: (row[0], row[2]))  # leaves stand by owner
    texts = [t for _, t, _ in rows]
    # Naive: every record is taken for another one, whatever it says.
    prints = [hashlib.sha256((f"{i} " if way == "naive" else "").encode() + t.encode()).digest() for i, t in enumerate(texts)]  # fmt: skip
    order_N = np.array([place for _, _, place in rows])
    first_N = np.ones(len(rows), bool)
    if way != "naive":
        # As in the graph, whose leaves stand in the order of commits: what comes later never leads what came before.
        by_N = np.argsort(order_N)
        cluster_N = np.empty_like(by_N)
        cluster_N[by_N] = cluster([prints[i] for i in by_N], [texts[i] for i in by_N]).cluster_N
        first_N = first_in_cluster(cluster_N, order_N)
    tokens = [coder(t) for t in texts]
    lengths = np.array([len(t) for t in tokens])
    axis_N = content_axis(np.concatenate(tokens), np.concatenate([[0], np.cumsum(lengths)]), prints, first_N)  # fmt: skip
    lots = cut_lots(prints, lengths, [None] * len(rows), [False] * len(rows), first_N, axis_N, LOTS)
    owners, tokens_OK = lot_shares(lots, [o for o, _, _ in rows], lengths)
    member_KN = np.array([lots.lot_N == k for k in range(len(lots.ids))])
    copied_N = (order_N >= 9000) | (order_N < 1000)
    found = stored(f"copycats-{way}", [(o, t) for o, t, _ in rows], target, coder, VOCAB, VOCAB - 1)
    return found, member_KN, owners, tokens_OK, (int((copied_N & first_N).sum()), int(copied_N.sum()))  # fmt: skip


def valued(way, rows, target, coder):
    """Owners, values [R, O] by seed, half-widths [O], and (valued, delivered) copies of one delivery."""
    found, member_KN, owners, tokens_OK, caught = delivered(way, rows, target, coder)
    made = []
    for seed in SEEDS:
        nll_CQ, tokens_Q = nll(found, member_KN, range(1 << len(member_KN)), seed, SPEC)
        made.append(owner_intervals(-exact_shapley(nll_CQ, len(member_KN)), tokens_OK, tokens_Q))
    values_RO = np.array([one.values_n for one in made])
    errors_O = np.mean([one.se_n for one in made], axis=0)
    half_O = 1.96 * np.sqrt(errors_O**2 + values_RO.var(0, ddof=1) / len(SEEDS))
    print(way, caught, flush=True)  # noqa: T201 - a long study says that it lives
    return owners, values_RO, half_O, caught


def change(after, before):
    """Owner's change of value in half-widths, and of its share of the pool."""
    gap_O = (after[1] - before[1]).mean(0) / before[2]
    one_O, other_O = (np.maximum(v[1].mean(0), 0) for v in (after, before))
    return gap_O, one_O / one_O.sum() - other_O / other_O.sum()


def study():
    """What has a bar first, so that a killed study has it; then what is only reported."""
    own, copies, target, spare = material()
    coder = bpe(spare)
    target = [("buyer", t) for t in target]
    rows, found = deliveries(own, copies), {}

    def row(way):
        """Owner → value, half-width, gain in half-widths, gain in shares of the pool."""
        owners, values_RO, half_O, _ = found[way]
        parts = (values_RO.mean(0), half_O, *change(found[way], found["without"]))
        return {
            owner: dict(zip(("value", "half", "gain", "share"), map(float, numbers), strict=True))
            for owner, *numbers in zip(owners, *parts, strict=True)
        }

    def best(way, pick=max):
        """The largest gain among the copycats (max), or the largest loss among the originals (min)."""
        gap_O, owners = change(found[way], found["without"])[0], found[way][0]
        return float(
            pick(g for g, o in zip(gap_O, owners, strict=True) if (o in COPIED) == (pick is max))
        )

    def told(*ways):
        """How many copies were valued."""
        return "; ".join("{}: {} of {} copies valued".format(way, *found[way][3]) for way in ways)

    for way in ("without", "verbatim", "near"):
        found[way] = valued(way, rows[way], target, coder)
    honest = ("verbatim", "near")
    gain, loss = max(map(best, honest)), min(best(way, min) for way in honest)
    note = told(*honest)
    figure("gain", gain, "<= 1", "requirement", gain <= 1, "largest gain of pip or setuptools by its verbatim or near-verbatim vendored functions", note=note, table={way: row(way) for way in found})  # fmt: skip
    figure(
        "loss",
        loss,
        ">= -1",
        "requirement",
        loss >= -1,
        "largest loss of a vendored distribution",
        note=note,
    )
    found["naive"] = valued("naive", rows["naive"], target, coder)
    naive = best("naive")
    figure("control", naive, "> 1", "hypothesis", naive > 1, "the same gain where copies are not found", note="a control: where it holds, copying could have been seen")  # fmt: skip
    for way, what in (("drifted", "gain by vendored functions of older versions, similarity 0.5 to 0.85, which the rules take for new text"), ("first", "gain by verbatim copies that were committed before their originals")):  # fmt: skip
        found[way] = valued(way, rows[way], target, coder)
        figure(way, best(way), "none", "hypothesis", None, f"largest {what}", note=told(way), table={way: row(way)})  # fmt: skip


def figure(name, estimate, bar, kind, holds, what, **more):
    """A line of this study."""
    record(
        "accept.jsonl", f"valuation.owners.copycats.{name}", packages=PACKAGES, kind=kind, seeds=list(SEEDS), n=len(SEEDS), unit="half-widths",
        what=f"{what}, in half-widths of the owner's interval", estimate=estimate, low=None, high=None, level=None, spread="mean over seeds", bar=bar,
        holds=holds, command="make accept STUDY=owners-copycats", **more,
    )  # fmt: skip
