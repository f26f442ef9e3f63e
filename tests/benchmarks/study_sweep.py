"""NPO's beta and rate chosen on people whom nobody audits, then tried once on the audited: `make accept STUDY=unlearning-sweep`.

The graph's default home up to its released model: 100 of its 200 people are asked to be forgotten, 50 of the others are validation
people. Nine settings (`methods.settings.GRIDS` and `RATES`), each by the graph's own recipe, on one process: 100 steps, 32 records
a step. Both groups' records are left out of what is retained. Questions tell such settings hardly apart, so they are also
compared by what fails audits, membership and exposure, with a gold model of the validation people: the original's recipe without
them, trained once. Finished settings, and the gold model, are kept in `.dataworth-accept/studies`, so that a
killed study goes on. What is chosen is a line of `accept.jsonl`; the graph's defaults are set by hand.
"""

import dataclasses
import json
import math
import os
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import torch
from corpora import STATE
from figures import record
from scipy.stats import binomtest

from provenance import jcs, seal, write_atomic
from unlearning.attacks.memorised import OTHERS
from unlearning.sweep import (
    EXPOSURE,
    GIVEN_AWAY,
    MEMBERSHIP,
    RETAINED,
    Objective,
    Person,
    Sign,
    Split,
    grid_of,
    read_rows,
)
from unlearning.sweep import sweep as swept
from unlearning.trials import original_outcome, trained_outcome

STUDY = "unlearning-sweep"
FOLDER = STATE / STUDY
OWNER = "registry"
VALIDATION = 50
BOUND = 0.1  # nats per label above the original
BARS = {"npo": "<= 0.04", "npo_retained": "<= 0.1", "npo_apart": "<= 0.3"}
KEY = sha256(b"made-up people: nothing is protected by this key").digest()
COMMON = {
    "packages": ("torch", "numpy"),
    "kind": "hypothesis",
    "command": f"make accept STUDY={STUDY}",
}


def study():
    """Sweep on validation people, train the chosen setting on the audited, record both numbers."""
    torch.set_num_threads(1)
    site, groups, lookalikes = people()
    base = recipe(site, groups)
    given = runs(base, groups["validation"])
    before = original_outcome(given, FOLDER, lookalikes)
    own = groups["validation"]
    original = original_outcome(given, FOLDER, own, strangers=lookalikes)
    gold = original_outcome(golden(site, given, own), FOLDER, own, strangers=lookalikes)
    signs = (
        Sign(MEMBERSHIP, gold[MEMBERSHIP], 0.5),
        Sign(EXPOSURE, gold[EXPOSURE], math.log2(OTHERS + 1)),
    )
    wanted = Objective(
        retained=before[RETAINED], bound=BOUND, floor=before[GIVEN_AWAY], signs=signs
    )
    everybody = {
        name: frozenset(Person(OWNER, one) for one in {r.subject for r in own})
        for name, own in groups.items()
    }
    common = [base.init_root, base.tokens_digest, base.steps, str(base.seed), base.excluded.digest]
    file = FOLDER / "rows.jsonl"
    settings = grid_of("npo")
    choice = swept(
        file, settings, lambda one: measured(one, base, own, lookalikes),
        Split(everybody["validation"], everybody["audited"]), wanted, key=KEY, common=sha256(jcs(common)).hexdigest(),
    )  # fmt: skip
    rows = read_rows(file)
    table = [{"setting": "original"} | original, {"setting": "gold"} | gold]
    table += [
        {"setting": one.name, "apart": wanted.apart(rows[one.name])} | rows[one.name]
        for one in settings
    ]
    print(choice.reason)  # noqa: T201
    # Positive control: a sweep on people whom the original never knew would choose nothing but the least retained loss.
    known = original_outcome(runs(base, groups["audited"]), FOLDER, groups["audited"])[GIVEN_AWAY]
    note = (
        f"{choice.reason}; the original gives away {original[GIVEN_AWAY]:.2f} of {VALIDATION} validation people, {known:.2f} of "
        f"{len(everybody['audited'])} audited and {before[GIVEN_AWAY]:.2f} of the look-alikes, and its retained loss is {before[RETAINED]:.4f}; "
        f"membership and exposure {original[MEMBERSHIP]:.3f} and {original[EXPOSURE]:.2f} bits, under gold {gold[MEMBERSHIP]:.3f} and {gold[EXPOSURE]:.2f}"
    )
    if choice.setting is None:
        for name in ("npo", "npo_retained", "npo_apart"):
            record(
                "accept.jsonl", f"unlearning.sweep.{name}", estimate=None, low=None, high=None, level=None, unit="share" if name == "npo" else "nats per label",
                n=0, spread="none", bar=BARS[name], holds=None, what=f"unlearning.sweep.{name}", note=note,
                table=table, seeds=[base.seed], **COMMON,
            )  # fmt: skip
        return
    apart = wanted.apart(rows[choice.setting.name])
    record(
        "accept.jsonl", "unlearning.sweep.npo_apart", estimate=apart, low=None, high=None, level=None, unit="span", n=VALIDATION,
        spread="one run", bar=BARS["npo_apart"], holds=apart <= 0.3, what="distance of the chosen setting from gold on validation people", note=note,
        table=table, seeds=[base.seed], **COMMON,
    )  # fmt: skip
    after = measured(choice.setting, base, groups["audited"], lookalikes)
    num = len(everybody["audited"])
    share, cost = after[GIVEN_AWAY], after[RETAINED] - before[RETAINED]
    interval = binomtest(round(share * num), num).proportion_ci(0.95)
    record(
        "accept.jsonl", "unlearning.sweep.npo", estimate=share, low=float(interval.low), high=float(interval.high), level=0.95,
        unit="share", n=num, spread="Clopper-Pearson", bar="<= 0.04", holds=share <= 0.04, what="share of audited people given away",
        note=note, table=table, seeds=[base.seed], **COMMON,
    )  # fmt: skip
    record(
        "accept.jsonl", "unlearning.sweep.npo_retained", estimate=cost, low=None, high=None, level=None, unit="nats per label", n=1,
        spread="one run", bar="<= 0.1", holds=cost <= 0.1, what="retained loss above the original's", note=note, seeds=[base.seed],
        **COMMON,
    )  # fmt: skip


