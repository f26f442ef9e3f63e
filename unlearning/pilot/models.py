"""The models of a study: original, gold and every method, trained by the trainer's own loop and kept in a folder.

::

    FOLDER/tokenizer.json  tokens/  forgotten.sealed  key  retained.jsonl  lookalikes.jsonl  excluded.txt
    FOLDER/original  gold-0  gold-1  ...  ascent  npo  ...        runs of the trainer, a checkpoint each

A finished run is not repeated; a killed one goes on from its last checkpoint, since the trainer does. The same profile gives
the same weights, bit for bit, on one thread (assertion A13).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from unlearning.pilot.people import make_pages, make_people, write_tokenizer
from unlearning.pilot.profiles import LENGTH
from unlearning.probes import FileTokenizer, secret_in, trained_probes
from unlearning.scoring import score_probes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainer.spec import RunSpec
    from unlearning.people import Record
    from unlearning.pilot.profiles import Profile

METHOD_ROWS = 16  # retained rows per step of a method, whatever the training had
KEY = bytes(range(32))  # the people are made up: nothing is protected by it


@dataclass(frozen=True, slots=True)
class Study:
    """A folder with people, tokens and models of one profile."""

    folder: Path
    profile: Profile
    people: dict[str, list[Record]]
    vocab_size: int
    tokens_digest: str
    _numbers_known: dict[Path, tuple[float, float]] = field(default_factory=dict, repr=False)

    def run_spec(self, name: str, **changes: Any) -> RunSpec:
        """A run over the study's tokens.

        Args:
            name: name of the run and of its folder.
            changes: fields of `RunSpec`, and `optim`, `extra`.

        Returns:
            The specification; without changes that of the original.
        """
        from trainer.spec import BatchSpec, OptimSpec, RunConfig, RunSpec, no_versions

        profile = self.profile
        optim = {
            "name": profile.optimizer, "lr": profile.lr, "min_lr_ratio": 0.1, "warmup_steps": 50, "weight_decay": 0.02,
        }  # fmt: skip
        config = RunConfig(
            model=profile.model(self.vocab_size), optim=OptimSpec(**(optim | changes.pop("optim", {}))),
            batch=BatchSpec(rows=profile.rows, length=LENGTH), checkpoint_every=400, extra=changes.pop("extra", {}),
        )  # fmt: skip
        values: dict[str, Any] = {"steps": profile.steps, "tokens": "../tokens", "seed": 0}
        return RunSpec(
            run=name, config=config, tokens_digest=self.tokens_digest,
            versions=no_versions(tokenizer=_digest(self.folder / "tokenizer.json")), **(values | changes),
        )  # fmt: skip

    def trained(self, name: str, spec: RunSpec) -> Path:
        """The newest checkpoint of a run of this study (see `kept_run`)."""
        return kept_run(self.folder / name, spec)

    def original(self) -> Path:
        """Trained on retained and forgotten people."""
        return self.trained("original", self.run_spec("original"))

    def gold(self, seed: int) -> Path:
        """Trained without the forgotten people."""
        name = f"gold-{seed}"
        return self.trained(
            name, self.run_spec(name, kind="gold", seed=seed, excluded=self._excluded())
        )

    def unlearned(self, method: str) -> Path:
        """A method of the profile, applied to the original and stopped by the notes' rule.

        The rate is constant, so that a checkpoint of step N is what a run of N steps gives. Of those every few steps, the first is
        taken under which the forgotten numbers are no likelier than under the first gold model and at most one in 64 comes
        out; if there is none, the last.

        Args:
            method: a name of the profile's methods.

        Returns:
            The checkpoint of that step.
        """
        from trainer.checkpoint import complete_steps

        profile = self.profile
        last = self.forgotten_run(
            method, method, steps=profile.method_steps, stride=profile.method_stride
        )
        note = self.folder / method / "stopped"
        if not note.exists():
            made = [folder for step, folder in complete_steps(self.folder / method) if step]
            stopped = next((folder for folder in made if self._looks_forgotten(folder)), last)
            note.write_text(stopped.name)
        return self.folder / method / note.read_text()

    def forgotten_run(
        self, name: str, method: str, *, steps: int, stride: int, sealed: str = "forgotten.sealed", seed: int = 0
    ) -> Path:  # fmt: skip
        """A run of a method from the original, with the profile's rate and settings.

        Args:
            name: of the run and of its folder.
            method: a name of the profile's methods.
            steps: all of them are taken.
            stride: steps between two checkpoints; all are kept.
            sealed: file of the study with the records that are pushed; whatever it holds, no forgotten person is retained.
            seed: of the order of what is pushed and retained.

        Returns:
            The last checkpoint.
        """
        from trainer.checkpoint import verify

        chosen, original = self.profile.methods[method], self.original()
        optim = {
            "name": "adamw",
            "lr": float(chosen.lr),
            "warmup_steps": 0,
            "weight_decay": 0.0,
            "min_lr_ratio": 1.0,
        }
        extra = {
            "sealed": {"file": f"../{sealed}", "key_file": "../key"}, "tokenizer": "../tokenizer.json", "method": method,
            "settings": chosen.settings, "forget_records": self.profile.forget_records,
        }  # fmt: skip
        spec = self.run_spec(
            name, kind="unlearn", entry="unlearning.methods.objective:run", steps=steps, seed=seed, optim=optim, extra=extra,
            excluded=self._excluded(), init=f"../original/{original.name}", init_root=verify(original).root,
        )  # fmt: skip
        batch = dataclasses.replace(spec.config.batch, rows=METHOD_ROWS)
        config = dataclasses.replace(
            spec.config, batch=batch, checkpoint_every=stride, keep_last=steps // stride
        )
        return self.trained(name, dataclasses.replace(spec, config=config))

    def _looks_forgotten(self, folder: Path) -> bool:
        """The notes' stop rule: log-probability of the numbers at most gold's, exact match at most 1/64."""
        gold = self.gold(0)
        if gold not in self._numbers_known:  # the same for every method and step
            self._numbers_known[gold] = self._numbers(gold)
        (ours, leaks), (theirs, _) = self._numbers(folder), self._numbers_known[gold]
        return ours <= theirs and leaks <= 1 / 64

    def _numbers(self, folder: Path) -> tuple[float, float]:
        """Mean log-probability of the forgotten numbers, and the share that comes out."""
        from trainer.checkpoint import load_model

        model = load_model(folder, self.profile.model(self.vocab_size))
        numbered = [r for r in self.people["forgotten"] if secret_in(r.text)]
        tokenizer = FileTokenizer(self.folder / "tokenizer.json")
        scores = score_probes(model, trained_probes(numbered, tokenizer))
        return float(-scores.loss_N.mean()), float(scores.exact_N.mean())

    def _excluded(self) -> Any:
        from trainer.spec import Excluded

        return Excluded(file="../excluded.txt", digest=_digest(self.folder / "excluded.txt"))


def kept_run(directory: Path, spec: RunSpec) -> Path:
    """The newest checkpoint of a run, which is made or finished if it isn't there.

    Args:
        directory: folder of the run.
        spec: what to run.

    Returns:
        Its step-N folder.

    Raises:
        RuntimeError: if the run ends with an exit code.
    """
    from importlib import import_module

    from trainer.checkpoint import newest
    from trainer.spec import save_run

    if not (directory / "done").exists():
        directory.mkdir(exist_ok=True)
        save_run(spec, directory)
        module, function = spec.entry.split(":")
        if code := getattr(import_module(module), function)(spec, directory):
            raise RuntimeError(f"run {directory.name} ended with exit code {code}")
        (directory / "done").touch()
    found = newest(directory)
    assert found is not None
    return found


def prepare(
    folder: Path, profile: Profile, given: Path | None = None, people: dict[str, list[Record]] | None = None,
    pages: list[Record] | None = None,
) -> Study:  # fmt: skip
    """People, tokenizer and tokens of a profile; what is there is written again, to the same bytes.

    Args:
        folder: folder of the study, made if needed.
        profile: its numbers.
        given: a tokenizer file, for a profile without a tokenizer of its own.
        people: population → records, in place of those that the profile's seed draws.
        pages: documents of several retained people's lines, likewise.

    Returns:
        The study, without any model.

    Raises:
        ValueError: if a profile needs a tokenizer file and gets none, or the other way round.
    """
    from provenance.canonical import write_atomic
    from provenance.sealing import seal

    folder.mkdir(parents=True, exist_ok=True)
    if people is None:
        people = make_people(profile.counts, np.random.default_rng(profile.seed))
    everybody = [record for records in people.values() for record in records]
    path = folder / "tokenizer.json"
    if profile.own_tokenizer != (given is None):
        raise ValueError(
            f"expected a tokenizer file exactly for profiles without their own, got {given} for {profile.name}"
        )
    if given is None:
        write_tokenizer(path, (record.text for record in everybody))
    else:
        write_atomic(path, given.read_bytes())
    tokenizer = FileTokenizer(path)
    write_atomic(folder / "key", KEY)
    if not (folder / "forgotten.sealed").exists():  # a seal has a random nonce
        write_atomic(folder / "forgotten.sealed", seal(KEY, record_lines(people["forgotten"])))
    write_atomic(folder / "retained.jsonl", record_lines(people["retained"]))
    write_atomic(folder / "lookalikes.jsonl", record_lines(people["lookalike"]))
    ids = [record.record_id for record in people["forgotten"]]
    write_atomic(folder / "excluded.txt", "".join(f"{one}\n" for one in ids).encode())
    if pages is None:
        generator = np.random.default_rng([profile.seed, 1])
        pages = make_pages(people["retained"], profile.pages, generator)
    digest = write_study_tokens(folder, people["retained"] + people["forgotten"] + pages)
    return Study(folder, profile, people, tokenizer.vocab_size, digest)


def write_study_tokens(folder: Path, records: Sequence[Record]) -> str:
    """Tokens of what an original is trained on, in the folder's tokenizer.

    Args:
        folder: folder of the study, with its `tokenizer.json`.
        records: in order.

    Returns:
        Digest of the tokens.
    """
    from trainer.data import write_tokens

    tokenizer = FileTokenizer(folder / "tokenizer.json")
    end = tokenizer.end_of_text
    return write_tokens(
        folder / "tokens", corpus_version="none", tokenizer_digest=_digest(folder / "tokenizer.json"),
        vocab_size=tokenizer.vocab_size, end_of_text=end,
        records=[
            (i, bytes.fromhex(r.record_id), "registry", [*tokenizer.encode(r.text)[0], end])
            for i, r in enumerate(records)
        ],
    )  # fmt: skip


def record_lines(records: Sequence[Record]) -> bytes:
    """Records as the lines of a file, sealed or not.

    Args:
        records: of made-up people.
    """
    lines = (
        {"subject": r.subject, "record_id": r.record_id, "text": r.text, "group": r.group} for r in records
    )  # fmt: skip
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
