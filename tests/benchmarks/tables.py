"""Markdown tables of README.md and valuation/README.md from `accept.jsonl`: `python tests/benchmarks/tables.py influence|planted|pays`."""

# ruff: noqa: T201 - this program's output

import json
import sys

from figures import HERE

WORD = {True: "yes", False: "**no**", None: ""}


def lines():
    """Name -> line of accept.jsonl."""
    found = (json.loads(text) for text in (HERE / "accept.jsonl").read_text().splitlines())
    return {line["name"]: line for line in found}


def interval(line, digits=3):
    """Estimate and interval in words."""
    if line is None or line["estimate"] is None:
        return "not measured"
    if line["low"] is None:
        return f"{line['estimate']:.{digits}g}"
    numbers = (line["estimate"], line["low"], line["high"])
    return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(*numbers, d=digits)


def influence(found):
    """One row per method, one column of LDS per corpus, CPU seconds of the first."""
    tables = {
        c: found.get(f"valuation.influence.{c}.table", {}).get("table", {})
        for c in ("kinds", "peps")
    }
    methods = sorted(
        {m for t in tables.values() for m in t},
        key=lambda m: -max(t[m]["lds"] for t in tables.values() if m in t),
    )
    print(
        "| method | LDS, kinds | LDS, peps | target as a whole, kinds / peps | CPU s | memory added |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for method in methods:
        cells = [t.get(method) for t in tables.values()]
        shown = ["{lds:.3f} ({low:.3f} to {high:.3f})".format(**c) if c else "" for c in cells]
        whole = " / ".join(f"{c['target']:.2f}" if c else "" for c in cells)
        one = next(c for c in cells if c)
        print(
            f"| {method} | {shown[0]} | {shown[1]} | {whole} | {one['cpu_s']:.2f} | {one['grown_mb']:.0f} MB |"
        )
    lines = [found.get(f"valuation.influence.{c}.table", {}).get("target_only", {}) for c in tables]
    for method in sorted({m for line in lines for m in line}):  # values of the whole have no LDS
        whole = " / ".join(f"{line[method]:.2f}" if method in line else "" for line in lines)
        print(f"| {method} | none | none | {whole} | | |")
    rows(found, "valuation.influence.", skip="table")


def rows(found, prefix, skip="\0"):
    """One row per figure."""
    print("\n| figure | estimate (interval) | bar | holds |\n| --- | --- | --- | --- |")
    for name, line in sorted(found.items()):
        if name.startswith(prefix) and not name.endswith(skip):
            note = f"; {line['note']}" if line["note"] else ""
            digits = 4 if name.startswith("valuation.removal.") and ".finetuned_" in name else 3
            print(
                f"| `{name}`: {line['what']}{note} | {interval(line, digits)} {line['unit']} | {line['bar']} | {WORD[line['holds']]} |"
            )


def planted(found):
    """Detection and removal."""
    rows(found, "valuation.detection.")
    rows(found, "valuation.removal.")


def pays(found):
    """Loss less the random arm's, by rule."""
    print(
        "| chosen by | sotu, equal tokens | sotu, equal compute | peps, equal tokens | peps, equal compute | values cost |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for rule in ("influence", "inrun", "entropy", "dedup_quality", "bm25", "all"):
        cells = [
            found.get(f"valuation.pays.{c}.{m}.{rule}")
            for c in ("sotu", "peps")
            for m in ("tokens", "compute")
        ]
        spent = [x for cell in cells if cell for x in cell["cost_steps"]]
        cost = f"{sum(spent) / len(spent):.0f} steps" if spent else ""
        print(f"| {rule} | " + " | ".join(interval(cell) for cell in cells) + f" | {cost} |")


if __name__ == "__main__":
    {"influence": influence, "planted": planted, "pays": pays}[sys.argv[1]](lines())
