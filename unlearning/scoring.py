"""What a model says about tokens, all at once: exact match and log-probability of spans.

Greedy decoding from a prompt gives exactly the secret **iff** the true token has the largest logit at every position of
the secret *under teacher forcing*: as long as all tokens so far are right, greedy decoding has the true prefix. So one
forward pass answers "would it come out?" for a batch of people, without any decoding loop, and gives the likelihood as
well (the tests hold it against `trainer.generate`).

Sequences of similar length share a batch, padded on the right: causal attention never looks there. The output head, the
dearest part of a small model, runs on scored positions only.

A model whose numbers are no longer finite leaks nothing and has the largest loss, `MAX_LOSS`: it fails on utility.

Shape suffixes: `B` rows, `T` positions, `D` width, `S` scored positions, `N` sequences, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.probes import Probe

MAX_LOSS = 100.0  # nats per token; far above ln V of any vocabulary
BATCH_TOKENS = 1024
"""Padded tokens of a batch. On a processor a batch's states should stay in its cache: 8,192 are a quarter slower (README, "Speed and memory")."""
ACCELERATED_TOKENS = 8192
"""The same on an accelerator, which wants to be filled."""
LOGIT_ROWS = 1024  # scored positions whose logits are in memory together


@dataclass(frozen=True, slots=True)
class Scores:
    """How a model continues N sequences."""

    exact_N: NDArray[np.float64]
    """1.0 where greedy decoding would give the whole span, else 0.0."""
    loss_N: NDArray[np.float64]
    """Mean negative log-probability of the span's tokens, nats per token, in [0, MAX_LOSS]."""


def score_probes(model: Transformer, probes: Sequence[Probe]) -> Scores:
    """Scores of the secrets, given their prompts.

    Args:
        model: a model in evaluation mode; it is not changed.
        probes: questions.

    Returns:
        Scores in the order of the probes.
    """
    sequences = [[*p.prompt_tokens, *p.secret_tokens] for p in probes]
    return score_spans(model, sequences, [len(p.prompt_tokens) for p in probes])


def score_spans(
    model: Transformer, sequences: Sequence[Sequence[int]], first_N: Sequence[int]
) -> Scores:
    """Scores of the tokens of each sequence from its `first` on, given all tokens before.

    Args:
        model: a model in evaluation mode; it is not changed.
        sequences: N token sequences, each one document from position 0.
        first_N: first scored position of each sequence, 1 ≤ first < length.

    Returns:
        Scores in the order of the sequences.

    Raises:
        ValueError: if a span is empty or begins at position 0, which nothing predicts.
    """
    if any(not 1 <= first < len(s) for s, first in zip(sequences, first_N, strict=True)):
        raise ValueError("expected 1 <= first < length for every sequence")
    exact_N, loss_N = np.zeros(len(sequences)), np.zeros(len(sequences))
    with torch.inference_mode():
        for chosen in batches([len(s) for s in sequences], batch_tokens(model)):
            rows = [sequences[i] for i in chosen]
            firsts = [first_N[i] for i in chosen]
            exact_B, loss_B = _score_batch(model, rows, firsts)
            exact_N[chosen], loss_N[chosen] = exact_B, loss_B
    return Scores(exact_N, loss_N)


def padded(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Sequences as one int64 tensor, padded on the right with token 0.

    Args:
        sequences: B token sequences.

    Returns:
        tokens_BT with T the greatest length.
    """
    tokens_BT = torch.zeros(len(sequences), max(map(len, sequences)), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens_BT[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
    return tokens_BT


def span_mask(sequences: Sequence[Sequence[int]], first_N: Sequence[int]) -> Tensor:
    """Which positions of the padded tensor, shifted by one, predict a scored token.

    Args:
        sequences: B token sequences.
        first_N: first scored position of each.

    Returns:
        bool [B, T-1]; entry t says whether token t+1 is scored.
    """
    positions = torch.arange(1, max(map(len, sequences)))[None]
    lengths = torch.tensor([len(s) for s in sequences])[:, None]
    return (positions >= torch.tensor(list(first_N))[:, None]) & (positions < lengths)


def span_logits(model: Transformer, tokens_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Logits at the masked positions only, logits_SV in row-major order; differentiable.

    Args:
        model: any model of the trainer.
        tokens_BT: int64 tokens, one document per row.
        mask_BT: bool [B, T-1] from `span_mask`.

    Returns:
        logits_SV.
    """
    hidden_BTD, _ = model.trunk(tokens_BT[:, :-1])
    return model.logits(hidden_BTD[mask_BT])


def batch_tokens(model: Transformer) -> int:
    """Padded tokens of a batch where a model's weights are."""
    device = next(model.parameters()).device
    return BATCH_TOKENS if device.type == "cpu" else ACCELERATED_TOKENS


def batches(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Indices grouped by length, at most `most` padded tokens together.

    Args:
        lengths: tokens of each sequence.
        most: padded tokens of a batch (`batch_tokens`); a longer sequence is a batch of its own.

    Yields:
        Indices of one batch; every index once, shorter sequences first.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > most:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _score_batch(
    model: Transformer, rows: Sequence[Sequence[int]], firsts: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    device = next(model.parameters()).device
    tokens_BT, mask_BT = padded(rows).to(device), span_mask(rows, firsts).to(device)
    truth_S = tokens_BT[:, 1:][mask_BT]
    row_S = mask_BT.nonzero()[:, 0]
    hidden_BTD, _ = model.trunk(tokens_BT[:, :-1])
    logprob_S, wrong_S = _judged(model, hidden_BTD[mask_BT], truth_S)
    counts_B = torch.bincount(row_S, minlength=len(rows))
    wrong_B = torch.zeros(len(rows), dtype=torch.float64, device=device).index_add_(
        0, row_S, wrong_S.double()
    )
    sums_B = torch.zeros_like(wrong_B).index_add_(0, row_S, -logprob_S)
    loss_B = torch.nan_to_num(sums_B / counts_B, nan=MAX_LOSS, posinf=MAX_LOSS).clamp(0.0, MAX_LOSS)
    return (wrong_B == 0).double().cpu().numpy(), loss_B.cpu().numpy()


def _judged(model: Transformer, hidden_SD: Tensor, truth_S: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each true token, and whether it is not the first choice; a part of the logits at a time."""
    found = []
    for hidden, truth in zip(hidden_SD.split(LOGIT_ROWS), truth_S.split(LOGIT_ROWS), strict=True):
        logits = model.logits(hidden)
        # At least float32: half precision would round log-probabilities to a hundredth.
        logprobs = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)
        logprob = logprobs.gather(1, truth[:, None])[:, 0].double()
        found.append((logprob, (logits.argmax(-1) != truth) | ~logprob.isfinite()))
    logprobs_S, wrong_S = zip(*found, strict=True)
    return torch.cat(logprobs_S), torch.cat(wrong_S)
