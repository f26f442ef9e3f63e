"""LDS of every influence method and every peer on one corpus: `make accept STUDY=influence-kinds` and `-peps`.

Truth is the bank of `setting.py`: 60 half subsets, each retrained from the seed's weights in the seed's order. Ours and peers run as
subprocesses on one input (`own_influence.py`, `peer_influence.py`), one thread each; those whose time is compared run
by turns, three times. Resumable: retrainings stand in the bank, scores of each method in the job's folder. `accept.py STUDY --present`
judges what is there and runs nothing new; `--ceiling` retrains the subsets with a second seed.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np
from corpora import corpus
from figures import ROOT, record
from setting import bank_losses, setting

from valuation.evaluation import lds, lds_difference, reliability, spearman_rows
from valuation.subsets import fit_subset

PEERS = os.environ.get("DATAWORTH_PEERS", str(ROOT / ".venv-peers"))
HERE = ROOT / "tests" / "benchmarks"
OWN = (
    "ekfac", "kfac", "ekfac_cg", "fisher", "tracin", "trak", "datainf", "logra", "less", "inrun", "dot", "cosine", "bm25",
    "bm25_tokens", "embedding", "entropy", "random",
)  # fmt: skip
THEIRS = (
    "kronfluence_ekfac", "kronfluence_kfac", "kronfluence_identity", "dattri_dot", "traker", "traker_tuned", "bergson_cosine",
)  # fmt: skip
TIMED = {"ekfac": "kronfluence_ekfac", "dot": "dattri_dot", "trak": "traker"}
ROUNDS = 3
CHECKPOINTS = (24, 48, 72, 96)
PACKAGES = ("torch", "numpy", "scipy")


def job(found, seed=0):
    """Folder with the model of all records, its checkpoints, and the rows of both sides."""
    folder = found.folder / f"job-{seed}"
    if (folder / "spec.json").exists():
        return folder
    from trainer.convert import export_model

    config = setting(found)
    train, target = config.stores()
    fit = fit_subset(config, np.ones(train.size, bool), seed, keep=CHECKPOINTS)
    arrays = {f"final/{name}": p.detach().numpy() for name, p in fit.model.named_parameters()}
    for step, snapshot in fit.states.items():
        arrays |= {f"{step}/weights/{name}": w.numpy() for name, w in snapshot.weights.items()}
        arrays |= {f"{step}/optimizer/{name}": w.numpy() for name, w in snapshot.optimizer.items()}
        arrays[f"{step}/lr"] = np.array(snapshot.lr)
    rows = [
        np.stack([s.tokens(i) for i in range(s.size)]).astype(np.int64) for s in (train, target)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "input.npz", train_NT=rows[0], query_QT=rows[1], **arrays)
    if not (folder / "hf").exists():
        export_model(fit.model, folder / "hf", max_positions=config.batch.length, end_of_text=0)
    (folder / "folders.json").write_text(
        json.dumps({"corpus": found.name, "seed": seed, "digest": found.digest})
    )
    (folder / "spec.json").write_text(json.dumps(asdict(config.model)))
    return folder


def run(method, folder, number):
    """Scores and meters of one run of a method, from the job's folder or anew; the reason where it failed."""
    output = folder / f"{method}-{number}.npz"
    if not output.exists():
        if "--present" in sys.argv:
            return None, "not run yet: make accept without --present"
        own = method in OWN
        python = sys.executable if own else f"{PEERS}/bin/python"
        script = HERE / ("own_influence.py" if own else "peer_influence.py")
        if not own and not os.path.exists(python):  # noqa: PTH110 - a name, not a path of ours
            return None, "the peers' environment is missing: make peers"
        done = subprocess.run(
            [python, str(script), method, str(folder), str(output)], capture_output=True, text=True, check=False,
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            return None, lines[-1][:300]
    with np.load(output) as file:
        return {name: file[name] for name in file.files}, None


def study(name):
    """Everything on one corpus."""
    found = corpus(name, 256, 24)
    folder = job(found)
    runs, reasons = {}, {}
    for method in OWN + THEIRS:
        runs[method], reason = run(method, folder, 0)
        if reason:
            reasons[method] = reason
            print(method, "failed:", reason)  # noqa: T201 - this program's output
    member_MN, loss_RMQ = bank_losses(found, (0,))
    judged = {
        method: lds(got["scores_QN"], member_MN, loss_RMQ[0], rng()).lds
        for method, got in runs.items()
        if got is not None and len(got["scores_QN"]) > 1
    }
    whole = {
        method: round(
            float(
                spearman_rows(
                    got["scores_QN"].sum(0)[None] @ member_MN.T, -loss_RMQ[0].mean(1)[None]
                ).item()
            ),
            4,
        )
        for method, got in runs.items()
        if got is not None
    }
    table = {
        method: {
            "lds": round(e.estimate, 4), "low": round(e.low, 4), "high": round(e.high, 4),
            "target": whole[method], "cpu_s": round(float(runs[method]["cpu_s"]), 3), "grown_mb": round(float(runs[method]["grown_bytes"]) / 2**20, 1),
        }
        for method, e in sorted(judged.items(), key=lambda item: -item[1].estimate)
    }  # fmt: skip
    best = max((m for m in judged if m in OWN), key=lambda m: judged[m].estimate)
    prefix = f"valuation.influence.{name}."
    figure(
        name, prefix + "table", judged[best], what=f"LDS of {best}, the best of ours; all methods in `table`", bar="none",
        kind="hypothesis", holds=None, table=table, missing=reasons, target_only={m: w for m, w in whole.items() if m not in table},
    )  # fmt: skip
    compare(name, runs, member_MN, loss_RMQ[0])
    times(name, folder)
    exact(name, folder, runs["dot"])
    if "--ceiling" in sys.argv:
        ceiling(name, found)


def rng():
    """The bootstrap's generator; every comparison is made on the same draws."""
    return np.random.default_rng(7)


def figure(corpus_name, name, estimate, **more):
    """A line of accept.jsonl."""
    values = {
        "estimate": estimate.estimate, "low": estimate.low, "high": estimate.high, "level": estimate.level, "unit": "LDS",
        "n": 60, "seeds": [0], "spread": "bootstrap over queries and subsets", "packages": PACKAGES, "note": "",
        "command": f"make accept STUDY=influence-{corpus_name}",
    }  # fmt: skip
    record("accept.jsonl", name, **(values | more))


def absent(corpus_name, name, reason, **more):
    """A line that says why there is no number."""
    record(
        "accept.jsonl", name, estimate=None, low=None, high=None, level=None, unit="LDS", n=0, seeds=[0], spread="none",
        holds=None, packages=PACKAGES, note=reason, command=f"make accept STUDY=influence-{corpus_name}", **more,
    )  # fmt: skip


def compare(name, runs, member_MN, loss_MQ):
    """Differences of two methods on the same draws."""
    prefix = f"valuation.influence.{name}."
    pairs = (
        ("ekfac_lds", "ekfac", "kronfluence_ekfac", "0 within the interval, or above it", "requirement", lambda e: e.high >= 0),
        ("cg_above_ekfac", "ekfac_cg", "ekfac", "low > 0", "requirement", lambda e: e.low > 0),
        ("ekfac_above_bm25", "ekfac", "bm25", "low > 0", "hypothesis", lambda e: e.low > 0),
        ("trak_lds", "trak", "traker_tuned", "low > 0", "requirement", lambda e: e.low > 0),
        ("trak_untuned_lds", "trak", "traker", "low > 0", "requirement", lambda e: e.low > 0),
        ("bergson", "ekfac", "bergson_cosine", "none", "hypothesis", lambda _: None),
    )  # fmt: skip
    for figure_name, one, two, bar, kind, holds in pairs:
        what = f"LDS of {one} less that of {two}"
        if runs[one] is None or runs[two] is None:
            absent(
                name,
                prefix + figure_name,
                f"{one if runs[one] is None else two} is missing",
                what=what,
                bar=bar,
                kind=kind,
            )
            continue
        gap = lds_difference(
            runs[one]["scores_QN"], runs[two]["scores_QN"], member_MN, loss_MQ, rng()
        )
        figure(name, prefix + figure_name, gap, what=what, bar=bar, kind=kind, holds=holds(gap))


def times(name, folder):
    """Ratios of CPU seconds and of memory, by turns."""
    bars = {"ekfac": 0.5, "dot": 0.2, "trak": 0.5}
    for own, peer in TIMED.items():
        turns = [(run(own, folder, k)[0], run(peer, folder, k)[0]) for k in range(ROUNDS)]
        measures = [("cpu_s", f"{own}_time", bars[own], "CPU seconds")]
        if own == "ekfac":
            measures.append(("grown_bytes", "ekfac_memory", 1.0, "memory added"))
        for field, figure_name, bar, what in measures:
            label = f"valuation.influence.{name}.{figure_name}"
            words = {
                "what": f"{what}: {own} over {peer}",
                "bar": f"ratio <= {bar}",
                "kind": "requirement",
            }
            if any(one is None or two is None for one, two in turns):
                absent(name, label, f"{own} or {peer} is missing", **words)
                continue
            ratio_K = np.array([float(one[field]) / float(two[field]) for one, two in turns])
            middle = [
                float(np.median([float(turn[side][field]) for turn in turns])) for side in (0, 1)
            ]
            record(
                "accept.jsonl", label, estimate=float(np.median(ratio_K)), low=float(ratio_K.min()), high=float(ratio_K.max()),
                level=None, unit="ratio", n=ROUNDS, seeds=[0], spread="least and greatest of the rounds",
                holds=bool(np.median(ratio_K) <= bar), packages=PACKAGES, note=f"ours {middle[0]:.4g}, {peer} {middle[1]:.4g}",
                command=f"make accept STUDY=influence-{name}", **words,
            )  # fmt: skip


def exact(name, folder, dot):
    """The dot products in float64 against autograd, one record at a time."""
    label = f"valuation.influence.{name}.dot_exact"
    words = {"what": "largest difference of float64 dot products to autograd's over the largest product",
             "bar": "<= 1e-10", "kind": "requirement"}  # fmt: skip
    if dot is None:
        absent(name, label, "dot is missing", **words)
        return
    error = float(dot["float64_error"])
    record(
        "accept.jsonl", label, estimate=error, low=None, high=None, level=None, unit="relative", n=dot["scores_QN"].size,
        seeds=[0], spread="maximum", holds=error <= 1e-10, packages=PACKAGES, note="", command=f"make accept STUDY=influence-{name}",
        **words,
    )  # fmt: skip


def ceiling(name, found):
    """Reliability of the losses over two seeds."""
    _, loss_RMQ = bank_losses(found, (0, 1))
    got = reliability(loss_RMQ, rng())
    figure(
        name, f"valuation.influence.{name}.ceiling", got.split_half, seeds=[0, 1], unit="reliability",
        what=f"reliability of the mean over two seeds; ceiling of an LDS against that mean {got.ceiling.estimate:.3f}, against one seed's losses as in `table` {got.ceiling_one.estimate:.3f}", bar="none",
        kind="hypothesis", holds=None,
    )  # fmt: skip
