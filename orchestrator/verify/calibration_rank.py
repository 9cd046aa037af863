"""Measure a rank on its machine: operators, memory, collectives and steps of small models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from cluster.workers.worker_context import WorkerContext
from orchestrator.optim.kinds import ADAMW
from orchestrator.parallel.device import COMPUTE, Device, close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine
from orchestrator.verify.calibrate import job, needed_flops_of, rates_of
from workloads.load import load
from workloads.workload import Vocabulary

SIZES = (
    (32, 32, 32),
    (64, 64, 64),
    (128, 128, 128),
    (256, 64, 64),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
)
"""Rows, columns and inner sizes of the measured matrix products."""
MESSAGES = (2**12, 2**16, 2**20, 2**22, 2**24)
"""Bytes of the measured all-reduces."""
HEADS, LENGTH = (16, 64), 256
"""Head sizes, and tokens of a row, of the measured attention."""
LONG = 2**24
"""Elements of the tensors that measure the memory bandwidth: far more than caches hold."""
ROUNDS = 5
SLOW = 0.25
"""A call that takes this many seconds runs once only."""
LONGEST = 1.0
"""The maximum seconds of a step's matrix products at the best measured rate; longer steps are not measured. A CPU
without 16-bit instructions takes twenty times as long as in 32 bits.
"""


def measure(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Return the measurements of this rank that `config` asks for.

    Its keys are {"operators": True}, {"collectives": True}, {"steps": [a list of a job and a layout]}, and "rounds",
    the number of repetitions. With operators, steps that would take too long are None.
    """
    spec = job(**config["steps"][0]["job"]) if config.get("steps") else job()
    device = open_device(spec.train, spec.resources.per_worker, context)
    result: dict[str, Any] = {}
    if config.get("operators"):
        result["operators"] = _operators(device.device)
    if config.get("collectives"):
        result["collectives"] = [[size, _all_reduce(size, device.device)] for size in MESSAGES]
    if config.get("steps"):
        measured = rates_of(result["operators"]["matrix"]) if config.get("operators") else {}
        rates = {name: max(rate for _, rate in products) for name, products in measured.items()}
        rounds = config.get(
            "rounds", ROUNDS * dist.get_world_size()
        )  # more rounds for processes that wait for each other
        result["steps"] = [
            _step(step["job"], step["layout"], device, rounds) if _ends_soon(step["job"], rates) else None
            for step in config["steps"]
        ]
    close_device()
    return result


def _ends_soon(job: dict[str, Any], rates: dict[str, float]) -> bool:
    """Return whether a step of that job takes at most LONGEST at these rates. True without rates."""
    rate = rates.get(job.get("precision", "fp32"))
    return rate is None or needed_flops_of(job) / rate <= LONGEST


def seconds_of(run: Callable[[], Any], min_seconds: float = 0.02, rounds: int = ROUNDS) -> float:
    """Return the CPU seconds of a call, in the best of `rounds` rounds of at least `min_seconds` seconds each.

    The minimum is used, because other processes can only slow the call down. It is CPU time of this process, which runs
    one thread.
    """
    began = time.process_time()
    run()
    if (first := time.process_time() - began) > SLOW:
        return first
    count, seconds = 1, list[float]()
    while True:
        began = time.process_time()
        for _ in range(count):
            run()
        spent = time.process_time() - began
        if spent < min_seconds and not seconds:
            count *= 2
            continue
        seconds.append(spent / count)
        if len(seconds) == rounds:
            return min(seconds)


