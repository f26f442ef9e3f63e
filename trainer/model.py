"""One decoder-only transformer that knows no parallelism.

    x_0 = E[token]
    x  += Wo softmax(RoPE(Wq n(x)) RoPE(Wk n(x))^T / sqrt(D)  +  mask) Wv n(x)      n = RMSNorm
    x  += W2 (silu(W1 n(x)) * W3 n(x))                     SwiGLU, or a mixture of them: trainer.experts
    logits = W_out n(x_L)                                                           W_out = E when tied

With `qk_norm`, the queries and keys of each head are normalised before they are turned.

A row may hold several documents. `documents_BT` says which position belongs to which; a position sees the earlier
positions of its own document and nothing else, so packing changes no number beyond rounding. The mask is built once
per forward pass and only when some row needs it: with one document per row the causal fast path runs.

Every parameter is drawn from a generator seeded by (seed, name). So two meshes, two layouts and two machines start
from the same bits without a seed checkpoint, and adding a layer changes no other layer's initial weights.

A layout may cut the model into pipeline stages: it deletes entries of `blocks`, and sets embed, norm and head to None
where another stage has them. What is left keeps its names, since `blocks` is keyed by layer number, and forward skips
what is None: a stage without embed takes hidden_BTD in place of tokens, one without head returns it. A layout that cuts
positions replaces `Attention.attend` and `Transformer.mask_of`, one that spreads experts `MixtureOfExperts.dispatch`.

Legend: B rows, T positions, D width, H query heads, K key/value heads, E head width, V vocabulary.

Source: RMSNorm arXiv 1910.07467; RoPE arXiv 2104.09864 eq. 34 (half-split pairs); SwiGLU arXiv 2002.05202 eq. 6;
grouped-query attention arXiv 2305.13245; QK-norm arXiv 2302.05442 section 2, per head as in Qwen3 arXiv 2505.09388.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.experts import FeedForward, MixtureOfExperts

if TYPE_CHECKING:
    from trainer.spec import ModelSpec

# GPT-2's width of the initial normal distribution (Radford et al. 2019); the logits start near 0, the loss near ln V.
INIT_STD = 0.02
_RESIDUAL = ("wo.weight", "w2.weight", "experts.w2")  # matrices that write to the residual stream


class KVCache:
    """Keys and values of the positions seen so far, for decoding; one document per row."""

    def __init__(self, spec: ModelSpec, rows: int, capacity: int, like: Tensor) -> None:
        """Room for `capacity` positions of `rows` rows, with the type and device of `like`."""
        shape = (spec.num_layers, rows, spec.num_kv_heads, capacity, spec.dim // spec.num_heads)
        self.keys_LBKTE = like.new_empty(shape)
        self.values_LBKTE = like.new_empty(shape)
        self.length = 0

    def extend(self, layer: int, k_BKTE: Tensor, v_BKTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values of one layer; returns all of them up to now."""
        stop = self.length + k_BKTE.shape[2]
        self.keys_LBKTE[layer, :, :, self.length : stop] = k_BKTE
        self.values_LBKTE[layer, :, :, self.length : stop] = v_BKTE
        return self.keys_LBKTE[layer, :, :, :stop], self.values_LBKTE[layer, :, :, :stop]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalised x, same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, spec.dim // spec.num_heads
        self.wq = nn.Linear(spec.dim, spec.num_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(spec.dim, spec.num_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(spec.num_heads * self.head_dim, spec.dim, bias=False)
        self.q_norm = RMSNorm(self.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.attend = attend

    def forward(
        self,
        x_BTD: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Mix information between positions.

        Args:
            x_BTD: normalised residual stream.
            turn: cosine and signed sine of the rotary angles, each [B, 1, T, E].
            mask: additive [B, 1, T, T] of 0 and -inf, or None for plain causal attention.
            cache: earlier keys and values, extended in place, or None.

        Returns:
            The update of the residual stream, [B, T, D].
        """
        q, k, v = (
            w(x_BTD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = _rotate(q, turn), _rotate(k, turn)
        causal = mask is None
        if cache is not None:
            causal = causal and cache.length == 0
            k, v = cache.extend(self.layer, k, v)
        out_BHTE = self.attend(q, k, v, mask, causal)
        return self.wo(out_BHTE.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then feed-forward, each on the normalised residual stream."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.attention = Attention(spec, layer)
        self.ffn_norm = RMSNorm(spec.dim, spec.norm_eps)
        self.ffn = (
            MixtureOfExperts(spec) if spec.num_experts else FeedForward(spec.dim, spec.ffn_dim)
        )

    def forward(
        self,
        x_BTD: Tensor,
        turn: tuple[Tensor, Tensor],
        mask: Tensor | None,
        cache: KVCache | None,
        counted_BT: Tensor | None,
    ) -> Tensor:
        """The residual stream after this block; arguments as in `Attention.forward` and `MixtureOfExperts.forward`."""
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), turn, mask, cache)
        normed_BTD = self.ffn_norm(x_BTD)
        if isinstance(self.ffn, MixtureOfExperts):
            return x_BTD + self.ffn(normed_BTD, counted_BT)
        return x_BTD + self.ffn(normed_BTD)


class Transformer(nn.Module):
    """The language model; see the module docstring for the formula."""

    def __init__(self, spec: ModelSpec) -> None:
        """A model with torch's default weights; call `init_parameters` for reproducible ones."""
        super().__init__()
        self.spec = spec
        embed = nn.Embedding(spec.vocab_size, spec.dim)
        head = nn.Linear(spec.dim, spec.vocab_size, bias=False)
        if spec.tied:
            head.weight = embed.weight
        self.embed: nn.Embedding | None = embed
        # Keyed by layer number, not a list: a name survives the removal of the blocks before it.
        self.blocks = nn.ModuleDict(
            {str(layer): Block(spec, layer) for layer in range(spec.num_layers)}
        )
        self.norm: RMSNorm | None = RMSNorm(spec.dim, spec.norm_eps)
        self.head: nn.Linear | None = head
        self.mask_of = document_mask

    @overload
    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = ...,
        documents_BT: Tensor | None = ...,
        *,
        return_hidden: Literal[False] = ...,
        cache: KVCache | None = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = ...,
        documents_BT: Tensor | None = ...,
        *,
        return_hidden: Literal[True],
        cache: KVCache | None = ...,
    ) -> tuple[Tensor, list[Tensor]]: ...
    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        *,
        return_hidden: bool = False,
        cache: KVCache | None = None,
    ) -> Tensor | tuple[Tensor, list[Tensor]]:
        """Logits of the next token at every position.

        Args:
            tokens_BT: int64 token ids in 0..V-1; in a stage without embed, hidden_BTD from the stage before.
            positions_BT: int64 position of each token inside its document; None counts from 0 (or from the cache).
            documents_BT: int64 label of the document that each position belongs to, -1 for padding; None = one document
                per row.
            return_hidden: also return the residual stream after the embedding and after every block.
            cache: earlier keys and values for decoding; excludes several documents per row.

        Returns:
            logits_BTV, or (logits_BTV, list of num_layers + 1 hidden_BTD). A stage without head has hidden_BTD in place
            of logits_BTV, and the list has one entry more than the stage has blocks.
        """
        x_BTD, hidden = self.trunk(tokens_BT, positions_BT, documents_BT, cache)
        logits_BTV = self.logits(x_BTD)
        return (logits_BTV, hidden) if return_hidden else logits_BTV

    def trunk(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Everything before the head: (normalised last hidden_BTD, list of num_layers + 1 hidden_BTD).

        Arguments as in `forward`; a stage without norm returns hidden_BTD as its last block left it.
        """
        if positions_BT is None:
            start = 0 if cache is None else cache.length
            positions_BT = torch.arange(start, start + tokens_BT.shape[1], device=tokens_BT.device)[
                None
            ]
        x_BTD = tokens_BT if self.embed is None else self.embed(tokens_BT)
        turn = rotary_angles(positions_BT, self.spec, x_BTD.dtype)
        mask = None if documents_BT is None else self.mask_of(documents_BT, x_BTD.dtype)
        counted_BT = None if documents_BT is None else documents_BT >= 0
        hidden = [x_BTD]
        for block in self.blocks.values():
            x_BTD = block(x_BTD, turn, mask, cache, counted_BT)
            hidden.append(x_BTD)
        if cache is not None:
            cache.length += tokens_BT.shape[1]
        return (x_BTD if self.norm is None else self.norm(x_BTD)), hidden

    def logits(self, x: Tensor) -> Tensor:
        """Logits [..., V] of what `trunk` returns, [..., D]; a stage without head returns it as it is."""
        return x if self.head is None else self.head(x)


def attend(
    q_BHTE: Tensor,
    k_BKSE: Tensor,
    v_BKSE: Tensor,
    mask: Tensor | None,
    causal: bool,  # noqa: FBT001 - every caller has it as a variable
) -> Tensor:
    """Softmax attention of H query heads over K key and value heads, H a multiple of K.

    Args:
        q_BHTE: queries.
        k_BKSE: keys.
        v_BKSE: values.
        mask: additive [B, 1, T, S] of 0 and -inf, or None.
        causal: whether query t sees keys 0..t only; excludes a mask.

    Returns:
        Mixed values, [B, H, T, E].
    """
    return functional.scaled_dot_product_attention(
        q_BHTE,
        k_BKSE,
        v_BKSE,
        attn_mask=mask,
        is_causal=causal,
        enable_gqa=q_BHTE.shape[1] != k_BKSE.shape[1],
    )


def document_mask(documents_BT: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The additive block-diagonal causal mask, or None when every row is one document.

    Args:
        documents_BT: label of each position's document.
        dtype: type of the scores that the mask is added to.

    Returns:
        [B, 1, T, T] with 0 where query t may see key s (same document, s <= t), else -inf.
    """
    if bool((documents_BT == documents_BT[:, :1]).all()):
        return None
    T = documents_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=documents_BT.device).tril()
    seen_B1TT = (documents_BT[:, None, :, None] == documents_BT[:, None, None, :]) & causal_TT
    # A float mask made once is faster than a boolean one, which attention would convert in every layer.
    return torch.zeros(seen_B1TT.shape, dtype=dtype, device=documents_BT.device).masked_fill_(
        ~seen_B1TT, -math.inf
    )


def rotary_angles(
    positions_BT: Tensor, spec: ModelSpec, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of position * theta^(-2i/E), each [B, 1, T, E], halves repeated."""
    half = spec.dim // spec.num_heads // 2
    # float64: float32 angles lose bits at large positions, and the table is tiny.
    steps = torch.arange(half, dtype=torch.float64, device=positions_BT.device)
    angles_B1Th = positions_BT[:, None, :, None] * spec.rope_theta ** (-steps / half)
    cos, sin = angles_B1Th.cos().to(dtype), angles_B1Th.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _rotate(x_BHTE: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the two halves a, b of the last axis."""
    cos, sin = turn
    return x_BHTE * cos + x_BHTE.roll(x_BHTE.shape[-1] // 2, -1) * sin


@torch.no_grad()
def init_parameters(model: Transformer, seed: int) -> None:
    """Set every parameter from a generator of its own, seeded by (seed, name).

    Args:
        model: whole or a pipeline stage, before its parameters are sliced.
        seed: 0 <= seed < 2**53.

    Matrices are normal with standard deviation 0.02, those that write to the residual stream 0.02 / sqrt(2 L);
    norm weights are 1.

    Source: scaling by 1/sqrt(2 L): Radford et al. 2019, section 2.3.
    """
    layers = model.spec.num_layers  # of the whole model, also in a stage of it
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.fill_(1.0)
            continue
        digest = hashlib.sha256(f"dataworth-init-1|{seed}|{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        std = INIT_STD / math.sqrt(2 * layers) if name.endswith(_RESIDUAL) else INIT_STD
        # Drawn in float32 on the CPU whatever the model's type and device, so that all start from the same numbers.
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(
            0.0, std, generator=generator
        )
        parameter.copy_(drawn)


def num_parameters(model: nn.Module) -> int:
    """Number of trainable numbers; a tied head counts once."""
    return sum(parameter.numel() for parameter in model.parameters())
