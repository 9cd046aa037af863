"""This rank's partitions of the weights and optimizer state under DeepSpeed's ZeRO, by tensor name and offset."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.checkpoint.pieces import TensorPiece
from orchestrator.checkpoint.reader import Reader
from orchestrator.models.averaged import AVERAGE
from orchestrator.parallel.parameter_shard import Box, boxes_of
from orchestrator.parallel.partition import Cut
from orchestrator.quantize.config import QuantizeSpec
from orchestrator.train.engines.moving_average import MovingAverage
from orchestrator.train.engines.rounding import Rounding
from orchestrator.train.engines.state import committed_shapes, initialise
from workloads.workload import Workload

SLOTS = ("exp_avg", "exp_avg_sq")
"""AdamW's optimizer state of one parameter."""


@dataclass(frozen=True)
class Fragment:
    """The part of a parameter in a flat partition of this rank.

    Attributes:
        name, shape: of the full parameter.
        boxes: the part in coordinates of the parameter.
        partition: the flat partition.
        start, size: the part's range in the partition.
    """

    name: str
    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    partition: Tensor
    start: int
    size: int

    def views(self, flat: Tensor) -> Iterator[tuple[Box, Tensor]]:
        """Yield the boxes with their views of `flat`, which is the partition or a state of its size."""
        for box in self.boxes:
            yield box, flat.narrow(0, self.start + box.offset, box.size).view(box.extent)


