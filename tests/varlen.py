"""A stand-in for the kernel of attention of sequences of different lengths."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    **told: Any,
) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` says it does, on a processor and in fp64: the last query of a
    document is aligned with its last key."""
    bounds, key_bounds, most, key_most = cu_seq_q, cu_seq_k, max_q, max_k
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert (int(bounds[-1]), int(key_bounds[-1])) == (len(query), len(key))
    assert (int(bounds.diff().max()), int(key_bounds.diff().max())) <= (most, key_most)
    assert int(bounds.diff().min()) >= 0
    assert told["enable_gqa"] == (query.shape[1] != key.shape[1])
    left, right = told["window_size"]
    found = []
    for rows, keys in zip(_between(bounds), _between(key_bounds), strict=True):
        q, k, v = (x[one].transpose(0, 1).double() for x, one in ((query, rows), (key, keys), (value, keys)))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        late = k.shape[1] - q.shape[1]
        apart = torch.arange(q.shape[1])[:, None] + late - torch.arange(k.shape[1])
        seen = (apart >= -right) & ((apart <= left) | (left < 0))
        scores = (q @ k.transpose(-2, -1) * told["scale"]).masked_fill(~seen, -torch.inf)
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found).to(query.dtype)


def _between(bounds: Tensor) -> list[slice]:
    return [slice(*both) for both in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)]
