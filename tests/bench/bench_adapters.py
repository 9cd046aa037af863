"""Memory and commits of an adapter against fine-tuning of everything: one process each, of one model on one batch.

A Llama class of 110 M parameters, two optimiser steps of 4 x 128 tokens; the peak of resident memory is that over the
process before the model was built.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paths  # noqa: F401

os.environ["OMP_NUM_THREADS"] = "1"

TOKENS, LENGTH, STEPS = 16_000, 128, 2
CASES: dict[str, dict[str, Any]] = {
    "everything": {},
    "upper half": {"freeze": ["tokens.*", *(f"layers.{n}.*" for n in range(6))]},
    "lora, rank 16, attention": {"adapter": {"kind": "lora", "rank": 16}},
    "lora, rank 16, all layers": {
        "adapter": {"kind": "lora", "rank": 16, "targets": ["*.attention.*", "*.feedforward.*"]}
    },
    "dora, rank 16, attention": {"adapter": {"kind": "dora", "rank": 16}},
    "lora, attention, in 4 bits": {"adapter": {"kind": "lora", "rank": 16, "quantize": "nf4"}},
}


def measure(case: dict[str, Any], folder: str) -> dict[str, float]:
    """Bytes of a commit and at the peak, and seconds of the second step, of a case in this process."""
    import torch
    from rank_memory import _status

    from cluster.workers.rank_process import serve_store
    from cluster.workers.worker_context import RankInfo, WorkerContext
    from orchestrator.checkpoint.commit_store import Store
    from orchestrator.config.spec import parse
    from orchestrator.parallel.device import close_device, open_device
    from orchestrator.parallel.layout import Layout
    from orchestrator.resolve.training_inputs import load_workload
    from orchestrator.train.engines.make import make_engine
    from workloads.workload import Vocabulary

    spec = parse({
        "name": "bench",
        "workload": {"model": f"hf:{folder}/base", "adapter": case.get("adapter")},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": LENGTH},
        "train": {"steps": 100, "global_batch": 4, "freeze": case.get("freeze", []), "optimizer": {"warmup": 0}},
    })  # fmt: skip
    store = serve_store("127.0.0.1")
    device = open_device(
        spec.train,
        spec.resources.per_worker,
        WorkerContext(RankInfo(0, 1, 0, "127.0.0.1", store.port), store),
    )
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    workload = load_workload(
        spec=spec.workload,
        data=spec.data,
        train=spec.train,
        seed=spec.seed,
        vocabulary=Vocabulary(TOKENS, eos=0),
        data_format=4,
    )
    engine = make_engine(spec.engine, workload, Layout(micro_batch=4), device)
    engine.initialise(0)
    tokens = torch.randint(1, TOKENS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.train_step([{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}], 1e-4)
        seconds = time.perf_counter() - began
    peak = _status("VmHWM") - before
    commits = Store(f"{folder}/commits-{os.getpid()}")
    commits.publish(1, commits.write_shard(1, 0, engine.state()), {"position": 0, "receipt": ""})
    trained = sum(shape.numel() for name, shape in workload.shapes.items() if name not in workload.frozen)
    size = commits.manifest(1).total_bytes
    engine.close()
    close_device()
    return {"trained": trained, "peak": peak, "commit": size, "seconds": seconds}


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--case", help=argparse.SUPPRESS)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.case:
        print(json.dumps(measure(CASES[asked.case], asked.folder)), flush=True)
        os._exit(0)
    with tempfile.TemporaryDirectory() as folder:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 2048,
        }
        LlamaForCausalLM(LlamaConfig(vocab_size=TOKENS, **sizes)).save_pretrained(f"{folder}/base")
        print(f"{'':28}{'trained':>12}{'peak MiB':>10}{'commit MiB':>12}{'step s':>8}")
        for name in CASES:
            command = [sys.executable, __file__, "--case", name, "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
            found = json.loads(done.stdout.strip().splitlines()[-1])
            sizes_ = f"{found['peak'] / 2**20:10.0f}{found['commit'] / 2**20:12.1f}{found['seconds']:8.2f}"
            print(f"{name:28}{found['trained']:12,.0f}{sizes_}", flush=True)


if __name__ == "__main__":
    main()
