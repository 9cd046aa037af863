"""A rank program that tells how much memory beginning with stored weights takes, beside what the rank keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rank_cases import job

from cluster.workers.worker_context import WorkerContext
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.layout import Layout
from orchestrator.train.engines.make import make_engine
from workloads.load import load
from workloads.workload import Vocabulary


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, int]:
    """Bytes of weights that the rank keeps, and the peak of its resident memory over that before it read any."""
    spec, layout = job(config), Layout(**config["layout"])
    device = open_device(spec.train, spec.resources.per_worker, context)
    known = Vocabulary(config["tokens"], eos=0)
    workload = load(config["model"], "causal_lm", known, sequence_length=16)
    engine: Any = make_engine(spec.engine, workload, layout, device)
    kept = sum(shard.parameter.numel() * 4 for shard in engine.trained.shards)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _status("VmRSS")
    engine.initialise(0)
    found = {"kept": kept, "peak": _status("VmHWM") - before}
    engine.close()
    close_device()
    return found
