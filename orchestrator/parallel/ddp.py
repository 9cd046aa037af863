"""Data parallelism without sharding (ZeRO 0): every replica holds and updates all its parameters."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from orchestrator.parallel.gradient_buckets import GradientBuckets, Start
from orchestrator.parallel.mesh import Mesh, ProcessGroup
from orchestrator.parallel.parameter_shard import ParameterShard, boxes_of
from orchestrator.parallel.parameters import LocalParameter


class Ddp:
    """Data parallelism without sharding, see `DataParallel`: gradients are all-reduced over the replicas."""

    def __init__(self, parameters: list[LocalParameter], mesh: Mesh, overlap: bool) -> None:
        self._overlap = overlap
        self._buckets = []
        self.shards: list[ParameterShard] = []
        for expert in (False, True):
            group = mesh.expert_data if expert else mesh.data
            mine = [local for local in parameters if local.cut.expert == expert]
            if mine:
                self._buckets.append(
                    GradientBuckets([local.parameter for local in mine], _sum_over(group), group)
                )
            for local in mine:
                boxes = boxes_of(local.cut, 0, local.parameter.numel())
                first = local.original and group.index == 0
                is_first_copy = local.cut.over_tp or mesh.tp.index == 0
                self.shards.append(
                    ParameterShard(
                        local.name,
                        local.cut,
                        parameter=local.parameter,
                        boxes=boxes,
                        replica_group=group,
                        counted=first and is_first_copy,
                        saved=local.original and is_first_copy,
                    )
                )

    def begin(self) -> None:
        """See `DataParallel.begin`."""
        for buckets in self._buckets:
            buckets.zero()

    def micro_batch(self, last: bool) -> None:
        """See `DataParallel.micro_batch`."""
        if last and self._overlap:
            for buckets in self._buckets:
                buckets.arm()

    def finish(self) -> None:
        """See `DataParallel.finish`."""
        for buckets in self._buckets:
            buckets.wait()

    def publish(self) -> None:
        """Do nothing: every replica has made the same update."""


def _sum_over(group: ProcessGroup) -> Start:
    """Return a function that starts the all-reduce of a bucket over `group`."""

    def start(_: int, flat: Tensor) -> dist.Work | None:
        return dist.all_reduce(flat, group=group.handle, async_op=True) if group.size > 1 else None

    return start
