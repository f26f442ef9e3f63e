"""Who is tied to whom inside a model, by gradients, by representations and by meaning; and what follows from the tie.

Forgetting one person moves the weights, and with them what the model says about others. Which others? For a person i that is
forgotten and another person j, with l(z) the mean loss per token of a person's records::

    gradient dot      <grad l(z_i), grad l(z_j)>                         at the original model
    gradient cosine   the same over the product of their norms
    representation    cosine of the mean state at the last token of the records; CKA over the records of the two
    semantic          |W_i & W_j| / |W_i | W_j|,  W: words that fewer than half of the people share (the rest is template)

    ripple coefficient   Pearson r over pairs (i, j) of a tie and the damage, l_j(after forgetting i alone) - l_j(before)

Pairs of one target are not independent, so intervals come from drawing *targets* again; the mean of r within targets says
whether the tie orders the others of one target, or only tells violent targets from gentle ones.

**Caveat, to be printed with every r:** for a small step, l_j moves by eta <grad l_i, grad l_j> by Taylor's theorem, so that a high
r of gradient dots is a tautology there. It says something at the strength that was really used only.

The gradients of all people of a batch come from one backward pass (`valuation.gradients.record_gradients`): the records of a
person carry one index, so that the pass adds them up. Cost: a forward and backward pass over everybody, and
`MEMORY_BYTES` for the targets' gradients, or those of one target if they are larger; the others' are formed one parameter at a time.

Shape suffixes: `T` targets, `N` others, `R` records, `D` width, `B` resamples.

Source: association metrics of PrivUn, arXiv 2604.22076 (abstract; definitions ours).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from unlearning.depth import linear_cka
from unlearning.grafts import PIECE
from unlearning.people import by_subject
from unlearning.scoring import padded

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.material import Document
    from unlearning.people import Record
    from valuation.gradients import RecordGradients

MEMORY_BYTES = 64 * 2**20
"""Most memory for the gradients of a batch of targets; as many others come from one pass."""
CAVEAT = (
    "for a small step the damage is the step size times the gradient dot product by Taylor's theorem, so a high r of gradients is "
    "a tautology there; only r at the strength really used says something"
)
TIES = (
    "gradient_dot",
    "gradient_cosine",
    "representation_cosine",
    "representation_cka",
    "semantic",
)
_ROWS = 64  # rows of the longest record in one pass
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True, repr=False)
class Person:
    """What belongs to one person; without a `repr`, so that no log can show it."""

    subject: str
    """The person's id."""
    documents: tuple[tuple[int, ...], ...]
    """Tokens of each record with the end-of-text token, two or more."""
    words: frozenset[str]
    """Words of the records, lower case."""


def words_of(texts: Sequence[str]) -> frozenset[str]:
    """Words of texts, lower case, without punctuation.

    Args:
        texts: of one person.

    Returns:
        The distinct words.
    """
    return frozenset(word.casefold() for text in texts for word in _WORD.findall(text))


def people_of(records: Sequence[Record], documents: Sequence[Document]) -> list[Person]:
    """People with their tokens and words, in the order of the records.

    Args:
        records: of people.
        documents: their tokens, as the audit has them.

    Returns:
        People; a record without two tokens is left out, and a person without one that is left.
    """
    tokens = {
        document.record_id: tuple(document.tokens)
        for document in documents
        if len(document.tokens) > 1
    }
    found = []
    for subject, mine in by_subject(list(records)).items():
        own = [record for record in mine if record.record_id in tokens]
        if own:
            words = words_of([record.text for record in own])
            found.append(Person(subject, tuple(tokens[record.record_id] for record in own), words))
    return found


