"""Clusters: records that are the same or nearly the same text, valued once and paid once.

Three steps, each deterministic:

1. *Exact.* Records with one fingerprint collapse onto the first of them.
2. *Sketch.* A text becomes the set of its shingles (runs of three normalised tokens), and the set
   a MinHash signature of P numbers. The share of equal positions of two signatures estimates the
   Jaccard similarity J = (shared shingles) / (all shingles) without bias, with standard error at most √(J(1-J)/P).
3. *Join.* Records are taken in their order. One that shares an LSH band with earlier cluster
   leaders is compared with each of them and joins the most similar one, if that similarity is at
   least the threshold (ties: the earlier leader); otherwise it leads a new cluster.

Why leaders and not union-find over similar pairs: union-find chains. A ~ B ~ C ~ … would put texts
with nothing in common into one cluster, and all but the first of them would be paid nothing. Here
every member is verified against its leader, and because 1 - J is a metric any two members are
within 2 (1 - threshold) of each other. It also makes clusters append-only: later records never
change earlier assignments, so a published value stays valid.

Bands: with b bands of r rows a pair is compared with probability 1 - (1 - J^r)^b; b and r are
chosen so that a pair *at* the threshold is missed with probability at most 5 %.

Cost: linear in text; sketches take 4·P bytes per record; comparisons are bounded by the number of
leaders that share a band, so ten thousand edits of one text cost ten thousand comparisons.
What it does not find: paraphrase, translation, letters replaced by look-alikes.

Shapes: N records, P permutations.

Source: Broder, "On the resemblance and containment of documents", 1997; Leskovec, Rajaraman and
Ullman, "Mining of Massive Datasets", section 3.4 (banding). Sketches are computed by `rensa`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from valuation.errors import ClusterError
from valuation.shingles import ODD, mixed, shingle_hashes, token_hashes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

SINGLE, EXACT, NEAR = 0, 1, 2

NUM_PERMUTATIONS = 128
MISS_AT_THRESHOLD = 0.05

_CHUNK_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class Clusters:
    """Who is a copy of whom."""

    cluster_N: NDArray[np.int64]
    """Index of the first record of the cluster (its leader); a leader names itself."""
    kind_N: NDArray[np.int8]
    """SINGLE (0): a leader. EXACT (1): same fingerprint as an earlier record. NEAR (2): similar."""
    similarity_N: NDArray[np.float64]
    """Estimated Jaccard similarity to the leader; 1 for leaders and exact copies of them."""

    @property
    def num_clusters(self) -> int:
        """Number of clusters."""
        return int(np.count_nonzero(self.kind_N == SINGLE))

    @property
    def num_exact(self) -> int:
        """Number of records that repeat an earlier fingerprint."""
        return int(np.count_nonzero(self.kind_N == EXACT))

    @property
    def num_near(self) -> int:
        """Number of records, exact copies apart, that nearly repeat an earlier record."""
        return int(np.count_nonzero(self.kind_N == NEAR))


def duplicate_mass(
    kind_N: NDArray[np.integer],
    tokens_N: NDArray[np.integer],
    owner_N: NDArray[np.integer],
    num_owners: int,
) -> NDArray[np.float64]:
    """What share of each owner's tokens stands in records that repeat an earlier one, of whatever owner.

    Args:
        kind_N: SINGLE, EXACT or NEAR of each record.
        tokens_N: its tokens.
        owner_N: owner code of each record, 0 .. num_owners - 1.
        num_owners: number of owners G.

    Returns:
        [G, 2]: exact and near copies; 0 for an owner without tokens.

    Raises:
        ClusterError: if the arrays don't belong to the same records.
    """
    if not len(kind_N) == len(tokens_N) == len(owner_N):
        raise ClusterError(
            f"expected a kind, a size and an owner per record, got {len(kind_N)}, {len(tokens_N)} and {len(owner_N)}"
        )
    all_G, exact_G, near_G = (
        np.bincount(owner_N, weights=tokens_N * chosen, minlength=num_owners)
        for chosen in (kind_N >= SINGLE, kind_N == EXACT, kind_N == NEAR)
    )
    return np.stack([exact_G, near_G], axis=1) / np.maximum(all_G, 1)[:, None]


def cluster(
    fingerprints_N: Sequence[bytes],
    texts_N: Iterable[str],
    *,
    threshold: float = 0.8,
    seed: int = 0,
    num_permutations: int = NUM_PERMUTATIONS,
) -> Clusters:
    """Find exact and near duplicates among records in a fixed order.

    Args:
        fingerprints_N: N keyed digests of the canonical texts.
        texts_N: the N texts, in the same order; read once, in bounded memory.
        threshold: least estimated Jaccard similarity to the leader, in (0, 1].
        seed: seed of the hash family, 0 .. 2^64 - 1; same seed, same clusters.
        num_permutations: P, at least 16.

    Returns:
        Cluster, kind and similarity of each record.

    Raises:
        ClusterError: for a threshold or size out of range, or if the lengths differ.
    """
    first_of = _first_of(fingerprints_N)
    repeats_N = np.array(first_of, dtype=np.int64) != np.arange(len(first_of))
    signatures_NP, filled_N = minhash(
        texts_N, seed=seed, num_permutations=num_permutations, skip_N=repeats_N
    )
    num_bands, num_rows = band_shape(threshold, num_permutations)
    cluster_N = np.arange(len(fingerprints_N), dtype=np.int64)
    kind_N = np.zeros(len(fingerprints_N), dtype=np.int8)
    similarity_N = np.ones(len(fingerprints_N))
    buckets_NB = _shared_buckets(signatures_NP, num_bands, num_rows, filled_N)
    leaders: dict[int, list[int]] = {}
    for index, first in enumerate(first_of):
        if first != index:
            cluster_N[index] = cluster_N[first]
            similarity_N[index] = similarity_N[first]
            kind_N[index] = EXACT
            continue
        buckets = buckets_NB[index][buckets_NB[index] >= 0].tolist()
        found = sorted({leader for bucket in buckets for leader in leaders.get(bucket, ())})
        if found:
            equal = (signatures_NP[found] == signatures_NP[index]).mean(axis=1)
            best = int(np.argmax(equal))  # argmax takes the first maximum: the earlier leader
            if equal[best] >= threshold:
                cluster_N[index] = found[best]
                similarity_N[index] = equal[best]
                kind_N[index] = NEAR
                continue
        for bucket in buckets:
            leaders.setdefault(bucket, []).append(index)
    return Clusters(cluster_N, kind_N, similarity_N)


def minhash(
    texts_N: Iterable[str],
    *,
    seed: int = 0,
    num_permutations: int = NUM_PERMUTATIONS,
    skip_N: NDArray[np.bool_] | None = None,
) -> tuple[NDArray[np.uint32], NDArray[np.bool_]]:
    """MinHash signatures of the shingle sets of texts.

    Args:
        texts_N: N texts, read once and in chunks.
        seed: seed of the hash family, 0 .. 2^64 - 1.
        num_permutations: P, at least 16.
        skip_N: texts that need no sketch (exact copies); their rows are marked unfilled.

    Returns:
        ``signatures_NP`` and ``filled_N`` (False where a text has no token or was skipped).

    Raises:
        ClusterError: for a size or seed out of range, or texts that don't match `skip_N`.
    """
    import rensa

    if num_permutations < 16:
        raise ClusterError(f"num_permutations: expected at least 16, got {num_permutations}")
    if not 0 <= seed < 2**64:
        raise ClusterError(f"seed: expected 0 .. 2^64 - 1, got {seed}")
    blocks: list[NDArray[np.uint32]] = [np.zeros((0, num_permutations), np.uint32)]
    filled: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    start = 0
    for chunk in _chunks(texts_N):
        texts = chunk
        if skip_N is not None:
            skip = skip_N[start : start + len(chunk)].tolist()
            if len(skip) != len(chunk):
                raise ClusterError(f"texts: expected {len(skip_N)}, one per fingerprint, got more")
            texts = ["" if skipped else text for text, skipped in zip(chunk, skip, strict=True)]
        start += len(chunk)
        shingles_H, offsets = shingle_hashes(*token_hashes(texts))
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            shingles_H, offsets.astype(np.uint64), num_permutations, seed
        )
        blocks.append(np.array(matrix.to_rows(), dtype=np.uint32).reshape(-1, num_permutations))
        filled.append(np.diff(offsets) > 0)
    if skip_N is not None and start != len(skip_N):
        raise ClusterError(f"texts: expected {len(skip_N)}, one per fingerprint, got {start}")
    return np.concatenate(blocks), np.concatenate(filled)


def band_shape(threshold: float, num_permutations: int) -> tuple[int, int]:
    """Number of bands and rows per band for a threshold.

    Args:
        threshold: similarity in (0, 1] at which a pair should still be compared.
        num_permutations: P.

    Returns:
        (bands b, rows r) with b·r <= P and the largest r for which a pair at the threshold is
        missed with probability (1 - J^r)^b of at most 5 %: as few needless comparisons as that
        allows.

    Raises:
        ClusterError: for a threshold outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ClusterError(f"threshold: expected a similarity in (0, 1], got {threshold}")
    for rows in range(num_permutations, 1, -1):
        bands = num_permutations // rows
        if (1 - threshold**rows) ** bands <= MISS_AT_THRESHOLD:
            return bands, rows
    return num_permutations, 1


