"""Runs of a sweep's settings by the trainer's own loop: train, measure, remove.

One folder, one setting at a time: `FOLDER/run` stands there while a setting is trained and measured, and goes with it, because a
model that has half forgotten somebody is one more derivative of them. What is measured has no noise of its own: the same original,
batches, seed and process give the same numbers, bit for bit, on one thread.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import TYPE_CHECKING

from unlearning.errors import PlanError
from unlearning.sweep import EXPOSURE, GIVEN_AWAY, HELD, MEMBERSHIP, RETAINED

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainer.model import Transformer
    from trainer.spec import RunSpec
    from unlearning.people import Record
    from unlearning.probes import Tokenizer
    from unlearning.sweep import Setting

RUN = "run"
_STREAM = 17


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


def signs_of(
    model: Transformer, records: Sequence[Record], strangers: Sequence[Record], tokenizer: Tokenizer, length: int
) -> dict[str, float]:  # fmt: skip
    """By what people stand out where no question brings a number out, as an audit measures it.

    Args:
        model: whole, in evaluation mode.
        records: of the people.
        strangers: records of people of the same kind who were never trained on.
        tokenizer: the model's.
        length: longest row.

    Returns:
        `membership`: AUC of minus the mean loss per person, people against strangers. `exposure`: mean bits by which a person's number
        ranks ahead of chance among other numbers, the same ones for every model; left out where nobody has a number.
    """
    import numpy as np

    from unlearning.attacks.memorised import OTHERS, bits_of
    from unlearning.people import by_subject
    from unlearning.questions import candidates_of, other_numbers
    from unlearning.statistics import auc

    theirs, others_ = (
        np.array(list(losses_of(model, population, tokenizer, length).values()))
        for population in (records, strangers)
    )
    found = {MEMBERSHIP: auc(-theirs, -others_)}
    people = by_subject(list(records))
    others = other_numbers(people, OTHERS, np.random.default_rng(_STREAM))
    asked = candidates_of(people, others, tokenizer)
    if asked:
        found[EXPOSURE] = float(np.mean([bits_of(model, *one) for one in asked.values()]))
    return found


def losses_of(
    model: Transformer, records: Sequence[Record], tokenizer: Tokenizer, length: int
) -> dict[str, float]:
    """What a model loses on people's records, as an audit's membership and utility have it.

    Args:
        model: whole, in evaluation mode.
        records: of the people.
        tokenizer: the model's.
        length: longest row.

    Returns:
        Person → mean over their records of the mean loss per token, nats; people in order.
    """
    from unlearning.people import by_subject
    from unlearning.scoring import score_spans

    found = {}
    for person, own in sorted(by_subject(list(records)).items()):
        texts = [(*tokenizer.encode(r.text)[0], tokenizer.end_of_text)[:length] for r in own]
        found[person] = float(score_spans(model, texts, [1] * len(texts)).loss_N.mean())
    return found


@dataclass(frozen=True, slots=True, repr=False)
class Held:
    """People who stay, and what they lose under gold; without a `repr`, so that no log names them."""

    records: Sequence[Record]
    """Theirs."""
    gold: Mapping[str, float]
    """`losses_of` a gold model, of the same people."""

    def cost(self, model: Transformer, tokenizer: Tokenizer, length: int) -> dict[str, float]:
        """What a model costs them above gold, judged as an audit's utility endpoint is.

        Args:
            model: whole, in evaluation mode.
            tokenizer: the model's.
            length: longest row.

        Returns:
            `held`: one-sided 95 % upper bound of the mean difference, bootstrap over people, nats per token; `held_loss`: the mean loss
            itself.

        Raises:
            PlanError: gold was asked about other people.
        """
        import numpy as np

        from unlearning.statistics import mean_bounds

        own = losses_of(model, self.records, tokenizer, length)
        if set(own) != set(self.gold):
            raise PlanError(
                f"expected gold's losses of the {len(own)} held people, got those of {len(self.gold)}, {len(set(own) & set(self.gold))} of them held"
            )
        losses_P = np.array(list(own.values()))
        if not np.isfinite(losses_P).all():
            return {HELD: float("inf"), "held_loss": float("inf")}
        excess_P = losses_P - np.array([self.gold[person] for person in own])
        high = mean_bounds(excess_P, np.random.default_rng(_STREAM + 1)).high
        return {HELD: high, "held_loss": float(losses_P.mean())}


def trained_outcome(
    setting: Setting, run: RunSpec, folder: Path, records: Sequence[Record], steps: int = 16, *, strangers: Sequence[Record] = (),
    held: Held | None = None, further: Callable[[Transformer], Mapping[str, float]] | None = None,
) -> dict[str, float]:  # fmt: skip
    """A runner for `sweep`: train by a setting in the trainer's loop, measure, remove the weights.

    Args:
        setting: what to train by.
        run: its recipe; `init` is the original, `extra` holds `sealed` (of the validation people) and `tokenizer`, `excluded` the record
            ids of validation and audited people. Paths are relative to `folder/run`.
        folder: where the run lies while it lasts; a killed one goes on from its checkpoint if it was of this setting.
        records: of the validation people.
        steps: batches that the retained loss is measured on.
        strangers: records of look-alikes, for `signs_of`; none: signs are not measured.
        held: people who stay and are held to a bound; none: what a setting costs them is not measured.
        further: more measures of the model, which it may not change.

    Raises:
        PlanError: the run ends with an exit code.
        UnlearningError: settings or sealed records are refused.
    """
    from trainer.checkpoint import load_model, newest
    from trainer.spec import save_run
    from unlearning.methods import objective

    directory = folder / RUN
    given = with_setting(run, setting, directory)
    if directory.exists() and not _is_of(directory, given):
        shutil.rmtree(directory)
    directory.mkdir(parents=True, exist_ok=True)
    save_run(given, directory)
    if code := objective.run(given, directory):
        raise PlanError(f"the run of {setting.name} ended with exit code {code}")
    found = newest(directory)
    assert found is not None, "a run that ended well has a checkpoint"
    model = load_model(found, given.config.model)
    # On the batches of the common recipe, so that settings with other neighbours are measured on the same text.
    measures = _measured(model, run, directory, records, steps, strangers, held)
    if further is not None:
        measures |= further(model)
    # A model that has half forgotten somebody is one more derivative of them.
    shutil.rmtree(directory)
    return measures


def original_outcome(
    run: RunSpec, folder: Path, people: Sequence[Record], steps: int = 16, *, strangers: Sequence[Record] = (),
    held: Held | None = None,
) -> dict[str, float]:  # fmt: skip
    """What an `Objective` starts from: retained loss of the run's `init`, on the same batches, and what it gives away of people.

    Args:
        run: as for `trained_outcome`; with a gold model as its `init`, gold's numbers.
        folder: the same.
        people: whose records: look-alikes for the floor, the validation people for their signs.
        steps: the same.
        strangers: the same.
        held: the same.

    Raises:
        UnlearningError: sealed records or strangers are refused.
    """
    from trainer.inputs import initial_model

    directory = folder / RUN
    model = initial_model(run, directory).eval()
    return _measured(model, run, directory, people, steps, strangers, held)


def _measured(
    model: Transformer, run: RunSpec, directory: Path, records: Sequence[Record], steps: int, strangers: Sequence[Record],
    held: Held | None,
) -> dict[str, float]:  # fmt: skip
    from unlearning.methods.forget_retain import ForgetConfig, inputs_of
    from unlearning.methods.outcome import outcome_of

    config = ForgetConfig.from_extra(run.config.extra)
    plan, forgotten, tokenizer = inputs_of(run, directory, config)
    outcome = outcome_of(model, forgotten, plan, steps)
    length = run.config.batch.length
    share = share_given_away(model, records, tokenizer, length)
    found = {GIVEN_AWAY: share, RETAINED: outcome.retained, "logprob": outcome.logprob}
    found |= signs_of(model, records, strangers, tokenizer, length) if strangers else {}
    return found | (held.cost(model, tokenizer, length) if held else {})


def with_setting(run: RunSpec, setting: Setting, directory: Path) -> RunSpec:
    """A recipe with a setting's method, rate, numbers and neighbours.

    Args:
        run: the recipe.
        setting: what to change.
        directory: where the run will lie; its relative paths start there.

    Raises:
        PlanError: a share of neighbours out of range.
        UnlearningError: sealed records are refused.
    """
    from unlearning.methods.neighbours import with_neighbours

    recipe = dict(setting.recipe)
    share = recipe.pop("neighbours", "0")
    extra = dict(run.config.extra) | {"method": setting.method, "settings": dict(setting.changes)}
    optim = replace(run.config.optim, lr=float(Decimal(setting.rate)))
    config = replace(run.config, optim=optim, extra=extra | recipe)
    given = replace(run, config=config, entry="unlearning.methods.objective:run")
    return with_neighbours(given, directory, share)


def _is_of(directory: Path, run: RunSpec) -> bool:
    from trainer.errors import TrainerError
    from trainer.spec import load_run, run_digest

    try:
        return run_digest(load_run(directory)) == run_digest(run)
    except (TrainerError, OSError):
        return False  # killed before the recipe stood there
