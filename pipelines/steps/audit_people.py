"""Whom an audit compares forgotten people with: look-alikes who were never trained on, and people who stay."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.requests import RequestError
from pipelines.steps.ledger import corpus_keys
from pipelines.steps.tables import records
from provenance import keyed

if TYPE_CHECKING:
    import polars as pl

    from pipelines.results import Result
    from pipelines.site import Site


def lookalikes_of(site: "Site") -> Path | None:
    """The configured file of people who were never trained on.

    Raises:
        RequestError: It is configured and not there; without it membership would silently go untested.
    """
    name = site.config.audit.lookalikes
    if name is None:
        return None
    path = site.home.path / name
    if not path.exists():
        raise RequestError(
            f"[audit] lookalikes names {name!r}, which is not in the home; correct dataworth.toml or remove the line"
        )
    return path


def lookalikes_digest(site: "Site") -> str:
    """Keyed digest of the look-alikes' file, or none."""
    path = lookalikes_of(site)
    return "none" if path is None else keyed(corpus_keys(site).k_file, path.read_bytes()).hex()


def retained_records(site: "Site", corpus: "Result", erasure: "Result") -> "pl.DataFrame":
    """Records of people who stay: personal ones where there are any, at most a thousand.

    Sources of forgotten records are left out, unless the requests name every source: then what is left of them has to do.
    """
    import polars as pl

    frame = records(site, corpus["version"], "record_id", "owner", "source", "text", "personal")
    listed = (site.home.path / erasure["excluded"]).read_text().split()
    gone = frame.filter(pl.col("record_id").is_in([bytes.fromhex(line) for line in listed]))
    kept = frame.join(
        gone.select("owner", "source").unique(),
        on=["owner", "source"],
        how="anti",
        maintain_order="left",
    )
    personal = (
        kept.filter(pl.col("personal"))
        if gone["personal"].any()
        else kept.filter(~pl.col("personal"))
    )
    for part in (personal, kept):
        if len(part):
            return part.head(1000)
    return frame.filter(~pl.col("record_id").is_in(gone["record_id"].to_list())).head(1000)
