"""Erasure and withdrawal requests: `requests/ID.json`, which names records by owner, source or id and holds no text.

An erasure moves `received → suspended → unlearned → audited → shredded | refused`, one ledger entry per step. All pending
erasures of a corpus version are processed as one batch by the unlearning assets. A withdrawal means no future use: past
models stay.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from provenance import jcs, keyed, parse_json, write_atomic

if TYPE_CHECKING:
    import polars as pl

    from pipelines.storage.home import Home

FORMAT = 1
_ARTICLE = "Art. 17(1)({}) GDPR: {}"
BASES = {
    "no-longer-needed": _ARTICLE.format("a", "no longer needed for the purpose"),
    "consent-withdrawn": _ARTICLE.format("b", "consent withdrawn"),
    "objection": _ARTICLE.format("c", "objection"),
    "unlawful": _ARTICLE.format("d", "processed unlawfully"),
    "legal-obligation": _ARTICLE.format("e", "erasure is a legal obligation"),
    "child": _ARTICLE.format("f", "collected from a child for an online service"),
    "other": "outside of Art. 17 GDPR",
}
"""Why somebody may ask to be erased, by the word that the command takes. No free text: it would be printed in a report."""
STATES = ("received", "suspended", "unlearned", "audited", "shredded", "refused")
OPEN_STATES = STATES[:4]


class RequestError(ValueError):
    """A request names nothing, or its file is damaged; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Who wants which records gone."""

    kind: str
    """`erase` or `withdraw`."""
    owner: str
    """Owner whose records are meant."""
    sources: tuple[str, ...] = ()
    """Sources of that owner (for people: one source per person); empty for all."""
    record_ids: tuple[str, ...] = ()
    """Record ids in lower-case hex; empty for all of the sources."""
    reason: str = ""
    """Why, in a word; never a person's name."""
    basis: str = ""
    """Legal basis, a key of `BASES`; empty: not stated."""
    received: str = ""
    """ISO 8601 day."""
    deadline: str = ""
    """ISO 8601 day."""
    state: str = "received"
    """One of `STATES`."""
    number: int = 0
    """Counts requests of the same words: an owner who delivers again after an erasure can ask again."""
    acknowledged: bool = False
    """Whether the files of the inbox that still hold the text may stay: their keeper answers for them."""
    method: str = ""
    """How to forget, a name of `pipelines.erasure.choosing.methods`; empty: as `dataworth.toml` says."""
    note: str = ""
    """Why the request was refused or is still open; never a text."""
    nonce: str = ""
    """What makes the id unguessable (`sealed`), hex; its owner's receipt shows it. Empty in a file of before there was one."""
    format: int = field(default=FORMAT)

    @property
    def id(self) -> str:
        """Name of the request, in the ledger too: a digest of its identity, as receipts recompute it."""
        return sha256(jcs(self.identity())).hexdigest()[:16]

    def sealed(self, key: bytes) -> "Request":
        """The same with its nonce: whoever guesses who asked for what must not find the guess in a published ledger.

        Args:
            key: The home's `k_file`; the same words have the same nonce.
        """
        return dataclasses.replace(self, nonce=keyed(key, b"request/" + jcs(self.words())).hex())

    def identity(self) -> dict[str, Any]:
        """What the id is a digest of: the words, and the nonce."""
        return self.words() | ({"nonce": self.nonce} if self.nonce else {})

    def words(self) -> dict[str, Any]:
        """What the request asks for, without its state."""
        again = {"number": self.number} if self.number else {}
        how = {"method": self.method} if self.method else {}
        return (
            again
            | how
            | {
                "kind": self.kind,
                "owner": self.owner,
                "sources": sorted(self.sources),
                "record_ids": sorted(self.record_ids),
            }
        )

    def overdue(self, today: str) -> bool:
        """Whether its deadline has passed.

        Args:
            today: ISO 8601 day.
        """
        return bool(self.deadline) and today > self.deadline


def load(home: "Home") -> list[Request]:
    """All requests of a home, by id.

    Raises:
        RequestError: A file is not a request.
    """
    found = []
    for path in sorted(home.requests.glob("*.json")):
        try:
            body = parse_json(path.read_bytes())
            body |= {name: tuple(body.get(name, ())) for name in ("sources", "record_ids")}
            request = Request(**body)
        except (ValueError, TypeError, AttributeError) as error:
            raise RequestError(
                f"request {path.name} cannot be read ({error}); remove it or write it again with dataworth erase"
            ) from None
        if request.basis and request.basis not in BASES:
            raise RequestError(
                f"request {path.name} has the legal basis {request.basis!r}; known: {', '.join(BASES)}"
            )
        if request.format != FORMAT or request.state not in STATES:
            raise RequestError(
                f"request {path.name} has format {request.format} and state {request.state!r}, which this version does not know"
            )
        found.append(request)
    return sorted(found, key=lambda request: request.id)


def save(home: "Home", request: Request) -> None:
    """Write a request's file."""
    body = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(request).items()
    }
    write_atomic(
        home.requests / f"{request.id}.json", json.dumps(body, indent=1, sort_keys=True).encode()
    )


def same_words(home: "Home", request: Request) -> Request | None:
    """The request of a home that asks for the same, whatever its state, with a nonce or without."""
    return next((other for other in load(home) if other.words() == request.words()), None)


def pending(home: "Home") -> list[Request]:
    """Erasures that are not finished."""
    return [
        request
        for request in load(home)
        if request.kind == "erase" and request.state in OPEN_STATES
    ]


def advance(home: "Home", request: Request, state: str, note: str = "") -> None:
    """Move a request forward; never back."""
    current = next((other for other in load(home) if other.id == request.id), request)
    if STATES.index(state) > STATES.index(current.state):
        save(home, dataclasses.replace(current, state=state, note=note))


def annotate(home: "Home", request: Request, note: str) -> None:
    """Say why a request is still open; its state stays."""
    current = next((other for other in load(home) if other.id == request.id), request)
    if current.note != note:
        save(home, dataclasses.replace(current, note=note))


def matching(
    frame: "pl.DataFrame", requests: Sequence[Request], *, required: bool = True
) -> "pl.DataFrame":
    """The records that any of the requests names, in the frame's order.

    Args:
        frame: Live records with `record_id`, `owner`, `source`.
        requests: Requests of one corpus version.
        required: Whether a request that names nothing is an error; False where its records may be gone already.

    Raises:
        RequestError: A request names nothing in this version.
    """
    import polars as pl

    length, kind = len(frame), pl.Boolean
    wanted, whole = (pl.Series([value] * length, dtype=kind) for value in (False, True))
    for request in requests:
        mask = frame["owner"] == request.owner if request.owner else whole
        if request.sources:
            mask &= frame["source"].is_in(list(request.sources))
        if request.record_ids:
            mask &= frame["record_id"].is_in([bytes.fromhex(text) for text in request.record_ids])
        if required and not mask.any():
            raise RequestError(
                f"request {request.id} names no record of this corpus version: check its owner, sources and ids (a stored one: requests/{request.id}.json)"
            )
        wanted |= mask
    return frame.filter(wanted)
