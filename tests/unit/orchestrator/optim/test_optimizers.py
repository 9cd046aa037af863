"""Optimisers against their papers' formulas, written out for one matrix."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.optim.build import OptimizerContext, build_optimizer
from orchestrator.optim.config import OptimizerSpec
from orchestrator.optim.groups import Rate, groups_of, rates_of, set_lr
from orchestrator.optim.kinds import KINDS
from orchestrator.optim.lamb import Lamb
from orchestrator.optim.lars import Lars
from orchestrator.optim.lion import Lion
from orchestrator.optim.own import OwnOptimizer
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut
from orchestrator.train.engines.state import step_count

START = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
GRADIENTS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3, 4)]
PLAIN = ["adamw", "lamb", "lars", "lion"]


def norms(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.norm()[None] for part in parts]


def shard_of(value: Tensor) -> ParameterShard:
    cut = Cut(tuple(value.shape), (0,) * value.dim(), tuple(value.shape))
    parameter = nn.Parameter(value.clone())
    return ParameterShard(
        "p", cut, parameter, boxes_of(cut, 0, value.numel()), ProcessGroup((0,), 0, None), True, True
    )


def updated(spec: OptimizerSpec, start: Tensor = START, gradients: Sequence[Tensor] = GRADIENTS) -> Tensor:
    shard = shard_of(start)
    optimizer = build_optimizer(OptimizerContext(spec, [shard], norms))
    for gradient in gradients:
        shard.parameter.grad = gradient.clone()
        optimizer.step()
    assert {slot.name for slot in KINDS[str(spec.name)].slots} <= set(optimizer.state[shard.parameter])
    assert int(optimizer.state[shard.parameter]["step"]) == len(gradients)
    return shard.parameter.detach()


def test_lamb() -> None:
    spec = OptimizerSpec(name="lamb", lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    w, m, v = START.clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    for t, g in enumerate(GRADIENTS, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        update = (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6) + 0.01 * w
        w = w - 0.1 * w.norm() / update.norm() * update
    torch.testing.assert_close(updated(spec), w)


def test_lars() -> None:
    spec = OptimizerSpec(name="lars", lr=1.0, betas=(0.9, 0.0), eps=1e-9, weight_decay=0.01)
    w, momentum = START.clone(), torch.zeros(4, 3)
    for g in GRADIENTS:
        local = 0.001 * w.norm() / (g.norm() + 0.01 * w.norm() + 1e-9)
        momentum = 0.9 * momentum + 1.0 * local * (g + 0.01 * w)
        w = w - momentum
    torch.testing.assert_close(updated(spec), w)


def test_lion() -> None:
    spec = OptimizerSpec(name="lion", lr=0.1, betas=(0.9, 0.99), weight_decay=0.01)
    w, m = START.clone(), torch.zeros(4, 3)
    for g in GRADIENTS:
        w = w - 0.1 * ((0.9 * m + 0.1 * g).sign() + 0.01 * w)
        m = 0.99 * m + 0.01 * g
    torch.testing.assert_close(updated(spec), w)


@pytest.mark.contract
def test_adamw() -> None:
    spec = OptimizerSpec(name="adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    w, m, v = START.clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    for t, g in enumerate(GRADIENTS, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
    torch.testing.assert_close(updated(spec), w)


@pytest.mark.parametrize("name", ["lamb", "lars"])
def test_each_expert_of_a_stack_has_a_ratio_of_its_own(name: str) -> None:
    spec = OptimizerSpec(name=name, lr=0.1, eps=1e-6, weight_decay=0.01)
    start = torch.stack([START * size for size in (0.1, 1.0, 10.0)])
    gradients = [torch.stack([g, g.flip(0), -g]) for g in GRADIENTS]
    shard = shard_of(start)
    shard = replace(shard, cut=replace(shard.cut, stack=True))

    def of_each(parts: Sequence[Tensor]) -> list[Tensor]:
        return [torch.stack([piece.norm() for piece in shard.slices(part)]) for part in parts]

    optimizer = build_optimizer(OptimizerContext(spec, [shard], of_each))
    for gradient in gradients:
        shard.parameter.grad = gradient.clone()
        optimizer.step()
    alone = [updated(spec, start[i], [g[i] for g in gradients]) for i in range(3)]
    torch.testing.assert_close(shard.parameter.detach(), torch.stack(alone), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_a_scaled_parameter_learns_at_its_own_rate(name: str) -> None:
    """What decay takes away at a step is the same at every scale."""
    spec = OptimizerSpec(name=name, lr=0.1, eps=1e-6, weight_decay=0.01)
    fast, slow, vector = shard_of(START), shard_of(START), shard_of(START[0])
    slow = replace(slow, name="q")
    optimizer = build_optimizer(
        OptimizerContext(spec, [fast, slow, vector], norms, lambda name: Rate(0.25 if name == "q" else 1.0))
    )
    set_lr(optimizer.param_groups, 0.1)
    for shard in (fast, slow, vector):
        shard.parameter.grad = torch.zeros_like(shard.parameter)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.025, 0.1]
    optimizer.step()
    assert torch.equal(fast.parameter, slow.parameter)
    assert torch.equal(vector.parameter, START[0])
    for shard in (fast, slow):
        shard.parameter.grad = torch.ones_like(START)
    before = fast.parameter.detach().clone()
    optimizer.step()
    assert len(optimizer.state) == 3
    torch.testing.assert_close(
        slow.parameter - before * (1 - 0.001), (fast.parameter - before * (1 - 0.001)) / 4
    )


def test_groups_without_scales_are_matrices_and_vectors() -> None:
    matrix, vector = nn.Parameter(START), nn.Parameter(START[0])
    groups = groups_of(OptimizerSpec(weight_decay=0.5), [(vector, False, Rate()), (matrix, True, Rate())])
    assert [(len(g["params"]), g["weight_decay"]) for g in groups] == [(1, 0.5), (1, 0.0)]
    assert groups[0]["params"][0] is matrix


@pytest.mark.parametrize("name", PLAIN)
def test_vectors_are_neither_decayed_nor_scaled(name: str) -> None:
    plain = OptimizerSpec(name=name, lr=0.01, eps=1e-6, weight_decay=0.0)
    decayed = plain.model_copy(update={"weight_decay": 0.5})
    vectors = [g[0] for g in GRADIENTS]
    assert torch.equal(updated(plain, START[0], vectors), updated(decayed, START[0], vectors))
    assert not torch.equal(updated(plain), updated(decayed))


@pytest.mark.parametrize("name", PLAIN)
def test_a_weight_of_zero_still_moves(name: str) -> None:
    spec = OptimizerSpec(name=name, lr=0.01)
    moved = updated(spec, torch.zeros(4, 3))
    assert torch.isfinite(moved).all()
    assert (moved != 0).all()


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion"])
def test_layer_decay_is_the_plain_loop_over_parameter_groups(name: str) -> None:
    """Of each depth a group of its own with lr times a power of the decay, and the same weight decay."""
    spec = OptimizerSpec(name=name, lr=0.1, eps=1e-6, weight_decay=0.1, layer_decay=0.5)
    depths = {"head": 0, "top": 1, "bottom": 2, "tokens": 3}
    workload: Any = SimpleNamespace(depth=depths.__getitem__, lr_scale=lambda name: 1.0)
    shards = [replace(shard_of(START), name=each) for each in depths]
    optimizer = build_optimizer(OptimizerContext(spec, shards, norms, rates_of(spec, workload)))
    for gradient in GRADIENTS:
        set_lr(optimizer.param_groups, spec.lr)
        for shard in shards:
            shard.parameter.grad = gradient.clone()
        optimizer.step()
    for shard in shards:
        alone = spec.model_copy(update={"lr": 0.1 * 0.5 ** depths[shard.name], "layer_decay": 1.0})
        torch.testing.assert_close(shard.parameter.detach(), updated(alone), rtol=1e-6, atol=1e-7)


@pytest.mark.contract
def test_groups_are_those_of_plain_torch() -> None:
    """The first that matches counts; of layers and width a group has the factors still."""
    spec = OptimizerSpec(
        lr=0.1, eps=1e-6, weight_decay=0.1, betas=(0.9, 0.99), layer_decay=0.5,
        groups=[
            {"match": ["head.*", "x.*"], "lr_scale": 0.3, "weight_decay": 0.0},
            {"match": ["*.weight"], "weight_decay": 0.7},
        ],
    )  # fmt: skip
    names = ["head.weight", "body.weight", "body.bias", "other"]
    workload: Any = SimpleNamespace(depth=lambda name: 1, lr_scale=lambda name: 1.0)
    shards = [replace(shard_of(START[0] if "bias" in name else START), name=name) for name in names]
    optimizer = build_optimizer(OptimizerContext(spec, shards, norms, rates_of(spec, workload)))
    theirs = {s.name: nn.Parameter(s.parameter.detach().clone()) for s in shards}
    wanted = {
        "head.weight": (0.3, 0.0),
        "body.weight": (1.0, 0.7),
        "body.bias": (1.0, 0.0),
        "other": (1.0, 0.1),
    }
    groups = [
        {"params": [theirs[n]], "lr": 0.05 * scale, "weight_decay": decay}
        for n, (scale, decay) in wanted.items()
    ]
    plain = torch.optim.AdamW(groups, betas=spec.betas, eps=spec.eps)
    for gradient in GRADIENTS:
        set_lr(optimizer.param_groups, spec.lr)
        for shard in shards:
            part = gradient[0] if "bias" in shard.name else gradient
            shard.parameter.grad, theirs[shard.name].grad = part.clone(), part.clone()
        optimizer.step()
        plain.step()
    for shard in shards:
        torch.testing.assert_close(shard.parameter, theirs[shard.name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", [*PLAIN, "own"])
def test_restored_step_counts_are_where_they_are_read(name: str) -> None:
    """AdamW's kernel reads them on the device; for all others the host would wait for every parameter."""
    kinds = {"adamw": torch.optim.AdamW, "lamb": Lamb, "lars": Lars, "lion": Lion, "own": OwnOptimizer}
    kind, shard = kinds[name], shard_of(START.to("meta"))
    steps = step_count(3.0, shard, kind.__new__(kind))
    assert steps.device.type == ("meta" if name == "adamw" else "cpu")
