"""What one worker offers to a plan: looked up for a GPU, measured here for processors. Torch-free and ray-free."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer

GPUS = {
    "H200": (141e9, 989e12),
    "H100": (80e9, 989e12),
    "A100": (40e9, 312e12),
    "L4": (24e9, 121e12),
    "T4": (16e9, 65e12),
}
"""Bytes of memory and dense bf16 (T4: fp16) FLOP/s by Ray's accelerator name, from the vendor's data sheets."""
GPU_BANDWIDTH = 1e11
"""Bytes a second between GPUs: a guess between NVLink and a network card, good for ordering layouts."""


@dataclass(frozen=True)
class Machine:
    """What one worker offers: bytes of memory for the model, matrix multiplication in FLOP/s, bytes/s to others."""

    memory: float
    flops: float
    bandwidth: float = 1e9


def machine_for(offer: Offer | None, bundle: Bundle) -> Machine:
    """What a worker of that size offers: a GPU by its name, processors by a short measurement here.

    An unknown GPU is taken for the smallest one known. With no offer at all, no worker fits the cluster yet, and
    this machine stands for those to come.
    """
    if bundle.gpu:
        memory, flops = GPUS.get(offer.accelerator if offer else "", min(GPUS.values()))
        return Machine(memory, flops, GPU_BANDWIDTH)
    memory = offer.memory if offer else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(memory, probe(bundle.cpu))


def probe(cpu: float, seconds: float = 0.2) -> float:
    """Matrix multiplication by `cpu` of this machine's cores in FLOP/s, fp32: one core's best of as many as fit in
    `seconds`, times `cpu`, since others may be at work here just now."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    a = np.ones((256, 256), np.float32)
    fastest, end = float("inf"), time.perf_counter() + seconds
    with threadpool_limits(1):
        while (start := time.perf_counter()) < end:
            a @ a
            fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * 256**3 / fastest * cpu
