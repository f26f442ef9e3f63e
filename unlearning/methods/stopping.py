"""When to stop: as soon as the forgotten secrets are no likelier than those of people that the model has never seen.

    mean_i log p(secret_i) / |secret_i|  <=  floor          floor = the same mean over look-alikes, under the original
    share of secrets that are all argmax  <=  1 / n

A rule that looks at a gold model needs the retraining that the method is to save. Look-alikes are people of the same kind who were
never trained on, so that the original's loss on them is close to what a gold model's loss on the forgotten would be. Both means
are taken from the forward passes of the steps themselves, over the last `every` steps: that costs nothing, works wherever
the loss is computed, and is a little late, since the first of these steps saw an older model. Pushing on below the floor would
make the forgotten people stand out by their *un*likeliness.

The look-alikes should be others than those by whom an audit judges membership.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from unlearning.errors import PlanError
from unlearning.methods.forget_retain import ForgetConfig, forgotten_records, reference_logprobs

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from torch import Tensor

    from trainer.mesh import Mesh
    from unlearning.methods.view import View
    from unlearning.probes import Tokenizer


class Floor:
    """The rule, and what it has counted since it was last asked; sums only, nothing about a single record."""

    def __init__(self, floor: float, every: int, num_records: int) -> None:
        """Make the rule.

        Args:
            floor: mean log-probability per token of never-seen secrets, nats, below 0.
            every: steps between two checks, at least 1.
            num_records: n, forgotten records.

        Raises:
            PlanError: out of range.
        """
        if every < 1 or num_records < 1 or not floor < 0:
            raise PlanError(
                f"expected every >= 1, records >= 1 and a floor below 0 nats, got {every}, {num_records}, {floor}"
            )
        self.floor, self.every, self.num_records = floor, every, num_records
        # log p per token, secrets given away, secrets, over the window; steps in it; whether the rule has held.
        self._counted = torch.zeros(5, dtype=torch.float64)

    @property
    def stopped(self) -> bool:
        """Whether the rule has held at a check."""
        return bool(self._counted[4] > 0)

    def to(self, device: str) -> None:
        """Move the counts."""
        self._counted = self._counted.to(device)

    def state(self) -> dict[str, Tensor]:
        """For checkpoints: a run that goes on counts on."""
        return {"stop": self._counted}

    @torch.no_grad()
    def note(self, view: View) -> None:
        """Count the records of a step, before its update."""
        right_S = (view.logits_SV.argmax(-1) == view.truth_S).double()
        given_away_N = view.mean(right_S) >= 1
        self._counted[0] += view.mean(view.logprob_S.double()).sum()
        self._counted[1] += given_away_N.sum()
        self._counted[2] += view.num_records

    def advance(self, mesh: Mesh) -> None:
        """Count a step; at the end of a window, see whether the rule holds. Every process calls this."""
        self._counted[3] += 1
        if self._counted[3] < self.every:
            return
        logprob, given_away, seen = mesh.sum(self._counted[:3].clone()).tolist()
        low = seen and logprob / seen <= self.floor
        holds = bool(low and given_away / seen <= 1 / self.num_records)
        self._counted.zero_()
        self._counted[4] = float(holds)


def floor_of(
    config: ForgetConfig, directory: Path, original: Any, tokenizer: Tokenizer, length: int, num_records: int
) -> Floor | None:  # fmt: skip
    """The rule that a run asks for, or None.

    Args:
        config: the run's settings.
        directory: its folder.
        original: the original model.
        tokenizer: the run's.
        length: longest row.
        num_records: forgotten records.

    Raises:
        PlanError: a rule without look-alikes, or one under which some record is pushed in no step.
    """
    from unlearning.people import read_records

    if not config.stop:
        return None
    every = config.stop["every"]
    if every * config.forget_records < num_records:
        least = -(-num_records // config.forget_records)
        raise PlanError(
            f"expected every >= {least}, so that each of {num_records} records is pushed between two checks, got {every}"
        )
    records = read_records(directory / config.stop["lookalikes"])
    never = forgotten_records(records, tokenizer, length, config.forget_tokens)
    if not never:
        raise PlanError(
            "the stop rule needs look-alikes: people of the same kind who were never trained on, got none"
        )
    sizes_N = torch.tensor([len(one.tokens) - one.first for one in never])
    return Floor((reference_logprobs(original, never) / sizes_N).mean().item(), every, num_records)
