"""What the engineer's rows say: depth per layer, ripple coefficients, damage by neighbour distance, parts of the model.

Everything follows from `engineering.parquet` (`engineering`), so that whoever has the file can repeat it; intervals come from drawing
targets again with a fixed seed. People are ordered by their ids, which say nothing.

*Neighbour distance* of a person who stays: the rank of the mean gradient cosine with the targets (for single targets: of the cosine with
that target), nearest first, cut at 4 and 16: collateral damage sits at the nearest few, and a mean over everybody hides it.

Shape suffixes: `L` layers, `T` targets, `N` others, `D` distances.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from unlearning.errors import RowsError

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray

    from unlearning.association import Ripple

    Key = tuple[str, str, str, str]

CUTS = (4, 16)
"""Ranks at which neighbours are cut into distances: 1 to 4, 5 to 16, the rest."""
RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Depth:
    """One model layer by layer."""

    role: str
    digest: str
    score: float
    """Mean unlearning-depth score; NaN where no question has one."""
    questions: int
    """Questions that have one."""
    ratio_L: NDArray[np.float64]
    """Median erasure ratio, NaN where the layer of the original carries no secret."""
    cka_L: NDArray[np.float64]
    lens_L: NDArray[np.float64]
    """Mean log-probability of the secrets under the logit lens."""


@dataclass(frozen=True, slots=True)
class Lens:
    """One ensemble's constituents under the logit lens."""

    role: str
    digest: str
    questions: int
    """Questions behind each mean."""
    mean_CL: NDArray[np.float64]
    """Mean log-probability of the secrets by constituent and layer."""


@dataclass(frozen=True, slots=True)
class Near:
    """Damage at one distance."""

    rank: str
    pairs: int
    mean: float
    low: float
    high: float
    worst: float


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the model."""

    name: str
    norm: float
    gold_norm: float
    """The largest between two gold models, NaN with one."""
    applied_D: NDArray[np.float64]
    reverted_D: NDArray[np.float64]
    applied_facts_D: NDArray[np.float64]
    applied_outranked_D: NDArray[np.float64] | None
    """NaN at distances where nobody has a number; None where nobody has one at all, and in rows of before it was measured."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What one layer of the unlearned model says about people who stay."""

    layer: int
    """From 1."""
    norm: float
    """Largest update norm of its own parts; 0: the method didn't touch it."""
    cka: float
    """With the original's stream, 1: as it was; NaN where it doesn't vary."""
    cka_null: float
    """The least between another gold model and the first; NaN with one."""
    loss: float
    """Log-probability of people's own answers that the layer lost, mean over people, nats per token."""
    low: float
    """Ends of the two-sided 95 % interval over people."""
    high: float
    loss_null: float
    """The largest distance between the means of two gold models; NaN with one."""

    @property
    def damaged(self) -> bool:
        """Whether it lost more than gold models differ by, with confidence."""
        return bool(self.low > self.loss_null)


