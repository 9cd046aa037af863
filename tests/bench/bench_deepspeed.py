"""Both engines side by side: seconds per step, tokens per second and peak memory of the same model and batch.

    python tests/bench/bench_deepspeed.py --ranks 2 --rounds 3
    python tests/bench/bench_deepspeed.py --gpu --hidden 2048 --layers 24            # on one GPU
    python tests/bench/bench_deepspeed.py --gpu --hidden 4096 --largest   # layers that fit, with offload and without

Seconds are of the clock and of the processor; the latter hardly change on a machine that others use too.
Every measurement is a gang of its own, so that peaks of memory do not add up; rounds go through all of them in turns.
Memory is what a rank holds at its peak above what it held when the libraries were imported: of the GPU as PyTorch's
allocator counts it, of a processor's machine as resident memory.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import sys
import time
from typing import Any

import paths  # noqa: F401
import torch
from harness import finished
from parallel_ranks import batches, job, workload_of

from cluster.workers.process_gang import ProcessGang
from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import parse
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.make import make_engine

WAYS: dict[str, dict[str, Any]] = {
    **{f"torch zero {stage}": {"zero": stage} for stage in (1, 2, 3)},
    **{f"deepspeed zero {stage}": {"zero": stage, "engine": "deepspeed"} for stage in (1, 2, 3)},
    "torch zero 2, optimizer offloaded": {"zero": 2, "offload": "optimizer"},
    "deepspeed zero 2, optimizer offloaded": {"zero": 2, "offload": "optimizer", "engine": "deepspeed"},
    "deepspeed zero 3, parameters offloaded": {"zero": 3, "offload": "parameters", "engine": "deepspeed"},
}


def main() -> None:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--only", default="", help="ways whose name has this in it")
    parser.add_argument("--largest", action="store_true", help="double the layers until memory ends")
    options = parser.parse_args()
    if options.largest:
        largest(options)
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS if options.only in name}
    for number in range(options.rounds):
        for name in list(found) if number % 2 == 0 else reversed(found):
            row = measured(options, name, options.layers)
            found[name].append(row)
            print(f"round {number + 1}, {name}: {row}", file=sys.stderr, flush=True)
    parameters = next(iter(found.values()))[0]["parameters"]
    print(
        f"| {options.ranks} ranks, {parameters / 1e6:.1f} M parameters | s a step | processor s | tokens/s "
        "| peak MiB per rank | bytes per parameter |\n|---|---|---|---|---|---|"
    )
    for name, rows in found.items():
        seconds, busy, peak = (statistics.median(r[key] for r in rows) for key in ("seconds", "busy", "peak"))
        tokens = options.batch * options.length / seconds
        print(
            f"| {name} | {seconds:.3f} | {busy:.3f} | {tokens:.0f} | {peak / 2**20:.0f} "
            f"| {peak / rows[0]['parameters']:.1f} |"
        )


def largest(options: argparse.Namespace) -> None:
    """The deepest model of the given width that trains, within a factor of two and then of an eighth."""
    print("| way | layers | parameters | tokens/s |\n|---|---|---|---|")
    for name in WAYS:
        fits, layers, best = 0, 8, {}
        step = 0
        while step == 0 or step >= max(fits // 8, 1):
            try:
                best, fits = measured(options, name, layers), layers
                layers = layers * 2 if step == 0 else layers + step
            except AssertionError as error:
                if "out of memory" not in str(error).lower():
                    raise
                step = max((layers - fits) // 2, 1) if step == 0 else step
                layers = fits + step
            step //= 2
        tokens = options.batch * options.length / best["seconds"] if best else 0.0
        print(f"| {name} | {fits} | {best.get('parameters', 0) / 1e9:.2f} G | {tokens:.0f} |", flush=True)


def measured(options: argparse.Namespace, name: str, layers: int) -> dict[str, float]:
    """The slowest and the fullest rank of one gang. Raises AssertionError with a rank's error."""
    heads = max(options.hidden // 64, 1)
    sizes = {"hidden": options.hidden, "heads": heads, "kv_heads": heads, "layers": layers}
    config = {
        "changes": {**sizes, "intermediate": 4 * options.hidden, "max_positions": options.length},
        "vocabulary": 8192, "length": options.length, "batch": options.batch, "steps": options.steps,
        "gpu": int(options.gpu), "precision": "bf16" if options.gpu else "fp32",
        "layout": {**WAYS[name], "dp": options.ranks, "micro_batch": options.batch // options.ranks},
    }  # fmt: skip
    with contextlib.closing(ProcessGang()) as gang:
        rows = finished(options.ranks, config, "bench_deepspeed:measure", gang)
    return {key: max(row[key] for row in rows) for key in rows[0]}


def measure(config: dict[str, Any], context: WorkerContext) -> dict[str, float]:
    """As one rank: median seconds of a step, of the clock and of the processor, peak bytes, parameters."""
    document = job(config).model_dump(mode="json")
    document["train"]["precision"] = config["precision"]
    document["resources"]["per_worker"]["gpu"] = config["gpu"]
    spec = parse(document)
    workload, device = (
        workload_of(spec, config["vocabulary"]),
        open_device(spec.train, spec.resources.per_worker, context),
    )
    layout = Layout(**config["layout"])
    if layout.engine == "deepspeed":
        from orchestrator.train.engines.deepspeed_library import open_deepspeed

        open_deepspeed(device.device)
    before = _held()
    engine = make_engine(spec.engine, workload, layout, device)
    engine.initialise(0)
    data = batches(spec, layout, config["vocabulary"])
    seconds, busy = list[float](), list[float]()
    for _ in range(config["steps"] + 2):
        began, worked = time.perf_counter(), time.process_time()
        engine.train_step(data, 1e-4)  # its metrics are numbers, so the device is done
        seconds.append(time.perf_counter() - began)
        busy.append(time.process_time() - worked)
    peak = torch.cuda.max_memory_allocated() if config["gpu"] else _peak() - before
    engine.close()
    close_device()
    count = sum(shape.numel() for shape in workload.shapes.values())
    return {
        "seconds": statistics.median(seconds[2:]),
        "busy": statistics.median(busy[2:]),
        "peak": float(peak),
        "parameters": float(count),
    }


def _held() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
