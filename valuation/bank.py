"""The bank: which coalitions a proxy run trains, and the losses that each of them left.

A coalition is a bitmask over groups of owners: bit i stands for group i. Its *bank file*,
``bank/COALITION.npz``, holds the summed loss of every target record, so that

    V(S) = - sum_q nll_q / sum_q tokens_q          nats per target token

comes with its parts per target record, which an interval over records needs. A run may name *other* targets: every trained
model is measured on them as well, each by itself, and their columns follow the first target's,
so that a second buyer costs no second training. A run may name further *seeds*: every coalition is trained under each of them, with
initial weights and order of its own, and ``bank/COALITION-SEED.npz`` holds what that left (`valuation.seeds` tells what the
spread says). A file is written
atomically and carries its *key*, the digest of everything that the losses depend on: a bank of
other data, settings or seed is never mistaken for this one's. result.json names every utility and
the digest of the losses behind it, and is what a ledger commits to.

This module reads and writes; `valuation.proxy` trains.

Legend: C coalitions, Q target records.
"""

# ruff: noqa: N802 - shape suffixes in attribute names (STYLE 2)
from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from provenance.canonical import jcs, parse_json
from valuation.errors import ProxyError, UtilityError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

BANK_FORMAT = 1
ORDER = 2
"""How a training's records are ordered (`valuation.retraining`): 2 by content. 1, by leaf index, is no longer made: copies that nobody trains on moved it."""
MAX_GROUPS = 53  # a coalition is an integer in committed JSON, exact up to 2**53 everywhere
RESULT_FILE = "result.json"
_EXTRA = {
    "groups", "coalitions", "target", "target_digest", "jobs", "epochs", "lots", "backend", "others", "order", "seeds",
    "share", "first",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyPlan:
    """What to train: groups, coalitions and where the target stands; read from `run.config.extra`."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """(id, owners) of each group; group i is bit i of a coalition."""
    coalitions: tuple[int, ...]
    """Bitmasks, ascending, each once."""
    target: Path
    """Token folder of the target records."""
    target_digest: str | None = None
    """Digest that the target's tokens.json must have, or None."""
    jobs: int = 1
    """Trainings at the same time."""
    backend: str = "processes"
    """Where they run: on this machine, or on a cluster (`valuation.workers`); not in the key, no bit depends on it."""
    epochs: int = 1
    """Passes over a coalition's records."""
    lots: tuple[Path, str] | None = None
    """A file of one int64 per record, its group or -1, and the SHA-256 it must have; None = groups are owners."""
    others: tuple[tuple[Path, str], ...] = ()
    """Token folders of further targets and the digests that their tokens.json must have."""
    order: int = ORDER
    """Version of the order of trainings; only the present one can be trained."""
    share: tuple[int, int] | None = None
    """(a, b): a coalition trains on a of each b of its tokens; None = as much as `run.steps` allow all groups together."""
    first: int | None = None
    """Groups that the bank holds all coalitions of; those behind them came later, and what wasn't trained is predicted (`valuation.completion`)."""
    seeds: tuple[int, ...] = ()
    """Further seeds beside the run's own; every coalition is trained under each of them as well."""

    def __post_init__(self) -> None:
        """Refuse what can't be meant.

        Raises:
            ProxyError: no or too many groups, an owner twice, a coalition out of range, jobs or epochs < 1, or an order of old.
        """
        if self.order != ORDER:
            raise ProxyError(
                f"order: expected {ORDER} (by content), got {self.order}: these trainings were planned in another order, and would "
                "not leave the losses of that bank; plan the run anew, which trains every coalition again"
            )
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise ProxyError(f"groups: expected 1..{MAX_GROUPS}, got {len(self.groups)}")
        for what, names in (
            ("group id", [name for name, _ in self.groups]),
            ("owner", [owner for _, owners in self.groups for owner in owners]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ProxyError(f"groups: expected every {what} once, got {twice[0]!r} twice")
        if list(self.coalitions) != sorted(set(self.coalitions)) or not self.coalitions:
            raise ProxyError(
                "coalitions: expected one or more integers in ascending order, each once"
            )
        if not 0 <= self.coalitions[0] <= self.coalitions[-1] <= self.everyone:
            raise ProxyError(
                f"coalitions: expected 0..{self.everyone} for {len(self.groups)} groups, "
                f"got {self.coalitions[0]}..{self.coalitions[-1]}",
            )
        self._check_update()
        if len(set(self.seeds)) < len(self.seeds) or min(self.seeds, default=0) < 0:
            raise ProxyError(
                f"seeds: expected different seeds of 0 or more, got {list(self.seeds)}"
            )
        for name, value in (("jobs", self.jobs), ("epochs", self.epochs)):
            if value < 1:
                raise ProxyError(f"{name}: expected at least 1, got {value}")

    def _check_update(self) -> None:
        """A share and a number of first groups that can be meant, where there are any."""
        if self.share is not None and not 1 <= self.share[0] <= self.share[1]:
            raise ProxyError(f"share: expected (a, b) with 1 <= a <= b, got {self.share}")
        if self.first is not None and not 1 <= self.first <= len(self.groups):
            raise ProxyError(f"first: expected 1..{len(self.groups)}, got {self.first}")

    @property
    def everyone(self) -> int:
        """The coalition of all groups."""
        return (1 << len(self.groups)) - 1

    def owners(self, coalition: int) -> tuple[str, ...]:
        """The owners of a coalition, sorted."""
        picked = (owners for bit, (_, owners) in enumerate(self.groups) if coalition >> bit & 1)
        return tuple(sorted(owner for owners in picked for owner in owners))


def read_plan(extra: dict[str, Any], directory: Path) -> ProxyPlan:
    """Read the plan of a run.

    Args:
        extra: `run.config.extra`: `groups`, a JSON file `{"groups": [{"id", "owners": [..]}]}`, and
            `target`, a token folder, both absolute or relative to the run's folder; `order`, which must be `ORDER`; optional `coalitions`
            (list of bitmasks, here or in the groups file; without it all of them), `target_digest`, `jobs`, `backend`, `epochs`;
            `others`, a list of `[token folder, digest]`: further targets that every model is measured on;
            `share`, `[a, b]`, and `first`, a number: see `ProxyPlan`;
            `seeds`, a list of further seeds under which every coalition is trained;
            `lots`, `[file, sha256]`: groups are lots of records, whoever owns them (then "owners" are the lots' own names).
        directory: folder of the run.

    Returns:
        The checked plan.

    Raises:
        ProxyError: a missing or unknown field, or a groups file that can't be read.
    """
    unknown = sorted(set(extra) - _EXTRA)
    missing = sorted({"groups", "target"} - set(extra))
    if not unknown and not missing and "order" not in extra:
        raise ProxyError(
            f"config.extra.order: expected {ORDER}, got none: this run was planned when trainings were ordered by leaf index; plan it anew, "
            "which trains every coalition again by content (banks of the two orders are never mixed)"
        )
    if unknown or missing:
        raise ProxyError(
            f"config.extra: expected groups and target and at most {sorted(_EXTRA)}, got unknown {unknown}, missing {missing}",
        )
    path = directory / extra["groups"]
    try:
        content = parse_json(path.read_bytes())
        groups = tuple(
            (str(group["id"]), tuple(map(str, group["owners"]))) for group in content["groups"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProxyError(
            f'{path.name}: expected {{"groups": [{{"id", "owners"}}]}}, got {error!r}'
        ) from error
    if "coalitions" in extra and "coalitions" in content:
        raise ProxyError(
            "coalitions: expected once, got one list in config.extra and one in the groups file"
        )
    given = extra.get("coalitions", content.get("coalitions"))
    return ProxyPlan(
        groups=groups,
        coalitions=tuple(range(1 << len(groups)) if given is None else sorted(map(int, given))),
        target=directory / extra["target"],
        target_digest=extra.get("target_digest"),
        jobs=int(extra.get("jobs", 1)),
        backend=str(extra.get("backend", "processes")),
        epochs=int(extra.get("epochs", 1)),
        order=int(extra["order"]),
        lots=(directory / extra["lots"][0], str(extra["lots"][1])) if "lots" in extra else None,
        others=tuple(
            (directory / folder, str(digest)) for folder, digest in extra.get("others", ())
        ),
        share=(int(extra["share"][0]), int(extra["share"][1])) if "share" in extra else None,
        first=int(extra["first"]) if "first" in extra else None,
        seeds=tuple(int(seed) for seed in extra.get("seeds", ())),
    )


def bank_key(settings: Mapping[str, Any], plan: ProxyPlan, coalition: int) -> str:
    """Hex digest of everything that a coalition's losses depend on, and of nothing else.

    Of lots that is what they hold: a coalition keeps its key when others come, when a delivery makes another corpus version of the same
    records, and when its lots are counted otherwise. Of owners it is the whole corpus.

    Args:
        settings: JSON without floats: model, optimiser, seed, digests of the tokens, and so on; of lots, in place of those, `lots`, the digest
            of each one's contents, and `share`.
        plan: passes, order, and the owners of the coalition and of all groups (these set the budget).
        coalition: bitmask.

    Returns:
        64 hex digits.
    """
    body = {
        "format": BANK_FORMAT,
        "settings": dict(settings),
        "order": plan.order,
        "epochs": plan.epochs,
    }
    if "lots" in settings:
        own = [lot for bit, lot in enumerate(settings["lots"]) if coalition >> bit & 1]
        body["settings"] = {name: value for name, value in settings.items() if name != "lots"}
        body["lots"] = sorted(own)
    else:
        body |= {
            "players": list(plan.owners(plan.everyone)),
            "owners": list(plan.owners(coalition)),
        }
    return hashlib.sha256(jcs(body)).hexdigest()


def read_lots(plan: ProxyPlan, num_records: int) -> NDArray[np.int64] | None:
    """Group of each record where groups are lots, else None.

    Args:
        plan: names the file and its digest.
        num_records: records of the tokens.

    Returns:
        One group or -1 per record.

    Raises:
        ProxyError: another file than the one named, or not one entry in -1 .. groups - 1 per record.
    """
    if plan.lots is None:
        return None
    path, digest = plan.lots
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise ProxyError(f"{path.name}: expected SHA-256 {digest}, got {found}")
    lot_N = np.frombuffer(data, dtype="<i8").astype(np.int64)
    if len(lot_N) != num_records or not -1 <= lot_N.min() <= lot_N.max() < len(plan.groups):
        raise ProxyError(
            f"{path.name}: expected {num_records} entries in -1 .. {len(plan.groups) - 1}, got {len(lot_N)}"
        )
    return lot_N


def bank_file(directory: Path, name: int | str) -> Path:
    """Where the losses of a coalition (its bitmask, or `seed_name` under a further seed) or of a subset of records (its key) stand."""
    return directory / "bank" / f"{name}.npz"


def seed_name(coalition: int, seed: int | None) -> str:
    """Name of a coalition's bank file under a further seed; None is the run's own."""
    return str(coalition) if seed is None else f"{coalition}-{seed}"


def read_bank(path: Path, key: str | None) -> dict[str, NDArray[Any]] | None:
    """A coalition's losses, or None where they must be computed.

    Args:
        path: the bank file.
        key: what it must have been made from; None takes any.

    Returns:
        nll_Q, tokens_Q, index_Q, steps, tokens and, of several targets, parts_P (their sizes, in which the
        columns are cut); None for no file or another key.

    Raises:
        ProxyError: a file that isn't a bank file, or with a loss that isn't finite. Neither is ever written, so it is not silently redone.
    """
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as archive:
            content = dict(archive)
        found = str(content.pop("key"))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ProxyError(
            f"bank/{path.name}: expected a bank file, got {error!r}; delete it to train it again"
        ) from error
    if key not in (None, found):
        return None
    if wrong := int(np.sum(~np.isfinite(content["nll_Q"]))):
        raise ProxyError(
            f"bank/{path.name}: expected finite losses, got {wrong} of {len(content['nll_Q'])} that are not; delete it to train it again"
        )
    return content


def part_of(content: Mapping[str, NDArray[Any]], part: int) -> dict[str, NDArray[Any]]:
    """The columns of one target in a bank file.

    Args:
        content: of a bank file.
        part: 0 for the run's target, 1 for the first of the others, and so on.

    Returns:
        nll_Q, tokens_Q and index_Q of that target.

    Raises:
        UtilityError: the file has no such part.
    """
    sizes = content["parts_P"].tolist() if "parts_P" in content else [len(content["nll_Q"])]
    if not 0 <= part < len(sizes):
        raise UtilityError(f"part: expected 0 .. {len(sizes) - 1}, got {part}; the run was not asked for that target")  # fmt: skip
    start = sum(sizes[:part])
    return {name: content[name][start : start + sizes[part]] for name in ("nll_Q", "tokens_Q", "index_Q")}  # fmt: skip


def losses_digest(content: Mapping[str, NDArray[Any]]) -> str:
    """Hex SHA-256 over a bank file's index, tokens and nll columns as little-endian bytes."""
    columns = (
        content["index_Q"].astype("<i8"),
        content["tokens_Q"].astype("<i8"),
        content["nll_Q"].astype("<f8"),
    )
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


@dataclass(frozen=True, slots=True)
class Utilities:
    """The losses of every coalition, read back from a finished run."""

    groups: tuple[str, ...]
    """Group ids; group i is bit i."""
    coalitions_C: NDArray[np.int64]
    """Bitmasks, ascending; when all 2^n are there, row = bitmask."""
    nll_CQ: NDArray[np.float64]
    """Summed loss of each target record in nats."""
    tokens_Q: NDArray[np.int64]
    """Predicted tokens of each target record."""
    index_Q: NDArray[np.int64]
    """Index of each target record in the target's tokens."""
    predicted_C: NDArray[np.bool_] | None = None
    """Which rows weren't trained but predicted; None = every row was trained."""
    variance_K: NDArray[np.float64] | None = None
    """What prediction adds to the variance of each group's value; None = nothing."""

    @property
    def record_utility_CQ(self) -> NDArray[np.float64]:
        """Each target record's part of V(S): - nll / all target tokens; a row sums to V(S)."""
        return -self.nll_CQ / self.tokens_Q.sum()

    @property
    def utility_C(self) -> NDArray[np.float64]:
        """V(S) = - mean nats per target token."""
        return self.record_utility_CQ.sum(1)


def load_utilities(directory: Path, part: int = 0, seed: int | None = None) -> Utilities:
    """Read the bank of a finished run, under one seed.

    Args:
        directory: the run's folder.
        part: which target: 0 for the run's own, 1 for the first of the others, and so on.
        seed: one of the run's further seeds; None = its own.

    Returns:
        The losses of every coalition that result.json names; where the run goes on from an earlier bank (`first`), of all coalitions.

    Raises:
        UtilityError: the run isn't done, wasn't asked for that target or seed, or a bank file is missing or isn't the one that
            result.json names.
    """
    result = _read_result(directory)
    if str(seed) not in result.get("seeds", {}) and seed is not None:
        raise UtilityError(f"seed: expected one of {sorted(result.get('seeds', {}))} or None, got {seed}; the run was not asked for that seed")  # fmt: skip
    told = result["coalitions"] if seed is None else result["seeds"][str(seed)]
    names = sorted(map(int, told))
    contents = []
    for coalition in names:
        path = bank_file(directory, seed_name(coalition, seed))
        content = read_bank(path, None) if path.exists() else None
        if content is None or losses_digest(content) != told[str(coalition)]["losses_digest"]:
            raise UtilityError(
                f"bank/{path.name}: expected the losses that {RESULT_FILE} names, got "
                f"{'other ones' if content else 'no file'}; run the proxy again",
            )
        contents.append(part_of(content, part))
    found = Utilities(
        groups=tuple(group["id"] for group in result["groups"]),
        coalitions_C=np.array(names, dtype=np.int64),
        nll_CQ=np.stack([content["nll_Q"] for content in contents]),
        tokens_Q=contents[0]["tokens_Q"],
        index_Q=contents[0]["index_Q"],
    )
    lacking = len(names) < 1 << len(found.groups)
    return _completed(found, result["first"]) if "first" in result and lacking else found


def _completed(found: Utilities, first: int) -> Utilities:
    """The table of all coalitions, what wasn't trained predicted."""
    from valuation.completion import complete

    nll = dict(zip(found.coalitions_C.tolist(), found.nll_CQ, strict=True))
    made = complete(nll, len(found.groups), first, found.tokens_Q)
    return replace(
        found, coalitions_C=np.arange(len(made.nll_CQ)), nll_CQ=made.nll_CQ, predicted_C=made.predicted_C, variance_K=made.variance_n,
    )  # fmt: skip


def load_seeds(directory: Path, part: int = 0) -> tuple[Utilities, ...]:
    """Read the bank of a finished run, under each of its seeds.

    Args:
        directory: the run's folder.
        part: which target, as for `load_utilities`.

    Returns:
        The run's own seed first, then the others by number.

    Raises:
        UtilityError: as for `load_utilities`, or the seeds have not the same coalitions and target records.
    """
    further = sorted(map(int, _read_result(directory).get("seeds", {})))
    found = tuple(load_utilities(directory, part, seed) for seed in (None, *further))
    for one in found[1:]:
        for name in ("coalitions_C", "tokens_Q", "index_Q"):
            if not np.array_equal(getattr(one, name), getattr(found[0], name)):
                raise UtilityError(f"seeds: expected the same {name} under every seed, got others; run the proxy again")  # fmt: skip
    return found


def losses_by_seed(banks: Sequence[Utilities]) -> dict[int, NDArray[np.float64]]:
    """Losses of every coalition under every seed, as `shapley_with_interval`, `lot_gains` and the like take them.

    Args:
        banks: of one target, one per seed (see `load_seeds`).

    Returns:
        Bitmask → summed nats [S, Q].
    """
    nll_SCQ = np.stack([bank.nll_CQ for bank in banks])
    return {mask: nll_SCQ[:, row] for row, mask in enumerate(banks[0].coalitions_C.tolist())}


def _read_result(directory: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = parse_json((directory / RESULT_FILE).read_bytes())
        for told in (result["coalitions"], *result.get("seeds", {}).values()):
            [int(name) for name in told]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UtilityError(
            f"{RESULT_FILE}: expected the result of a proxy run, got {error!r}; run it first"
        ) from error
    return result
