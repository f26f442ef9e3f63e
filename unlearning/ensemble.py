"""A model of several: the mean of its constituents' probabilities, asked like one model.

Sharded training releases S models, none of which saw another's records. What is used is their mean::

    p(next token) = (1/S) sum_s p_s(next token)            logits = logsumexp_s log p_s - log S

`Ensemble` has the surface that attacks and scores use of a model (`trunk`, `logits`, a cache), so that an audit asks it the same
questions by the same code: its hidden state is the constituents' side by side, its cache their layers one after the other. The
fine-tuning attack trains all constituents at once through the mean, which is what somebody who holds all their weights would do.

An ensemble is a folder with `ensemble.json`, which names every constituent's checkpoint and its digest; the ensemble's own digest is that
of the file. Nothing of a constituent is copied: whoever removes one leaves an ensemble that is refused.

Source: aggregation of SISA, Bourtoule et al., arXiv 1912.03817, section IV-C (mean of prediction vectors).
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from provenance.canonical import jcs, write_atomic
from unlearning.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from trainer.model import KVCache, Transformer
    from trainer.spec import ModelSpec

FORMAT = 1
FILE = "ensemble.json"
UNDEFINED = {
    "Depth score and erasure ratio (patching)": (
        "a mean of probabilities has no residual stream in which one layer's states could be replaced, and a layer of one constituent has no "
        "counterpart in another"
    ),
    "CKA-erasure": (
        "there is no one representation whose likeness to gold's could be told: constituents were trained on different records from "
        "different weights"
    ),
    "Whom forgetting one person hurts (ripple)": (
        "a push follows the gradient of one model's loss, and its damage belongs to that loss: no constituent is pushed, those that held a "
        "person's records are trained anew"
    ),
    "By part of the model (grafts)": "a part's change can be applied to one model only, and the same part of another constituent is another part",
}
"""What an audit doesn't measure of an ensemble, with the reason; the logit lens is measured of each constituent (`engineering`)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Constituent:
    """One model of an ensemble."""

    shard: int
    """Which part of the records it was trained on."""
    folder: str
    """Its checkpoint, as seen from the ensemble's folder."""
    root: str
    """Digest of its weights."""
    stages: tuple[str, ...] = ()
    """Checkpoints that led to it, one per slice, the first first; the last is `folder`."""


class Ensemble(nn.Module):
    """Mean of the probabilities of models of one shape."""

    def __init__(self, models: Sequence[Transformer]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(models)
        spec = models[0].spec
        # One cache holds the layers of all: the shape of a model that is S times as deep.
        self.spec = dataclasses.replace(spec, num_layers=spec.num_layers * len(models))

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Log of the mean probabilities, logits_BTV; arguments as of one model."""
        hidden_BTD, _ = self.trunk(tokens_BT, positions_BT, documents_BT)
        return self.logits(hidden_BTD)

    def trunk(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of all constituents side by side, [B, T, S*D]; no states of inner layers."""
        found = []
        layers = self.spec.num_layers // len(self.parts)
        for number, part in enumerate(self._own()):
            own = None if cache is None else _layers(cache, number * layers, layers)
            hidden_BTD, _ = part.trunk(tokens_BT, positions_BT, documents_BT, own)
            found.append(hidden_BTD)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return torch.cat(found, -1), []

    def logits(self, x: Tensor) -> Tensor:
        """Logarithm of the mean probabilities [..., V] of what `trunk` returns."""
        parts = x.chunk(len(self.parts), -1)
        each = [
            cast("Transformer", part).logits(own).log_softmax(-1)
            for part, own in zip(self.parts, parts, strict=True)
        ]
        return torch.stack(each).logsumexp(0) - math.log(len(each))

    def _own(self) -> list[Transformer]:
        """The constituents; with the mask of this view, if it was given one (`decoding` masks a shallow copy)."""
        models = [cast("Transformer", part) for part in self.parts]
        mask_of = self.__dict__.get("mask_of")
        if mask_of is None:
            return models
        views = [copy.copy(model) for model in models]
        for view in views:
            view.mask_of = mask_of
        return views


def members(model: Transformer) -> list[Transformer]:
    """The models that a model is made of: the constituents of an ensemble, else the model alone.

    Args:
        model: a model, or an ensemble in its place.

    Returns:
        At least one.
    """
    if not isinstance(model, Ensemble):
        return [model]
    return [cast("Transformer", part) for part in model.parts]


def write_ensemble(folder: Path, constituents: Sequence[Constituent]) -> str:
    """Describe an ensemble.

    Args:
        folder: where; made if needed.
        constituents: its models, at least one.

    Returns:
        Its digest.

    Raises:
        PlanError: without a constituent.
    """
    if not constituents:
        raise PlanError("expected at least one constituent, got none")
    listed = [dataclasses.asdict(one) | {"stages": list(one.stages)} for one in constituents]
    data = jcs({"format": FORMAT, "mean": "probabilities", "constituents": listed})
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE, data)
    return hashlib.sha256(data).hexdigest()


