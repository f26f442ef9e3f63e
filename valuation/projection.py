"""Random projections of gradients that keep inner products: unbiased for every layer shape, and never stored.

    one-sided   phi = sum_layers P_l vec(G_l)             P_l [k, O I], entries of mean 0 and variance 1/k
    two-sided   Phi_l = P_o G_l P_i^T = sum_t (P_o g_t)(P_i a_t)^T     P_o [k_o, O], P_i [k_i, I], variances 1/k_o, 1/k_i

Then ``E <phi_x, phi_y> = <x, y>``. The variance belongs to the *rows* of P, the outputs: dividing by the
number of inputs instead re-weighs layers by their shape and still looks like a projection.

One-sided kinds, of the same variance ``(|x|^2 |y|^2 + <x,y>^2 - 2 sum_j x_j^2 y_j^2) / k``:

- *sparse*: every coordinate goes, with a random sign, to one of the k outputs (a count sketch); costs a
  sum per coordinate instead of k products. The default.
- *dense*: signs / sqrt(k); the oracle's, and k times dearer.

Two-sided projections never form G: the factors are projected first. An axis not longer than its k is
kept as it is, and so are gains and biases, whose gradients are short already.

P is a function of (seed, parameter, block of columns), by Philox, so processes and restarts agree
without exchanging or keeping it. With n records a distortion eps of all distances needs k >= 8 ln(n) / eps^2.

Source: TRAK arXiv 2303.14186; LoGra arXiv 2405.13954; count sketch: Weinberger et al. arXiv 0902.2206.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from valuation.capture import Capture, ExpertsSite, LookupSite, MatrixSite
from valuation.errors import GradientError

if TYPE_CHECKING:
    from torch import Tensor

    from valuation.capture import Groups, Site

BLOCK = 1 << 16
"""Columns of P that one stream of random numbers makes."""
_DENSE_BLOCKS, _SMALL_BLOCKS = (
    8,
    4096,
)  # blocks kept between batches: a dense one has k times 64 Ki numbers


@dataclass(frozen=True, slots=True)
class OneSided:
    """phi = sum_l P_l vec(G_l), one vector of `size` numbers per record."""

    seed: int
    """Seed of P, >= 0."""
    size: int
    """k >= 1."""
    kind: Literal["sparse", "dense"] = "sparse"
    """See the module docstring."""

    def __post_init__(self) -> None:
        if self.size < 1 or self.seed < 0:
            raise GradientError(
                f"projection: expected size >= 1 and seed >= 0, got {self.size} and {self.seed}"
            )

    def project(self, name: str, grads: Tensor) -> Tensor:
        """P_l vec(G) of N gradients of one parameter.

        Args:
            name: the parameter.
            grads: [N, *shape].

        Returns:
            phi [N, k].
        """
        flat_NX = grads.flatten(1)
        phi_kN = flat_NX.new_zeros(self.size, len(flat_NX))
        for start in range(0, flat_NX.shape[1], BLOCK):
            part_NX = flat_NX[:, start : start + BLOCK]
            number, width = start // BLOCK, part_NX.shape[1]
            if self.kind == "sparse":
                bucket_X, sign_X = _buckets(self.seed, name, number, width, self.size)
                phi_kN.index_add_(
                    0, bucket_X.to(grads.device), (part_NX * sign_X.to(part_NX)).T.contiguous()
                )
            else:
                phi_kN += _signs(self.seed, name, number, width, self.size).to(part_NX) @ part_NX.T
        return phi_kN.T

    def features(self, capture: Capture, groups: Groups) -> dict[str, Tensor]:
        """Phi of every record of a captured pass: {"all": [N, k]}."""
        parts = [self.project(name, capture.gradients(name, groups)) for name in capture.shapes]
        return {"all": torch.stack(parts).sum(0)}


@dataclass(frozen=True, slots=True)
class TwoSided:
    """Phi_l = P_o G_l P_i^T, one block of features per parameter."""

    seed: int
    """Seed of all P, >= 0."""
    rows: int = 16
    """k_o >= 1."""
    columns: int = 16
    """k_i >= 1."""

    def __post_init__(self) -> None:
        if min(self.rows, self.columns) < 1 or self.seed < 0:
            raise GradientError(
                f"projection: expected rows and columns >= 1 and seed >= 0, got {self.rows}, {self.columns}, {self.seed}"
            )

    def features(self, capture: Capture, groups: Groups) -> dict[str, Tensor]:
        """Phi of every record of a captured pass: parameter -> [N, F], flattened."""
        return {name: self._one(capture, groups, name) for name in capture.shapes}

    def _one(self, capture: Capture, groups: Groups, name: str) -> Tensor:
        shape = capture.shapes[name]
        if len(shape) == 1:
            return capture.gradients(name, groups)
        out = _side(self.seed, name, "rows", self.rows, shape[-2])
        into = _side(self.seed, name, "columns", self.columns, shape[-1])
        parts = [
            _projected(site, out, into).gradients(groups).flatten(1)
            for site in capture.sites_of(name)
        ]
        return torch.stack(parts).sum(0)


def _projected(site: Site, out: Tensor | None, into: Tensor | None) -> Site:
    """The site with its factors projected; its `gradients` are then P_o G P_i^T."""

    def turned(values: Tensor, matrix: Tensor | None) -> Tensor:
        return values if matrix is None else values @ matrix.to(values).T

    if isinstance(site, LookupSite):
        grad = site.arrived
        if out is None:
            onehot = torch.nn.functional.one_hot(site.input, site.module.num_embeddings).to(grad)  # type: ignore[arg-type]
        else:
            onehot = out.to(grad).T[site.input]
        return MatrixSite(site.parameter, site.module, turned(grad, into), onehot)
    assert isinstance(site, MatrixSite | ExpertsSite)
    return replace(site, input=turned(site.input, into), grad=turned(site.arrived, out))


def stream(seed: int, name: str, block: int | str) -> np.random.Generator:
    """The random numbers of one block of one parameter's projection."""
    digest = hashlib.sha256(f"dataworth-projection-1|{seed}|{name}|{block}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))


@lru_cache(maxsize=_SMALL_BLOCKS)
def _side(seed: int, name: str, side: str, size: int, width: int) -> Tensor | None:
    """P [size, width] with entries N(0, 1/size); None = identity, for an axis not longer than its projection."""
    if size >= width:
        return None
    return torch.from_numpy(
        stream(seed, name, side).standard_normal((size, width)) / math.sqrt(size)
    )


@lru_cache(maxsize=_SMALL_BLOCKS)
def _buckets(seed: int, name: str, block: int, width: int, size: int) -> tuple[Tensor, Tensor]:
    """Output and sign of each column."""
    source = stream(seed, name, block)
    bucket_X = source.integers(0, size, width)
    sign_X = source.integers(0, 2, width, dtype=np.int8) * 2 - 1
    return torch.from_numpy(bucket_X), torch.from_numpy(sign_X)


@lru_cache(maxsize=_DENSE_BLOCKS)
def _signs(seed: int, name: str, block: int, width: int, size: int) -> Tensor:
    """Signs / sqrt(size), [size, width]."""
    bits = np.frombuffer(stream(seed, name, block).bytes(-(-size * width // 8)), dtype=np.uint8)
    signs = np.unpackbits(bits, count=size * width).reshape(size, width).astype(np.float32)
    return torch.from_numpy((signs * 2 - 1) / math.sqrt(size))
