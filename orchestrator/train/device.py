"""Device, process-group backend and compute type, chosen here and nowhere else."""

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
"""Bound on one collective. A dead peer is seen from outside, and the process replaced, long before."""

COMPUTE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Type of matrix products by the job's precision."""


@dataclass(frozen=True)
class Device:
    """Where a rank computes, in which type, and the group of all ranks."""

    device: torch.device
    compute: torch.dtype
    group: dist.ProcessGroup

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of the forward pass: weights stay fp32, matrices are multiplied in the compute type."""
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
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would resolve the host name, which may lead elsewhere
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
    """Most bytes that this rank has held: allocated on its GPU, or resident in its process, libraries included."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def close_device() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
