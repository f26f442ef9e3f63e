"""What a method's loss may look at: the pushed positions of the forgotten records of one step.

Shape suffixes: `S` pushed positions, `V` vocabulary, `N` records of this process, `L` layers, `D` width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class View:
    """Pushed positions under the model, with what is cached of the original; not slotted: it computes on first use."""

    logits_SV: Tensor
    """Logits at the positions that predict a pushed token; [S, 0] in a stage of a pipeline that has none."""
    truth_S: Tensor
    """Those tokens."""
    record_S: Tensor
    """Ordinal of the record of each position, 0..N-1."""
    num_records: int
    """N."""
    reference_N: Tensor
    """Log-probability of each record's pushed tokens under the original, nats."""
    reference_SV: Tensor | None = None
    """The original's logits, where the method needs them; cached once for the whole run."""
    hidden_LSD: Tensor | None = None
    """Residual stream after the chosen layers; in a pipeline, after those that are here."""
    reference_LSD: Tensor | None = None
    """The original's, cached once."""
    anchor_LD: Tensor | None = None
    """Mean of the original's states over all forgotten records, the same on every process."""
    preferred_N: Tensor | None = None
    """Log-ratio to the original of each record's preferred answer, nats (preference methods)."""
    num_layers: int = 1
    """Chosen layers, here or elsewhere: what a mean over layers divides by."""

    @cached_property
    def logprob_S(self) -> Tensor:  # noqa: N802 - shape suffix
        """Log-probability of each pushed token."""
        return self.logits_SV.log_softmax(-1).gather(1, self.truth_S[:, None])[:, 0]

    @cached_property
    def num_tokens_N(self) -> Tensor:  # noqa: N802 - shape suffix
        """Pushed tokens per record."""
        return self.sum(self.reference_N.new_ones(len(self.truth_S)))

    @cached_property
    def logprob_N(self) -> Tensor:  # noqa: N802 - shape suffix
        """Log-probability of each record's pushed tokens."""
        return self.sum(self.logprob_S)

    def sum(self, values_S: Tensor) -> Tensor:
        """Sum per record."""
        return values_S.new_zeros(self.num_records).index_add(0, self.record_S, values_S)

    def mean(self, values_S: Tensor) -> Tensor:
        """Mean per record."""
        return self.sum(values_S) / self.num_tokens_N.to(values_S).clamp(min=1)
