"""phases.json: one entry per phase of a run, so that a reader need not take the trainer's word for it.

Each of partition, local, communicate, update and checkpoint says what went in and what came out, how that was
checked, what it cost, which alternatives were rejected and why, how uncertain it is, and who decided. Seconds are of
the first process since it was last started; bytes of communication, memory and the layouts not
taken follow from the layout (`trainer.plan`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs, write_atomic
from trainer.metrics import peak_rss_bytes
from trainer.plan import alternatives, estimate

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.layout import Layout
    from trainer.spec import BatchSpec, ModelSpec, RunSpec

FORMAT = 1
PHASES_FILE = "phases.json"


@dataclass(frozen=True, slots=True)
class Costs:
    """What a process spent."""

    seconds: dict[str, float]
    """Phase -> seconds."""
    steps: int
    """Steps since the process was started."""
    parameters: int
    """Parameters of the whole model."""


def write_phases(directory: Path, run: RunSpec, costs: Costs, *, done: int, root: str) -> None:
    """Write phases.json.

    Args:
        directory: folder of the run.
        run: the run.
        costs: what this process spent.
        done: steps done, over all starts.
        root: logical root of the newest checkpoint.
    """
    entries = {
        "partition": _partition(run, costs),
        "local": _local(run, costs),
        "communicate": _communicate(run),
        "update": _update(run),
        "checkpoint": _checkpoint(done, root),
    }
    phases = []
    for name, entry in entries.items():
        resources = {"seconds": f"{costs.seconds[name]:.3f}", **entry.pop("resources", {})}
        phases.append({"phase": name, "resources": resources, **entry})
    write_atomic(directory / PHASES_FILE, jcs({"format": FORMAT, "run": run.run, "phases": phases}))


def _partition(run: RunSpec, costs: Costs) -> dict[str, Any]:
    return {
        "input": f"{costs.parameters} parameters; tokens {run.tokens_digest}; init {run.init_root}",
        "output": f"{run.layout} over {run.layout.world_size} process(es)",
        "check": "digests of tokens, excluded records and initial checkpoint recomputed; world size as in the run",
        "rejected": [str(other) for other in alternatives(*_asked(run))],
        "uncertainty": "none: weights are drawn per name from the seed, or verified against their root",
        "decided_by": "run.json",
        "resources": {"predicted_bytes": estimate(*_asked(run)).memory},
    }


def _asked(run: RunSpec) -> tuple[Layout, ModelSpec, BatchSpec]:
    return run.layout, run.config.model, run.config.batch


def _local(run: RunSpec, costs: Costs) -> dict[str, Any]:
    return {
        "input": f"{costs.steps} steps of {run.config.batch.rows} rows x {run.config.batch.length} tokens",
        "output": "gradients of this process's share of the loss",
        "check": "loss = sum over tokens / global valid tokens, finite",
        "rejected": ["mean of local means: weighs a token by how full its process's rows are"],
        "uncertainty": "order of sums: about 1e-7 per step between layouts in float32",
        "decided_by": "run.json",
        "resources": {"peak_rss_bytes": peak_rss_bytes()},
    }


def _communicate(run: RunSpec) -> dict[str, Any]:
    traffic = estimate(*_asked(run)).traffic
    return {
        "input": "local gradients and loss",
        "output": "their sums over all processes, and the gradient norm",
        "check": "loss and norm finite, the same on every process",
        "rejected": ["averaging gradients: the loss is already divided by the global count"],
        "uncertainty": "bytes follow from the layout and are not measured; fsdp hides them in the local phase",
        "decided_by": "trainer",
        "resources": {"bytes_per_step": sum(traffic.values()), "bytes_per_axis": traffic},
    }


def _update(run: RunSpec) -> dict[str, Any]:
    optim = run.config.optim
    return {
        "input": f"gradients, clipped to norm {optim.clip_norm}",
        "output": f"weights after AdamW, peak lr {optim.lr}, decay {optim.weight_decay} on matrices",
        "check": "not applied unless loss and norm are finite",
        "rejected": ["decay of norm weights: it fights their purpose"],
        "uncertainty": "none",
        "decided_by": "run.json",
    }


def _checkpoint(done: int, root: str) -> dict[str, Any]:
    return {
        "input": f"weights and moments after step {done}",
        "output": f"step-{done}, root {root}",
        "check": "SHA-256 of every file and logical root in manifest.json, verified before unpickling on load",
        "rejected": ["asynchronous save: on the training's own process group it aborts gloo"],
        "uncertainty": "none: an interrupted save leaves no step-N",
        "decided_by": "run.json",
    }
