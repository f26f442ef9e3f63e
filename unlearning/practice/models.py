"""The models of the practice setting, made by the trainer's own loop and kept in a folder.

::

    FOLDER/tokenizer.json  public/  people/  forgotten.jsonl  validation.jsonl  *.txt         texts and who is left out
    FOLDER/pretrained                                                                        on public text, one for all
    FOLDER/original  gold-1  gold-2  …  (NAME-cycle-1 before)                                fine-tuned on the people's texts
    FOLDER/trial-RATE … rate.json                                                            NPO on validation people: which rate
    FOLDER/ascent  graddiff  dpo  npo  simnpo                                                from the original

A finished run is not repeated; a killed one goes on from its last checkpoint.

**The rate.** One for all methods, as in the published table. It is chosen by the sweep's rule (`unlearning.sweep.choose`) with NPO on people who
stay in the study and whom no audit asks about as forgotten: pushed out of the original for as many epochs as the audited are later,
all else equal. If no rate keeps the retained loss within `BOUND`, the smallest is taken and `rate.json` says so.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unlearning.answering import span
from unlearning.pilot.models import kept_run
from unlearning.practice.forgetting import ENTRY
from unlearning.probes import FileTokenizer
from unlearning.scoring import score_spans
from unlearning.sweep import GIVEN_AWAY, RETAINED, Objective, Setting, choose

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from trainer.model import Transformer
    from trainer.spec import Excluded, RunSpec
    from unlearning.answering import Question
    from unlearning.practice.cast import Cast
    from unlearning.practice.scales import Scale

BOUND = 0.1  # nats per token above the original's loss on people who stay
FORGOTTEN, VALIDATION = "forgotten", "validation"


@dataclass(frozen=True, slots=True)
class Practice:
    """A folder with texts, tokens and models of one scale."""

    folder: Path
    profile: Scale
    cast: Cast
    vocab_size: int
    digests: dict[str, str]
    """`public` and `people` → digest of the token folder."""
    tokens: dict[str, int]
    """`public`, `people`, and of these `forgotten` and `validation` → tokens."""

    def run_spec(self, name: str, **changes: Any) -> RunSpec:
        """A run over the people's texts.

        Args:
            name: name of the run and of its folder.
            changes: fields of `RunSpec`, of its configuration (`rows`, `extra`), and `optim`.

        Returns:
            The specification; without changes a fine-tuning from random weights.
        """
        from trainer.spec import BatchSpec, OptimSpec, RunConfig, RunSpec, no_versions

        scale, source = self.profile, changes.pop("source", "people")
        optim = {"lr": 0.001, "min_lr_ratio": 0.1, "warmup_steps": 20, "weight_decay": 0.01}
        config = RunConfig(
            model=scale.model(self.vocab_size), optim=OptimSpec(**(optim | changes.pop("optim", {}))),
            batch=BatchSpec(rows=changes.pop("rows", scale.rows), length=scale.length), checkpoint_every=100, keep_last=1,
            precision=scale.precision, extra=changes.pop("extra", {}),
        )  # fmt: skip
        return RunSpec(
            run=name, config=config, tokens=f"../{source}", tokens_digest=self.digests[source],
            versions=no_versions(tokenizer=_digest(self.folder / "tokenizer.json")), **({"seed": 0} | changes),
        )  # fmt: skip

    def trained(self, name: str, spec: RunSpec) -> Path:
        """The newest checkpoint of a run of this study (see `kept_run`)."""
        return kept_run(self.folder / name, spec)

    def pretrained(self) -> Path:
        """Trained on public text, one pass."""
        scale = self.profile
        steps = max(1, self.tokens["public"] // (scale.pretrain_rows * scale.length))
        spec = self.run_spec(
            "pretrained", source="public", steps=steps, rows=scale.pretrain_rows, optim={"lr": scale.pretrain_lr}
        )  # fmt: skip
        return self.trained("pretrained", spec)

    def original(self) -> Path:
        """Fine-tuned on the texts of everybody but the look-alikes."""
        return self._tuned("original", self.tokens["people"])

    def gold(self, seed: int) -> Path:
        """Fine-tuned without the forgotten people, for as many epochs.

        Args:
            seed: order of the texts.
        """
        name = f"gold-{seed}"
        kept = self.tokens["people"] - self.tokens[FORGOTTEN]
        return self._tuned(name, kept, kind="gold", seed=seed, excluded=self._excluded(FORGOTTEN))

    def unlearned(self, method: str) -> Path:
        """A method, applied to the original with the chosen rate.

        Args:
            method: a name of the scale's methods.
        """
        spec = self._pushed(method, method, FORGOTTEN, self.rate(), self.profile.unlearn_steps)
        return self.trained(method, spec)

    def rate(self) -> str:
        """The rate of all methods; see the file's head."""
        file = self.folder / "rate.json"
        if not file.exists():
            from provenance.canonical import write_atomic

            grid = [Setting("npo", rate) for rate in self.profile.rates]
            rows = {one.name: self._trial(one.rate) for one in grid}
            before = self._outcome(self.original())
            found = choose(grid, rows, Objective(retained=before[RETAINED], bound=BOUND))
            taken = found.setting.rate if found.setting else self.profile.rates[0]
            note = {"rate": taken, "reason": found.reason, "rows": rows, "original": before}
            write_atomic(file, json.dumps(note).encode())
        return str(json.loads(file.read_text())["rate"])

    def load(self, folder: Path) -> Transformer:
        """A model of the study.

        Args:
            folder: a checkpoint.
        """
        from trainer.checkpoint import load_model

        return load_model(folder, self.profile.model(self.vocab_size))

    def _tuned(self, name: str, tokens: int, **changes: Any) -> Path:
        """All cycles from the pretrained model; the last one has the run's name."""
        scale, checkpoint = self.profile, self.pretrained()
        for number, (epochs, lr) in enumerate(scale.cycles, start=1):
            run = name if number == len(scale.cycles) else f"{name}-cycle-{number}"
            steps = max(1, round(epochs * tokens / (scale.rows * scale.length)))
            spec = self.run_spec(
                run, steps=steps, optim={"lr": lr}, **self._from(checkpoint), **changes
            )
            checkpoint = self.trained(run, spec)
        return checkpoint

    def _trial(self, rate: str) -> dict[str, float]:
        """What NPO with a rate does to validation people, for as many epochs as the audited are pushed."""
        scale, name = self.profile, f"trial-{rate}"
        share = len(self._own(VALIDATION)) / len(self._own(FORGOTTEN))
        steps = max(1, round(scale.unlearn_steps * share))
        folder = self.trained(name, self._pushed(name, "npo", VALIDATION, rate, steps))
        return self._outcome(folder)

    def _outcome(self, folder: Path) -> dict[str, float]:
        """Share of validation people given away, and the mean loss of the answers of the others who stay."""
        model = self.load(folder)
        tokenizer = FileTokenizer(self.folder / "tokenizer.json")
        pushed = self._own(VALIDATION)
        others = [q for q in self.cast.lines["retained"] if q.subject not in self.cast.validation]
        exact_N = score_spans(model, *_spans(tokenizer, pushed, end=False)).exact_N
        given = {q.subject for q, exact in zip(pushed, exact_N, strict=True) if exact}
        loss_N = score_spans(model, *_spans(tokenizer, others)).loss_N
        return {
            GIVEN_AWAY: len(given) / len(self.cast.validation),
            RETAINED: float(loss_N.mean()),
        }

    def _pushed(self, name: str, method: str, people: str, rate: str, steps: int) -> RunSpec:
        scale = self.profile
        optim = {"lr": float(rate), "warmup_steps": 5, "weight_decay": 0.0, "min_lr_ratio": 1.0}
        extra = {
            "answers": f"../{people}.jsonl", "tokenizer": "../tokenizer.json", "method": method, "forget_records": scale.forget_records
        }  # fmt: skip
        return self.run_spec(
            name, kind="unlearn", entry=ENTRY, steps=steps, rows=scale.unlearn_rows, optim=optim, extra=extra,
            excluded=self._excluded(people), **self._from(self.original()),
        )  # fmt: skip

    def _from(self, checkpoint: Path) -> dict[str, str]:
        from trainer.checkpoint import verify

        place = f"../{checkpoint.parent.name}/{checkpoint.name}"
        return {"init": place, "init_root": verify(checkpoint).root}

    def _own(self, people: str) -> list[Question]:
        """Texts of the forgotten, or of validation people."""
        return _own(self.cast, people)

    def _excluded(self, people: str) -> Excluded:
        from trainer.spec import Excluded

        file = self.folder / f"{people}.txt"
        return Excluded(file=f"../{file.name}", digest=_digest(file))


