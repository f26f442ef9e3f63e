"""Values after a delivery: what the bank holds is used again, what came is added.

    full     all lots are cut anew, with the seed of the plan, and every coalition of them is trained; where nothing came, the lots and seed of before
    update   the lots of the last full computation stay as they are; what came since is one more lot (personal records: one of their own)

A coalition's key in the bank is that of its contents, so an update finds every coalition of the old lots there and trains at most 0.3 of
all 2^n (`[values] update = "sampled"`; the rest is predicted record by record, and the interval says so: `valuation.completion`) or all that
are missing ("exact"). Seed and tokens per record are those of the full computation, else no loss would be comparable. Every later delivery goes into
that one lot, so no prediction ever rests on another.

A *full* computation is made, and says why, where
- there is none yet, its files are gone (an erasure destroys every bank that saw the person), or `update = "anew"`;
- a record of its lots is gone, or isn't valued any more (withdrawn, suspended, licence or consent lost);
- target, buyers, size, base model, code, libraries or hardware are others;
- what came has more than half of the tokens of the old lots, or makes more lots than are enumerated.

Names of owners enter as little as ever: who splits, merges or copies changes no lot. *When* something is delivered does matter: what comes
later is valued in a lot with what else came since. And a seed that was drawn under an earlier plan was known in this home before the delivery came.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.results import latest
from pipelines.runs import code_digest, digest_of, hardware_digest, lock_digest
from pipelines.steps.buyers import names_in
from provenance import parse_json, write_atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipelines.results import Result
    from pipelines.site import Site
    from valuation import Lots

MOST_LOTS = 8
"""2^8 trainings: more lots are not enumerated."""
_CODE = ("trainer", "valuation", "provenance")


@dataclass(frozen=True, slots=True)
class Grown:
    """The lots to value, and the computation that they go on from."""

    lots: "Lots"
    why: str
    """In words: why all is computed anew, or what the values go on from."""
    full: str = ""
    """Run of the last full computation; "" where this is one, or the same game again."""
    first: int | None = None
    """Its lots, which are the first of these."""
    seeds: tuple[int, ...] = ()
    """Its seeds; none where they are those of the plan."""
    share: tuple[int, int] | None = None
    """What a coalition trains on: a of each b of its tokens."""
    before: tuple[str, ...] = ()
    """Runs whose banks may hold coalitions of these lots."""

    @property
    def extra(self) -> dict[str, Any]:
        """What a run's settings say of it; nothing in a full computation."""
        return {} if self.share is None else {"first": self.first, "share": list(self.share)}

    def coalitions(self, site: "Site", generator: "np.random.Generator") -> list[int]:
        """What the bank must hold."""
        from valuation.completion import SHARE, coalitions_after

        num, exact = len(self.lots.ids), site.config.values.update == "exact"
        return coalitions_after(num, self.first or num, generator, 1.0 if exact else SHARE)


def num_lots(site: "Site") -> int:
    """Most lots of a full computation: as configured, else as the size says."""
    return site.config.values.lots or site.size.groups


def grown(
    site: "Site",
    target: "Result",
    columns: "tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64], NDArray[np.bool_]]",
    cut: "Callable[[NDArray[np.bool_], int], Lots]",
) -> Grown:
    """Cut the lots: anew, or behind those of the last full computation.

    Args:
        site: The open home.
        target: What is measured on.
        columns: Leaf index, whether it is valued, tokens, and whether it is personal, of each live record.
        cut: Makes at most so many lots of the records that it is told.
    """
    import numpy as np

    index_N, valued_N, tokens_N, personal_N = columns
    made, why = _full(site, target)
    if made is None:
        return Grown(cut(valued_N, num_lots(site)), why)
    run, old_leaf, share = made
    lot_N = np.full(len(index_N), -1, np.int64)
    known = index_N < len(old_leaf)
    lot_N[known] = old_leaf[index_N[known]]
    kept_N, first = (lot_N >= 0) & valued_N, int(old_leaf.max()) + 1
    new_N = valued_N & (lot_N < 0) & (tokens_N > 0)
    gone = int((old_leaf >= 0).sum() - kept_N.sum())
    more, old = int(tokens_N[new_N].sum()), int(tokens_N[kept_N].sum())
    kinds = len(set(personal_N[new_N].tolist()))
    if gone:
        why = f"{gone} records of the earlier lots are gone or not valued any more"
    elif 2 * more > old:
        why = f"what came has {more} tokens, more than half of the {old} of the earlier lots"
    elif first + kinds > MOST_LOTS:
        why = f"{first + kinds} lots are more than the {MOST_LOTS} that are enumerated"
    if why:
        return Grown(cut(valued_N, num_lots(site)), why)
    last = latest(site.home.results, "owner_values")
    assert last is not None, "a full computation was found"
    banks, seeds = tuple(dict.fromkeys((run.name, last["run"]))), tuple(last["seeds"])
    if not kinds:
        # The same game, and where the tokens are the same too, the same run.
        return Grown(_joined(lot_N, tokens_N, personal_N, first, None), f"nothing came since {run.name}", seeds=seeds, before=banks)  # fmt: skip
    lots = _joined(lot_N, tokens_N, personal_N, first, cut(new_N, kinds))
    said = f"lots added to the {first} of {run.name}: {kinds}, of {int(new_N.sum())} records that came since"
    return Grown(lots, said, run.name, first, seeds, share, banks)


