"""Test the devices of this machine before it joins a run: `orchestrator doctor --burn-in`.

One process for each GPU, or two on the CPUs, repeat matrix multiplications with known bits, patterns in memory and
collectives with known sums.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from cluster.workers.gang import Bundle
from cluster.workers.machine import host_memory
from cluster.workers.run_local_gang import run_to_the_end
from cluster.workers.worker_context import WorkerContext
from orchestrator.config.resources import PerWorker
from orchestrator.launch.doctor import Finding
from orchestrator.parallel import burn_in
from orchestrator.parallel.device import close_device, open_device
from orchestrator.parallel.rank_messages import any_rank, gather_json
from orchestrator.train.config import TrainSpec

ENTRY = "orchestrator.launch.burn_in:main"
RANKS_ON_CPU = 2
"""Processes on a machine without a GPU: the fewest that have collectives."""
GPU_SHARE = 0.8
"""Share of a GPU's free memory that is tested."""
HOST_SHARE = 0.02
"""Share of the machine's memory that is tested, over all processes."""
PATIENCE = 300.0
"""Seconds beyond the time of the tests after which a process counts as hanging."""
HINT = "leave this machine out, and have it examined"


def burn_in_findings(seconds: float) -> Iterator[Finding]:
    """Test the devices of this machine for about `seconds` seconds. Yields a finding for each kind of test."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    ranks = gpus or RANKS_ON_CPU
    config = {"seconds": seconds, "gpu": int(gpus > 0), "ranks": ranks}
    patience = seconds + PATIENCE
    try:
        _, report = run_to_the_end(
            ranks, Bundle(gpu=float(gpus > 0)), entry=ENTRY, config=config, patience=patience, work="burn-in"
        )
    except RuntimeError as error:
        yield Finding("wrong", "burn-in", str(error), HINT)
        return
    devices = f"{gpus} GPUs" if gpus else f"{ranks} processes"
    for kind, wrong in report["wrong"].items():
        rounds = report["rounds"][kind]
        much = f"{report['octets'] / 2**30:.1f} GiB" if kind == "memory" else f"{rounds} rounds"
        text = wrong[0] if wrong else f"no wrong bit in {much} on each of {devices}"
        yield Finding("wrong" if wrong else "ok", f"burn-in: {kind}", text, HINT if wrong else "")


def main(config: dict[str, Any], context: WorkerContext) -> dict[str, Any]:
    """Test one device until the time is over. The entry point of every process; all of them do the same rounds.

    Returns:
        {"rounds", "wrong", "octets"}: how often each kind of test ran, the lines of those that failed on any rank, and
        the bytes of memory that were tested.
    """
    end = time.monotonic() + config["seconds"]
    device = open_device(TrainSpec(steps=1, global_batch=1), PerWorker(gpu=config["gpu"]), context).device
    if device.type == "cuda":
        octets = int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    else:
        octets = int(host_memory() * HOST_SHARE / config["ranks"])
    rounds = {"products": 0, "updates": 0, "collectives": 0, "memory": 0}
    wrong: dict[str, list[str]] = {kind: [] for kind in rounds}
    seed = 0
    # Memory takes long, so it comes once, after some rounds that have warmed the device.
    while seed == 0 or not any_rank(time.monotonic() > end):
        seed += 1
        wrong["products"] += burn_in.products(device, seed)
        wrong["updates"] += burn_in.updates(device, seed)
        wrong["collectives"] += burn_in.collectives(device, seed)
        for kind in ("products", "updates", "collectives"):
            rounds[kind] = seed
    wrong["memory"] = burn_in.memory(device, octets, seed)
    rounds["memory"] = 1
    everyone = gather_json({kind: lines[:1] for kind, lines in wrong.items()})
    close_device()
    report = {
        kind: [f"rank {number}: {line}" for number, results in enumerate(everyone) for line in results[kind]]
        for kind in rounds
    }
    return {"rounds": rounds, "wrong": report, "octets": octets}
