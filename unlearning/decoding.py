"""Many questions with a common beginning: the beginning is read once, its keys and values serve all of them.

Thirty-two lines of demonstrations before a question of ten tokens make a prompt of four hundred; every target has the same
demonstrations, and every candidate secret the same prompt. So the prefix goes through the model once, and each question costs
its own tokens only::

    prefix ──▶ cache (1 row, P positions) ──▶ the same rows for everybody ──▶ scores of B questions in one pass

A model of the trainer attends causally over a cache for single new tokens only; for several at once the mask is made here (query t
of a question sees the whole prefix and its own tokens up to t) and given to a shallow copy of the model, which shares
all weights. The model itself is not touched.

Cost of N questions of T tokens after a prefix of P: P + N·T positions instead of N·(P + T).

Shape suffixes: `B` rows, `T` new positions, `P` prefix positions, `S` scored positions, `V` vocabulary.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer.model import KVCache
from unlearning.scoring import MAX_LOSS, Scores, batch_tokens, batches, padded, span_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from trainer.model import Transformer


class Prefix:
    """Keys and values of tokens that many questions begin with."""

    def __init__(self, model: Transformer, tokens: Sequence[int]) -> None:
        """Read the tokens once.

        Args:
            model: a model in evaluation mode; it is not changed.
            tokens: the common beginning; may be empty.
        """
        self._model, self._tokens, self.length = model, tuple(tokens), len(tokens)
        like = next(model.parameters())
        self._cache = KVCache(model.spec, 1, max(1, len(tokens)), like)
        if tokens:
            with torch.inference_mode():
                row = torch.as_tensor([list(tokens)], dtype=torch.int64, device=like.device)
                model.trunk(row, cache=self._cache)

    def scores(
        self,
        questions: Sequence[tuple[Sequence[int], int]],
        length: int | None = None,
    ) -> Scores:
        """Exact match and loss of each question's tokens from its `first` on.

        Args:
            questions: (tokens after the prefix, first scored position among them); first ≥ 1, or ≥ 0 after a prefix that
                is not empty.
            length: use only so many tokens of the prefix (its beginning), default all.

        Returns:
            Scores in the order of the questions.

        Raises:
            ValueError: for a span that is empty or that nothing predicts.
        """
        kept = self.length if length is None else length
        if not 0 <= kept <= self.length:
            raise ValueError(f"expected 0 <= length <= {self.length}, got {kept}")
        least = 0 if kept else 1
        if any(not least <= first < len(tokens) for tokens, first in questions):
            raise ValueError(f"expected {least} <= first < length for every question")
        exact_N, loss_N = np.zeros(len(questions)), np.zeros(len(questions))
        with torch.inference_mode():
            for chosen in batches(
                [len(tokens) for tokens, _ in questions], batch_tokens(self._model)
            ):
                rows = [questions[i] for i in chosen]
                exact_N[chosen], loss_N[chosen] = self._batch(rows, kept)
        return Scores(exact_N, loss_N)

    def _batch(
        self, rows: Sequence[tuple[Sequence[int], int]], kept: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Scores of one batch; the first new token is predicted by the prefix's last one, which is read again."""
        overlap = 1 if any(first == 0 for _, first in rows) else 0
        before = [self._tokens[kept - 1]] if overlap else []
        sequences = [[*before, *tokens] for tokens, _ in rows]
        firsts = [first + overlap for _, first in rows]
        like = next(self._model.parameters())
        tokens_BT = padded(sequences).to(like.device)
        mask_BT = span_mask(sequences, firsts).to(like.device)
        hidden_BTD = self._trunk(tokens_BT[:, :-1], kept - overlap)
        logprob_SV = self._model.logits(hidden_BTD[mask_BT]).float().log_softmax(-1)
        truth_S, row_S = tokens_BT[:, 1:][mask_BT], mask_BT.nonzero()[:, 0]
        logprob_S = logprob_SV.gather(1, truth_S[:, None])[:, 0].double()
        wrong_S = (logprob_SV.argmax(-1) != truth_S) | ~logprob_S.isfinite()
        zeros_B = torch.zeros(len(rows), dtype=torch.float64, device=like.device)
        wrong_B = zeros_B.index_add(0, row_S, wrong_S.double())
        sums_B = zeros_B.index_add(0, row_S, -logprob_S)
        means_B = sums_B / torch.bincount(row_S, minlength=len(rows))
        loss_B = torch.nan_to_num(means_B, nan=MAX_LOSS, posinf=MAX_LOSS).clamp(0.0, MAX_LOSS)
        return (wrong_B == 0).double().cpu().numpy(), loss_B.cpu().numpy()

    def sampled(
        self,
        question: Sequence[int],
        tries: int,
        new: int,
        temperature: float,
        generator: torch.Generator,
    ) -> Tensor:
        """Continuations drawn from the model, all tries in one batch.

        Args:
            question: tokens after the prefix; prefix and question together are not empty.
            tries: number of continuations.
            new: tokens of each.
            temperature: logits are divided by it; 0 = greedy.
            generator: source of the draws.

        Returns:
            int64 [tries, new].
        """
        device = next(self._model.parameters()).device
        kept, asked = self.length, list(question)
        if not asked:
            kept, asked = kept - 1, [self._tokens[-1]]
        with torch.inference_mode():
            cache = self._rows(1, kept, len(asked))
            tokens_BT = torch.as_tensor([asked], dtype=torch.int64, device=device)
            hidden_BTD = self._trunk(tokens_BT, kept, cache)
            cache = _widened(cache, tries, new)
            hidden_BD = hidden_BTD[:, -1].expand(tries, -1)
            found = []
            for step in range(new):
                logits_BV = self._model.logits(hidden_BD).float()
                drawn_B1 = _drawn(logits_BV, temperature, generator)
                found.append(drawn_B1)
                if step + 1 < new:  # nobody asks what comes after the last one
                    hidden_BTD, _ = self._model.trunk(drawn_B1, cache=cache)
                    hidden_BD = hidden_BTD[:, -1]
            return torch.cat(found, 1)

    def _trunk(self, tokens_BT: Tensor, kept: int, cache: KVCache | None = None) -> Tensor:
        """Last hidden states of new tokens after the first `kept` positions of the prefix."""
        rows, new = tokens_BT.shape
        cache = self._rows(rows, kept, new) if cache is None else cache
        view = copy.copy(self._model)
        mask_11TS = _mask_of(kept, new, cache.keys_LBKTE)
        view.mask_of = lambda *_: mask_11TS
        hidden_BTD, _ = view.trunk(tokens_BT, None, torch.zeros_like(tokens_BT), cache)
        return hidden_BTD

    def _rows(self, rows: int, kept: int, new: int) -> KVCache:
        """A cache of `rows` rows that begins with the prefix and has room for `new` positions."""
        cache = KVCache(self._model.spec, rows, kept + new, next(self._model.parameters()))
        cache.keys_LBKTE[..., :kept, :] = self._cache.keys_LBKTE[..., :kept, :]
        cache.values_LBKTE[..., :kept, :] = self._cache.values_LBKTE[..., :kept, :]
        cache.length = kept
        return cache