def adopt(site: "Site", directory: Path, found: Grown, coalitions: list[int]) -> None:
    """Lay the bank files of earlier runs into a run that is about to start; it trains what has another key."""
    if (directory / "result.json").exists():
        return
    bank = directory / "bank"
    for source in found.before:
        bank.mkdir(exist_ok=True)
        for path in sorted((site.home.runs / source / "bank").glob("*.npz")):
            here = bank / path.name
            if int(path.stem.split("-")[0]) in coalitions and not here.exists():
                write_atomic(here, path.read_bytes())


def told(
    site: "Site", target: "Result", directory: Path, found: Grown, lots_file: Path, plan: str
) -> dict[str, Any]:
    """What the result of the values keeps: counts of trainings and coalitions, and what the next delivery goes on from."""
    bank = directory / "bank"
    trained = parse_json((directory / "result.json").read_bytes())
    # The same run named again trained nothing: all of its bank is of before.
    before = latest(site.home.results, "owner_values")
    again = before is not None and before["run"] == directory.name
    earlier = [site.home.runs / source / "bank" for source in found.before if again or source != directory.name]  # fmt: skip
    if again and not earlier:
        earlier = [bank]
    taken: dict[str, list[bool]] = {
        mask: [] for mask in trained["coalitions"]
    }  # of each seed's file
    for path in bank.glob("*.npz"):
        if (mask := path.stem.split("-")[0]) in taken:
            taken[mask].append(any(_key(path) == _key(folder / path.name) for folder in earlier))
    reused = sum(all(files) for files in taken.values())
    possible = 1 << len(found.lots.ids)
    document = _document(directory)
    tokens = int(found.lots.tokens_K.sum())
    most = document["steps"] * site.size.rows * site.size.length
    return {
        "plan": _told_before(site)["plan"] if found.seeds else plan, "full": found.full or directory.name, "file": str(lots_file.relative_to(site.home.path)) if not found.full else _told_before(site)["file"],
        "share": list(found.share or (min(tokens, most), tokens)), "settings": _settings(site, target), "why": found.why,
        "calls": len(taken) - reused, "trainings": sum(not one for files in taken.values() for one in files), "reused": reused, "possible": possible, "predicted": possible - len(trained["coalitions"]) if len(found.lots.ids) <= MOST_LOTS else 0,
    }  # fmt: skip


def facts(owner_values: "Result") -> dict[str, Any]:
    """What the ledger's entry of values says of an update; nothing after a full computation."""
    update = owner_values.values.get("update", {"full": owner_values["run"]})
    if update["full"] == owner_values["run"]:
        return {}
    return {"update": {name: update[name] for name in ("full", "calls", "reused", "predicted", "possible")}}  # fmt: skip


def counts(owner_values: "Result") -> dict[str, int]:
    """Utility calls as an asset's page shows them."""
    update = owner_values.values.get("update", {})
    names = {"calls": "utility calls", "trainings": "trainings, over all seeds", "reused": "found in the bank", "predicted": "predicted", "possible": "coalitions of all lots"}  # fmt: skip
    return {said: update[name] for name, said in names.items() if name in update}


def plan_of_seeds(site: "Site", owner_values: "Result") -> dict[str, Any]:
    """The committed plan whose seeds the coalitions were trained under: the newest, or that of the computation that is gone on from.

    Raises:
        ValueError: The file isn't the one of the digest that the result names.
    """
    digest = owner_values["update"]["plan"]
    data = (site.home.path / f"plans/{digest}.json").read_bytes()
    if (got := sha256(data).hexdigest()) != digest:
        raise ValueError(
            f"expected the plan with digest {digest[:16]} in plans/{digest}.json, got {got[:16]}: put the file back from a backup"
        )
    return dict(parse_json(data))


