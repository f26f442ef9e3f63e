"""Are planted texts worth nothing to a buyer who has a base model? `make accept STUDY=owners-planted-base`.

The players, records and target of `owners-planted`, but V(nobody) is a *base model*: the same char-GPT, trained for three passes on 600 human solutions
(`small`: one pass on 100 of them; `middle`: two on 300) of other problems that no player owns. Coalitions go on from its weights (a proxy run's `init`), one pass at a quarter of its rate, as a
fine-tuning would: a base has left the warm-up behind it. What shuffled text teaches a model that knows nothing, the frequencies of
letters, the base knows already. Three seeds of base, weights and order.
"""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
from corpora import STATE, encode, write
from figures import record
from setting import BATCH, MODEL, OPTIM
from study_owners import PACKAGES, SEEDS, plants, said, solutions, stored

from provenance.canonical import jcs
from trainer.spec import RunConfig, RunSpec, no_versions, save_run
from valuation import exact_shapley, owner_intervals
from valuation.bank import ORDER, load_utilities
from valuation.proxy import retrain

RATE = 1e-3
BASES = {"": (600, 3), "small": (100, 1), "middle": (300, 2)}
"""Name → records and passes."""
FOLDER = STATE / "owners-planted-base"


def base_texts(rows):
    """Human solutions of problems that no player has."""
    taken = {text for _, text in rows}
    return [text for text in solutions(10_000, seed=1)["human"] if text not in taken]


def based(texts, name, seed):
    """Folder and root of the base model of a seed, trained where it isn't there."""
    count, passes = BASES[name]
    texts = texts[:count]
    digest = write(FOLDER / f"base{name}", [("base", encode(text)) for text in texts])
    tokens = sum(len(encode(text)) for text in texts)
    run = RunSpec(
        run=f"base{name}-{seed}", seed=seed, tokens=f"../base{name}", tokens_digest=digest, versions=no_versions(),
        steps=-(-passes * tokens // (BATCH.rows * BATCH.length)), config=RunConfig(model=MODEL, optim=OPTIM, batch=BATCH),
    )  # fmt: skip
    folder = FOLDER / run.run
    save_run(run, folder)
    if not (folder / "result.json").exists():
        command = [sys.executable, "-m", "trainer", "--run", str(folder / "run.json")]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    made = json.loads((folder / "result.json").read_bytes())
    return folder / made["checkpoint"], made["checkpoint_root"]


def utilities(found, member_KN, names, name, seed, base):
    """Summed nats [C, Q] of all coalitions that go on from the base, and the target's tokens [Q]."""
    folder = FOLDER / f"bank{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "groups.json").write_bytes(jcs({"groups": [{"id": n, "owners": [n]} for n in names]}))
    lot_N = np.where(member_KN.any(0), member_KN.argmax(0), -1).astype("<i8").tobytes()
    (folder / "lots.bin").write_bytes(lot_N)
    extra = {
        "groups": "groups.json", "target": str(found.path("target_value")), "target_digest": found.digest["target_value"],
        "lots": ["lots.bin", hashlib.sha256(lot_N).hexdigest()], "order": ORDER,
    }  # fmt: skip
    checkpoint, root = base
    run = RunSpec(
        run=folder.name, kind="proxy", entry="valuation.proxy:retrain", seed=seed, tokens=str(found.path("train")),
        tokens_digest=found.digest["train"], steps=100_000, versions=no_versions(), init=str(checkpoint), init_root=root,
        config=RunConfig(model=MODEL, optim=replace(OPTIM, lr=RATE), batch=BATCH, extra=extra),
    )  # fmt: skip
    save_run(run, folder)
    retrain(run, folder)
    made = load_utilities(folder)
    return made.nll_CQ, made.tokens_Q


def played(name, rows, names, member_KN, found):
    """Values [R, K], half-widths [K] and mean loss [R, C] of all coalitions on top of a base."""
    values, spread, loss, texts = [], [], [], base_texts(rows)
    for seed in SEEDS:
        base = based(texts, name, seed)
        nll_CQ, tokens_Q = utilities(found, member_KN, names, name, seed, base)
        one = owner_intervals(-exact_shapley(nll_CQ, len(names)), np.eye(len(names), dtype=int), tokens_Q)  # fmt: skip
        values.append(one.values_n)
        spread.append(one.se_n)
        loss.append(nll_CQ.sum(1) / tokens_Q.sum())
        print(name, "seed", seed, "of", list(SEEDS), one.values_n.round(4), flush=True)  # noqa: T201 - a long study says that it lives
    values_RK = np.array(values)
    half_K = 1.96 * np.sqrt(np.mean(spread, axis=0) ** 2 + values_RK.var(0, ddof=1) / len(SEEDS))
    return values_RK, half_K, np.array(loss)


def study():
    """Planted owners' values on top of two bases, beside the clean ones'."""
    rows, names, member_KN, copied = plants()
    found = stored("planted", rows)
    spread = "interval over targets and seeds"
    for name, size in BASES.items():
        values_RK, half_K, loss_RC = played(name, rows, names, member_KN, found)
        mean_K = values_RK.mean(0)
        clean = float(mean_K[:2].mean())
        worst = float(max(mean_K[2:] + half_K[2:]) / abs(clean))
        table = {
            "+".join(n for k, n in enumerate(names) if mask >> k & 1) or "nobody": float(x)
            for mask, x in enumerate(loss_RC.mean(0))
        }
        figure(
            f".{name}" if name else "", worst, kind="requirement", bar="<= 0", holds=worst <= 0 and copied == 0, table=table, unit="1", spread=spread,
            what="largest upper end of a planted owner's value over the mean clean owner's, V(nobody) = a base model of {} records and {} passes".format(*size),
            note=f"the copy has {copied} valued records of 100 and so the value 0; {said(names, mean_K, half_K)}; mean loss of the target by coalition in `table`",
        )  # fmt: skip
        if not name:
            least = float(min(mean_K[:2] - half_K[:2]) / abs(clean))
            figure(
                ".clean", least, kind="hypothesis", bar="> 0", holds=least > 0 and clean > 0, note="", unit="1", spread=spread,
                what="smallest lower end of a clean owner's value over the mean clean owner's in that study",
            )  # fmt: skip
            continue
        gain_RK = loss_RC[:, [0]] - loss_RC[:, [1, 2]]
        figure(
            ".alone" if name == "small" else f".{name}_alone", float(gain_RK.min()), kind="hypothesis", bar="> 0", holds=bool(gain_RK.min() > 0),
            note=f"by seed {gain_RK.round(4).tolist()}", unit="nats per token", spread="least of the seeds",
            what=f"what a clean owner alone gains on top of the {name} base, the lesser of two",
        )  # fmt: skip


def figure(name, estimate, **more):
    """A line of this study."""
    record(
        "accept.jsonl", f"valuation.owners.planted_base{name}", packages=PACKAGES, seeds=list(SEEDS), n=len(SEEDS), estimate=estimate, low=None, high=None,
        level=0.95, command="make accept STUDY=owners-planted-base", **more,
    )  # fmt: skip
