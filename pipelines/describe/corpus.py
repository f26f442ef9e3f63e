"""What the corpus group shows in the web UI."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pipelines.display import column_schema, facts_md, table_md, table_metadata

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site


def parquet_schema(path: Any, **options: Any) -> Any:
    """Column schema of a Parquet file, from its footer."""
    import pyarrow.parquet as pq

    return column_schema(pq.read_schema(path), **options)


def deliveries(result: "Result") -> Mapping[str, Any]:
    """Files per owner."""
    return {
        "files": result["num_files"], "owners": result["num_owners"], "bytes": result["bytes"],
        "per owner": table_md(["owner", "files", "bytes"], [list(row) for row in result["per_owner"]]),
    }  # fmt: skip


def corpus(result: "Result") -> Mapping[str, Any]:
    """Counts, roots and the columns of a record."""
    from pipelines.storage.records import SCHEMA

    schema = column_schema(SCHEMA, personal=("text",), unique=("record_id",))
    return {
        **table_metadata(result["live"], schema, f"versions/{result['version']}"),
        "version": result["version"], "record root": result["record_root"], "head": result["head"],
        "counts": facts_md(result["counts"]), "live": result["live"], "tombstones": result["size"] - result["live"],
        "per owner": table_md(["owner", "records"], sorted(result["owners"].items())),
    }  # fmt: skip


def quarantine(site: "Site", result: "Result") -> Mapping[str, Any]:
    """Rejected rows by reason."""
    path = site.home.table("quarantine")
    return {
        **table_metadata(result["rows"], parquet_schema(path), "tables/quarantine.parquet"),
        "reasons": table_md(["reason", "rows"], sorted(result["reasons"].items())), "rejected": result["rows"],
    }  # fmt: skip


def clusters(site: "Site", result: "Result") -> Mapping[str, Any]:
    """How many copies there are."""
    path = site.home.table("clusters")
    return {
        **table_metadata(result["records"], parquet_schema(path, unique=("record_id",)), "tables/clusters.parquet"),
        "clusters": result["clusters"], "exact copies": result["exact"], "near copies": result["near"],
    }  # fmt: skip


def tokens(result: "Result") -> Mapping[str, Any]:
    """Shards and the tokenizer."""
    return {
        "tokens": result["tokens"], "shards": result["shards"], "vocabulary": result["vocab_size"],
        "bytes per token": round(result["bytes"] / max(1, result["tokens"]), 4),
        "tokenizer": result["tokenizer_digest"], "digest": result["digest"],
    }  # fmt: skip


def target(result: "Result") -> Mapping[str, Any]:
    """The three parts of the held-out target."""
    parts = [
        [name, result[f"{name}_records"], result[f"{name}_tokens"]]
        for name in ("value", "test", "confirm")
    ]
    return {
        "records": sum(part[1] for part in parts),
        "parts": table_md(["part", "records", "tokens"], parts),
    }
