"""Optimisers against their papers' formulas, written out for one matrix."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from orchestrator.spec import OptimizerSpec
from orchestrator.train.cut import Cut
from orchestrator.train.mesh import Group
from orchestrator.train.optimizers import SLOTS, make_optimizer
from orchestrator.train.shard import Shard, boxes_of

START = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
GRADIENTS = [torch.randn(4, 3, generator=torch.Generator().manual_seed(seed)) for seed in (2, 3, 4)]


def norms(parts: Sequence[Tensor]) -> list[Tensor]:
    return [part.norm() for part in parts]


def shard_of(value: Tensor) -> Shard:
    cut = Cut(tuple(value.shape), (0,) * value.dim(), tuple(value.shape))
    parameter = nn.Parameter(value.clone())
    return Shard("p", cut, parameter, boxes_of(cut, 0, value.numel()), Group((0,), 0, None), True, True)


def updated(spec: OptimizerSpec, start: Tensor = START, gradients: Sequence[Tensor] = GRADIENTS) -> Tensor:
    shard = shard_of(start)
    optimizer = make_optimizer(spec, [shard], norms)
    for gradient in gradients:
        shard.parameter.grad = gradient.clone()
        optimizer.step()
    assert set(SLOTS[spec.name]) <= set(optimizer.state[shard.parameter])
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


def test_adamw() -> None:
    spec = OptimizerSpec(name="adamw", lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01)
    w, m, v = START.clone(), torch.zeros(4, 3), torch.zeros(4, 3)
    for t, g in enumerate(GRADIENTS, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        w = w * (1 - 0.1 * 0.01) - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-6)
    torch.testing.assert_close(updated(spec), w)


@pytest.mark.parametrize("name", sorted(SLOTS))
def test_vectors_are_neither_decayed_nor_scaled(name: str) -> None:
    plain = OptimizerSpec(name=name, lr=0.01, eps=1e-6, weight_decay=0.0)  # type: ignore[arg-type]
    decayed = plain.model_copy(update={"weight_decay": 0.5})
    vectors = [g[0] for g in GRADIENTS]
    assert torch.equal(updated(plain, START[0], vectors), updated(decayed, START[0], vectors))
    assert not torch.equal(updated(plain), updated(decayed))


@pytest.mark.parametrize("name", sorted(SLOTS))
def test_a_weight_of_zero_still_moves(name: str) -> None:
    spec = OptimizerSpec(name=name, lr=0.01)  # type: ignore[arg-type]
    moved = updated(spec, torch.zeros(4, 3))
    assert torch.isfinite(moved).all()
    assert (moved != 0).all()
