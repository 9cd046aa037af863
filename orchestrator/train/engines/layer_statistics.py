"""Statistics by layer in some steps: norms of weights and gradients, activations, and histograms.

Each rank adds up its own parts, and one sum over all ranks makes them those of the whole model under any layout. Other
steps do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from orchestrator.parallel.parameter_shard import ParameterShard
from orchestrator.train.config import LayerStatisticsSpec
from workloads.workload import Workload

LOWEST, HIGHEST = -40, 23
"""The exponents of two that have a bin of their own; smaller and larger magnitudes are in the first and the last."""
MAX_AT_ONCE = 2**20
"""Elements that are counted at once, which takes some 30 bytes for each."""
ZERO, NOT_FINITE = "zero", "not finite"
Statistics = dict[str, dict[str, Any]]
"""By the name of a parameter or layer: `weight_norm`, `gradient_norm`, `activation_rms`, `weight_histogram`,
`gradient_histogram`."""


class LayerStatistics:
    """Collects the statistics of the steps that a job asks for."""

    def __init__(
        self,
        spec: LayerStatisticsSpec | None,
        workload: Workload,
        stages: Sequence[nn.Module],
        shards: Sequence[ParameterShard],
        device: torch.device,
    ) -> None:
        """Prepare to collect.

        Args:
            spec: what to collect, and when; None for nothing.
            workload: the model; all ranks read the same names from it.
            stages: this rank's part of the model.
            shards: this rank's shards of the trained parameters.
            device: the device of the shards; a rank may have none.
        """
        self._spec = spec
        self._stages = stages
        self._shards = shards
        self._device = device
        self._is_due = False
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._activations: dict[str, Tensor] = {}
        if spec is None:
            return
        # The names are those of the whole model, so that all ranks sum in the same order, whatever their stages are.
        with torch.device("meta"):
            model = workload.build()
        self._parameters = [name for name, _ in model.named_parameters() if name not in workload.frozen]
        layers = set(workload.blocks(model)) if spec.activations else set()
        self._layers = [name for name, module in model.named_modules() if module in layers]
        layer_names = set(self._layers)
        self._blocks = [
            (name, module)
            for stage in stages
            for name, module in stage.named_modules()
            if name in layer_names
        ]

    def begin(self, step: int) -> None:
        """Begin a step, before its forward passes; `step` counts from 1."""
        self._remove_hooks()
        self._is_due = self._spec is not None and step % self._spec.every == 0
        if self._is_due and self._spec is not None and self._spec.activations:
            self._activations = {
                name: torch.zeros(2, dtype=torch.float64, device=self._device) for name, _ in self._blocks
            }
            self._hooks = [
                module.register_forward_hook(self._adder(self._activations[name]))
                for name, module in self._blocks
            ]

    @torch.no_grad()
    def take(self, factor: float) -> Statistics:
        """Return the statistics of the step, the same on all ranks; empty if it is not due.

        All ranks call it together, when gradients are complete and before the update.

        Args:
            factor: makes the shards' gradients those of the loss, before clipping.
        """
        self._remove_hooks()
        if not self._is_due or self._spec is None:
            return {}
        number = {name: n for n, name in enumerate(self._parameters)}
        norms = torch.zeros(2, len(number), dtype=torch.float64, device=self._device)
        tensors_by_kind = {
            "weight": [(s, s.parameter.detach()) for s in self._counted],
            "gradient": [(s, s.parameter.grad) for s in self._counted if s.parameter.grad is not None],
        }
        for index, tensors in enumerate(tensors_by_kind.values()):
            if tensors:
                parameter_indices = torch.tensor(
                    [number[shard.name] for shard, _ in tensors], device=self._device
                )
                squares = torch.stack(torch._foreach_norm([tensor for _, tensor in tensors]))
                # Several shards of a rank may belong to one parameter, hence a sum and no assignment.
                norms[index].index_add_(0, parameter_indices, squares.to(norms).square())
        sums = [norms.flatten(), *(self._activation_sums(name) for name in self._layers)]
        all_sums = torch.cat(sums)
        dist.all_reduce(all_sums)
        values = all_sums.tolist()
        weights = values[: len(number)]
        gradients = values[len(number) : 2 * len(number)]
        result: Statistics = {
            name: {"weight_norm": math.sqrt(weight), "gradient_norm": math.sqrt(gradient) * factor}
            for name, weight, gradient in zip(number, weights, gradients, strict=True)
        }
        for n, name in enumerate(self._layers, start=len(number)):
            total, count = values[2 * n : 2 * n + 2]
            # Ranks of a tensor-parallel group, and a layer that is computed again, count the same values several
            # times, in both sums alike.
            result.setdefault(name, {})["activation_rms"] = math.sqrt(total / count) if count else 0.0
        if self._spec.histograms:
            for kind, tensors in tensors_by_kind.items():
                scale = factor if kind == "gradient" else 1.0
                for name, bins in self._histograms(number, tensors, scale).items():
                    result[name][f"{kind}_histogram"] = bins
        return result

    @property
    def _counted(self) -> list[ParameterShard]:
        return [shard for shard in self._shards if shard.counted]

    def _activation_sums(self, name: str) -> Tensor:
        """Return the sum of squares and the number of the values of a layer on this rank, fp64 [2]."""
        sums = self._activations.get(name)
        return torch.zeros(2, dtype=torch.float64, device=self._device) if sums is None else sums

    def _adder(self, sums: Tensor) -> Callable[[nn.Module, Any, Any], None]:
        """Return a hook that adds the squares of a layer's first result to `sums`, and their number."""

        def add(_: nn.Module, __: Any, output: Any) -> None:
            result = next(
                (
                    leaf
                    for leaf in tree_leaves(output)
                    if isinstance(leaf, Tensor) and leaf.is_floating_point()
                ),
                None,
            )
            if result is None or result.is_meta:
                return
            # In parts, so that no other copy of the whole result is made.
            square = torch.zeros((), dtype=torch.float64, device=result.device)
            for part in result.detach().flatten().split(MAX_AT_ONCE):
                square += part.float().square().sum(dtype=torch.float64)
            sums.add_(torch.stack((square, torch.full_like(square, result.numel()))).to(sums.device))

        return add

    def _histograms(
        self, number: dict[str, int], tensors: Sequence[tuple[ParameterShard, Tensor]], scale: float
    ) -> dict[str, dict[str, int]]:
        """Return for each parameter the number of elements by magnitude: floor(log2 |x|), zeros, and not finite."""
        bins = torch.zeros(len(number), HIGHEST - LOWEST + 3, dtype=torch.int64, device=self._device)
        parts = ((shard, part) for shard, tensor in tensors for part in tensor.flatten().split(MAX_AT_ONCE))
        for shard, part in parts:
            values = part * scale
            # x = mantissa 2^exponent with 0.5 <= |mantissa| < 1, hence the 1.
            bin_index = (torch.frexp(values).exponent.long() - 1).clamp(LOWEST, HIGHEST) - LOWEST
            bin_index = torch.where(values == 0, HIGHEST - LOWEST + 1, bin_index)
            bin_index = torch.where(values.isfinite(), bin_index, HIGHEST - LOWEST + 2)
            bins[number[shard.name]] += torch.bincount(bin_index, minlength=bins.shape[1])
        dist.all_reduce(bins)
        names = [*map(str, range(LOWEST, HIGHEST + 1)), ZERO, NOT_FINITE]
        return {
            name: {bin_name: count for bin_name, count in zip(names, counts, strict=True) if count}
            for name, counts in zip(number, bins.tolist(), strict=True)
        }

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
