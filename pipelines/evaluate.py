"""Entry of an evaluation run: loss of a checkpoint on a held-out token folder, against a unigram baseline.

The baseline predicts every token with its frequency in the training shards (add-one smoothing): what one knows of the
language without reading in order. It needs no model and cannot be tuned. Loss is in nats per token; its standard error
takes target records as the sampling unit (ratio estimate, Cochran 1977, equation 6.13).
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from provenance import write_atomic

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainer import RunSpec, TokenStore
    from trainer.model import Transformer


def run(run: "RunSpec", directory: Path) -> int:
    """Write `evaluation.json` and `result.json`.

    Args:
        run: `init` names the checkpoint; `config.extra` holds `target` and `target_digest`.
        directory: The run's folder.

    Returns:
        0.
    """
    from trainer import TokenStore
    from unlearning.ensemble import load

    extra = run.config.extra
    target = TokenStore.open(directory / extra["target"], extra["target_digest"])
    training = TokenStore.open(directory / run.tokens, run.tokens_digest)
    model = load(directory / run.init, run.config.model, run.init_root)
    sequences = [target.tokens(int(index)) for index in target.live_N]
    batch = run.config.batch
    body = measure(model, sequences, training, batch.rows, batch.length)
    write_atomic(directory / "evaluation.json", json.dumps(body, sort_keys=True).encode())
    write_atomic(
        directory / "result.json",
        json.dumps({"format": 1, "run": run.run, "status": "done"}).encode(),
    )
    return 0


def measure(
    model: "Transformer", sequences: "Sequence[Any]", training: "TokenStore", rows: int, length: int
) -> dict[str, Any]:
    """Loss of a model on held-out records, beside the unigram baseline.

    Args:
        model: The model.
        sequences: Tokens of each record, two or more, with end-of-text.
        training: What the baseline's frequencies are of.
        rows: Rows of a batch.
        length: Tokens of a row.

    Returns:
        loss, se, gain_se and baseline in nats per token; numbers of records and tokens.
    """
    import numpy as np

    from trainer.generate import evaluate

    nll_N, tokens_N = evaluate(model, sequences, rows, length)
    _, flat = training.csr()
    counts = np.bincount(flat, minlength=training.vocab_size) + 1.0
    surprisal = -np.log(counts / counts.sum())
    baseline_N = np.array([surprisal[sequence[1:]].sum() for sequence in sequences])
    loss, baseline = nll_N.sum() / tokens_N.sum(), baseline_N.sum() / tokens_N.sum()
    n = len(sequences)

    def error(total_N: "np.ndarray") -> float:
        """Standard error of a ratio to tokens, with records as the sampling unit."""
        residual_N = total_N - total_N.sum() / tokens_N.sum() * tokens_N
        return float(np.sqrt(n / max(1, n - 1) * (residual_N**2).sum()) / tokens_N.sum())

    return {
        "loss": float(loss), "se": error(nll_N), "gain_se": error(baseline_N - nll_N), "baseline": float(baseline),
        "records": n, "tokens": int(tokens_N.sum()),
    }  # fmt: skip
