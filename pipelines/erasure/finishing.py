"""From `audited` to `shredded`: the order of destruction, with a journal, so that a process killed anywhere is carried on.

1. `finish.json` is written into every batch folder: which requests, which model takes the original's place;
2. the contents go on the suppression list, and HEAD's version becomes the one that later versions build on;
3. every store of `stores` gives the records up;
4. the whole home is searched; a finding stops here, names the files, and leaves the request `audited`;
5. the journal says `searched`; the inventory is written beside the requests;
6. the sealed text, its key and the lists of record ids are overwritten and removed;
7. one ledger entry per request, and the state `shredded`;
8. the batch folder goes.

Each step can be repeated: a run that finds a journal begins again at 2, or at 6 if the search had passed.

*Which model is released.* The unlearned one if its audit says PASS, otherwise the exact retrain: FAIL, INVALID and
INCONCLUSIVE are no proof that a person is forgotten. *Deadlines.* From the day after its deadline a group is finished whatever its
state and whatever lies in a user's inbox; without an audit the original goes all the same and the next run trains anew.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.erasure.batches import JOURNAL, SEALED, Group, groups, sealed_lines, today
from pipelines.erasure.deliveries import holding
from pipelines.erasure.needles import needles
from pipelines.erasure.stores import STORES, Scope, left, outside, shred
from pipelines.requests import OPEN_STATES, STATES, Request, advance, annotate
from pipelines.steps.ledger import corpus_keys, enter
from provenance import canonical_bytes, fingerprint, jcs, keyed, write_atomic

if TYPE_CHECKING:
    from pipelines.site import Site

Hook = Callable[[str], None]
"""Called with the name of each step that became durable; tests kill the process there."""
EXACT, UNLEARNED, NONE = "exact", "unlearned", "none yet"


class ErasureError(RuntimeError):
    """Something of the erased records is left, or a request cannot be finished; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What was finished."""

    requests: tuple[str, ...]
    records: int
    release: str
    """Which model takes the original's place: `unlearned`, `exact`, or `none yet` (the next run trains it)."""
    stores: Mapping[str, int]
    """Things removed, by store."""


def carry_on(
    site: "Site", *, asked: Sequence[str] | None = None, hook: Hook | None = None
) -> list[Finished]:
    """Finish every group of requests whose time has come.

    Args:
        site: The open home.
        asked: Requests that somebody asked to finish now; an empty list means all of them, None means nobody asked.
        hook: Called after each durable step.

    Returns:
        What was finished.

    Raises:
        ErasureError: Something is left in the home; the request stays open.
    """
    done = []
    for group in groups(site):
        waits = waiting(site, group, asked=asked)
        if waits:
            for request in group.requests:
                if request.state in OPEN_STATES:
                    annotate(site.home, request, waits)
        else:
            done.append(finish(site, group, hook=hook))
    return done


def waiting(site: "Site", group: Group, *, asked: Sequence[str] | None = None) -> str:
    """Why a group is not finished now; empty if it is due.

    Args:
        site: The open home.
        group: The group.
        asked: As in `carry_on`.
    """
    if group.begun or group.overdue(today()):
        return ""
    if not group.audited:
        return "not audited yet: dataworth run"
    wanted = site.config.erasure.finish == "run" or (
        asked is not None and (not asked or bool({one.id for one in group.requests} & set(asked)))
    )
    if not wanted:
        return "audited; kept for review until dataworth erase --finish, or its deadline"
    return _in_the_inbox(site, group)


def finish(site: "Site", group: Group, *, hook: Hook | None = None) -> Finished:
    """Destroy everything of a group, prove it, and say so in the ledger.

    Args:
        site: The open home.
        group: A group that is due.
        hook: Called after each durable step.

    Raises:
        ErasureError: Something is left.
    """
    mark = hook or (lambda _: None)
    with site.home.lock("corpus"):
        journal = _journal(site, group)
        mark("journal")
        if journal["stage"] != "searched":
            journal |= {"stores": _remove(site, group, journal, mark), "stage": "searched"}
            _write_journal(group, journal)
            mark("searched")
        _write_inventory(site, group, journal)
        for folder in group.folders:
            for name in ("key", *SEALED, "excluded.txt", "held_out.txt"):
                shred(folder / name)
                mark(f"shred {name}")
        _enter_shredded(site, group, journal)
        mark("ledger")
        for request in group.requests:
            advance(site.home, request, "shredded")
        mark("state")
        for folder in group.folders:
            shutil.rmtree(folder)
    return Finished(
        tuple(one.id for one in group.requests),
        journal["records"],
        journal["release"],
        journal["stores"],
    )


