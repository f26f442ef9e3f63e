"""The one place of hyper-parameters: published defaults by method, and how a run changes them.

Defaults are those of the method's own paper or of its published code (the notes at each line say which). Numbers that a
run sets differently belong to that run. `GRIDS` and `RATES` are what a sweep tries (`unlearning.sweep`), by default around these, and `SWEPT`
is what one has chosen for the graph's recipe.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, NamedTuple

from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Numbers of one method; those that a method does not use are ignored by it."""

    forget_weight: float = 1.0
    """w_f, weight of the forget term."""
    retain_weight: float = 1.0
    """w_r, weight of the retain term; 0 turns it off."""
    beta: float = 0.1
    """Inverse temperature, exponent, or logit shift."""
    beta2: float = 1.0
    """SatImp's second exponent."""
    delta: float = 0.0
    """SimNPO's margin, nats per token."""
    scale: float = 2.0
    """RMU's length c, adaptive RMU's factor."""
    layers: tuple[int, ...] = (-1,)
    """Layers whose hidden states are moved; negative counts from the last."""
    bound: float = 1.0
    """PDU's ε: largest loss on what remains, nats per token."""
    dual_rate: float = 1.0
    """PDU's η."""
    skip: int = 0
    """CE-U: first tokens of a secret that are not pushed."""
    damping: float = 1.0
    """Newton step: λ, in means of the curvature's diagonal."""
    reinforce: int = 10
    """Task vector: steps of learning the secrets on purpose."""
    rate: float = 1e-3
    """Task vector: rate of these steps."""

    def __post_init__(self) -> None:
        if self.beta <= 0 or self.retain_weight < 0 or self.forget_weight < 0:
            raise PlanError("expected beta > 0, forget_weight >= 0 and retain_weight >= 0")
        if self.damping <= 0 or self.reinforce < 1 or self.rate <= 0:
            raise PlanError("expected damping > 0, reinforce >= 1 and rate > 0")


DEFAULTS = {
    "ascent": Settings(retain_weight=0.0),  # arXiv 2210.01504
    "graddiff": Settings(),  # w_f = w_r = 1, arXiv 2203.12817
    "kl": Settings(),  # TOFU, arXiv 2401.06121
    "npo": Settings(
        beta=0.1
    ),  # arXiv 2404.05868; a six-digit number is shorter than its answers, see npo.py
    "simnpo": Settings(beta=4.5, delta=0.0, forget_weight=0.125),  # arXiv 2410.07163
    "dpo": Settings(beta=0.1),  # TOFU
    "altpo": Settings(beta=0.1),  # arXiv 2409.13474
    "rmu": Settings(
        scale=2.0, layers=(-2,)
    ),  # c of the published code's yaml; WMDP, arXiv 2403.03218
    "adaptive_rmu": Settings(scale=5.0, layers=(-2,)),  # arXiv 2408.06223
    "undial": Settings(beta=10.0, retain_weight=0.0),  # arXiv 2402.10052
    "ceu": Settings(retain_weight=0.0, skip=1),  # arXiv 2503.01224
    "wga": Settings(beta=1.0),  # arXiv 2502.19301
    "satimp": Settings(beta=5.0, beta2=1.0, forget_weight=0.1),  # arXiv 2505.11953
    "pdu": Settings(),  # ε has no default in the paper; here 1 nat
    "rau": Settings(layers=(-3, -2, -1)),  # our reading of PrivUn, arXiv 2604.22076
    "finetune": Settings(forget_weight=0.0),
    "newton": Settings(damping=1.0),  # ours: no published number fits all sizes of model
    "task_vector": Settings(scale=1.0),  # arXiv 2212.04089; MUSE sweeps 1 to 256
}

RATES = ("0.0005", "0.001", "0.002")
"""Peak rates of the optimiser that a sweep tries."""

