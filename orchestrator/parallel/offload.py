"""Optimizer state and the master weights in host memory (Ren et al., 2021, ZeRO-Offload)."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from orchestrator.parallel.parameter_shard import DataParallel, ParameterShard


class Offload:
    """A `DataParallel` that updates copies of the shards on the CPU: gradients are copied there, and weights back."""

    def __init__(self, inner: DataParallel) -> None:
        self._inner = inner
        self.shards = [_on_host(shard) for shard in inner.shards]

    def begin(self) -> None:
        """See `DataParallel.begin`."""
        self._inner.begin()

    def micro_batch(self, last: bool) -> None:
        """See `DataParallel.micro_batch`."""
        self._inner.micro_batch(last)

    @torch.no_grad()
    def finish(self) -> None:
        """See `DataParallel.finish`."""
        self._inner.finish()
        for host, device in zip(self.shards, self._inner.shards, strict=True):
            assert host.parameter.grad is not None
            assert device.parameter.grad is not None
            # All copies are queued before the one wait below. They overlap only because the host's memory is
            # page-locked.
            host.parameter.grad.copy_(device.parameter.grad, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def publish(self) -> None:
        """See `DataParallel.publish`."""
        for host, device in zip(self.shards, self._inner.shards, strict=True):
            device.parameter.copy_(host.parameter, non_blocking=True)
        self._inner.publish()
        # Who writes to the host's next, such as a reference, does not wait for a device.
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _on_host(shard: ParameterShard) -> ParameterShard:
    pinned = shard.parameter.device.type == "cuda"
    copy = nn.Parameter(torch.zeros(shard.parameter.shape, pin_memory=pinned))
    copy.grad = torch.zeros(shard.parameter.shape, pin_memory=pinned)
    return dataclasses.replace(shard, parameter=copy)
