"""Scaled dot-product attention by the best kernel that serves."""

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
"""Most numbers of a head that flash attention takes."""
A_CALL = 25_000
"""Scores that a processor computes in the time that a further call of a kernel takes, forwards and backwards."""
SINK_WIDTH = 8
"""By how much sinks widen queries, keys and values."""


FUSED = {
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient",
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
}
UNFUSED = "unfused"
_noted: list[set[str]] = []


@contextmanager
def noting() -> Iterator[set[str]]:
    """The kernels of attention that run within it, in words: those of FUSED, "variable-length flash", and UNFUSED,
    which holds all scores. Of code that is compiled nothing is noted."""
    found: set[str] = set()
    _noted.append(found)
    try:
        yield found
    finally:
        _noted.remove(found)


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
    """Scaled dot-product attention by the best kernel that serves, see `attention.AttentionCore`.

    On CUDA no fused kernel takes both a mask and grouped queries, and the one without fusion holds all scores: each key
    and value is then repeated for its queries, which is less by far. Elsewhere the kernel does that itself, but takes
    no values narrower than keys, as latent attention has them: they are filled up with zeros. No kernel has a cap: all
    scores are held.
    """
    if cap:
        return attend_unfused(
            query, key, value=value, allowed=allowed, causal=causal, scale=scale, cap=cap, sinks=sinks
        )
    if sinks is not None:
        return _attend_with_sinks(
            query, key, value=value, allowed=allowed, causal=causal, scale=scale, sinks=sinks
        )
    if allowed is not None and query.is_cuda:
        key, value = _for_each_query(query, key), _for_each_query(query, value)
    if _is_causal_bias(allowed) and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(
            query.device.type
        )  # of what this kind of mask calls, autocast knows nothing
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    how: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    width = value.shape[-1]
    if width < query.shape[-1] and not query.is_cuda:
        value = F.pad(value, (0, query.shape[-1] - width))
    _note(lambda: _choice(query, key, v=value, allowed=allowed, causal=causal, how=how))
    found = F.scaled_dot_product_attention(query, key, value, allowed, is_causal=causal, **how)
    return found if found.shape[-1] == width else found[..., :width]


def _choice(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, how: dict[str, Any]
) -> str:
    """The kernel that torch takes."""
    if _is_causal_bias(allowed):
        allowed, causal = None, True
    return FUSED.get(SDPBackend(torch._fused_sdp_choice(q, k, v, allowed, 0.0, causal, **how)), UNFUSED)


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
    """As `attend`, holding all scores; `dropped` is what becomes of their shares."""
    _note(lambda: UNFUSED)
    key, value = _for_each_query(query, key), _for_each_query(query, value)
    scores = query @ key.transpose(-2, -1) * scale
    scores = capped(scores, cap) if cap else scores
    if causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf) if allowed.dtype is torch.bool else scores + allowed
    wide = torch.float32 if scores.dtype in (torch.bfloat16, torch.float16) else scores.dtype
    if sinks is not None:
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    shares = scores.softmax(-1, dtype=wide)[..., : key.shape[2]]
    return (shares if dropped is None else dropped(shares)).to(value.dtype) @ value


def attend_documents(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float
) -> Tensor | None:
    """As `attend`, of rows whose documents see themselves alone: no score of two documents is computed, and no mask is
    held. None where no kernel serves.

    On a GPU that is flash attention of sequences of different lengths (Dao, 2023), in 16 bits; else the documents of
    each length together, where that takes less time than a mask.
    """
    if query.is_cuda:
        return _attend_flash(query, key, value, documents, scale)
    found = documents.by_length
    if torch.compiler.is_compiling() or found is None:
        return None
    (rows, heads, length, _), groups = query.shape, found.groups
    saved = rows * length**2 - sum(count * size**2 for count, size in groups) // 2
    if heads * saved < len(groups) * A_CALL:
        return None
    return _attend_by_length(query, key, value=value, documents=found, window=documents.window, scale=scale)


def _attend_by_length(
    query: Tensor, key: Tensor, value: Tensor, documents: ByLength, window: int, scale: float
) -> Tensor:
    order, counts = documents.order, [count * size for count, size in documents.groups]
    parts = []
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
    """As `attend`, of documents that stand one after the other in all rows together, each between two `bounds` of
    queries and two of keys, int32; its last query is that of its last key, and sees, with a `window`, so many keys.
    None where the kernel does not serve."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")  # autocast does not know this kernel
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    size = query.shape[-1]
    fits = query.dtype in (torch.bfloat16, torch.float16) and size == value.shape[-1] and size % 8 == 0
    if not fits or size > FLASH_SIZE or not _has_flash(query.device):
        return None
    from torch.nn.attention.varlen import varlen_attn

    _note(lambda: "variable-length flash")
    rows, length, most = query.shape[0], query.shape[2], key.shape[2]
    inside = (window - 1 if window else -1, 0)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    found = varlen_attn(
        q, k, v, bounds, key_bounds, length, most, scale=scale, window_size=inside, enable_gqa=grouped
    )
    assert isinstance(found, Tensor)
    return found.unflatten(0, (rows, length)).transpose(1, 2)


@cache
def _has_flash(device: torch.device) -> bool:
    """Whether flash attention runs on this GPU: from Ampere on."""
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
    """A sink is the score of a key that every query sees and whose value is zero, so that any kernel serves.

    Queries have a further number, which is their sink, by which all keys are multiplied with zero and that one with
    one; it is eight, for the kernels' alignment.
    """
    size, length = value.shape[-1], query.shape[2]
    scores = F.pad((sinks / scale).to(query.dtype)[:, None, None], (0, SINK_WIDTH - 1))
    query = torch.cat((query, scores.expand(*query.shape[:3], -1)), -1)
    first = F.pad(key.new_ones(1), (key.shape[-1], SINK_WIDTH - 1)).expand(*key.shape[:2], 1, -1)
    key = torch.cat((first, F.pad(key, (0, SINK_WIDTH))), 2)
    value = F.pad(value, (0, SINK_WIDTH, 1, 0))
    if causal:  # one more query keeps the diagonal where it is
        query = F.pad(query, (0, 0, 1, 0))
    elif _is_causal_bias(allowed):
        from torch.nn.attention.bias import causal_lower_right

        allowed = causal_lower_right(length, key.shape[2])
    elif allowed is not None:
        allowed = F.pad(allowed, (1, 0), value=1 if allowed.dtype is torch.bool else 0)
    return attend(query, key, value=value, allowed=allowed, causal=causal, scale=scale)[:, :, -length:, :size]


def _for_each_query(query: Tensor, grouped: Tensor) -> Tensor:
    """Keys or values of groups of queries, repeated for each query of a group."""
    times = query.shape[1] // grouped.shape[1]
    return grouped if times == 1 else grouped.repeat_interleave(times, 1)


def _is_causal_bias(allowed: Tensor | None) -> bool:
    """Whether a mask is `torch.nn.attention.bias.CausalBias`: there is none before that module is imported, and with it
    torch's compiler."""
    made_by = sys.modules.get("torch.nn.attention.bias")
    return made_by is not None and isinstance(allowed, made_by.CausalBias)
