"""Are planted texts worth nothing to a buyer who has a base model? `make accept STUDY=owners-planted-base`.

The players, records and target of `owners-planted`, but V(nobody) is a *base model*: the same char-GPT, trained for three passes on 600 human solutions
of other problems that no player owns. Coalitions go on from its weights (a proxy run's `init`), one pass at a quarter of its rate, as a
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

RECORDS, PASSES, RATE = 600, 3, 1e-3
FOLDER = STATE / "owners-planted-base"


def base_texts(rows):
    """Human solutions of problems that no player has."""
    taken = {text for _, text in rows}
    return [text for text in solutions(10_000, seed=1)["human"] if text not in taken][:RECORDS]


def based(texts, seed):
    """Folder and root of the base model of a seed, trained where it isn't there."""
    digest = write(FOLDER / "base", [("base", encode(text)) for text in texts])
    tokens = sum(len(encode(text)) for text in texts)
    run = RunSpec(
        run=f"base-{seed}", seed=seed, tokens="../base", tokens_digest=digest, versions=no_versions(),
        steps=-(-PASSES * tokens // (BATCH.rows * BATCH.length)), config=RunConfig(model=MODEL, optim=OPTIM, batch=BATCH),
    )  # fmt: skip
    folder = FOLDER / run.run
    save_run(run, folder)
    if not (folder / "result.json").exists():
        command = [sys.executable, "-m", "trainer", "--run", str(folder / "run.json")]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    made = json.loads((folder / "result.json").read_bytes())
    return folder / made["checkpoint"], made["checkpoint_root"]


def utilities(found, member_KN, names, seed, base):
    """Summed nats [C, Q] of all coalitions that go on from the base, and the target's tokens [Q]."""
    folder = FOLDER / f"bank-{seed}"
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


def study():
    """Planted owners' values on top of a base, beside the clean ones'."""
    rows, names, member_KN, copied = plants()
    found, texts = stored("planted", rows), base_texts(rows)
    values, spread, start = [], [], []
    for seed in SEEDS:
        nll_CQ, tokens_Q = utilities(found, member_KN, names, seed, based(texts, seed))
        one = owner_intervals(-exact_shapley(nll_CQ, len(names)), np.eye(len(names), dtype=int), tokens_Q)  # fmt: skip
        values.append(one.values_n)
        spread.append(one.se_n)
        start.append((nll_CQ[[0, -1]].sum(1) / tokens_Q.sum()).tolist())
        print("seed", seed, "of", list(SEEDS), one.values_n.round(4), flush=True)  # noqa: T201 - a long study says that it lives
    values_RK = np.array(values)
    half_K = 1.96 * np.sqrt(np.mean(spread, axis=0) ** 2 + values_RK.var(0, ddof=1) / len(SEEDS))
    mean_K = values_RK.mean(0)
    clean = float(mean_K[:2].mean())
    worst = float(max(mean_K[2:] + half_K[2:]) / abs(clean))
    least = float(min(mean_K[:2] - half_K[:2]) / abs(clean))
    note = (
        f"the copy has {copied} valued records of 100 and so the value 0; {said(names, mean_K, half_K)}; loss of the base and of everybody "
        f"on top of it, by seed: {json.dumps([[round(x, 3) for x in pair] for pair in start])}"
    )
    common = {
        "packages": PACKAGES, "seeds": list(SEEDS), "n": len(SEEDS), "unit": "1", "low": None, "high": None, "level": 0.95,
        "spread": "interval over targets and seeds", "command": "make accept STUDY=owners-planted-base",
    }  # fmt: skip
    record(
        "accept.jsonl", "valuation.owners.planted_base", kind="requirement", estimate=worst, bar="<= 0", holds=worst <= 0 and copied == 0, note=note,
        what="largest upper end of a planted owner's value over the mean clean owner's, V(nobody) = a base model", **common,
    )  # fmt: skip
    record(
        "accept.jsonl", "valuation.owners.planted_base.clean", kind="hypothesis", estimate=least, bar="> 0", holds=least > 0 and clean > 0, note="",
        what="smallest lower end of a clean owner's value over the mean clean owner's in that study", **common,
    )  # fmt: skip
