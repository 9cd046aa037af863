"""Attention: multi-head, grouped-query and latent, through one fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from workloads.model import disentangled
from workloads.model.cache import Cache, LayerCache
from workloads.model.config import TransformerConfig
from workloads.model.disentangled import Between
from workloads.model.dropout import CROSS_SCORES, SELF_SCORES, drop, keyed
from workloads.model.head_gates import HeadGates
from workloads.model.kernels import attend, attend_documents, attend_unfused
from workloads.model.layers import CutRMSNorm, norm
from workloads.model.masks import Mask
from workloads.model.mup import latent_score_scale, score_scale
from workloads.model.parts import LatentAttention
from workloads.model.positions import Rotary, rotate, yarn_mscale
from workloads.model.relative_keys import RelativeKeys

ALL = Mask()
"""The mask that hides nothing."""


@dataclass(frozen=True)
class Context:
    """The inputs that all layers of a stack share besides the hidden states, computed once per forward pass.

    Attributes:
        mask: the mask of layers with a window, or of all layers if no layer has a window. `full_mask` and `full_rotary`
            are
            for layers without a window; None if all layers are alike.
        bias: additive scores [1 or B, heads, L, L]. They include the mask and replace `mask`.
        memory: encoder output [B, M, hidden] for cross-attention under `memory_mask`.
        keys: int64 [B, L], the dropout keys of the tokens; None without dropout. `score_keys` are those of all queries;
            under sequence parallelism, `keys` covers only a part of them.
        samples: int64 [B], the keys of the samples, for LayerDrop and gates of heads; None without these.
        between: the distances of disentangled attention.
        real: bool [B, L], False at padding; None without padding. Covers the full sequence, even if the hidden states
            are
            only a part of it.
        cache: what a generating model has read so far. `layer_cache` is this layer's part of it, see `Cache`.
    """

    mask: Mask
    rotary: Rotary | None = None
    bias: Tensor | None = None
    memory: Tensor | None = None
    memory_mask: Mask = ALL
    keys: Tensor | None = None
    samples: Tensor | None = None
    real: Tensor | None = None
    cache: Cache | None = None
    layer_cache: LayerCache | None = None
    full_mask: Mask | None = None
    full_rotary: Rotary | None = None
    score_keys: Tensor | None = None
    between: Between | None = None

    def with_read(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store these keys and values in the cache, if there is one. Return all keys and values read so far.

        Args:
            key: keys of this pass, [B, kv_heads, L, D].
            value: values of this pass, [B, kv_heads, L, D].

        Returns:
            Keys and values [B, kv_heads, M, D] of all M tokens so far.
        """
        if self.cache is None or self.layer_cache is None:
            return key, value
        return self.cache.add(self.layer_cache, key, value)


class AttentionCore(nn.Module):
    """dropout(softmax(cap(q k^T * scale) + mask)) v, see `layers.capped`.

    This module has no weights, so context parallelism can replace it. Queries are [B, heads, L, D], keys and values [B,
    kv_heads, M, D], and heads is a multiple of kv_heads. `sinks` [heads] are extra scores in the denominator of the
    softmax (gpt-oss; Xiao et al., 2024, section 3.3).

    `site` distinguishes the dropout of self-attention from that of cross-attention. `part` is the index of a
    tensor-parallel rank's share of the heads.
    """

    def __init__(self, scale: float, cap: float = 0.0, dropout: float = 0.0, site: int = SELF_SCORES) -> None:
        super().__init__()
        self.scale = scale
        self.cap = cap
        self.dropout = dropout
        self.site = site
        self.part = 0

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask,
        bias: Tensor | None,
        keys: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the attention output [B, heads, L, D].

        Args:
            query: [B, heads, L, D].
            key: [B, kv_heads, M, D].
            value: [B, kv_heads, M, D].
            mask: which keys a query sees.
            bias: additive scores, which include the mask; None without.
            keys: the queries' dropout keys, int64 [B, L]; None outside of training.
            sinks: extra scores in the denominator of the softmax, [heads]; None without.
        """
        documents = mask.documents if bias is None else None
        if documents is not None and not (self.cap or sinks is not None or self.drops(keys)):
            mixed = attend_documents(query, key, value, documents, self.scale)
            if mixed is not None:
                return mixed
        allowed = mask.allowed if bias is None else bias.to(query.dtype)
        if documents is not None:
            packed = documents
            # No kernel takes the documents, so they become one bool mask [B, 1, L, L], which all layers share.
            allowed = documents.once(lambda: packed.dense(query.shape[2], query.device))
        return self.attend(
            query,
            key,
            value=value,
            allowed=allowed,
            causal=mask.causal and allowed is None,
            keys=keys,
            sinks=sinks,
        )

    def drops(self, keys: Tensor | None) -> bool:
        """Return whether attention probabilities are dropped, which no fused kernel supports."""
        return keys is not None and self.dropout > 0.0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        allowed: Tensor | None,
        causal: bool,
        keys: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Like `forward`, for keys that start at position 0, under a mask tensor.

        Args:
            query: [B, heads, L, D].
            key: [B, kv_heads, M, D].
            value: [B, kv_heads, M, D].
            allowed: [1 or B, 1 or heads, L, M], bool or additive; None if nothing is hidden.
            causal: whether keys after a query are hidden too.
            keys: as in `forward`.
            sinks: as in `forward`.
        """
        if keys is None or not self.drops(keys):
            return attend(
                query,
                key,
                value=value,
                allowed=allowed,
                causal=causal,
                scale=self.scale,
                cap=self.cap,
                sinks=sinks,
            )
        heads = query.shape[1]
        # Heads have global numbers, so that a tensor-parallel rank drops what one process drops for the same head.
        numbers = torch.arange(self.part * heads, (self.part + 1) * heads, device=keys.device)
        # [B, heads, L]: one counter-based key for each head and query; `drop` adds the number of the key.
        of_heads = keyed(keys.unsqueeze(1), numbers.unsqueeze(-1))
        dropped = partial(drop, rate=self.dropout, keys=of_heads, site=self.site)
        return attend_unfused(
            query,
            key,
            value=value,
            allowed=allowed,
            causal=causal,
            scale=self.scale,
            cap=self.cap,
            sinks=sinks,
            dropped=dropped,
        )


