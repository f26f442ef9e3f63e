"""How deep a secret is gone: activation patching, similarity of representations, and the logit lens, layer by layer.

A method that bends the last layers makes a model silent while its early layers still carry the number. Three views::

    patching    s_t = log p_o(y_t | ...) of the original.  Replace its layer l, at the positions that predict the secret, by
                the states of a source S and go on with the original's own layers: s_t^{S,l}.  D_l^S = mean_t(s_t - s_t^{S,l})
                LER_l = D_l^u / D_l^g        0: the layer still carries it, 1: as little as gold's, more: rather broken than erased
                UDS   = sum_{l in KE} D_l^g clip(LER_l, 0, 1) / sum_{l in KE} D_l^g,      KE = {l: D_l^g > 0.05 nats}
    CKA         erasure_l = clip((CKA(u, g) - CKA(o, g)) / (1 - CKA(o, g)), 0, 1), weight 1 - CKA(o, g)
    logit lens  log p of the secret when layer l of any model is read by the *original's* final norm and head

UDS is 1 for gold and 0 for the original, exactly: the same states go through the same operations.

*When it is wrong.* A model that was ruined also scores near 1: nothing is left in it. Read depth beside utility only. A person
whose secret no layer of the original carries beyond gold (KE empty) has no score and is counted as such.

Cost: one forward pass per model, and half a one per layer and source. Only the states at the secret's positions are kept, so one
model besides the original is in memory at a time.

Shape suffixes: `N` questions, `L` layers, `B` rows, `T` positions, `S` predicting positions, `D` width, `V` vocabulary.

Source: unlearning-depth score, arXiv 2605.24614, and its code gnueaj/unlearning-depth-score; linear CKA, Kornblith et al., ICML
2019, arXiv 1905.00414; logit lens, nostalgebraist, 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from unlearning.scoring import MAX_LOSS, batch_tokens, padded, span_mask
from unlearning.scoring import batches as by_length

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from trainer.model import Transformer
    from unlearning.probes import Probe

KNOWS = 0.05
"""tau: nats per token that a layer's replacement must cost before the layer counts as carrying the secret."""
_TINY = 1e-9  # keeps 1 - CKA(o, g) = 0 from dividing


@dataclass(frozen=True, slots=True, repr=False)
class Site:
    """A batch of questions and the positions that predict their secrets; no `repr`: it holds texts as tokens."""

    place_B: list[int]
    """Ordinal of each row among the questions."""
    tokens_BT: Tensor
    """Prompt and secret, padded on the right, without the last token, which predicts nothing."""
    mask_BT: Tensor
    """Whether the position predicts a token of the secret."""
    truth_S: Tensor
    """That token."""


def sites(probes: Sequence[Probe], model: Transformer) -> list[Site]:
    """Questions of similar length together.

    Args:
        probes: questions with their secrets.
        model: the model that will be asked, or one on the same device.

    Returns:
        Batches of at most `scoring.batch_tokens` padded tokens, or of one question.
    """
    rows = [[*probe.prompt_tokens, *probe.secret_tokens] for probe in probes]
    found = []
    for place_B in by_length([len(row) for row in rows], batch_tokens(model)):
        chosen = [rows[i] for i in place_B]
        tokens_BT = padded(chosen)
        mask_BT = span_mask(chosen, [len(probes[i].prompt_tokens) for i in place_B])
        found.append(Site(place_B, tokens_BT[:, :-1], mask_BT, tokens_BT[:, 1:][mask_BT]))
    return found


@torch.inference_mode()
def states(model: Transformer, batches: Sequence[Site]) -> list[Tensor]:
    """The residual stream after every layer, where the secrets are predicted.

    Args:
        model: a whole model in evaluation mode; it is not changed.
        batches: from `sites`.

    Returns:
        hidden_LSD per batch.
    """
    device = next(model.parameters()).device
    found = []
    for site in batches:
        _, hidden = model.trunk(site.tokens_BT.to(device))
        found.append(torch.stack([layer[site.mask_BT.to(device)] for layer in hidden[1:]]))
    return found


