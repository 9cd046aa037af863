"""What everything that is seen of a run costs, by CPU time: of a rank in each step, and of the controller for each row.

    .venv/bin/python tests/bench/bench_seeing.py [--rounds 30] [--step 0.1]

Each is called many times, rounds of all of them in turns, and the median round counts. `--step` is the seconds of a
step that they are compared with. What runs beside the rank's main thread counts as if it were in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paths  # noqa: F401
import torch

from cluster.workers.node_metrics import FIRST_INTERVAL, NodeMetrics
from cluster.workers.rank_output import StampedStream
from cluster.workers.worker_context import RankInfo, WorkerContext
from orchestrator.config.spec import parse
from orchestrator.controller.run_files import NodeRows
from orchestrator.parallel.step_clock import StepClock
from orchestrator.storage.row_line import METRICS
from orchestrator.storage.row_writer import RowWriter
from orchestrator.storage.run_directory import RunDir
from orchestrator.train.profile import StepProfiler
from orchestrator.train.task import Task

DOCUMENT: dict[str, Any] = {
    "name": "cost",
    "workload": {"model": "gpt-tiny"},
    "data": {"sources": [{"uri": "x.txt"}], "tokenizer": "t.json", "sequence_length": 64},
    "train": {"steps": 50, "global_batch": 4},
    "sinks": {"tensorboard": True},
}
ROW = {"attempt": 1, "time": 1.7e9, "step_seconds": 0.1} | {f"metric_{n}": 1.0 / (n + 1) for n in range(20)}
ASKED = 40
"""Switches of the clock in a step of accumulation over some micro-batches; see bench_step_clock.py for layouts."""


def main() -> None:
    """A row for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--step", type=float, default=0.1)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        calls = _calls(Path(folder))
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(given.rounds):
            for name, (call, times, _, _) in calls.items():
                began = time.thread_time()
                for _ in range(times):
                    call()
                found[name].append((time.thread_time() - began) / times)
    print("| what | where | each | share of a step |")
    print("|---|---|---|---|")
    total = 0.0
    for name, (_, _, where, in_a_step) in calls.items():
        each = statistics.median(found[name])
        share = each * in_a_step(given.step) / given.step
        total += share if where == "rank" else 0.0
        print(f"| {name} | {where} | {each * 1e6:.2f} us | {share:.4%} |")
    print(f"| all of it | rank | | {total:.4%} |")


def _calls(folder: Path) -> dict[str, tuple[Callable[[], Any], int, str, Callable[[float], float]]]:
    """Each with how often it is called in a round, where it runs, and how often it does in a step of that length."""
    context, node = WorkerContext(RankInfo(0, 1, 0, "127.0.0.1")), NodeMetrics()
    clock, stream = (
        StepClock(torch.device("cpu")),
        StampedStream(os.open("/dev/null", os.O_WRONLY), lambda: 7),
    )
    run = RunDir(str(folder / "run"))
    run.create()
    spec = parse(DOCUMENT)
    task = Task(spec.model_dump(mode="json"), {}, run.uri, "", 1, None, 50, False)
    profiler = StepProfiler(context, task, lambda: clock)
    writer, nodes = RowWriter(run, METRICS), NodeRows(run, lambda rows: None)
    reading = {"time": 1.7e9, "node": "10.0.0.4", "step": 7, "values": node.read()}
    steps = iter(range(1, 10**9))

    def row() -> None:
        writer.add([{**ROW, "step": next(steps)}])
        writer.flush(now=True)

    def read() -> None:
        nodes.add([reading], 1)
        nodes.rows.flush(now=True)

    once, rarely = (lambda step: 1.0), (lambda step: step / FIRST_INTERVAL)
    return {
        "a switch of the step's clock": (lambda: clock.switch("forward"), 1000, "rank", lambda step: ASKED),
        "whether a profile or a timeline is due": (lambda: profiler.next(7), 1000, "rank", once),
        "a reading of the node": (node.read, 20, "rank", rarely),
        "a line that is printed": (lambda: stream.write("a line of a log\n"), 200, "rank", once),
        "a row to disk": (row, 50, "controller", once),
        "a reading to disk": (read, 50, "controller", rarely),
    }


if __name__ == "__main__":
    main()
