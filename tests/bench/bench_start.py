"""How long a gang without Ray takes to start its ranks: one fork server, and several, in turns.

    python tests/bench/bench_start.py [--ranks 8 64] [--rounds 5] [--servers 1 2 8]

The ranks are forked from the imports of a real rank, and do nothing. A process forks one rank at a time, mostly to copy
the tables of its memory, so several servers help as far as there are processors. `started` is when all process ids are
known, `up` when all ranks have been heard of. The processor's share counts the fork servers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time

import paths  # noqa: F401
import psutil

from cluster.workers import process_gang
from cluster.workers.gang import Bundle
from cluster.workers.process_gang import ProcessGang

TARGET = "bench_start_rank:wait"


def servers_of(gang: ProcessGang) -> list[psutil.Process]:
    """The fork servers of a gang."""
    first = gang._fork_servers[0]._process
    assert first is not None
    return [psutil.Process(first.pid), *psutil.Process(first.pid).children()]


def busy(processes: list[psutil.Process]) -> float:
    """Seconds of a processor that these processes have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measured(gang: ProcessGang, ranks: int) -> tuple[float, float, float]:
    gang.stop()
    servers = servers_of(gang)
    before, began = busy(servers), time.monotonic()
    gang.start(ranks, Bundle(), TARGET, {})
    started = time.monotonic() - began
    while any(rank.state != "running" for rank in gang.poll(0, 0.01).ranks):
        pass
    return started, time.monotonic() - began, busy(servers) - before


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--servers", type=int, nargs="*", default=[1, os.cpu_count() or 1])
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        gangs = {}
        for servers in dict.fromkeys(asked.servers):
            process_gang.MOST_SERVERS = servers
            os.cpu_count = lambda servers=servers: servers
            gangs[servers] = stack.enter_context(contextlib.closing(ProcessGang()))
            gangs[servers].start(servers, Bundle(), TARGET, {})  # so that the imports are done
            gangs[servers].stop()
            assert len(servers_of(gangs[servers])) == servers
        for ranks in asked.ranks:
            found: dict[int, list[tuple[float, float, float]]] = {servers: [] for servers in gangs}
            for _ in range(asked.rounds):
                for servers, rows in found.items():
                    rows.append(measured(gangs[servers], ranks))
            for servers, rows in found.items():
                started, up, used = (statistics.median(column) for column in zip(*rows, strict=True))
                print(
                    f"{ranks:4} ranks, {servers} fork servers: started {started:.3f} s, up {up:.3f} s, "
                    f"{1000 * used / ranks:.1f} ms of a processor a rank",
                    flush=True,
                )


if __name__ == "__main__":
    main()
