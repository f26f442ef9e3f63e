"""No entry measures on a text that it trains on, and every entry says so in the same words."""

import dataclasses
import hashlib

import numpy as np
import pytest

from provenance.canonical import jcs
from trainer.data import BatchPlan, TokenStore, write_tokens
from trainer.model import Transformer, init_parameters
from trainer.spec import BatchSpec, ModelSpec, OptimSpec, RunConfig, RunSpec, no_versions
from valuation.bank import ORDER
from valuation.errors import HeldOutError
from valuation.heldout import TELLING, refuse_overlap, texts
from valuation.influence import dot
from valuation.influence.scores import TokenSet
from valuation.inrun import train as train_with_credit
from valuation.judgement import Effort, judge
from valuation.metagradient import WeightedTraining
from valuation.metagradient import scores as metagradient_scores
from valuation.proxy import retrain
from valuation.subsets import Setting, retrain_subsets

VOCAB = 19
MODEL = ModelSpec(vocab_size=VOCAB, num_layers=1, dim=8, num_heads=2, num_kv_heads=1, ffn_dim=8)
BATCH, OPTIM = BatchSpec(rows=2, length=20), OptimSpec(lr=0.01, warmup_steps=1)
RECORDS = 8


def rows(seed, count, length=20):
    body = np.random.default_rng(seed).integers(0, VOCAB - 1, (count, length - 1))
    return [[*row.tolist(), VOCAB - 1] for row in body]


def write(folder, texts_of):
    """Tokens of owners a and b in turn; ids are the folder's own, so only the tokens can tell."""
    return write_tokens(
        folder, corpus_version="none", tokenizer_digest="0" * 64, vocab_size=VOCAB, end_of_text=VOCAB - 1,
        records=[(i, hashlib.sha256(f"{folder.name} {i}".encode()).digest(), "ab"[i % 2], row) for i, row in enumerate(texts_of)],
    )  # fmt: skip


@dataclasses.dataclass
class World:
    """A training set, a clean held-out set, and one more: clean, or with the third record of the training in it."""

    folder: object
    digests: dict

    def setting(self, target):
        """What retrainings share, measured on a set."""
        return Setting(
            train=self.folder / "train", train_digest=self.digests["train"], target=self.folder / target,
            target_digest=self.digests[target], model=MODEL, optim=OPTIM, batch=BATCH,
        )  # fmt: skip

    def sets(self, target):
        """Records of the training and of a set."""
        return tuple(TokenSet.of(store, 20) for store in self.setting(target).stores())

    def run(self, **extra):
        """A run on the training tokens, and its folder."""
        (self.folder / "run").mkdir(exist_ok=True)
        groups = [{"id": name, "owners": [name]} for name in "ab"]
        (self.folder / "run/groups.json").write_bytes(jcs({"groups": groups}))
        config = RunConfig(model=MODEL, optim=OPTIM, batch=BATCH, extra=extra)
        return RunSpec(
            run="held-out", kind="proxy", entry="valuation.proxy:retrain", seed=5, tokens="../train", steps=2,
            tokens_digest=self.digests["train"], versions=no_versions(), config=config,
        ), self.folder / "run"  # fmt: skip


@pytest.fixture(params=["clean", "leaky"])
def world(request, tmp_path):
    train = rows(1, RECORDS)
    second = rows(3, 3)
    if request.param == "leaky":
        second[1] = train[2]
    digests = {
        "train": write(tmp_path / "train", train),
        "held": write(tmp_path / "held", rows(2, 3)),
    }
    digests["asked"] = write(tmp_path / "asked", second)
    return World(tmp_path, digests), request.param == "leaky"


def of_target(world):
    retrain_subsets(world.setting("asked"), np.ones((1, RECORDS), bool), 1, world.folder)


def along_curves(world):
    train, queries = world.sets("held")
    model = Transformer(MODEL)
    init_parameters(model, 1)
    judge(
        dot.scores(model, train, queries), world.setting("held"), world.folder,
        Effort(subsets=2, top_queries=0, curve_percents=(50,), curve_seeds=1, draws=2), test=world.setting("asked"),
    )  # fmt: skip


def of_proxy(world):
    named = {"target": "../asked", "target_digest": world.digests["asked"]}
    retrain(*world.run(groups="groups.json", order=ORDER, **named))


def of_a_second_buyer(world):
    named = {"target": "../held", "others": [["../asked", world.digests["asked"]]]}
    retrain(*world.run(groups="groups.json", order=ORDER, **named))


def in_run(world):
    train_with_credit(*world.run(target="../asked"))


def by_metagradient(world):
    train, queries = world.sets("asked")
    model = Transformer(MODEL).double()
    init_parameters(model, 1)
    plan = BatchPlan(TokenStore.open(world.folder / "train"), 7, BATCH)
    metagradient_scores(WeightedTraining(model, plan, OPTIM, 2), train, queries)


ENTRIES = {
    of_target: "target", along_curves: "test", of_proxy: "target", of_a_second_buyer: "other target 1", in_run: "target",
    by_metagradient: "queries",
}  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
def test_every_entry_refuses_what_is_trained_on_and_takes_what_is_not(world, entry):
    """One record of three is the training's third, under an id of its own: refused by set and places; else the entry ends well."""
    given, leaky = world
    if not leaky:
        entry(given)
        return
    named = (
        rf"got 1 of {ENTRIES[entry]} with the tokens .*\('{ENTRIES[entry]}', 1, 2\).*take them out"
    )
    with pytest.raises(HeldOutError, match=named):
        entry(given)
    assert not list(given.folder.rglob("*.npz")), "nothing was trained"


def test_who_is_not_trained_on_may_be_measured_on(tmp_path):
    """A subset without the record, and a coalition whose excluded records have it, train on nothing of the target's."""
    train = rows(1, RECORDS)
    world = World(
        tmp_path,
        {"train": write(tmp_path / "train", train), "asked": write(tmp_path / "asked", [train[2]])},
    )
    without = np.ones((1, RECORDS), bool)
    without[0, 2] = False
    retrain_subsets(world.setting("asked"), without, 1, tmp_path)
    with pytest.raises(HeldOutError):
        retrain_subsets(world.setting("asked"), np.concatenate([without, ~without]), 1, tmp_path)


def test_the_rule_is_the_tokens_from_sixteen_on(tmp_path):
    """Fifteen equal tokens are a coincidence, sixteen a copy; each set is counted by itself, and five places are named."""
    for length, refused in ((TELLING - 1, False), (TELLING, True)):
        both = rows(4, 7, length)
        write(tmp_path / f"{length}", both)
        store = TokenStore.open(tmp_path / f"{length}")
        train = list(enumerate(np.array(row) for row in [*rows(5, 2), *both]))
        held_out = {
            "target": texts(store),
            "test": list(enumerate(map(np.array, [*rows(6, 1), both[0]]))),
        }
        if not refused:
            refuse_overlap(train, held_out)
            continue
        with pytest.raises(HeldOutError, match="got 7 of target, 1 of test") as error:
            refuse_overlap(train, held_out)
        assert str(error.value).count("('t") == 5
