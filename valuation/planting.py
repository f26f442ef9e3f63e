"""What a method's values make of records that were put there on purpose: are they found, and would it have paid?

The judged records, with what the owner of most of them might have added, are trained on and valued anew by the same method:

    noise       records of random tokens          found, if their values are lower than those of real records: AUC
    shuffled    its own texts, words in disorder  the same; a language model's mislabelled records
    duplicate   all its records once more

`gain` is what it would have got more, as a share of all that is paid, if records were paid by these values (`manipulation.record_shares`:
first come, nothing below zero). Shells gain nothing by construction: names are no input of the values. That is a probe of the *values*; what
owners are paid follows lots (`valuation.lots`), which names and copies can't move.

One training of each state of affairs, under one seed: an AUC has an interval over records and none over seeds, a gain has none.
Cost: four trainings on all judged records and four passes of the method; about 12 CPU seconds each where a proxy of 0.14 million parameters
is scored on 65,000 tokens for 16,000.

Every figure follows from `Planted.rows`, a value per record and state without text, id or name: `unsupported` makes them again.

Legend: N records, valued anew; R rows, of all states.
"""

from __future__ import annotations

import hashlib
import io
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.data import write_tokens
from valuation.detection import detection_auc
from valuation.errors import EvaluationError
from valuation.influence import ekfac
from valuation.influence.scores import TokenSet
from valuation.manipulation import (
    Holdings,
    add_noise,
    add_shuffled,
    duplicate,
    gain,
    record_shares,
)
from valuation.subsets import fit_subset

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from trainer.model import Transformer
    from valuation.evaluation import Estimate
    from valuation.influence.scores import Scores
    from valuation.subsets import Setting

FOUND = ("noise", "shuffled")
"""What is planted to be found; the other attacks hand in real text."""
HONEST = "as it is"
"""The state of affairs without any attack."""
_ROUNDING = 1e-6  # of the decimals in a document


@dataclass(frozen=True, slots=True)
class Planted:
    """What was found, and what would have paid."""

    records: int
    """Planted records of each kind in `FOUND`."""
    share: float
    """What the owner of most judged records, whose doing it would have been, gets without, as a share of all that is paid."""
    auc: dict[str, Estimate]
    """How well low values find what was planted; 0.5 = not at all."""
    gains: dict[str, float]
    """What each attack brings, as a share of all that is paid; positive = it pays."""
    rows: bytes
    """A Parquet file: `state` (`HONEST` or the attack), `mine` (the owner's), `first` (no earlier record has its text), `planted`, `value`."""

    def document(self) -> dict[str, Any]:
        """JSON without floats."""
        return {
            "records": self.records, "share": f"{self.share:.6f}", "auc": {kind: _text(found) for kind, found in self.auc.items()},
            "rows": hashlib.sha256(self.rows).hexdigest(),
            "gains": {name: f"{round(found, 6) + 0.0:.6f}" for name, found in self.gains.items()},
        }  # fmt: skip


def plant(
    scores: Scores,
    setting: Setting,
    directory: Path,
    records: int,
    *,
    seed: int = 0,
    score: Callable[[Transformer, TokenSet, TokenSet], Scores] = ekfac.scores,
) -> Planted:
    """Plant records among those that were scored, and value all of them anew.

    Args:
        scores: name the records and queries.
        setting: what all trainings share.
        directory: a folder for the tokens of a training, removed afterwards.
        records: planted records of each kind, >= 1.
        seed: of what is planted and of the trainings.
        score: the method.

    Returns:
        What was found, and what would have paid.

    Raises:
        EvaluationError: no record to plant, or another method than that of the scores.
    """
    if records < 1:
        raise EvaluationError(f"records: expected at least 1 to plant, got {records}")
    store, target = setting.stores()
    queries = TokenSet.of(target, setting.batch.length, scores.query_index_Q)
    honest = Holdings(
        tuple(store.owners[store.owner_codes_N[index]] for index in scores.train_index_N),
        tuple(tuple(store.tokens(int(index)).tolist()) for index in scores.train_index_N),
    )
    owner = min(Counter(honest.owners).items(), key=lambda item: (-item[1], item[0]))[0]
    generator = np.random.default_rng(seed)
    attacks = {
        "noise": add_noise(honest, owner, records, store.vocab_size, store.end_of_text, generator),
        "shuffled": add_shuffled(honest, owner, records, generator),
        "duplicate": duplicate(honest, owner, 1),
    }
    valued: dict[tuple[tuple[int, ...], ...], NDArray[np.float64]] = {}

    def values(held: Holdings) -> NDArray[np.float64]:
        if held.tokens not in valued:
            config = _written(held, setting, directory / "planted")
            model = fit_subset(config, np.ones(len(held.tokens), dtype=bool), seed).model.eval()
            found = score(model, TokenSet.of(config.stores()[0], setting.batch.length), queries)
            if found.method != scores.method:
                raise EvaluationError(f"method: expected {scores.method}, got {found.method}; plant with the method that is judged")  # fmt: skip
            valued[held.tokens] = found.totals_N()
        return valued[held.tokens]

    def rule(held: Holdings) -> dict[str, float]:
        return record_shares(held, values(held))

    try:
        planted_N = np.arange(len(honest.owners) + records) >= len(honest.owners)
        return Planted(
            records, rule(honest)[owner],
            {kind: detection_auc(values(attacks[kind]), planted_N) for kind in FOUND},
            {name: gain(honest, after, owner, rule) for name, after in attacks.items()},
            _rows({HONEST: honest, **attacks}, values, owner),
        )  # fmt: skip
    finally:
        shutil.rmtree(directory / "planted", ignore_errors=True)


