"""Sizes: how much of everything one graph run does. A dial for time, never for what is checked.

`tiny` is for tests (30 s), `small` for continuous integration (3 minutes), `default` for a first real look (15 minutes);
`pilot` and `report` repeat the gold model with three seeds, which a PASS needs.
"""

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.spec import BatchSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Shape of one transformer."""

    num_layers: int
    dim: int
    num_heads: int
    num_kv_heads: int
    ffn_dim: int
    tied: bool = True
    """Whether the output head is the embedding; a pipeline can't have that."""

    def shape(self, vocab_size: int) -> "ModelSpec":
        """The same for the trainer."""
        from trainer.spec import ModelSpec

        return ModelSpec(vocab_size=vocab_size, **asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Every number that depends on the size."""

    name: str
    vocab_size: int
    """Tokens of the tokenizer, trained once per corpus lineage."""
    model: Network
    """The released model."""
    proxy: Network
    """The small model that is retrained on every coalition."""
    world: int
    """Trainer processes."""
    layout: str = ""
    """How the released model is spread over them, in the trainer's words; empty: each holds all of it."""
    rows: int
    """Rows of one global batch."""
    length: int
    """Tokens of one row."""
    steps: int
    """Optimiser steps of the released model and of the gold model."""
    warmup: int
    """Steps of linear warm-up."""
    lr: str
    """Peak learning rate, a decimal string."""
    personal_repeats: int
    """How often a personal record stands in one epoch: people are quoted more often than speeches."""
    checkpoint_every: int
    """Steps between two checkpoints, which is one window of the ledger."""
    influence_steps: int
    """Steps of the proxy run that earns in-run credit."""
    attribution_rows: int
    """Rows of records whose influence is scored at the proxy's checkpoint, a fixed sample."""
    query_rows: int
    """Rows of target records that it is scored for, a fixed sample."""
    judge_subsets: int
    """Halves of the scored records that the proxy is retrained on to judge the scores; under ten tell nothing, and say so."""
    judge_again: int
    """Of these, retrained once more under another seed, for the ceiling of the scores; 0: no ceiling."""
    judge_queries: int
    """Target records whose top records are taken away as well; 0: none."""
    judge_curve: tuple[int, ...]
    """Percents of the scored records taken away, and given alone, most and least valued first; none: no curves."""
    judge_planted: int
    """Records of noise, and of shuffled text, planted among the scored ones to see whether values find them and whether attacks would pay: four trainings and passes, about 50 CPU seconds at the default size; 0: not tried."""
    groups: int
    """Most lots, where `[values] lots` says nothing."""
    permutations: int
    """Sampled orders where there are more lots than are enumerated (`increments.MOST_LOTS`)."""
    proxy_tokens: int
    """Training tokens of the full coalition of the proxy, under one seed."""
    value_seeds: int
    """Seeds (initial weights and order) that every coalition is trained under; with 1 the values' errors know nothing of seeds, and say so."""
    unlearn_steps: int
    """Steps of the approximate unlearning method."""
    attack_steps: tuple[int, ...]
    """Steps at which the fine-tuning attack is scored."""
    gold_seeds: int
    """Gold models; three are needed before an audit may say PASS."""
    secondary: str = "none"
    """Secondary attacks of the audit: none, cheap (seconds) or full (minutes per model); the report lists what was not tried."""
    engineering_targets: int = 0
    """People pushed out alone to see whom it hurts, with depth per layer beside it; 0: neither is measured, and the report says so."""

    def trained(self, vocab_size: int) -> "tuple[ModelSpec, BatchSpec]":
        """Shape and batch of the released model."""
        from trainer.spec import BatchSpec

        return self.model.shape(vocab_size), BatchSpec(rows=self.rows, length=self.length)


_MICRO = Network(num_layers=2, dim=32, num_heads=2, num_kv_heads=1, ffn_dim=64)
_PROXY = Network(num_layers=2, dim=48, num_heads=4, num_kv_heads=2, ffn_dim=128)
_MODEL = Network(num_layers=4, dim=128, num_heads=4, num_kv_heads=2, ffn_dim=352)

# 200 people in five phrasings are memorised after about twenty exposures in small batches at this rate: 1,000 steps of
# 1,024 tokens, half of them people (a character-level pilot with large batches memorised nothing; see unlearning/README).
_DEFAULT = Size(
    name="default", vocab_size=2048, model=_MODEL, proxy=_PROXY, world=2, rows=8, length=128, steps=1000, warmup=20, lr="0.003",
    personal_repeats=160, checkpoint_every=250, influence_steps=100, attribution_rows=512, query_rows=128, judge_subsets=20, judge_again=10, judge_queries=4, judge_curve=(10, 25, 50), judge_planted=32, groups=6, permutations=24, proxy_tokens=100_000, value_seeds=3,
    unlearn_steps=100, attack_steps=(10, 25, 50), gold_seeds=1, secondary="cheap", engineering_targets=8,
)  # fmt: skip

_TINY = Size(
    name="tiny", vocab_size=512, model=_MICRO, proxy=_MICRO, world=1, rows=8, length=128, steps=12, warmup=2, lr="0.003",
    personal_repeats=2, checkpoint_every=6, influence_steps=4, attribution_rows=64, query_rows=64, judge_subsets=3, judge_again=0, judge_queries=0, judge_curve=(), judge_planted=0, groups=3, permutations=4, proxy_tokens=4_000, value_seeds=2,
    unlearn_steps=2, attack_steps=(2,), gold_seeds=1,
)  # fmt: skip

_SMALL = Size(
    name="small", vocab_size=2048, model=_PROXY, proxy=_MICRO, world=2, rows=8, length=128, steps=80, warmup=8, lr="0.003",
    personal_repeats=40, checkpoint_every=40, influence_steps=16, attribution_rows=128, query_rows=128, judge_subsets=10, judge_again=10, judge_queries=2, judge_curve=(), judge_planted=0, groups=4, permutations=8, proxy_tokens=40_000, value_seeds=2,
    unlearn_steps=8, attack_steps=(10,), gold_seeds=1,
)  # fmt: skip

SIZES = {
    size.name: size
    for size in (
        _TINY,
        _SMALL,
        _DEFAULT,
        replace(_DEFAULT, name="pilot", gold_seeds=3, secondary="full", engineering_targets=16),
        replace(
            _DEFAULT,
            name="report",
            gold_seeds=3,
            secondary="full",
            engineering_targets=16,
            steps=2000,
            unlearn_steps=200,
            proxy_tokens=1_000_000,
        ),
    )
}


def size_named(name: str) -> Size:
    """The size of that name.

    Raises:
        ValueError: There is none; lists those that are.
    """
    if name not in SIZES:
        msg = f"size {name!r} is unknown; expected one of {', '.join(SIZES)}"
        raise ValueError(msg)
    return SIZES[name]