class Sinks(nn.Module):
    """The learned attention sinks of a layer's heads, see `AttentionCore`."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(heads))


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017), grouped when kv_heads < heads (Ainslie et al. 2023).

    With `cross` the keys and values come from the context's memory.
    """

    def __init__(self, config: TransformerConfig, cross: bool = False) -> None:
        super().__init__()
        width = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        self.cross, self.head_dim = cross, config.head_dim
        self.query = nn.Linear(config.hidden, width, bias=config.attention_bias)
        self.key = nn.Linear(config.hidden, keys, bias=config.attention_bias)
        self.value = nn.Linear(config.hidden, keys, bias=config.attention_bias)
        self.output = nn.Linear(width, config.hidden, bias=config.output_bias)
        self.norms_whole = config.qk_norm_whole
        self.query_norm: nn.Module | None = None
        self.key_norm: nn.Module | None = None
        if config.qk_norm:
            self.query_norm, self.key_norm = _qk_norms(config, width, keys)
        self.relative: RelativeKeys | None = None
        if config.positions == "relative_keys":
            self.distance = nn.Linear(config.hidden, keys, bias=False)
            self.relative = RelativeKeys(config)
        self.scale = score_scale(config)
        self.sinks = Sinks(config.heads) if config.sinks else None
        self.core = AttentionCore(
            self.scale,
            config.score_cap,
            config.attention_dropout,
            CROSS_SCORES if cross else SELF_SCORES,
        )
        self.gates = HeadGates(config.heads, self.core.site) if config.head_gates else None
        self.prefix: nn.Module | None = None  # of an adapter, see `workloads.adapters.adapter`

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Map hidden states [B, L, hidden] to [B, L, hidden].

        Args:
            hidden: hidden states [B, L, hidden].
            context: mask, positions and cache, which all layers share.
        """
        query = self.query(hidden)
        # Before heads are parted: OLMo 2 normalises over all heads together, Qwen 3 each head alone.
        if self.norms_whole and self.query_norm is not None:
            query = self.query_norm(query)
        query = self._heads(query)
        key, value = self._of_memory(context) if self.cross else self._of(hidden)
        if self.query_norm is not None and self.key_norm is not None and not self.norms_whole:
            query = self.query_norm(query)
            key = self.key_norm(key)
        if context.rotary is not None and not self.cross:
            # Rotated before the cache stores them: a key's angle depends on its own position alone, and is computed
            # once.
            query = rotate(query, context.rotary)
            key = rotate(key, context.rotary)
        if not self.cross:
            key, value = context.with_read(key, value)
        if self.prefix is not None:
            # After the rotation: the prefix's vectors have no position (Li and Liang, 2021).
            key, value = self.prefix(key, value)
        mask, bias = (context.memory_mask, None) if self.cross else (context.mask, context.bias)
        if context.between is not None:
            query, scores = self._by_distance(query, key, context.between)
            allowed = mask.dense(query.shape[2], query.device)
            # One additive tensor: fused kernels take a mask or a bias, not both.
            bias = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        sinks = None if self.sinks is None else self.sinks.weight
        # [B, heads, L, D]; the heads are then laid side by side, [B, L, heads x D], for the output projection.
        mixed = self.core(query, key, value, mask, bias, keys=context.score_keys, sinks=sinks)
        mixed = mixed if self.gates is None else self.gates(mixed, context.samples)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _of(self, source: Tensor) -> tuple[Tensor, Tensor]:
        key = self.key(source)
        value = self.value(source)
        if self.norms_whole and self.key_norm is not None:
            key = self.key_norm(key)
        return self._heads(key), self._heads(value)

    def _by_distance(self, query: Tensor, key: Tensor, between: Between) -> tuple[Tensor, Tensor]:
        """Return the queries for content, and the scores by distance."""
        vectors = between.vectors.unsqueeze(0).to(query.dtype)
        if self.relative is not None:
            query, scores = self.relative(query, self._heads(self.distance(vectors)), between)
            return query, scores * self.scale
        of_queries = self._heads(self.query(vectors))
        of_keys = self._heads(self.key(vectors))
        return query, disentangled.scores(query, key, of_queries, of_keys, between.numbers) * self.scale

    def _of_memory(self, context: Context) -> tuple[Tensor, Tensor]:
        assert context.memory is not None
        if context.layer_cache is None:
            return self._of(context.memory)
        if context.layer_cache.memory is None:
            # The encoder's output does not change while the decoder generates, so its keys and values are computed at
            # the first token only.
            context.layer_cache.memory = self._of(context.memory)
        return context.layer_cache.memory

    def _heads(self, x: Tensor) -> Tensor:
        # The number of heads follows from the shape, because a tensor-parallel rank has only some of the heads.
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def _qk_norms(config: TransformerConfig, queries: int, keys: int) -> tuple[nn.Module, nn.Module]:
    """Return the norms of queries and keys: over each head alone, or over vectors of `queries` and `keys` elements that
    span all heads.
    """
    if config.qk_norm_whole:
        return CutRMSNorm(queries, config.norm_eps), CutRMSNorm(keys, config.norm_eps)
    return norm(config, config.head_dim), norm(config, config.head_dim)


class LatentMultiHeadAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, eq. 9 to 19): keys and values from one low-rank vector.

    Each head has `nope_dim` plain dimensions and `rope_dim` rotated ones; the rotated key is shared by heads.
    """

    def __init__(self, config: TransformerConfig, latent: LatentAttention) -> None:
        super().__init__()
        self.heads, self.latent = config.heads, latent
        width = latent.nope_dim + latent.rope_dim
        if latent.query_rank:
            self.query_down = nn.Linear(config.hidden, latent.query_rank, bias=config.attention_bias)
            self.query_norm = norm(config, latent.query_rank, latent.norm_eps)
            self.query_up = nn.Linear(latent.query_rank, config.heads * width, bias=False)
        else:
            self.query = nn.Linear(config.hidden, config.heads * width, bias=False)
        self.latent_down = nn.Linear(
            config.hidden, latent.key_value_rank + latent.rope_dim, bias=config.attention_bias
        )
        self.latent_norm = norm(config, latent.key_value_rank, latent.norm_eps)
        self.key_value = nn.Linear(
            latent.key_value_rank, config.heads * (latent.nope_dim + latent.value_dim), bias=False
        )
        self.output = nn.Linear(config.heads * latent.value_dim, config.hidden, bias=config.output_bias)
        scale = latent_score_scale(config) * _temperature(config)
        self.core = AttentionCore(scale, dropout=config.attention_dropout)
        self.gates = HeadGates(config.heads, self.core.site) if config.head_gates else None

    def forward(self, hidden: Tensor, context: Context) -> Tensor:
        """Map hidden states [B, L, hidden] to [B, L, hidden].

        Args:
            hidden: hidden states [B, L, hidden].
            context: mask, positions and cache, which all layers share.
        """
        assert context.rotary is not None
        latent = self.latent
        if latent.query_rank:
            query = self._heads(self.query_up(self.query_norm(self.query_down(hidden))))
        else:
            query = self._heads(self.query(hidden))
        # [B, heads, L, nope_dim] and [B, heads, L, rope_dim].
        plain, rotated = query.split((latent.nope_dim, latent.rope_dim), dim=-1)
        query = torch.cat((plain, rotate(rotated, context.rotary)), dim=-1)
        # The latent vector c of a token, [B, L, key_value_rank] (equation 9), and its rotated key, [B, L, rope_dim].
        low, shared = self.latent_down(hidden).split((latent.key_value_rank, latent.rope_dim), dim=-1)
        key, value = (
            self._heads(self.key_value(self.latent_norm(low)))
            .split((latent.nope_dim, latent.value_dim), dim=-1)
        )  # fmt: skip
        # One rotated key for all heads (DeepSeek-V2, equation 15): the latent vector cannot carry a position, since
        # the up-projection does not commute with a rotation.
        shared = rotate(shared.unsqueeze(1), context.rotary).expand(-1, self.heads, -1, -1)
        # The cache holds expanded keys and values. DeepSeek's own generation caches `low` and `shared` alone and folds
        # the up-projection into the query, which takes less memory.
        key, value = context.with_read(torch.cat((key, shared), dim=-1), value)
        mixed = self.core(query, key, value, context.mask, context.bias, keys=context.score_keys)
        mixed = mixed if self.gates is None else self.gates(mixed, context.samples)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def _temperature(config: TransformerConfig) -> float:
    """Return YaRN's temperature as a factor of the scores. DeepSeek squares it, because it
    applies to queries and keys.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.kind != "yarn" or not scaling.mscale_all:
        return 1.0
    return yarn_mscale(scaling.factor, scaling.mscale_all) ** 2
