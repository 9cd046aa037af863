"""What the Ray actors of a gang cost on one node: one for each rank, and one for all, in turns.

    python tests/bench/bench_actors.py [--ranks 8] [--rounds 3]

A Ray of its own with one node. The ranks are forked from the imports of a real rank, and do nothing. `first` is the
seconds until all ranks are heard of where no worker is ready, `next` those of the next attempt, in the same workers,
`fewer` those of an attempt with a rank less, and `all` those of one with all ranks again. Memory is that of the actors
after `next`, with a share of what processes have in common (PSS).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
import uuid
from pathlib import Path

import paths  # noqa: F401
import psutil
import ray

from cluster.workers import ray_gang
from cluster.workers.gang import Bundle
from cluster.workers.ray_gang import RayGang
from cluster.workers.ray_internals import lean_start
from cluster.workers.shared_imports import SharedImports

TARGET = "waiting_rank:wait"


SIZES = {
    "one for each rank": lambda workers, room, together: [together] * (workers // together),
    "one for all": ray_gang.group_sizes,
}


def attempt(gang: RayGang, ranks: int) -> float:
    gang.stop()
    began = time.monotonic()
    gang.start(ranks, Bundle(0.1), TARGET, {})
    gang.prewarm(ranks)
    while any(rank.state != "running" for rank in gang.poll(0, 0.01).ranks):
        if time.monotonic() > began + 300:
            raise TimeoutError("the ranks were not up after 300 s")
    return time.monotonic() - began


def actors() -> tuple[int, float]:
    """Return how many actors there are, and their memory in MB."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "WorkerHost" in " ".join(process.cmdline()):
                found.append(process.memory_full_info().pss / 1e6)
    return len(found), sum(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    name, here = f"bench-{uuid.uuid4().hex}", Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parents[1])])
    with contextlib.closing(SharedImports(name, TARGET)), lean_start():
        ray.init(
            num_cpus=max(2, asked.ranks // 8),
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            logging_level="warning",
            runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}},
        )
        try:
            found: dict[str, list[tuple[float, ...]]] = {name: [] for name in SIZES}
            for _ in range(asked.rounds):
                for variant, rows in found.items():
                    ray_gang.group_sizes = SIZES[variant]
                    with contextlib.closing(RayGang(name)) as gang:
                        times = [attempt(gang, asked.ranks), attempt(gang, asked.ranks)]
                        cost = actors()
                        times += [attempt(gang, asked.ranks - 1), attempt(gang, asked.ranks)]
                        rows.append((*cost, *times))
                    time.sleep(2.0)  # so that Ray's processes are gone
            for variant, rows in found.items():
                count, memory, *times = (statistics.median(column) for column in zip(*rows, strict=True))
                first, again, fewer, more = times
                print(
                    f"{asked.ranks} ranks, {variant}: {count:.0f} actors, {memory:.0f} MB; first {first:.2f} s, "
                    f"next {again:.2f} s, fewer {fewer:.2f} s, all {more:.2f} s",
                    flush=True,
                )
        finally:
            ray.shutdown()


if __name__ == "__main__":
    main()
