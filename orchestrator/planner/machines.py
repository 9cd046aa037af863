"""The machine of a worker: from the profile of its device, calibrated or measured here for a CPU. Ray-free."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from cluster.workers.gang import Bundle
from cluster.workers.machine import Offer, host_memory
from cluster.workers.nvml import Nvml
from orchestrator.config.spec import JobSpec
from orchestrator.planner.device import Machine
from orchestrator.planner.profile import calibrated, load, of_accelerator

SMALLEST = "t4"
"""As which a GPU counts that no profile is known of."""
CORE = "cpu-core"
PROCESSOR = Path("/proc/cpuinfo")
INSTRUCTIONS = {
    "bf16": {"avx512bw", "avx_ne_convert", "bf16"},
    "fp16": {"avx512_fp16", "avx_ne_convert", "amx_fp16", "asimdhp"},
}
"""What a processor has one of, as Linux calls it, where oneDNN has kernels for products in a precision; the last of
each is Arm's."""
WITHOUT = 0.04
"""How fast products in 16 bits are without, relative to 32, by steps of a model 512 wide on a Zen 3 with torch 2.13."""


def machine_for(offer: Offer | None, bundle: Bundle, precision: str = "fp32") -> Machine:
    """The machine of a worker that needs `bundle`: a GPU by the name in `offer`, a CPU by what `orchestrator calibrate`
    has stored on this machine, or by a short measurement here.

    An unknown GPU counts as the smallest known one, which the machine says, see `told`, but for its memory if its
    driver has told that. Without an offer no such worker fits the cluster yet, and this machine is taken instead.
    """
    if bundle.gpu:
        offer = offer or Offer(math.inf, next(iter(Nvml().names()), ""))
        name, profile = offer.accelerator, of_accelerator(offer.accelerator)
        machine = profile.machine(precision) if profile else load(SMALLEST).machine(_known(precision))
        machine = replace(machine, host_memory=math.inf)  # that of the node is not known
        if offer.accelerator_memory:
            machine = replace(machine, memory=offer.accelerator_memory)
        return machine if profile else replace(machine, stands_for=name or "a GPU without a name")
    memory = offer.memory if offer else host_memory()
    stored = calibrated()
    if stored is not None and stored.kind == "cpu":
        return replace(stored.machine(precision).scaled(bundle.cpu), memory=memory)
    core = load(CORE).machine(precision)
    if precision in INSTRUCTIONS and not has_products_in(precision):
        core = replace(core, flops=WITHOUT * core.full_flops)
    rate = probe(bundle.cpu) / (core.full_flops * core.matrix_share * bundle.cpu)
    fast = replace(core, flops=core.flops * rate, full_flops=core.full_flops * rate)
    return replace(fast.scaled(bundle.cpu), memory=memory)


def _known(precision: str) -> str:
    """The precision as which it counts on a GPU of which it is not known what it has."""
    return "bf16" if precision == "fp8" else precision


def has_products_in(precision: str) -> bool:
    """Whether this machine's processor multiplies matrices in that precision by instructions of its own; where Linux
    does not tell, it counts as one that does not."""
    try:
        words = set(PROCESSOR.read_text().split())
    except OSError:
        return False
    return bool(words & INSTRUCTIONS[precision])


def told(machine: Machine, precision: str) -> list[str]:
    """What a user should know of a machine for a job in that precision, a line each."""
    times = machine.full_flops / machine.flops
    if precision == "fp8" and not machine.launches_ahead:
        return ["a processor has no products in 8 bits: fp8 is tried out on it, and slower than bf16"]
    if precision in INSTRUCTIONS and not machine.launches_ahead and times >= 2.0:
        return [
            f"products in {precision} take {times:.0f} times as long as in fp32 on this processor: set train.precision "
            "to fp32"
        ]
    if not machine.stands_for:
        return []
    taken = f"the {machine.name} with {machine.memory / 1e9:.0f} GB"
    return [
        f"no profile is known of {machine.stands_for}: it is taken as {taken}, of which all predictions are"
    ]


def on_paper(spec: JobSpec, device: str) -> JobSpec:
    """The job as it would run on workers of a device that need not be here; `device` is the name of a profile, or its
    file. Raises InputError."""
    gpus = 1 if load(device).kind == "cuda" else 0
    worker = spec.resources.per_worker.model_copy(update={"gpu": gpus})
    return spec.model_copy(update={"resources": spec.resources.model_copy(update={"per_worker": worker})})


def worker_on_paper(spec: JobSpec, device: str) -> Machine:
    """A worker of such a job on that device. Raises InputError."""
    machine, worker = load(device).machine(spec.train.dtype), spec.resources.per_worker
    if worker.gpu:
        return machine
    cores = worker.bundle.cpu
    return replace(machine.scaled(cores), memory=machine.memory * max(cores, 1.0))


@lru_cache
def probe(cpu: float, seconds: float = 0.2) -> float:
    """fp32 matrix multiplication by `cpu` cores of this machine, in FLOP/s: one core's best time within `seconds`,
    times `cpu`, since other processes may be busy here. Measured once in a process, whose plans are compared."""
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
