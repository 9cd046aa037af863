"""The share of useful time of runs on thousands of GPUs, forecast beside what was published of such runs.

    python tests/bench/bench_months.py

Every run is simulated three times with the controller's own decisions. Nodes fail as in Llama 3's report (its table 5:
419 interruptions of 16,384 H100 in 54 days), or more often by a factor. The reports say neither how often they
checkpoint nor how long a restart takes at each scale, so both are assumed and stand in the table.
"""

from __future__ import annotations

import statistics
from typing import Any

import paths  # noqa: F401

from orchestrator.config.spec import parse
from orchestrator.controller.failure_simulation import HOUR, FailureModel, simulate
from orchestrator.controller.state import Policy, policy_of
from orchestrator.parallel.layout import Layout
from orchestrator.planner.cluster_file import Failures

STEP, SPARES = 6.5, 0.015
"""Seconds of a step on all workers, and spare nodes as a share of the nodes."""


def policy(nodes: int, days: float, every: int) -> Policy:
    """The policy of a run of `days` on all nodes with a commit each `every` steps."""
    spec = parse({
        "name": "month",
        "workload": {"model": "gpt2"},
        "data": {"sources": [{"uri": "a.txt"}], "tokenizer": {"train_bpe": 512}, "sequence_length": 512},
        "train": {"steps": round(days * 24 * HOUR / STEP), "global_batch": nodes * 8},
        "resources": {"workers": {"min": nodes * 4, "max": nodes * 8}, "per_worker": {"gpu": 1}},
        "checkpoint": {"every": every, "export": None},
        "limits": {"restarts": 1000},
    })  # fmt: skip
    world = nodes * 8
    return policy_of(
        spec, lambda room: Layout(dp=min(room, world)), predict=lambda layout: STEP * world / layout.world
    )


def row(
    name: str, published: str, nodes: int, factor: float, restart: float, every: int, snapshots: int
) -> None:
    """Simulate a run, and print its row."""
    rates, spares = Failures(), round(nodes * SPARES)
    more: dict[str, Any] = {"breaks": factor * rates.breaks(8), "software": factor / rates.software}
    failure_model = FailureModel(
        nodes=nodes + spares,
        per_node=8,
        repair=12 * HOUR,
        restart=restart,
        stall=0.5,
        write=20.0,
        snapshot_every=snapshots,
        **more,
    )
    results = [simulate(policy(nodes, 20.0, every), failure_model, seed) for seed in range(3)]
    minutes = 60 / (sum(failure_model.rates.values()) * nodes)
    goodput = statistics.fmean(result.goodput for result in results)
    lost, starts = (
        statistics.fmean(result.parts[part] / result.seconds for result in results)
        for part in ("lost", "restarts")
    )
    kept = f"{every * STEP / 60:.0f} min" + (
        f", snapshots each {snapshots * STEP:.0f} s" if snapshots else ""
    )
    cells = [name, f"{nodes * 8:,}", f"{minutes:.0f} min", f"{restart:.0f} s", kept, published]
    print("| " + " | ".join([*cells, f"{goodput:.1%}", f"{lost:.1%}", f"{starts:.1%}"]) + " |", flush=True)


if __name__ == "__main__":
    print(
        "| run | GPUs | a failure each | restart | checkpoint each | published | forecast | lost steps | restarts |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    row("Llama 3 405B", "over 90 %", 2048, 1.0, 120.0, 277, 0)
    row("the same, slower restarts", "over 90 %", 2048, 1.0, 600.0, 277, 0)
    row("this system", "", 2048, 1.0, 120.0, 277, 5)
    row("ByteRobust", "97 %", 1200, 1.0, 600.0, 277, 1)
    row("FT-HSDP's baseline", "44 %", 12288, 1.0, 600.0, 100, 0)
    row("the same, more failures", "44 %", 12288, 2.0, 600.0, 100, 0)
    row("FT-HSDP, more failures", "80 %", 12288, 2.0, 180.0, 100, 1)
    row("this system", "", 12288, 1.0, 120.0, 100, 5)
    row("this system, more failures", "", 12288, 2.0, 120.0, 100, 5)
