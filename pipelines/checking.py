"""What every asset check is made of: a blocking result with all problems in words, and further inputs by name."""

from collections.abc import Mapping

import dagster as dg


def outcome(problems: list[str], **metadata: float | str) -> dg.AssetCheckResult:
    """A blocking result: passed, or every problem in one description."""
    return dg.AssetCheckResult(
        passed=not problems,
        severity=dg.AssetCheckSeverity.ERROR,
        description="; ".join(problems) or "holds",
        metadata=metadata,
    )


def ins(*assets: str) -> Mapping[str, dg.AssetIn]:
    """Further assets whose results a check reads."""
    return {name: dg.AssetIn(name) for name in assets}
