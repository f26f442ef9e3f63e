"""Ripple by part of the model: which part of an unlearned model hurts the people who stay, and would its change alone hurt them?

A method changes weights theta_o to theta_u. Let m be a part (a layer's attention, its feed-forward, the embedding, the head) and
theta[m <- w] the weights theta with part m taken from w. For a person j who stays, with mean loss l_j::

    norm      |theta_u,m - theta_o,m| / |theta_o,m|
    applied   l_j(theta_o[m <- theta_u]) - l_j(theta_o)        what this part's change alone does
    reverted  l_j(theta_u) - l_j(theta_u[m <- theta_o])        what goes away when this part's change alone is taken back

If only one part was changed, both are the whole damage for that part and exactly zero for every other (the tests hold this): a method
that trains some layers must do nothing through the others. If the parts don't interact, the sums over parts are the whole damage;
what is missing from the sums is interaction.

The null is not a graft: weights of two trainings do not correspond part by part. How far two *gold* models' losses on the same
people lie apart is what chance gives, whatever was forgotten (`findings`).

Weights are exchanged, not copied: two sets of weights are all there is in memory. Cost: two evaluations of the people per part.

Shape suffixes: `M` parts, `...` whatever is measured per person.

Source: activation and weight patching as in causal tracing (Meng et al., NeurIPS 2022); the definitions are ours.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from unlearning.errors import RowsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer

PIECE = 1 << 22
"""Numbers of one parameter that are looked at in double precision at a time: an embedding may be a third of the model."""
_BLOCK = re.compile(r"blocks\.(?P<layer>\d+)\.(?P<name>.+)")


@dataclass(frozen=True, slots=True)
class Graft:
    """What one part's change does."""

    part: str
    """Name of the part, see `parts_of`."""
    norm: float
    """Length of its change over the length of its weights."""
    applied: NDArray[np.float64]
    """What was measured with this change alone, less the same on the original."""
    reverted: NDArray[np.float64]
    """What was measured on the unlearned model, less the same with this change taken back."""


def parts_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parameters by the part of the model that they belong to.

    Args:
        names: parameter names of a trainer's model, in its order.

    Returns:
        Part → names: "embedding", "layer 1 attention", "layer 1 feed-forward", …, "head" (the final norm and an untied head).
    """
    found: dict[str, list[str]] = {}
    for name in names:
        match = _BLOCK.match(name)
        if match:
            inner = "attention" if match["name"].startswith("attention") else "feed-forward"
            part = f"layer {int(match['layer']) + 1} {inner}"
        else:
            part = "embedding" if name.startswith("embed") else "head"
        found.setdefault(part, []).append(name)
    return {part: tuple(mine) for part, mine in found.items()}


def update_norms(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> dict[str, float]:  # fmt: skip
    """How far each part was moved, as a share of its length.

    Args:
        before: parameters by name.
        after: the same names and shapes.

    Returns:
        Part → |after - before| / |before|; infinite for a part that was zero and is no more.

    Raises:
        RowsError: if names or shapes differ.
    """
    _require_alike(before, after)
    found = {}
    for part, names in parts_of(list(before)).items():
        moved = sum(square_of(after[n].detach() - before[n].detach()) for n in names) ** 0.5
        length = sum(square_of(before[n]) for n in names) ** 0.5
        found[part] = moved / length if length else (float("inf") if moved else 0.0)
    return found


def grafts(
    original: Transformer,
    unlearned: Mapping[str, Tensor],
    measure: Callable[[Transformer], NDArray[np.float64]],
) -> list[Graft]:
    """Apply and revert the change of each part alone.

    Args:
        original: model before; its weights are exchanged meanwhile and are bit for bit its own again at the end.
        unlearned: parameters after, by name; likewise.
        measure: what is asked of a model, such as the losses of people who stay; higher = more damage.

    Returns:
        One graft per part, in the order of the parameters.

    Raises:
        RowsError: if names or shapes differ.
    """
    own = dict(original.named_parameters())
    norms, parts = update_norms(own, unlearned), parts_of(list(own))
    theirs = dict(unlearned)
    before = measure(original)
    applied = {}
    for part, names in parts.items():
        with _exchanged(own, theirs, names):
            applied[part] = measure(original) - before
    reverted = {}
    with _exchanged(own, theirs, tuple(own)):
        after = measure(original)
        for part, names in parts.items():
            with _exchanged(own, theirs, names):
                reverted[part] = after - measure(original)
    return [Graft(part, norms[part], applied[part], reverted[part]) for part in parts]


def square_of(tensor: Tensor) -> float:
    """Sum of squares in double precision.

    Args:
        tensor: of any shape.

    Returns:
        The sum; a piece at a time, so that no copy of the whole is made.
    """
    pieces = tensor.detach().flatten().split(PIECE)
    return sum(float(piece.double().square().sum()) for piece in pieces)


@contextmanager
def _exchanged(own: Mapping[str, Any], theirs: dict[str, Any], names: Sequence[str]) -> Iterator[None]:  # fmt: skip
    def swap() -> None:
        for name in names:
            own[name].data, theirs[name] = theirs[name].detach(), own[name].data

    swap()
    try:
        yield
    finally:
        swap()


def _require_alike(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
    shapes, others = ({n: tuple(t.shape) for n, t in side.items()} for side in (before, after))
    if shapes != others:
        differing = sorted(n for n in shapes.keys() | others.keys() if shapes.get(n) != others.get(n))  # fmt: skip
        raise RowsError(f"expected two models of one shape, {differing[0]} differs")
