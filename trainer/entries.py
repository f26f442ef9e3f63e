"""The five entries of a phase record (`trainer.phases`): what each phase of the trainer says about itself."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.manifest import MANIFEST_FILE, model_digest
from trainer.metrics import peak_rss_bytes
from trainer.plan import alternatives, estimate
from trainer.spec import run_digest

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.layout import Layout
    from trainer.spec import RunSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What only the process knows; the rest of the record is read from the run's files."""

    layout: Layout
    """The layout that was trained with."""
    parameters: int
    """Parameters of the whole model."""
    done: int
    """Steps done, over all starts."""
    start_step: int
    """Steps done when this process began."""
    start_root: str
    """Logical root of the state that it began with."""
    root: str
    """Logical root of the newest checkpoint."""
    partition_s: float
    """Seconds until the first step."""
    compared: int
    """How often replicas were compared and found equal."""
    failure: tuple[str, str] = ("", "")
    """(phase, reason) if the run stopped by an error."""


def partition(run: RunSpec, facts: Facts) -> dict[str, Any]:
    """What the run starts from, and how it is cut."""
    layout, config = facts.layout, run.config
    return {
        "responsible": f"trainer.partition in each of {layout.world_size} process(es)",
        "input": {
            "run": run_digest(run),
            "model": model_digest(run.config.model),
            "tokens": run.tokens_digest,
            "init": run.init_root,
        },
        "output": {"state": facts.start_root},
        "check": "digests of tokens, excluded records and checkpoint recomputed; replicas compared before the first step",
        "passed": f"{layout} over {layout.world_size} process(es) from step {facts.start_step}",
        "resources": {
            "seconds": f"{facts.partition_s:.3f}",
            "parameters": facts.parameters,
            "predicted_bytes": estimate(layout, config.model, config.batch).memory,
        },
        "rejected": [
            {"what": str(other.layout), "reason": other.reason}
            for other in alternatives(layout, config.model, config.batch)
        ],
        "uncertainty": "none: weights are drawn per name from the seed, or verified against their root",
        "decided_by": "human: run.json"
        if layout == run.layout
        else "rule: config.min_processes, as processes were gone",
    }


def local(run: RunSpec, facts: Facts, window: dict[str, Any]) -> dict[str, Any]:
    """Forward and backward."""
    batch = run.config.batch
    return {
        "responsible": "trainer.step in each process, on its part of the batch",
        "input": {
            "records": window.get("records_root", "none"),
            "state": window.get("state_digest_before", facts.start_root),
        },
        "output": {"gradients": "none"},
        "check": "loss = sum over tokens / global valid tokens, finite",
        "passed": f"{facts.done - facts.start_step} steps of {batch.rows} rows x {batch.length} tokens",
        "resources": {"peak_rss_bytes": peak_rss_bytes()},
        "rejected": [
            {
                "what": "mean of local means",
                "reason": "weighs a token by how full its process's rows are",
            }
        ],
        "uncertainty": "gradients are not kept; sums have another order in another layout, about 1e-7 per step in float32",
        "decided_by": "human: run.json",
    }


def communicate(run: RunSpec, facts: Facts, losses: str) -> dict[str, Any]:
    """Sums over all processes."""
    traffic = estimate(facts.layout, run.config.model, run.config.batch).traffic
    return {
        "responsible": "trainer.partition: every process sends and receives",
        "input": {"gradients": "none"},
        "output": {"losses": losses},
        "check": "loss and norm finite, the same on every process; replicas compared at each checkpoint",
        "passed": f"replicas equal {facts.compared} times"
        if facts.layout.world_size > 1
        else "one process",
        "resources": {"bytes_per_step": sum(traffic.values()), "bytes_per_axis": traffic},
        "rejected": [
            {
                "what": "averaging gradients",
                "reason": "the loss is already divided by the global count",
            }
        ],
        "uncertainty": "bytes follow from the layout and are not measured; what overlaps with the backward pass counts as compute",
        "decided_by": "rule: the layout's collectives, in one fixed order",
    }


def update(run: RunSpec, window: dict[str, Any], losses: str) -> dict[str, Any]:
    """The optimiser's step."""
    optim = run.config.optim
    return {
        "responsible": "trainer.optim in each process, on its slices",
        "input": {"losses": losses, "state": window.get("state_digest_before", "none")},
        "output": {"state": window.get("state_digest_after", "none")},
        "check": "not applied unless loss and norm are finite; learning rate of the schedule",
        "passed": f"clipped to norm {optim.clip_norm}, peak lr {optim.lr}, decay {optim.weight_decay} on matrices",
        "rejected": [{"what": "decay of norm weights", "reason": "it fights their purpose"}],
        "uncertainty": "none: digests are of the last window, windows.jsonl has them all",
        "decided_by": "human: run.json",
    }


def checkpoint(directory: Path, facts: Facts) -> dict[str, Any]:
    """The newest step-N."""
    manifest = directory / f"step-{facts.done}" / MANIFEST_FILE
    digest = hashlib.sha256(manifest.read_bytes()).hexdigest() if manifest.exists() else "none"
    return {
        "responsible": "trainer.saver: every process writes its slices, the first completes",
        "input": {"state": facts.root},
        "output": {"manifest": digest},
        "check": "SHA-256 of every file and logical root in manifest.json, verified before unpickling on load",
        "passed": f"step {facts.done}",
        "rejected": [
            {
                "what": "saving in the background on the training's process group",
                "reason": "its collectives meet the training's and abort the process",
            }
        ],
        "uncertainty": "none: an interrupted save leaves no step-N",
        "decided_by": "human: run.json",
    }
