"""Products with the Gauss-Newton matrix of a language model, without forming it.

    G v = (1/N) sum_n sum_t J_nt^T (diag(p_nt) - p_nt p_nt^T) J_nt v

J_nt is the derivative of the logits at position t of document n, p_nt the prediction there. From right to
left: a forward-mode derivative of the logits, the Hessian of the cross entropy in the logits, and a
backward pass. G equals the Fisher matrix of the model's own predictions, is positive semidefinite, and has
no Kronecker approximation in it. Several v share the forward pass.

The fused attention kernels have no forward-mode derivative: the plain one is used inside.

Cost: about three passes over the documents for each v.

Source: Martens, arXiv 1412.1193, section 8; Schraudolph 2002.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainer.data import IGNORE
from valuation.errors import GradientError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from trainer.data import Batch
    from valuation.influence.pairing import Left, Pass
    from valuation.influence.scores import TokenSet


@dataclass(frozen=True, slots=True)
class GaussNewton:
    """The matrix of a model on a set of documents."""

    model: nn.Module
    """A `trainer.model.Transformer`."""
    documents: TokenSet
    """Documents that the curvature is taken on."""
    how: Pass
    """Rows of a batch, parameters, processes."""

    def product(self, vectors: Mapping[str, Tensor]) -> Left:
        """G v of Q vectors.

        Args:
            vectors: parameter -> [Q, *shape].

        Returns:
            The same, the same in every process.

        Raises:
            GradientError: no document predicts anything.
        """
        out = {name: torch.zeros_like(values) for name, values in vectors.items()}
        count = int((self.documents.labels_N > 0).sum())
        if not count:
            raise GradientError("documents: expected at least one of 2 or more tokens, got none")
        for number, block in enumerate(self.documents.blocks(self.how.rows)):
            if number % self.how.mesh.world_size != self.how.mesh.rank:
                continue
            for name, part in self._batch(self.documents.batch(block), dict(vectors)).items():
                out[name] += part
        for name in sorted(out):
            self.how.mesh.sum(out[name])
            out[name] /= count
        return out

    def _batch(self, batch: Batch, vectors: Left) -> Left:
        """The sum over the documents of one batch."""
        device = str(next(self.model.parameters()).device)
        tokens_BT, labels_BT, positions_BT, documents_BT = batch.tensors(device)
        counted_BT1 = (labels_BT != IGNORE)[..., None]
        named = dict(self.model.named_parameters())
        point = {name: named[name].detach() for name in vectors}

        def logits(weights: Left) -> Tensor:
            return torch.func.functional_call(
                self.model, weights, (tokens_BT, positions_BT, documents_BT)
            )

        with sdpa_kernel(SDPBackend.MATH):
            logits_BTV = self.model(tokens_BT, positions_BT, documents_BT)
            p_BTV = logits_BTV.detach().softmax(-1)

            def pulled(tangent: Left) -> Tensor:
                moved_BTV = torch.func.jvp(logits, (point,), (tangent,))[1]
                return p_BTV * (moved_BTV - (p_BTV * moved_BTV).sum(-1, keepdim=True))

            with torch.no_grad():
                pulled_QBTV = torch.vmap(pulled)(vectors) * counted_BT1
            found = torch.autograd.grad(
                logits_BTV,
                [named[name] for name in vectors],
                pulled_QBTV,
                is_grads_batched=True,
                allow_unused=True,
            )
        return {
            name: torch.zeros_like(vectors[name]) if part is None else part
            for name, part in zip(vectors, found, strict=True)
        }
