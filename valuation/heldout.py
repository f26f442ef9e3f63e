"""Held-out records must not be trained on: one rule for every entry that measures against them.

    refuse_overlap(training texts, {"target": texts, "test": texts, ...})

A text that was trained on is foretold by looking it up, so its loss says nothing of held-out text. Two records are the same where
their *tokens* are, whatever their ids, owners or places, from `TELLING` tokens on: shorter ones agree by coincidence ("Yes." stands
in every corpus), and refusing them would refuse every corpus.

When it is wrong: copies with edits are not found (`valuation.clusters` finds those), nor is a text that stands inside a longer one.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np

from valuation.errors import HeldOutError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from trainer.data import TokenStore

TELLING = 16
"""Tokens from which on two equal texts are a copy and no coincidence."""
Text = tuple[int, "NDArray[Any]"]
"""(index in its store, token ids)."""
SHOWN = 5
"""Places that an error names."""


def texts(store: TokenStore, index_N: Iterable[int] | None = None) -> Iterator[Text]:
    """Records of a token store, as `refuse_overlap` takes them.

    Args:
        store: the documents.
        index_N: their indices; None = all live ones.

    Yields:
        (index, tokens) of those that are long enough to tell.
    """
    for index in store.live_N if index_N is None else index_N:
        if store.lengths_N[int(index)] >= TELLING:
            yield int(index), store.tokens(int(index))


def refuse_overlap(train: Iterable[Text], held_out: Mapping[str, Iterable[Text]]) -> None:
    """Refuse held-out records that stand in the training data.

    Args:
        train: records that are trained on.
        held_out: what is measured on, by the name that an error calls it.

    Raises:
        HeldOutError: one or more are trained on; counts them by name, and gives the places of the first.
    """
    places: dict[bytes, list[tuple[str, int]]] = {}
    lengths = set()
    for name, each in held_out.items():
        for index, tokens in each:
            if len(tokens) >= TELLING:
                places.setdefault(_fingerprint(tokens), []).append((name, index))
                lengths.add(len(tokens))
    found: dict[tuple[str, int], int] = {}
    for index, tokens in train:
        if len(tokens) in lengths:  # no other can be equal: most need no hash
            for place in places.get(_fingerprint(tokens), ()):
                found.setdefault(place, index)
    if not found:
        return
    counts = {name: sum(kind == name for kind, _ in found) for name in held_out}
    told = ", ".join(f"{count} of {name}" for name, count in counts.items() if count)
    first = [(name, index, other) for (name, index), other in found.items()][:SHOWN]
    raise HeldOutError(
        f"held-out records: expected none that is trained on, got {told} with the tokens of a training record ({TELLING} tokens or "
        f"more); (set, its index, index in the training): {first}; take them out of that set, or out of the training"
    )


def _fingerprint(tokens: NDArray[Any]) -> bytes:
    return hashlib.sha256(np.ascontiguousarray(tokens, dtype="<u4").tobytes()).digest()
