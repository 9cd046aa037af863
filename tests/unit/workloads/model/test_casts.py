"""Weights of experts are cast once for the micro-batches of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from workloads.model import casts
from workloads.model.casts import cast


def passes(weight: Tensor, rows: list[Tensor], keep: bool) -> tuple[Tensor, set[int]]:
    """The gradient of the weight after as many passes as there are rows, all forward passes first, and where its casts
    were."""
    weight.grad = None
    places = set()
    if keep:
        with casts.shared():
            losses = _losses(weight, rows, places)
            for loss in losses:
                loss.backward()
    else:
        for loss in _losses(weight, rows, places):
            loss.backward()
    assert weight.grad is not None
    return weight.grad.clone(), places


def _losses(weight: Tensor, rows: list[Tensor], places: set[int]) -> list[Tensor]:
    found, held = [], []
    for each in rows:
        with torch.autocast("cpu", torch.bfloat16):
            held.append(cast(weight))
            places.add(held[-1].data_ptr())
            found.append((each @ held[-1]).square().sum())
    return found


def test_several_passes_share_a_cast_and_have_the_same_gradient() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=generator, requires_grad=True)
    rows = [torch.randn(4, 8, generator=generator).bfloat16() for _ in range(3)]
    shared, one = passes(weight, rows, keep=True)
    anew, three = passes(weight, rows, keep=False)
    assert (len(one), len(three)) == (1, 3)
    assert torch.equal(shared, anew)


def test_a_cast_is_not_kept_where_it_would_be_wrong() -> None:
    """Beyond its context, without a graph, and by what is recomputed."""
    weight = torch.ones(8, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        with casts.shared():
            with torch.no_grad():
                assert not cast(weight).requires_grad
            first = cast(weight)
            assert cast(weight) is first
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                assert cast(weight) is not first
            with casts.shared():
                assert cast(weight) is first
        with casts.shared():
            assert cast(weight) is not first
        assert cast(weight).dtype is torch.bfloat16
    assert cast(weight) is weight