def unsupported(document: Mapping[str, Any], rows: bytes, num: int) -> list[str]:
    """What a document says of planted records that its rows don't support.

    Args:
        document: from `Planted.document`.
        rows: `Planted.rows` of the same.
        num: judged records.

    Returns:
        One sentence each; none for figures that hold.

    Raises:
        EvaluationError: a value that is not finite.
    """
    import pyarrow.parquet as pq

    if (got := hashlib.sha256(rows).hexdigest()) != document["rows"]:
        return [f"planted records: expected rows with SHA-256 {document['rows'][:16]}, got {got[:16]}"]  # fmt: skip
    columns = {name: np.array(cells) for name, cells in pq.read_table(io.BytesIO(rows)).to_pydict().items()}  # fmt: skip
    state_R = columns.pop("state")
    of = {name: {column: cells_R[state_R == name] for column, cells_R in columns.items()} for name in set(state_R.tolist())}  # fmt: skip
    attacks = [name for name in document["gains"] if name in of]
    if {*attacks, HONEST} != set(of) or {*document["auc"]} != {*FOUND} or {*document["gains"]} != {*attacks}:  # fmt: skip
        return [f"planted records: expected rows of {sorted(document['gains'])} and of all {HONEST}, got {sorted(of)}"]  # fmt: skip
    honest = of[HONEST]
    for name in attacks:
        more = document["records"] if name in FOUND else int(honest["mine"].sum())
        if not _fits(honest, of[name], num, more, copies=name not in FOUND):
            return [f"planted records: expected the {num} judged ones and {more} more of their owner's under {name}, got other rows"]  # fmt: skip
    checks = [
        ("share", _share(honest), document["share"]),
        *((f"gain of {name}", _share(of[name]) - _share(honest), document["gains"][name]) for name in attacks),
    ]  # fmt: skip
    for name, told in document["auc"].items():
        found = _text(detection_auc(of[name]["value"], of[name]["planted"], float(told["level"])))
        checks += [(f"AUC of {name}, {end}", float(found[end]), told[end]) for end in ("estimate", "low", "high")]  # fmt: skip
    return [
        f"planted records, {what}: expected {got:.6f} by the rows, got {told}"
        for what, got, told in checks
        if not abs(got - float(told)) <= _ROUNDING
    ]


def _written(held: Holdings, setting: Setting, folder: Path) -> Setting:
    """Holdings as tokens that can be trained on, in their order."""
    store, _ = setting.stores()
    shutil.rmtree(folder, ignore_errors=True)
    digest = write_tokens(
        folder, corpus_version="none", tokenizer_digest=store.tokenizer_digest, vocab_size=store.vocab_size, end_of_text=store.end_of_text,
        records=[
            (place, hashlib.sha256(b"dataworth-planted-1|%d" % place).digest(), owner, list(tokens))
            for place, (owner, tokens) in enumerate(zip(held.owners, held.tokens, strict=True))
        ],
    )  # fmt: skip
    return replace(setting, train=folder, train_digest=digest)


def _rows(
    states: Mapping[str, Holdings], values: Callable[[Holdings], NDArray[np.float64]], owner: str
) -> bytes:
    """What all figures follow from, without a text, an id or a name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    num = len(states[HONEST].owners)
    columns: dict[str, list[Any]] = {"state": [], "mine": [], "first": [], "planted": [], "value": []}  # fmt: skip
    for name, held in states.items():
        size = len(held.owners)
        columns["state"] += [name] * size
        columns["mine"] += [one == owner for one in held.owners]
        columns["first"] += held.first().tolist()
        columns["planted"] += [place >= num for place in range(size)]
        columns["value"] += values(held).tolist()
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def _fits(
    honest: Mapping[str, NDArray[Any]], part: Mapping[str, NDArray[Any]], num: int, more: int, *, copies: bool
) -> bool:  # fmt: skip
    """Whether a state's rows are those of the honest one with so many behind them."""
    return (
        len(honest["value"]) == num
        and not honest["planted"].any()
        and len(part["value"]) == num + more
        and np.array_equal(part["planted"], np.arange(num + more) >= num)
        and all(np.array_equal(part[flag][:num], honest[flag]) for flag in ("mine", "first"))
        and bool(part["mine"][num:].all())
        and not (copies and part["first"][num:].any())
    )


def _share(part: Mapping[str, NDArray[Any]]) -> float:
    """The owner's share of what is positive of first-committed records, as `manipulation.record_shares` pays them."""
    paid_N = np.where(part["first"], np.maximum(part["value"], 0.0), 0.0)
    return float(paid_N[part["mine"]].sum() / (paid_N.sum() or 1.0))


def _text(found: Estimate) -> dict[str, str]:
    return {name: f"{getattr(found, name):.6f}" for name in ("estimate", "low", "high", "level")}
