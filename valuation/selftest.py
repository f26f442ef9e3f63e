"""Does this machine's arithmetic change scores? A check to run before a long pass.

    python -m valuation.selftest [--checkpoint DIR/step-N --run DIR/run.json] [--device cuda]

Gradient dot products of a few records are computed in float64 with plain attention, which is the truth, and
then as a pass would compute them: in float32 and in bfloat16, with the fused attention kernel and without,
alone and padded beside other records. A line per setting says how far it is off, and `WARN` where it is
further than float32 rounding explains. bfloat16 has given rankings that *anti*-correlate with float32's, and a
fused kernel has given other gradients for the same document when its row was padded: both in silence.

Exit code 0 if float32 is safe (a pass uses nothing else), 1 if not.

Source: bergson issues 112, 198 and 235.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from valuation.influence import TokenSet, dot
from valuation.influence.pairing import Pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import nn

TOLERANCE = 1e-3
"""Largest deviation, as a share of the largest score, that float32 may have; it is near 1e-5 on sound machines."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one setting is from float64 with plain attention."""

    setting: str
    """Such as "float32, fused attention, packed"."""
    largest: float
    """Largest difference as a share of the largest score."""
    correlation: float
    """Pearson correlation with the truth."""

    @property
    def safe(self) -> bool:
        """Whether rounding explains it."""
        return self.largest <= TOLERANCE  # False for NaN

    def __str__(self) -> str:
        """One line for people."""
        mark = "ok  " if self.safe else "WARN"
        return f"{mark} {self.setting}: off by {self.largest:.1e} of the largest score, correlation {self.correlation:.6f}"


def check_arithmetic(model: nn.Module, train: TokenSet, queries: TokenSet) -> list[Deviation]:
    """Compare dot products in several settings with those in float64.

    Args:
        model: in any precision, on the device to be checked; it is copied.
        train: a few records, some shorter than a row.
        queries: a few queries.

    Returns:
        One deviation per precision, attention kernel and packing, float32 first.
    """
    with _plain_attention():
        truth_QN = dot.scores(copy.deepcopy(model).double(), train, queries).scores_QN
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        cast = copy.deepcopy(model).to(dtype)
        for kernel, context in (("plain", _plain_attention), ("fused", contextlib.nullcontext)):
            for packing, rows in (("alone", 1), ("packed", 64)):
                with context():
                    scores_QN = _scores(cast, train, queries, rows)
                name = str(dtype).removeprefix("torch.")
                found.append(
                    _deviation(f"{name}, {kernel} attention, {packing}", scores_QN, truth_QN)
                )
    return found


def _scores(model: nn.Module, train: TokenSet, queries: TokenSet, rows: int) -> NDArray[np.float64]:
    """Scores, or NaN where there are none: a setting that fails must not hide the others."""
    try:
        return dot.scores(model, train, queries, how=Pass(rows=rows)).scores_QN
    except (ValueError, RuntimeError):
        return np.full((len(queries.records), len(train.records)), np.nan)


def _deviation(
    setting: str, scores_QN: NDArray[np.float64], truth_QN: NDArray[np.float64]
) -> Deviation:
    largest = float(np.abs(scores_QN - truth_QN).max() / np.abs(truth_QN).max())
    return Deviation(
        setting, largest, float(np.corrcoef(scores_QN.ravel(), truth_QN.ravel())[0, 1])
    )


def _plain_attention() -> contextlib.AbstractContextManager[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.MATH)


def sample(vocab_size: int, length: int, count: int, first: int, seed: int) -> TokenSet:
    """Random records, half of them shorter than a row."""
    source = np.random.default_rng(seed)
    records = []
    for i in range(count):
        size = length if i % 2 else int(source.integers(2, max(3, length // 2)))
        records.append(
            (first + i, (first + i).to_bytes(32, "big"), source.integers(0, vocab_size, size))
        )
    return TokenSet(tuple(records), length)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one line per setting.

    Args:
        arguments: command line without the program's name; None = that of this process.

    Returns:
        0 if every float32 setting is safe, else 1.
    """
    from trainer.model import Transformer, init_parameters
    from trainer.spec import ModelSpec, load_run

    parser = argparse.ArgumentParser(
        prog="python -m valuation.selftest",
        description="Does this machine's arithmetic change scores?",
    )
    parser.add_argument(
        "--run", type=Path, help="run.json of a trained model; default: a small random one"
    )
    parser.add_argument("--checkpoint", type=Path, help="its step-N folder")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    given = parser.parse_args(arguments)
    if (given.run is None) != (given.checkpoint is None):
        parser.error("give --run and --checkpoint, or neither")
    if given.run is None:
        spec, length = ModelSpec(vocab_size=256, num_layers=2, dim=64, ffn_dim=128), 64
        model = Transformer(spec)
        init_parameters(model, 0)
    else:
        from trainer.checkpoint import load_model

        config = load_run(given.run).config
        spec, length = config.model, config.batch.length
        model = load_model(given.checkpoint, spec)
    train = sample(spec.vocab_size, length, 8, 0, 1)
    queries = sample(spec.vocab_size, length, 3, 100, 2)
    found = check_arithmetic(model.to(given.device), train, queries)
    for deviation in found:
        sys.stdout.write(f"{deviation}\n")
    return 0 if all(d.safe for d in found if d.setting.startswith("float32")) else 1


if __name__ == "__main__":
    sys.exit(main())
