"""Gradients in flat buckets, which are reduced over ranks while the backward pass still runs.

The buckets depend only on the order of the parameters, so the first step after a restart sums in the same order as any
other. (DDP rearranges its buckets after the first step, which rules out a bit-exact resume.) After Li et al., 2020,
"PyTorch Distributed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.layout import bucket_bytes
from orchestrator.parallel.mesh import ProcessGroup

IN_FLIGHT = 2
"""Maximum number of buckets that gloo reduces at the same time: it has two threads."""

Start = Callable[[int, Tensor], "dist.Work | None"]
"""Starts the reduction of bucket number i, given its flat gradients."""


class GradientBuckets:
    """Keeps gradients in flat buckets, and calls `start` once all gradients of a bucket have arrived.

    `members[i]` are the parameters of bucket i. `flats[i]` holds their gradients, padded with zeros to a multiple of
    `multiple` elements.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], start: Start, group: ProcessGroup, multiple: int = 1
    ) -> None:
        self._start, self._group = start, group
        self.members: list[list[nn.Parameter]] = []
        self.flats: list[Tensor] = []
        self._missing: list[int] = []
        self._next = 0
        self._work: list[dist.Work] = []
        bucket = list[nn.Parameter]()
        max_bytes = bucket_bytes(group.size)
        # The backward pass reaches the last parameters first.
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if bucket and sum(p.numel() * 4 for p in bucket) + parameter.numel() * 4 > max_bytes:
                self._add(bucket, multiple)
                bucket = []
            bucket.append(parameter)
        if bucket:
            self._add(bucket, multiple)

    def zero(self) -> None:
        """Set all gradients to zero, in place."""
        for flat in self.flats:
            flat.zero_()

    def arm(self) -> None:
        """Reduce during the next backward pass, which is that of the step's last micro-batch."""
        self._missing, self._next = [len(members) for members in self.members], 0

    def wait(self) -> None:
        """Finish all reductions, and start those that the backward pass did not start."""
        for index in range(self._next if self._missing else 0, len(self.flats)):
            self._begin(index)
        for work in self._work:
            work.wait()
        self._work, self._missing = [], []

    def _add(self, parameters: list[nn.Parameter], multiple: int) -> None:
        size = sum(p.numel() for p in parameters)
        padded = -(-size // multiple) * multiple
        # Each gradient is a view of the flat bucket, so that one collective reduces all of them without a copy.
        flat = torch.zeros(padded, dtype=parameters[0].dtype, device=parameters[0].device)
        index, offset = len(self.flats), 0
        for parameter in parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))
        self.members.append(parameters)
        self.flats.append(flat)

    def _arrived(self, index: int) -> None:
        if not self._missing:
            return
        self._missing[index] -= 1
        # Collectives must start in the same order on all ranks, although samples may reach different parameters.
        while self._next < len(self.flats) and self._missing[self._next] == 0:
            self._begin(self._next)
            self._next += 1

    def _begin(self, index: int) -> None:
        self._group.sent(self.flats[index])
        if not self._group.sums_gradients:
            return
        work = self._start(index, self.flats[index])
        if work is not None:
            self._work.append(work)
        if self.flats[index].device.type == "cpu" and len(self._work) > IN_FLIGHT:
            with self._group.communicating():
                self._work.pop(0).wait()