def _operators(device: torch.device) -> dict[str, Any]:
    result: dict[str, Any] = {"matrix": {}}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        result["matrix"][name] = []
        for rows, columns, inner in SIZES:
            seconds = _product(rows, columns, inner, device, dtype)
            result["matrix"][name].append([[rows, columns, inner], seconds])
    long, other = torch.randn(LONG, device=device), torch.empty(LONG, device=device)
    # A copy reads and writes 4 bytes per element. GELU and the sum move 20: two passes that read three inputs and write
    # two outputs.
    result["copy"] = 8.0 * LONG / seconds_of(lambda: other.copy_(long), rounds=3)
    x, y = torch.randn(2**18, device=device), torch.randn(2**18, device=device)
    result["elements"] = 20.0 * 2**18 / seconds_of(lambda: F.gelu(x, approximate="tanh") + y)
    result["attention"] = []
    for size in HEADS:
        q = torch.randn(2, 4, LENGTH, size, device=device)
        attend = partial(F.scaled_dot_product_attention, q, q, q, is_causal=True)
        # Half of the 2 x 4 x LENGTH^2 pairs (rows x heads x tokens^2), because the attention is causal.
        result["attention"].append([size, seconds_of(attend) / (0.5 * 2 * 4 * LENGTH**2)])
    weights = [torch.randn(2**18, device=device, requires_grad=True) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    adam = torch.optim.AdamW(weights, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()

    result["optimizer"] = (
        8 * 2**18 * ADAMW.bytes_per_parameter / seconds_of(update, min_seconds=0.05, rounds=3)
    )
    return result


def _product(rows: int, columns: int, inner: int, device: torch.device, dtype: torch.dtype) -> float:
    """Return the mean seconds of a linear layer's three products: the output, and the gradients of input and weight.

    If a library has no kernel for a precision, one of them may take ten times as long as another.
    """
    made = partial(torch.randn, device=device, dtype=dtype)
    x = made(rows, inner)
    weight = made(columns, inner)
    gradient = made(rows, columns)
    forms = (lambda: x @ weight.t(), lambda: gradient @ weight, lambda: gradient.t() @ x)
    return statistics.fmean(seconds_of(form) for form in forms)


def _all_reduce(size: int, device: torch.device) -> float:
    """Return the shortest seconds of an all-reduce of that many bytes over all ranks, which call it together."""
    tensor = torch.zeros(size // 4, device=device)
    dist.all_reduce(tensor)
    result = []
    for _ in range(3 * ROUNDS):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(tensor)
        result.append(time.perf_counter() - began)
    return min(result)


def _step(options: dict[str, Any], layout: dict[str, Any], device: Device, rounds: int) -> list[float]:
    """Return figures of that job's step under that layout, without the first two steps.

    They are the shortest and the median seconds, the shortest CPU seconds of this process, which other processes do not
    affect, and the mean relative delay of a step over its shortest. For a single process, the first two are CPU seconds
    too.
    """
    spec, chosen = job(**options), Layout.from_json(layout)
    size, length = spec.workload.changes["vocab_size"], spec.data.sequence_length
    workload = load(
        spec.workload.model,
        "causal_lm",
        Vocabulary(size, eos=0),
        changes=spec.workload.changes,
        sequence_length=length,
    )
    engine = TorchEngine(
        spec.engine, workload, chosen, Device(device.device, COMPUTE[spec.train.dtype], device.group)
    )
    engine.initialise(0)
    generator = torch.Generator().manual_seed(dist.get_rank() // (chosen.tp * chosen.cp) % chosen.dp)
    batches = []
    for _ in range(chosen.accumulation(spec.train.global_batch)):
        ids = torch.randint(1, size, (chosen.micro_batch, length), generator=generator)
        batches.append({"tokens": ids, "labels": ids})
    cpu_seconds, wall_seconds = [], []
    for _ in range(2 + rounds):
        dist.barrier()
        began_own, began = time.process_time(), time.perf_counter()
        engine.train_step([dict(batch) for batch in batches], 1e-4)
        cpu_seconds.append(time.process_time() - began_own)
        wall_seconds.append(time.perf_counter() - began)
    engine.close()
    result = cpu_seconds if chosen.world == 1 else wall_seconds
    return [min(result[2:]), statistics.median(result[2:]), min(cpu_seconds[2:]), _delay(wall_seconds[2:])]


def _delay(seconds: list[float]) -> float:
    """Return the mean excess of exponentially distributed delays over their minimum, as a share of the minimum.

    The minimum of n samples exceeds the true one by 1/n of the mean excess, hence the factor n / (n - 1).
    """
    fastest, count = min(seconds), len(seconds)
    return (statistics.fmean(seconds) - fastest) * count / (count - 1) / fastest