def _shared_buckets(
    signatures_NP: NDArray[np.uint32],
    num_bands: int,
    num_rows: int,
    filled_N: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Number of the bucket of each record in each band, or -1 where nobody else is in it.

    A bucket is a 64-bit hash of the band. Two bands with one hash are merely compared for nothing.
    Empty sketches stand in no bucket: they equal each other and say nothing.
    """
    buckets_NB = np.full((len(signatures_NP), num_bands), -1, dtype=np.int64)
    rows = np.flatnonzero(filled_N)
    used = 0
    for band in range(num_bands):
        hash_R = np.zeros(len(rows), dtype=np.uint64)
        for column in range(band * num_rows, (band + 1) * num_rows):
            hash_R = mixed(hash_R * ODD + signatures_NP[rows, column] + ODD)
        _, bucket_R, count_U = np.unique(hash_R, return_inverse=True, return_counts=True)
        shared_R = count_U[bucket_R] > 1
        buckets_NB[rows[shared_R], band] = bucket_R[shared_R] + used
        used += len(count_U)
    return buckets_NB


def _first_of(fingerprints_N: Sequence[bytes]) -> list[int]:
    """For each record the index of the first record with the same fingerprint."""
    seen: dict[bytes, int] = {}
    return [seen.setdefault(bytes(digest), index) for index, digest in enumerate(fingerprints_N)]


def _chunks(texts_N: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(texts_N)
    while chunk := list(islice(iterator, _CHUNK_TEXTS)):
        yield chunk
