"""The heartbeat server under many ranks, with synthetic clients that speak the real protocol.

    python tests/bench/bench_heartbeats.py                       64, 512, 1,024 and 4,096 ranks
    python tests/bench/bench_heartbeats.py 1024 --seconds 20

up      seconds until every rank is known, all of them connecting at once
core    share of a processor that the server uses once they are up
beats   heartbeats that arrive in a second
silence the longest time since the last heartbeat of any rank, as the controller sees it
death   seconds from a closed connection to the controller's knowledge of it, the longest of ten

The clients are threads of other processes. They beat as often as `rank_process` does in a gang of that size, and take a
step every 100 ms.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import selectors
import socket
import time

import paths  # noqa: F401

from cluster.workers.heartbeat import HeartbeatServer
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
        hello = {"token": token, "rank": rank, "pid": os.getpid(), "state": "running"}
        connections[rank].sendall(json.dumps(hello).encode() + b"\n")
    selector = selectors.DefaultSelector()
    for connection in connections.values():
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    interval = heartbeat_interval(world)
    due = {rank: time.monotonic() + interval * number / len(ranks) for number, rank in enumerate(ranks)}
    begun = time.monotonic()
    to_die = list(ranks)[:dying]
    while (now := time.monotonic()) < until:
        for rank, at in due.items():
            if at <= now and rank in connections:
                message = {"step": int((now - begun) / STEP)}  # all that changes in a rank that trains
                with contextlib.suppress(BlockingIOError):  # the server is behind
                    connections[rank].sendall(json.dumps(message).encode() + b"\n")
                due[rank] = now + interval
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("ranks", nargs="*", type=int, default=[64, 512, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=15.0)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    multiprocessing.set_start_method("spawn")
    print(f"{'ranks':>6} {'up s':>7} {'core':>6} {'beats/s':>8} {'silence s':>9} {'death ms':>8}")
    for ranks in options.ranks:
        found = serve(ranks, options.seconds)
        print(
            f"{ranks:>6,} {found['up']:>7.2f} {found['core']:>6.1%} {found['beats']:>8,.0f}"
            f" {found['silence']:>9.2f} {1000 * found['death']:>8.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
