"""What a run may choose and a coalition may not: the bank's key would not name it."""

import pytest

from trainer.choices import GuardSpec
from trainer.spec import BatchSpec, RunConfig, RunSpec, no_versions
from valuation.errors import ProxyError
from valuation.proxy import retrain


@pytest.mark.parametrize(
    "change",
    [
        {"precision": "bfloat16"},
        {"precision": "float64"},
        {"batch": BatchSpec(accumulation=2)},
        {"guard": GuardSpec()},
    ],
    ids=str,
)
def test_choices_that_a_bank_would_not_name_are_refused(tmp_path, change):
    """Precision, micro-batches and a spike guard are refused, not ignored: no bank is mistaken for another's."""
    run = RunSpec(
        run="r", config=RunConfig(**change), tokens="tokens", tokens_digest="0" * 64, steps=1, versions=no_versions(),
    )  # fmt: skip
    with pytest.raises(ProxyError, match="expected float32"):
        retrain(run, tmp_path)
    assert not list(tmp_path.iterdir())
