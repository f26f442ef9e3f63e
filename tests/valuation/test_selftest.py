"""The self-test warns where arithmetic changes scores, and only there."""

import numpy as np
import torch
from valuation_models import tiny_model, token_set

from trainer import model as trainer_model
from valuation import selftest


def test_float32_is_safe_and_bfloat16_is_not(capsys):
    """On this machine float32 passes in all four settings and bfloat16 is warned of, with numbers."""
    assert selftest.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert all(line.startswith("ok") for line in lines[:4])
    assert all(line.startswith("WARN bfloat16") for line in lines[4:])


def test_a_kernel_that_depends_on_padding_is_caught(monkeypatch):
    """Negative control: attention that is off by a percent gives WARN in float32 too."""
    rng = np.random.default_rng(0)
    train, queries, model = (
        token_set(rng, 4),
        token_set(rng, 2, first=100),
        tiny_model(dtype=torch.float32),
    )
    attend = trainer_model.attend
    for layer in model.blocks.values():
        monkeypatch.setattr(
            layer.attention, "attend",
            lambda q, *rest: attend(q, *rest) * (1.0 if q.dtype == torch.float64 else 1.01),
        )  # fmt: skip
    found = selftest.check_arithmetic(model, train, queries)
    assert not any(deviation.safe for deviation in found)


def test_a_setting_without_scores_is_a_warning_not_a_crash():
    """NaN is never safe."""
    assert not selftest.Deviation("x", float("nan"), float("nan")).safe
    assert str(selftest.Deviation("x", float("nan"), float("nan"))).startswith("WARN")
