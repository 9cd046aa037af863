"""Layers that are recomputed, compiled, or both, and those in 8 bits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from traced_cases import vocabulary_of

from orchestrator.parallel.layout import Layout
from orchestrator.parallel.low_precision import multiply_in_8_bits
from orchestrator.parallel.recompute import recompute
from workloads.adapters.lora import LoraLinear
from workloads.load import load
from workloads.model import float8
from workloads.model.float8 import Float8Linear


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
    recompute([layer], Layout(recompute="full"), compiled=True)
    layer(x).square().sum().backward()
    assert counters["frames"]["ok"] >= 1
    torch.testing.assert_close(layer.weight.grad, plain)


@pytest.mark.slow
def test_a_compiled_layer_computes_its_products_again_where_recomputation_is_selective() -> None:
    """Inductor has them written into memory of its own, which is not there any more in the backward pass."""
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 4)), torch.randn(2, 4)
    plain = torch.autograd.grad(layer(x).square().sum(), list(layer.parameters()))
    torch._dynamo.reset()
    recompute([layer], Layout(recompute="selective"), compiled=True)
    for found, expected in zip(
        torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())), plain, strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_compiled_layers_of_two_kinds_are_computed_again_by_the_programs_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As DeepSeek-V3's: in the first pass the dense one is computed by the only program that there is."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    workload = load("deepseek-v3-tiny", "causal_lm", vocabulary_of(200), sequence_length=8)
    model = workload.build()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.normal_(0.0, 0.02)
    tokens = torch.randint(8, 150, (2, 9))

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        total = workload.loss(model, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
        total.total.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    plain = gradients()
    recompute(workload.blocks(model), Layout(recompute="full"), compiled=True)
    for found, expected in zip(gradients(), plain, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("selective", [False, True])
def test_what_two_layers_read_is_cast_by_each(selective: bool) -> None:
    """As the decoder's memory that a stage received: a leaf that autocast would cast for the first layer alone."""

    def gradients(layers: list[nn.Module], read: torch.Tensor) -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            total = sum(layer(read).float().square().sum() for layer in layers)
        assert isinstance(total, torch.Tensor)
        return list(torch.autograd.grad(total, [read, *(p for layer in layers for p in layer.parameters())]))

    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
    read = torch.randn(2, 4, requires_grad=True)
    plain = gradients(layers, read)
    recompute(layers, Layout(recompute="selective" if selective else "full"))
    for found, expected in zip(gradients(layers, read), plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_a_gated_feed_forward_network_multiplies_in_8_bits_by_all_three_weights() -> None:
    """Its gate has the name that routers have in some classes."""
    workload = load("llama-tiny", "causal_lm", vocabulary_of(192), sequence_length=16)
    with torch.device("meta"):
        model = workload.build()
    multiply_in_8_bits(workload.blocks(model))
    layers = model.get_submodule("layers.0.feedforward")
    assert {name for name, each in layers.named_children() if isinstance(each, Float8Linear)} == {
        *("gate", "up", "down"),
    }


def test_what_has_8_bits_is_the_linear_layers_of_blocks() -> None:
    """Neither heads, routers and experts, nor layers of a user's own, of other sizes or in 4 bits."""

    class Own(nn.Linear):
        pass

    workload = load("mixtral-tiny", "causal_lm", vocabulary_of(192), sequence_length=16)
    with torch.device("meta"):
        model = workload.build()
    multiply_in_8_bits(workload.blocks(model))
    found = {
        name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, Float8Linear)
    }
    assert found == {"query", "key", "value", "output"}
    others = {name for name, each in model.named_modules() if type(each) is nn.Linear}
    assert not any(".attention." in name for name in others)
    block = nn.ModuleDict(
        {
            "gate": nn.Linear(32, 16),
            "gate_proj": nn.Linear(32, 16),
            "own": Own(32, 16),
            "odd": nn.Linear(32, 12),
        }
    )
    block["adapted"] = LoraLinear(nn.Linear(32, 16), 4, 1.0, magnitude=False)
    multiply_in_8_bits([block])
    assert [name for name, each in block.items() if isinstance(each, Float8Linear)] == ["gate_proj"]
    assert block["adapted"].product is float8.linear
    assert block["adapted"].lora_a.product is nn.functional.linear