@torch.inference_mode()
def patch_drops(
    original: Transformer, batches: Sequence[Site], source: Sequence[Tensor]
) -> NDArray[np.float64]:
    """What replacing one layer's states by those of another model costs the original's secret.

    Args:
        original: the model that knows; it is not changed.
        batches: from `sites`.
        source: `states` of the other model for the same batches.

    Returns:
        drops_LN, nats per token of the secret; 0 where the layer of the source carries as much as the original's.
    """
    from trainer.model import rotary_angles

    device = next(original.parameters()).device
    blocks = list(original.blocks.values())
    count = sum(len(site.place_B) for site in batches)
    drops_LN = np.zeros((len(blocks), count))
    for site, source_LSD in zip(batches, source, strict=True):
        tokens_BT, mask_BT = site.tokens_BT.to(device), site.mask_BT.to(device)
        last_BTD, hidden = original.trunk(tokens_BT)
        before_B = _secret_logprob(original, last_BTD, site)
        turn = rotary_angles(
            torch.arange(tokens_BT.shape[1], device=device)[None],
            original.spec,
            hidden[0].dtype,
        )
        for layer in range(len(blocks)):
            x_BTD = hidden[layer + 1].clone()
            x_BTD[mask_BT] = source_LSD[layer].to(x_BTD)
            for block in blocks[layer + 1 :]:
                x_BTD = block(x_BTD, turn, None, None, None)
            normed_BTD = x_BTD if original.norm is None else original.norm(x_BTD)
            drops_LN[layer, site.place_B] = before_B - _secret_logprob(original, normed_BTD, site)
    return drops_LN


@torch.inference_mode()
def lens_logprobs(
    original: Transformer, batches: Sequence[Site], source: Sequence[Tensor]
) -> NDArray[np.float64]:
    """Log-probability of the secrets when each layer of a model is read by the original's final norm and head.

    Args:
        original: gives norm and head; the model itself where each is read by its own.
        batches: from `sites`.
        source: `states` of the model that is read.

    Returns:
        lens_LN, nats per token, <= 0.
    """
    return lens_answers(original, batches, source)[1]


