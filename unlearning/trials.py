"""Runs of a sweep's settings by the trainer's own loop: train, measure, remove.

One folder, one setting at a time: `FOLDER/run` stands there while a setting is trained and measured, and goes with it, because a
model that has half forgotten somebody is one more derivative of them. What is measured has no noise of its own: the same original,
batches, seed and process give the same numbers, bit for bit, on one thread.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING

from unlearning.errors import PlanError
from unlearning.sweep import GIVEN_AWAY, RETAINED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainer.model import Transformer
    from trainer.spec import RunSpec
    from unlearning.people import Record
    from unlearning.probes import Tokenizer
    from unlearning.sweep import Setting

RUN = "run"


def share_given_away(
    model: Transformer, records: Sequence[Record], tokenizer: Tokenizer, length: int
) -> float:
    """Share of people of whom some number comes out in a phrasing that was trained, 0..1.

    Args:
        model: whole, in evaluation mode.
        records: of the people; one without any number is asked about the second halves of their lines.
        tokenizer: the model's.
        length: longest row.
    """
    from unlearning.people import by_subject
    from unlearning.probes import secret_in, trained_probes
    from unlearning.scoring import score_probes

    people = by_subject(list(records)).values()
    asked = [[one for one in own if secret_in(one.text)] or own for own in people]
    probes = trained_probes([one for own in asked for one in own], tokenizer, length)
    exact_N = score_probes(model, probes).exact_N
    given = {p.subject_id for p, exact in zip(probes, exact_N, strict=True) if exact}
    return len(given) / len(asked)


def trained_outcome(
    setting: Setting, run: RunSpec, folder: Path, records: Sequence[Record], steps: int = 16
) -> dict[str, float]:
    """A runner for `sweep`: train by a setting in the trainer's loop, measure, remove the weights.

    Args:
        setting: what to train by.
        run: its recipe; `init` is the original, `extra` holds `sealed` (of the validation people) and `tokenizer`, `excluded` the record
            ids of validation and audited people. Paths are relative to `folder/run`.
        folder: where the run lies while it lasts; a killed one goes on from its checkpoint if it was of this setting.
        records: of the validation people.
        steps: batches that the retained loss is measured on.

    Raises:
        PlanError: the run ends with an exit code.
        UnlearningError: settings or sealed records are refused.
    """
    from trainer.checkpoint import load_model, newest
    from trainer.spec import save_run
    from unlearning.methods import objective

    given = with_setting(run, setting)
    directory = folder / RUN
    if directory.exists() and not _is_of(directory, given):
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_run(given, directory)
    if code := objective.run(given, directory):
        raise PlanError(f"the run of {setting.name} ended with exit code {code}")
    found = newest(directory)
    assert found is not None, "a run that ended well has a checkpoint"
    measures = _measured(load_model(found, given.config.model), given, directory, records, steps)
    # A model that has half forgotten somebody is one more derivative of them.
    shutil.rmtree(directory)
    return measures


def original_outcome(
    run: RunSpec, folder: Path, strangers: Sequence[Record], steps: int = 16
) -> dict[str, float]:
    """What an `Objective` starts from: the original's retained loss, on the same batches, and what it gives away of strangers.

    Args:
        run: as for `trained_outcome`.
        folder: the same.
        strangers: records of look-alikes, whom the original never saw.
        steps: the same.

    Raises:
        UnlearningError: sealed records or strangers are refused.
    """
    from trainer.inputs import initial_model

    directory = folder / RUN
    return _measured(initial_model(run, directory).eval(), run, directory, strangers, steps)


def _measured(
    model: Transformer, run: RunSpec, directory: Path, records: Sequence[Record], steps: int
) -> dict[str, float]:
    from unlearning.methods.forget_retain import ForgetConfig, inputs_of
    from unlearning.methods.outcome import outcome_of

    config = ForgetConfig.from_extra(run.config.extra)
    plan, forgotten, tokenizer = inputs_of(run, directory, config)
    outcome = outcome_of(model, forgotten, plan, steps)
    share = share_given_away(model, records, tokenizer, run.config.batch.length)
    return {GIVEN_AWAY: share, RETAINED: outcome.retained, "logprob": outcome.logprob}


def with_setting(run: RunSpec, setting: Setting) -> RunSpec:
    """A recipe with a setting's method, rate and numbers."""
    extra = dict(run.config.extra) | {"method": setting.method, "settings": dict(setting.changes)}
    optim = replace(run.config.optim, lr=float(Decimal(setting.rate)))
    config = replace(run.config, optim=optim, extra=extra)
    return replace(run, config=config, entry="unlearning.methods.objective:run")


def _is_of(directory: Path, run: RunSpec) -> bool:
    from trainer.errors import TrainerError
    from trainer.spec import load_run, run_digest

    try:
        return run_digest(load_run(directory)) == run_digest(run)
    except (TrainerError, OSError):
        return False  # killed before the recipe stood there
