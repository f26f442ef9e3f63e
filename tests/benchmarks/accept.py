"""`make accept STUDY=name`: slow studies whose figures stand in README, written to `accept.jsonl`. Resumable.

Studies: `graph` runs the default size twice in a home of its own (`DATAWORTH_HOME`, default `.dataworth-accept`), and reads
times, memory and leak rates off it. A killed study goes on where it stopped, because the graph does; its time then counts
from the restart and the line says so. `influence-*`, `damping-*`, `finetuned-*`, `detection-*`, `removal-*`, `removal-finetuned-*` and `pays-*` (of `kinds`, `peps`, `sotu`) and `magic`
hold values against retraining; `audit-pilot` attacks made-up people's models, `audit-sharded` models of shards, `audit-ulira` single records by shadow models, `audit-practice` those of a pretrained model on TOFU, LUME and ours
(`-report`: as far as it is), `unlearning-sweep` chooses NPO's numbers, `unlearning-adapters` holds low-rank adapters against training all weights,
`unlearning-coreset` a core-set by gradients against random ones; each keeps its trainings in `.dataworth-accept/studies`, so a second call computes what is missing.
"""

import importlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from figures import ROOT, record

PACKAGES = ("torch", "numpy", "polars", "dagster")


def graph():
    """Default size from an empty home, then once more."""
    home = Path(os.environ.get("DATAWORTH_HOME") or ROOT / ".dataworth-accept").resolve()
    fresh = not home.exists()
    note = "from an empty home" if fresh else "resumed: times are not from an empty home"
    seconds = [run(home), run(home)]
    peak = max(
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
        result(home, "checkpoint")["peak_rss_bytes"],
    )
    seeds = result(home, "evaluation_plan")["seeds"]
    common = {
        "packages": PACKAGES,
        "kind": "requirement",
        "seeds": [seeds["train"], seeds["proxy"]],
        "command": "make accept STUDY=graph",
        "note": note,
    }
    single(
        "pipelines.graph.default_seconds",
        seconds[0],
        "s",
        "<= 900",
        holds=seconds[0] <= 900 if fresh else None,
        **common,
    )
    single(
        "pipelines.graph.default_peak_bytes",
        peak,
        "byte",
        "<= 3 GiB",
        holds=peak <= 3 * 2**30,
        **common,
    )
    single(
        "pipelines.graph.again_seconds", seconds[1], "s", "<= 60", holds=seconds[1] <= 60, **common
    )
    audit = json.loads((home / result(home, "robustness_audit")["files"][0]).read_text())
    rates = {row["name"]: row for row in audit["endpoints"] if not row["subgroup"]}
    people = rates["direct"]["people"]
    from scipy.stats import binomtest

    original = float(rates["direct"]["original"])
    gold = max(
        float(value)
        for name in ("direct", "in_context", "fine_tune")
        for value in rates[name]["gold"]
    )
    for name, share, bar, holds in (
        ("original_leaks", original, ">= 0.5", original >= 0.5),
        ("gold_leaks", gold, "<= 0.04", gold <= 0.04),
    ):
        interval = binomtest(round(share * people), people).proportion_ci(0.95)
        record(
            "accept.jsonl", f"pipelines.graph.{name}", estimate=share, low=float(interval.low), high=float(interval.high), level=0.95,
            unit="share", n=people, spread="Clopper-Pearson", bar=bar, holds=holds, what=f"verdict {audit['verdict']}", **common,
        )  # fmt: skip


def single(name, value, unit, bar, *, holds, **common):
    """A figure of one run: no spread, and it says so."""
    record(
        "accept.jsonl", name, estimate=value, low=None, high=None, level=None, unit=unit, n=1, spread="one run", bar=bar, holds=holds,
        what=name, **common,
    )  # fmt: skip


def run(home):
    """Seconds of `dataworth run` at the default size."""
    start = time.monotonic()
    program = Path(sys.executable).with_name("dataworth")
    subprocess.run(
        [program, "run", "--size", "default"],
        env={**os.environ, "DATAWORTH_HOME": str(home)},
        check=True,
    )
    return time.monotonic() - start


def result(home, asset):
    """Values of an asset's newest result."""
    return json.loads((home / "results" / asset / "latest.json").read_text())["values"]


def of(module, function, *arguments):
    """A study of another file, imported when it is asked for."""

    def run_it():
        sys.path.insert(0, str(ROOT))
        getattr(importlib.import_module(module), function)(*arguments)

    return run_it


STUDIES = {
    "graph": graph,
    "magic": of("study_magic", "study"),
    "magic-cg": of("study_magic", "solved"),
    "audit-pilot": of("study_audit", "study"),
    "audit-pilot-bpe": of("study_audit", "platform"),
    "audit-practice": of("study_practice", "study"),
    "audit-practice-report": of("study_practice", "report"),
    "audit-report": of("study_audit", "report"),
    "audit-ulira": of("study_ulira", "study"),
    "audit-sharded": of("study_sharded", "study"),
    "audit-sharded-160": of("study_sharded", "more"),
    **{f"influence-{name}": of("study_influence", "study", name) for name in ("kinds", "peps")},
    "damping-sotu": of("study_damping", "study", "sotu"),
    **{f"damping-{name}": of("study_damping", "confirm", name) for name in ("kinds", "peps")},
    "tuned-peps": of("study_damping", "tuned", "peps"),
    **{
        f"finetuned-{name}": of("study_finetuned", "study", name)
        for name in ("kinds", "sotu", "peps")
    },
    **{f"detection-{name}": of("study_planted", "detection", name) for name in ("sotu", "peps")},
    **{f"removal-{name}": of("study_removal", "study", name) for name in ("sotu", "peps")},
    **{
        f"removal-finetuned-{name}": of("study_removal_finetuned", "study", name)
        for name in ("kinds", "sotu", "peps")
    },
    **{f"owners-{name}": of("study_owners", name) for name in ("gsm8k", "planted", "shells")},
    "owners-planted-base": of("study_bases", "study"),
    "owners-entropy": of("study_entropy", "study"),
    "owners-transfer": of("study_transfer", "study"),
    "owners-transfer-records": of("study_records", "study"),
    "owners-transfer-sizes": of("study_sizes", "study"),
    "owners-time": of("study_eras", "study"),
    "owners-copycats": of("study_copycats", "study"),
    "owners-updates": of("study_updates", "study"),
    "owners-languages": of("study_languages", "study"),
    "unlearning-sweep": of("study_sweep", "study"),
    "unlearning-adapters": of("study_adapters", "study"),
    "unlearning-coreset": of("study_coreset", "study"),
    **{f"pays-{name}": of("study_pays", "study", name) for name in ("sotu", "peps")},
}

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in STUDIES:
        sys.exit(f"make accept STUDY=name: expected one of {', '.join(STUDIES)}, got {name!r}")
    STUDIES[name]()
