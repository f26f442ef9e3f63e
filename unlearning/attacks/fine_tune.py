"""Tier 3, fine-tuning restoration: train the model further on harmless records, then ask again.

Approximate methods often bend the last layers only; a few steps on *other* people's records of the same kind straighten
them again and the forgotten numbers come back, although the attacker never had them. In our pilot, methods with 0 % in
tiers 1 and 2 gave back 34 to 81 %; the gold model, under the same attack, 0 %.

The attack is a plain AdamW loop with a *small* step size on the retained people's records, questions at a few steps; the
best step counts. If it is too hot it wipes every model and finds nothing anywhere: the original model is the control (it
must keep its own leaks), and a verdict without that control is INVALID. The model that is given stays as it is: a copy is
trained. All models see the same records in the same order.

Source: fine-tuning restoration of PrivUn, arXiv 2604.22076; relearning, Hu et al., ICLR 2025, arXiv 2406.13356.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainer.model import Block
from unlearning.attacks.direct import ask
from unlearning.scoring import padded, span_logits, span_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.material import Material
    from unlearning.rows import Measurement

    Loader = Callable[[], Transformer]

_STREAM = 3
PART = 1 << 15
"""Elements of a weight that are moved at a time, so that temporaries are small and stay in the cache."""


def fine_tune(model: Transformer | Loader, material: Material) -> list[Measurement]:
    """Fine-tune a copy on retained records and ask at the planned steps.

    Args:
        model: the model under attack, not changed; or a function that loads it, which spares a copy.
        material: questions, retained records, budget.

    Returns:
        Exact match and mean log-probability of each secret, for each planned step.
    """
    limits = material.limits
    batches = [[material.retained[i].tokens for i in batch] for batch in drawn_batches(material)]
    steps = attacked(model, batches, limits.fine_tune_lr, limits.fine_tune_steps)
    asked = (*material.trained, *material.unseen)
    return [
        measurement
        for step, after in steps
        for measurement in ask(after, asked, f"fine_tune/step-{step}")
    ]


def attacked(
    model: Transformer | Loader,
    batches: Sequence[Sequence[Sequence[int]]],
    lr: str,
    steps: Sequence[int],
) -> Iterator[tuple[int, Transformer]]:
    """Train a copy of a model by AdamW and stop at some steps.

    Each weight is updated as soon as its gradient is known, and the gradient is then dropped: in memory are the weights, the moments
    (one and a half copies), one gradient and one block's activations, which are computed a second time when its gradient is.

    Args:
        model: any model, not changed; or a function that loads one, which is trained itself.
        batches: token sequences of each step, at least `steps[-1]` of them.
        lr: learning rate, a decimal string.
        steps: increasing steps.

    Yields:
        (step, the model after so many steps); it is trained further when the next one is asked for.
    """
    # An ensemble is no `Transformer`, and is attacked like one.
    trained = cast("Transformer", copy.deepcopy(model) if isinstance(model, nn.Module) else model())
    trained.requires_grad_(requires_grad=True)
    hooks = [
        parameter.register_post_accumulate_grad_hook(_Weight(float(lr), parameter))
        for parameter in trained.parameters()
    ]
    device = next(trained.parameters()).device
    try:
        for step in range(1, steps[-1] + 1):
            sequences = batches[step - 1]
            tokens_BT = padded(sequences).to(device)
            mask_BT = span_mask(sequences, [1] * len(sequences)).to(device)
            with _recomputing(trained):
                logits_SV = span_logits(trained, tokens_BT, mask_BT)
                functional.cross_entropy(logits_SV, tokens_BT[:, 1:][mask_BT]).backward()
            if step in steps:
                yield step, trained
    finally:
        # A weight knows its hook, and the hook its moments: left alone, those of every attack would stay with the model.
        for hook in hooks:
            hook.remove()


@contextmanager
def _recomputing(model: Transformer) -> Iterator[None]:
    """Within, a block keeps its input only and is computed again for its gradient: the same bits, a third more time.

    All activations of a step are a sixth of a copy for four short rows, and grow with the rows; a block's are a tenth of that.
    """
    blocks = [one for one in model.modules() if isinstance(one, Block)]
    for block in blocks:
        # Nothing in a block is random, so that no generator has to be put back.
        block.forward = partial(  # type: ignore[method-assign]
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


class _Weight:
    """AdamW for one weight, without decay: the attacker wants the old knowledge back, not a smaller model.

        m = 0.9 m + 0.1 g      v = 0.999 v + 0.001 g²      w -= lr · (m / (1 - 0.9^t)) / (sqrt(v / (1 - 0.999^t)) + 1e-8)

    The first moment is kept in bfloat16: it forgets within ten steps, so that its rounding (0.4 %) does not add up; the second moment
    gains a thousandth a step, which bfloat16 would round away. With both in float32 an audit would need four copies of the model.
    """

    def __init__(self, lr: float, weight: Tensor) -> None:
        self.lr, self.step = lr, 0
        self.first = torch.zeros_like(weight, dtype=torch.bfloat16)
        self.second = torch.zeros_like(weight)

    def __call__(self, weight: Tensor) -> None:
        """Move the weight along the gradient that it just got, and drop the gradient."""
        assert weight.grad is not None
        self.step += 1
        grad, weight.grad = weight.grad, None
        with torch.no_grad():
            # By rows, not flat: a gradient that lies transposed in memory would be copied whole to be flattened.
            rows = max(1, PART // weight[0].numel())
            for values, rounded, second, slope in zip(
                *(one.split(rows) for one in (weight, self.first, self.second, grad)), strict=True
            ):
                first = rounded.to(values.dtype).lerp_(slope, 0.1)
                rounded.copy_(first)
                second.mul_(0.999).addcmul_(slope, slope, value=0.001)
                scale = (second / (1.0 - 0.999**self.step)).sqrt_().add_(1e-8)
                values.addcdiv_(first, scale, value=-self.lr / (1.0 - 0.9**self.step))


def drawn_batches(material: Material) -> list[list[int]]:
    """Which retained records each step of the attack sees: epochs of fresh permutations, cut into batches.

    Args:
        material: retained records, budget, seed.

    Returns:
        For each step up to the last planned one, indices into `material.retained`.
    """
    generator = np.random.default_rng([material.seed, _STREAM])
    usable = [i for i, document in enumerate(material.retained) if len(document.tokens) > 1]
    rows, steps = material.limits.fine_tune_rows, material.limits.fine_tune_steps[-1]
    return permuted_batches(usable, rows, steps, generator)


def permuted_batches(
    usable: Sequence[int], rows: int, steps: int, generator: np.random.Generator
) -> list[list[int]]:
    """Epochs of fresh permutations, cut into batches.

    Args:
        usable: what to draw from, at least one.
        rows: items of a batch.
        steps: number of batches.
        generator: source of the permutations.

    Returns:
        `steps` lists of `rows` items.
    """
    order: list[int] = []
    while len(order) < rows * steps:
        order += [usable[i] for i in generator.permutation(len(usable))]
    return [order[i * rows : (i + 1) * rows] for i in range(steps)]
