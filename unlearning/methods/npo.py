"""Negative preference optimisation: push a record down only as far as it still stands above the original.

    f(Δ) = (2/β) · log(1 + e^(β·Δ)) = -(2/β) · log sigmoid(-β·Δ),      Δ = log p_θ(secret) - log p_original(secret)

At the start (Δ = 0) the gradient is that of gradient ascent; it fades as the record sinks (weight 2·sigmoid(β·Δ)), and so the model
does not collapse. The same fading is the method's weakness: it stops pushing when the secret is merely *unlikely*. In our
pilot no tier could bring the numbers out again, but losses still told members apart (AUC 0.94 against gold's 0.58). The
audit decides, not the method.

**Choice of β.** The push has faded when β·|Δ| is a few units. The paper's 0.1 is made for answers of a hundred tokens; a number of six
digits is at chance after a fall of 6·ln 10 = 14 nats, where 0.1 still pushes with 40 % of full strength. Measured on a model of one
million parameters (100 steps at rate 0.001): with 0.1 the loss of retained people rose from 0.29 to 0.70 nats per token, with 0.5 it
stayed at 0.29, and no tier brought a number back in either; but losses gave members away with 0.5 and not with 0.1. A sweep on people whom nobody
audits, with held people, membership and exposure in its rule, chose 0.1 with all tokens of a record pushed and four times the retain
weight (README, "A sweep"). A rate can be too small: at 0.0002 tier 3 brought 9 % of the people back with 0.1 and 24 % with 0.5, because small changes are undone by small changes.

Source: Zhang, Lin, Bai, Mei, "Negative preference optimization", COLM 2024, arXiv 2404.05868, eq. 3.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch.nn import functional

from unlearning.methods.forget_retain import ForgetConfig
from unlearning.methods.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from trainer.spec import RunSpec
    from unlearning.methods.view import View


def npo_term(logprob_N: Tensor, reference_N: Tensor, beta: float) -> Tensor:
    """NPO loss of each record.

    Args:
        logprob_N: log-probability of each secret under the model, nats.
        reference_N: the same under the original model.
        beta: inverse temperature, > 0.

    Returns:
        loss_N > 0; equal to (2/β)·ln 2 at the original, falling to 0 as the secret becomes impossible.

    Source: Zhang et al. 2024, eq. 3.
    """
    return 2.0 / beta * functional.softplus(beta * (logprob_N - reference_N))


NEEDS: frozenset[str] = frozenset()


def loss(view: View, settings: Settings) -> Tensor:
    """Forget term of each record; see `npo_term`.

    Args:
        view: pushed positions of a step.
        settings: `beta`.

    Returns:
        loss_N.
    """
    return npo_term(view.logprob_N, view.reference_N, settings.beta)


def run(run: RunSpec, directory: Path) -> int:
    """Entry `unlearning.methods.npo:run` of a training run.

    Args:
        run: specification; `config.extra` as in `ForgetConfig`, `init` is the original model.
        directory: the run's folder.

    Returns:
        Exit code of the loop.

    Raises:
        UnlearningError: if settings or sealed records are refused (exit code 3).
    """
    from unlearning.methods.objective import train

    config = dataclasses.replace(ForgetConfig.from_extra(run.config.extra), method="npo")
    settings = Settings(beta=config.beta, retain_weight=config.retain_weight)
    return train(run, directory, config, settings)
