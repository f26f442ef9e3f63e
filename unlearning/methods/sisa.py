"""Sharded exact retraining (SISA): delete a record by retraining only what saw it, with the same bits as never having had it.

Records fall into S shards by a hash of their person, and inside a shard into R slices by another: all of a person's records lie together, so that
forgetting one person touches one slice of one shard. Records without a person go by their own id. A shard's model is trained on slice 1,
then on slices 1-2, and so on, with a checkpoint after each; a checkpoint's name is a digest of everything it depends on: the ids
of its slices, the settings, the checkpoint before it. Deleting a record changes the names from its slice on, in its shard only: those are
trained again, all others are found. With steps spread evenly, a record of shard s costs at most 1/S of a training.

A place depends on the person alone, so a deletion moves nobody. That is why it isn't a cluster of like texts that decides: a cluster changes
when one of its records goes, and would move the others. Predictions average the shards' probabilities;
each shard sees 1/S of the data, which costs quality: that is the price of exactness.

Source: Bourtoule et al., "Machine unlearning", IEEE S&P 2021, arXiv 1912.03817.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Train = Callable[[str, str | None, frozenset[bytes], int], str]


@dataclass(frozen=True, slots=True)
class Sisa:
    """Shape of a sharded training."""

    shards: int
    """S ≥ 1."""
    slices: int
    """R ≥ 1."""
    steps: int
    """Steps per slice checkpoint."""
    settings: str = ""
    """Digest of everything else a training depends on: model, optimiser, seed, tokens' texts."""

    def __post_init__(self) -> None:
        if min(self.shards, self.slices, self.steps) < 1:
            raise PlanError(f"expected shards, slices and steps >= 1, got {self}")

    def place(self, person: bytes) -> tuple[int, int]:
        """Shard and slice of a person's records, by the person alone.

        Args:
            person: whoever the records are of, as bytes; or a record's id.
        """
        digest = hashlib.sha256(b"dataworth-sisa-1" + person).digest()
        return int.from_bytes(digest[:8]) % self.shards, int.from_bytes(digest[8:16]) % self.slices

    def slices_of(
        self, records: Iterable[bytes] | Mapping[bytes, bytes], shard: int
    ) -> list[frozenset[bytes]]:
        """Ids of each slice of a shard.

        Args:
            records: all live records; with the person of each, or by their own ids.
            shard: 0 ≤ shard < S.
        """
        parts: list[set[bytes]] = [set() for _ in range(self.slices)]
        for record_id, person in _persons(records).items():
            where, part = self.place(person)
            if where == shard:
                parts[part].add(record_id)
        return [frozenset(part) for part in parts]


@dataclass(frozen=True, slots=True)
class Trained:
    """Outcome of a sharded training."""

    roots: tuple[str, ...]
    """Digest of each shard's final weights; "" for a shard without records."""
    trained_steps: int
    """Steps that were taken now."""
    all_steps: int
    """Steps of a training from nothing."""
    chains: tuple[tuple[str, ...], ...] = ()
    """Names of each shard's checkpoints, one per slice that has records, in order."""

    @property
    def share(self) -> float:
        """Share of a whole training that was spent."""
        return self.trained_steps / self.all_steps if self.all_steps else 0.0


def train_sharded(
    plan: Sisa,
    records: Iterable[bytes] | Mapping[bytes, bytes],
    train: Train,
    known: dict[str, str],
) -> Trained:
    """Train what is not there yet.

    Args:
        plan: the shape.
        records: live records, without the deleted ones; with the person of each, or by their own ids.
        train: (name, name of the checkpoint before or None, ids of the slices so far, steps) → digest of the weights. A pure
            function of its arguments: exactness rests on it.
        known: name → digest of the checkpoints that exist; new ones are added.

    Returns:
        Digests, and what it cost.

    Raises:
        PlanError: without any record.
    """
    persons = _persons(records)
    if not persons:
        raise PlanError("no record is left to train on")
    roots, chains, spent, whole = [], [], 0, 0
    for shard in range(plan.shards):
        seen: frozenset[bytes] = frozenset()
        before: str | None = None
        root, chain = "", []
        for part in plan.slices_of(persons, shard):
            if not part:
                continue
            seen |= part
            name = _name(plan, shard, before, part)
            whole += plan.steps
            if name not in known:
                known[name] = train(name, before, seen, plan.steps)
                spent += plan.steps
            before, root = name, known[name]
            chain.append(name)
        roots.append(root)
        chains.append(tuple(chain))
    return Trained(tuple(roots), spent, whole, tuple(chains))


def _persons(records: Iterable[bytes] | Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    return dict(records) if isinstance(records, Mapping) else {one: one for one in records}


def _name(plan: Sisa, shard: int, before: str | None, part: frozenset[bytes]) -> str:
    head = f"{plan.settings}|{plan.steps}|{shard}|{before or 'none'}|".encode()
    return hashlib.sha256(head + b"".join(sorted(part))).hexdigest()
