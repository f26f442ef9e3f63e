"""NPO's numbers and recipe chosen on people whom nobody audits, then tried once on the audited: `make accept STUDY=unlearning-sweep`.

Chosen on the default corpus with 200 other people (`validation_corpus`): 100 are forgotten, 100 stay and are *held* to the audit's utility
margin, 200 were never trained on. Each setting by the graph's own recipe on one process: 100 steps, 32 records a step. Questions tell settings hardly
apart, so the rule also compares by what fails audits, membership and exposure, with a gold model of these people, and asks again after
the audit's own benign fine-tuning. Finished settings and both models are kept in `.dataworth-accept/studies`, so that a killed study
goes on. The chosen one is then tried once on the default home's 100 audited people. What is chosen is a line of `accept.jsonl`; the
graph's defaults are set by hand.
"""

import dataclasses
import json
import math
from hashlib import sha256

import numpy as np
import torch
import validation_corpus
from corpora import STATE
from figures import record
from scipy.stats import binomtest
from validation_corpus import OWNER

from provenance import jcs, seal, write_atomic
from trainer.checkpoint import load_model
from unlearning.attacks.fine_tune import attacked, permuted_batches
from unlearning.attacks.memorised import OTHERS
from unlearning.plan import AttackPlan, AuditPlan
from unlearning.probes import FileTokenizer
from unlearning.sweep import (
    EXPOSURE,
    GIVEN_AWAY,
    HELD,
    MEMBERSHIP,
    RESTORED,
    RETAINED,
    Objective,
    Person,
    Setting,
    Sign,
    Split,
    read_rows,
)
from unlearning.sweep import sweep as swept
from unlearning.trials import Held, losses_of, original_outcome, share_given_away, trained_outcome

STUDY = "unlearning-sweep"
FOLDER = STATE / STUDY
BOUND = 0.1  # nats per label above the original
HELD_BOUND = float(AuditPlan.__dataclass_fields__["utility_margin"].default)
FIGURES = {  # name → bar, unit
    "npo": ("<= 0.04", "share"),
    "npo_retained": ("<= 0.1", "nats per label"),
    "npo_apart": ("<= 0.3", "span"),
    "npo_held": ("<= 0.1", "nats per token"),
    "npo_apart_seeds": ("<= 0.3", "span"),
    "npo_held_seeds": ("<= 0.1", "nats per token"),
}
NEAR = ("neighbours", "0.9")
ALL = ("forget_tokens", "all")
SHIFTS = (1, 2)
KEY = sha256(b"made-up people: nothing is protected by this key").digest()
COMMON = {
    "packages": ("torch", "numpy"),
    "kind": "hypothesis",
    "command": f"make accept STUDY={STUDY}",
}


def grid():
    """Nine settings: the graph's of before; neighbours in nine tenths of what is retained; rates, all tokens, and a heavier retain term."""
    return [
        Setting("npo", "0.0005", (("beta", "0.1"),)),
        Setting("npo", "0.0005", (("beta", "0.1"),), (NEAR,)),
        Setting("npo", "0.0007", (("beta", "0.1"), ("retain_weight", "4")), (NEAR,)),
        *(Setting("npo", rate, (("beta", "0.1"),), (ALL, NEAR)) for rate in ("0.0005", "0.001", "0.002")),
        Setting("npo", "0.001", (("beta", "0.15"),), (ALL, NEAR)),
        *(
            Setting("npo", "0.001", (("beta", beta), ("retain_weight", "4")), (ALL, NEAR))
            for beta in ("0.1", "0.15")
        ),
    ]  # fmt: skip


