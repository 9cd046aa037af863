"""The heartbeat server under many ranks, with synthetic clients that speak the real protocol.

    python tests/bench/bench_heartbeats.py                       64, 512, 1,024 and 4,096 ranks
    python tests/bench/bench_heartbeats.py 1024 --seconds 20
    python tests/bench/bench_heartbeats.py 512 1024 --processes  real processes, forked as those of a gang

up      seconds until every rank is known, all of them connecting at once
core    share of a processor that the server uses once they are up
beats   heartbeats that arrive in a second
silence the longest time since the last heartbeat of any rank, as the controller sees it
death   seconds from a closed connection to the controller's knowledge of it, the longest of ten

ranks   with --processes: share of a processor that all ranks together use to beat

The clients are threads of other processes. They beat as often as `rank_process` does in a gang of that size, and take a
step every 100 ms.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import multiprocessing
import os
import resource
import selectors
import signal
import socket
import time

import paths  # noqa: F401
import psutil

from cluster.workers.gang import Bundle
from cluster.workers.heartbeat import HeartbeatServer
from cluster.workers.process_gang import ProcessGang
from cluster.workers.rank_process import heartbeat_interval

STEP = 0.1
PROCESSES = 2


def beat(
    address: str,
    token: str,
    *,
    ranks: range,
    world: int,
    until: float,
    dying: int,
    deaths: multiprocessing.Queue,
) -> None:
    """Beat for some ranks until the time is over. The first `dying` ranks end one after another in the last seconds."""
    host, _, port = address.rpartition(":")
    connections = {}
    for rank in ranks:
        connections[rank] = socket.create_connection((host, int(port)), 60.0)
        hello = {"token": token, "rank": rank, "pid": os.getpid()}
        connections[rank].sendall(json.dumps(hello).encode() + b"\n")
    selector = selectors.DefaultSelector()
    for connection in connections.values():
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    interval = heartbeat_interval(world)
    begun = time.monotonic()
    due = collections.deque(
        (begun + interval * number / len(ranks), rank) for number, rank in enumerate(ranks)
    )
    begun_ranks: set[int] = set()
    to_die = list(ranks)[:dying]
    while (now := time.monotonic()) < until:
        while due and due[0][0] <= now:
            _, rank = due.popleft()
            if rank not in connections:
                continue
            due.append((now + interval, rank))
            step = {"step": int((now - begun) / STEP)}
            news = step if rank in begun_ranks else {"state": "running", **step}
            begun_ranks.add(rank)
            with contextlib.suppress(BlockingIOError):  # the server is behind
                connections[rank].sendall(json.dumps(news).encode() + b"\n")
        if to_die and now > until - 0.4 * len(to_die):
            rank = to_die.pop()
            selector.unregister(connections[rank])
            deaths.put((rank, time.monotonic()))
            connections.pop(rank).close()
        for key, _ in selector.select(0.005):
            key.fileobj.recv(1 << 16)


def serve(world: int, seconds: float) -> dict[str, float]:
    """Measure one number of ranks."""
    server = HeartbeatServer("127.0.0.1")
    token = server.expect(["127.0.0.1"] * world)
    begun = time.monotonic()
    until = begun + 20.0 + seconds
    deaths: multiprocessing.Queue = multiprocessing.Queue()
    size = world // PROCESSES
    clients = [
        multiprocessing.Process(
            target=beat,
            args=(server.address, token),
            kwargs={
                "ranks": range(size * number, size * (number + 1)),
                "world": world,
                "until": until,
                "dying": 5,
                "deaths": deaths,
            },
        )
        for number in range(PROCESSES)
    ]
    for client in clients:
        client.start()
    up = float("nan")
    while time.monotonic() < begun + 20.0:
        status = server.poll(0, 0.05)
        if all(rank.state == "running" for rank in status.ranks):
            up = time.monotonic() - begun
            break
    time.sleep(max(0.0, begun + 15.0 - time.monotonic()))
    before, at = time.process_time(), time.monotonic()
    silence = 0.0
    beats = 0
    last = [0.0] * world
    known: dict[int, float] = {}
    while time.monotonic() < until:
        status = server.poll(0, heartbeat_interval(world) / 2)
        for rank in status.ranks:
            if rank.state == "dead":
                known.setdefault(rank.rank, time.monotonic())
            else:
                silence = max(silence, status.at - rank.last_heartbeat)
                beats += rank.last_heartbeat != last[rank.rank]
                last[rank.rank] = rank.last_heartbeat
    core = (time.process_time() - before) / (time.monotonic() - at)
    for client in clients:
        client.join()
    died = {}
    while not deaths.empty():
        rank, moment = deaths.get()
        died[rank] = known.get(rank, float("inf")) - moment
    server.close()
    return {
        "up": up,
        "core": core,
        "beats": beats / (until - at),
        "silence": silence,
        "death": max(died.values(), default=float("nan")),
    }


def serve_processes(world: int, seconds: float) -> dict[str, float]:
    """Measure a gang of so many processes, which do nothing but beat."""
    gang = ProcessGang()
    try:
        gang.start(1, Bundle(), "waiting_rank:beat", {})  # so that the process that starts ranks is there
        while gang.poll(0, 0.05).ranks[0].step < 0:
            pass
        begun = time.monotonic()
        gang.start(world, Bundle(), "waiting_rank:beat", {})
        status = gang.poll(0)
        while any(rank.step < 0 for rank in status.ranks):
            status = gang.poll(0, 0.05)
        up = time.monotonic() - begun
        time.sleep(3.0)
        pids = [rank.pid for rank in status.ranks]
        used, before, at = used_by(pids), time.process_time(), time.monotonic()
        beats, silence, last = 0, 0.0, [0.0] * world
        while time.monotonic() < at + seconds:
            status = gang.poll(0, heartbeat_interval(world) / 2)
            for rank in status.ranks:
                silence = max(silence, status.at - rank.last_heartbeat)
                beats += rank.last_heartbeat != last[rank.rank]
                last[rank.rank] = rank.last_heartbeat
        elapsed = time.monotonic() - at
        core, all_ranks = (time.process_time() - before) / elapsed, (used_by(pids) - used) / elapsed
        deaths = []
        for rank in range(1, 11):
            killed = time.monotonic()
            os.kill(pids[rank], signal.SIGKILL)
            while gang.poll(0, 1.0).ranks[rank].state != "dead":
                pass
            deaths.append(time.monotonic() - killed)
    finally:
        gang.close()
    return {
        "up": up,
        "core": core,
        "ranks": all_ranks,
        "beats": beats / elapsed,
        "silence": silence,
        "death": max(deaths),
    }


def used_by(pids: list[int]) -> float:
    """Return the seconds of a processor that these processes have used."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="*", type=int, default=[64, 512, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--processes", action="store_true", help="ranks are processes of their own")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    multiprocessing.set_start_method("spawn")
    ranks_column = f"{'ranks':>6} " if options.processes else ""
    print(
        f"{'number':>6} {'up s':>7} {'core':>6} {ranks_column}{'beats/s':>8} {'silence s':>9} {'death ms':>8}"
    )
    for number in options.ranks:
        found = (serve_processes if options.processes else serve)(number, options.seconds)
        ranks = f"{found['ranks']:>6.1%} " if options.processes else ""
        print(
            f"{number:>6,} {found['up']:>7.2f} {found['core']:>6.1%} {ranks}{found['beats']:>8,.0f}"
            f" {found['silence']:>9.2f} {1000 * found['death']:>8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
