"""Tiny models, records and the autograd oracle that the tests of influence share."""

import numpy as np
import torch
from torch.nn import functional

from trainer.model import Transformer, init_parameters
from trainer.spec import ModelSpec
from valuation.influence import TokenSet

VOCAB, LENGTH = 19, 12


def tiny_model(*, seed=0, dtype=torch.float64, **shape):
    """One layer, its parameters away from their initial values."""
    small = {
        "vocab_size": VOCAB,
        "num_layers": 1,
        "dim": 8,
        "num_heads": 2,
        "num_kv_heads": 1,
        "ffn_dim": 8,
    }
    model = Transformer(ModelSpec(**small | shape)).to(dtype)
    init_parameters(model, seed)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=noise, dtype=torch.float64).to(dtype), alpha=0.2)
    return model


def token_set(rng, count, *, shortest=2, longest=2 * LENGTH, first=0):
    """Records of random tokens; some are longer than a row."""
    return TokenSet(
        tuple(
            (
                first + 3 * i,
                bytes([first % 251, i]) * 16,
                rng.integers(0, VOCAB, rng.integers(shortest, longest + 1)),
            )
            for i in range(count)
        ),
        LENGTH,
    )


def summed_loss(model, record, length=LENGTH):
    """The loss of one record alone, unpacked, row by row."""
    tokens = torch.from_numpy(np.asarray(record[2]).astype(np.int64))
    total = torch.zeros((), dtype=next(model.parameters()).dtype)
    for start in range(0, len(tokens), length):
        labels = tokens[start + 1 : start + 1 + length]
        if len(labels):
            logits = model(tokens[None, start : start + length])[0, : len(labels)]
            total = total + functional.cross_entropy(logits, labels, reduction="sum")
    return total


def autograd(model, record):
    """The oracle: gradient of one record's summed loss by parameter name."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(summed_loss(model, record), list(named.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for (name, p), g in zip(named.items(), grads, strict=True)
    }


def flat(gradients):
    """All parameters of one gradient in one vector."""
    return torch.cat([g.flatten() for g in gradients.values()])


def jacobian(model, tokens):
    """Gradients of all records, [N, P]."""
    return torch.stack([flat(autograd(model, record)) for record in tokens.records])
