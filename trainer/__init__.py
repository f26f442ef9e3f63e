"""How a model is made: model, parallel layouts, data, optimiser, checkpoints, loop, generation.

Public names load lazily (PEP 562): `import trainer` costs nothing, torch is imported with the first name that needs
it. See README.md for the five phases and the files of a run. The greedy decoder is `trainer.generate.generate`: a
front-door name that is a module too would mean one or the other, depending on what was imported first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint import load_model, newest
    from trainer.convert import export_model, import_model
    from trainer.data import Batch, BatchPlan, Segment, TokenStore, pack, write_tokens
    from trainer.errors import (
        EXIT_DONE,
        EXIT_NUMERICAL,
        EXIT_REFUSED,
        EXIT_RESUME,
        CheckpointError,
        DataError,
        NumericalError,
        SpecError,
        TrainerError,
    )
    from trainer.generate import evaluate, sequence_logprobs
    from trainer.loop import fit, train
    from trainer.manifest import verify
    from trainer.mesh import Mesh, init_mesh
    from trainer.model import Transformer, init_parameters, num_parameters
    from trainer.objective import LanguageModelling, Objective
    from trainer.optim import build_optimizer, learning_rate
    from trainer.partition import apply_layout
    from trainer.presets import PRESETS, count_parameters, flops_per_token, preset
    from trainer.root import checkpoint_root, state_root
    from trainer.selection import write_selection
    from trainer.spec import (
        VERSION_ITEMS,
        BatchSpec,
        Excluded,
        GuardSpec,
        Layout,
        MixtureSpec,
        ModelSpec,
        OptimSpec,
        RunConfig,
        RunSpec,
        Selection,
        load_run,
        no_versions,
        run_digest,
        save_run,
    )
    from trainer.step import StepReport, train_step

_HOME = {
    "checkpoint": ("load_model", "newest"),
    "convert": ("export_model", "import_model"),
    "data": ("Batch", "BatchPlan", "Segment", "TokenStore", "pack", "write_tokens"),
    "errors": (
        "EXIT_DONE", "EXIT_NUMERICAL", "EXIT_REFUSED", "EXIT_RESUME",
        "CheckpointError", "DataError", "NumericalError", "SpecError", "TrainerError",
    ),
    "generate": ("evaluate", "sequence_logprobs"),
    "loop": ("fit", "train"),
    "manifest": ("verify",),
    "mesh": ("Mesh", "init_mesh"),
    "model": ("Transformer", "init_parameters", "num_parameters"),
    "objective": ("LanguageModelling", "Objective"),
    "optim": ("build_optimizer", "learning_rate"),
    "partition": ("apply_layout",),
    "presets": ("PRESETS", "count_parameters", "flops_per_token", "preset"),
    "root": ("checkpoint_root", "state_root"),
    "selection": ("write_selection",),
    "spec": (
        "VERSION_ITEMS", "BatchSpec", "Excluded", "GuardSpec", "Layout", "MixtureSpec", "ModelSpec", "OptimSpec",
        "RunConfig", "RunSpec", "Selection", "load_run", "no_versions", "run_digest", "save_run",
    ),
    "step": ("StepReport", "train_step"),
}  # fmt: skip
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [  # noqa: RUF022 - plain order, as `sorted` has it
    "Batch",
    "BatchPlan",
    "BatchSpec",
    "CheckpointError",
    "DataError",
    "EXIT_DONE",
    "EXIT_NUMERICAL",
    "EXIT_REFUSED",
    "EXIT_RESUME",
    "Excluded",
    "GuardSpec",
    "LanguageModelling",
    "Layout",
    "Mesh",
    "MixtureSpec",
    "ModelSpec",
    "NumericalError",
    "Objective",
    "OptimSpec",
    "PRESETS",
    "RunConfig",
    "RunSpec",
    "Segment",
    "Selection",
    "SpecError",
    "StepReport",
    "TokenStore",
    "TrainerError",
    "Transformer",
    "VERSION_ITEMS",
    "apply_layout",
    "build_optimizer",
    "checkpoint_root",
    "count_parameters",
    "evaluate",
    "export_model",
    "fit",
    "flops_per_token",
    "import_model",
    "init_mesh",
    "init_parameters",
    "learning_rate",
    "load_model",
    "load_run",
    "newest",
    "no_versions",
    "num_parameters",
    "pack",
    "preset",
    "run_digest",
    "save_run",
    "sequence_logprobs",
    "state_root",
    "train",
    "train_step",
    "verify",
    "write_selection",
    "write_tokens",
]


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use."""
    if name not in _MODULE:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}")
    value = getattr(import_module(f"trainer.{_MODULE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names."""
    return list(__all__)