def gradient_ties(
    model: Transformer, targets: Sequence[Person], others: Sequence[Person]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Dot products and cosines of the gradients of people's mean losses per token.

    Args:
        model: where the gradients are taken; not changed.
        targets: T people.
        others: N people.

    Returns:
        (dots_TN, cosines_TN).
    """
    size = 4 * sum(p.numel() for p in model.parameters())
    at_once = max(1, MEMORY_BYTES // size)
    dots_TN = np.zeros((len(targets), len(others)))
    norms_T, norms_N = np.zeros(len(targets)), np.zeros(len(others))
    for rows_T, found in _passes(model, targets, at_once):
        directions = found.all()
        del found  # its activations
        for direction in directions.values():
            for piece in _pieces(direction):
                norms_T[rows_T] += _squares(piece.double())
        for rows_N, grads in _passes(model, others, at_once):
            for name, direction in directions.items():
                for one, other in zip(_pieces(direction), _pieces(grads.of(name)), strict=True):
                    double = other.double()
                    dots_TN[rows_T, rows_N] += (one.double() @ double.T).cpu().numpy()
                    if rows_T.start == 0:
                        norms_N[rows_N] += _squares(double)
            del grads  # before the next pass
        del directions
    scale_TN = np.sqrt(np.outer(norms_T, norms_N))
    cosines_TN = np.divide(dots_TN, scale_TN, out=np.zeros_like(dots_TN), where=scale_TN > 0)
    return dots_TN / np.outer(_predicted(targets), _predicted(others)), cosines_TN


def _predicted(people: Sequence[Person]) -> NDArray[np.float64]:
    """Predicted tokens of each person: the passes give gradients of summed losses."""
    return np.array([sum(len(d) - 1 for d in p.documents) for p in people], dtype=np.float64)


def _passes(
    model: Transformer, people: Sequence[Person], at_once: int
) -> Iterator[tuple[slice, RecordGradients]]:
    """(ordinals, what forms their gradients) of a few people at a time."""
    from trainer.data import pack
    from valuation.gradients import record_gradients

    length = max((len(d) for person in people for d in person.documents), default=1)
    start, tokens = 0, 0
    for stop, person in enumerate(people, start=1):
        tokens += sum(map(len, person.documents))
        full = stop - start >= at_once or tokens >= _ROWS * length
        if not full and stop < len(people):
            continue
        # One index for all records of a person: the pass adds up their gradients.
        chosen = [
            (index, index.to_bytes(32, "big"), document)
            for index in range(start, stop)
            for document in people[index].documents
        ]
        yield slice(start, stop), record_gradients(model, pack(chosen, length))
        start, tokens = stop, 0


def _pieces(grads: Tensor) -> tuple[Tensor, ...]:
    """Gradients [n, *shape] in pieces [n, X] that can be made double."""
    return grads.flatten(1).split(PIECE, 1)


def _squares(double_NX: Tensor) -> NDArray[np.float64]:
    return double_NX.square().sum(1).cpu().numpy()


@torch.inference_mode()
def last_states(model: Transformer, people: Sequence[Person]) -> list[NDArray[np.float64]]:
    """State of the last layer at the last token of each record (before its end-of-text token).

    Args:
        model: a model in evaluation mode.
        people: N people.

    Returns:
        Per person states_RD.
    """
    device = next(model.parameters()).device
    found = []
    for person in people:
        tokens_BT = padded([d[:-1] for d in person.documents]).to(device)
        last_B = torch.tensor([len(d) - 2 for d in person.documents], device=device)
        hidden_BTD, _ = model.trunk(tokens_BT)
        found.append(hidden_BTD[torch.arange(len(last_B)), last_B].double().cpu().numpy())
    return found


def representation_ties(
    targets: Sequence[NDArray[np.float64]], others: Sequence[NDArray[np.float64]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Cosine of mean states, and CKA over records.

    Args:
        targets: states_RD of T people.
        others: states_RD of N people.

    Returns:
        (cosines_TN, cka_TN); CKA is over the first records that both have, and 0 below three of them.
    """
    one_TD, two_ND = (np.stack([states.mean(0) for states in side]) for side in (targets, others))
    scale_TN = np.outer(np.linalg.norm(one_TD, axis=1), np.linalg.norm(two_ND, axis=1))
    cka_TN = np.zeros(scale_TN.shape)
    for row, one in enumerate(targets):
        for column, other in enumerate(others):
            both = min(len(one), len(other))
            if both >= 3:
                cka_TN[row, column] = np.nan_to_num(linear_cka(one[:both], other[:both]))
    return (one_TD @ two_ND.T) / np.maximum(scale_TN, 1e-30), cka_TN


def semantic_ties(targets: Sequence[Person], others: Sequence[Person]) -> NDArray[np.float64]:
    """Jaccard index of words, without the words that half of the people or more share.

    Args:
        targets: T people.
        others: N people.

    Returns:
        jaccard_TN in [0, 1].
    """
    everybody = {p.subject: p.words for p in (*targets, *others)}
    counts: dict[str, int] = {}
    for words in everybody.values():
        for word in words:
            counts[word] = counts.get(word, 0) + 1
    rare = {word for word, count in counts.items() if 2 * count < len(everybody)}
    left = {subject: words & rare for subject, words in everybody.items()}

    def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
        return len(one & other) / len(one | other) if one | other else 0.0

    return np.array([[jaccard(left[t.subject], left[o.subject]) for o in others] for t in targets])


@dataclass(frozen=True, slots=True)
class Ripple:
    """Correlation of a tie with damage."""

    r: float
    """Pearson r over all pairs; NaN if one of the two does not vary."""
    low: float
    """Lower end of the interval over targets."""
    high: float
    """Upper end."""
    within: float
    """Mean of r within each target."""
    targets: int
    """Targets behind it."""
    pairs: int
    """Pairs behind it."""


def ripple(
    ties_TN: NDArray[np.float64],
    damage_TN: NDArray[np.float64],
    pairs_TN: NDArray[np.bool_],
    draws_BT: NDArray[np.float64],
    level: float = 0.95,
) -> Ripple:
    """The ripple coefficient with its interval.

    Args:
        ties_TN: tie of each target to each other person.
        damage_TN: rise of the other person's loss after forgetting the target alone.
        pairs_TN: which pairs count; a person is no pair with itself.
        draws_BT: how often each target stands in each resample (`target_draws`).
        level: level of the two-sided percentile interval.

    Returns:
        The coefficient. With fewer than two targets the interval is [-1, 1].
    """
    moments_TM = _moments(ties_TN, damage_TN, pairs_TN)
    r = float(_pearson(moments_TM.sum(0)))
    within_T = _pearson(moments_TM)
    within = float(np.mean(within_T[~np.isnan(within_T)])) if (~np.isnan(within_T)).any() else np.nan  # fmt: skip
    low, high = _percentiles(_pearson(draws_BT @ moments_TM), level, len(ties_TN))
    return Ripple(r, low, high, within, len(ties_TN), int(pairs_TN.sum()))


def ripple_difference(
    one_TN: NDArray[np.float64],
    other_TN: NDArray[np.float64],
    damage_TN: NDArray[np.float64],
    pairs_TN: NDArray[np.bool_],
    draws_BT: NDArray[np.float64],
    level: float = 0.95,
) -> tuple[float, float, float]:
    """How much better one tie follows the damage than another, on the same resamples.

    Args:
        one_TN: first tie.
        other_TN: second tie.
        damage_TN: damage.
        pairs_TN: which pairs count.
        draws_BT: resamples.
        level: level of the interval.

    Returns:
        (r of one - r of other, low, high).
    """
    one, other = (_moments(t, damage_TN, pairs_TN) for t in (one_TN, other_TN))
    gap = float(_pearson(one.sum(0)) - _pearson(other.sum(0)))
    drawn_B = _pearson(draws_BT @ one) - _pearson(draws_BT @ other)
    low, high = _percentiles(drawn_B, level, len(one_TN))
    return gap, low, high


def target_draws(
    targets: int, resamples: int, generator: np.random.Generator
) -> NDArray[np.float64]:
    """Bootstrap over targets.

    Args:
        targets: T.
        resamples: B.
        generator: source of the draws.

    Returns:
        draws_BT; rows sum to T.
    """
    return generator.multinomial(targets, np.full(targets, 1 / targets), size=resamples).astype(np.float64)  # fmt: skip


def _moments(
    x_TN: NDArray[np.float64], y_TN: NDArray[np.float64], pairs_TN: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Sums per target from which any resample's r follows: n, x, y, xx, yy, xy."""
    x_TN, y_TN = (_standard(a, pairs_TN) for a in (x_TN, y_TN))
    parts = (np.ones_like(x_TN), x_TN, y_TN, x_TN * x_TN, y_TN * y_TN, x_TN * y_TN)
    return np.stack([np.where(pairs_TN, part, 0.0).sum(1) for part in parts], axis=1)


def _standard(a_TN: NDArray[np.float64], pairs_TN: NDArray[np.bool_]) -> NDArray[np.float64]:
    # r does not depend on origin and scale, but the sums of squares of raw dot products would cancel badly.
    kept = a_TN[pairs_TN]
    spread = kept.std() if kept.size else 0.0
    return (a_TN - (kept.mean() if kept.size else 0.0)) / (spread if spread > 0 else 1.0)


def _pearson(moments: NDArray[np.float64]) -> NDArray[np.float64]:
    """R of sums (n, x, y, xx, yy, xy) on the last axis; NaN where one side does not vary."""
    n, x, y, xx, yy, xy = np.moveaxis(moments, -1, 0)
    variance = (n * xx - x * x) * (n * yy - y * y)
    room = variance > 1e-12 * np.maximum(n, 1.0) ** 4
    return np.where(room, (n * xy - x * y) / np.sqrt(np.where(room, variance, 1.0)), np.nan)


def _percentiles(drawn_B: NDArray[np.float64], level: float, targets: int) -> tuple[float, float]:
    kept = drawn_B[~np.isnan(drawn_B)]
    if targets < 2 or not kept.size:
        return -1.0, 1.0
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