def _journal(site: "Site", group: Group) -> dict[str, Any]:
    for folder in group.folders:
        if (folder / JOURNAL).exists():
            found: dict[str, Any] = json.loads((folder / JOURNAL).read_text())
            return found
    release, keep = _release(site, group)
    journal = {
        "format": 1, "stage": "begun", "release": release, "keep": sorted(keep), "records": len(group.record_ids),
        "versions": sorted(_versions_with(site, group.record_ids)), "inbox": len(_files_in_the_inbox(site, group)), "stores": {},
    }  # fmt: skip
    _write_journal(group, journal)
    return journal


def _write_journal(group: Group, journal: Mapping[str, Any]) -> None:
    for folder in group.folders:
        write_atomic(folder / JOURNAL, json.dumps(journal, sort_keys=True).encode(), 0o600)


def _release(site: "Site", group: Group) -> tuple[str, set[str]]:
    """Which model takes the original's place, and the roots that may stay."""
    from pipelines.results import latest

    audit, gold, unlearned = (
        latest(site.home.results, name)
        for name in ("robustness_audit", "gold_checkpoint", "unlearned_checkpoint")
    )
    mine = {folder.name for folder in group.folders}
    if not (audit and gold and unlearned) or audit.values.get("batch") not in mine:
        return NONE, set()
    roots = {one["root"] for one in gold.values.get("golds", ())}
    shards = [*unlearned.values.get("constituents", ()), *gold.values.get("constituents", ())]
    roots |= {one["root"] for one in shards}
    if audit["verdict"] == "PASS" and unlearned.values.get("root"):
        return UNLEARNED, {*roots, unlearned["root"]}
    return EXACT, roots


def _remove(site: "Site", group: Group, journal: Mapping[str, Any], mark: Hook) -> dict[str, int]:
    scope = _scope(site, group, journal)
    _suppress(site, group, scope.fingerprints)
    mark("suppressed")
    head = _leave_head(site, scope.ids)
    write_atomic(site.home.path / "LINEAGE", head.encode())
    mark("lineage")
    removed = {}
    for name, store in STORES.items():
        removed[name] = store(scope)
        mark(name)
    found = left(scope)
    if found:
        raise ErasureError(
            f"{len(found)} files of the home still hold erased records, the first are {', '.join(found[:3])}; the request stays "
            "open: remove them, then dataworth run"
        )
    return removed


def _scope(site: "Site", group: Group, journal: Mapping[str, Any]) -> Scope:
    from pipelines.storage.tokens import load_tokenizer

    marks = _contents(site, group)
    others = _delivered_by_others(site, group.record_ids)
    texts = tuple(text for mark, (_, text) in marks.items() if mark not in others)
    path = site.home.tokenizer_path
    runs = load_tokenizer(path).encode(texts) if path.exists() and texts else []
    return Scope(
        site, group.record_ids, texts, frozenset(marks) - others, needles(texts, runs, group.record_ids),
        frozenset(journal["versions"]), frozenset(journal["keep"]),
    )  # fmt: skip


def _contents(site: "Site", group: Group) -> dict[bytes, tuple[str, str]]:
    """Owner and text of the sealed records, by fingerprint."""
    key = corpus_keys(site).k_fp
    return {
        fingerprint(key, canonical_bytes(line["text"])): (
            line["subject"].split("/", 1)[0],
            line["text"],
        )
        for folder in group.folders
        for line in sealed_lines(folder)
    }


def _delivered_by_others(site: "Site", gone: frozenset[bytes]) -> frozenset[bytes]:
    """Contents of HEAD that are not of the erased records: the same text, delivered by somebody who did not ask."""
    from pipelines.storage.versions import Versions

    versions = Versions(site.home, corpus_keys(site))
    head = versions.head()
    if head is None:
        return frozenset()
    frame = versions.read(head, ["record_id", "fingerprint"])
    return frozenset(frame.filter(~frame["record_id"].is_in(list(gone)))["fingerprint"].to_list())