class Findings:
    """The rows, indexed."""

    def __init__(self, table: pa.Table, first_gold: str) -> None:
        """Index a table.

        Args:
            table: of `engineering.parquet`.
            first_gold: digest of the gold model that depth is measured against.
        """
        self._cells: dict[Key, dict[tuple[str, int], float]] = defaultdict(dict)
        self._gold = first_gold
        for row in table.to_pylist():
            key = (row["model"], row["model_digest"], row["attack"], row["score"])
            self._cells[key][row["subject_id"], row["probe"]] = row["value"]

    def _values(self, key: Key) -> NDArray[np.float64]:
        cell = self._cells.get(key)
        if not cell:
            raise RowsError(f"expected rows of {key[2]}, {key[3]} for {key[0]}, got none")
        return np.array([cell[place] for place in sorted(cell)], dtype=np.float64)

    def depth(self) -> list[Depth]:
        """Depth of every model, in the order original, unlearned, gold."""
        from unlearning.depth import erasure

        order = ("original", "unlearned", "gold")
        keys = [key for key in self._cells if key[2] == "depth/layer-1" and key[3] == "patch_drop"]
        models = sorted(
            {key[:2] for key in keys}, key=lambda m: (order.index(m[0]), m[1] != self._gold, m[1])
        )
        layers = len({key[2] for key in self._cells if key[2].startswith("depth/")})

        def stacked(model: tuple[str, str], score: str) -> NDArray[np.float64]:
            return np.stack([self._values((*model, f"depth/layer-{n + 1}", score)) for n in range(layers)])  # fmt: skip

        found = []
        gold_LN = stacked(("gold", self._gold), "patch_drop") if models else np.zeros((0, 0))
        for model in models:
            seen = erasure(gold_LN, stacked(model, "patch_drop"))
            known_N = ~np.isnan(seen.scores_N)
            ratio_L = np.array([np.median(row[~np.isnan(row)]) if (~np.isnan(row)).any() else np.nan for row in seen.ratios_LN])  # fmt: skip
            score = float(seen.scores_N[known_N].mean()) if known_N.any() else np.nan
            found.append(
                Depth(
                    *model, score, int(known_N.sum()), ratio_L, stacked(model, "cka_erasure")[:, 0], stacked(model, "lens_logprob").mean(1)
                )
            )  # fmt: skip
        return found

    def lens(self) -> list[Lens]:
        """The constituents of every model of an audit of ensembles, in the order original, unlearned, gold; of one model none."""
        order = ("original", "unlearned", "gold")
        places: dict[tuple[str, str], dict[tuple[int, int], Key]] = defaultdict(dict)
        for key in self._cells:
            kind, *where = key[2].split("/")
            if kind == "lens":
                part, layer = (int(one.rpartition("-")[2]) for one in where)
                places[key[:2]][part, layer] = key
        found = []
        for model in sorted(places, key=lambda m: (order.index(m[0]), m[1] != self._gold, m[1])):
            parts, layers = max(places[model])
            values = {place: self._values(key) for place, key in places[model].items()}
            mean_CL = [[values[part, layer].mean() for layer in range(1, layers + 1)] for part in range(1, parts + 1)]  # fmt: skip
            found.append(Lens(*model, len(values[1, 1]), np.array(mean_CL)))
        return found

    def targets(self, score: str) -> NDArray[np.float64]:
        """One value per target: steps, rise or reached."""
        return self._values(self._ripple_key("ripple", score))

    def _ripple_key(self, attack: str, score: str) -> Key:
        original = next(key[:2] for key in self._cells if key[2] == "ripple")
        return (*original, attack, score)

    def pairs(self, score: str) -> NDArray[np.float64]:
        """Values_TN of every pair."""
        others = sorted({key[2] for key in self._cells if key[2].startswith("ripple/")})
        return np.stack([self._values(self._ripple_key(other, score)) for other in others], axis=1)

    def ripple(self, tie: str) -> tuple[Ripple, Ripple]:
        """Ripple coefficient of a tie at the strength really used, and after the first step.

        Args:
            tie: one of `association.TIES`.
        """
        from unlearning.association import ripple

        ties_TN = self.pairs(tie)
        both = np.ones(ties_TN.shape, dtype=bool)
        draws_BT = self._draws(len(ties_TN))
        used, first = (ripple(ties_TN, self.pairs(score), both, draws_BT) for score in ("damage", "damage_first"))  # fmt: skip
        return used, first

    def difference(self, one: str, other: str) -> tuple[float, float, float]:
        """How much better one tie follows the damage than another, at the strength really used.

        Two intervals that overlap don't say that there is no difference: both coefficients rise and fall with the same targets. So
        the difference is taken in each resample, of the same targets for both.

        Args:
            one: one of `association.TIES`.
            other: another.

        Returns:
            (r of one - r of the other, low, high), the 95 % interval over targets; NaN where one has no coefficient.
        """
        from unlearning.association import ripple_difference

        damage_TN = self.pairs("damage")
        both = np.ones(damage_TN.shape, dtype=bool)
        return ripple_difference(
            self.pairs(one), self.pairs(other), damage_TN, both, self._draws(len(damage_TN))
        )

    def _draws(self, targets: int) -> NDArray[np.float64]:
        from unlearning.association import target_draws

        return target_draws(targets, RESAMPLES, np.random.default_rng(targets))

    def neighbours(self) -> list[Near]:
        """Damage of the nearest neighbours by gradient of each target, and of the farther ones."""
        cosines_TN, damage_TN = self.pairs("gradient_cosine"), self.pairs("damage")
        ranks_TN = ranks(cosines_TN)
        draws_BT = self._draws(len(damage_TN))
        found = []
        for name, low, high in distances(damage_TN.shape[1]):
            inside_TN = (ranks_TN >= low) & (ranks_TN < high)
            sums_T = np.where(inside_TN, damage_TN, 0.0).sum(1)
            counts_T = inside_TN.sum(1)
            drawn_B = (draws_BT @ sums_T) / (draws_BT @ counts_T)
            ends = np.quantile(drawn_B, [0.025, 0.975])
            found.append(
                Near(name, int(counts_T.sum()), float(sums_T.sum() / counts_T.sum()), float(ends[0]), float(ends[1]), float(damage_TN[inside_TN].max()))
            )  # fmt: skip
        return found

    def parts(self) -> list[Part]:
        """Every part of the model, in order of the layers; the whole change is `whole`."""
        names = {key[2].removeprefix("part/") for key in self._cells if key[2].startswith("part/")}
        return [self._part(name) for name in sorted(names - {"all"}, key=_place)]

    def _part(self, name: str) -> Part:
        model = self._unlearned()
        norms = [self._values((*key[:2], f"part/{name}", "update_norm"))[0] for key in self._cells if key[0] == "gold" and key[2:] == (f"part/{name}", "update_norm")]  # fmt: skip
        applied, reverted, facts = (self._by_distance((*model, f"part/{name}", score)) for score in ("applied_loss", "reverted_loss", "applied_facts"))  # fmt: skip
        own = float(self._values((*model, f"part/{name}", "update_norm"))[0])
        key = (*model, f"part/{name}", "applied_outranked")
        outranked = self._by_distance(key, some=True) if key in self._cells else None
        return Part(name, own, max(norms, default=np.nan), applied, reverted, facts, outranked)

    def _unlearned(self) -> tuple[str, str]:
        return next(key[:2] for key in self._cells if key[2] == "part/all")

    def whole(self, score: str = "loss") -> NDArray[np.float64]:
        """Damage_D by distance with all parts changed.

        Args:
            score: "loss" for its rise in nats per token, "facts" for the share of own facts that are lost, "outranked" for the share of people
                with a number whose own is no longer the likeliest.
        """
        key = (*self._unlearned(), "part/all", f"applied_{score}")
        return self._by_distance(key, some=score == "outranked")

    def numbered(self) -> NDArray[np.int64]:
        """People_D by neighbour distance who have a number: those whom "outranked" is the mean over."""
        cell = self._cells.get((*self._unlearned(), "part/all", "applied_outranked"), {})
        return np.array([sum((one, 0) in cell for one in near) for near in self._near()])

    def null(self, score: str = "loss") -> NDArray[np.float64] | None:
        """Largest distance_D between the means of two gold models by neighbour distance; None with one gold model.

        Args:
            score: "loss", "facts" or "outranked", as of `whole`.
        """
        keys = [key for key in self._cells if key[2:] == ("gold_difference", score)]
        if not keys:
            return None
        gaps_GD = np.stack([np.zeros(len(self._distances())), *(self._by_distance(key, some=score == "outranked") for key in keys)])  # fmt: skip
        return np.abs(gaps_GD[:, None] - gaps_GD[None]).max((0, 1))

    def kept(self) -> list[Kept]:
        """People who stay, layer by layer; empty where nobody who stays could be asked."""
        layers = len({key[2] for key in self._cells if key[2].startswith("kept/")})
        return [self._kept(layer + 1) for layer in range(layers)]

    def _kept(self, layer: int) -> Kept:
        from unlearning.statistics import mean_bounds

        attack = f"kept/layer-{layer}"
        by_model = {key[:2]: self._per_person(key) for key in sorted(self._cells) if key[2:] == (attack, "kept_logprob")}  # fmt: skip
        original, unlearned = (next(v for m, v in by_model.items() if m[0] == role) for role in ("original", "unlearned"))  # fmt: skip
        lost = mean_bounds(original - unlearned, np.random.default_rng(layer), resamples=RESAMPLES, alpha=0.025)  # fmt: skip
        golds = {model: values_P.mean() for model, values_P in by_model.items() if model[0] == "gold"}  # fmt: skip
        several = len(golds) > 1
        alike = [self._single((*model, attack, "cka_gold")) for model in golds if model[1] != self._gold]  # fmt: skip
        model = self._unlearned()
        norms = [self._single((*model, f"part/layer {layer} {inner}", "update_norm")) for inner in ("attention", "feed-forward")]  # fmt: skip
        return Kept(
            layer, float(np.nanmax(norms)), self._single((*model, attack, "cka_original")), min(alike, default=np.nan), lost.estimate, lost.low,
            lost.high, float(max(golds.values()) - min(golds.values())) if several else np.nan,
        )  # fmt: skip

    def _single(self, key: Key) -> float:
        """The only value of a key; NaN where there is none."""
        return next(iter(self._cells.get(key, {}).values()), np.nan)

    def _per_person(self, key: Key) -> NDArray[np.float64]:
        """Means of each person's values, in the order of the ids."""
        found: dict[str, list[float]] = defaultdict(list)
        for (person, _), value in sorted(self._cells[key].items()):
            found[person].append(value)
        return np.array([np.mean(values) for values in found.values()], dtype=np.float64)

    def _distances(self) -> list[tuple[str, int, int]]:
        return distances(self.pairs("damage").shape[1])

    def _near(self) -> list[list[str]]:
        """Ids of the others at each distance, by the rank of their mean gradient cosine with the targets."""
        ids = sorted({key[2].removeprefix("ripple/") for key in self._cells if key[2].startswith("ripple/")})  # fmt: skip
        order = np.argsort(ranks(self.pairs("gradient_cosine").mean(0)[None])[0])
        return [[ids[n] for n in order[low:high]] for _, low, high in self._distances()]

    def _by_distance(self, key: Key, *, some: bool = False) -> NDArray[np.float64]:
        """Means over the others at each distance; with `some` over those who have a value, NaN where nobody has."""
        self._values(key)  # says which measure is missing altogether
        cell = self._cells[key]
        found = [[cell[one, 0] for one in near if (one, 0) in cell or not some] for near in self._near()]  # fmt: skip
        return np.array([np.mean(values) if values else np.nan for values in found])