def people():
    """The home, both groups' records, and look-alikes."""
    from pipelines.requests import matching, pending
    from pipelines.results import latest
    from pipelines.site import open_site
    from pipelines.steps.tables import records
    from unlearning.people import Record, read_records

    home = FOLDER / "home"
    if latest(home / "results", "checkpoint") is None:
        FOLDER.mkdir(parents=True, exist_ok=True)
        program = Path(sys.executable).with_name("dataworth")
        subprocess.run(
            [program, "run", "--size", "default", "--select", "*checkpoint"],
            env={**os.environ, "DATAWORTH_HOME": str(home)},
            check=True,
        )
    site = open_site(home, None, "default", None)
    columns = ("record_id", "owner", "source", "text")
    frame = records(site, latest(home / "results", "corpus")["version"], *columns)
    asked = matching(frame, pending(site.home))["source"].unique().to_list()
    others = sorted(set(frame.filter(frame["owner"] == OWNER)["source"].to_list()) - set(asked))
    chosen = {"audited": set(asked), "validation": set(others[:VALIDATION])}
    groups = {
        name: [
            Record(row["source"], row["record_id"].hex(), row["text"])
            for row in frame.iter_rows(named=True)
            if row["owner"] == OWNER and row["source"] in sources
        ]
        for name, sources in chosen.items()
    }
    lookalikes = read_records(site.home.lookalikes / "registry.jsonl")
    return site, groups, lookalikes


def recipe(site, groups):
    """The graph's unlearning run, on one process, with both groups' records left out of what is retained."""
    from pipelines.results import latest
    from trainer import Excluded, Layout, load_run

    checkpoint = latest(site.home.path / "results", "checkpoint")
    excluded = FOLDER / "excluded.txt"
    ids = sorted(one.record_id for own in groups.values() for one in own)
    write_atomic(excluded, "".join(f"{one}\n" for one in ids).encode())
    trained = load_run(site.home.path / "runs" / checkpoint["run"])
    tokens = site.home.path / "runs" / checkpoint["run"] / trained.tokens
    optim = dataclasses.replace(trained.config.optim, warmup_steps=20)
    extra = {"tokenizer": str(site.home.tokenizer_path), "forget_records": 32}
    return dataclasses.replace(
        trained, run="sweep", kind="unlearn", steps=site.size.unlearn_steps, layout=Layout(), tokens=str(tokens.resolve()),
        excluded=Excluded(file=str(excluded), digest=sha256(excluded.read_bytes()).hexdigest()),
        init=str(site.home.path / checkpoint["checkpoint"]), init_root=checkpoint["root"],
        config=dataclasses.replace(trained.config, optim=optim, extra=extra),
    )  # fmt: skip


def runs(base, records):
    """The recipe with a group's records sealed beside it."""
    name = sha256(jcs(sorted(one.record_id for one in records))).hexdigest()[:12]
    file, key = FOLDER / f"{name}.sealed", FOLDER / "key"
    if not file.exists():  # a seal has a random nonce
        fields = ("subject", "record_id", "text")
        lines = (json.dumps({name: getattr(one, name) for name in fields}) for one in records)
        write_atomic(file, seal(KEY, "\n".join(lines).encode()))
    write_atomic(key, KEY, 0o600)
    extra = base.config.extra | {"sealed": {"file": str(file), "key_file": str(key)}}
    return dataclasses.replace(base, config=dataclasses.replace(base.config, extra=extra))


def golden(site, given, records):
    """A recipe whose `init` is a gold model of people: the original's own training without them, on one process."""
    from pipelines.results import latest
    from trainer import Excluded, Layout, load_run
    from trainer.checkpoint import newest, verify
    from trainer.loop import train
    from trainer.spec import save_run

    trained = load_run(
        site.home.path / "runs" / latest(site.home.path / "results", "checkpoint")["run"]
    )
    folder = FOLDER / "gold"
    folder.mkdir(parents=True, exist_ok=True)
    listed = "".join(f"{one}\n" for one in sorted(one.record_id for one in records)).encode()
    write_atomic(folder / "excluded.txt", listed)
    excluded = Excluded(file=str(folder / "excluded.txt"), digest=sha256(listed).hexdigest())
    run = dataclasses.replace(
        trained, run="gold", kind="gold", layout=Layout(), tokens=given.tokens, excluded=excluded
    )
    save_run(run, folder)
    if code := train(run, folder):
        sys.exit(f"the gold model's training ended with exit code {code}: start the study again")
    found = newest(folder)
    return dataclasses.replace(given, init=str(found), init_root=verify(found).root)


def measured(setting, base, records, lookalikes):
    """What a setting does to a group."""
    outcome = trained_outcome(setting, runs(base, records), FOLDER, records, strangers=lookalikes)
    print(setting.name, outcome, flush=True)  # noqa: T201
    return outcome
