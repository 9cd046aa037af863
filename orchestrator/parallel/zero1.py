"""Optimiser states sharded over the replicas (ZeRO 1: Rajbhandari et al., 2020, section 5.1).

Parameters and gradients of a bucket stand in flat memory, of which each rank updates an equal slice: gradients
are reduce-scattered, weights gathered, together the bytes of one all-reduce. In `determinism: bitwise` every rank
holds all of it instead (`deterministic_reduction`); DeepSpeed has a ZeRO 1 of its own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.gradient_buckets import GradientBuckets
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.parameters import Held


class Zero1:
    """Each rank updates a slice of every bucket; see `DataParallel`."""

    def __init__(self, held: list[Held], mesh: Mesh, overlap: bool) -> None:
        self._overlap = overlap
        self._parts: list[_Part] = []
        self.shards: list[ParameterShard] = []
        for expert in (False, True):
            mine = [h for h in held if h.cut.expert == expert]
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
        work = [(part.group, one) for part in self._parts for one in part.gather()]
        for group, one in work:
            with group.communicating():
                one.wait()


class _Part:
    """The buckets of parameters that are sharded over one group."""

    def __init__(self, held: list[Held], group: ProcessGroup, mesh: Mesh) -> None:
        self.group = group
        self.buckets = GradientBuckets([h.parameter for h in held], self._scatter, group, multiple=group.size)
        by_parameter = {id(h.parameter): h for h in held}
        alone = ProcessGroup((mesh.rank,), 0, None)
        self._weights: list[Tensor] = []
        self.shards: list[ParameterShard] = []
        for members, flat in zip(self.buckets.members, self.buckets.flats, strict=True):
            size = len(flat) // group.size
            low, offset = group.index * size, 0
            weights = torch.zeros_like(flat)
            self._weights.append(weights)
            for parameter in members:
                h, count = by_parameter[id(parameter)], parameter.numel()
                parameter.data = weights[offset : offset + count].view_as(parameter)
                begin, end = max(offset, low), min(offset + count, low + size)
                if begin < end:
                    mine = nn.Parameter(weights[begin:end])
                    mine.grad = flat[begin:end]
                    boxes = boxes_of(h.cut, begin - offset, end - offset)
                    one = h.original and (h.cut.over_tp or mesh.tp.index == 0)
                    self.shards.append(ParameterShard(h.name, h.cut, mine, boxes, alone, one, one))
                offset += count

    def gather(self) -> list[dist.Work]:
        """Begin to bring the updated slices to all ranks."""
        found = []
        for weights in self._weights if self.group.size > 1 else []:
            mine = weights.chunk(self.group.size)[self.group.index]
            found.append(dist.all_gather_single(weights, mine, group=self.group.handle, async_op=True))
        return found

    def _scatter(self, _: int, flat: Tensor) -> dist.Work | None:
        if self.group.size == 1:
            return None
        # In place: a rank's sums come to stand where its slice of the gradients stood.
        mine = flat.chunk(self.group.size)[self.group.index]
        return dist.reduce_scatter_single(mine, flat, group=self.group.handle, async_op=True)
