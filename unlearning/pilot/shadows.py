"""Shadow models: canaries in or out by committed coins, in many small models, and what a test of each record makes of them.

::

    original-J   trained on the retained people and on the canaries that coin J says are in
    npo-J        the same after NPO was asked to forget exactly those, kept at several steps
    gold-G       trained on the retained people alone

Every model is a target once, and the others are its shadows: for a canary they are models in which it was in, and models in which it was out.
The score of a canary is the chance of its number's tokens, geometric mean, averaged over its lines with a number.

*Per record* (U-LiRA): log likelihood ratio of two normals, that canary's own (`canaries.shadow_evidence`). *Threshold*: the score itself, one
threshold for all canaries and models, which needs no shadow. Both are asked the same question: was this canary in?

Under gold no canary was in, whatever its coin says: the same tests must do no better than chance there.

Source: Hayes et al., arXiv 2403.01218, algorithm 1; Carlini et al., arXiv 2112.03570, for leaving one model out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.canaries import rate_at, shadow_evidence
from unlearning.coins import throw_coins
from unlearning.pilot.models import KEY, METHOD_ROWS, Study, record_lines
from unlearning.pilot.sharded import subjects
from unlearning.probes import FileTokenizer, secret_in, trained_probes
from unlearning.scoring import score_probes
from unlearning.statistics import auc

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

RATES = (0.01, 0.05)


@dataclass(frozen=True, slots=True)
class Shadows:
    """Models of one study, by coins; its forgotten people are the canaries."""

    study: Study
    seed: bytes
    """Of the coins (`coins.throw_coins`)."""
    models: int
    """Originals, and as many after NPO."""
    steps: tuple[int, ...]
    """Of NPO, increasing multiples of the first: where its weights are kept."""

    @property
    def canaries(self) -> list[str]:
        """Ids of the canaries, in order."""
        return subjects(self.study.people["forgotten"])

    @property
    def names(self) -> list[str]:
        """What a coin belongs to: a canary in a model, `MODEL/CANARY`, model by model."""
        return [f"{model}/{one}" for model in range(self.models) for one in self.canaries]

    def in_JN(self) -> NDArray[np.bool_]:  # noqa: N802 - shape suffix
        """Which canary is in in which original."""
        return throw_coins(self.seed, self.names).reshape(self.models, -1)

    def original(self, model: int) -> Path:
        """An original; its training is its own, by seed and by coins."""
        name = f"original-{model}"
        out = [
            one for one, is_in in zip(self.canaries, self.in_JN()[model], strict=True) if not is_in
        ]
        spec = self.study.run_spec(name, seed=model, excluded=self._list(name, out))
        return self.study.trained(name, spec)

    def gold(self, number: int) -> Path:
        """A model without any canary, of a seed that no original has."""
        name = f"gold-{number}"
        excluded = self._list(name, self.canaries)
        spec = self.study.run_spec(name, kind="gold", seed=self.models + number, excluded=excluded)
        return self.study.trained(name, spec)

    def npo(self, model: int) -> list[Path]:
        """An original after NPO on the canaries that were in, with the pilot's rate.

        The rate is constant, so that the weights of step N are those of a run of N steps.

        Returns:
            A checkpoint for each of `steps`.
        """
        from provenance.canonical import write_atomic
        from provenance.sealing import seal
        from trainer.checkpoint import verify

        study, original, name = self.study, self.original(model), f"npo-{model}"
        chosen = study.profile.methods["npo"]
        held = set(np.array(self.canaries)[self.in_JN()[model]].tolist())
        pushed = [r for r in study.people["forgotten"] if r.subject in held]
        sealed = study.folder / f"{name}.sealed"
        if not sealed.exists():  # a seal has a random nonce
            write_atomic(sealed, seal(KEY, record_lines(pushed)))
        extra = {
            "sealed": {"file": f"../{sealed.name}", "key_file": "../key"}, "tokenizer": "../tokenizer.json", "method": "npo",
            "settings": chosen.settings, "forget_records": study.profile.forget_records,
        }  # fmt: skip
        optim = {"name": "adamw", "lr": float(chosen.lr), "warmup_steps": 0, "weight_decay": 0.0, "min_lr_ratio": 1.0}  # fmt: skip
        spec = study.run_spec(
            name, kind="unlearn", entry="unlearning.methods.objective:run", steps=self.steps[-1], seed=model, optim=optim, extra=extra,
            excluded=self._list(name, self.canaries), init=f"../{original.parent.name}/{original.name}", init_root=verify(original).root,
        )  # fmt: skip
        batch = dataclasses.replace(spec.config.batch, rows=METHOD_ROWS)
        stride = self.steps[0]
        config = dataclasses.replace(
            spec.config, batch=batch, checkpoint_every=stride, keep_last=self.steps[-1] // stride
        )
        study.trained(name, dataclasses.replace(spec, config=config))
        return [study.folder / name / f"step-{step}" for step in self.steps]

    def scores(self, folder: Path) -> tuple[NDArray[np.float64], float]:
        """What a model knows of each canary, and how many of the retained people it answers.

        Args:
            folder: a checkpoint of this study.

        Returns:
            p_N in (0, 1); the share of retained people of whom a number comes out.
        """
        from trainer.checkpoint import load_model

        study = self.study
        model = load_model(folder, study.profile.model(study.vocab_size))
        tokenizer = FileTokenizer(study.folder / "tokenizer.json")
        found: list[NDArray[np.float64]] = []
        exact = 0.0
        for population in ("forgotten", "retained"):
            own = [r for r in study.people[population] if secret_in(r.text)]
            probes = trained_probes(own, tokenizer)
            asked = score_probes(model, probes)
            people = np.array([probe.subject_id for probe in probes])
            found.append(
                np.array([np.exp(-asked.loss_N[people == s]).mean() for s in subjects(own)])
            )
            exact = float(np.mean([asked.exact_N[people == s].max() for s in subjects(own)]))
        return found[0], exact

    def _list(self, name: str, people: Sequence[str]) -> object:
        from trainer.spec import Excluded

        gone = set(people)
        ids = [r.record_id for r in self.study.people["forgotten"] if r.subject in gone]
        data = "".join(f"{one}\n" for one in ids).encode()
        (self.study.folder / f"{name}.txt").write_bytes(data)
        return Excluded(file=f"../{name}.txt", digest=hashlib.sha256(data).hexdigest())


def evidence(
    target_TN: NDArray[np.float64], shadow_JN: NDArray[np.float64], in_JN: NDArray[np.bool_], *, own: bool
) -> NDArray[np.float64]:  # fmt: skip
    """Log likelihood ratio of each canary under each target.

    Args:
        target_TN: scores p in (0, 1) under the models at hand.
        shadow_JN: under the shadow models.
        in_JN: which canary was in in which shadow model.
        own: whether target t is shadow model t, which then says nothing about itself.

    Returns:
        Lambda_TN, nats; NaN for a canary that has fewer than two shadows of a kind.
    """
    found_TN = np.full(target_TN.shape, np.nan)
    for t, n in np.ndindex(target_TN.shape):
        used_J = np.arange(len(shadow_JN)) != (t if own else -1)
        was_in, was_out = (
            shadow_JN[used_J & side_J, n, None] for side_J in (in_JN[:, n], ~in_JN[:, n])
        )
        if min(len(was_in), len(was_out)) >= 2:
            found_TN[t, n] = shadow_evidence(target_TN[t, n, None], was_in, was_out)[0]
    return found_TN


@dataclass(frozen=True, slots=True)
class Told:
    """How well a score tells canaries that were in from those that were out."""

    auc: float
    low: float
    high: float
    """95 % of resamples of models and canaries, both drawn again."""
    rates: tuple[float, ...]
    """True positive rate at each of `RATES` of false ones, one threshold for all models."""
    rate_lows: tuple[float, ...]
    """2.5 % of the same resamples."""
    drawn_B: NDArray[np.float64]
    """The AUC of every resample: two scores that were judged with equal generators are told apart on the same resamples."""


def told(
    score_TN: NDArray[np.float64], in_TN: NDArray[np.bool_], generator: np.random.Generator, resamples: int = 500
) -> Told:  # fmt: skip
    """Judge a score over all targets and canaries.

    Args:
        score_TN: higher = more like in; NaN = no score.
        in_TN: the coins.
        generator: source of the resamples.
        resamples: number of them.

    Returns:
        AUC and true positive rates with their bounds.
    """
    targets, canaries = score_TN.shape
    found = []
    for _ in range(resamples):
        drawn = np.ix_(generator.integers(targets, size=targets), generator.integers(canaries, size=canaries))  # fmt: skip
        found.append(_judged(score_TN[drawn], in_TN[drawn]))
    found_BR = np.array(found)
    value_R = _judged(score_TN, in_TN)
    low_R, high_R = np.quantile(found_BR, [0.025, 0.975], axis=0)
    low, *lows = (float(one) for one in low_R)
    return Told(value_R[0], low, float(high_R[0]), tuple(value_R[1:]), tuple(lows), found_BR[:, 0])


def _judged(score_TN: NDArray[np.float64], in_TN: NDArray[np.bool_]) -> list[float]:
    """AUC, then the true positive rates."""
    there = ~np.isnan(score_TN)
    was_in, was_out = score_TN[there & in_TN], score_TN[there & ~in_TN]
    return [auc(was_in, was_out), *(rate_at(was_in, was_out, rate) for rate in RATES)]
