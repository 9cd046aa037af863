"""The choice of device, process-group backend and compute dtype."""

from __future__ import annotations

import contextlib
import datetime
import os
import resource
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cluster.workers.worker_context import WorkerContext
from orchestrator.job.spec import JobSpec

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=10)
"""Timeout of a collective. A dead peer is detected from outside, and this process replaced, long before."""

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtype of matrix products by the job's precision."""


@dataclass(frozen=True)
class Device:
    """A rank's device, its compute dtype, and the process group of all ranks."""

    device: torch.device
    compute: torch.dtype
    group: dist.ProcessGroup

    def autocast(self) -> AbstractContextManager[Any]:
        """Context manager for the forward pass: weights stay fp32, matrices are multiplied in the compute dtype."""
        if self.compute is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute)


def open_device(spec: JobSpec, context: WorkerContext) -> Device:
    """Take this rank's device and join the process group of all ranks: NCCL on CUDA, gloo beside it and on CPU.

    Raises RuntimeError if the job asks for a GPU and there is none.
    """
    rank_info, worker = context.rank_info, spec.resources.per_worker
    torch.set_num_threads(max(int(worker.cpu), 1))
    compute = COMPUTE[spec.train.precision]
    if worker.gpu:
        if not torch.cuda.is_available():
            raise RuntimeError("per_worker.gpu is 1, and this worker's torch sees no GPU")
        device = torch.device("cuda", rank_info.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        device, backend = torch.device("cpu"), "gloo"
    if rank_info.host.startswith("127."):
        # otherwise gloo resolves the host name, which may give another interface
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = context.store or dist.TCPStore(
        rank_info.host, context.store_port(), is_master=False, timeout=COLLECTIVE_TIMEOUT
    )
    dist.init_process_group(
        backend, store=store, rank=rank_info.rank, world_size=rank_info.world_size, timeout=COLLECTIVE_TIMEOUT
    )
    group = dist.group.WORLD
    assert group is not None
    return Device(device, compute, group)


def peak_memory() -> int:
    """Peak memory of this rank in bytes: allocated on its GPU, or else resident in its process, libraries included."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def close_device() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
