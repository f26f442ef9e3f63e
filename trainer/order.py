"""The order of the documents: a pure function of (seed, epoch, how often each record stands).

*How often.* A record of weight w (1 = once per epoch) with a phase u in [0, 1) keyed by (seed, index) stands
floor(u + (e+1) w) - floor(u + e w) times in epoch e. So over any E epochs it stands E w times, less than one time
more or less; over seeds exactly E w times on average; and w = 0 never. For whole weights that is w times per epoch,
whatever the phase. Weights are integers in millionths, so no machine rounds differently.

*In which order.* The documents of an epoch, with their repeats, in the order of Philox words keyed by (seed, epoch).
It sorts raw words, whose stream numpy guarantees, unlike that of `Generator.permutation` (NEP 19).

Epochs laid end to end are one stream of tokens. Where epoch e begins follows from the law above in closed form, so the
epoch of a far position is found without visiting those before it.

Memory: 12 bytes per document and epoch for order and starts, two epochs at most, and 16 more while one is sorted. A
permutation by formula would need none for the order, but the starts of permuted documents have no formula.
"""
# ruff: noqa: N802 - properties with a shape suffix in their name (STYLE 2)

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass

import numpy as np

MICRO = 1_000_000
"""Weight of a record that stands once per epoch."""
MAX_MICRO = 1_000 * MICRO
"""Largest weight that isn't whole: the products of the law stay below 2**63 for a billion epochs."""
_KEPT_EPOCHS = 2  # a batch touches neighbouring epochs; older ones would only fill memory


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the documents."""

    number: int
    """Counted from 0."""
    first: int
    """Position of its first token in the stream of all epochs."""
    order_R: np.ndarray
    """Index in the corpus of each document, in order."""
    starts_R1: np.ndarray
    """int64 first token of each document, counted from `first`; then the number of tokens."""


class Order:
    """Which documents stand where in the stream; a cache is its only state."""

    def __init__(
        self, index_N: np.ndarray, length_N: np.ndarray, micro_N: np.ndarray, size: int, seed: int
    ) -> None:
        """An order of documents.

        Args:
            index_N: their indices in the corpus, ascending.
            length_N: int64 number of tokens of each, >= 1.
            micro_N: int64 weight of each in millionths, not all 0; whole, or at most MAX_MICRO.
            size: number of records in the corpus, also those that do not stand in the order.
            seed: key of order and phases.
        """
        stands = micro_N > 0
        narrow = np.uint32 if size <= 2**32 else np.int64
        self.seed, self._size = seed, size
        self.index_N = index_N[stands].astype(narrow)
        self._length_N, self._micro_N = length_N[stands], micro_N[stands]
        self._phase_N: np.ndarray | None = None
        if (self._micro_N % MICRO).any():
            words = _words(f"dataworth-phase-1|{seed}", size)
            self._phase_N = (words[index_N[stands]] % np.uint64(MICRO)).astype(np.int64)
        self._micro_tokens = _exact_dot(self._length_N, self._micro_N)
        self._longest = int(self._length_N.sum())
        self._epochs: dict[int, Epoch] = {}
        self._lock = threading.Lock()

    @property
    def mean_tokens(self) -> float:
        """Tokens of an epoch on average; of every epoch if all weights are whole."""
        return self._micro_tokens / MICRO

    def times_N(self, number: int) -> np.ndarray:
        """How often each document of `index_N` stands in one epoch."""
        if self._phase_N is None:
            return self._micro_N // MICRO
        return self._times_before(number + 1) - self._times_before(number)

    def at(self, position: int) -> Epoch:
        """The epoch that a position of the stream lies in.

        Args:
            position: token of the stream, >= 0.
        """
        with self._lock:
            for epoch in self._epochs.values():
                if epoch.first <= position < epoch.first + int(epoch.starts_R1[-1]):
                    return epoch
            return self._make(self._number_at(position))

    def epoch(self, number: int) -> Epoch:
        """One epoch, counted from 0."""
        with self._lock:
            return self._epochs.get(number) or self._make(number)

    def _make(self, number: int) -> Epoch:
        times_N = self.times_N(number)
        documents_R = np.repeat(self.index_N, times_N)
        lengths_R = np.repeat(self._length_N, times_N)
        place_R = np.argsort(
            _words(f"dataworth-order-1|{self.seed}|{number}", len(documents_R)), kind="stable"
        )
        starts_R1 = np.zeros(len(documents_R) + 1, dtype=np.int64)
        np.cumsum(lengths_R[place_R], out=starts_R1[1:])
        while len(self._epochs) >= _KEPT_EPOCHS:
            self._epochs.pop(next(iter(self._epochs)))
        epoch = Epoch(number, self._tokens_before(number), documents_R[place_R], starts_R1)
        self._epochs[number] = epoch
        return epoch

    def _times_before(self, number: int) -> np.ndarray:
        """How often each document stands in all epochs before one; only with phases."""
        assert self._phase_N is not None
        return (self._phase_N + number * self._micro_N) // MICRO

    def _tokens_before(self, number: int) -> int:
        """Tokens of all epochs before one."""
        if self._phase_N is None:
            return number * (self._micro_tokens // MICRO)
        return int((self._length_N * self._times_before(number)).sum())

    def _number_at(self, position: int) -> int:
        """The last epoch that begins at or before a position, so one that isn't empty."""
        if self._phase_N is None:
            return position // (self._micro_tokens // MICRO)
        # tokens_before(e) differs from e * mean by less than one time each document.
        low = max(0, (position - self._longest) * MICRO // self._micro_tokens)
        high = (position + self._longest) * MICRO // self._micro_tokens + 2
        while high - low > 1:
            middle = (low + high) // 2
            if self._tokens_before(middle) <= position:
                low = middle
            else:
                high = middle
        return low


def _exact_dot(a_N: np.ndarray, b_N: np.ndarray) -> int:
    """Sum of a * b for integers >= 0, 15 bits of b at a time, so that no partial sum leaves 63 bits."""
    total, shift = 0, 0
    while b_N.any():
        total += int((a_N * (b_N & 0x7FFF)).sum()) << shift
        b_N, shift = b_N >> 15, shift + 15
    return total


def _words(key: str, count: int) -> np.ndarray:
    """Philox words of a key."""
    digest = hashlib.sha256(key.encode()).digest()
    return np.random.Philox(key=int.from_bytes(digest[:16], "big")).random_raw(count)
