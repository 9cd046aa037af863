"""Buckets of gradients: when their sums begin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.parallel import gradient_buckets
from orchestrator.parallel.gradient_buckets import GradientBuckets


@pytest.mark.parametrize("reached", [(0, 1, 2), (2, 1, 0), (0, 2), (1,), ()], ids=str)
def test_sums_begin_in_one_order_whatever_a_rank_s_samples_reach(
    reached: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks whose samples reach other parameters would else sum one bucket with another."""
    monkeypatch.setattr(gradient_buckets, "bucket_bytes", lambda ranks: 16)
    weights = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    begun: list[int] = []

    def start(index: int, flat: Tensor) -> None:
        begun.append(index)

    group: Any = SimpleNamespace(size=2, sent=lambda gradients: None, sums_gradients=True)
    buckets = GradientBuckets(weights, start, group)
    for _ in range(2):
        buckets.zero()
        buckets.arm()
        for number in reached:
            (weights[number] * 2.0).sum().backward()
        assert len(begun) == 3 or len(reached) < 3  # behind the backward pass
        buckets.wait()
        assert begun == [0, 1, 2]
        begun.clear()