def sentence(owner_values: "Result") -> str:
    """What was trained for these values, for a reader."""
    update = owner_values.values.get("update")
    if update is None:
        return "made by an earlier version, which trained every coalition"
    if update["full"] == owner_values["run"]:
        made = (
            f"{update['trainings']} trainings" if update["trainings"] else "by trainings of before"
        )
        return f"computed in full, {made}: {update['why']}"
    guess = f"{update['predicted']} predicted, with their error in the intervals" if update["predicted"] else "none predicted"  # fmt: skip
    return (
        f"updated: {update['why']}; of {update['possible']} coalitions {update['calls']} trained now, {update['reused']} found in the bank, {guess}"
    )  # fmt: skip


def remade_bank(site: "Site") -> str:
    """What to say where the values of before rest on trainings in another order; "" where they don't, or there are none."""
    from valuation.bank import ORDER

    before = latest(site.home.results, "owner_values")
    path = site.home.runs / before["run"] / "run.json" if before else None
    if before is None or path is None or not path.exists():
        return ""
    order = parse_json(path.read_bytes())["config"]["extra"].get("order", "of leaf indices")
    if order == ORDER:
        return ""
    return (
        f"remade: the trainings of {before['run']} were ordered in the order {order}, these by content ({ORDER}); every coalition was trained "
        "again, none of the old ones was used, and what was paid by the old values stays as it was"
    )


def _full(
    site: "Site", target: "Result"
) -> "tuple[tuple[Path, NDArray[np.int64], tuple[int, int]] | None, str]":
    """Run, lot of every leaf and share of the last full computation; or None, and why it can't be gone on from."""
    import numpy as np

    from valuation.bank import load_utilities
    from valuation.errors import UtilityError

    if site.config.values.update == "anew":
        return None, '[values] update is "anew"'
    update = _told_before(site)
    if not update:
        return None, "there is no earlier computation to go on from"
    if update["settings"] != _settings(site, target):
        return None, "target, buyers, size, base model, code, libraries or hardware are others than in the earlier computation"  # fmt: skip
    run, path = site.home.runs / update["full"], site.home.path / update["file"]
    try:
        data = path.read_bytes()
        load_utilities(run)
        wanted = _document(run)["config"]["extra"]["lots"][1]
    except (OSError, UtilityError):
        return None, "the earlier bank or its lots are not there any more"
    if sha256(data).hexdigest() != wanted:
        return None, "the earlier lots are not those that their run names"
    return (run, np.frombuffer(data, "<i8").astype(np.int64), tuple(update["share"])), ""


def _told_before(site: "Site") -> dict[str, Any]:
    before = latest(site.home.results, "owner_values")
    return dict(before.values.get("update", {})) if before else {}


def _settings(site: "Site", target: "Result") -> str:
    """Digest of everything but lots and seed that a coalition's losses depend on."""
    from pipelines.steps.foundation import base_inputs

    size = site.size
    return digest_of(
        {
            "proxy": asdict(size.proxy), "budget": [size.proxy_tokens, size.rows, size.length, size.warmup, num_lots(site), size.value_seeds], "lr": size.lr,
            "target": target["value_digest"], "buyers": [target["buyers"][name]["digest"] for name in names_in(target)],
            "code": code_digest(_CODE), "lock": lock_digest(), "hardware": hardware_digest(), **base_inputs(site),
        }
    )  # fmt: skip


def _document(directory: Path) -> dict[str, Any]:
    return dict(parse_json((directory / "run.json").read_bytes()))


def _key(path: Path) -> str:
    """What a bank file was made from; "" where there is no such file."""
    import numpy as np

    if not path.exists():
        return ""
    with np.load(path, allow_pickle=False) as archive:
        return str(archive["key"])


def _joined(
    lot_N: "NDArray[np.int64]",
    tokens_N: "NDArray[np.int64]",
    personal_N: "NDArray[np.bool_]",
    first: int,
    new: "Lots | None",
) -> "Lots":
    """The old lots with the new ones behind them."""
    import numpy as np

    from valuation import Lots

    inside_N = lot_N >= 0
    tokens_K = np.bincount(lot_N[inside_N], weights=tokens_N[inside_N], minlength=first).astype(np.int64)  # fmt: skip
    personal_K = np.zeros(first, np.bool_)
    personal_K[lot_N[inside_N & personal_N]] = True
    if new is None:
        return Lots(lot_N, tokens_K, personal_K)
    joined_N = np.where(new.lot_N >= 0, new.lot_N + first, lot_N)
    return Lots(joined_N, np.append(tokens_K, new.tokens_K), np.append(personal_K, new.personal_K))
