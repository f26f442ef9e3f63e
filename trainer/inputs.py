"""From a run's specification to what it starts from: tokens, batches, weights, each checked against its digest.

Entries that bring their own objective use these too, so that there is one way from run.json to a batch. Relative paths
in a specification count from the run's folder.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

from trainer.convert import is_llama
from trainer.data import BatchPlan, TokenStore
from trainer.errors import DataError
from trainer.selection import read_selection

if TYPE_CHECKING:
    from pathlib import Path

    from trainer.model import Transformer
    from trainer.selection import RecordWeights
    from trainer.spec import RunSpec


def open_store(run: RunSpec, directory: Path) -> TokenStore:
    """The run's documents, every digest recomputed.

    Args:
        run: the run.
        directory: its folder.

    Returns:
        The store.

    Raises:
        DataError: altered tokens, another corpus version, corpus root or tokenizer, or more token ids than the model
            has.
    """
    store = TokenStore.open(directory / run.tokens, run.tokens_digest)
    if run.corpus_version not in ("none", store.corpus_version):
        raise DataError(
            f"tokens: expected corpus version {run.corpus_version}, got {store.corpus_version}"
        )
    if run.corpus_root != "none" and (got := store.corpus_root()) != run.corpus_root:
        raise DataError(
            f"tokens: the roots of the shards must add up to corpus root {run.corpus_root}, got {got}; "
            "a shard is not the corpus's: write the token folder again"
        )
    tokenizers = run.versions["tokenizer"], store.tokenizer_digest
    if "none" not in tokenizers and tokenizers[0] != tokenizers[1]:
        raise DataError(
            f"tokens: expected tokenizer {tokenizers[0]}, got {tokenizers[1]}; "
            "token ids of another tokenizer mean other text"
        )
    if store.vocab_size > run.config.model.vocab_size:
        raise DataError(
            f"config.model.vocab_size: the tokens have {store.vocab_size} ids, the model {run.config.model.vocab_size}",
        )
    return store


def load_excluded(run: RunSpec, directory: Path) -> frozenset[bytes]:
    """Ids of the records that the run must never see.

    Args:
        run: the run.
        directory: its folder.

    Returns:
        32-byte record ids; empty if the run excludes nothing.

    Raises:
        DataError: the file is missing, altered, or has a line that is not a record id.
    """
    if run.excluded is None:
        return frozenset()
    try:
        data = (directory / run.excluded.file).read_bytes()
    except OSError as error:
        raise DataError(f"excluded.file: cannot be read ({error.strerror})") from error
    if (got := hashlib.sha256(data).hexdigest()) != run.excluded.digest:
        raise DataError(f"excluded.file: expected digest {run.excluded.digest}, got {got}")
    lines = data.decode("ascii", errors="replace").split()
    for number, line in enumerate(lines, 1):
        if not re.fullmatch(r"[0-9a-f]{64}", line):
            raise DataError(
                f"excluded.file: entry {number} is not a record id (64 lower-case hex digits)"
            )
    return frozenset(bytes.fromhex(line) for line in lines)


def load_selection(run: RunSpec, directory: Path) -> RecordWeights | None:
    """Weights of the run's records.

    Args:
        run: the run.
        directory: its folder.

    Returns:
        The weights, or None if all records are alike.

    Raises:
        DataError: the file is missing, altered, or malformed.
    """
    if run.selection is None:
        return None
    return read_selection(directory / run.selection.file, run.selection.digest)


def batch_plan(run: RunSpec, directory: Path) -> BatchPlan:
    """The batches of a run.

    Args:
        run: the run.
        directory: its folder.

    Returns:
        The plan of the run's seed, batch, mixture, excluded records and weights.

    Raises:
        DataError: see `open_store`, `load_excluded`, `load_selection` and `BatchPlan`.
    """
    excluded, weights = load_excluded(run, directory), load_selection(run, directory)
    store, config = open_store(run, directory), run.config
    return BatchPlan(store, run.seed, config.batch, config.mixture, excluded, weights)


def initial_model(run: RunSpec, directory: Path) -> Transformer:
    """The model a run starts from: weights of its seed, or those of `init`, which must have the root `init_root`.

    `init` is a checkpoint of the trainer, or a folder in Llama format (`trainer.convert`), whose root is that of its
    weights in float32: `trainer.convert.imported_root`. A run in float64 gets float64 weights: of a float64 checkpoint
    every digit, else the float32 numbers.

    Args:
        run: the run.
        directory: its folder.

    Returns:
        The model, whole, in training mode.

    Raises:
        CheckpointError: the weights are altered, of another root, or of another shape.
    """
    import torch

    dtype = torch.float64 if run.config.precision == "float64" else torch.float32
    if run.init == "none":
        from trainer.model import Transformer, init_parameters

        model = Transformer(run.config.model)
        init_parameters(model, run.seed)
        return model.to(dtype)
    folder = directory / run.init
    if is_llama(folder):
        from trainer.convert import import_as

        return import_as(folder, run.config.model, run.init_root).to(dtype).train()
    from trainer.checkpoint import load_model

    return load_model(folder, run.config.model, run.init_root, dtype).train()
