"""Checking RFC 9162 proofs: pure functions from hashes to nothing, which raise if a proof fails.

*Inclusion*: "leaf i is in the tree of n leaves with this root". *Consistency*: "the tree of n leaves
begins with the tree of m leaves". The same two for a *subtree* (a shard).

Index and size are 0-based, always explicit, and must come from something signed: the path for
(i=1, n=2) is equally valid for (i=2, n=3), so a verifier that lets the prover choose the size proves
nothing. The shape of a proof follows from index and size (:func:`path_layout`) and is never read
from the proof; there is nothing in a proof to negotiate.

Cost: one hash per path entry, about 20 microseconds for a million leaves.

Source: RFC 9162, sections 2.1.3 - 2.1.5; subtrees after draft-ietf-plants-merkle-tree-certs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from provenance.errors import ProofShapeError, RootMismatchError
from provenance.hashing import HASH_SIZE, MAX_SIZE, node_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def path_layout(index: int, size: int) -> list[bool]:
    """On which side the siblings of an inclusion path stand, leaf first.

    Prover and verifier of all our trees share this: the shape of a proof follows from (index, size)
    alone and is never read from the proof.

    Args:
        index: 0 <= index < size.
        size: 1 <= size < 2^63.

    Returns:
        True where the sibling stands on the left; its length is the length of the path.

    Raises:
        ProofShapeError: index or size is out of range.
    """
    if size > MAX_SIZE:
        raise ProofShapeError(f"size must be below 2^63, got {size}")
    check_index(index, size)
    # Below the point where the ways to `index` and to the last leaf part, every level has a
    # sibling; above it only those levels on which the path stands right of a perfect subtree.
    inner = (index ^ (size - 1)).bit_length()
    border = (index >> inner).bit_count()
    return [bool(index >> level & 1) for level in range(inner)] + [True] * border


def verify_inclusion(
    leaf_hash: bytes, index: int, size: int, path: Sequence[bytes], root: bytes
) -> None:
    """Check that a leaf is in the tree; return nothing, raise if it is not.

    Args:
        leaf_hash: 32 bytes, computed by the verifier from the leaf data.
        index: 0 <= index < size, from a trusted source.
        size: number of leaves, from the signed checkpoint or manifest, never from the prover.
        path: 32-byte hashes, leaf first.
        root: 32 bytes, from the same signed source as ``size``.

    Raises:
        ProofShapeError: a length does not fit index and size.
        RootMismatchError: the path leads to another root.

    Source: RFC 9162, section 2.1.3.2.
    """
    layout = path_layout(index, size)
    _check_hashes(path, len(layout))
    _check_hash("leaf hash", leaf_hash)
    node = leaf_hash
    for left, sibling in zip(layout, path, strict=True):
        node = node_hash(sibling, node) if left else node_hash(node, sibling)
    if node != root:
        raise RootMismatchError(root, node)


def verify_consistency(
    old_size: int, new_size: int, old_root: bytes, new_root: bytes, path: Sequence[bytes]
) -> None:
    """Check that a tree only grew: the old one is a prefix of the new one.

    Args:
        old_size: 0 < old_size <= new_size. A proof from the empty tree would be vacuous and is
            refused: compare ``old_root`` with SHA-256 of the empty string instead.
        new_size: number of leaves of the new tree.
        old_root: 32 bytes.
        new_root: 32 bytes.
        path: 32-byte hashes in the order of RFC 9162.

    Raises:
        ProofShapeError: a length does not fit the two sizes.
        RootMismatchError: the path leads to another old or new root.

    Source: RFC 9162, section 2.1.4.2.
    """
    verify_subtree_consistency(0, old_size, new_size, old_root, new_root, path)


def verify_subtree_inclusion(
    leaf_hash: bytes, index: int, start: int, end: int, path: Sequence[bytes], root: bytes
) -> None:
    """Check that a leaf is in the subtree ``[start, end)``: the record is in the shard.

    Args:
        leaf_hash: 32 bytes.
        index: start <= index < end, counted in the whole tree.
        start: first leaf of the subtree, aligned.
        end: one behind its last leaf.
        path: 32-byte hashes, leaf first.
        root: 32 bytes, the root of the subtree.

    Raises:
        ProofShapeError: the range is not an aligned subtree, or a length does not fit.
        RootMismatchError: the path leads to another root.

    Source: draft-ietf-plants-merkle-tree-certs, section 4.3.
    """
    check_subtree(start, end, MAX_SIZE)
    verify_inclusion(leaf_hash, index - start, end - start, path, root)


def verify_subtree_consistency(
    start: int, end: int, size: int, subtree_root: bytes, root: bytes, path: Sequence[bytes]
) -> None:
    """Check that the subtree ``[start, end)`` is part of the tree: the shard is in the corpus.

    Args:
        start: first leaf of the subtree, aligned.
        end: start < end <= size.
        size: number of leaves of the whole tree.
        subtree_root: 32 bytes.
        root: 32 bytes, the root of the whole tree.
        path: 32-byte hashes.

    Raises:
        ProofShapeError: the range is not an aligned subtree, or a length does not fit.
        RootMismatchError: the path leads to another subtree root or root.

    Source: draft-ietf-plants-merkle-tree-certs, section 4.4.2, as its recursive definition.
    """
    check_subtree(start, end, size)
    for hash_name, value in (("subtree root", subtree_root), ("root", root)):
        _check_hash(hash_name, value)
    hashes = iter(path)
    try:
        part, whole = _replay(start, end, size, subtree_root, hashes)
    except StopIteration:
        raise ProofShapeError(f"path is too short: {len(path)} hashes") from None
    if next(hashes, None) is not None:
        raise ProofShapeError(f"path is too long: {len(path)} hashes")
    if part != subtree_root:
        raise RootMismatchError(subtree_root, part)
    if whole != root:
        raise RootMismatchError(root, whole)


def split_point(size: int) -> int:
    """The largest power of two below a size: where RFC 9162 cuts a tree in two.

    Args:
        size: 2 <= size.

    Returns:
        The number of leaves of the left part.
    """
    return 1 << ((size - 1).bit_length() - 1)


def check_index(index: int, size: int) -> None:
    """Refuse an index outside the tree.

    Args:
        index: index of a leaf.
        size: number of leaves.

    Raises:
        ProofShapeError: not 0 <= index < size.
    """
    if not 0 <= index < size:
        raise ProofShapeError(f"index must be in [0, {size}), got {index}")


def check_subtree(start: int, end: int, size: int) -> None:
    """Refuse a range that is not a node of the tree.

    Args:
        start: first leaf.
        end: one behind the last leaf.
        size: number of leaves of the tree.

    Raises:
        ProofShapeError: out of range, empty, or not aligned to the next power of two.
    """
    if not 0 <= start < end <= size <= MAX_SIZE:
        message = f"expected 0 <= start < end <= size < 2^63, got [{start}, {end}) of {size}"
        raise ProofShapeError(message)
    width = 1 << (end - start - 1).bit_length()
    if start % width:
        raise ProofShapeError(
            f"[{start}, {end}) is no subtree: start must be a multiple of {width}"
        )


def _replay(
    start: int, end: int, size: int, known: bytes | None, hashes: Iterator[bytes]
) -> tuple[bytes, bytes]:
    """Hashes of ``[start, end)`` and ``[0, size)``; ``known`` is the former where it is given."""
    if (start, end) == (0, size):
        node = _next_hash(hashes) if known is None else known
        return node, node
    middle = split_point(size)
    if end <= middle:
        part, whole = _replay(start, end, middle, known, hashes)
        return part, node_hash(whole, _next_hash(hashes))
    if middle <= start:
        part, whole = _replay(start - middle, end - middle, size - middle, known, hashes)
        return part, node_hash(_next_hash(hashes), whole)
    # The subtree is cut at the middle, so start is 0 and the left half is whole in both.
    part, whole = _replay(0, end - middle, size - middle, None, hashes)
    left = _next_hash(hashes)
    return node_hash(left, part), node_hash(left, whole)


def _next_hash(hashes: Iterator[bytes]) -> bytes:
    digest = next(hashes)
    _check_hash("path entry", digest)
    return digest


def _check_hash(name: str, digest: bytes) -> None:
    if len(digest) != HASH_SIZE:
        raise ProofShapeError(f"{name} has {len(digest)} bytes, expected {HASH_SIZE}")


def _check_hashes(path: Sequence[bytes], expected: int) -> None:
    if len(path) != expected:
        raise ProofShapeError(f"wrong path length: expected {expected}, got {len(path)}")
    for digest in path:
        _check_hash("path entry", digest)