def _widened(cache: KVCache, rows: int, new: int) -> KVCache:
    """The same single row for many rows, with room for `new` more positions."""
    shape = list(cache.keys_LBKTE.shape)
    shape[1], shape[3] = rows, cache.length + new
    wide = copy.copy(cache)
    wide.keys_LBKTE = cache.keys_LBKTE.new_empty(shape)
    wide.values_LBKTE = cache.values_LBKTE.new_empty(shape)
    wide.keys_LBKTE[..., : cache.length, :] = cache.keys_LBKTE[..., : cache.length, :]
    wide.values_LBKTE[..., : cache.length, :] = cache.values_LBKTE[..., : cache.length, :]
    return wide


def _mask_of(kept: int, new: int, like: Tensor) -> Tensor:
    """0 where query t may see key s (the prefix and new tokens up to t), else -inf."""
    places = torch.arange(kept + new, device=like.device)
    hidden_TS = places[None] > kept + torch.arange(new, device=like.device)[:, None]
    mask_TS = like.new_zeros(new, kept + new).masked_fill_(hidden_TS, -math.inf)
    return mask_TS[None, None]


def _drawn(logits_BV: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True)
    chances_BV = (logits_BV / temperature).softmax(-1)
    return torch.multinomial(chances_BV, 1, generator=generator)
