"""Cache weights in the compute dtype over several forward passes.

Autocast caches casts only for operators that it knows; the product of experts is not among them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

_CASTS: ContextVar[dict[tuple[int, torch.dtype], Tensor] | None] = ContextVar("casts", default=None)
"""The cached casts by weight; None outside of `shared`."""


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Cast each weight only once within this context."""
    before = _CASTS.get()
    token = _CASTS.set({} if before is None else before)
    try:
        yield
    finally:
        _CASTS.reset(token)


def cast(weight: Tensor) -> Tensor:
    """Return the weight in autocast's dtype, or unchanged without autocast. Recomputation casts it again."""
    kind = weight.device.type
    if not torch.is_autocast_enabled(kind):
        return weight
    dtype = torch.get_autocast_dtype(kind)
    if torch.compiler.is_compiling() or not (torch.is_autocast_cache_enabled() and torch.is_grad_enabled()):
        return weight.to(dtype)
    known = _CASTS.get()
    if known is None or not weight.is_leaf:
        return weight.to(dtype)
    key = (id(weight), dtype)
    if key not in known:
        known[key] = weight.to(dtype)
    return known[key]
