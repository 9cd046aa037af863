"""How long process groups take to make: on the fake group for many ranks, beside torch's own; on real gloo for few.

    python tests/bench/bench_groups.py [--ranks 8 32] [--rounds 5]

On the fake group nothing is sent, so what is measured is what one rank computes. The layouts of the peers' device mesh
have the same axes. With gloo every rank is a process that is forked from this one, joins the group of all ranks, makes
the groups of its layout, and does one sum over all ranks and one in each of its groups. Three variants take turns: the
connections of every group made at once and groups of all ranks by all ranks (torch's default), the same with lazy
connections, and this project's mesh with lazy connections. Sockets are counted after the sums.

`--used` counts the collectives of each group on real ranks that train and evaluate, under several layouts of 8 ranks.

`--cuda` measures what gloo costs beside NCCL, where groups have both or NCCL alone. A backend without work stands for
NCCL, so what NCCL takes is not in the figures. Each rank makes its groups, and does one sum over all ranks on its host.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import statistics
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import paths  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.parallel import mesh as meshes
from orchestrator.parallel.device import LAZY_GLOO
from orchestrator.parallel.layout import AXES, Layout
from orchestrator.parallel.mesh import Mesh

LARGE = (Layout(pp=8, dp=32, tp=8, zero=2), Layout(pp=16, dp=128, tp=8, zero=2))
"""Layouts of 2,048 and 16,384 ranks."""


def of_torch(layout: Layout) -> object:
    return init_device_mesh("cpu", tuple(getattr(layout, axis) for axis in AXES), mesh_dim_names=AXES)


def on_fake_group(make: Callable[[Layout], object], layout: Layout) -> float:
    dist.init_process_group("fake", store=FakeStore(), rank=layout.world // 3, world_size=layout.world)
    started = time.perf_counter()
    make(layout)
    seconds = time.perf_counter() - started
    dist.destroy_process_group()
    return seconds


def sockets() -> int:
    """Return how many sockets this process has open."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket")
    return found