@torch.inference_mode()
def lens_answers(
    original: Transformer, batches: Sequence[Site], source: Iterable[Tensor]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What greedy decoding from each layer says, and how likely it makes the secrets.

    Args:
        original: gives norm and head; the model itself where each is read by its own.
        batches: from `sites`.
        source: `states` of the model that is read, of the same depth; one batch's at a time is enough.

    Returns:
        exact_LN, 1 where the layer's first choices are the secret, else 0; lens_LN, nats per token, <= 0.
    """
    shape = (original.spec.num_layers, sum(len(site.place_B) for site in batches))
    exact_LN, lens_LN = np.zeros(shape), np.zeros(shape)
    for site, source_LSD in zip(batches, source, strict=True):
        normed_LSD = source_LSD if original.norm is None else original.norm(source_LSD)
        for layer, normed_SD in enumerate(normed_LSD):
            exact_B, mean_B = _answers(original, normed_SD, site)
            exact_LN[layer, site.place_B], lens_LN[layer, site.place_B] = exact_B, mean_B
    return exact_LN, lens_LN


@dataclass(frozen=True, slots=True)
class Erasure:
    """Depth of forgetting seen by patching."""

    ratios_LN: NDArray[np.float64]
    """Layer-wise erasure, LER, not clipped: how much of gold's drop the unlearned model's states cause; NaN where the layer of the
    original carries nothing beyond gold."""
    scores_N: NDArray[np.float64]
    """Unlearning-depth score of each question, in [0, 1]: 1 erased as deeply as gold, 0 intact; NaN where no layer carries the secret."""


def erasure(
    gold_LN: NDArray[np.float64], unlearned_LN: NDArray[np.float64], threshold: float = KNOWS
) -> Erasure:
    """Erasure of every layer and of every question.

    Args:
        gold_LN: `patch_drops` with gold's states.
        unlearned_LN: `patch_drops` with the unlearned model's.
        threshold: tau, nats per token.

    Returns:
        Ratios and scores.
    """
    knows_LN = gold_LN > threshold
    ratios_LN = np.where(knows_LN, unlearned_LN / np.where(knows_LN, gold_LN, 1.0), np.nan)
    weights_LN = np.where(knows_LN, gold_LN, 0.0)
    kept_N = (weights_LN * np.nan_to_num(ratios_LN).clip(0.0, 1.0)).sum(0)
    total_N = weights_LN.sum(0)
    scores_N = np.where(total_N > 0, kept_N / np.where(total_N > 0, total_N, 1.0), np.nan)
    return Erasure(ratios_LN, scores_N)


def linear_cka(one_ND: NDArray[np.float64], other_ND: NDArray[np.float64]) -> float:
    """Similarity of two representations of the same N things, whatever rotation or scale lies between them.

    CKA = |X'Y|^2 / (|X'X| |Y'Y|) with centred columns and Frobenius norms.

    Args:
        one_ND: one row per thing.
        other_ND: the same things in another representation, of any width.

    Returns:
        In [0, 1]; NaN if one of them does not vary.
    """
    x, y = (a - a.mean(0) for a in (one_ND.astype(np.float64), other_ND.astype(np.float64)))
    scale = float(np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    return float(np.linalg.norm(x.T @ y) ** 2 / scale) if scale > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class CkaErasure:
    """Erasure seen by representations, one entry per layer."""

    erasure_L: NDArray[np.float64]
    """0: as far from gold as the original was, 1: gold's representation."""
    weight_L: NDArray[np.float64]
    """1 - CKA(original, gold): how much there was to erase in the layer."""

    @property
    def mean(self) -> float:
        """Weighted mean over layers; NaN where original and gold do not differ."""
        total = float(self.weight_L.sum())
        return float((self.erasure_L * self.weight_L).sum() / total) if total > _TINY else np.nan


def cka_erasure(
    original: Sequence[Tensor], unlearned: Sequence[Tensor], gold: Sequence[Tensor]
) -> CkaErasure:
    """CKA-erasure of every layer, over all predicting positions.

    Args:
        original: `states` of the original.
        unlearned: of the unlearned model.
        gold: of the gold model.

    Returns:
        Erasure and weight per layer.
    """
    o, u, g = (torch.cat(list(part), 1).double().cpu().numpy() for part in (original, unlearned, gold))  # fmt: skip
    pairs = [
        (linear_cka(u[layer], g[layer]), linear_cka(o[layer], g[layer])) for layer in range(len(o))
    ]
    near_L, far_L = (np.nan_to_num(np.array(side)) for side in zip(*pairs, strict=True))
    erasure_L = ((near_L - far_L) / (1.0 - far_L + _TINY)).clip(0.0, 1.0)
    return CkaErasure(erasure_L=erasure_L, weight_L=1.0 - far_L)


def _secret_logprob(model: Transformer, normed_BTD: Tensor, site: Site) -> NDArray[np.float64]:
    return _answers(model, normed_BTD[site.mask_BT.to(normed_BTD.device)], site)[1]


def _answers(
    model: Transformer, normed_SD: Tensor, site: Site
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Whether each row's secret is the first choice throughout, and its mean log-probability; what is not finite counts as the largest loss."""
    truth_S = site.truth_S.to(normed_SD.device)
    logits_SV = model.logits(normed_SD).float()
    missed_S = ((logits_SV.argmax(-1) != truth_S) | ~logits_SV.isfinite().all(-1)).double().cpu()
    found_S = logits_SV.log_softmax(-1).gather(1, truth_S[:, None])[:, 0].double().cpu()
    found_S = torch.nan_to_num(found_S, nan=-MAX_LOSS).clamp(min=-MAX_LOSS)
    row_S = site.mask_BT.nonzero()[:, 0].cpu()
    nothing_B = torch.zeros(len(site.place_B), dtype=torch.float64)
    sums_B = nothing_B.index_add(0, row_S, found_S)
    exact_B = (nothing_B.index_add(0, row_S, missed_S) == 0).double()
    return exact_B.numpy(), (sums_B / torch.bincount(row_S, minlength=len(site.place_B))).numpy()
