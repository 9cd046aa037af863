"""What the loss in chunks of tokens costs and saves: a step and the peak memory of a rank, with chunks and with whole
logits, interleaved in one process.

GPT-2 124M, fp32, two sequences of 256 tokens per rank. Run it with `python tests/bench/bench_head.py RANKS ZERO`.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from typing import Any

import paths  # noqa: F401
import torch

from cluster.workers.process_gang import ProcessGang
from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import parse
from orchestrator.parallel.arithmetic import NEWEST, Arithmetic
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.load import load
from workloads.workload import Vocabulary

LENGTH, ROWS, ROUNDS = 256, 2, 5


def main(ranks: int, zero: int) -> None:
    from harness import finished

    for chunks in (True, False):
        found = finished(ranks, {"zero": zero, "memory": chunks}, "bench_head:measure", ProcessGang())
        print(
            f"{'chunks' if chunks else 'whole'}: peak {max(f['peak'] for f in found) / 2**20:.2f} GiB per rank"
        )
    found = finished(ranks, {"zero": zero, "memory": None}, "bench_head:measure", ProcessGang())
    ratios = [chunks / whole for chunks, whole in found[0]["seconds"]]
    print(
        f"step, chunks over whole: {statistics.median(ratios):.3f} ({', '.join(f'{r:.2f}' for r in ratios)})"
    )


def measure(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Seconds of steps in pairs, or the peak of the process in KiB under one of the two."""
    world = context.rank_info.world_size
    spec = parse({
        "name": "bench", "workload": {"model": "gpt2"},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": LENGTH},
        "train": {"steps": 1000, "global_batch": ROWS * world},
    })  # fmt: skip
    workload = load("gpt2", "causal_lm", Vocabulary(50257, eos=0), sequence_length=LENGTH)
    device = open_device(spec.train, spec.resources.per_worker, context)
    layout = Layout(dp=world, zero=config["zero"], micro_batch=ROWS)
    engine: Any = TorchEngine(spec.engine, workload, layout, device)
    engine.initialise(0)
    ids = torch.randint(1, 50257, (ROWS, LENGTH))
    modes = [config["memory"]] * 3 if config["memory"] is not None else [True, False] * (ROUNDS + 1)
    seconds = []
    for chunks in modes:
        engine.passes.losses.arithmetic = NEWEST if chunks else Arithmetic.WHOLE
        began = time.perf_counter()
        engine.train_step([{"tokens": ids, "labels": ids}], 1e-4)
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    close_device()
    return {"seconds": list(zip(seconds[2::2], seconds[3::2], strict=False)), "peak": peak}


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
