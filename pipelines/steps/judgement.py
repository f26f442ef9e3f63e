"""The judge of values: every valuation is held against retraining, and the answer stands beside the values."""

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from pipelines.results import latest
from pipelines.runs import Job, digest_of, prepare_on, relative, started
from pipelines.settings import cores

if TYPE_CHECKING:
    from pipelines.results import Result
    from pipelines.site import Site
    from pipelines.steps.valuation import Launch, Made

EPOCHS, SEEDS, RANDOM_SETS, CURVE_SEEDS = 2, 1, 4, 3
"""Passes of a retraining, retrainings of a half, random removals beside each query's top records, and seeds of a curve."""

CONTROL = "random"
"""`valuation.judgement.CONTROL`, said here so that a page needs no PyTorch: the row that knows nothing."""

FORMAT = 4
"""`valuation.judgement.FORMAT`, likewise: a judgement of another one is made again before it is shown."""

FEW_SUBSETS = 10
"""`valuation.judgement.MIN_SUBSETS`, likewise: under it no score is told, and no ceiling."""


def judgement_inputs(site: "Site", target: "Result", influence: "Result") -> dict[str, Any]:
    """What the judgement depends on: the scores, and how much may be retrained."""
    size = site.size
    return {
        "influence": influence.data_version, "scores": influence["scores_run"], "size": size.name,
        "effort": [size.judge_subsets, size.judge_again, size.judge_queries, EPOCHS, SEEDS, RANDOM_SETS, list(size.judge_curve), CURVE_SEEDS, size.judge_planted],
        "test": target["test_digest"],
    }  # fmt: skip


def value_judgement(
    site: "Site", tokens: "Result", target: "Result", plan: "Result", influence: "Result", run: "Launch"
) -> "Made":  # fmt: skip
    """Retrain the proxy on halves of the scored records and hold the scores against the losses that come."""
    size, anywhere = site.size, site.home.runs / "any"
    effort = {
        "subsets": size.judge_subsets, "seeds": SEEDS, "again": size.judge_again, "top_queries": size.judge_queries, "random_sets": RANDOM_SETS,
        "curve_percents": list(size.judge_curve), "curve_seeds": CURVE_SEEDS, "planted": size.judge_planted,
    }  # fmt: skip
    job = Job(
        kind="gradients", entry="valuation.judging:run", network=size.proxy, steps=0, seed=plan["seeds"]["proxy"],
        extra={
            "target": relative(site.home.path / target["value_folder"], anywhere), "target_digest": target["value_digest"],
            "test": relative(site.home.path / target["test_folder"], anywhere), "test_digest": target["test_digest"],
            "scores": relative(site.home.runs / influence["scores_run"] / "scores", anywhere),
            "epochs": EPOCHS, "jobs": cores() if size.world > 1 else 1, **effort,
        },
    )  # fmt: skip
    directory = prepare_on(site, job, tokens, target, "value_digest")
    started(site, directory, plan)
    run(directory, 1)
    files = [directory / "judgement.json", directory / "judged.parquet"]
    if size.judge_planted:
        files.append(directory / "planted.parquet")
    document = json.loads(files[0].read_bytes())
    return digest_of([sha256(path.read_bytes()).hexdigest() for path in files]), {
        "files": [str(path.relative_to(site.home.path)) for path in files], "run": directory.name, "document": document,
    }  # fmt: skip


def told(document: dict[str, Any]) -> str:
    """The judgement in one sentence.

    Args:
        document: judgement.json.
    """
    if document["verdict"] == "INCONCLUSIVE" and document["subsets"] < FEW_SUBSETS:
        return f"{document['subsets']} subsets are too few to tell whether the values are right"
    if document["verdict"] == "INCONCLUSIVE" and float(document["lds"]["low"]) > 0:
        return "the values foretell retraining, and retraining doesn't tell them from BM25's, which cost nothing"
    return {
        "PASS": "the values foretell retraining, and better than BM25 does",
        "FAIL": "the values don't foretell retraining better than BM25 does: they are not worth their cost here",
        "INVALID": "a random draw seems to foretell retraining too: nothing was measured",
        "INCONCLUSIVE": "retraining doesn't tell these values from BM25's, or from none",
    }[document["verdict"]]


def earlier(site: "Site") -> str:
    """What to say in place of a check where the newest judgement is of a format of before, which kept other rows."""
    found = latest(site.home.results, "value_judgement")
    if found is None or found["document"]["format"] >= FORMAT:
        return ""
    return f" (skipped: judged by an earlier version, in format {found['document']['format']}; dataworth run judges again)"  # fmt: skip


def contradicted(site: "Site", result: "Result") -> list[str]:
    """What the judgement says that its rows don't support; its files must be those that the result was made from.

    Nothing of one of an earlier version, see `earlier`.
    """
    from trainer.spec import load_run
    from valuation.judging import contradictions

    paths = [site.home.path / file for file in result["files"]]
    document = json.loads(paths[0].read_bytes())
    if document != result["document"]:
        return [f"{paths[0].name}: not the judgement that was read when it was made"]
    if document["format"] < FORMAT:
        return []
    problems = contradictions(document, *(path.read_bytes() for path in paths[1:]))
    if digest_of([sha256(path.read_bytes()).hexdigest() for path in paths]) != result.data_version:
        problems.append("the files are not those that the judgement's version was made from")
    wanted = load_run(paths[0].parent).config.extra["planted"]
    told = 0 if document["planted"] == "none" else document["planted"]["records"]
    if told != wanted:
        problems.append(f"planted records: expected {wanted} of each kind, as the run names, got {told}")  # fmt: skip
    return problems
