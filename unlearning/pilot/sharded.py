"""A released model of shards, and the exact erasure of people who all stand in one of them.

::

    original   mean of S models, each trained on the people of one shard (`methods.sisa`: a place follows from the person alone)
    sharded    the same, with the forgotten people's shard trained again without them; the other constituents are the original's
    gold-N     S models of another seed, trained without the forgotten people

All take the steps of one training together. The forgotten people are the first of shard 0: a request whose people stand in every
shard touches every shard, and is a whole training.

Pages (`people.make_pages`) hold lines of retained people of one shard each, and lie there: a page across shards would teach one model
what another's people are, and erasing them would touch both.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.ensemble import Constituent, write_ensemble
from unlearning.methods.sisa import Sisa, train_sharded
from unlearning.pilot.models import Study, kept_run, prepare, write_study_tokens
from unlearning.pilot.people import POPULATIONS, make_pages, make_people

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from unlearning.methods.sisa import Trained
    from unlearning.people import Record
    from unlearning.pilot.profiles import Profile

METHOD = "sharded"


@dataclass(frozen=True, slots=True)
class ShardedStudy(Study):
    """A study whose models are ensembles; its audits are those of any study (`audits.audits_of`)."""

    pages: tuple[tuple[Record, str], ...] = ()
    """Pages, each with a person of its shard."""
    shards: int = 2

    def original(self) -> Path:
        """The ensemble of everybody."""
        return self.ensemble("original", 0)[0]

    def gold(self, seed: int) -> Path:
        """An ensemble without the forgotten people, of a seed that no other model has."""
        return self.ensemble(f"gold-{seed}", seed + 1, self.forgotten)[0]

    def unlearned(self, method: str) -> Path:
        """The original after its touched shards were trained again.

        Args:
            method: `METHOD`.

        Raises:
            ValueError: any other method changes one model.
        """
        if method != METHOD:
            raise ValueError(f"expected {METHOD!r}, got {method!r}: other methods change one model")
        return self.ensemble(METHOD, 0, self.forgotten)[0]

    @property
    def forgotten(self) -> frozenset[str]:
        """Subjects of the forgotten people."""
        return frozenset(record.subject for record in self.people["forgotten"])

    def shape(self, seed: int) -> Sisa:
        """Shards, one slice each, of a seed's ensemble."""
        profile = self.profile
        return Sisa(self.shards, 1, profile.steps // self.shards, f"{profile}|{seed}")

    def ensemble(
        self, name: str, seed: int, without: frozenset[str] = frozenset()
    ) -> tuple[Path, Trained]:
        """Train what isn't there of an ensemble, and describe it.

        Args:
            name: folder of the ensemble.
            seed: of all its constituents.
            without: subjects whom no constituent may see.

        Returns:
            The ensemble's folder; digests of the constituents, and the share of a training that was spent on this call.
        """
        held = [(r, r.subject) for p in ("retained", "forgotten") for r in self.people[p]]
        held += self.pages
        everything = [r.record_id for r, _ in held]
        persons = {
            bytes.fromhex(r.record_id): person.encode()
            for r, person in held
            if person not in without
        }

        def train(made: str, before: str | None, seen: frozenset[bytes], steps: int) -> str:
            from trainer.checkpoint import verify
            from trainer.spec import Excluded

            assert before is None  # one slice
            data = "".join(
                f"{one}\n" for one in everything if bytes.fromhex(one) not in seen
            ).encode()
            (self.folder / f"{made}.txt").write_bytes(data)
            excluded = Excluded(file=f"../{made}.txt", digest=hashlib.sha256(data).hexdigest())
            spec = self.run_spec(f"shard-{made[:12]}", steps=steps, seed=seed, excluded=excluded)
            return verify(kept_run(self.folder / f"shard-{made}", spec)).root

        done = train_sharded(self.shape(seed), persons, train, self._known())
        folder = self.folder / name
        listed = [
            Constituent(shard, f"../shard-{chain[-1]}/step-{self.shape(seed).steps}", root)
            for shard, (chain, root) in enumerate(zip(done.chains, done.roots, strict=True))
        ]
        write_ensemble(folder, listed)
        return folder, done

    def never_held(self, subject: str, folder: Path) -> ShardedStudy:
        """The same study over tokens in which a person's records never stood: what forgetting the person exactly is held against.

        Args:
            subject: a forgotten person.
            folder: of the other study, made if needed.

        Raises:
            ValueError: a person whom pages may name.
        """
        if subject not in self.forgotten:
            raise ValueError("expected a forgotten person: pages may name a retained one")
        people = {
            population: [record for record in records if record.subject != subject]
            for population, records in self.people.items()
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_bytes((self.folder / "tokenizer.json").read_bytes())
        pages = [page for page, _ in self.pages]
        digest = write_study_tokens(folder, people["retained"] + people["forgotten"] + pages)
        return dataclasses.replace(self, folder=folder, people=people, tokens_digest=digest)

    def _known(self) -> dict[str, str]:
        """Constituents that are there: name → digest."""
        from trainer.checkpoint import newest, verify

        found = {}
        for done in self.folder.glob("shard-*/done"):
            checkpoint = newest(done.parent)
            assert checkpoint is not None
            found[done.parent.name.removeprefix("shard-")] = verify(checkpoint).root
        return found


def prepare_sharded(folder: Path, profile: Profile, shards: int = 2) -> ShardedStudy:
    """People, tokenizer and tokens of a sharded study.

    Args:
        folder: folder of the study, made if needed.
        profile: its numbers.
        shards: S >= 1.

    Returns:
        The study, without any model; its forgotten people all stand in shard 0.

    Raises:
        ValueError: if shard 0 holds fewer people than are to be forgotten.
    """
    counts = dict(profile.counts)
    counts["retained"] += counts.pop("forgotten")
    drawn = make_people(counts, np.random.default_rng(profile.seed))
    place = Sisa(shards, 1, 1).place
    inside = [s for s in subjects(drawn["retained"]) if place(s.encode())[0] == 0]
    chosen = set(inside[: profile.counts["forgotten"]])
    if len(chosen) < profile.counts["forgotten"]:
        raise ValueError(
            f"expected {profile.counts['forgotten']} people in shard 0, got {len(chosen)}"
        )
    people: dict[str, list[Record]] = {population: [] for population in POPULATIONS} | drawn
    people["forgotten"] = [r for r in drawn["retained"] if r.subject in chosen]
    people["retained"] = [r for r in drawn["retained"] if r.subject not in chosen]
    pages: list[tuple[Record, str]] = []
    for shard in range(shards):
        own = [r for r in people["retained"] if place(r.subject.encode())[0] == shard]
        drawn_pages = make_pages(own, profile.pages // shards, np.random.default_rng([profile.seed, 1, shard]))  # fmt: skip
        pages += [
            (dataclasses.replace(page, record_id=f"{2**128 - 1:032x}{len(pages) + n:032x}"), own[0].subject)
            for n, page in enumerate(drawn_pages)
        ]  # fmt: skip
    made = prepare(folder, profile, people=people, pages=[page for page, _ in pages])
    return ShardedStudy(
        made.folder, profile, people, made.vocab_size, made.tokens_digest, pages=tuple(pages), shards=shards
    )  # fmt: skip


def subjects(records: Iterable[Record]) -> list[str]:
    """Whom records are of, each once, in order."""
    return list(dict.fromkeys(record.subject for record in records))