def study():
    """Sweep on validation people, train the chosen setting on the audited, record both numbers."""
    torch.set_num_threads(1)
    site, corpus = people()
    own, never = corpus.forgotten, corpus.lookalikes
    base = recipe(site, corpus)
    given = runs(base, own, FOLDER / "validation")
    golden, gold_root = validation_corpus.model_of(corpus, "gold")
    gold_run = dataclasses.replace(given, init=str(golden), init_root=gold_root)
    held = held_of(golden, corpus)
    before = original_outcome(given, FOLDER, never)
    original = original_outcome(given, FOLDER, own, strangers=never, held=held)
    gold = original_outcome(gold_run, FOLDER, own, strangers=never, held=held)
    signs = (
        Sign(MEMBERSHIP, gold[MEMBERSHIP], 0.5),
        Sign(EXPOSURE, gold[EXPOSURE], math.log2(OTHERS + 1)),
    )
    wanted = Objective(
        retained=before[RETAINED], bound=BOUND, floor=before[GIVEN_AWAY], signs=signs, held_bound=HELD_BOUND
    )  # fmt: skip
    audited, staying = groups_of(site)
    split = Split(
        persons(own, validation_corpus.NAME), persons(audited), persons(corpus.held, validation_corpus.NAME), persons(staying)
    )  # fmt: skip
    common = [
        base.init_root, gold_root, base.tokens_digest, base.steps, str(base.seed), base.excluded.digest,
        sorted(one.record_id for one in corpus.held), repr(base.config), repr(AttackPlan()),
    ]  # fmt: skip
    file, settings = FOLDER / "rows.jsonl", grid()
    choice = swept(
        file, settings, lambda one: measured(one, given, corpus, held), split, wanted, key=KEY, common=sha256(jcs(common)).hexdigest()
    )  # fmt: skip
    rows = read_rows(file)
    table = [{"setting": "original"} | original, {"setting": "gold"} | gold]
    table += [
        {"setting": one.name, "apart": wanted.apart(rows[one.name])} | rows[one.name]
        for one in settings
    ]
    note = (
        f"{choice.reason}; the original gives away {original[GIVEN_AWAY]:.2f} of {len(split.validation)} validation people and "
        f"{before[GIVEN_AWAY]:.2f} of the look-alikes, and its retained loss is {before[RETAINED]:.4f}; membership and exposure "
        f"{original[MEMBERSHIP]:.3f} and {original[EXPOSURE]:.2f} bits, under gold {gold[MEMBERSHIP]:.3f} and {gold[EXPOSURE]:.2f}; "
        f"{len(split.held)} held people lose {original['held_loss']:.3f} nats per token, under gold {gold['held_loss']:.3f}"
    )
    print(note, flush=True)  # noqa: T201
    said = COMMON | {"note": note, "table": table, "seeds": [base.seed]}
    if choice.setting is None:
        for name in FIGURES:
            figure(name, None, said, what="no setting is admissible")
        return
    chosen = rows[choice.setting.name]
    figure("npo_apart", wanted.apart(chosen), said, n=len(split.validation), what="distance of the chosen setting from gold on validation people")  # fmt: skip
    figure("npo_held", chosen[HELD], said, n=len(split.held), what="cost to held people, upper 95 % bound")  # fmt: skip
    seeds = repeated(choice.setting, given, corpus, held)
    apart = [wanted.apart(one) for one in (chosen, *seeds)]
    costs = [one[HELD] for one in (chosen, *seeds)]
    told = said | {
        "seeds": [base.seed + shift for shift in (0, *SHIFTS)],
        "table": [{"apart": far} | one for far, one in zip(apart, (chosen, *seeds), strict=True)],
    }
    figure("npo_apart_seeds", max(apart), told, n=len(apart), spread="largest of the seeds", what="distance from gold, farthest of three orders")  # fmt: skip
    figure("npo_held_seeds", max(costs), told, n=len(costs), spread="largest of the seeds", what="cost to held people, highest of three orders")  # fmt: skip
    tried(site, choice.setting, base, audited, said)


def repeated(setting, given, corpus, held):
    """The chosen setting in other orders of batches: how far one seed's numbers can be trusted. Nothing is chosen by it."""
    found = []
    for shift in SHIFTS:
        made_by = [given.init_root, given.tokens_digest, given.steps, str(given.seed), setting.name]
        file = FOLDER / f"seed-{shift}-{sha256(jcs(made_by)).hexdigest()[:12]}.json"
        if not file.exists():
            run = dataclasses.replace(given, seed=given.seed + shift)
            write_atomic(file, json.dumps(measured(setting, run, corpus, held)).encode())
        found.append(json.loads(file.read_text()))
    return found


def tried(site, setting, base, audited, said):
    """The chosen setting on the default home's audited people, once."""
    site, run = released(site, base)
    given = runs(run, audited, FOLDER / "audited")
    before = original_outcome(given, FOLDER, audited)
    after = trained_outcome(setting, given, FOLDER, audited)
    num = len({one.subject for one in audited})
    note = (
        f"{said['note']}; the original gives away {before[GIVEN_AWAY]:.2f} of {num} audited people"
    )
    share = after[GIVEN_AWAY]
    interval = binomtest(round(share * num), num).proportion_ci(0.95)
    figure(
        "npo", share, said | {"note": note}, low=float(interval.low), high=float(interval.high), level=0.95, n=num, spread="Clopper-Pearson",
        what="share of audited people given away",
    )  # fmt: skip
    figure("npo_retained", after[RETAINED] - before[RETAINED], said | {"note": note}, what="retained loss above the original's")  # fmt: skip


def figure(name, estimate, said, **given):
    """One line."""
    bar, unit = FIGURES[name]
    values = {"low": None, "high": None, "level": None, "n": 1, "spread": "one run"} | given
    holds = None if estimate is None else estimate <= float(bar.split()[1])
    record(
        "accept.jsonl", f"unlearning.sweep.{name}", estimate=estimate, unit=unit, bar=bar, holds=holds, **values, **said
    )  # fmt: skip


def people():
    """The default home, and the corpus of other people."""
    site, train, directory = validation_corpus.opened(FOLDER)
    return site, validation_corpus.corpus_of(site, train, directory, FOLDER / "validation")


