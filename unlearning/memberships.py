"""Membership scores of one record: how surprised is a model, compared with what such a text deserves?

All have the published sign, **higher = less like a member**; an AUC is taken over their negatives.

==================  ==========================================================================  ===========================
score               formula, l_t = -log p(y_t)                                                  corrects for
==================  ==========================================================================  ===========================
loss                mean_t l_t                                                                  nothing
zlib                mean_t l_t / bytes of zlib(text)                                            dull texts
min_k               mean of the k·T largest l_t                                                 easy tokens
min_k_plus_plus     -mean of the k·T smallest z_t, z_t = (log p(y_t) - mu_t) / sigma_t          flat distributions
reference           mean_t l_t - mean_t l_t under a reference model                             texts easy for everybody
==================  ==========================================================================  ===========================

The reference here is `Bigrams`: counts over the retained people's records, so that it needs no second network and cannot have
seen a forgotten person. A larger reference model gives its own losses to the same formula.

Sources: Yeom et al., arXiv 1709.01604; Carlini et al., arXiv 2012.07805, section 5 (zlib, reference); Shi et al., arXiv
2310.16789 (Min-K %); Zhang et al., arXiv 2404.02936, eq. 3 (Min-K %++); k = 0.2 as in both.
"""

from __future__ import annotations

import zlib as compression
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from unlearning.positions import Positions

SHARE = 0.2  # of a text's tokens that Min-K looks at
SCORES = ("zlib", "min_k", "min_k_plus_plus", "reference")


def loss(positions: Positions) -> float:
    """Mean loss, nats per token; higher = less like a member.

    Args:
        positions: of a whole record.
    """
    return float(-positions.logprob_T.mean())


def zlib(positions: Positions, text: bytes) -> float:
    """Mean loss over the number of bytes that the text is compressed to; higher = less like a member.

    Args:
        positions: of a whole record.
        text: the record in UTF-8.
    """
    return loss(positions) / len(compression.compress(text))


def min_k(positions: Positions, share: float = SHARE) -> float:
    """Mean loss of the most surprising tokens, nats; higher = less like a member.

    Args:
        positions: of a whole record.
        share: share k of the tokens, in (0, 1]; at least one token counts.
    """
    return float(-_lowest(positions.logprob_T, share).mean())


def min_k_plus_plus(positions: Positions, share: float = SHARE) -> float:
    """Min-K of log-probabilities standardised over the vocabulary, without unit; higher = less like a member.

    Args:
        positions: of a whole record.
        share: share k of the tokens, in (0, 1]; at least one token counts.
    """
    # A distribution with all its mass on one token has deviation 0; the floor keeps z finite.
    z_T = (positions.logprob_T - positions.mean_T) / np.maximum(positions.deviation_T, 1e-9)
    return float(-_lowest(z_T, share).mean())


def reference(positions: Positions, reference_loss: float) -> float:
    """Mean loss minus that of a model that never saw the record, nats per token; higher = less like a member.

    Args:
        positions: of a whole record.
        reference_loss: mean loss of the same tokens under the reference model, nats.
    """
    return loss(positions) - reference_loss


class Bigrams:
    """A reference model that costs nothing: p(y | x) = (count(x, y) + 1) / (count(x) + V) over given texts."""

    def __init__(self, texts: Iterable[Sequence[int]], vocab_size: int) -> None:
        """Count pairs of neighbours.

        Args:
            texts: token sequences.
            vocab_size: V.
        """
        self._pairs: dict[tuple[int, int], int] = {}
        self._firsts: dict[int, int] = {}
        self._size = vocab_size
        for tokens in texts:
            for pair in pairwise(tokens):
                self._pairs[pair] = self._pairs.get(pair, 0) + 1
                self._firsts[pair[0]] = self._firsts.get(pair[0], 0) + 1

    def loss(self, tokens: Sequence[int]) -> float:
        """Mean loss of all tokens but the first.

        Args:
            tokens: at least two.

        Returns:
            Nats per token.
        """
        chances = [
            (self._pairs.get(pair, 0) + 1) / (self._firsts.get(pair[0], 0) + self._size)
            for pair in pairwise(tokens)
        ]
        return float(-np.log(chances).mean())


def score_of(
    name: str, text: bytes, tokens: Sequence[int], bigrams: Bigrams
) -> Callable[[Positions], float]:
    """The score of that name for one record, with what it needs besides the positions.

    Args:
        name: one of `SCORES`, or "loss".
        text: the record in UTF-8.
        tokens: its tokens.
        bigrams: the reference model.

    Raises:
        KeyError: for an unknown name.
    """
    return {
        "loss": loss,
        "zlib": lambda positions: zlib(positions, text),
        "min_k": min_k,
        "min_k_plus_plus": min_k_plus_plus,
        "reference": lambda positions: reference(positions, bigrams.loss(tokens)),
    }[name]


def _lowest(values_T: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"expected a share of the tokens in (0, 1], got {share}")
    return np.sort(values_T)[: max(1, int(share * len(values_T)))]
