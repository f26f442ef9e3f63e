"""Steps of level 1: what texts say of themselves, before anything is trained for a buyer."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.runs import Job, digest_of, prepare, relative
from pipelines.settings import cores
from pipelines.steps.tables import records, token_store, write_table
from provenance import write_atomic

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site

Made = tuple[str, Mapping[str, Any]]
Launch = Callable[[Path, int], dict]


def token_arrays(site: "Site", corpus: "Result", tokens: "Result") -> dict[str, Any]:
    """Token arrays and texts of all live records, in leaf order."""
    import numpy as np

    store = token_store(site, tokens)
    frame = records(site, corpus["version"], "record_id", "owner", "text")
    offsets, flat = store.csr()
    live = frame["index"].to_numpy().astype(np.int64)
    lengths = store.lengths_N[live]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)])
    if len(live) < store.size or (live != np.arange(store.size)).any():
        flat = flat[
            np.repeat(offsets[live] - new_offsets[:-1], lengths) + np.arange(int(lengths.sum()))
        ]
    return {
        "frame": frame,
        "tokens": flat,
        "offsets": new_offsets,
        "vocab_size": store.vocab_size,
        "lengths": lengths,
    }


def inputs(site: "Site") -> dict[str, Any]:
    """What surprisal depends on beside tokens and clusters; nothing where counts alone are asked."""
    if site.config.information.surprisal == "ngram":
        return {}
    size = site.size
    return {"model": [asdict(size.proxy), size.steps, size.rows, size.length, size.warmup, size.lr]}


def entropy(site: "Site", corpus: "Result", tokens: "Result", run: Launch) -> Made:
    """Information of every record and owner in two tables, and the surprisal of every token in a third and as a memory map; by a model too, where that is asked."""
    import numpy as np
    import polars as pl
    import pyarrow as pa

    from valuation import folds, measure_information
    from valuation.clusters import EXACT, NEAR, SINGLE, duplicate_mass
    from valuation.surprisal import write_surprisal

    flat = token_arrays(site, corpus, tokens)
    frame = flat["frame"]
    owners = sorted(frame["owner"].unique())
    code_of = {owner: code for code, owner in enumerate(owners)}
    owner_N = np.array([code_of[owner] for owner in frame["owner"]], dtype=np.int64)
    bytes_N = frame["text"].str.len_bytes().to_numpy().astype(np.int64)
    copies = pl.read_parquet(site.home.table("clusters"))
    cluster_N = copies["cluster"].to_numpy()
    kind_N = (
        copies["kind"]
        .replace_strict({"single": SINGLE, "exact": EXACT, "near": NEAR}, return_dtype=pl.Int8)
        .to_numpy()
    )
    fold_N = folds(frame["record_id"].to_list(), cluster_N=cluster_N)
    bits_T = write_surprisal(
        site.home.tables,
        flat["tokens"],
        flat["offsets"],
        fold_N,
        flat["vocab_size"],
        threads=cores(),
    )
    measured = partial(
        measure_information, flat["tokens"], flat["offsets"], bytes_N=bytes_N, fold_N=fold_N, owner_N=owner_N, num_owners=len(owners),
        vocab_size=flat["vocab_size"], threads=cores(),
    )  # fmt: skip
    per_record, per_owner = measured(bits_T=bits_T)
    by_model: tuple[Any, Any] = (None, None)
    if site.config.information.surprisal == "model":
        model_T, reference = _by_model(site, tokens, flat, fold_N, bits_T, run)
        by_model = measured(bits_T=model_T)
    tokens_N = per_record.tokens_N
    mass_G2 = duplicate_mass(kind_N, tokens_N, owner_N, len(owners))
    whole = duplicate_mass(kind_N, tokens_N, np.zeros_like(owner_N), 1)[0].tolist()

    def each(of_T: Any) -> pl.DataFrame:
        """One list per record, made of borders and values as they are: no array per record."""
        lists = pa.LargeListArray.from_arrays(flat["offsets"], np.asarray(of_T, np.float32))
        return frame.select("record_id", "owner").with_columns(bits=pl.Series(lists, dtype=pl.List(pl.Float32)))  # fmt: skip

    def table(names: pl.DataFrame, what: Any, model: Any) -> pl.DataFrame:
        more = {} if model is None else {
            "model_bits_per_token": pl.Series(model.surprisal_bits_per_token_N), "model_se": pl.Series(model.surprisal_se_N),
            "model_bits_per_byte": pl.Series(model.surprisal_bits_per_byte_N),
        }  # fmt: skip
        return names.with_columns(
            **more,
            tokens=pl.Series(what.tokens_N),
            bytes=pl.Series(what.bytes_N),
            entropy_bits_per_token=pl.Series(what.entropy_bits_per_token_N),
            surprisal_bits_per_token=pl.Series(what.surprisal_bits_per_token_N),
            surprisal_se=pl.Series(what.surprisal_se_N),
            surprisal_bits_per_byte=pl.Series(what.surprisal_bits_per_byte_N),
        )

    wide = table(pl.DataFrame({"owner": owners}), per_owner, by_model[1]).with_columns(
        exact_mass=pl.Series(mass_G2[:, 0]), near_mass=pl.Series(mass_G2[:, 1])
    )
    tables = {
        "entropy": table(frame.select("record_id", "owner"), per_record, by_model[0]),
        "owner_entropy": wide,
        "surprisal": each(bits_T),
    }
    arrays, more = ["surprisal.f16", "surprisal.json"], {}
    bits, weights = per_owner.surprisal_bits_per_token_N, per_owner.tokens_N
    if by_model[1] is not None:
        tables["model_surprisal"] = each(model_T)
        arrays += ["surprisal.model.f16", "surprisal.model.json"]
        more = {"run": reference, "mean_model_bits_per_token": float(np.average(by_model[1].surprisal_bits_per_token_N, weights=weights))}  # fmt: skip
    digests = [write_table(site.home.table(name), made) for name, made in tables.items()]
    if "model_surprisal" not in tables:  # of another setting before
        for name in (
            "model_surprisal.parquet",
            "surprisal.model.f16",
            "surprisal.model.json",
            ".surprisal.model.part",
        ):
            (site.home.tables / name).unlink(missing_ok=True)
    return digest_of(digests), {
        "files": [*(f"tables/{name}.parquet" for name in tables), *(f"tables/{name}" for name in arrays)],
        "records": len(frame), "owners": len(owners), "tokens": int(per_record.tokens_N.sum()),
        "mean_bits_per_token": float(np.average(bits, weights=weights)),
        "mean_bits_per_byte": float(np.average(per_owner.surprisal_bits_per_byte_N, weights=per_owner.bytes_N)),
        "exact_mass": whole[0], "near_mass": whole[1], **more,
    }  # fmt: skip


def _by_model(
    site: "Site", tokens: "Result", flat: dict[str, Any], fold_N: Any, bits_T: Any, run: Launch
) -> tuple[Any, str]:
    """Bits of every token under models of the proxy's shape, each trained on the other folds; and the run that trained them."""
    import numpy as np

    from valuation.reference import write_model_surprisal

    size, index_N = site.size, flat["frame"]["index"].to_numpy().astype(np.int64)
    fold_L = np.full(token_store(site, tokens).size, -1, "<i8")
    fold_L[index_N] = fold_N
    digest = sha256(fold_L.tobytes()).hexdigest()
    path = site.home.runs / "inputs" / f"folds-{digest[:12]}.bin"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, fold_L.tobytes())
    # Counts see all of the other folds, so a model does: one pass, or a training's steps where that is more.
    once = -(-int(flat["lengths"].sum()) // (2 * size.rows * size.length))
    job = Job(
        kind="proxy", entry="valuation.reference:run", network=size.proxy, steps=max(size.steps, once), seed=0,
        extra={"folds": [relative(path, site.home.runs / "any"), digest]},
    )  # fmt: skip
    directory = prepare(
        site, job, corpus_version=tokens["corpus_version"], tokens=site.home.path / tokens["folder"], tokens_digest=tokens["digest"],
        tokenizer=tokens["tokenizer_digest"], vocab_size=tokens["vocab_size"], evaluation_set="none", corpus_root=tokens["record_root"],
    )  # fmt: skip
    run(directory, 1)
    found = write_model_surprisal(site.home.tables, directory, index_N, flat["offsets"], bits_T)
    return found, directory.name


def quality(site: "Site", corpus: "Result") -> Made:
    """Quality components of every record."""
    import polars as pl

    from valuation import text_quality

    frame = records(site, corpus["version"], "record_id", "owner", "text")
    found = text_quality(frame["text"], threads=cores())
    table = frame.select("record_id", "owner").with_columns(
        damaged=pl.Series(found.damaged_N), repeated=pl.Series(found.repeated_N), runs=pl.Series(found.runs_N),
        distinct=pl.Series(found.distinct_N), packed=pl.Series(found.packed_N), score=pl.Series(found.score_N),
    )  # fmt: skip
    digest = write_table(site.home.table("quality"), table)
    return digest, {
        "files": ["tables/quality.parquet"],
        "records": len(table),
        "mean_score": float(found.score_N.mean()),
    }
