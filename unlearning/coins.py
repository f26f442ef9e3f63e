"""Fair coins that decide which canaries a model is trained on, fixed before the training and checked after it.

The one-run bound (`canaries`) holds if each canary is in or out by a fair coin of its own, thrown without looking at anything. A cut by
place or name is none: whatever else tells the two halves apart (an easier text, an earlier position) would count as a leak. So::

    before   seed = 32 random bytes, kept secret;  publish commitment(seed, ids)
    then     canary i is in  <=>  lowest bit of HMAC-SHA256(seed, "dataworth/coin/" || i) is 1;  train
    after    publish seed: anybody repeats the coins, and the commitment says that neither they nor the canaries were chosen later

Commit once: whoever commits to many seeds and publishes one has thrown no coin either.

Source: Steinke, Nasr, Jagielski, "Privacy auditing with one (1) training run", NeurIPS 2023, arXiv 2305.08846, algorithm 1.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

import numpy as np

from provenance.canonical import jcs
from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SEED_BYTES = 32


def throw_coins(seed: bytes, canaries: Sequence[str]) -> NDArray[np.bool_]:
    """Which canaries are in.

    Args:
        seed: 32 secret random bytes, used for nothing else.
        canaries: ids, each once; the coin of one depends neither on the others nor on the order.

    Returns:
        in_N, one coin per canary.

    Raises:
        PlanError: a seed of another length, no canary, or one that is listed twice.
    """
    _require(seed, canaries)
    heads = [hmac.digest(seed, b"dataworth/coin/" + one.encode(), "sha256")[-1] & 1 for one in canaries]  # fmt: skip
    return np.array(heads, dtype=bool)


def commitment(seed: bytes, canaries: Sequence[str]) -> str:
    """What is published before the training.

    Args:
        seed: 32 secret random bytes.
        canaries: ids, each once.

    Returns:
        SHA-256, hex, of a tag, the seed and the sorted ids; it tells nothing of the coins while the seed is secret.

    Raises:
        PlanError: as `throw_coins`.
    """
    _require(seed, canaries)
    return hashlib.sha256(b"dataworth-coins-1" + seed + jcs(sorted(canaries))).hexdigest()


def checked_coins(seed: bytes, canaries: Sequence[str], committed: str) -> NDArray[np.bool_]:
    """The coins of a seed that was committed to.

    Args:
        seed: the seed, published after the training.
        canaries: ids, each once.
        committed: what was published before it.

    Returns:
        in_N, one coin per canary.

    Raises:
        PlanError: seed or canaries are not those that were committed to, or as `throw_coins`.
    """
    if (found := commitment(seed, canaries)) != committed:
        raise PlanError(
            f"expected the coins that were committed to as {committed[:12]}…, got {found[:12]}…: another seed or other canaries; "
            "a bound from coins that were chosen afterwards says nothing"
        )
    return throw_coins(seed, canaries)


def _require(seed: bytes, canaries: Sequence[str]) -> None:
    if len(seed) != SEED_BYTES:
        raise PlanError(f"expected a seed of {SEED_BYTES} bytes, got {len(seed)}")
    if not canaries or len(set(canaries)) != len(canaries):
        raise PlanError(f"expected canaries, each once, got {len(canaries)} with {len(set(canaries))} ids")  # fmt: skip
