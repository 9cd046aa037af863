"""Measures on one GPU within ten minutes and without a network, what the plan and the documentation only assume.

    make bench-gpu        # one JSON line for each measurement, on standard output and in build/bench-gpu.jsonl

In order: pinning speed; a step's model FLOP/s and memory, and the memory that was predicted, for a model of 1 B
parameters, ten layers of one of 8 B, and one with experts, with and without the cache of casts. On a CPU (`--cpu`) with
models that are tiny, which shows that it runs and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from orchestrator.planner.demand import demand_of

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "dist" / "train")]

import rank_cases  # noqa: E402

from orchestrator.checkpoint.shared_memory import SharedBuffer  # noqa: E402
from orchestrator.parallel.device import Device, set_numerics  # noqa: E402
from orchestrator.parallel.layout import Layout  # noqa: E402
from orchestrator.planner.choose_layout import peak_bytes, predict  # noqa: E402
from orchestrator.planner.device_profile import load  # noqa: E402
from orchestrator.planner.shape_of_model import model_shape  # noqa: E402
from orchestrator.train.engines.torch_engine import TorchEngine  # noqa: E402

OUTPUT = Path("build/bench-gpu.jsonl")
LENGTH, STEPS, MINUTES = 2048, 5, 9.0
PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L4": 121e12}
"""Dense bf16 FLOP/s, from the vendor's data sheets."""
PROFILES = {"H200": "h200", "H100": "h100", "A100": "a100-80", "L4": "l4"}
"""By which profile the plan predicts a step."""
MODELS: dict[str, dict[str, Any]] = {
    "1B": {"hidden": 2048, "heads": 16, "kv_heads": 8, "intermediate": 5632, "layers": 20},
    "8B": {"hidden": 4096, "heads": 32, "kv_heads": 8, "intermediate": 14336, "layers": 32},
    "moe": {
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 4,
        "layers": 12,
        "moe": {"experts": 8, "intermediate": 2816},
    },
}
"""The state of the 8 B model alone is 96 GB in fp32: it is measured with ten of its layers."""
VOCABULARIES = {"1B": 32_000, "8B": 128_256, "moe": 32_000}
"""Tokens of each, whose logits are a good part of a step. The texts use few of them."""


def tell(name: str, /, **found: Any) -> None:
    """Print a measurement and keep it."""
    line = json.dumps({"measured": name, **found})
    print(line, flush=True)
    OUTPUT.parent.mkdir(exist_ok=True)
    with OUTPUT.open("a") as file:
        file.write(line + "\n")


def device_name(device: torch.device) -> str:
    """As the driver says it; empty for a CPU."""
    return torch.cuda.get_device_name() if device.type == "cuda" else ""


def pinning(size: int) -> None:
    """Seconds to pin host memory of a snapshot, and to copy to it."""
    buffer, began = SharedBuffer(), time.perf_counter()
    buffer.make_room(size, pin=True)
    tell("pinning", bytes=size, pinned=buffer._pinned, seconds=time.perf_counter() - began)
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        buffer._bytes[:size].copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        tell("copy to the host", bytes=size, seconds=time.perf_counter() - began)
    buffer.close()


def steps(name: str, changes: dict[str, Any], device: torch.device, peak: float, keeps_casts: bool) -> None:
    """Time and memory of steps of a model, and what the plan predicts of them."""
    if device.type == "cuda":
        made_up = {"word_start": None, "sentence_end": None}
        rank_cases.VOCABULARY = dataclasses.replace(rank_cases.VOCABULARY, size=VOCABULARIES[name], **made_up)
    model = "mixtral-tiny" if "moe" in changes else "llama-tiny"
    case = {"model": model, "changes": {**changes, "max_positions": rank_cases.LENGTH}}
    train = {"precision": "bf16", "global_batch": 4}
    spec = rank_cases.job({**case, "train": train})
    workload, layout = rank_cases.workload_of(spec), Layout(micro_batch=1, recompute="full")
    assert dist.group.WORLD is not None
    engine = TorchEngine(spec.engine, workload, layout, Device(device, torch.bfloat16, dist.group.WORLD))
    runner: Any = engine.passes.runner
    runner._device = dataclasses.replace(runner._device, keeps_casts=keeps_casts)
    engine.initialise(spec.seed)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for step in range(STEPS):
        batches = rank_cases.micro_batches(workload, spec, layout, step)
        began = time.perf_counter()
        engine.train_step(batches, 1e-4)
        seconds.append(time.perf_counter() - began)
    shape = model_shape(workload.config, rank_cases.LENGTH)
    best, tokens = min(seconds[1:]), spec.train.global_batch * rank_cases.LENGTH
    found: dict[str, Any] = {
        "parameters": shape.parameters,
        "seconds": seconds,
        "tokens_per_second": tokens / best,
    }
    found |= {"keeps_casts": keeps_casts, "predicted_memory": peak_bytes(spec, shape, layout)}
    profile = next((each for kind, each in PROFILES.items() if kind in device_name(device)), "")
    if profile:
        found |= {
            "predicted_seconds": predict(
                demand_of(spec), shape, layout, load(profile).machine("bf16")
            ).time.seconds
        }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        found |= {"allocated": torch.cuda.max_memory_allocated(), "driver": total - free}
        found["mfu"] = shape.flops_per_token * tokens / best / peak if peak else None
    tell(f"step of {name}", **found)
    engine.close()


def main() -> None:
    """All measurements, until the time is spent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", action="store_true")
    on_cpu = parser.parse_args().cpu
    if not on_cpu and not torch.cuda.is_available():
        sys.exit("no GPU; --cpu shows that this runs")
    device, end = torch.device("cpu" if on_cpu else "cuda"), time.monotonic() + 60 * MINUTES
    backend = "gloo" if on_cpu else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    peak = 0.0
    if not on_cpu:
        rank_cases.LENGTH = LENGTH
        set_numerics(bitwise=False)
        name = torch.cuda.get_device_name()
        peak = next((flops for kind, flops in PEAK.items() if kind in name), 0.0)
        tell("device", name=name, memory=torch.cuda.mem_get_info()[1], torch=torch.__version__)
        pinning(8 << 30)
    for name, whole in MODELS.items():
        changes = {**whole, "layers": 10} if name == "8B" else whole
        if on_cpu:
            changes = {"layers": 2, **({"moe": {"experts": 4, "intermediate": 32}} if "moe" in whole else {})}
        for keeps_casts in (True, False):
            if time.monotonic() < end:
                try:
                    steps(name, changes, device, peak, keeps_casts)
                except torch.OutOfMemoryError as error:
                    tell(f"step of {name}", keeps_casts=keeps_casts, failed=str(error).splitlines()[0])
            gc.collect()  # a model and what is hung on its modules refer to each other
            if not on_cpu:
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