def distances(others: int) -> list[tuple[str, int, int]]:
    """Neighbour distances of so many people.

    Args:
        others: number of people who stay, >= 1.

    Returns:
        (name, first rank, end of the ranks), ranks from 0, nearest first; every rank in exactly one.
    """
    ends = [*(cut for cut in CUTS if cut < others), others]
    return [(f"{low + 1} to {high}", low, high) for low, high in zip([0, *ends[:-1]], ends, strict=True)]  # fmt: skip


def ranks(ties_TN: NDArray[np.float64]) -> NDArray[np.int64]:
    """Rank of each other person by tie, 0 for the strongest; ties in the order of the columns.

    Args:
        ties_TN: one row per target.

    Returns:
        ranks_TN, a permutation of 0 to N-1 in each row.
    """
    order_TN = np.argsort(-ties_TN, axis=1, kind="stable")
    found_TN = np.empty_like(order_TN)
    np.put_along_axis(found_TN, order_TN, np.arange(ties_TN.shape[1])[None], axis=1)
    return found_TN


def _place(name: str) -> tuple[int, int, str]:
    """Embedding, layers in order (attention before feed-forward), head."""
    if name.startswith("layer "):
        return (1, int(name.split()[1]), name)
    return (0 if name == "embedding" else 2, 0, name)
