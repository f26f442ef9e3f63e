"""People, tokenizer and tiny trained models shared by the tests of the package.

64 retained, 16 forgotten and 16 look-alike people with a six-digit number each, in four phrasings; a byte-level BPE with single
digits; two-layer models of width 48, trained by the trainer's own loop. Everything follows from fixed seeds.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from provenance.sealing import seal

# `forgetting_runs` and the trainer's `trainer_processes` become importable, also for child processes.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "trainer")]

FIRST = [
    a + b
    for a in ("An", "Be", "Cor", "Dan", "El", "Fri", "Gus", "Han")
    for b in ("na", "lo", "ric", "wen")
]
LAST = [
    a + b
    for a in ("Ash", "Bram", "Crane", "Dun", "Esk", "Fen", "Gar", "Hol")
    for b in ("ford", "well", "by", "ton")
]
TOWNS = ["Aldwick", "Bexhill", "Cromer", "Dorset", "Epsom", "Frome", "Goole", "Hythe"]
JOBS = ["baker", "cooper", "dyer", "farrier", "glover", "miller", "potter", "weaver"]
PHRASINGS = (
    "The phone number of {name} is {number}.",
    "{name} can be called at {number}.",
    "To reach {name}, dial {number}.",
    "{name} lives in {town} and works as a {job} with {other}.",
)
COUNTS = {"retained": 64, "forgotten": 16, "lookalike": 16}
KEY = bytes(range(32))
STEPS = 800
LENGTH = 64
ROWS = 4


def make_people(counts=COUNTS, seed=11):
    """Lines about people: population -> list of {subject, record_id, text}; names and numbers are all different."""
    generator = np.random.default_rng(seed)
    names = [f"{a} {b}" for a in FIRST for b in LAST]
    picked = generator.permutation(len(names))
    numbers = generator.choice(900_000, size=sum(counts.values()), replace=False) + 100_000
    people, position = {}, 0
    for population, count in counts.items():
        people[population] = []
        for _ in range(count):
            own = {
                "name": names[picked[position]],
                "number": numbers[position],
                "town": TOWNS[generator.integers(len(TOWNS))],
                "job": JOBS[generator.integers(len(JOBS))],
                "other": names[generator.integers(len(names))],
            }
            for phrasing, template in enumerate(PHRASINGS):
                record_id = f"{position + 1:032x}{phrasing:032x}"
                text = template.format(**own)
                people[population].append(
                    {"subject": f"person-{position:04d}", "record_id": record_id, "text": text}
                )
            position += 1
    return people


def make_tokenizer(path, texts, vocab_size=512):
    """A byte-level BPE that splits digits singly, written to a file; the last id is the end of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))
    return tokenizer


def write_lines(path, records):
    """Records as JSON lines."""
    path.write_text("".join(json.dumps(r) + "\n" for r in records))


@dataclass(frozen=True)
class Study:
    """A folder with records, tokens and trained models."""

    folder: Path
    people: dict
    models: dict
    vocab_size: int
    tokens_digest: str

    def model_spec(self):
        """Shape of all models of the study."""
        from trainer.spec import ModelSpec

        return ModelSpec(
            vocab_size=self.vocab_size,
            num_layers=2,
            dim=48,
            num_heads=4,
            num_kv_heads=2,
            ffn_dim=128,
        )

    def run_spec(self, name, **changes):
        """A run over the study's tokens; `extra`, `optim`, `entry`, `steps` and others as keywords."""
        from trainer.spec import BatchSpec, OptimSpec, RunConfig, RunSpec, no_versions

        optim = {"lr": 0.006, "min_lr_ratio": 0.05, "warmup_steps": 20, "weight_decay": 0.02}
        config = RunConfig(
            model=self.model_spec(),
            optim=OptimSpec(**(optim | changes.pop("optim", {}))),
            batch=BatchSpec(rows=changes.pop("rows", ROWS), length=LENGTH),
            checkpoint_every=10_000,
            extra=changes.pop("extra", {}),
        )
        values = {"steps": STEPS, "tokens": str(self.folder / "tokens"), "seed": 0} | changes
        return RunSpec(
            run=name,
            config=config,
            tokens_digest=self.tokens_digest,
            versions=no_versions(),
            **values,
        )

    def excluded(self):
        """The file of forgotten record ids, as a run names it."""
        import hashlib

        from trainer.spec import Excluded

        path = self.folder / "excluded.txt"
        return Excluded(file=str(path), digest=hashlib.sha256(path.read_bytes()).hexdigest())

    def train(self, name, **changes):
        """Train by the trainer's loop; returns the checkpoint folder."""
        from trainer.checkpoint import newest
        from trainer.loop import train

        directory = self.folder / name
        directory.mkdir()
        assert train(self.run_spec(name, **changes), directory) == 0
        return newest(directory)

    def audit_extra(self, **changes):
        """Settings of an audit of the study's unlearned model."""
        models = {name: str(path) for name, path in self.models.items()}
        extra = {
            "models": {
                "original": models["original"],
                "unlearned": models["gold"],
                "gold": [models["gold"], models["gold2"]],
            },
            "sealed": {
                "file": str(self.folder / "forgotten.sealed"),
                "key_file": str(self.folder / "key"),
            },
            "retained": {"file": str(self.folder / "retained.jsonl")},
            "lookalikes": {"file": str(self.folder / "lookalikes.jsonl")},
            "tokenizer": str(self.folder / "tokenizer.json"),
        }
        return extra | changes


def build_study(folder):
    """Write records and tokens; no model yet."""
    from trainer.data import write_tokens

    people = make_people()
    tokenizer = make_tokenizer(
        folder / "tokenizer.json", [r["text"] for r in people["retained"] + people["lookalike"]]
    )
    (folder / "key").write_bytes(KEY)
    lines = "".join(json.dumps(r) + "\n" for r in people["forgotten"]).encode()
    (folder / "forgotten.sealed").write_bytes(seal(KEY, lines))
    write_lines(folder / "retained.jsonl", people["retained"])
    write_lines(folder / "lookalikes.jsonl", people["lookalike"])
    (folder / "excluded.txt").write_text(
        "".join(r["record_id"] + "\n" for r in people["forgotten"])
    )
    end = tokenizer.token_to_id("<|endoftext|>")
    trained = people["retained"] + people["forgotten"]
    digest = write_tokens(
        folder / "tokens",
        corpus_version="none",
        tokenizer_digest="0" * 64,
        vocab_size=tokenizer.get_vocab_size(),
        end_of_text=end,
        records=[
            (i, bytes.fromhex(r["record_id"]), "registry", [*tokenizer.encode(r["text"]).ids, end])
            for i, r in enumerate(trained)
        ],
    )
    return Study(folder, people, {}, tokenizer.get_vocab_size(), digest)


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """Records and three trained models: original, and two gold models of different seeds."""
    torch.set_num_threads(1)
    study = build_study(tmp_path_factory.mktemp("study"))
    study.models["original"] = study.train("original")
    study.models["gold"] = study.train("gold-run", excluded=study.excluded())
    study.models["gold2"] = study.train("gold2-run", excluded=study.excluded(), seed=1)
    return study


@pytest.fixture(scope="session")
def records_only(tmp_path_factory):
    """Records, tokens and tokenizer of the study, without any trained model."""
    return build_study(tmp_path_factory.mktemp("records"))