def _suppress(site: "Site", group: Group, erased: frozenset[bytes]) -> None:
    """Nothing of it comes back; a text that another owner delivered too is refused from this one only."""
    from pipelines.storage.suppression import SuppressionList

    listed = SuppressionList(site.home.suppression_path, corpus_keys(site))
    listed.add_erased(erased)
    for mark, (owner, _) in _contents(site, group).items():
        if mark not in erased:
            listed.add_withdrawn(owner, [mark])


def _leave_head(site: "Site", gone: frozenset[bytes]) -> str:
    """HEAD without the records, which it lacks since their suspension unless somebody moved it back."""
    from pipelines.storage.versions import Versions

    versions = Versions(site.home, corpus_keys(site))
    head = versions.head()
    if head is None:
        raise ErasureError("this home has no corpus version in force: dataworth run")
    live = gone & set(versions.read(head, ["record_id"])["record_id"].to_list())
    if live:
        fresh = versions.tombstone(head, live)
        versions.move_head(fresh, expected=head)
        return fresh
    return head


def _versions_with(site: "Site", gone: frozenset[bytes]) -> set[str]:
    from pipelines.storage.versions import Versions

    versions = Versions(site.home, corpus_keys(site))
    return {
        version
        for version in versions.ids()
        if gone & set(versions.read(version, ["record_id"])["record_id"].to_list())
    }


def _files_in_the_inbox(site: "Site", group: Group) -> list[str]:
    if site.inbox.resolve() == site.home.inbox.resolve():
        return []
    erased = frozenset(_contents(site, group)) - _delivered_by_others(site, group.record_ids)
    return holding(site, erased)


def _in_the_inbox(site: "Site", group: Group) -> str:
    if all(one.acknowledged for one in group.requests if one.state in OPEN_STATES):
        return ""
    found = _files_in_the_inbox(site, group)
    if not found:
        return ""
    shown = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
    return f"these files of the inbox still hold the text, remove them or --acknowledge: {shown}"


def inventory_path(site: "Site", request: str) -> Path:
    """Where the inventory of derivatives of a request lies."""
    return site.home.erasure / f"{request}.derivatives.json"


def _write_inventory(site: "Site", group: Group, journal: Mapping[str, Any]) -> None:
    for request in group.requests:
        body = _inventory(site, request, journal)
        write_atomic(inventory_path(site, request.id), jcs(body))


def _inventory(site: "Site", request: Request, journal: Mapping[str, Any]) -> dict[str, Any]:
    """Each store and its state, as it is committed to."""
    stores = [
        {"store": name, "removed": number, "state": "searched: nothing left"}
        for name, number in journal["stores"].items()
    ]
    stores.append(
        {"store": "sealed text and its key", "removed": 2, "state": "overwritten and removed"}
    )
    stores += [
        {"store": f"replaced home {name}", "removed": 0, "state": "out of reach: remove it"}
        for name in outside(site)
    ]
    stores.append(
        {
            "store": "files of the inbox",
            "removed": 0,
            "state": f"{journal['inbox']} still hold the text",
        }
    )
    stores.append(
        {
            "store": "backups outside of the home",
            "removed": 0,
            "state": "restore applies this erasure again",
        }
    )
    return {"format": 1, "request": request.id, "release": journal["release"], "stores": stores}


def _enter_shredded(site: "Site", group: Group, journal: Mapping[str, Any]) -> None:
    for request in group.requests:
        digest = sha256(jcs(_inventory(site, request, journal))).hexdigest()
        more = {"release": journal["release"], "derivatives": digest}
        if STATES.index(request.state) < STATES.index("audited"):
            more["by"] = "deadline"  # nobody unlearned or audited anything, so no entry says so
        enter_state(site, request, "shredded", **more)


def enter_state(site: "Site", request: Request, state: str, **more: Any) -> int:
    """The ledger entry of one step of a request.

    Args:
        site: The open home.
        request: The request.
        state: One of `requests.STATES`.
        **more: What else the entry says: digests and words, never texts.
    """
    # Keyed: whoever can guess who asked for what could otherwise confirm it from the published ledger.
    digest = keyed(corpus_keys(site).k_file, jcs(request.identity())).hex()
    return enter(site, "erasure", {"request": request.id, "state": state, "digest": digest, **more})