def read_ensemble(folder: Path) -> tuple[Constituent, ...] | None:
    """The constituents of an ensemble's folder.

    Args:
        folder: any folder of a model.

    Returns:
        None where the folder is no ensemble.

    Raises:
        PlanError: a file that is none.
    """
    if not (folder / FILE).exists():
        return None
    wrong = PlanError(f"{FILE} of {folder.name} is no ensemble of format {FORMAT}; make it again")
    try:
        body = json.loads((folder / FILE).read_bytes())
        known = body["format"] == FORMAT and body["mean"] == "probabilities"
        listed = [
            Constituent(**{**one, "stages": tuple(one["stages"])}) for one in body["constituents"]
        ]
    except (ValueError, KeyError, TypeError):
        raise wrong from None
    if not known or not listed:
        raise wrong
    return tuple(listed)


def root_of(folder: Path) -> str:
    """Digest of a model's folder, checkpoint or ensemble, after every file has been checked.

    Args:
        folder: the folder.

    Returns:
        The checkpoint's root, or the ensemble's digest.

    Raises:
        PlanError: a constituent is another than the one that is named.
        TrainerError: an incomplete or altered checkpoint.
    """
    from trainer.checkpoint import verify

    listed = read_ensemble(folder)
    if listed is None:
        return verify(folder).root
    for one in listed:
        if (found := verify(folder / one.folder).root) != one.root:
            raise PlanError(
                f"constituent of shard {one.shard}: expected digest {one.root[:12]}…, got {found[:12]}…"
            )
    return hashlib.sha256((folder / FILE).read_bytes()).hexdigest()


def load(folder: Path, shape: ModelSpec, root: str | None = None) -> Transformer:
    """The model of a folder, checkpoint or ensemble, in evaluation mode.

    Args:
        folder: the folder.
        shape: shape of the model, of each constituent of an ensemble.
        root: digest that it must have; None takes what is there.

    Returns:
        The model; an `Ensemble` has what attacks and scores use of a `Transformer`.

    Raises:
        PlanError: another ensemble than the one that was asked for.
        TrainerError: a checkpoint that is incomplete, altered or of another shape.
    """
    from trainer.checkpoint import load_model

    listed = read_ensemble(folder)
    if listed is None:
        return load_model(folder, shape, root)
    found = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    if root not in (None, found):
        raise PlanError(f"expected the ensemble {root}, got {found}")
    models = [load_model(folder / one.folder, shape, one.root) for one in listed]
    return cast("Any", Ensemble(models).eval())


def _layers(cache: KVCache, first: int, count: int) -> KVCache:
    """Some layers of a cache, sharing its memory."""
    own = copy.copy(cache)
    own.keys_LBKTE = cache.keys_LBKTE[first : first + count]
    own.values_LBKTE = cache.values_LBKTE[first : first + count]
    return own
