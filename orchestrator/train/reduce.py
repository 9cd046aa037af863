"""Summing gradients over data-parallel ranks while the backward pass still runs.

Buckets are fixed by the order of the parameters alone, so a sum is formed in the same order in the first step
after a restart as in any other (DDP re-arranges its buckets after the first step, which a bit-exact resume
cannot have). After Li et al., 2020, "PyTorch Distributed".
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20


class GradientReducer:
    """Keeps the gradients in flat buckets and sums each over `group` as soon as its last gradient is there."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets: list[Tensor] = []
        self._missing: list[int] = []
        self._sizes: list[int] = []
        self._work: list[dist.Work] = []
        self._armed = False
        bucket: list[nn.Parameter] = []
        # The backward pass reaches the last parameters first.
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if bucket and sum(p.numel() * 4 for p in bucket) + parameter.numel() * 4 > BUCKET_BYTES:
                self._add(bucket)
                bucket = []
            bucket.append(parameter)
        if bucket:
            self._add(bucket)

    def zero(self) -> None:
        """Set every gradient to zero, in place."""
        for bucket in self._buckets:
            bucket.zero_()

    def arm(self) -> None:
        """Sum during the backward pass that comes next: the last micro-batch of the step."""
        self._missing = list(self._sizes)
        self._armed = True

    def wait(self) -> None:
        """Finish all sums, those of parameters that got no gradient included."""
        for index, missing in enumerate(self._missing):
            if missing:
                self._reduce(index)
        for work in self._work:
            work.wait()
        self._work, self._armed = [], False

    def _add(self, parameters: list[nn.Parameter]) -> None:
        flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        index, offset = len(self._buckets), 0
        for parameter in parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))
        self._buckets.append(flat)
        self._sizes.append(len(parameters))

    def _arrived(self, index: int) -> None:
        if not self._armed:
            return
        self._missing[index] -= 1
        if self._missing[index] == 0:
            self._reduce(index)

    def _reduce(self, index: int) -> None:
        if self._group.size() > 1:
            self._work.append(dist.all_reduce(self._buckets[index], group=self._group, async_op=True))
