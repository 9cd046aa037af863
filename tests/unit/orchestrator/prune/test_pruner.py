"""Masks against torch.nn.utils.prune, and movement pruning against a plain loop with autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune

from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.mesh import ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.partition import Cut
from orchestrator.prune.config import PruneSpec
from orchestrator.prune.pruner import Pruner

ALONE = ProcessGroup((0,), 0, None)
MESH: Any = SimpleNamespace(layout=Layout(), data=ALONE, expert_data=ALONE, copies=ALONE, tp=ALONE)
STEPS = 12
NAMES = ("0.weight", "2.weight")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


def loss(of: nn.Module, step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    return (
        of(torch.randn(16, 8, generator=draw)).square().sub(torch.rand(16, 4, generator=draw)).square().mean()
    )


def pruner_of(network: nn.Module, spec: PruneSpec) -> tuple[Pruner, dict[str, nn.Parameter]]:
    parameters = dict(network.named_parameters())
    shards = []
    for name, each in parameters.items():
        cut = Cut(tuple(each.shape), (0,) * each.dim(), tuple(each.shape))
        shards.append(ParameterShard(name, cut, each, boxes_of(cut, 0, each.numel()), ALONE, True, True))
    cuts = {shard.name: shard.cut for shard in shards if shard.name in NAMES}
    pruner = Pruner(spec, NAMES, shards, FullMatrices(cuts, shards, MESH, torch.device("cpu")))
    pruner.begin()
    return pruner, parameters


def train(
    pruner: Pruner, network: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0
) -> list[float]:
    """Steps as an engine makes them; returns the sparsity after each."""
    found = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        (loss(network, step) / scale).backward()
        pruner.mask_gradients()
        for each in network.parameters():
            each.grad.mul_(scale)
        optimizer.step()
        pruner.update(step, scale, optimizer, {})
        found.append(pruner.metrics["sparsity"])
    return found


def masks(pruner: Pruner) -> dict[str, Tensor]:
    return {
        p.name.split("prune.")[1].removesuffix(".mask"): p.data
        for s in pruner._shards
        for p in pruner.pieces(s)
    }


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_weights_and_masks_are_those_of_torch(scope: str) -> None:
    spec = PruneSpec(sparsity=0.7, scope=scope, steps=(2, 10), choose_every=2)
    ours, theirs = model(), model()
    pruner, _ = pruner_of(ours, spec)
    sparsity = train(pruner, ours, torch.optim.AdamW(ours.parameters(), lr=0.01))
    layers = [(theirs[0], "weight"), (theirs[2], "weight")]
    for each, name in layers:
        torch_prune.identity(each, name)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.01)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss(theirs, step).backward()
        optimizer.step()
        if step in (2, 4, 6, 8, 10):
            # torch compares the weights of the last forward pass, which are those before the update
            theirs(torch.zeros(1, 8))
            share = 0.7 * (1 - (1 - (step - 2) / 8) ** 3)
            units = [layers] if scope == "global" else [[each] for each in layers]
            for unit in units:
                there = sum(each.weight_mask.numel() for each, _ in unit)
                pruned = sum(int((each.weight_mask == 0).sum()) for each, _ in unit)
                more = round(share * there) - pruned
                torch_prune.global_unstructured(unit, torch_prune.L1Unstructured, amount=more)
    for name, each in (("0.weight", theirs[0]), ("2.weight", theirs[2])):
        assert masks(pruner)[name].equal(each.weight_mask.bool())
        found = dict(ours.named_parameters())[name]
        torch.testing.assert_close(found, each.weight_orig * each.weight_mask, rtol=1e-6, atol=1e-7)
    assert sparsity[0] == 0.0
    assert sparsity == sorted(sparsity)
    assert sparsity[-1] == pytest.approx(0.7, abs=0.01)
    zeros = torch.cat([each.flatten() for each in ours.parameters() if each.dim() == 2]) == 0
    assert float(zeros.double().mean()) == sparsity[-1]


def top_v(scores: Tensor, pruned: int) -> Tensor:
    """The mask without so many of the smallest scores."""
    mask = torch.ones(scores.numel())
    mask[scores.flatten().argsort(stable=True)[:pruned]] = 0.0
    return mask.view_as(scores)


def test_movement_is_that_of_a_plain_loop_with_a_straight_through_estimator() -> None:
    spec = PruneSpec(method="movement", scope="layer", sparsity=0.5, steps=(2, 10), choose_every=2)
    ours, theirs = model(), model()
    pruner, _ = pruner_of(ours, spec)
    seen: list[dict[str, Tensor]] = []
    update = pruner.update

    def noting(step: int, *given: Any) -> None:
        update(step, *given)
        seen.append({p.name: p.data.clone() for s in pruner._shards for p in pruner.pieces(s)})

    pruner.update = noting  # type: ignore[method-assign]
    train(pruner, ours, torch.optim.SGD(ours.parameters(), lr=0.05), scale=0.25)
    weights = {name: each.detach().clone().requires_grad_() for name, each in theirs.named_parameters()}
    scores = {name: torch.zeros_like(weights[name], requires_grad=True) for name in NAMES}
    share, returned = 0.0, 0
    masked = {name: torch.ones_like(weights[name]) for name in NAMES}
    for step in range(1, STEPS + 1):
        used = {}
        for name in NAMES:
            # Between two choices the mask stays, and the gradient is that of the straight-through estimator.
            through = scores[name] - scores[name].detach()
            used[name] = weights[name] * (masked[name] + through)
        hidden = torch.tanh(torch.nn.functional.linear(_inputs(step), used["0.weight"], weights["0.bias"]))
        out = torch.nn.functional.linear(hidden, used["2.weight"], weights["2.bias"])
        out.square().sub(_targets(step)).square().mean().backward()
        with torch.no_grad():
            for each in weights.values():
                each -= 0.05 * each.grad
                each.grad = None
            for each in scores.values():
                each -= each.grad
                each.grad = None
            if step in (2, 4, 6, 8, 10):
                share = 0.5 * (1 - (1 - (step - 2) / 8) ** 3)
                for name in NAMES:
                    new = top_v(scores[name], round(share * scores[name].numel()))
                    returned += int(((new == 1) & (masked[name] == 0)).sum())
                    masked[name] = new
        for name in NAMES:
            torch.testing.assert_close(
                seen[step - 1][f"prune.{name}.score"], scores[name].detach(), rtol=1e-5, atol=1e-7
            )
            assert seen[step - 1][f"prune.{name}.mask"].equal(masked[name].bool()), (step, name)
    for name, each in ours.named_parameters():
        wanted = weights[name].detach() * (masked[name] if name in NAMES else 1.0)
        torch.testing.assert_close(each.detach(), wanted, rtol=1e-5, atol=1e-7)
    assert returned  # a weight that was pruned came back with its value


def _inputs(step: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(step))


def _targets(step: int) -> Tensor:
    draw = torch.Generator().manual_seed(step)
    torch.randn(16, 8, generator=draw)
    return torch.rand(16, 4, generator=draw)


def test_a_pattern_keeps_the_largest_of_each_group_along_the_inputs() -> None:
    network = model()
    pruner, parameters = pruner_of(network, PruneSpec(pattern="2:4", steps=(1, 1)))
    before = {name: parameters[name].detach().abs().unflatten(1, (-1, 4)) for name in NAMES}
    pruner.update(1, 1.0, torch.optim.SGD(network.parameters()), {})
    for name in NAMES:
        kept = masks(pruner)[name].unflatten(1, (-1, 4))
        assert (kept.sum(-1) == 2).all()
        least = before[name].masked_fill(~kept, 9.0).amin(-1)
        assert (before[name].masked_fill(kept, 0.0).amax(-1) <= least).all()
    assert pruner.metrics == {"sparsity": 0.5}


def test_moments_and_averages_of_pruned_weights_are_zero_and_the_others_untouched() -> None:
    network = model()
    pruner, parameters = pruner_of(network, PruneSpec(sparsity=0.5, steps=(3, 3)))
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
    averages = {each: torch.ones_like(each) for each in parameters.values()}
    for step in range(1, 4):
        optimizer.zero_grad()
        loss(network, step).backward()
        pruner.mask_gradients()
        optimizer.step()
        before = {n: {k: v.clone() for k, v in optimizer.state[p].items()} for n, p in parameters.items()}
        pruner.update(step, 1.0, optimizer, averages)
    for name, parameter in parameters.items():
        mask = masks(pruner).get(name, torch.ones_like(parameter, dtype=torch.bool))
        for slot in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[parameter][slot].equal(before[name][slot] * mask)
        assert averages[parameter].equal(mask.float())


def test_what_is_zero_at_the_start_stays_zero_if_kept() -> None:
    network = model()
    with torch.no_grad():
        network[0].weight[::2] = 0.0
        network[2].weight[0, 0] = 0.0
    pruner, parameters = pruner_of(network, PruneSpec(keep=True))
    zeros = {name: parameters[name].detach() == 0 for name in NAMES}
    train(pruner, network, torch.optim.AdamW(network.parameters(), lr=0.01))
    assert {name: bool((parameters[name] == 0).equal(zeros[name])) for name in NAMES} == dict.fromkeys(
        NAMES, True
    )
    assert pruner.metrics == {"sparsity": 49 / 144}


def test_a_share_below_that_of_kept_zeros_revives_none() -> None:
    network = model()
    with torch.no_grad():
        network[0].weight[::2] = 0.0
    pruner, parameters = pruner_of(network, PruneSpec(keep=True, sparsity=0.1, steps=(1, 1)))
    train(pruner, network, torch.optim.AdamW(network.parameters(), lr=0.01))
    assert (parameters["0.weight"][::2] == 0).all()
    assert pruner.metrics == {"sparsity": 48 / 144}
