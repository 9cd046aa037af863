"""Snapshots of many ranks: requests and seconds of a snapshot, of the search for the newest, and of a load.

    python tests/bench/bench_snapshots.py                      # 512 writers on 64 servers, and smaller
    python tests/bench/bench_snapshots.py --writers 64 --servers 8 --bytes 1000000
    python tests/bench/bench_snapshots.py --cost 1 4 16        # what a snapshot costs a rank, by MB of its part

The writers and the servers are the real classes. All servers are in one process and all writers in another, a thread
each, so both share this machine's processors: a snapshot of the whole gang is measured, as if all ranks gave theirs at
the same moment. A request is a message with its answer.

The cost is processor time, which a busy machine does not change: of the rank's own thread, which only copies, of the
process that writes, and of the other node's server. The last two work while the next step computes.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from typing import Any

import paths  # noqa: F401
import psutil
import torch

from orchestrator.checkpoint.commit_store import Store
from orchestrator.checkpoint.peer_memory import PeerMemory
from orchestrator.checkpoint.pieces import TensorPiece, full_piece
from orchestrator.checkpoint.saver import Saver
from orchestrator.checkpoint.shared_memory import SharedBuffer
from orchestrator.checkpoint.snapshot_writer import Placement, SnapshotWriter

TOKEN = "bench"
SERVERS = """
import json, sys
from orchestrator.checkpoint.snapshot_server import SnapshotServer
servers = [SnapshotServer({token!r}) for _ in range({count})]
print(json.dumps([server.address for server in servers]), flush=True)
sys.stdin.read()
"""
REQUESTS: Counter[str] = Counter()
LOCK = threading.Lock()


def counting() -> None:
    """Count the requests of all clients of this process."""
    ask = PeerMemory._ask_on

    def counted(self: PeerMemory, *arguments: Any) -> Any:
        with LOCK:
            REQUESTS[arguments[2]["do"]] += 1
        return ask(self, *arguments)

    PeerMemory._ask_on = counted  # type: ignore[method-assign]


class Writer:
    """One rank: its memory, and the writer of its snapshots."""

    def __init__(self, number: int, writers: int, addresses: list[str], size: int) -> None:
        per_node = writers // len(addresses)
        node = number // per_node
        other = (node + 1 + number % per_node % (len(addresses) - 1)) % len(addresses)
        self.buffers = [SharedBuffer(), SharedBuffer()]
        placement = Placement(TOKEN, addresses[node], addresses[other], 1, "one")
        files = [(buffer.fd, buffer.note) for buffer in self.buffers]
        self.piece = TensorPiece(
            "model.w", (writers * (size // 4),), (number * (size // 4),), torch.ones(size // 4)
        )
        self.writer = SnapshotWriter(placement, number, writers, files)

    def save(self, step: int) -> str:
        """Make a snapshot. Return why it failed, empty if it did not."""
        buffer = self.buffers[step % 2]
        request = buffer.fill([self.piece])
        meta = {"position": 0, "receipt": ""}
        data = memoryview(buffer._map)[: request["bytes"]]  # type: ignore[arg-type]
        return self.writer.save(step, step % 2, data, request["pieces"], meta=meta, complete=step - 1).reason


def measured(label: str, call: Any) -> Any:
    """Print the requests and the seconds of a call, and return its result."""
    REQUESTS.clear()
    began = time.perf_counter()
    result = call()
    print(f"  {label}: {time.perf_counter() - began:.3f} s, {dict(REQUESTS)}", flush=True)
    return result


def snapshot(writers: list[Writer], step: int) -> None:
    """Make one snapshot of all writers at the same time."""
    threads = [threading.Thread(target=lambda w=writer: reasons.append(w.save(step))) for writer in writers]
    reasons: list[str] = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(reasons), next(filter(None, reasons))


def bench(writers: int, servers: int, size: int) -> None:
    """Measure one number of writers and servers."""
    code = SERVERS.format(token=TOKEN, count=servers)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        addresses = json.loads(process.stdout.readline())
        print(f"{writers} writers on {servers} servers, {size} bytes each", flush=True)
        made = measured("start", lambda: [Writer(n, writers, addresses, size) for n in range(writers)])
        for step in (1, 2, 3, 4):
            measured(f"snapshot {step}", lambda step=step: snapshot(made, step))
        for each in made:
            each.writer._peers.close()
        memory = PeerMemory(TOKEN, addresses)
        found = measured("the newest, by the controller", memory.latest)
        assert found is not None
        assert found.step == 4
        measured("choose it", lambda: memory.rewind(4, 2, found))
        rank = PeerMemory(TOKEN, addresses)
        manifest = measured("its manifest, by a rank", lambda: rank.manifest(4))
        whole = measured("load all chunks", lambda: rank.reader(manifest).read("model.w"))
        assert bool((whole == 1).all())
        assert process.stdin is not None
        process.stdin.close()


def cost(megabytes: float, rounds: int = 40, tensors: int = 150) -> None:
    """Measure what a snapshot of so many bytes in so many tensors costs a rank."""
    code = SERVERS.format(token=TOKEN, count=2)
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as process,
    ):
        assert process.stdout is not None
        own, other = json.loads(process.stdout.readline())
        saver = Saver(Store(folder, attempt="one"), placement=Placement(TOKEN, own, other, 1, "one"))
        each = torch.ones(int(megabytes * 1e6) // 4 // tensors)
        pieces = [full_piece(f"model.layers.{n}.weight", each) for n in range(tensors)]
        meta = {"position": 0, "receipt": ""}
        own_seconds = []
        before = 0.0, 0.0
        writing = psutil.Process(saver._sidecar.process.pid)
        server = psutil.Process(process.pid)
        for step in range(1, rounds + 6):
            if step == 6:  # the first get memory
                before = _cpu(writing), _cpu(server)
            began = time.thread_time()
            saver.save(step, pieces, meta, durable=False, complete=step - 1)
            own_seconds.append(time.thread_time() - began)
            while saver.is_snapping:
                saver._receive(0.01)
        spent = [(_cpu(each) - at) / rounds for each, at in zip((writing, server), before, strict=True)]
        thread = statistics.median(own_seconds[5:])
        print(
            f"| {megabytes:g} | {thread * 1e3:.2f} ms | {spent[0] * 1e3:.2f} ms | {spent[1] * 1e3:.2f} ms "
            f"| {thread / 0.1:.1%} | {(thread + sum(spent)) / 0.1:.1%} |",
            flush=True,
        )
        saver.close()
        assert process.stdin is not None
        process.stdin.close()


def _cpu(process: psutil.Process) -> float:
    """Seconds of processor time of a process."""
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    """Measure the given sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--writers", type=int, nargs="+", default=[64, 128, 512])
    parser.add_argument("--servers", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--bytes", type=int, default=4096, help="bytes of a writer's part")
    parser.add_argument("--cost", type=float, nargs="+", help="MB of a rank's part")
    options = parser.parse_args()
    if options.cost:
        print("| MB per rank | rank's thread | writing process | server | thread of 100 ms | all of 100 ms |")
        print("|---|---|---|---|---|---|")
        for megabytes in options.cost:
            cost(megabytes)
        return
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    counting()
    for writers, servers in zip(options.writers, options.servers, strict=True):
        bench(writers, servers, options.bytes)


if __name__ == "__main__":
    main()