GRIDS: dict[str, dict[str, tuple[str, ...]]] = {
    "npo": {"beta": ("0.1", "0.2", "0.5")},
    "simnpo": {"beta": ("2.5", "4.5"), "forget_weight": ("0.125", "1")},
    "dpo": {"beta": ("0.05", "0.1", "0.5")},
    "graddiff": {"forget_weight": ("0.1", "0.5", "1")},
    "undial": {"beta": ("3", "10", "30")},
    "rmu": {"scale": ("2", "5", "20")},
    "pdu": {"bound": ("0.5", "1", "2")},
}
"""Method → field → values that a sweep tries beside the rates; a method that isn't here keeps its defaults."""


class Swept(NamedTuple):
    """What a sweep has chosen for a method."""

    rate: str
    """Peak rate of the optimiser, a decimal string."""
    settings: Mapping[str, str]
    """Field of `Settings` → decimal string."""
    recipe: Mapping[str, str]
    """Of `sweep.RECIPE` → value: which tokens are pushed, and the share of retained tokens that neighbours have."""


SWEPT = {
    "npo": Swept("0.001", {"beta": "0.1", "retain_weight": "4"}, {"forget_tokens": "all", "neighbours": "0.9"})
}  # fmt: skip
"""Method → what `make accept STUDY=unlearning-sweep` chose on validation people by the graph's recipe at its size
default (README, "A sweep"); no audited person had a part in it. A method that isn't here has had no sweep."""


MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")
"""What adapters can be put on: the matrices of attention and of the feed-forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """Low-rank adapters in place of all weights, with any loss (`adapters`)."""

    rank: int = 0
    """r; 0 = all weights are trained."""
    alpha: float = 16.0
    """The adapters' product is scaled by alpha / rank."""
    targets: tuple[str, ...] = MATRICES
    """Which matrices of every block have one."""

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise PlanError(f"lora: expected rank as an integer >= 0, got {self.rank!r}")
        if not 0 < self.alpha < float("inf"):
            raise PlanError(f"lora: expected alpha > 0, got {self.alpha}")
        if not self.targets or not set(self.targets) <= set(MATRICES):
            raise PlanError(f"lora: expected targets of {MATRICES}, got {list(self.targets)}")


def lora_of(changes: Mapping[str, Any]) -> Lora:
    """The adapters that a run asks for.

    Args:
        changes: any of `rank` (integer), `alpha` (decimal string) and `targets` (list of names); empty = none.

    Raises:
        PlanError: an unknown setting, or one out of range.
    """
    unknown = sorted(set(changes) - {"rank", "alpha", "targets"})
    if unknown:
        raise PlanError(f"lora: expected rank, alpha and targets, got {unknown[0]!r}")
    values = dict(changes)
    if "alpha" in values:
        values["alpha"] = _value("alpha", values["alpha"])
    if "targets" in values:
        if isinstance(values["targets"], str):
            raise PlanError(f"lora: expected targets as a list, got {values['targets']!r}")
        values["targets"] = tuple(values["targets"])
    return Lora(**values)


def settings_of(method: str, changes: Mapping[str, Any]) -> Settings:
    """A method's defaults with a run's changes.

    Args:
        method: a name of `METHODS` or of `EDITS`.
        changes: field → decimal string, integer or list of integers.

    Raises:
        PlanError: an unknown method or setting, or one out of range.
    """
    if method not in DEFAULTS:
        raise PlanError(f"expected a method of {sorted(DEFAULTS)}, got {method!r}")
    known = {field.name for field in fields(Settings)}
    unknown = sorted(set(changes) - known)
    if unknown:
        raise PlanError(f"unknown setting {unknown[0]!r} of {method}: known are {sorted(known)}")
    return replace(
        DEFAULTS[method], **{name: _value(name, value) for name, value in changes.items()}
    )


def _value(name: str, value: Any) -> Any:
    if name == "layers":
        return tuple(int(layer) for layer in value)
    if name in {"skip", "reinforce"}:
        return int(value)
    try:
        return float(Decimal(value)) if isinstance(value, str) else float(int(value))
    except (InvalidOperation, TypeError, ValueError):
        raise PlanError(
            f"expected {name} as a decimal string such as '0.1', got {value!r}"
        ) from None
