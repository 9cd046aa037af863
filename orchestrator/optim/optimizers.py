"""Optimisers over shards: the update is the same whatever part of a parameter a rank holds.

AdamW is torch's fused kernel. LAMB and LARS scale the update of a matrix by norms of the full matrix, which `norms`
computes from its parts; of a stack of experts each is a matrix. Muon is in `muon`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from orchestrator.config.object_reference import ObjectReference
from orchestrator.config.optimizer import OptimizerSpec
from orchestrator.optim.muon import Muon
from orchestrator.optim.own_optimizer import OwnOptimizer, slots_of_own
from orchestrator.parallel.full_matrices import FullMatrices
from orchestrator.parallel.parameter_shard import ParameterShard
from workloads.workload import Workload

SLOTS = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "lamb": ("exp_avg", "exp_avg_sq"),
    "lion": ("exp_avg",),
    "lars": ("momentum",),
    "muon": ("momentum_buffer",),
}
"""Optimiser state of one parameter, by the optimiser's name; under muon that of a matrix of the layers."""

NOT_DECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names of parameters that do not decay even where they are matrices, as T5's table of distances: those of
`transformers.Trainer.get_decay_parameter_names`."""
BY_NAME = 6
"""The format of a run's data from which on its parameters' names count so."""
Norms = Callable[[Sequence[Tensor]], list[Tensor]]
"""Maps one tensor per shard, in the order of the shards, to the norms of the full tensors that their slices are parts
of, see `ParameterShard.slices`."""


class Rate(NamedTuple):
    """Factors of a parameter's learning rate, of its width (muP), its depth (`layer_decay`) and its group; and the
    weight decay of that, None for the optimiser's."""

    width: float = 1.0
    depth: float = 1.0
    group: float = 1.0
    decay: float | None = None


def plain(name: str) -> Rate:
    """The learning rate of the job for every parameter."""
    return Rate()


def rates_of(spec: OptimizerSpec, workload: Workload) -> Callable[[str], Rate]:
    """The factors by parameter name. A run on data of an earlier format decays tables of biases too."""
    rule = getattr(getattr(workload, "objective", None), "rule", 0)

    def rate(name: str) -> Rate:
        decay = spec.layer_decay
        found = Rate(workload.lr_scale(name), 1.0 if decay == 1.0 else decay ** workload.depth(name))
        if rule >= BY_NAME and NOT_DECAYED.search(name.lower()):
            found = found._replace(decay=0.0)
        for group in spec.groups:
            if any(fnmatchcase(name, pattern) for pattern in group.match):
                said = found.decay if group.weight_decay is None else group.weight_decay
                return found._replace(group=group.lr_scale, decay=said)
        return found

    return rate


def groups_of(
    spec: OptimizerSpec, parameters: Iterable[tuple[nn.Parameter, bool, Rate]]
) -> list[dict[str, Any]]:
    """Parameter groups for tuples (parameter, whether it is a matrix, the factors of its learning rate).

    Weight decay applies to matrices only, and not to those of NOT_DECAYED. It is divided by the factor of the
    width, so that learning rate times decay does not depend on it (Wang and Aitchison, 2024; the mup package does
    the same), and not by those of the depth (Clark et al., 2020, and Bao et al., 2022, decay so) and of the group,
    as in torch.
    """
    found: dict[tuple[bool, Rate], list[nn.Parameter]] = {}
    for parameter, matrix, rate in parameters:
        found.setdefault((matrix, rate), []).append(parameter)

    def of(matrix: bool, rate: Rate) -> dict[str, Any]:
        scale = rate.width * rate.depth * rate.group
        decay = spec.weight_decay if rate.decay is None else rate.decay
        return {
            "params": found[matrix, rate],
            "lr": spec.lr * scale,
            "lr_scale": scale,
            "weight_decay": decay / rate.width if matrix else 0.0,
        }

    def order(key: tuple[bool, Rate]) -> tuple[bool, Rate]:  # the same on every rank
        return key[0], key[1]._replace(decay=-1.0 if key[1].decay is None else key[1].decay)

    return [of(*key) for key in sorted(found, key=order, reverse=True)]


def slots_of(spec: OptimizerSpec, name: str, matrices: Container[str]) -> tuple[str, ...]:
    """The optimiser state of a parameter; `matrices` are the names of those that Muon updates."""
    if isinstance(spec.name, ObjectReference):
        return slots_of_own(spec.name)
    return SLOTS["adamw" if spec.name == "muon" and name not in matrices else spec.name]


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in groups:
        group["lr"] = lr * group["lr_scale"]


