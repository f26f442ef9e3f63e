"""Numbers of the practice setting; chosen for a core, written down before a result exists.

========  ===========================  ==========  ===============================  ====================
scale     model                        vocabulary  people (tofu + lume + ours)      models
========  ===========================  ==========  ===============================  ====================
smoke     2 layers, width 32           given       3 + 2 + 2 of each population     original, 2 gold, 1
practice  5 layers, width 320, 7.2 M   4,096       20 + 14 + 30 of each population  original, 3 gold, 5
========  ===========================  ==========  ===============================  ====================

Of each of TOFU's authors the first `rows_per_author` of twenty questions are trained. The forgotten authors are the paper's (180 to 199), LUME's
are of its forget split. Every run of one stage has the same number of *epochs*, as in TOFU: gold has fewer steps, since it has fewer texts.

Methods run for a fixed number of steps with one learning rate, as those of the published table do (ten epochs there): a stop rule would
end each method where it looks best and leave nothing to rank. Their other numbers are the published defaults (`methods.settings`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.choices import Precision
    from trainer.spec import ModelSpec

METHODS = ("npo", "ascent", "dpo", "graddiff", "simnpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Every number of a study."""

    name: str
    layers: int
    dim: int
    heads: int
    ffn_dim: int
    length: int = 256
    """Tokens in a row."""
    authors: int
    """TOFU's authors in each population."""
    rows_per_author: int
    asked_per_author: int
    """Questions of an author that an audit asks; TOFU's own numbers ask all that were trained."""
    lume: int
    """LUME's people in each population."""
    ours: int
    """Our people in each population."""
    pages: int
    """Documents of several retained texts: without them no model learns to look back over a line break."""
    pretrain_tokens: int
    pretrain_rows: int = 8
    pretrain_lr: float = 0.002
    cycles: tuple[tuple[int, float], ...]
    """Passes over the people's texts and peak rate of each cosine, one after the other; original and gold alike."""
    rows: int
    """Rows per step of original and gold: small batches memorise in far fewer tokens."""
    golds: int
    """Gold models; their seeds are 1, 2, …, the original's is 0."""
    methods: tuple[str, ...] = METHODS
    rates: tuple[str, ...] = ("0.0003", "0.001")
    """Rates that are tried on validation people; one is taken for all methods."""
    unlearn_steps: int
    unlearn_rows: int
    """Retained rows per step of a method."""
    forget_records: int
    """Forgotten texts per step."""
    validation: int
    """People of each kind, of those who stay, who are pushed out to choose the rate."""
    kept_asked: int = 24
    """Questions of each of TOFU's three kept sets that are asked."""
    lume_asked: int = 4
    """People of each of LUME's splits who are asked its five questions."""
    precision: Precision = "float32"
    """Of all trainings, methods included: bfloat16 is twice as fast here. Attacks and questions are float32."""
    seed: int = 23
    """Seed of our people and of pages."""

    @property
    def counts(self) -> dict[str, int]:
        """Population → people."""
        people = self.authors + self.lume + self.ours
        return dict.fromkeys(("forgotten", "retained", "lookalike"), people)

    def model(self, vocab_size: int) -> ModelSpec:
        """Shape of every model of the study."""
        from trainer.spec import ModelSpec

        return ModelSpec(
            vocab_size=vocab_size, num_layers=self.layers, dim=self.dim, num_heads=self.heads, num_kv_heads=self.heads, ffn_dim=self.ffn_dim
        )  # fmt: skip


SMOKE = Scale(
    name="smoke", layers=2, dim=32, heads=2, ffn_dim=64, length=64, authors=3, rows_per_author=2, asked_per_author=2, lume=2, ours=2, pages=2,
    pretrain_tokens=256, pretrain_rows=2, cycles=((40, 0.01),), rows=2, golds=2, methods=("npo",), unlearn_steps=4, unlearn_rows=2,
    forget_records=4, validation=1, kept_asked=4,
)  # fmt: skip

PRACTICE = Scale(
    name="practice", layers=5, dim=320, heads=5, ffn_dim=800, authors=20, rows_per_author=2, asked_per_author=2, lume=14, ours=30, pages=6,
    pretrain_tokens=200_000, cycles=((26, 0.0015), (14, 0.0005)), rows=1, golds=3, unlearn_steps=30, unlearn_rows=2, forget_records=16, validation=5,
    precision="bfloat16",
)  # fmt: skip

VOCAB = 4096
