"""The memory and speed of one worker: from a table for a GPU, measured here for a CPU. Torch-free and ray-free."""

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
"""Bytes per second between GPUs: a guess between NVLink and a network card, good enough to rank layouts."""


@dataclass(frozen=True)
class Machine:
    """One worker: memory for the model in bytes, matrix multiplication in FLOP/s, bandwidth to others in bytes/s."""

    memory: float
    flops: float
    bandwidth: float = 1e9


BOUNDLESS = Machine(memory=float("inf"), flops=1e12)
"""A machine on which every legal layout fits."""


def machine_for(offer: Offer | None, bundle: Bundle) -> Machine:
    """The machine of a worker that needs `bundle`: a GPU by the name in `offer`, a CPU by a short measurement here.

    An unknown GPU counts as the smallest known one. Without an offer no such worker fits the cluster yet, and this
    machine is measured instead.
    """
    if bundle.gpu:
        memory, flops = GPUS.get(offer.accelerator if offer else "", min(GPUS.values()))
        return Machine(memory, flops, GPU_BANDWIDTH)
    memory = offer.memory if offer else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(memory, probe(bundle.cpu))


def probe(cpu: float, seconds: float = 0.2) -> float:
    """fp32 matrix multiplication by `cpu` cores of this machine, in FLOP/s: one core's best time within `seconds`,
    times `cpu`, since other processes may be busy here."""
    import numpy as np
    from threadpoolctl import threadpool_limits

    a = np.ones((256, 256), np.float32)
    with threadpool_limits(1):
        fastest, end = float("inf"), time.perf_counter() + seconds
        while fastest == float("inf") or time.perf_counter() < end:  # once at least, however busy the machine
            start = time.perf_counter()
            a @ a
            fastest = min(fastest, time.perf_counter() - start)
    return 2.0 * 256**3 / fastest * cpu