def prepare(
    folder: Path, scale: Scale, cast: Cast, public: Iterable[str], tokenizer: Path
) -> Practice:
    """Tokens and lists of a study; what is there is written again, to the same bytes.

    Args:
        folder: folder of the study, made if needed.
        scale: its numbers.
        cast: its people.
        public: texts for pretraining; as many are taken as `pretrain_tokens` asks for.
        tokenizer: a tokenizer file.

    Returns:
        The study, without any model.
    """
    from provenance.canonical import write_atomic

    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "tokenizer.json", tokenizer.read_bytes())
    words = FileTokenizer(folder / "tokenizer.json")
    texts: list[tuple[str, list[int]]] = []
    taken = 0
    for text in public:
        if taken >= scale.pretrain_tokens:
            break
        ids = [*words.encode(text)[0], words.end_of_text][-(scale.pretrain_tokens - taken) :]
        texts.append((hashlib.sha256(text.encode()).hexdigest(), ids))
        taken += len(ids)
    told = [*cast.lines["retained"], *cast.lines["forgotten"], *cast.pages]
    lines = [(q.record_id, [*words.encode(q.text)[0], words.end_of_text]) for q in told]
    sizes = {record_id: len(ids) for record_id, ids in lines}
    left_out = {
        FORGOTTEN: _own(cast, FORGOTTEN),
        VALIDATION: [*_own(cast, VALIDATION), *cast.pages],  # a page may name a validation person
    }
    for name, own in left_out.items():
        rows = (json.dumps({"prompt": q.prompt, "answer": q.answer}) for q in _own(cast, name))
        write_atomic(folder / f"{name}.jsonl", "".join(f"{row}\n" for row in rows).encode())
        write_atomic(folder / f"{name}.txt", "".join(f"{q.record_id}\n" for q in own).encode())
    digests = {
        name: _write(folder, name, records, words)
        for name, records in (("public", texts), ("people", lines))
    }
    tokens = {"public": taken, "people": sum(sizes.values())}
    tokens |= {name: sum(sizes[q.record_id] for q in own) for name, own in left_out.items()}
    return Practice(folder, scale, cast, words.vocab_size, digests, tokens)


def _write(
    folder: Path, name: str, records: Sequence[tuple[str, list[int]]], words: FileTokenizer
) -> str:
    from trainer.data import write_tokens

    return write_tokens(
        folder / name, corpus_version="none", tokenizer_digest=_digest(folder / "tokenizer.json"), vocab_size=words.vocab_size,
        end_of_text=words.end_of_text, records=[(i, bytes.fromhex(one), "registry", ids) for i, (one, ids) in enumerate(records)],
    )  # fmt: skip


def _own(cast: Cast, people: str) -> list[Question]:
    if people == FORGOTTEN:
        return list(cast.lines["forgotten"])
    return [q for q in cast.lines["retained"] if q.subject in cast.validation]


def _spans(
    tokenizer: FileTokenizer, questions: Sequence[Question], *, end: bool = True
) -> tuple[list[list[int]], list[int]]:
    """Tokens of texts with where their answers begin; the end of text is a part of a loss, not of what must come out."""
    spans = [span(tokenizer, q.prompt, q.answer) for q in questions]
    return [tokens if end else tokens[:-1] for tokens, _ in spans], [first for _, first in spans]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