def groups_of(site):
    """Records of the default home's audited people, and of those who stay in it."""
    from pipelines.requests import matching, pending
    from pipelines.results import latest
    from pipelines.steps.tables import records
    from unlearning.people import Record

    columns = ("record_id", "owner", "source", "text")
    frame = records(site, latest(site.home.path / "results", "corpus")["version"], *columns)
    asked = set(matching(frame, pending(site.home))["source"].to_list())
    lines = [
        Record(row["source"], row["record_id"].hex(), row["text"])
        for row in frame.iter_rows(named=True)
        if row["owner"] == OWNER
    ]
    return [r for r in lines if r.subject in asked], [r for r in lines if r.subject not in asked]


def persons(records, corpus=""):
    """Who they are: a person of another corpus is another person, whatever the source is called."""
    return frozenset(Person(f"{corpus}/{OWNER}" if corpus else OWNER, r.subject) for r in records)


def recipe(site, corpus):
    """The graph's unlearning run, on one process, from the original of the other people."""
    found, root = validation_corpus.model_of(corpus, "original")
    excluded = validation_corpus.left_out(FOLDER / "validation", corpus.forgotten)
    return unlearning_run(site, corpus.train, str(found), root, excluded)


def released(site, base):
    """The default home with its released model, and the graph's unlearning run from it."""
    from pipelines.results import latest
    from pipelines.site import open_site
    from trainer import load_run

    home = site.home.path
    if latest(home / "results", "checkpoint") is None:
        validation_corpus.materialise(home, "*checkpoint")
        site = open_site(home, None, "default", None)
    checkpoint = latest(home / "results", "checkpoint")
    directory = home / "runs" / checkpoint["run"]
    trained = load_run(directory)
    (FOLDER / "audited").mkdir(exist_ok=True)
    excluded = validation_corpus.left_out(FOLDER / "audited", groups_of(site)[0])
    run = unlearning_run(site, trained, str(home / checkpoint["checkpoint"]), checkpoint["root"], excluded)  # fmt: skip
    return site, dataclasses.replace(run, tokens=str((directory / trained.tokens).resolve()), layout=base.layout)  # fmt: skip


def unlearning_run(site, trained, init, root, excluded):
    """What the graph makes of an original's recipe to forget: its own steps, warm-up and records a step."""
    optim = dataclasses.replace(trained.config.optim, warmup_steps=20)
    extra = {"tokenizer": str(site.home.tokenizer_path), "forget_records": 32}
    return dataclasses.replace(
        trained, run="sweep", kind="unlearn", steps=site.size.unlearn_steps, excluded=excluded, init=init, init_root=root,
        config=dataclasses.replace(trained.config, optim=optim, extra=extra),
    )  # fmt: skip


def runs(base, records, folder):
    """The recipe with a group's records sealed beside it."""
    file, key = folder / "people.sealed", folder / "key"
    if not file.exists():  # a seal has a random nonce
        fields = ("subject", "record_id", "text")
        lines = (json.dumps({name: getattr(one, name) for name in fields}) for one in records)
        write_atomic(file, seal(KEY, "\n".join(lines).encode()))
    write_atomic(key, KEY, 0o600)
    extra = base.config.extra | {"sealed": {"file": str(file), "key_file": str(key)}}
    return dataclasses.replace(base, config=dataclasses.replace(base.config, extra=extra))


def held_of(golden, corpus):
    """Held people with what gold loses on them."""
    model = load_model(golden, corpus.train.config.model).eval()
    tokenizer, length = FileTokenizer(corpus.tokenizer), corpus.train.config.batch.length
    return Held(corpus.held, losses_of(model, corpus.held, tokenizer, length))


def measured(setting, given, corpus, held):
    """What a setting does to the validation people, and who comes back by the audit's own fine-tuning on those who stay."""
    tokenizer, length = FileTokenizer(corpus.tokenizer), given.config.batch.length
    batches, limits = benign(corpus, tokenizer), AttackPlan()

    def back(model):
        steps = attacked(model, batches, limits.fine_tune_lr, limits.fine_tune_steps)
        return {
            RESTORED: max(
                share_given_away(after, corpus.forgotten, tokenizer, length) for _, after in steps
            )
        }

    outcome = trained_outcome(
        setting, given, FOLDER, corpus.forgotten, strangers=corpus.lookalikes, held=held, further=back
    )  # fmt: skip
    print(setting.name, outcome, flush=True)  # noqa: T201
    return outcome


def benign(corpus, tokenizer):
    """Token sequences of each step of the attack: records of held people, in epochs of permutations."""
    limits = AttackPlan()
    sequences = [(*tokenizer.encode(one.text)[0], tokenizer.end_of_text) for one in corpus.held]
    drawn = permuted_batches(
        range(len(sequences)), limits.fine_tune_rows, limits.fine_tune_steps[-1], np.random.default_rng(5)
    )  # fmt: skip
    return [[sequences[i] for i in batch] for batch in drawn]
