"""Reading the corpus and its tokens side by side, and writing tables whole."""

from pathlib import Path
from typing import TYPE_CHECKING

from provenance import write_atomic

if TYPE_CHECKING:
    import polars as pl

    from pipelines.results import Result
    from pipelines.site import Site
    from trainer import TokenStore


def parquet(frame: "pl.DataFrame") -> bytes:
    """A frame as the bytes of a Parquet file, so that its digest can be entered before the file exists."""
    import io

    buffer = io.BytesIO()
    frame.write_parquet(buffer)
    return buffer.getvalue()


def write_table(path: Path, frame: "pl.DataFrame") -> str:
    """Write a Parquet file atomically.

    Args:
        path: Where.
        frame: What.

    Returns:
        SHA-256 of the file, lower-case hex; of no text, so it need not be keyed.
    """
    from hashlib import sha256

    data = parquet(frame)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data)
    return sha256(data).hexdigest()


def records(site: "Site", version: str, *columns: str) -> "pl.DataFrame":
    """Live records of a version in leaf order, with their leaf `index`.

    Args:
        site: The open home.
        version: Version id.
        *columns: Columns beside `index`; all when none is named.
    """
    from pipelines.steps.ledger import corpus_keys
    from pipelines.storage.versions import Versions

    wanted = ["index", *columns] if columns else None
    return Versions(site.home, corpus_keys(site)).read(version, wanted)


def token_store(site: "Site", tokens: "Result") -> "TokenStore":
    """The token shards of a `tokens` result, checked against its digest."""
    from trainer import TokenStore

    return TokenStore.open(site.home.path / tokens["folder"], tokens["digest"])
