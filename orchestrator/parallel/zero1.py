"""Optimizer states sharded over the replicas (ZeRO 1: Rajbhandari et al., 2020, section 5.1).

The parameters and the gradients of a bucket are flat tensors of the same length, and each rank updates an equal slice
of them. On GPUs, gradients are reduce-scattered and weights all-gathered, which together send the bytes of one
all-reduce. On CPUs gloo would make copies for both, so gradients are all-reduced and slices of weights broadcast.
Under `determinism: bitwise` every rank holds all optimizer states instead (`deterministic_reduction`). The DeepSpeed
engine uses DeepSpeed's own ZeRO 1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.gradient_buckets import GradientBuckets
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.parameters import LocalParameter


class Zero1:
    """A `DataParallel` in which each rank updates a slice of every bucket."""

    def __init__(self, parameters: list[LocalParameter], mesh: Mesh, overlap: bool) -> None:
        self._overlap = overlap
        self._parts: list[_Part] = []
        self.shards: list[ParameterShard] = []
        for expert in (False, True):
            mine = [local for local in parameters if local.cut.expert == expert]
            if mine:
                part = _Part(mine, mesh.expert_data if expert else mesh.data, mesh)
                self._parts.append(part)
                self.shards += part.shards

    def begin(self) -> None:
        """See `DataParallel.begin`."""
        for part in self._parts:
            part.buckets.zero()

    def micro_batch(self, last: bool) -> None:
        """See `DataParallel.micro_batch`."""
        if last and self._overlap:
            for part in self._parts:
                part.buckets.arm()

    def finish(self) -> None:
        """See `DataParallel.finish`."""
        for part in self._parts:
            part.buckets.wait()

    def publish(self) -> None:
        """See `DataParallel.publish`."""
        work = [(part.group, handle) for part in self._parts for handle in part.gather()]
        for group, handle in work:
            with group.communicating():
                handle.wait()


class _Part:
    """The buckets of the parameters that one group shards: all dense parameters, or all experts."""

    def __init__(self, parameters: list[LocalParameter], group: ProcessGroup, mesh: Mesh) -> None:
        self.group = group
        # Padded to a multiple of the group's size, so that every rank has a slice of the same length.
        self.buckets = GradientBuckets(
            [local.parameter for local in parameters], self._scatter, group, multiple=group.size
        )
        by_parameter = {id(local.parameter): local for local in parameters}
        alone = ProcessGroup((mesh.rank,), 0, None)
        self._weights: list[Tensor] = []
        self.shards: list[ParameterShard] = []
        for members, flat in zip(self.buckets.members, self.buckets.flats, strict=True):
            size = len(flat) // group.size
            low = group.index * size  # this rank's slice is low .. low + size
            offset = 0  # where the next parameter begins in the bucket
            weights = torch.zeros_like(flat)
            self._weights.append(weights)
            for parameter in members:
                local = by_parameter[id(parameter)]
                count = parameter.numel()
                # The forward pass then reads its weights from the bucket, where `gather` writes the other ranks'
                # updates.
                parameter.data = weights[offset : offset + count].view_as(parameter)
                # The part of the parameter that lies in this rank's slice; a slice may begin or end within a parameter.
                begin = max(offset, low)
                end = min(offset + count, low + size)
                if begin < end:
                    # A view of the bucket: the optimizer's update writes straight into what `gather` sends.
                    mine = nn.Parameter(weights[begin:end])
                    mine.grad = flat[begin:end]
                    boxes = boxes_of(local.cut, begin - offset, end - offset)
                    # Copies on other stages (tied) or tensor-parallel ranks (not cut) are neither counted nor saved.
                    is_first = local.original and (local.cut.over_tp or mesh.tp.index == 0)
                    self.shards.append(
                        ParameterShard(
                            name=local.name,
                            cut=local.cut,
                            parameter=mine,
                            boxes=boxes,
                            replica_group=alone,
                            counted=is_first,
                            saved=is_first,
                        )
                    )
                # Members are laid end to end in the bucket without alignment, as `GradientBuckets` lays the gradients,
                # so that both slices have the same bounds.
                offset += count

    def gather(self) -> list[dist.Work]:
        """Start to gather the updated slices of all ranks, in place; return the work to wait for."""
        if self.group.size == 1:
            return []
        handle = self.group.handle
        work = []
        for weights in self._weights:
            slices = weights.chunk(self.group.size)
            if weights.device.type == "cpu":
                # gloo's all-gather fills a copy of the weights. Broadcasts send the same bytes to where they belong.
                pairs = zip(self.group.ranks, slices, strict=True)
                work += [dist.broadcast(part, rank, group=handle, async_op=True) for rank, part in pairs]
            else:
                mine = slices[self.group.index]
                work.append(dist.all_gather_single(weights, mine, group=handle, async_op=True))
        return work

    def _scatter(self, _: int, flat: Tensor) -> dist.Work | None:
        if self.group.size == 1:
            return None
        if flat.device.type == "cpu":
            # gloo has no reduce-scatter: it all-reduces a copy, which takes memory and twice as much of a processor.
            return dist.all_reduce(flat, group=self.group.handle, async_op=True)
        # In place: this rank's slice of the sum replaces its slice of the gradients.
        mine = flat.chunk(self.group.size)[self.group.index]
        return dist.reduce_scatter_single(mine, flat, group=self.group.handle, async_op=True)
