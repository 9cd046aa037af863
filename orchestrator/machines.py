"""What one worker offers to a plan: looked up for a GPU, measured here for processors. Torch-free and ray-free."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from cluster.gang import Bundle
from cluster.machine import Offer

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
    """Matrix multiplication by `cpu` of this machine's cores in FLOP/s, fp32, measured with all of them."""
    import numpy as np

    a = np.ones((512, 512), np.float32)
    a @ a  # the first product starts the library's threads
    start, rounds = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        a @ a
        rounds += 1
    rate = 2.0 * 512**3 * rounds / (time.perf_counter() - start)
    return rate * min(cpu / (os.cpu_count() or 1), 1.0)
