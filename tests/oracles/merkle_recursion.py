"""The definitions of RFC 9162 and of the sparse tree, word by word and as slow as they read.

These are oracles: nothing here shares code with the package. Leaves are leaf *data*.
"""

from __future__ import annotations

from hashlib import sha256


def split(n: int) -> int:
    """The largest power of two smaller than n, found by doubling."""
    k = 1
    while 2 * k < n:
        k *= 2
    return k


def root(leaves: list[bytes]) -> bytes:
    """MTH of RFC 9162, section 2.1.1."""
    if not leaves:
        return sha256(b"").digest()
    if len(leaves) == 1:
        return sha256(b"\x00" + leaves[0]).digest()
    k = split(len(leaves))
    return sha256(b"\x01" + root(leaves[:k]) + root(leaves[k:])).digest()


def inclusion(m: int, leaves: list[bytes]) -> list[bytes]:
    """PATH(m, D_n) of RFC 9162, section 2.1.3.1."""
    if len(leaves) == 1:
        return []
    k = split(len(leaves))
    if m < k:
        return [*inclusion(m, leaves[:k]), root(leaves[k:])]
    return [*inclusion(m - k, leaves[k:]), root(leaves[:k])]


def consistency(m: int, leaves: list[bytes]) -> list[bytes]:
    """PROOF(m, D_n) of RFC 9162, section 2.1.4.1."""
    return subproof(m, leaves, known=True)


def subproof(m: int, leaves: list[bytes], *, known: bool) -> list[bytes]:
    """SUBPROOF(m, D_n, b) of RFC 9162, section 2.1.4.1."""
    if m == len(leaves):
        return [] if known else [root(leaves)]
    k = split(len(leaves))
    if m <= k:
        return [*subproof(m, leaves[:k], known=known), root(leaves[k:])]
    return [*subproof(m - k, leaves[k:], known=False), root(leaves[:k])]


def subtree(start: int, end: int, leaves: list[bytes]) -> list[bytes]:
    """SUBTREE_PROOF(start, end, D_n) of draft-ietf-plants-merkle-tree-certs, section 4.4.1."""
    return subtree_subproof(start, end, leaves, known=True)


def subtree_subproof(start: int, end: int, leaves: list[bytes], *, known: bool) -> list[bytes]:
    """SUBTREE_SUBPROOF(start, end, D_n, b) of the same section."""
    n = len(leaves)
    if (start, end) == (0, n):
        return [] if known else [root(leaves)]
    k = split(n)
    if end <= k:
        return [*subtree_subproof(start, end, leaves[:k], known=known), root(leaves[k:])]
    if k <= start:
        rest = subtree_subproof(start - k, end - k, leaves[k:], known=known)
        return [*rest, root(leaves[:k])]
    return [*subtree_subproof(0, end - k, leaves[k:], known=False), root(leaves[:k])]


def inclusion_root(leaf: bytes, index: int, size: int, path: list[bytes]) -> bytes | None:
    """The loop of RFC 9162, section 2.1.3.2, with its variable names; None for a bad length."""
    if index >= size:
        return None
    fn, sn, r = index, size - 1, leaf
    for p in path:
        if sn == 0:
            return None
        if fn % 2 == 1 or fn == sn:
            r = sha256(b"\x01" + p + r).digest()
            while fn % 2 == 0 and fn != 0:
                fn >>= 1
                sn >>= 1
        else:
            r = sha256(b"\x01" + r + p).digest()
        fn >>= 1
        sn >>= 1
    return r if sn == 0 else None


def sparse_root(keys: list[bytes], depth: int = 0) -> bytes:
    """The compact sparse tree by its definition: empty, one leaf, or the two halves."""
    if not keys:
        return bytes(32)
    if len(keys) == 1:
        return sha256(b"\x02" + keys[0]).digest()
    halves: tuple[list[bytes], list[bytes]] = ([], [])
    for key in keys:
        halves[int(f"{int.from_bytes(key, 'big'):0256b}"[depth])].append(key)
    left, right = (sparse_root(half, depth + 1) for half in halves)
    return sha256(b"\x03" + left + right).digest()


def sum_root(leaves: list[tuple[bytes, int]]) -> tuple[bytes, int]:
    """The sum tree by its definition: both sums stand inside the hash."""
    if len(leaves) == 1:
        label, amount = leaves[0]
        return sha256(b"\x04" + amount.to_bytes(8, "big") + label).digest(), amount
    k = split(len(leaves))
    (left, a), (right, b) = sum_root(leaves[:k]), sum_root(leaves[k:])
    inner = a.to_bytes(8, "big") + left + b.to_bytes(8, "big") + right
    return sha256(b"\x05" + inner).digest(), a + b
