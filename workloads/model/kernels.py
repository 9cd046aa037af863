"""Scaled dot-product attention by the fastest kernel that supports the inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from workloads.model.layers import capped
from workloads.model.masks import ByLength, Documents

FLASH_SIZE = 256
"""The largest head size that flash attention supports."""
A_CALL = 25_000
"""The number of scores that a CPU computes, forward and backward, in the time of one more kernel call."""
SINK_WIDTH = 8
"""The number of elements by which sinks widen queries, keys and values."""


FUSED = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
UNFUSED = "unfused"
_noted: list[set[str]] = []


@contextmanager
def noting() -> Iterator[set[str]]:
    """Collect the names of the attention kernels that run within this context.

    The names are those of FUSED, "variable-length flash", and UNFUSED, which materialises all scores. Compiled code is
    not recorded.
    """
    names: set[str] = set()
    _noted.append(names)
    try:
        yield names
    finally:
        _noted.remove(names)


def _note(name: Callable[[], str]) -> None:
    if _noted and not torch.compiler.is_compiling():
        _noted[-1].add(name())


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute scaled dot-product attention with the best kernel that supports the inputs, see
    `attention.AttentionCore`.

    On CUDA, no fused kernel supports both a mask and grouped queries, and the unfused kernel materialises all scores.
    Keys and values are then repeated for each query head, which takes far less memory. Elsewhere the kernel handles
    groups itself but requires values as wide as keys, so the narrower values of latent attention are padded with zeros.
    No kernel supports a cap: it materialises all scores.

    Args:
        query: [B, heads, L, D].
        key: [B, kv_heads, M, D].
        value: [B, kv_heads, M, D of the values].
        allowed: mask or additive scores, [1 or B, 1 or heads, L, M]; None if nothing is hidden.
        causal: whether keys after a query are hidden.
        scale: factor of the scores.
        cap: of the scores; 0 for none.
        sinks: extra scores in the denominator, [heads]; None without.

    Returns:
        [B, heads, L, D of the values].
    """
    if cap:
        return attend_unfused(
            query, key, value=value, allowed=allowed, causal=causal, scale=scale, cap=cap, sinks=sinks
        )
    if sinks is not None:
        return _attend_with_sinks(
            query, key, value=value, allowed=allowed, causal=causal, scale=scale, sinks=sinks
        )
    # Only with a mask: without one the flash kernel reads grouped keys directly.
    if allowed is not None and query.is_cuda:
        key = _for_each_query(query, key)
        value = _for_each_query(query, value)
    if _is_causal_bias(allowed) and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(
            query.device.type
        )  # autocast does not cover what this kind of mask calls
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    how: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    width = value.shape[-1]
    if width < query.shape[-1] and not query.is_cuda:
        value = F.pad(value, (0, query.shape[-1] - width))
    _note(lambda: _choice(query, key, v=value, allowed=allowed, causal=causal, how=how))
    output = F.scaled_dot_product_attention(query, key, value, allowed, is_causal=causal, **how)
    return output if output.shape[-1] == width else output[..., :width]


def _choice(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, how: dict[str, Any]
) -> str:
    """Return the name of the kernel that torch chooses."""
    if _is_causal_bias(allowed):
        allowed, causal = None, True
    return FUSED.get(
        SDPBackend(torch._fused_sdp_choice(q, k, v, allowed, dropout_p=0.0, is_causal=causal, **how)), UNFUSED
    )


