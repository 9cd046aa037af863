"""What the messages between all ranks take at the end of a step: this project's, and collectives of gloo, in turns.

    python tests/bench/bench_agreement.py [--ranks 8 64 128] [--rounds 3]

Every rank is a process that is forked from this one and joins a group of gloo. "One all-reduce" sums eight numbers.
"All-gathers" are those of earlier versions: one for the sums of a step's metrics, one for what ranks agree on. "Here"
are the functions that do the same now. The figures are the seconds of one step's messages on the slowest rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from bench_groups import meet, on_gloo

from orchestrator.parallel.deterministic_reduction import tree_sum
from orchestrator.parallel.layout import Layout
from orchestrator.parallel.rank_messages import agree, sum_over_ranks

METRICS = 4
"""Numbers that are summed in a step: the loss, its count, the squared norm of the gradients, and one more."""


def one_all_reduce() -> None:
    dist.all_reduce(torch.ones(8, dtype=torch.int64))


def all_gathers() -> None:
    for mine in (torch.ones(METRICS, dtype=torch.float64), torch.ones(8, dtype=torch.int64)):
        everyone = mine.new_empty(dist.get_world_size() * len(mine))
        dist.all_gather_single(everyone, mine)
        tree_sum(everyone.view(-1, len(mine))).tolist()


def here() -> None:
    sum_over_ranks(torch.ones(METRICS, dtype=torch.float64)).tolist()
    agree(1, False, busy=0.5, memory=1)


VARIANTS: dict[str, Callable[[], None]] = {
    "one all-reduce": one_all_reduce,
    "all-gathers": all_gathers,
    "here": here,
}


def join(variant: str, port: int, rank: int, layout: Layout, answer: Connection) -> None:
    """The program of one rank."""
    try:
        meet("gloo", port, rank, layout)
        exchange = VARIANTS[variant]
        exchange()  # connects
        answer.send("ready")
        answer.recv()
        times = 5
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(times):
            exchange()
        answer.send(((time.perf_counter() - started) / times, (time.process_time() - cpu) / times))
        answer.recv()
    except Exception:
        traceback.print_exc()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64, 128])
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    port = 30200
    for world in asked.ranks:
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in VARIANTS}
        for _ in range(asked.rounds):
            for variant, rows in found.items():
                port += 1
                rows.append(on_gloo(join, variant, Layout(dp=world), port))
        for variant, rows in found.items():
            seconds, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"{world:4} ranks, {variant:14}: {1e3 * seconds:7.1f} ms, {1e3 * cpu:.2f} ms of a processor each",
                flush=True,
            )


if __name__ == "__main__":
    main()
