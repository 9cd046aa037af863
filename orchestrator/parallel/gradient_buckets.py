"""Gradients in flat buckets that are summed over ranks while the backward pass still runs.

Buckets are fixed by the order of the parameters alone, so a sum is formed in the same order in the first step
after a restart as in any other (DDP re-arranges its buckets after the first step, which a bit-exact resume
cannot have). After Li et al., 2020, "PyTorch Distributed".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.parallel.layout import bucket_bytes
from orchestrator.parallel.mesh import ProcessGroup

IN_FLIGHT = 2
"""Buckets that gloo sums at once: it copies what it scatters, so that all at once would be all gradients twice."""

Start = Callable[[int, Tensor], "dist.Work | None"]
"""Begin the sum of bucket number i, given its flat gradients."""


class GradientBuckets:
    """Keeps gradients in flat buckets and calls `start` as soon as a bucket's last gradient is there.

    `members[i]` are the parameters of bucket i and `flats[i]` its gradients, padded with zeros to a multiple
    of `multiple` elements.
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
        bucket, most = list[nn.Parameter](), bucket_bytes(group.size)
        # The backward pass reaches the last parameters first.
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            if bucket and sum(p.numel() * 4 for p in bucket) + parameter.numel() * 4 > most:
                self._add(bucket, multiple)
                bucket = []
            bucket.append(parameter)
        if bucket:
            self._add(bucket, multiple)

    def zero(self) -> None:
        """Set every gradient to zero, in place."""
        for flat in self.flats:
            flat.zero_()

    def arm(self) -> None:
        """Sum during the backward pass that comes next: the last micro-batch of the step."""
        self._missing, self._next = [len(members) for members in self.members], 0

    def wait(self) -> None:
        """Finish all sums, those that the backward pass did not begin included."""
        for index in range(self._next if self._missing else 0, len(self.flats)):
            self._begin(index)
        for work in self._work:
            work.wait()
        self._work, self._missing = [], []

    def _add(self, parameters: list[nn.Parameter], multiple: int) -> None:
        size = sum(p.numel() for p in parameters)
        padded = -(-size // multiple) * multiple
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
        # In one order on all ranks: a model may leave parameters out that others' samples reach.
        while self._next < len(self.flats) and self._missing[self._next] == 0:
            self._begin(self._next)
            self._next += 1

    def _begin(self, index: int) -> None:
        work = self._start(index, self.flats[index])
        if work is not None:
            self._work.append(work)
        if self.flats[index].device.type == "cpu" and len(self._work) > IN_FLIGHT:
            with self._group.communicating():
                self._work.pop(0).wait()
