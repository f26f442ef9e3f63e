"""Merkle-sum tree: each owner checks the own payout *and* that all payouts add up to the pool.

A node carries a hash and the sum of the amounts below it, and both sums stand inside the hash::

    leaf(label, a)  = SHA256(0x04 || a as 8 bytes || label),   a
    node(L, R)      = SHA256(0x05 || sum_L || hash_L || sum_R || hash_R),   sum_L + sum_R

The shape is that of RFC 9162, so a proof is its path plus one sum per sibling. The textbook form
``H(sum_L + sum_R || hash_L || hash_R)`` is broken: there the operator can show each of two owners a
sibling of sum 0, owe 200 and publish a total of 100, and both proofs verify.

Amounts are integers (micro-units), every partial sum is checked to lie in [0, 2^53): no negative
sibling can hide a debt, and every JSON reader keeps the numbers exactly. When it is wrong: the sums
of the siblings are shown to the owner, so with two owners each learns the other's payout.

Source: Maxwell and Todd's proof of liabilities, as corrected by Chalkias, Chatzigiannis, Ji,
"Broken proofs of solvency in blockchain custodial wallets and exchanges" (2022).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from provenance.canonical import MAX_INTEGER
from provenance.errors import FormatError, ProofShapeError, RootMismatchError, VerificationError
from provenance.hashing import HASH_SIZE, SUM_LEAF_PREFIX, SUM_NODE_PREFIX, sha256
from provenance.proofs import path_layout

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

MAX_SUM: Final = MAX_INTEGER
"""Largest total: 9.0e15 micro-units, nine thousand million units of a currency."""


class SumTree:
    """The tree over labelled amounts, in memory."""

    __slots__ = ("_levels",)

    def __init__(self, leaves: Iterable[tuple[bytes, int]]) -> None:
        """Build the tree.

        Args:
            leaves: pairs of label (any bytes, e.g. an owner pseudonym) and amount, in order.

        Raises:
            FormatError: an amount or the total lies outside [0, 2^53), or there is no leaf.
        """
        level = [_leaf(label, amount) for label, amount in leaves]
        if not level:
            raise FormatError("a sum tree has at least one leaf: without a payout there is no pool")
        self._levels = [level]
        while len(level) > 1:
            pairs = zip(level[::2], level[1::2], strict=False)
            odd = level[-1:] if len(level) % 2 else []
            level = [_node(left, right) for left, right in pairs] + odd
            self._levels.append(level)
        if level[0][1] > MAX_SUM:
            raise FormatError(f"the total must be below 2^53, got {level[0][1]}")

    @property
    def size(self) -> int:
        """Number of leaves."""
        return len(self._levels[0])

    @property
    def root(self) -> tuple[bytes, int]:
        """Hash (32 bytes) and total of all amounts."""
        return self._levels[-1][0]

    def path(self, index: int) -> list[tuple[bytes, int]]:
        """The proof of one leaf.

        Args:
            index: 0 <= index < size.

        Returns:
            Hash and sum of each sibling, leaf first.

        Raises:
            ProofShapeError: the index is out of range.
        """
        if not 0 <= index < self.size:
            raise ProofShapeError(f"index must be in [0, {self.size}), got {index}")
        path = []
        for level in self._levels[:-1]:
            # The last node of an odd level has no sibling: it moves up as it is.
            if index ^ 1 < len(level):
                path.append(level[index ^ 1])
            index >>= 1
        return path


def verify_sum(
    label: bytes,
    amount: int,
    index: int,
    size: int,
    path: Sequence[tuple[bytes, int]],
    root: tuple[bytes, int],
) -> None:
    """Check that an amount is part of a total; return nothing, raise if it is not.

    Args:
        label: the label of the leaf.
        amount: 0 <= amount < 2^53.
        index: 0 <= index < size.
        size: number of leaves, from a signed source.
        path: hash and sum of each sibling, leaf first.
        root: hash and total, from the same signed source as ``size``.

    Raises:
        ProofShapeError: a length does not fit index and size.
        RootMismatchError: the path leads to another hash.
        VerificationError: a sum is out of range, or the path leads to another total.
    """
    layout = path_layout(index, size)
    if len(path) != len(layout):
        raise ProofShapeError(f"wrong path length: expected {len(layout)}, got {len(path)}")
    if not 0 <= amount <= MAX_SUM:
        raise VerificationError(f"the amount must be in [0, 2^53), got {amount}")
    node = _leaf(label, amount)
    for left, sibling in zip(layout, path, strict=True):
        if len(sibling[0]) != HASH_SIZE:
            raise ProofShapeError(f"path entry has {len(sibling[0])} bytes, expected {HASH_SIZE}")
        if not 0 <= sibling[1] <= MAX_SUM - node[1]:
            raise VerificationError(f"a sum leaves the range [0, 2^53): {sibling[1]} + {node[1]}")
        node = _node(sibling, node) if left else _node(node, sibling)
    if node[0] != root[0]:
        raise RootMismatchError(root[0], node[0])
    if node[1] != root[1]:
        raise VerificationError(f"expected a total of {root[1]}, the path adds up to {node[1]}")


def _leaf(label: bytes, amount: int) -> tuple[bytes, int]:
    if not 0 <= amount <= MAX_SUM:
        raise FormatError(f"an amount must be in [0, 2^53), got {amount}")
    return sha256(SUM_LEAF_PREFIX + amount.to_bytes(8, "big") + label), amount


def _node(left: tuple[bytes, int], right: tuple[bytes, int]) -> tuple[bytes, int]:
    parts = (SUM_NODE_PREFIX, _sum(left), left[0], _sum(right), right[0])
    return sha256(b"".join(parts)), left[1] + right[1]


def _sum(node: tuple[bytes, int]) -> bytes:
    return node[1].to_bytes(8, "big")
