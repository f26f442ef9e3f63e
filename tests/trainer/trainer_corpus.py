"""A small synthetic corpus with structure to learn, and runs over it, for the trainer's tests."""

import hashlib
from pathlib import Path

import numpy as np

from trainer.spec import BatchSpec, Layout, ModelSpec, OptimSpec, RunConfig, RunSpec, no_versions
from trainer.tokens import write_tokens

VOCAB = 64
END = VOCAB - 1
MODEL = ModelSpec(
    vocab_size=VOCAB, num_layers=2, dim=32, num_heads=4, num_kv_heads=2, ffn_dim=48, tied=True
)

MIXTURE = {
    "num_experts": 6, "experts_per_token": 2, "expert_dim": 24, "shared_expert_dim": 16, "balance_rate": 1e-2
}  # fmt: skip


def record_id(index):
    """The id of a synthetic record."""
    return hashlib.sha256(f"record {index}".encode()).digest()


def documents(count, seed=0, longest=60):
    """Token lists: random walks with small steps, so that a model has something to learn."""
    rng = np.random.default_rng(seed)
    docs = []
    for _ in range(count):
        steps = rng.integers(1, 4, int(rng.integers(2, longest)))
        docs.append([*((int(rng.integers(END)) + np.cumsum(steps)) % END).tolist(), END])
    return docs


def write_corpus(folder: Path, count=120, dead=(3, 7), seed=0, longest=60):
    """Write a token folder of owners a, b, c; `dead` indices are tombstones. Returns its digest."""
    records = [
        (i, None, None, []) if i in dead else (i, record_id(i), "abc"[i % 3], tokens)
        for i, tokens in enumerate(documents(count, seed, longest))
    ]
    return write_tokens(
        folder,
        corpus_version="none",
        tokenizer_digest="00" * 32,
        vocab_size=VOCAB,
        end_of_text=END,
        records=records,
    )


def make_run(home: Path, name="r", *, steps=10, layout=None, every=5, extra=None, **fields):
    """A RunSpec over `home`/tokens, which is written if needed."""
    tokens = home / "tokens"
    digest = (
        hashlib.sha256((tokens / "tokens.json").read_bytes()).hexdigest()
        if tokens.exists()
        else write_corpus(tokens)
    )
    config = RunConfig(
        model=fields.pop("model", MODEL),
        optim=fields.pop("optim", OptimSpec(lr=1e-2, warmup_steps=3)),
        batch=fields.pop("batch", BatchSpec(rows=6, length=32)),
        checkpoint_every=every,
        keep_last=fields.pop("keep", 2),
        precision=fields.pop("precision", "float32"),
        guard=fields.pop("guard", None),
        extra=extra or {},
    )
    return RunSpec(
        run=name,
        config=config,
        layout=layout or Layout(),
        seed=fields.pop("seed", 7),
        tokens_digest=digest,
        tokens=str(tokens),
        steps=steps,
        versions=no_versions(tokenizer="00" * 32),
        **fields,
    )