def threads() -> int:
    """Return how many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def meet(backend: str, port: int, rank: int, layout: Layout) -> None:
    """Let a process of one thread join the others at a port, with connections that are made when they are needed."""
    torch.set_num_threads(1)
    os.environ[LAZY_GLOO] = "1"
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=layout.world)


def join_with_gpu(variant: str, port: int, rank: int, layout: Layout, answer: Connection) -> None:
    """The program of one rank with real gloo, and with a stand-in for NCCL."""
    try:
        meet("cpu:gloo,cuda:fake", port, rank, layout)
        dist.all_reduce(torch.ones(1))
        before = sockets(), threads()
        answer.send("ready")
        answer.recv()
        started = time.perf_counter()
        alone = {"both": None, "NCCL alone": "cuda:fake"}[variant]
        meshes.backend_of_groups = lambda layout: alone
        Mesh(layout)
        seconds = time.perf_counter() - started
        dist.all_reduce(torch.ones(1))
        answer.send((seconds, sockets() - before[0], threads() - before[1]))
        answer.recv()
    except Exception:
        traceback.print_exc()
    os._exit(0)


def join(variant: str, port: int, rank: int, layout: Layout, answer: Connection) -> None:
    """The program of one rank with real gloo."""
    try:
        torch.set_num_threads(1)
        os.environ.pop(LAZY_GLOO, None)
        if variant != "torch":
            os.environ[LAZY_GLOO] = "1"
        store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        answer.send("ready")
        answer.recv()
        before = sockets()
        started = time.perf_counter()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world)
        one = torch.ones(1)
        if variant == "ours":
            handles = [group for group in Mesh(layout)._made.values() if group is not None]
        else:
            mesh = of_torch(layout)
            handles = [dist.group.WORLD, *(mesh.get_group(axis) for axis in AXES)]  # type: ignore[attr-defined]
        for handle in handles:
            dist.all_reduce(one, group=handle)
        seconds = time.perf_counter() - started
        answer.send((seconds, sockets() - before))
        answer.recv()
    except Exception:
        traceback.print_exc()
    os._exit(0)


def on_gloo(program: Callable[..., None], variant: str, layout: Layout, port: int) -> tuple[float, ...]:
    """Return the seconds of the slowest rank, and in the mean what else each rank counts."""
    context = mp.get_context("fork")
    pipes = [context.Pipe() for _ in range(layout.world)]
    ranks = [
        context.Process(target=program, args=(variant, port, rank, layout, pipes[rank][1]))
        for rank in range(layout.world)
    ]
    for each in ranks:
        each.start()
    for _ in range(2):
        found = [pipe.recv() for pipe, _ in pipes]
        for pipe, _ in pipes:
            pipe.send("go on")
    for each in ranks:
        each.join(30)
        each.kill()
    seconds, *counts = zip(*found, strict=True)
    return max(seconds), *map(statistics.mean, counts)


def on_gpus(worlds: list[int], rounds: int) -> None:
    print(
        "gloo beside a stand-in for NCCL: the slowest rank's seconds, a rank's further sockets and threads, medians"
    )
    port = 29900
    for world in worlds:
        # Like a node of a large layout: tensor parallelism within, pipelines and copies across.
        layout = Layout(pp=2, dp=world // 4, tp=2, zero=3, shard=world // 8)
        found: dict[str, list[tuple[float, ...]]] = {"both": [], "NCCL alone": []}
        for _ in range(rounds):
            for variant, rows in found.items():
                port += 1
                rows.append(on_gloo(join_with_gpu, variant, layout, port))
        for variant, rows in found.items():
            seconds, more, started = (statistics.median(column) for column in zip(*rows, strict=True))
            print(
                f"  {world:4} ranks, {variant:10}: {seconds:.4f} s, {more:.0f} sockets, {started:.0f} threads",
                flush=True,
            )


MOE = {"model": "mixtral-tiny", "changes": {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64, "layers": 2,
       "moe": {"experts": 4, "intermediate": 32}}}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "dp8": {"layout": {"dp": 8}},
    "dp8 zero1": {"layout": {"dp": 8, "zero": 1}},
    "dp8 zero3": {"layout": {"dp": 8, "zero": 3}},
    "dp8 zero3 shard2": {"layout": {"dp": 8, "zero": 3, "shard": 2}},
    "dp8 zero2 shard4": {"layout": {"dp": 8, "zero": 2, "shard": 4}},
    "pp2 dp2 tp2": {"layout": {"pp": 2, "dp": 2, "tp": 2}},
    "pp2 dp2 tp2 zero3": {"layout": {"pp": 2, "dp": 2, "tp": 2, "zero": 3}},
    "dp2 cp2 tp2 zero1": {"layout": {"dp": 2, "cp": 2, "tp": 2, "zero": 1}},
    "dp2 cp2 tp2 muon": {"layout": {"dp": 2, "cp": 2, "tp": 2, "zero": 1}, "optimizer": "muon"},
    "dp8 ep2": {"layout": {"dp": 8, "ep": 2}, **MOE},
    "dp8 ep2 zero3": {"layout": {"dp": 8, "ep": 2, "zero": 3}, **MOE},
    "dp8 ep2 zero3 shard4": {"layout": {"dp": 8, "ep": 2, "zero": 3, "shard": 4}, **MOE},
    "dp8 ep2 zero3 shard2": {"layout": {"dp": 8, "ep": 2, "zero": 3, "shard": 2}, **MOE},
    "dp4 tp2 ep4": {"layout": {"dp": 4, "tp": 2, "ep": 4}, **MOE},
    "pp2 dp4 ep2 zero2 shard2": {"layout": {"pp": 2, "dp": 4, "ep": 2, "zero": 2, "shard": 2}, **MOE},
}


def used() -> None:
    """Print the groups of each case, with the most collectives of any rank; `idle` groups had none on any rank."""
    from harness import finished

    from cluster.workers.process_gang import ProcessGang

    small = {"hidden": 32, "heads": 4, "kv_heads": 2, "intermediate": 64, "layers": 2, "max_positions": 64}
    config = {"changes": small, "vocabulary": 64, "length": 16, "batch": 16, "steps": 2}
    with contextlib.closing(ProcessGang()) as gang:
        for name, case in CASES.items():
            try:
                ranks = finished(8, config | case, "parallel_ranks:groups", gang)
            except AssertionError as error:
                print(f"  {name}: {error}", flush=True)
                continue
            counts: dict[str, int] = {}
            for rank in ranks:
                for group, calls in rank["groups"].items():
                    counts[group] = max(counts.get(group, 0), calls)
            others = max(rank["others"] for rank in ranks)
            idle = [group for group, calls in counts.items() if not calls]
            text = ", ".join(f"{group}: {calls}" for group, calls in counts.items())
            print(f"  {name}: {text}; others {others}; idle: {', '.join(idle) or 'none'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cuda", action="store_true", help="only what gloo costs beside NCCL")
    parser.add_argument("--used", action="store_true", help="only which groups are made, and how often used")
    asked = parser.parse_args()
    if asked.used:
        used()
        return
    if asked.cuda:
        on_gpus(asked.ranks, asked.rounds)
        return
    print("fake group, one rank, median seconds")
    for layout in LARGE:
        times: dict[str, list[float]] = {"torch": [], "ours": []}
        for _ in range(asked.rounds):
            times["torch"].append(on_fake_group(of_torch, layout))
            times["ours"].append(on_fake_group(Mesh, layout))
        theirs, ours = (statistics.median(times[name]) for name in ("torch", "ours"))
        print(
            f"  {layout.world:6} ranks: torch {theirs:.4f}, ours {ours:.4f}, ratio {theirs / ours:.1f}",
            flush=True,
        )
    print("gloo, the slowest rank's seconds and a rank's sockets, medians")
    port = 29600
    for world in asked.ranks:
        layout = Layout(pp=2, dp=world // 4, tp=2)
        found: dict[str, list[tuple[float, ...]]] = {"torch": [], "torch, lazy": [], "ours": []}
        for _ in range(asked.rounds):
            for variant, rows in found.items():
                port += 1
                rows.append(on_gloo(join, variant, layout, port))
        for variant, rows in found.items():
            seconds, count = (statistics.median(column) for column in zip(*rows, strict=True))
            print(f"  {world:4} ranks, {variant:11}: {seconds:.3f} s, {count:.0f} sockets", flush=True)


if __name__ == "__main__":
    main()
