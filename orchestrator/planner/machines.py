"""The machine of a worker: from its device's profile, or for a CPU calibrated or measured on this machine. Ray-free."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer, host_memory
from cluster.workers.nvml import Nvml
from orchestrator.config.resources import ResourceSpec
from orchestrator.planner.device import Machine
from orchestrator.planner.device_profile import calibrated, load, profile_of_accelerator
from orchestrator.train.config import Precision

FALLBACK_GPU = "t4"
"""The profile that stands for a GPU without one."""
CPU_CORE = "cpu-core"
CPU_INFO = Path("/proc/cpuinfo")
PROBE_SECONDS = 0.2
"""Seconds of measuring a core."""
PRECISION_FLAGS = {
    "bf16": {"avx512bw", "avx_ne_convert", "bf16"},
    "fp16": {"avx512_fp16", "avx_ne_convert", "amx_fp16", "asimdhp"},
}
"""The CPU flags, in Linux's names, of which one is needed for oneDNN's kernels in a precision.

The last ones are Arm's.
"""
SPEED_WITHOUT_INSTRUCTIONS = 0.04
"""Speed of 16-bit products without these instructions, relative to fp32. Measured by steps of a model of width 512 on a
Zen 3 with torch 2.13.
"""


def machine_for(offer: Offer | None, bundle: Bundle, precision: str = "fp32") -> Machine:
    """Return the machine of a worker that needs `bundle`.

    A GPU is looked up by the name in `offer`. A CPU uses the profile that `orchestrator calibrate` stored on this
    machine, or a short measurement. An unknown GPU counts as the smallest known one, with its own memory if the driver
    reports it; `stands_for` then has its name. Without an offer, no such worker fits the cluster yet, and this
    machine is used.

    Args:
        offer: what the cluster offers a worker; None if it offers nothing that fits.
        bundle: the resources of a worker.
        precision: the precision in which the worker trains.
    """
    if bundle.gpu:
        offer = offer or Offer(math.inf, next(iter(Nvml().names()), ""))
        name, profile = offer.accelerator, profile_of_accelerator(offer.accelerator)
        machine = (
            profile.machine(precision)
            if profile
            else load(FALLBACK_GPU).machine(_common_precision(precision))
        )
        machine = replace(machine, host_memory=math.inf)  # the node's memory is unknown
        if offer.accelerator_memory:
            machine = replace(machine, memory=offer.accelerator_memory)
        return machine if profile else replace(machine, stands_for=name or "a GPU without a name")
    memory = offer.memory if offer else host_memory()
    stored = calibrated()
    if stored is not None and stored.kind == "cpu":
        return replace(stored.machine(precision).scaled(bundle.cpu), memory=memory)
    core = load(CPU_CORE).machine(precision)
    if precision in PRECISION_FLAGS and not has_products_in(precision):
        core = replace(core, flops=SPEED_WITHOUT_INSTRUCTIONS * core.full_flops)
    # The measured speed over the profile's: it scales all speeds of matrix products alike.
    speed_ratio = probe(bundle.cpu) / (core.full_flops * core.matrix_share * bundle.cpu)
    measured_core = replace(core, flops=core.flops * speed_ratio, full_flops=core.full_flops * speed_ratio)
    return replace(measured_core.scaled(bundle.cpu), memory=memory)


def _common_precision(precision: str) -> str:
    """Return the precision to plan with on an unknown GPU, which may lack fp8."""
    return "bf16" if precision == "fp8" else precision


def has_products_in(precision: str) -> bool:
    """Return whether this CPU has instructions for matrix multiplication in that precision; False if Linux does not
    say.
    """
    try:
        flags = set(CPU_INFO.read_text().split())
    except OSError:
        return False
    return bool(flags & PRECISION_FLAGS[precision])


def machine_notes(machine: Machine, precision: str) -> list[str]:
    """Return what a user should know about a machine for a job in that precision, one line each.

    Args:
        machine: the machine.
        precision: the precision of the job.
    """
    slowdown = machine.full_flops / machine.flops
    if precision == "fp8" and not machine.launches_ahead:
        return ["CPUs have no FP8 matrix multiplication: fp8 runs, but slower than bf16"]
    if precision in PRECISION_FLAGS and not machine.launches_ahead and slowdown >= 2.0:
        return [
            f"matrix multiplication in {precision} takes {slowdown:.0f} times as long as in fp32 on this CPU: set "
            "train.precision to fp32"
        ]
    if not machine.stands_for:
        return []
    stand_in = f"the {machine.name} with {machine.memory / 1e9:.0f} GB"
    return [f"no profile of {machine.stands_for} is known; all predictions are for {stand_in} instead"]


def resources_on_device(resources: ResourceSpec, device: str) -> ResourceSpec:
    """Return a job's resources on a device that need not be here: the name of a profile, or its file.

    Raises InputError.

    Args:
        resources: of the workers.
        device: name of a profile, or its file.
    """
    gpus = 1 if load(device).kind == "cuda" else 0
    return resources.model_copy(update={"per_worker": resources.per_worker.model_copy(update={"gpu": gpus})})


def worker_on_device(resources: ResourceSpec, precision: Precision, device: str) -> Machine:
    """Return a worker with such resources on that device, for training in that precision. Raises InputError.

    Args:
        resources: of the workers.
        precision: the precision of the job.
        device: name of a profile, or its file.
    """
    machine, worker = load(device).machine(precision), resources.per_worker
    if worker.gpu:
        return machine
    cores = worker.bundle.cpu
    return replace(machine.scaled(cores), memory=machine.memory * max(cores, 1.0))


@lru_cache
def probe(cpu: float) -> float:
    """Return the FLOP/s of fp32 matrix multiplication on `cpu` cores of this machine.

    It is one core's best time within PROBE_SECONDS, times `cpu`. It counts the thread's CPU time, because other
    processes may be busy. It is measured once per process, so that plans in one process are comparable.
    """
    import numpy as np
    from threadpoolctl import threadpool_limits

    a = np.ones((256, 256), np.float32)
    with threadpool_limits(1):
        fastest = float("inf")
        end = time.perf_counter() + PROBE_SECONDS
        while fastest == float("inf") or time.perf_counter() < end:  # at least once, even on a busy machine
            start = time.thread_time()
            a @ a
            # The least time: other processes only add to it.
            fastest = min(fastest, time.thread_time() - start)
    return 2.0 * 256**3 / fastest * cpu