def attend_unfused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    scale: float,
    cap: float,
    sinks: Tensor | None = None,
    dropped: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Like `attend`, but materialise all scores. `dropped` applies dropout to the probabilities.

    Args:
        query: [B, heads, L, D].
        key: [B, kv_heads, M, D].
        value: [B, kv_heads, M, D].
        allowed: as in `attend`.
        causal: as in `attend`.
        scale: as in `attend`.
        cap: as in `attend`.
        sinks: as in `attend`.
        dropped: maps probabilities [B, heads, L, M] to those after dropout.
    """
    _note(lambda: UNFUSED)
    key = _for_each_query(query, key)
    value = _for_each_query(query, value)
    scores = query @ key.transpose(-2, -1) * scale
    # Before the mask: tanh would turn -inf into a finite score.
    scores = capped(scores, cap) if cap else scores
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf) if allowed.dtype is torch.bool else scores + allowed
    # The softmax of 16-bit scores is computed in fp32.
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    if sinks is not None:
        # A sink takes a share of the softmax like one more key. Its value is zero, so its column is dropped.
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    shares = scores.softmax(-1, dtype=wide)[..., : key.shape[2]]
    return (shares if dropped is None else dropped(shares)).to(value.dtype) @ value


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float
) -> Tensor | None:
    """Like `attend`, for rows whose documents attend only to themselves. Returns None if no kernel supports it.

    It computes no scores between documents and needs no mask. On a GPU it uses variable-length flash attention (Dao,
    2023) in 16 bits. Elsewhere it batches the documents of equal length, if that is faster than a mask.

    Args:
        query: [B, heads, L, D].
        key: [B, kv_heads, L, D].
        value: [B, kv_heads, L, D].
        documents: the bounds of the documents.
        scale: factor of the scores.
    """
    if query.is_cuda:
        return _attend_flash(query, key, value, documents, scale)
    # Only set on a CPU, where the lengths can be read without a synchronisation.
    by_length = documents.by_length
    if torch.compiler.is_compiling() or by_length is None:
        return None
    (rows, heads, length, _), groups = query.shape, by_length.groups
    # A causal document computes half of its square of scores, where a mask computes all scores of the row. The saving
    # must outweigh one kernel call for each length.
    saved = rows * length**2 - sum(count * size**2 for count, size in groups) // 2
    if heads * saved < len(groups) * A_CALL:
        return None
    return _attend_by_length(
        query, key, value=value, documents=by_length, window=documents.window, scale=scale
    )


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, documents: ByLength, window: int, scale: float
) -> Tensor:
    order, counts = documents.order, [count * size for count, size in documents.groups]
    parts = []
    # [B, heads, L, D] becomes tokens [B x L, heads, D], sorted by the length of their document.
    flat = (
        each.transpose(1, 2).flatten(0, 1).index_select(0, order).split(counts)
        for each in (query, key, value)
    )
    for *tokens, (count, size) in zip(*flat, documents.groups, strict=True):
        q, k, v = (each.unflatten(0, (count, size)).transpose(1, 2) for each in tokens)
        near = Documents(None, window).dense(size, q.device) if 0 < window < size else None
        parts.append(
            attend(q, k, value=v, allowed=near, causal=near is None, scale=scale)
            .transpose(1, 2)
            .flatten(0, 1)
        )
    mixed = torch.cat(parts).index_select(0, documents.back)
    return mixed.unflatten(0, (len(query), -1)).transpose(1, 2)


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float
) -> Tensor | None:
    if documents.bounds is None:
        return None
    return attend_flash(
        query,
        key,
        value=value,
        bounds=documents.bounds,
        key_bounds=documents.bounds,
        window=documents.window,
        scale=scale,
    )


def attend_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    window: int,
    scale: float,
) -> Tensor | None:
    """Like `attend`, for documents concatenated over all rows. Returns None if the kernel does not support it.

    `bounds` and `key_bounds`, int32, delimit each document's queries and keys. A document's last query aligns with its
    last key. With a `window`, a query attends to that many keys.

    Args:
        query: [B, heads, L, D].
        key: [B, kv_heads, M, D].
        value: [B, kv_heads, M, D].
        bounds: of the documents among the queries of all rows, int32 [documents + 1].
        key_bounds: the same among the keys.
        window: keys that a query sees, its own included; 0 for all.
        scale: factor of the scores.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")  # autocast does not cover this kernel
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    size = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] and size % 8 == 0
    if not fits or size > FLASH_SIZE or not _has_flash(query.device):
        return None
    from torch.nn.attention.varlen import varlen_attn

    _note(lambda: "variable-length flash")
    rows = query.shape[0]
    length = query.shape[2]
    most = key.shape[2]
    # The kernel counts the keys before a query, without the key at its own position.
    # -1: no limit on keys before; 0: no key after, which is the causal mask.
    inside = (window - 1 if window else -1, 0)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = varlen_attn(
        q,
        k,
        v,
        cu_seq_q=bounds,
        cu_seq_k=key_bounds,
        max_q=length,
        max_k=most,
        scale=scale,
        window_size=inside,
        enable_gqa=grouped,
    )
    assert isinstance(output, Tensor)
    return output.unflatten(0, (rows, length)).transpose(1, 2)


@cache
def _has_flash(device: torch.device) -> bool:
    """Return whether this GPU runs flash attention: Ampere or newer."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _attend_with_sinks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    causal: bool,
    scale: float,
    sinks: Tensor,
) -> Tensor:
    """Compute attention with sinks by any kernel: a sink is the score of a key that every query sees and whose value is
    zero.

    Queries get one more element, the head's sink. All keys have 0 there, and the added key has 1, so its score is the
    sink. The width grows by eight elements instead of one, because kernels need this alignment.
    """
    size = value.shape[-1]
    length = query.shape[2]
    # Divided by the scale, because the kernel multiplies all scores with it.
    scores = F.pad((sinks / scale).to(query.dtype)[:, None, None], (0, SINK_WIDTH - 1))
    query = torch.cat((query, scores.expand(*query.shape[:3], -1)), -1)
    first = F.pad(key.new_ones(1), (key.shape[-1], SINK_WIDTH - 1)).expand(*key.shape[:2], 1, -1)
    # In front, because a causal query sees every key before it: the sink is then seen by all.
    key = torch.cat((first, F.pad(key, (0, SINK_WIDTH))), 2)
    # A row of zeros for the sink's value, and as wide as the keys, which kernels require.
    value = F.pad(value, (0, SINK_WIDTH, 1, 0))
    if causal:  # one more query keeps the diagonal in place
        query = F.pad(query, (0, 0, 1, 0))
    elif _is_causal_bias(allowed):
        from torch.nn.attention.bias import causal_lower_right

        allowed = causal_lower_right(length, key.shape[2])
    elif allowed is not None:
        # A column for the sink that hides nothing: True in a mask, 0 in a bias.
        allowed = F.pad(allowed, (1, 0), value=1 if allowed.dtype is torch.bool else 0)
    return attend(query, key, value=value, allowed=allowed, causal=causal, scale=scale)[:, :, -length:, :size]


def _for_each_query(query: Tensor, grouped: Tensor) -> Tensor:
    """Repeat the keys or values of each group for all of its queries."""
    times = query.shape[1] // grouped.shape[1]
    return grouped if times == 1 else grouped.repeat_interleave(times, 1)


def _is_causal_bias(allowed: Tensor | None) -> bool:
    """Return whether a mask is a `torch.nn.attention.bias.CausalBias`.

    If that module is not imported, the mask cannot be one. Importing it here would load torch's compiler.
    """
    made_by = sys.modules.get("torch.nn.attention.bias")
    return made_by is not None and isinstance(allowed, made_by.CausalBias)
