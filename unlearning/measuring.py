"""All measurements of an audit, one model in memory at a time, each kept as soon as it is made.

A measurement is one attack on one model. Its rows are written to a file of their own (`rows.part-TAG-NNN.parquet`, no text, ids salted
like in `rows.parquet`) before the next one begins, so that a killed audit goes on with the first measurement that is missing and
publishes the same bytes. TAG is an HMAC under the request's key of plan and material: parts of another plan, other records or
another model shape are not taken. The parts are removed when `rows.parquet` stands.

Attacks that train get a function that loads the model instead of the model, and train what it gives: weights, moments and one layer's
gradient are then all there is in memory, less than three copies of the model.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from typing import TYPE_CHECKING, Any

from provenance.canonical import jcs
from unlearning.rows import Measurement, Row, opaque_id, read_rows, to_table, write_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainer.model import Transformer
    from trainer.spec import ModelSpec
    from unlearning.audit import Inputs
    from unlearning.material import Material
    from unlearning.repertoire import Repertoire

    Attack = Callable[[Any, Material], list[Measurement]]

TRAINING = ("fine_tune", "restoring")  # they get a loader in place of the model
RANDOM = "random"
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
MAPPED_BYTES = 1 << 20


def measurements() -> list[tuple[str, Attack]]:
    """What is measured on every model, in order: the primary attacks and the utility on retained records."""
    from unlearning.attacks.direct import direct
    from unlearning.attacks.fine_tune import fine_tune
    from unlearning.attacks.in_context import in_context
    from unlearning.attacks.membership import losses, membership

    return [
        ("direct", direct),
        ("in_context", in_context),
        ("fine_tune", fine_tune),
        ("membership", membership),
        ("utility", lambda model, m: losses(model, m.retained, "retained", "utility")),
    ]


def first_measurement() -> tuple[str, Attack]:
    """What is measured on the original alone, before anything else: what it has memorised."""
    from unlearning.attacks.memorised import memorised

    return "memorised", memorised


def secondary_measurements(repertoire: Repertoire) -> list[tuple[str, Attack]]:
    """What a repertoire adds, in order; nothing for an empty one.

    Args:
        repertoire: the plan's secondary attacks.
    """
    from unlearning.attacks.asking import asking, sampling
    from unlearning.attacks.lens import lens
    from unlearning.attacks.quantising import quantising
    from unlearning.attacks.ranking import ranking
    from unlearning.attacks.restoring import restoring
    from unlearning.attacks.shots import shots

    planned: tuple[tuple[str, Attack, object], ...] = (
        ("asking", asking, repertoire.asked),
        ("sampling", sampling, repertoire.samples),
        ("shots", shots, repertoire.shots),
        ("restoring", restoring, repertoire.sources),
        ("quantising", quantising, repertoire.bits),
        ("lens", lens, repertoire.lens),
        ("ranking", ranking, repertoire.candidates or repertoire.wrong or repertoire.memberships),
    )
    return [(name, attack) for name, attack, wanted in planned if wanted]


def random_model(shape: ModelSpec, seed: int) -> Transformer:
    """The control that knows nothing.

    Args:
        shape: shape of the audited models.
        seed: the plan's seed.

    Returns:
        A model with fresh weights, in evaluation mode.
    """
    from trainer.model import Transformer, init_parameters

    model = Transformer(shape)
    init_parameters(model, seed)
    return model.eval()


def measure(shape: ModelSpec, directory: Path, inputs: Inputs, material: Material) -> list[Row]:
    """Run every planned measurement that has no part yet.

    Args:
        shape: shape of all models.
        directory: the run's folder.
        inputs: checked inputs.
        material: what is asked with.

    Returns:
        All rows, in order of measurement.

    Raises:
        TrainerError: if a checkpoint is incomplete, altered or of another shape.
        RowsError: if a part is damaged.
    """
    from unlearning.ensemble import load

    _map_tensors()
    planned = [*measurements(), *secondary_measurements(inputs.plan.attacks.repertoire)]
    steps = [(role, digest, folder, *step) for role, folder, digest in inputs.models for step in planned]  # fmt: skip
    original = next(model for model in inputs.models if model[0] == "original")
    steps.insert(0, (original[0], original[2], original[1], *first_measurement()))
    random = (RANDOM, inputs.plan.random_init, directory)
    steps += [(*random, name, attack) for name, attack in planned if name == "utility"]
    tag = parts_tag(shape, inputs)
    for stale in set(directory.glob("rows.part-*")) - set(directory.glob(f"rows.part-{tag}-*")):
        stale.unlink()
    rows: list[Row] = []
    loaded: tuple[str, Transformer] | None = None
    with (directory / "progress.jsonl").open("a", encoding="utf-8") as progress:
        for number, (role, digest, folder, name, attack) in enumerate(steps, start=1):
            part = directory / f"rows.part-{tag}-{number:03d}.parquet"
            if part.exists():
                rows += [Row(**row) for row in read_rows(part).to_pylist()]
                continue
            started, used = time.perf_counter(), time.process_time()

            def fresh(folder: Path = folder, role: str = role) -> Transformer:
                if role == RANDOM:
                    return random_model(shape, inputs.plan.seed)
                give_back()
                model = load(folder, shape)
                give_back()
                return model

            if name in TRAINING:
                loaded = None
                found = attack(fresh, material)
            else:
                if loaded is None or loaded[0] != role + digest:
                    loaded = None  # before the next one is read
                    loaded = (role + digest, fresh())
                found = attack(loaded[1], material)
            give_back()
            own = _rows_of(found, role, digest, inputs, material)
            write_rows(part, to_table(own))
            rows += own
            line = {"step": number, "of": len(steps), "model": role, "attack": name}
            line |= {
                "seconds": round(time.perf_counter() - started, 3),
                "cpu_seconds": round(time.process_time() - used, 3),
                "time": time.time(),
            }
            progress.write(json.dumps(line) + "\n")
            progress.flush()
    return rows


def _map_tensors() -> None:
    """Let glibc map every tensor of a mebibyte or more by itself, so that freeing it returns it.

    By default the limit rises with the largest mapped piece that was freed, up to 32 MiB: from then on weights, moments and gradients of
    one layer lie in the heap, where a small piece above a large hole keeps the hole. It cost a sixth of the model.
    """
    import ctypes
    import sys

    if sys.platform == "linux":
        set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # not in every libc
        if set_option is not None:
            set_option(M_MMAP_THRESHOLD, MAPPED_BYTES)


def give_back() -> None:
    """Return freed memory to the system: glibc keeps what many loads and attacks freed, in pieces, up to another copy of the model."""
    import ctypes
    import sys

    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every libc
        if trim is not None:
            trim(0)


def remove_parts(directory: Path) -> None:
    """Remove the parts of a finished audit.

    Args:
        directory: the run's folder.
    """
    for part in directory.glob("rows.part-*"):
        part.unlink()


def parts_tag(shape: ModelSpec, inputs: Inputs) -> str:
    """What the parts of one audit are named by: an HMAC under the request's key of plan, model shape and material.

    Args:
        shape: shape of all models.
        inputs: checked inputs.

    Returns:
        16 hex digits.
    """
    records = (*inputs.forgotten, *inputs.retained, *inputs.lookalikes)
    content = hashlib.sha256()
    for record in records:
        content.update(jcs([record.subject, record.record_id, record.text, record.group]))
    message = f"{inputs.plan.digest}/{shape}/{content.hexdigest()}".encode()
    return hmac.new(inputs.key, b"dataworth/audit-parts/" + message, hashlib.sha256).hexdigest()[
        :16
    ]


def _rows_of(
    measured: Sequence[Measurement], role: str, digest: str, inputs: Inputs, material: Material
) -> list[Row]:
    return [
        Row(
            subject_id=opaque_id(inputs.key, m.subject),
            population=m.population,
            subgroup=material.groups.get(m.subject, "") if m.population == "forgotten" else "",
            probe=m.probe,
            model=role,
            model_digest=digest,
            attack=m.attack,
            score=m.score,
            value=m.value,
        )
        for m in measured
    ]
