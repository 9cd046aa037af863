"""DeepSpeed's partitions by canonical name and global offset.

DeepSpeed keeps fp32 weights and optimiser state in flat partitions. Every rank saves and loads its own: no tensor is
gathered, and DeepSpeed's checkpoint format is not used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.averaged import AVERAGE
from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.parallel.parameter_shard import Box, boxes_of
from orchestrator.parallel.partition import Cut
from orchestrator.train.engines.moving_average import MovingAverage

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's optimiser state of one parameter."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter in a flat partition of this rank: `size` elements from `start`; they are the `boxes` of
    the parameter."""

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    partition: Tensor
    start: int
    size: int

    def views(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """The boxes with their views of `flat`, which is the partition or a state of its size."""
        for box in self.boxes:
            yield box, flat.narrow(0, self.start + box.offset, box.size).view(box.extent)


class Partitions:
    """The state of DeepSpeed's ZeRO optimiser `zero`, which wraps the optimiser of its partitions."""

    def __init__(
        self, zero: Any, stage: int, named: Mapping[str, nn.Parameter], ema: float | None = None
    ) -> None:
        """`ema` is the decay of a moving average of the weights."""
        self._zero, self._stage = zero, stage
        self.optimizer: torch.optim.Optimizer = zero.optimizer
        self.fragments = list(_fully_sharded(zero, named) if stage == 3 else _flat(zero, named))
        # all partitions, including those with padding only: a step updates all of them
        self._all = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        self.average = MovingAverage(ema, self._all)

    @torch.no_grad()
    def begin(self, steps: int) -> None:
        """Create the optimiser state, zero, after that many steps; DeepSpeed itself creates it in its first step."""
        for partition in self._all:
            state = self.optimizer.state[partition]
            for slot in SLOTS:
                state.setdefault(slot, torch.zeros_like(partition)).zero_()
            fused = isinstance(self.optimizer, torch.optim.AdamW)
            state["step"] = torch.tensor(float(steps), device=partition.device) if fused else steps

    @property
    def steps(self) -> int:
        """Optimiser steps done."""
        return next(int(self.optimizer.state[p]["step"]) for p in self._all)

    def pieces(self) -> Iterator[TensorPiece]:
        """This rank's weights, optimiser state and averages, fp32; over all ranks they tile every tensor once."""
        for fragment in self.fragments:
            for name, flat in self._tensors(fragment).items():
                for box, view in fragment.views(flat):
                    yield TensorPiece(name, fragment.shape, box.start, view)

    @torch.no_grad()
    def restore(self, reader: Reader) -> None:
        """Load this rank's part of weights, optimiser state and averages, one box of one tensor at a time."""
        self.begin(int(reader.read("optim.step")))
        for fragment in self.fragments:
            for name, flat in self._tensors(fragment).items():
                for box, view in fragment.views(flat):
                    view.copy_(reader.read(name, box.start, box.extent))
        self.average.go_on(self.steps)
        self.publish()

    def _tensors(self, fragment: Fragment) -> dict[str, Tensor]:
        """The partition of a fragment and what is kept of it, by the names in a commit."""
        partition, name = fragment.partition, fragment.name
        found = {f"model.{name}": partition.detach()}
        found |= {f"optim.{name}.{slot}": self.optimizer.state[partition][slot] for slot in SLOTS}
        if partition in self.average.of:
            found[f"{AVERAGE}{name}"] = self.average.of[partition]
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the fp32 partitions to the weights that the forward pass reads, as DeepSpeed does after a step."""
        if self._stage < 3:
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()
        for number in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        kept = self._zero.persistent_parameters
        if kept:
            kept[0].all_gather(kept)


def _flat(zero: Any, named: Mapping[str, nn.Parameter]) -> Iterator[Fragment]:
    """ZeRO 1 and 2: the parameters of a group are concatenated, and each rank has a range of that."""
    names = {id(parameter): name for name, parameter in named.items()}
    for partition, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        for parameter in group:
            found = parameter._hp_mapping
            if found is None:  # all of it is another rank's
                continue
            ours, theirs = found.lp_fragment_address, found.hp_fragment_address
            name, shape = names[id(parameter)], tuple(parameter.shape)
            yield _fragment(name, shape, ours.start, ours.numel, partition, theirs.start)


def _fully_sharded(zero: Any, named: Mapping[str, Any]) -> Iterator[Fragment]:
    """ZeRO 3: each rank has a range of every parameter; the last ranks' ranges are shorter and padded."""
    for name, parameter in named.items():
        group, start, place = zero.grad_position[zero.get_param_id(parameter)]
        begin = zero._get_param_partition_rank(parameter) * place
        shape = tuple(parameter.ds_shape)
        size = min(place, math.prod(shape) - begin)
        if size > 0:
            yield _fragment(name, shape, begin, size, zero.fp32_partitioned_groups_flat[group], start)


def frozen_fragments(named: Mapping[str, Any], rank: int) -> Iterator[Fragment]:
    """This rank's parts of parameters that are not trained: all of them, or under ZeRO 3 a range of each."""
    for name, parameter in named.items():
        shape, part = tuple(getattr(parameter, "ds_shape", parameter.shape)), parameter.data
        begin, size = 0, math.prod(shape)
        if hasattr(parameter, "ds_tensor"):
            part = parameter.ds_tensor.data
            begin = rank * part.numel()
            size = min(part.numel(), size - begin)
        if size > 0:
            yield _fragment(name, shape, begin, size, part.view(-1), 0)


def _fragment(
    name: str, shape: tuple[int, ...], begin: int, size: int, partition: Tensor, start: int
) -> Fragment:
    whole = Cut(shape, (0,) * len(shape), shape)
    return Fragment(name, shape, boxes_of(whole, begin, begin + size), partition, start, size)
