"""Muon against torch's own, and what it keeps of each parameter."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.optim.build import OptimizerContext, build_optimizer, slots_of
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import Rate, set_lr
from orchestrator.optim.muon import orthogonal
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.norms import GlobalNorms
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut

ALONE = ProcessGroup((0,), 0, None)
MESH: Any = SimpleNamespace(layout=Layout(), data=ALONE, expert_data=ALONE, copies=ALONE, tp=ALONE)
SHAPES = {"wide": (6, 10), "tall": (12, 5), "table": (9, 6), "bias": (6,)}
BODY = ("wide", "tall")
SPEC = OptimizerSpec(name="muon", lr=0.02, eps=1e-4, weight_decay=0.1)
STEPS = 20


def shard_of(name: str, shape: tuple[int, ...], expert: bool = False) -> ParameterShard:
    cut = Cut(shape, (0,) * len(shape), shape, expert=expert, stack=expert)
    draw = torch.Generator().manual_seed(len(name))
    parameter = nn.Parameter(torch.randn(shape, generator=draw))
    boxes = boxes_of(cut, 0, parameter.numel())
    return ParameterShard(name, cut, parameter, boxes, ALONE, True, True)


def ours(shards: list[ParameterShard], dtype: torch.dtype, rate: Any = lambda name: Rate()) -> Any:
    cuts = {s.name: s.cut for s in shards if s.name in BODY or s.cut.expert}
    full = FullMatrices(cuts, shards, MESH, torch.device("cpu"))
    norms = GlobalNorms(shards, {shard.name: 1 for shard in shards}, full.device)
    return build_optimizer(OptimizerContext(SPEC, shards, norms, rate, full, dtype))


def gradient(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + len(name)))


def test_a_rank_without_a_part_takes_part_with_its_own_device() -> None:
    """Tensors on another device go through another library, in which nobody else waits."""
    cut = Cut((6, 10), (0, 0), (6, 10))
    full = FullMatrices({"wide": cut}, [], MESH, torch.device("meta"))
    assert full._buffer(cut, torch.empty).device.type == "meta"
    assert GlobalNorms([], {"wide": 1}, torch.device("meta"))._counted.device.type == "meta"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_twenty_steps_are_those_of_torch(
    dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's iterates in bf16 alone; for fp32 its conversion does nothing."""
    if dtype is torch.float32:
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    shards = [shard_of(name, shape) for name, shape in SHAPES.items()]
    optimizer = ours(shards, dtype)
    theirs = {s.name: nn.Parameter(s.parameter.detach().clone()) for s in shards}
    peers = [
        torch.optim.Muon(
            [theirs[n] for n in BODY], lr=SPEC.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW([theirs["table"]], lr=SPEC.lr, betas=SPEC.betas, eps=SPEC.eps, weight_decay=0.1),
        torch.optim.AdamW([theirs["bias"]], lr=SPEC.lr, betas=SPEC.betas, eps=SPEC.eps, weight_decay=0.0),
    ]
    for step in range(STEPS):
        for shard in shards:
            found = gradient(shard.name, step, SHAPES[shard.name])
            shard.parameter.grad, theirs[shard.name].grad = found.clone(), found.clone()
        set_lr(optimizer.param_groups, SPEC.lr)
        optimizer.step()
        for peer in peers:
            peer.step()
    for shard in shards:
        torch.testing.assert_close(shard.parameter, theirs[shard.name], rtol=0, atol=tolerance)
        state = optimizer.state[shard.parameter]
        assert {slot.name for slot in slots_of(SPEC, shard.name, BODY)} == state.keys() - {"step"}
        assert int(state["step"]) == STEPS


@pytest.mark.parametrize("shape", [(7, 20), (20, 7), (8, 8), (3, 5, 9)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = torch.linalg.svdvals(orthogonal(matrix, torch.float32))
    assert float(found.min()) > 0.3
    assert float(found.max()) < 1.3


def test_each_expert_of_a_stack_is_a_matrix_of_its_own() -> None:
    stack = shard_of("experts", (3, 6, 4), expert=True)
    alone = [shard_of("wide", (6, 4)) for _ in range(3)]
    for i, shard in enumerate(alone):
        shard.parameter.data.copy_(stack.parameter[i])
        shard.parameter.grad = gradient("g", i, (6, 4))
        ours([shard], torch.float32).step()
    stack.parameter.grad = torch.stack([gradient("g", i, (6, 4)) for i in range(3)])
    ours([stack], torch.float32).step()
    torch.testing.assert_close(stack.parameter.detach(), torch.stack([s.parameter.detach() for s in alone]))


def test_a_matrix_without_a_gradient_is_decayed_alone() -> None:
    shard = shard_of("wide", (6, 10))
    before, shard.parameter.grad = shard.parameter.detach().clone(), torch.zeros(6, 10)
    ours([shard], torch.float32).step()
    torch.testing.assert_close(shard.parameter.detach(), before * (1 - 0.02 * 0.1))


def test_a_layer_learns_at_its_own_rate() -> None:
    slow, fast = shard_of("wide", (6, 10)), shard_of("wide", (6, 10))
    for shard, factor in ((slow, 0.5), (fast, 1.0)):
        shard.parameter.grad = gradient("wide", 0, (6, 10))
        ours([shard], torch.float32, lambda name, factor=factor: Rate(depth=factor)).step()
    before = shard_of("wide", (6, 10)).parameter.detach()
    torch.testing.assert_close(slow.parameter - before, (fast.parameter - before) / 2, rtol=1e-4, atol=1e-6)