def make_optimizer(
    spec: OptimizerSpec,
    shards: Iterable[ParameterShard],
    norms: Norms,
    rate: Callable[[str], Rate] = plain,
) -> torch.optim.Optimizer:
    """The optimiser that the job names, other than Muon; `rate` gives the factors of the learning rate by parameter
    name."""
    shards = list(shards)
    scaled = [(s.parameter, s.matrix, rate(s.name)) for s in shards]
    groups = groups_of(spec, scaled)
    if not shards:  # of a rank whose stage is frozen; it may not leave out what all ranks sum
        return _Nothing(norms if spec.name in ("lamb", "lars") else None)
    if isinstance(spec.name, ObjectReference):
        return OwnOptimizer(groups, spec.name, spec.lr)
    if spec.name == "adamw":
        return torch.optim.AdamW(groups, lr=spec.lr, betas=spec.betas, eps=spec.eps, fused=True)
    if spec.name == "lion":
        return Lion(groups, {"lr": spec.lr, "betas": spec.betas})
    ordered = [group for one in scaled for group in groups_of(spec, [one])]
    if spec.name == "lamb":
        return Lamb(ordered, {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps}, norms, shards)
    return Lars(ordered, {"lr": spec.lr, "betas": spec.betas, "eps": spec.eps}, norms, shards)


class _Nothing(torch.optim.Optimizer):
    """The optimiser of a rank that trains nothing. It takes its part in the two norms of LAMB and LARS."""

    def __init__(self, norms: Norms | None) -> None:
        super().__init__([{"params": [], "lr": 0.0, "lr_scale": 1.0}], {})
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """No update."""
        if self._norms is not None:
            self._norms([])
            self._norms([])


def make_muon(
    spec: OptimizerSpec,
    shards: Sequence[ParameterShard],
    full: FullMatrices,
    rate: Callable[[str], Rate],
    dtype: torch.dtype,
) -> Muon:
    """Muon for the shards of the matrices in `full`, AdamW for the others."""
    groups: list[dict[str, Any]] = []
    for muon in (True, False):
        mine = [(s.parameter, s.matrix, rate(s.name)) for s in shards if (s.name in full.names) == muon]
        groups += [{**group, "muon": muon} for group in groups_of(spec, mine)]
    # A rank without a shard takes its part in bringing together those of others.
    nothing = {"params": [], "lr": 0.0, "lr_scale": 1.0, "weight_decay": 0.0, "muon": True}
    return Muon(groups or [nothing], spec, full, dtype)


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023, algorithm 2: the sign of an interpolated momentum."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients."""
        for group in self.param_groups:
            near, far = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("exp_avg", torch.zeros_like(p))
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
                average = state["exp_avg"]
                update = torch.lerp(p.grad, average, near).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                average.lerp_(p.grad, 1 - far)


class Lamb(torch.optim.Optimizer):
    """You et al., 2020, algorithm 2: Adam's update, scaled to the norm of each matrix; no scale for vectors."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        norms: Norms,
        shards: Sequence[ParameterShard],
    ) -> None:
        super().__init__(groups, defaults)
        self._norms, self._shards = norms, shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients."""
        weights = [group["params"][0] for group in self.param_groups]
        updates = [self._update(group) for group in self.param_groups]
        sizes = zip(self._norms(weights), self._norms(updates), self._shards, strict=True)
        for group, p, update, (weight, size, shard) in zip(
            self.param_groups, weights, updates, sizes, strict=True
        ):
            if shard.matrix:
                ratio = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
                shard.multiply(update, ratio * group["lr"])
            else:
                update.mul_(group["lr"])
            p.sub_(update)

    def _update(self, group: dict[str, Any]) -> Tensor:
        p, (first, second) = group["params"][0], group["betas"]
        state = self.state[p]
        state.setdefault("exp_avg", torch.zeros_like(p))
        state.setdefault("exp_avg_sq", torch.zeros_like(p))
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        steps = float(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(p.grad, 1 - first)
        square.mul_(second).addcmul_(p.grad, p.grad, value=1 - second)
        root = (square / (1 - second**steps)).sqrt_().add_(group["eps"])
        return (mean / (1 - first**steps)).div_(root).add_(p, alpha=group["weight_decay"])


class Lars(torch.optim.Optimizer):
    """You et al., 2017, algorithm 1: momentum on gradients scaled to a share of each matrix's norm."""

    TRUST = 0.001
    """eta of the paper."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        defaults: dict[str, Any],
        norms: Norms,
        shards: Sequence[ParameterShard],
    ) -> None:
        super().__init__(groups, defaults)
        self._norms, self._shards = norms, shards

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update from the gradients."""
        weights = [group["params"][0] for group in self.param_groups]
        gradients = [p.grad for p in weights]
        sizes = zip(self._norms(weights), self._norms(gradients), self._shards, strict=True)
        for group, p, (weight, size, shard) in zip(self.param_groups, weights, sizes, strict=True):
            state, decay = self.state[p], group["weight_decay"]
            state.setdefault("momentum", torch.zeros_like(p))
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            change = p.grad + decay * p
            if shard.matrix:
                share = self.TRUST * weight / (size + decay * weight + group["eps"])
                ratio = torch.where((weight > 0) & (size > 0), share, 1.0)
                shard.multiply(change, ratio * group["lr"])
            else:
                change.mul_(group["lr"])
            momentum = state["momentum"].mul_(group["betas"][0])
            p.sub_(momentum.add_(change))
