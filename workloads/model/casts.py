"""Weights in the compute type, cast once for several forward passes, as autocast does it for the operators that it
knows: a product of experts is none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_KEPT: ContextVar[dict[tuple[int, torch.dtype], Tensor] | None] = ContextVar("casts", default=None)
"""The casts by their weights, while they are kept."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Context manager within which a weight is cast once."""
    before = _KEPT.get()
    token = _KEPT.set({} if before is None else before)
    try:
        yield
    finally:
        _KEPT.reset(token)


def cast(weight: Tensor) -> Tensor:
    """The weight in the type of autocast, or itself where there is none. What is recomputed casts anew."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return weight
    dtype = torch.get_autocast_dtype(kind)
    if torch.compiler.is_compiling() or not (torch.is_autocast_cache_enabled() and torch.is_grad_enabled()):
        return weight.to(dtype)
    known = _KEPT.get()
    if known is None or not weight.is_leaf:
        return weight.to(dtype)
    key = (id(weight), dtype)
    if key not in known:
        known[key] = weight.to(dtype)
    return known[key]
