"""What holding a base once on a machine saves: memory of two ranks that train an adapter, with and without it.

`python tests/bench/bench_shared_base.py FOLDER`, where the folder gets a Llama of 110 M parameters. The memory is the
proportional set size, in which a page that two processes map counts half for each; it is taken after two steps.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import torch

from cluster.workers.process_gang import ProcessGang
from cluster.workers.worker_context import WorkerContext
from orchestrator.config.spec import parse
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.torch_engine import TorchEngine
from workloads.adapters.adapter import Adapter
from workloads.load import load
from workloads.workload import Vocabulary

RANKS, LENGTH, ROWS, SIZE = 2, 128, 1, 32000


def main(folder: str) -> None:
    from harness import finished
    from transformers import LlamaConfig, LlamaForCausalLM

    if not (Path(folder) / "config.json").exists():
        config = LlamaConfig(
            vocab_size=SIZE, hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12,
            max_position_embeddings=512, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    for base in ("", "its checksum"):
        found = finished(RANKS, {"folder": folder, "base": base}, "bench_shared_base:measure", ProcessGang())
        print(
            f"{'shared' if base else 'a copy each'}: {sum(f['mib'] for f in found):.0f} MiB of {RANKS} ranks"
        )


def measure(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """The proportional set size of this rank, in MiB."""
    spec = parse({
        "name": "bench", "workload": {"model": f"hf:{config['folder']}", "adapter": {"kind": "lora"}},
        "data": {"sources": [{"uri": "none"}], "tokenizer": "none", "sequence_length": LENGTH},
        "train": {"steps": 10, "global_batch": ROWS * RANKS},
    })  # fmt: skip
    workload = load(
        f"hf:{config['folder']}", "causal_lm", Vocabulary(SIZE, eos=0), sequence_length=LENGTH,
        adapter=Adapter("lora", 16, 32.0, ("*.attention.*",)),
    )  # fmt: skip
    device = open_device(spec.train, spec.resources.per_worker, context)
    engine = TorchEngine(spec.engine, workload, Layout(dp=RANKS, micro_batch=ROWS), device, config["base"])
    engine.initialise(0)
    ids = torch.randint(1, SIZE, (ROWS, LENGTH))
    for _ in range(2):
        engine.train_step([{"tokens": ids, "labels": ids}], 1e-4)
    torch.distributed.barrier()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    kib = next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    torch.distributed.barrier()
    engine.close()
    close_device()
    return {"mib": kib / 1024}


if __name__ == "__main__":
    main(sys.argv[1])
