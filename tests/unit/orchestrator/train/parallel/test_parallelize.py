"""Layers that are recomputed, compiled, or both."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from orchestrator.train.parallel.parallelize import recompute


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_layer_that_is_recomputed_is_compiled_too(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    layer(x).square().sum().backward()
    plain = layer.weight.grad
    layer.weight.grad = None
    recompute([layer], selective=False, compiled=True)
    layer(x).square().sum().backward()
    assert counters["frames"]["ok"] >= 1
    torch.testing.assert_close(layer.weight.grad, plain)
