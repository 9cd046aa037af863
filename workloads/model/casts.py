"""Weights in the compute type, cast once for several forward passes, as autocast does it for the operators that it
knows: a product of experts is none of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_kept: dict[tuple[int, torch.dtype], Tensor] | None = None
"""The casts of this process by the weight, while they are kept."""


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Context manager within which a weight is cast once."""
    global _kept
    before, _kept = _kept, {} if _kept is None else _kept
    try:
        yield
    finally:
        _kept = before


def cast(weight: Tensor) -> Tensor:
    """The weight in the type of autocast, or itself where there is none. What is recomputed casts anew."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return weight
    dtype = torch.get_autocast_dtype(kind)
    keeps = _kept is not None and torch.is_autocast_cache_enabled() and torch.is_grad_enabled()
    if not keeps or not weight.is_leaf or torch.compiler.is_compiling():
        return weight.to(dtype)
    assert _kept is not None
    key = (id(weight), dtype)
    if key not in _kept:
        _kept[key] = weight.to(dtype)
    return _kept[key]
