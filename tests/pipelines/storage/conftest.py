"""What the storage tests share: a home with demo keys, and deliveries made by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.storage.config import Config
from pipelines.storage.home import Home
from pipelines.storage.intake import Intake, read_deliveries
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.suppression import SuppressionList


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """An empty home."""
    return Home(tmp_path / "home").create()


@pytest.fixture
def keys() -> CorpusKeys:
    """The demo keys, so that ids and roots are the same in every run."""
    return CorpusKeys.demo()


@pytest.fixture
def deliver(home: Home) -> Callable[..., Path]:
    """A writer of deliveries, called with "ada/a.jsonl" and rows, text or bytes."""

    def write(name: str, content: list[dict[str, Any]] | str | bytes) -> Path:
        path = home.inbox / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


@pytest.fixture
def take_in(home: Home, keys: CorpusKeys) -> Callable[..., Intake]:
    """Read the inbox with a configuration; checks the sum law every time."""

    def run(config: Config | None = None, **options: Any) -> Intake:
        suppression = SuppressionList(home.suppression_path, keys)
        result = read_deliveries(
            home.inbox,
            config=config or Config(),
            keys=keys,
            suppression=suppression,
            scratch=home.staging,
            **options,
        )
        counts = result.counts
        assert counts.received == (
            counts.accepted + counts.held_out + counts.quarantined + counts.duplicates
        )
        assert counts.accepted == result.records.height
        assert counts.held_out == result.held_out.height
        assert counts.quarantined == result.quarantine.height
        assert counts.duplicates == result.duplicates.height
        assert list(home.staging.iterdir()) == []
        return result

    return run
