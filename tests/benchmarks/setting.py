"""The char-GPT that the acceptance studies train, and the bank of its retrainings.

0.11 million parameters: width 64, two layers, four heads, untied, rows of 64 tokens. AdamW 4e-3 (0.9, 0.95), 32 rows a step,
12 passes over 256 records = 96 steps: the notes' setting in this project's architecture.
"""

import numpy as np
from corpora import LENGTH, STATE, VOCAB

from trainer.spec import BatchSpec, ModelSpec, OptimSpec
from valuation.subsets import Setting, random_subsets, retrain_subsets

MODEL = ModelSpec(
    vocab_size=VOCAB, num_layers=2, dim=64, num_heads=4, num_kv_heads=4, ffn_dim=168, tied=False
)
OPTIM = OptimSpec(lr=4e-3, warmup_steps=8, weight_decay=0.01)
BATCH = BatchSpec(rows=32, length=LENGTH)
BANK = STATE / "bank-of-records"
NUM_SUBSETS = 60


def setting(corpus, target="target_value", **changes):
    """What all retrainings on a corpus share."""
    values = {
        "train": corpus.path("train"), "train_digest": corpus.digest["train"], "target": corpus.path(target),
        "target_digest": corpus.digest[target], "model": MODEL, "optim": OPTIM, "batch": BATCH, "epochs": 12,
    }  # fmt: skip
    return Setting(**(values | changes))


def half_subsets(size, count=NUM_SUBSETS):
    """The subsets of every study on linear datamodeling scores."""
    return random_subsets(count, size, 0.5, np.random.default_rng(20261202))


def bank_losses(corpus, seeds):
    """Membership [M, N] and losses [R, M, Q] of the half subsets, from the bank or retrained."""
    config = setting(corpus)
    member_MN = half_subsets(config.stores()[0].size)
    losses = [retrain_subsets(config, member_MN, seed, BANK) for seed in seeds]
    return member_MN, np.stack([found.nll_MQ / found.tokens_Q for found in losses])
