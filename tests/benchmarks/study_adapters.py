"""What low-rank adapters do to forgetting: `make accept STUDY=unlearning-adapters`.

People, original and gold model of `unlearning-sweep` (made if need be, without its sweep). NPO by the graph's recipe, with the
graph's swept numbers: all weights, adapters of rank 16 and of rank 4, three seeds each. Of every model: who is given away when asked, by what people
stand out beneath the first answer (membership, exposure; distance from gold as in the sweep), what remains, and who
comes back in 50 benign fine-tuning steps (rows of 16 records of people who stay, two rates, best step). Finished runs are kept.
"""

import dataclasses
import json
import math
import statistics
from hashlib import sha256

import study_sweep as setting
import torch
import validation_corpus
from corpora import STATE
from figures import record
from scipy.stats import t

from provenance import jcs, write_atomic
from unlearning.attacks.fine_tune import attacked
from unlearning.attacks.memorised import OTHERS
from unlearning.methods.settings import SWEPT
from unlearning.plan import AttackPlan
from unlearning.probes import FileTokenizer
from unlearning.sweep import EXPOSURE, GIVEN_AWAY, MEMBERSHIP, RETAINED, Objective, Setting, Sign
from unlearning.trials import original_outcome, share_given_away, trained_outcome

STUDY = "unlearning-adapters"
FOLDER = STATE / STUDY
RANKS = (0, 16, 4)
SEEDS = (0, 1, 2)
RATES = ("0.0001", "0.001")
COMMON = setting.COMMON | {"command": f"make accept STUDY={STUDY}", "seeds": list(SEEDS)}


def study():
    """Nine runs, four figures."""
    torch.set_num_threads(1)
    FOLDER.mkdir(parents=True, exist_ok=True)
    site, corpus = setting.people()
    base, own, lookalikes = setting.recipe(site, corpus), corpus.forgotten, corpus.lookalikes
    given = setting.runs(base, own, setting.FOLDER / "validation")
    golden, root = validation_corpus.model_of(corpus, "gold")
    gold_run = dataclasses.replace(given, init=str(golden), init_root=root)
    gold = original_outcome(gold_run, FOLDER, own, strangers=lookalikes)
    signs = (
        Sign(MEMBERSHIP, gold[MEMBERSHIP], 0.5),
        Sign(EXPOSURE, gold[EXPOSURE], math.log2(OTHERS + 1)),
    )
    wanted = Objective(retained=0.0, bound=0.0, signs=signs)
    one = chosen()
    tokenizer = FileTokenizer(site.home.tokenizer_path)
    length = base.config.batch.length
    batches = setting.benign(corpus, tokenizer)

    def back(model):
        return {
            f"restored {rate}": max(
                share_given_away(after, own, tokenizer, length)
                for _, after in attacked(model, batches, rate, AttackPlan().fine_tune_steps)
            )
            for rate in RATES
        }

    before = original_outcome(given, FOLDER, own, strangers=lookalikes)
    made_by = sha256(jcs([base.init_root, base.steps, one.name])).hexdigest()
    rows = finished(made_by)
    for seed in SEEDS:
        for rank in RANKS:
            name = f"rank={rank} seed={seed}"
            if name in rows:
                continue
            run = dataclasses.replace(given, seed=seed)
            extra = run.config.extra | ({"lora": {"rank": rank}} if rank else {})
            run = dataclasses.replace(run, config=dataclasses.replace(run.config, extra=extra))
            rows[name] = trained_outcome(one, run, FOLDER, own, strangers=lookalikes, further=back)
            rows[name]["apart"] = wanted.apart(rows[name])
            rows[name]["restored"] = max(rows[name][f"restored {rate}"] for rate in RATES)
            keep(rows, made_by)
            print(name, rows[name], flush=True)  # noqa: T201
    table = [{"arm": "original"} | before, {"arm": "gold"} | gold]
    table += [summary(rows, rank) for rank in RANKS]
    note = f"{one.name}, {base.steps} steps; alpha 16; adapters on all matrices of the blocks; interval: t over {len(SEEDS)} seeds"
    figures(rows, table, note)


def figures(rows, table, note):
    """Four lines."""
    direct = [rows[f"rank=4 seed={seed}"][GIVEN_AWAY] for seed in SEEDS]
    for name, values, bar, unit, what in (
        ("given_away", direct, 0.04, "share", "validation people given away with adapters of rank 4"),
        ("restored", paired(rows, "restored"), 0.1, "share", "restored by benign fine-tuning, rank 4 less all weights"),
        ("apart", paired(rows, "apart"), 0.1, "span", "distance from gold, rank 4 less all weights"),
        ("retained", paired(rows, RETAINED), 0.1, "nats per label", "retained loss, rank 4 less all weights"),
    ):  # fmt: skip
        mean, low, high = interval(values)
        record(
            "accept.jsonl", f"unlearning.adapters.{name}", estimate=mean, low=low, high=high, level=0.95, unit=unit, n=len(SEEDS),
            spread="t over seeds", bar=f"<= {bar}", holds=mean <= bar, what=what, note=note, table=table, **COMMON,
        )  # fmt: skip


def chosen():
    """The graph's own numbers."""
    rate, settings, recipe = SWEPT["npo"]
    return Setting("npo", rate, tuple(settings.items()), tuple(recipe.items()))


def paired(rows, measure):
    """Rank 4 less all weights, by seed."""
    return [
        rows[f"rank=4 seed={seed}"][measure] - rows[f"rank=0 seed={seed}"][measure]
        for seed in SEEDS
    ]


def interval(values):
    """Mean and 95 % t-interval."""
    mean, count = statistics.mean(values), len(values)
    half = float(t.ppf(0.975, count - 1)) * statistics.stdev(values) / math.sqrt(count)
    return mean, mean - half, mean + half


def summary(rows, rank):
    """One line of the table: measure -> [mean, low, high]."""
    own = [rows[f"rank={rank} seed={seed}"] for seed in SEEDS]
    return {"arm": f"rank {rank}" if rank else "all weights"} | {
        measure: list(interval([one[measure] for one in own])) for measure in own[0]
    }


def finished(made_by):
    """Runs that are done; none of another original or recipe."""
    file = FOLDER / "rows.json"
    found = json.loads(file.read_text()) if file.exists() else {"of": made_by, "rows": {}}
    return found["rows"] if found["of"] == made_by else {}


def keep(rows, made_by):
    """Write what is done."""
    write_atomic(FOLDER / "rows.json", json.dumps({"of": made_by, "rows": rows}).encode())
