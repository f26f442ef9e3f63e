"""Models in the format of Hugging Face's Llama: a folder with config.json and safetensors, in and out.

What becomes of each name and of the configuration stands in `trainer.llama`. All names and shapes are checked before a
number is read; a folder is written whole or not at all. Large models go to several files with an index.

safetensors holds numbers and no code, but also no digest: a flipped bit in a weight can't be seen here. Compare the
root of what was loaded (`trainer.root.state_root`), or the publisher's digest of the file, before trusting it.

Source: github.com/huggingface/safetensors, format; transformers, modeling_utils.py, for index and file names.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from provenance.canonical import sync_folder, write_atomic
from trainer.errors import AlteredCheckpointError, CheckpointError, OtherModelError
from trainer.llama import EMBEDDING, HEAD, config_of, spec_of, their_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from trainer.model import Transformer
    from trainer.spec import ModelSpec

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9  # transformers' own default for a file of weights


def export_model(
    model: Transformer,
    directory: Path,
    *,
    max_positions: int = 2048,
    end_of_text: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model so that `transformers` reads it: all of the folder, or nothing.

    Args:
        model: a whole model; weights keep their type.
        directory: a folder that does not exist yet.
        max_positions: longest row that the model was trained on; a statement, nothing depends on it here.
        end_of_text: token id that ends a document, or None.
        shard_bytes: largest file of weights; a tensor is never split.

    Raises:
        SpecError: a mixture of experts, which has no Llama form.
        CheckpointError: the folder exists.
    """
    from safetensors.torch import save_file

    config = config_of(model.spec, max_positions=max_positions, end_of_text=end_of_text)
    if directory.exists():
        raise CheckpointError(f"{directory.name}: exists; expected a new folder to export to")
    unfinished = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    tensors = {
        their_name(name): parameter.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
    }
    config["dtype"] = config["torch_dtype"] = str(next(iter(tensors.values())).dtype).split(".")[1]
    shards = list(_shards(tensors, shard_bytes))
    where: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = (
            WEIGHTS_FILE
            if len(shards) == 1
            else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        )
        save_file({n: tensors[n] for n in names}, unfinished / file, metadata={"format": "pt"})
        with (unfinished / file).open("rb") as written:
            os.fsync(written.fileno())
        where |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        write_atomic(unfinished / INDEX_FILE, _json_bytes(index))
    write_atomic(unfinished / CONFIG_FILE, _json_bytes(config))
    unfinished.rename(directory)
    sync_folder(directory.parent)


def import_model(directory: Path) -> Transformer:
    """The model of a folder in Llama format, in float32, on the CPU, in evaluation mode.

    Args:
        directory: holds config.json and model.safetensors, or an index and its files.

    Returns:
        The model; its shape is `model.spec`.

    Raises:
        SpecError: config.json describes something that this model is not.
        CheckpointError: a file or tensor is missing, unreadable, left over, or of another shape.
    """
    import torch

    from trainer.model import Transformer

    spec = spec_of(_read_json(directory / CONFIG_FILE))
    model = Transformer(spec)
    wanted = {their_name(name): parameter for name, parameter in model.named_parameters()}
    homes = _locate(directory, wanted, tied=spec.tied)
    head = None
    with torch.no_grad():
        for name, tensor in _read(directory, homes):
            if name in wanted:
                wanted[name].copy_(tensor)
            else:
                head = tensor
        if head is not None and not torch.equal(head.float(), wanted[EMBEDDING]):
            raise CheckpointError(
                f"{directory.name}: {HEAD} differs from the embedding, but tie_word_embeddings is true"
            )
    return model.eval()


def is_llama(directory: Path) -> bool:
    """Whether a folder is in Llama format; a checkpoint of the trainer has a manifest and no config.json."""
    return (directory / CONFIG_FILE).is_file()


def import_as(directory: Path, spec: ModelSpec, expected_root: str) -> Transformer:
    """The model of a folder in Llama format, if it is the one that is meant.

    Args:
        directory: see `import_model`.
        spec: shape that the model must have.
        expected_root: what `imported_root` must be.

    Returns:
        The model, in float32, in evaluation mode.

    Raises:
        SpecError: config.json describes something that this model is not.
        OtherModelError: another shape.
        AlteredCheckpointError: other weights.
        CheckpointError: see `import_model`.
    """
    model = import_model(directory)
    if model.spec != spec:
        raise OtherModelError(
            f"{directory.name}: of another model: expected {spec}, got {model.spec}"
        )
    if (got := imported_root(model)) != expected_root:
        raise AlteredCheckpointError(f"{directory.name}: expected root {expected_root}, got {got}")
    return model


def imported_root(model: Transformer) -> str:
    """Hex logical root of a model's weights: what names imported weights as `init_root` of a run."""
    from trainer.checkpoint import model_state
    from trainer.root import state_root

    return state_root(model_state(model))


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, cut where the next tensor would make a file too large."""
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + tensor.nbytes > shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += tensor.nbytes
    yield names


def _locate(directory: Path, wanted: Mapping[str, Tensor], *, tied: bool) -> dict[str, str]:
    """Name -> file of every tensor; all names and shapes are checked before a number is read."""
    shapes: dict[str, list[int]] = {}
    homes: dict[str, str] = {}
    for file in _weight_files(directory):
        with _opened(directory, file) as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                # Old files hold the rotary frequencies too, which follow from the configuration.
                if not name.endswith("rotary_emb.inv_freq"):
                    homes[name], shapes[name] = file, opened.get_slice(name).get_shape()
    extra = set(homes) - set(wanted) - ({HEAD} if tied else set())
    missing = set(wanted) - set(homes)
    if missing or extra:
        raise CheckpointError(
            f"{directory.name}: expected {len(wanted)} tensors, got {len(homes)}: lacks {sorted(missing)[:2]}, "
            f"has beyond them {sorted(extra)[:2]}",
        )
    for name, shape in shapes.items():
        expected = list(wanted.get(name, wanted[EMBEDDING]).shape)
        if shape != expected:
            raise CheckpointError(
                f"{directory.name}: {name}: expected shape {expected}, got {shape}"
            )
    return homes


def _read(directory: Path, homes: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, one at a time."""
    for file in sorted(set(homes.values())):
        with _opened(directory, file) as opened:
            for name in sorted(name for name, home in homes.items() if home == file):
                yield name, opened.get_tensor(name)


@contextmanager
def _opened(directory: Path, file: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / file, "pt") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{directory.name}: {file}: expected readable safetensors, got: {error}"
        ) from error


def _weight_files(directory: Path) -> list[str]:
    if not (directory / INDEX_FILE).is_file():
        return [WEIGHTS_FILE]
    index = _read_json(directory / INDEX_FILE).get("weight_map")
    files = sorted(set(index.values())) if isinstance(index, dict) else []
    if not files or not all(isinstance(f, str) and "/" not in f and "\\" not in f for f in files):
        raise CheckpointError(f"{INDEX_FILE}: expected a weight_map of file names, got {files[:2]}")
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{path.name}: not JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path.name}: expected an object, got {type(parsed).__name__}")
    return parsed


def _json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