class Partitions:
    """The state of DeepSpeed's ZeRO optimizer `zero`, which wraps the optimizer of its partitions."""

    def __init__(
        self,
        zero: Any,
        stage: int,
        model: nn.Module,
        workload: Workload,
        ema: float | None = None,
        quantize: QuantizeSpec | None = None,
    ) -> None:
        """Find the fragments of all trained parameters.

        Args:
            zero: DeepSpeed's optimizer.
            stage: the ZeRO stage, 1 to 3.
            model: its model.
            workload: the model and its objective.
            ema: the decay of a moving average of the weights; None without one.
            quantize: how weights are rounded while they train; None without.
        """
        self._zero = zero
        self._stage = stage
        self._workload = workload
        by_name = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer: torch.optim.Optimizer = zero.optimizer
        self.fragments = list(_fully_sharded(zero, by_name) if stage == 3 else _flat(zero, by_name))
        # all partitions, including those of padding only, because a step updates all of them
        # The master weights in fp32. The 16-bit names of DeepSpeed stand for its model's weights, which are fp32 here
        # too.
        self._all = zero.fp32_partitioned_groups_flat if stage == 3 else zero.single_partition_of_fp32_groups
        self._average = MovingAverage(ema, self._all)
        self._rounding = Rounding([model], quantize)

    def initialise(self, seed: int) -> None:
        """Fill the weights with their initial values, and begin without any update."""
        fill_fragments(self._workload, self.fragments, seed)
        self._begin(0)
        self._rounding.at(0)
        self._average.begin()
        self.publish()

    def updated(self) -> None:
        """Follow a step of DeepSpeed: round from now on if that is due, and add the weights to their average."""
        self._rounding.at(self.steps)
        self._average.update()

    def swap_average(self) -> None:
        """See `Engine.swap_average`."""
        self._average.swap()
        self.publish()

    @torch.no_grad()
    def _begin(self, steps: int) -> None:
        """Create the optimizer state, all zeros, with the step count `steps`. DeepSpeed itself creates it in its first
        step.
        """
        for partition in self._all:
            state = self.optimizer.state[partition]
            for slot in SLOTS:
                state.setdefault(slot, torch.zeros_like(partition)).zero_()
            fused = isinstance(self.optimizer, torch.optim.AdamW)
            # torch's fused AdamW reads a tensor on the device; DeepSpeed's CPU Adam a Python number.
            state["step"] = torch.tensor(float(steps), device=partition.device) if fused else steps

    @property
    def steps(self) -> int:
        """Number of completed optimizer steps."""
        return next(int(self.optimizer.state[p]["step"]) for p in self._all)

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield this rank's weights, optimizer state and averages, fp32. Over all ranks they tile every tensor exactly
        once.
        """
        for fragment in self.fragments:
            for name, flat in self._tensors(fragment).items():
                for box, view in fragment.views(flat):
                    yield TensorPiece(name, fragment.shape, box.start, view)

    def check(self, reader: Reader) -> None:
        """Raise InputError if a commit belongs to another model."""
        reader.manifest.check_shapes(committed_shapes(self._workload))

    @torch.no_grad()
    def restore(self, reader: Reader) -> None:
        """Load this rank's part of weights, optimiser state and averages, one box of one tensor at a time."""
        self._begin(int(reader.read("optim.step")))
        for fragment in self.fragments:
            for name, flat in self._tensors(fragment).items():
                for box, view in fragment.views(flat):
                    view.copy_(reader.read(name, box.start, box.extent))
        self._average.go_on(self.steps)
        self._rounding.at(self.steps)
        self.publish()

    def _tensors(self, fragment: Fragment) -> dict[str, Tensor]:
        """Return the partition of a fragment and its states, by their names in a commit."""
        partition, name = fragment.partition, fragment.name
        result = {f"model.{name}": partition.detach()}
        result |= {f"optim.{name}.{slot}": self.optimizer.state[partition][slot] for slot in SLOTS}
        if partition in self._average.of:
            result[f"{AVERAGE}{name}"] = self._average.of[partition]
        return result

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the fp32 partitions to the weights that the forward pass reads, as DeepSpeed does after a step."""
        if self._stage < 3:
            self._zero.update_lp_params()
            return
        self._zero._partition_all_parameters()
        for number in range(len(self._zero.fp16_groups)):
            self._zero._reassign_or_swap_out_partitioned_parameters(number)
        # Small parameters stay whole on every rank under ZeRO 3, so their gathered copies must be renewed too.
        persistent = self._zero.persistent_parameters
        if persistent:
            persistent[0].all_gather(persistent)


def _flat(zero: Any, by_name: Mapping[str, nn.Parameter]) -> Iterator[Fragment]:
    """Yield fragments under ZeRO 1 and 2: the parameters of a group are concatenated, and each rank has one range."""
    names = {id(parameter): name for name, parameter in by_name.items()}
    for partition, group in zip(zero.single_partition_of_fp32_groups, zero.bit16_groups, strict=True):
        for parameter in group:
            # DeepSpeed's record of which range of its fp32 partition belongs to which range of a 16-bit parameter (lp:
            # low, hp: high precision).
            mapping = parameter._hp_mapping
            if mapping is None:  # the whole parameter belongs to another rank
                continue
            low_precision, high_precision = mapping.lp_fragment_address, mapping.hp_fragment_address
            name = names[id(parameter)]
            shape = tuple(parameter.shape)
            yield _fragment(
                name,
                shape,
                begin=low_precision.start,
                size=low_precision.numel,
                partition=partition,
                start=high_precision.start,
            )


def _fully_sharded(zero: Any, by_name: Mapping[str, Any]) -> Iterator[Fragment]:
    """Yield fragments under ZeRO 3: each rank has a range of every parameter. The last ranks' ranges are shorter and
    padded.
    """
    for name, parameter in by_name.items():
        group, start, range_size = zero.grad_position[zero.get_param_id(parameter)]
        # All partitions of a parameter have `range_size` elements, so the last ones may reach beyond it.
        begin = zero._get_param_partition_rank(parameter) * range_size
        shape = tuple(parameter.ds_shape)
        size = min(range_size, math.prod(shape) - begin)
        if size > 0:
            yield _fragment(
                name,
                shape,
                begin=begin,
                size=size,
                partition=zero.fp32_partitioned_groups_flat[group],
                start=start,
            )


def frozen_fragments(model: nn.Module, rank: int) -> Iterator[Fragment]:
    """Yield this rank's parts of frozen parameters: whole ones, or under ZeRO 3 a range of each.

    Args:
        model: DeepSpeed's model.
        rank: this rank, which holds the range of that number under ZeRO 3.
    """
    frozen: dict[str, Any] = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in frozen.items():
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        part = parameter.data
        begin, size = 0, math.prod(shape)
        if hasattr(parameter, "ds_tensor"):
            part = parameter.ds_tensor.data
            begin = rank * part.numel()
            size = min(part.numel(), size - begin)
        if size > 0:
            yield _fragment(name, shape, begin=begin, size=size, partition=part.view(-1), start=0)


@torch.no_grad()
def fill_fragments(workload: Workload, fragments: Iterable[Fragment], seed: int) -> None:
    """Fill this rank's parts of parameters with their initial values.

    Args:
        workload: draws or reads the values.
        fragments: the parts to fill.
        seed: of values that are drawn.
    """
    for fragment in fragments:
        initialise(workload, fragment.name, seed, fragment.views(fragment.partition))


def _fragment(
    name: str, shape: tuple[int, ...], begin: int, size: int, partition: Tensor, start: int
) -> Fragment:
    full_cut = Cut(shape, (0,) * len(shape), shape)
    return Fragment(
        name,
        shape,
        boxes=boxes_of(full_cut, begin, begin + size),
        partition=partition,
        start=start,
        size=size,
    )
