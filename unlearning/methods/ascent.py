"""Gradient ascent and gradient difference: the classic baselines, kept because audits must be able to fail.

    f = mean log p_θ(secret)        L = f + w·NLL_retain         (w = 0: plain ascent)

Nothing bounds the loss from below, so the run's number of steps is the only brake: too few and the secret stays, too many and
the model dies. In our pilot plain ascent wiped the retained people too and still gave 61 % of the secrets back after ten
harmless fine-tuning steps.

Source: Jang et al., ACL 2023, arXiv 2210.01504 (ascent); Liu et al., CoLLAs 2022, arXiv 2203.12817 (difference).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from unlearning.methods.forget_retain import ForgetConfig
from unlearning.methods.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from trainer.spec import RunSpec
    from unlearning.methods.view import View


def ascent_term(logprob_N: Tensor, num_tokens_N: Tensor) -> Tensor:
    """Mean log-probability per token of each record: minimising it is gradient ascent on the loss.

    Args:
        logprob_N: log-probability of each secret under the model, nats.
        num_tokens_N: number of tokens it is summed over, ≥ 1.

    Returns:
        loss_N, ≤ 0 and unbounded below.
    """
    return logprob_N / num_tokens_N


NEEDS: frozenset[str] = frozenset()


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record; see `ascent_term`.

    Args:
        view: pushed positions of a step.
        settings: none.

    Returns:
        loss_N.
    """
    del settings
    return ascent_term(view.logprob_N, view.num_tokens_N)


def run(run: RunSpec, directory: Path) -> int:
    """Entry `unlearning.methods.ascent:run` of a training run; `retain_weight: "0"` is plain ascent.

    Args:
        run: specification; `config.extra` as in `ForgetConfig`, `init` is the original model.
        directory: the run's folder.

    Returns:
        Exit code of the loop.

    Raises:
        UnlearningError: if settings or sealed records are refused (exit code 3).
    """
    from unlearning.methods.objective import train

    config = dataclasses.replace(ForgetConfig.from_extra(run.config.extra), method="ascent")
    return train(run, directory, config, Settings(retain_weight=config.retain_weight))
