"""The documents of a token folder, read back and checked against what was committed.

    tokens_digest (run.json) -> tokens.json -> digest of every shard -> tokens, ids and owners        recomputed
    corpus root   (run.json) -> roots of the shards, folded as RFC 9162 has it                        recomputed

A leaf of the record tree hides its text behind a salt that the trainer never sees, so that the tokens are the texts of
the leaves is checked where the salts are (the `tokens` asset), and committed to by the digest of tokens.json.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from trainer.errors import DataError
from trainer.tokens import SHARD_LEAVES, pseudonym, read_manifest, read_shard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from trainer.choices import MixtureSpec
    from trainer.shard import Shard


class TokenStore:
    """The documents of a token folder, memory-mapped; every digest is checked on opening."""

    def __init__(self, manifest: dict, digest: str, shards: list[Shard]) -> None:
        """Use `TokenStore.open`."""
        self.digest = digest
        self.corpus_version: str = manifest["corpus_version"]
        self.tokenizer_digest: str = manifest["tokenizer_digest"]
        self.vocab_size: int = manifest["vocab_size"]
        self.end_of_text: int = manifest["end_of_text"]
        self.subtree_roots: list[str] = [entry["subtree_root"] for entry in manifest["shards"]]
        self.size: int = manifest["size"]
        self._shards = shards
        self.lengths_N = np.concatenate(
            [np.empty(0, np.int64), *(s.lengths_N for s in shards)]
        ).astype(np.int64)
        self.live_N = np.flatnonzero(self.lengths_N)
        self._owner_key: str | None = manifest.get("owner_key")
        names = sorted({name for s in shards for name in s.owners if name is not None})
        self.owners: tuple[str, ...] = tuple(names)
        code = {name: position for position, name in enumerate(names)} | {None: -1}
        self.owner_codes_N = np.concatenate(
            [
                np.empty(0, np.int32),
                *(np.array([code[o] for o in s.owners])[s.owner_codes_N] for s in shards),
            ],
        ).astype(np.int32)

    @classmethod
    def open(
        cls, folder: Path, expected_digest: str | None = None, *, verify: bool = True
    ) -> TokenStore:
        """Open a token folder.

        Args:
            folder: where tokens.json and the shards stand.
            expected_digest: hex SHA-256 that tokens.json must have, or None to take what is there.
            verify: recompute every shard's digest (about 1 s per GB); False only right after another check.

        Returns:
            The store.

        Raises:
            DataError: a file is missing, altered, or not the expected one.
        """
        manifest, digest = read_manifest(folder)
        if expected_digest is not None and digest != expected_digest:
            raise DataError(f"tokens.json: expected digest {expected_digest}, got {digest}")
        shards = [read_shard(folder, entry, verify=verify) for entry in manifest["shards"]]
        store = cls(manifest, digest, shards)
        if len(store.lengths_N) != store.size or len(store.live_N) != manifest["live"]:
            raise DataError(
                f"tokens.json: expected {store.size} records, {manifest['live']} of them live; "
                f"got {len(store.lengths_N)} and {len(store.live_N)}",
            )
        return store

    def corpus_root(self) -> str:
        """Hex root of the record tree that the roots of the shards add up to, or "none" where there is no tree.

        Raises:
            DataError: a root that is not 64 hex digits.
        """
        from provenance.merkle import root_of

        if not self.subtree_roots or set(self.subtree_roots) == {"none"}:
            return "none"
        for number, root in enumerate(self.subtree_roots):
            if not re.fullmatch(r"[0-9a-f]{64}", root):
                raise DataError(
                    f"shard {number}: expected a subtree root of 64 hex digits, got {root!r}"
                )
        # Shards are aligned subtrees, so their roots combine like leaves.
        return root_of(bytes.fromhex(root) for root in self.subtree_roots).hex()

    def record_ids(self) -> Iterator[tuple[int, np.ndarray]]:
        """(index of the first, uint8 record ids [n, 32]) shard by shard; zero for a tombstone."""
        for number, shard in enumerate(self._shards):
            yield number * SHARD_LEAVES, shard.ids_N32

    def tokens(self, index: int) -> np.ndarray:
        """Tokens of one record as a uint32 view; empty for a tombstone.

        Raises:
            DataError: no such index.
        """
        shard, row = self._locate(index)
        return shard.values_T[shard.offsets_N1[row] : shard.offsets_N1[row + 1]]

    def record_id(self, index: int) -> bytes:
        """The 32-byte id of one record; zero for a tombstone.

        Raises:
            DataError: no such index.
        """
        shard, row = self._locate(index)
        return shard.ids_N32[row].tobytes()

    def owner_of(self, index: int) -> str | None:
        """The owner of one record, or None where a tombstone has none.

        Raises:
            DataError: no such index.
        """
        shard, row = self._locate(index)
        return shard.owners[shard.owner_codes_N[row]]

    def pseudonym(self, owner: str) -> str:
        """What run.json calls an owner of these documents (`trainer.tokens.pseudonym`)."""
        return pseudonym(self._owner_key, owner)

    def repeats(self, mixture: MixtureSpec) -> dict[str, int]:
        """How often each owner's documents stand in an epoch.

        Args:
            mixture: names owners by pseudonym, or, as older files of run.json do, by id.

        Returns:
            Owner → times, of all owners.

        Raises:
            DataError: the mixture names nobody of these documents, or one owner twice.
        """
        of = {self.pseudonym(owner): owner for owner in self.owners} | {o: o for o in self.owners}
        if unknown := sorted(set(mixture.repeats) - set(of)):
            raise DataError(
                f"mixture.repeats: no owner {unknown[0]!r} in the tokens; take the line out"
            )
        given = [(of[name], times) for name, times in mixture.repeats.items()]
        if len(dict(given)) < len(given):
            raise DataError("mixture.repeats: expected every owner once, got one by id and by pseudonym")  # fmt: skip
        return dict.fromkeys(self.owners, 1) | dict(given)

    def csr(self) -> tuple[np.ndarray, np.ndarray]:
        """All tokens flat: int64 offsets_N1 and uint32 tokens; record i is tokens[offsets[i]:offsets[i + 1]]."""
        flat = [s.values_T[s.offsets_N1[0] : s.offsets_N1[-1]] for s in self._shards]
        offsets_N1 = np.concatenate([[0], np.cumsum(self.lengths_N)]).astype(np.int64)
        return offsets_N1, np.concatenate([np.empty(0, np.uint32), *flat])

    def _locate(self, index: int) -> tuple[Shard, int]:
        if not 0 <= index < self.size:
            raise DataError(f"index: expected 0..{self.size - 1}, got {index}")
        return self._shards[index // SHARD_LEAVES], index % SHARD_LEAVES
